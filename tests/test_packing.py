"""Packed tokens give what padded rows give, and cost less."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_transformer import FAMILIES, random_params, sizes

from diffcse_jax.models import parameters
from diffcse_jax.models.packing import blocks_of, pack, pack_ids, pack_rows, unpack
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.training.rows import real_share, row_keys

PAD = 1
LENGTHS = np.array([3, 10, 5, 7, 2, 2, 9, 4])
MASK = (np.arange(10) < LENGTHS[:, None]).astype(np.int32)
IDS = np.where(MASK, np.random.default_rng(0).integers(2, 20, MASK.shape), PAD).astype(np.int32)
STATES = np.random.default_rng(1).normal(size=(8, 10, 3)).astype(np.float32)


def one_device(monkeypatch) -> None:
    monkeypatch.setattr("diffcse_jax.models.packing.jax.device_count", lambda: 1)


def test_real_tokens_lie_side_by_side(monkeypatch):
    one_device(monkeypatch)
    packing = pack_rows(jnp.asarray(MASK), 0.6)
    count = LENGTHS.sum()
    assert pack_ids(jnp.asarray(IDS), packing, fill=PAD).tolist() == [*IDS[MASK > 0], *[PAD] * (48 - count)]
    packed = np.asarray(pack(jnp.asarray(STATES), packing))
    np.testing.assert_array_equal(packed[:count], STATES[MASK > 0])
    assert not packed[count:].any()
    np.testing.assert_array_equal(unpack(jnp.asarray(packed), packing), STATES * MASK[:, :, None])


@given(st.lists(st.integers(1, 12), min_size=8, max_size=32).filter(lambda lengths: len(lengths) % 8 == 0))
def test_each_device_packs_its_own_rows(lengths):
    lengths = np.array(lengths, np.int32)
    mask = (np.arange(12) < lengths[:, None]).astype(np.int32)
    packing = pack_rows(jnp.asarray(mask), 15 / 16)
    rows_per_block = len(lengths) // blocks_of(len(lengths))
    for block, positions in enumerate(np.asarray(packing.positions)):
        rows = mask[block * rows_per_block : (block + 1) * rows_per_block].reshape(-1)
        capacity = math.ceil(15 / 16 * rows.size)
        np.testing.assert_array_equal(positions[positions < rows.size], np.flatnonzero(rows)[:capacity])


def test_nothing_is_packed_where_nothing_is_gained():
    assert pack_rows(jnp.asarray(MASK), 1.0) is None
    states = jnp.asarray(STATES)
    assert pack(states, None) is states
    assert unpack(states, None) is states


def test_gradients_come_back_to_where_values_came_from():
    packing = pack_rows(jnp.asarray(MASK), 1 - 1e-6)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=STATES.shape).astype(np.float32))
    loss = lambda states: (unpack(jnp.sin(pack(states, packing)), packing) * weights).sum()  # noqa: E731
    expected = np.cos(STATES) * weights * MASK[:, :, None].astype(np.float32)
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(STATES)), expected, rtol=1e-6)


@given(
    st.lists(st.tuples(*[st.integers(1, 12)] * 3), min_size=16, max_size=16),
    st.integers(1, 3),
    st.sampled_from([0, 16, 8, 4, 1]),
)
def test_the_share_holds_the_tokens_of_every_part(lengths, columns, chunk_size):
    lengths = np.array(lengths, np.int32)[:, :columns]
    share = real_share(lengths, 12, chunk_size)
    assert (16 * share).is_integer()
    assert share <= 1.0
    views = np.repeat(lengths, 2, axis=1) if columns == 1 else lengths
    chunks = 16 // (chunk_size or 16)
    for rows in (views.reshape(-1), views[:, 0]):
        for chunk in range(chunks):
            part = rows[chunk::chunks]
            blocks = part.reshape(blocks_of(len(part)), -1)
            assert (blocks.sum(axis=1) <= math.ceil(share * blocks.shape[1] * 12)).all()


def test_the_share_is_no_larger_than_need_be(monkeypatch):
    one_device(monkeypatch)
    assert real_share(np.full((4, 1), 6, np.int32), 12, 0) == 0.5
    assert real_share(np.array([[12], [1], [1], [1]], np.int32), 12, 0) == 5 / 16  # 15 of 48
    assert real_share(np.array([[12], [1], [1], [1]], np.int32), 12, 1) == 1.0


@functools.partial(
    jax.jit,
    static_argnames=("family", "share", "dropped", "last_positions"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def outputs_and_gradients(family, params, share, *, dropped=True, last_positions=None):
    definition = parameters.definition(functools.partial(Transformer, sizes(family)))
    mask = jnp.asarray(MASK)
    condition = jnp.asarray(np.random.default_rng(3).normal(size=(8, 16)).astype(np.float32))

    def loss(params):
        states = parameters.bind(definition, params)(
            jnp.asarray(IDS),
            mask,
            condition=condition,
            keys=row_keys(jax.random.key(0), 8) if dropped else None,
            packing=pack_rows(mask, share),
            last_positions=last_positions,
        )["hidden_states"]
        real = [layer * mask[:, : layer.shape[1], None].astype(layer.dtype) for layer in states]
        return sum(jnp.sin(layer).sum() for layer in real), real

    (_, states), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return states, grads


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        pytest.param("bert", {"dropped": False}, marks=pytest.mark.slow),
        pytest.param("bert", {"last_positions": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_packed_encoder_is_the_encoder(family, options):
    params = random_params(sizes(family))
    packed, packed_grads = outputs_and_gradients(family, params, 1 - 1e-6, **options)
    padded, padded_grads = outputs_and_gradients(family, params, 1.0, **options)
    for ours, theirs in zip(packed, padded, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, grad in padded_grads.items():
        scale = max(1.0, np.abs(grad).max())
        np.testing.assert_allclose(packed_grads[name], grad, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


def test_a_packed_encoder_computes_no_padding(monkeypatch):
    one_device(monkeypatch)
    params = random_params(sizes())
    flops = [
        outputs_and_gradients.lower("bert", params, share).compile().cost_analysis()["flops"] for share in (0.5, 1.0)
    ]
    assert flops[0] < 0.65 * flops[1]  # all but attention is halved
