from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.models import parameters


class Toy(nnx.Module):
    """Layers in a list, as a transformer has, one with batch statistics."""

    def __init__(self, layers: int = 12, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(3, 3, rngs=rngs) for _ in range(layers))
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] = self.count[...] + 1.0
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_names_are_paths():
    params, batch_stats = parameters.initial(Toy, jax.random.key(0))
    assert set(params) == {f"layers.{index}.{leaf}" for index in range(12) for leaf in ("kernel", "bias")}
    assert set(batch_stats) == {"count"}


def test_shapes_are_those_of_the_initial_arrays_and_hold_none():
    shapes, (params, _) = parameters.shapes(Toy), parameters.initial(Toy, jax.random.key(0))
    assert shapes == {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in params.items()}


def test_initial_arrays_follow_the_key():
    first, again, other = (parameters.initial(Toy, jax.random.key(seed))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["layers.3.kernel"], again["layers.3.kernel"])
    assert not np.array_equal(first["layers.3.kernel"], other["layers.3.kernel"])
    assert not np.array_equal(first["layers.3.kernel"], first["layers.4.kernel"])


def test_bound_module_computes_what_the_original_does():
    """With twelve layers, of which `10` and `11` sort before `2` as text."""
    module = Toy(rngs=nnx.Rngs(jax.random.key(0)))
    params, batch_stats = parameters.initial(Toy, jax.random.key(0))
    bound = parameters.bind(parameters.definition(Toy), dict(sorted(params.items())), batch_stats)
    x = jnp.linspace(-1.0, 1.0, 3)[None]
    np.testing.assert_array_equal(bound(x), module(x))


def test_binding_works_under_jit_with_a_static_definition():
    definition = parameters.definition(partial(Toy, 2))
    params, batch_stats = parameters.initial(partial(Toy, 2), jax.random.key(0))

    @partial(jax.jit, static_argnums=0)
    def apply(definition: nnx.GraphDef, params: parameters.Params, batch_stats: parameters.Params):
        module = parameters.bind(definition, params, batch_stats)
        return module(jnp.ones((1, 3))), parameters.batch_stats_of(module)

    output, updated = apply(definition, params, batch_stats)
    expected = parameters.bind(definition, params, batch_stats)(jnp.ones((1, 3)))
    np.testing.assert_allclose(output, expected, rtol=1e-6)
    assert updated == {"count": 1.0}
    assert batch_stats == {"count": 0.0}
    apply(parameters.definition(partial(Toy, 2)), params, updated)
    assert apply._cache_size() == 1


names = st.lists(st.text("ab_", min_size=1, max_size=3), min_size=1, max_size=3).map(".".join)


@given(values=st.dictionaries(names, st.integers()), prefix=names)
def test_subset_undoes_prefixed(values, prefix):
    prefixed = parameters.prefixed(values, prefix)
    assert all(name.startswith(f"{prefix}.") for name in prefixed)
    assert parameters.subset(prefixed, prefix) == values


def test_subset_takes_whole_names():
    assert parameters.subset({"head.bias": 1, "head_2.bias": 2, "a.head.bias": 3, "head": 4}, "head") == {"bias": 1}
