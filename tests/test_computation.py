import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiny_networks import ENCODER, SIZES, first_column, random_batch

from diffcse_jax.batch import TokenRows
from diffcse_jax.models import parameters
from diffcse_jax.models.computation import at_positions, in_chunks, mean_where, row_keys
from diffcse_jax.models.transformer import Transformer

VALUES = np.random.default_rng(0).normal(size=(8, 6, 3)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)


def encoder() -> Transformer:
    return parameters.bind(parameters.definition(lambda rngs: Transformer(SIZES, rngs=rngs)), ENCODER.transformer)


@jax.jit
def run(rows, keys, condition=None):
    return encoder()(rows, keys=keys, condition=condition)["hidden_states"]


def rows_at(rows: TokenRows, which) -> TokenRows:
    return jax.tree.map(lambda values: values[which], rows)


def test_rows_together_are_the_rows_one_by_one():
    rows = first_column(random_batch(size=2))
    condition = jnp.asarray(np.random.default_rng(0).normal(size=(2, SIZES.hidden_size)).astype(np.float32))
    keys = row_keys(jax.random.key(0), 2)
    together = run(rows, keys, condition)
    for row in range(2):
        one = slice(row, row + 1)
        expected = run(rows_at(rows, one), keys[one], condition[one])
        for layer, expected_layer in zip(together, expected, strict=True):
            np.testing.assert_allclose(layer[one], expected_layer, rtol=1e-5, atol=1e-5)


def test_equal_rows_have_unequal_dropout_only_where_they_have_keys():
    rows = rows_at(first_column(random_batch()), np.array([0, 0]))
    first, second = run(rows, row_keys(jax.random.key(0), 2))[-1]
    assert (first != second).any()
    np.testing.assert_array_equal(*run(rows, None)[-1])


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_chunks_change_neither_values_nor_gradients(chunks):
    keys = row_keys(jax.random.key(0), 8)

    def loss(weights, chunks):
        def of_rows(values, keys):
            noise = jax.vmap(lambda key: jax.random.normal(key, (6, 4)))(keys)
            return {"outputs": jnp.tanh(values @ weights) + noise}

        outputs = in_chunks(of_rows, chunks, jnp.asarray(VALUES), keys)["outputs"]
        return (outputs * outputs[::-1]).sum(), outputs

    (_, outputs), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(WEIGHTS), chunks)
    (_, expected), expected_grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(WEIGHTS), 1)
    np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-5)  # entries are sums that cancel


def test_a_chunk_at_a_time_keeps_the_activations_of_one():
    def temporary_bytes(chunks: int) -> int:
        def loss(weights, values):
            def of_rows(values):
                for _ in range(8):
                    values = jnp.tanh(values @ weights)
                return values.sum(axis=-1)

            return (in_chunks(of_rows, chunks, values) ** 2).sum()

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4096, 8))]
        return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16) < temporary_bytes(1) / 4


def test_every_device_works_in_every_chunk():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = jax.device_put(np.zeros((32, 6, 3), np.float32), sharding)
    function = jax.jit(lambda values: in_chunks(lambda part: jnp.tanh(part @ WEIGHTS), 2, values))
    program = function.lower(values).compile()
    assert not [name for name in ("all-gather", "all-to-all", "collective-permute") if name in program.as_text()]
    assert program.output_shardings.shard_shape((32, 6, 4)) == (4, 6, 4)


@functools.partial(jax.jit, static_argnames="shares")
def product_and_sum(where, shares):
    row_numbers = jnp.broadcast_to(jnp.arange(8.0)[:, None], where.shape)
    function = lambda values, row: (values @ WEIGHTS, values.sum(axis=-1) + row)  # noqa: E731
    return at_positions(function, where, jnp.asarray(VALUES), row_numbers, shares=shares)


@given(arrays.arrays(np.bool_, (8, 6)), st.sampled_from([(0.25, 0.5, 1.0), (1.0,)]))
def test_positions_have_what_the_function_gives_and_zero_elsewhere(where, shares):
    products, sums = product_and_sum(where, shares)
    np.testing.assert_allclose(products, np.where(where[..., None], VALUES @ WEIGHTS, 0.0), rtol=1e-5, atol=1e-6)
    expected = np.where(where, VALUES.sum(axis=-1) + np.arange(8.0)[:, None], 0.0)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_gradient_is_that_of_the_function_everywhere(share):
    where = jnp.asarray(np.random.default_rng(2).random((8, 6)) < share)

    def loss(weights, values, gathered):
        function = lambda values: jnp.tanh(values @ weights).sum(axis=-1)  # noqa: E731
        outputs = at_positions(function, where, values, shares=(0.25, 0.5, 1.0)) if gathered else function(values)
        return (jnp.where(where, outputs, 0.0) ** 2).sum()

    grads, expected = (jax.grad(loss, argnums=(0, 1))(WEIGHTS, VALUES, gathered) for gathered in (True, False))
    for ours, plain in zip(grads, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_mean_of_nothing_is_0():
    values = jnp.array([1.0, 2.0, 4.0])
    assert mean_where(values, jnp.array([True, False, True])) == 2.5
    assert mean_where(values, jnp.zeros(3, bool)) == 0.0
