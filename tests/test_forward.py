"""Networks over a batch: chunks, positions, and the passes that losses share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import (
    ENCODER,
    NO_DROPOUT,
    SIMCSE,
    VOCABULARY,
    config_of,
    random_batch,
    shared_forward,
    views_of,
)

from diffcse_jax.batch import TokenRows
from diffcse_jax.models import layers
from diffcse_jax.models.forward import Computation, Networks, row_keys
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.training import networks

VALUES = np.random.default_rng(0).normal(size=(8, 6, 3)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)


def map_chunks(function, chunks, *rows, devices=1):
    computation = Computation(Networks(VOCABULARY, {}), {}, chunks, devices)
    return computation.map_chunks(function, *rows)


def test_chunks_need_the_memory_of_one_chunk():
    def temporary_bytes(chunks: int) -> int:
        def loss(weights, values):
            def of_rows(values):
                for _ in range(8):
                    values = jnp.tanh(values @ weights)
                return values.sum(axis=-1)

            return (map_chunks(of_rows, chunks, values) ** 2).sum()

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4096, 8))]
        return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16) < temporary_bytes(1) / 4


def test_every_device_works_in_every_chunk():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = jax.device_put(np.zeros((32, 6, 3), np.float32), sharding)
    function = jax.jit(
        lambda values: map_chunks(lambda part: jnp.tanh(part @ WEIGHTS), 2, values, devices=8)
    )
    program = function.lower(values).compile()
    assert not [
        name
        for name in ("all-gather", "all-to-all", "collective-permute")
        if name in program.as_text()
    ]
    assert program.output_shardings.shard_shape((32, 6, 4)) == (4, 6, 4)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_gathered_positions_get_the_function_and_its_gradient_and_others_zero(share):
    where = jnp.asarray(np.random.default_rng(2).random((8, 6)) < share)

    def loss(weights, values, gathered):
        def function(values):
            return jnp.tanh(values @ weights).sum(axis=-1)

        computation = Computation(Networks(VOCABULARY, {}), {})
        outputs = jnp.where(where, function(values), 0.0)
        if gathered:
            outputs = computation.gather_positions(function, where, values, shares=(0.25, 0.5, 1.0))
        return (outputs**2).sum(), outputs

    def run(gathered):
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(WEIGHTS, VALUES, gathered)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), run(True), run(False)
    )


def forward_passes(*parts, read, keys: int, batch=None):
    """Return what `read` gives for the forward pass of each of `keys` keys."""
    config = config_of(SIMCSE, *parts)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    views = jax.tree.map(jnp.asarray, views_of(batch or random_batch()))

    def one_pass(key):
        return read(shared_forward(config, Computation(built.networks, built.params), views, key))

    run = jax.jit(one_pass)
    return [run(jax.random.key(seed)) for seed in range(keys)]


def test_views_of_the_same_text_are_equal_without_dropout_or_with_the_same_masks():
    ((one, other),) = forward_passes(
        NO_DROPOUT, read=lambda forward: forward.projected_views, keys=1
    )
    np.testing.assert_array_equal(one, other)
    shared = {"model": {"projector": "mlp", "dropout_masks": "shared"}}
    batch = random_batch()
    # one sentence eight times
    batch = {name: np.repeat(values[:1], 8, axis=0) for name, values in batch.items()}
    for z1, z2 in forward_passes(
        shared, read=lambda forward: forward.projected_views, keys=2, batch=batch
    ):
        np.testing.assert_array_equal(z1, z2)
        assert (np.ptp(z1, axis=0) > 1e-3).all()  # examples do not share their masks


def test_a_mean_over_dropout_samples_has_less_variance():
    samples = 9
    passes = forward_passes(
        read=lambda forward: (forward.projected_views, forward.projected_means(samples)), keys=2
    )
    one, mean = (
        np.square(np.subtract(first, second)).mean() for first, second in zip(*passes, strict=True)
    )
    np.testing.assert_allclose(one / mean, samples, rtol=0.35)


def test_a_second_encoder_embeds_all_views_but_the_first():
    config = config_of(SIMCSE, NO_DROPOUT, {"contrast": {"second_encoder": True}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    for name, array in ENCODER.transformer.items():
        np.testing.assert_array_equal(built.params[f"second_encoder.{name}"], array)
    other = {name: 2 * array for name, array in ENCODER.transformer.items()}  # to tell them apart
    params = built.params | layers.prefixed(other, "second_encoder")
    views = jax.tree.map(jnp.asarray, views_of(random_batch(columns=3)))

    def second_views(params):
        computation = Computation(built.networks, params)
        by_view = shared_forward(config, computation, views, jax.random.key(0)).projected_views
        projector, expected = computation.network("projector"), []
        for view, name in enumerate(("encoder", "second_encoder", "second_encoder")):
            rows = TokenRows(views.input_ids[:, view], views.attention_mask[:, view])
            expected.append(projector(computation.network(name)(rows)[-1][:, 0]))
        return jnp.sum(by_view[1]), (by_view, expected)

    grads, (by_view, expected) = jax.jit(jax.grad(second_views, has_aux=True))(params)
    for ours, theirs in zip(by_view, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not any(grad.any() for grad in layers.subset(grads, "encoder").values())
    assert any(grad.any() for grad in layers.subset(grads, "second_encoder").values())


def test_prefixes_cut_the_results_of_the_same_passes(monkeypatch):
    """Matryoshka losses of several sizes must not run the encoder again."""
    passes, call = [], Transformer.__call__
    monkeypatch.setattr(
        Transformer, "__call__", lambda *args, **options: passes.append(1) or call(*args, **options)
    )

    def read(forward):
        keys = row_keys(jax.random.key(1), 8)
        of_rows = forward.projected(forward.batch.anchors, keys, name="again")
        return forward.projected_views, forward.projected_means(3), of_rows

    def whole_and_prefixes(forward):
        prefixes = [read(forward.prefix(size)) for size in (4, 8)]
        return read(forward), *prefixes

    ((whole, *prefixes),) = forward_passes(read=whole_and_prefixes, keys=1)
    assert len(passes) == 3  # the views, the further samples in one loop, the rows
    for size, prefix in zip((4, 8), prefixes, strict=True):
        cut = jax.tree.map(lambda full: full[..., :size], whole)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, prefix, cut)
