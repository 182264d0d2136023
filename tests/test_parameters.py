from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.models import parameters


class Toy(nnx.Module):
    """Layers in a list, as in a transformer."""

    def __init__(self, layers: int = 12, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(3, 3, rngs=rngs) for _ in range(layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_names_are_paths_and_shapes_hold_no_arrays():
    params, shapes = parameters.initial(Toy, jax.random.key(0)), parameters.shapes(Toy)
    assert set(params) == {f"layers.{index}.{leaf}" for index in range(12) for leaf in ("kernel", "bias")}
    assert shapes == {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in params.items()}


def test_initial_arrays_follow_the_key():
    first, again, other = (parameters.initial(Toy, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["layers.3.kernel"], again["layers.3.kernel"])
    assert not np.array_equal(first["layers.3.kernel"], other["layers.3.kernel"])
    assert not np.array_equal(first["layers.3.kernel"], first["layers.4.kernel"])


def test_a_bound_module_computes_what_the_original_does():
    """There are twelve layers; as text, `10` and `11` sort before `2`."""
    module, params = Toy(rngs=nnx.Rngs(jax.random.key(0))), parameters.initial(Toy, jax.random.key(0))
    bound = parameters.bind(parameters.definition(Toy), dict(sorted(params.items())))
    x = jnp.linspace(-1.0, 1.0, 3)[None]
    np.testing.assert_array_equal(bound(x), module(x))


def test_a_definition_is_static_under_jit():
    @partial(jax.jit, static_argnums=0)
    def apply(definition: nnx.GraphDef, params: parameters.Params):
        return parameters.bind(definition, params)(jnp.ones((1, 3)))

    params = parameters.initial(partial(Toy, 2), jax.random.key(0))
    for _ in range(2):
        definition = parameters.definition(partial(Toy, 2))
        expected = parameters.bind(definition, params)(jnp.ones((1, 3)))
        np.testing.assert_allclose(apply(definition, params), expected, rtol=1e-6)
    assert apply._cache_size() == 1


names = st.lists(st.text("ab_", min_size=1, max_size=3), min_size=1, max_size=3).map(".".join)


@given(values=st.dictionaries(names, st.integers()), prefix=names)
def test_subset_inverts_prefixed(values, prefix):
    prefixed = parameters.prefixed(values, prefix)
    assert all(name.startswith(f"{prefix}.") for name in prefixed)
    assert parameters.subset(prefixed, prefix) == values


def test_subset_matches_whole_names():
    assert parameters.subset({"head.bias": 1, "head_2.bias": 2, "a.head.bias": 3, "head": 4}, "head") == {"bias": 1}
