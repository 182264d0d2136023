"""Packed tokens give what padded rows give, and cost less."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_transformer import random_params, sizes

from diffcse_jax.batch import (
    TokenRows,
    in_blocks,
    lay_out,
    pack,
    pack_ids,
    position_keys,
    token_keys,
    unpack,
)
from diffcse_jax.models import layers
from diffcse_jax.models.forward import row_keys
from diffcse_jax.models.transformer import Transformer

PAD = 1
LENGTHS = np.array([3, 10, 5, 7, 2, 2, 9, 4])
MASK = (np.arange(10) < LENGTHS[:, None]).astype(np.int32)
IDS = np.where(MASK, np.random.default_rng(0).integers(2, 20, MASK.shape), PAD).astype(np.int32)
UNOPTIMISED = {"xla_backend_optimization_level": 0}
OTHER_FAMILIES = ("roberta", "mpnet", "electra", "modernbert", "gte")
STATES = np.random.default_rng(1).normal(size=(8, 10, 3)).astype(np.float32)


def rows_with(blocks: int | None, capacity: int = 0) -> TokenRows:
    """The rows, laid out in blocks; None: padded."""
    layout = (
        None
        if blocks is None
        else lay_out(LENGTHS.reshape(blocks, -1), 10, capacity or 80 // blocks - 1)
    )
    return jax.tree.map(jnp.asarray, TokenRows(IDS, MASK, layout))


def test_real_tokens_lie_side_by_side():
    rows, count = rows_with(1, capacity=48), LENGTHS.sum()
    assert pack_ids(rows.input_ids, rows, fill=PAD).tolist() == [
        *IDS[MASK > 0],
        *[PAD] * (48 - count),
    ]
    packed = np.asarray(pack(jnp.asarray(STATES), rows))
    np.testing.assert_array_equal(packed[:count], STATES[MASK > 0])
    assert not packed[count:].any()
    np.testing.assert_array_equal(unpack(jnp.asarray(packed), rows), STATES * MASK[:, :, None])


@given(
    st.lists(st.integers(1, 12), min_size=8, max_size=32).filter(
        lambda lengths: len(lengths) % 8 == 0
    )
)
def test_each_device_packs_its_own_rows(lengths):
    blocks = in_blocks(np.array(lengths), devices=4, chunks=1)
    capacity = int(blocks.sum(axis=1).max())
    layout = lay_out(blocks, 12, capacity)
    real = (np.arange(12) < np.array(lengths)[:, None]).reshape(4, -1)
    for row, positions, slots in zip(real, layout.positions, layout.slots, strict=True):
        np.testing.assert_array_equal(positions[positions < row.size], np.flatnonzero(row))
        np.testing.assert_array_equal(slots[row], np.arange(row.sum()))
        assert (slots[~row] == capacity).all()
    with pytest.raises(
        ValueError, match=f"{capacity} tokens and its layout only {capacity - 1} slots"
    ):
        lay_out(blocks, 12, capacity - 1)


def test_a_block_holds_the_rows_that_are_computed_together():
    rows = np.arange(16)
    assert in_blocks(rows, devices=2, chunks=1).tolist() == [[*range(8)], [*range(8, 16)]]
    # The two views of an example are in one chunk.
    assert in_blocks(rows, devices=2, chunks=4).tolist() == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]
    ]  # fmt: skip


def test_without_a_layout_all_positions_are_tokens():
    states, rows = jnp.asarray(STATES), rows_with(None)
    np.testing.assert_array_equal(pack(states, rows), STATES.reshape(-1, 3))
    np.testing.assert_array_equal(unpack(pack(states, rows), rows), STATES)


def test_a_tokens_key_is_the_same_in_every_layout():
    keys = row_keys(jax.random.key(0), 8)
    padded, packed = (
        jax.random.key_data(token_keys(keys, rows)) for rows in (rows_with(None), rows_with(2))
    )
    positions = rows_with(2).layout.positions
    used = positions < 40
    for block in range(2):
        expected = padded.reshape(2, 40, -1)[block][positions[block][used[block]]]
        np.testing.assert_array_equal(packed.reshape(2, 39, -1)[block][used[block]], expected)
    first = jax.random.key_data(position_keys(keys, 3))
    np.testing.assert_array_equal(first, padded.reshape(8, 10, -1)[:, :3])


def test_gradients_return_to_the_packed_positions():
    rows = rows_with(2)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=STATES.shape).astype(np.float32))
    loss = lambda states: (unpack(jnp.sin(pack(states, rows)), rows) * weights).sum()  # noqa: E731
    expected = np.cos(STATES) * weights * MASK[:, :, None].astype(np.float32)
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(STATES)), expected, rtol=1e-6)


@functools.partial(
    jax.jit, static_argnames=("family", "dropped", "last_positions"), compiler_options=UNOPTIMISED
)
def outputs_and_gradients(family, params, rows, *, dropped=True, last_positions=None):
    definition = layers.definition(functools.partial(Transformer, sizes(family)))
    condition = jnp.asarray(np.random.default_rng(3).normal(size=(8, 16)).astype(np.float32))

    def loss(params):
        keys = row_keys(jax.random.key(0), 8) if dropped else None
        states = layers.bind(definition, params)(
            rows, condition=condition, keys=keys, last_positions=last_positions
        )
        real = [layer * MASK[:, : layer.shape[1], None].astype(layer.dtype) for layer in states]
        return sum(jnp.sin(layer).sum() for layer in real), real

    (_, states), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return states, grads


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {}),
        *(pytest.param(family, {}, marks=pytest.mark.slow) for family in OTHER_FAMILIES),
        pytest.param("bert", {"dropped": False}, marks=pytest.mark.slow),
        pytest.param("bert", {"last_positions": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_packed_encoder_is_the_encoder(family, options):
    params = random_params(sizes(family))
    packed, packed_grads = outputs_and_gradients(family, params, rows_with(2), **options)
    padded, padded_grads = outputs_and_gradients(family, params, rows_with(None), **options)
    for ours, theirs in zip(packed, padded, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, grad in padded_grads.items():
        scale = max(1.0, np.abs(grad).max())
        np.testing.assert_allclose(
            packed_grads[name], grad, rtol=1e-5, atol=1e-5 * scale, err_msg=name
        )


def test_a_packed_encoder_computes_no_padding():
    params = random_params(sizes())
    flops = [
        outputs_and_gradients.lower("bert", params, rows).compile().cost_analysis()["flops"]
        for rows in (rows_with(1, capacity=int(LENGTHS.sum())), rows_with(None))
    ]
    assert flops[0] < 0.68 * flops[1]  # all but attention is nearly halved
