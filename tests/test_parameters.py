import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.models import parameters


class Toy(nnx.Module):
    """Twelve layers in a list, as in a transformer; as text, `10` and `11` sort before `2`."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(3, 3, rngs=rngs) for _ in range(12))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_names_are_paths_and_arrays_follow_the_key():
    params, again, other = (parameters.initial(Toy, jax.random.key(seed)) for seed in (0, 0, 1))
    assert set(params) == {f"layers.{index}.{leaf}" for index in range(12) for leaf in ("kernel", "bias")}
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in params.items()}
    assert parameters.shapes(Toy) == shapes
    np.testing.assert_array_equal(params["layers.3.kernel"], again["layers.3.kernel"])
    assert not np.array_equal(params["layers.3.kernel"], other["layers.3.kernel"])
    assert not np.array_equal(params["layers.3.kernel"], params["layers.4.kernel"])


def test_a_bound_module_computes_what_the_original_does_and_its_definition_is_static():
    x, params = jnp.linspace(-1.0, 1.0, 3)[None], parameters.initial(Toy, jax.random.key(0))
    expected = Toy(rngs=nnx.Rngs(jax.random.key(0)))(x)
    apply = jax.jit(lambda definition, params: parameters.bind(definition, params)(x), static_argnums=0)
    for _ in range(2):
        definition = parameters.definition(Toy)
        np.testing.assert_array_equal(parameters.bind(definition, dict(sorted(params.items())))(x), expected)
        np.testing.assert_allclose(apply(definition, params), expected, rtol=1e-6)
    assert apply._cache_size() == 1


names = st.lists(st.text("ab_", min_size=1, max_size=3), min_size=1, max_size=3).map(".".join)


@given(values=st.dictionaries(names, st.integers()), prefix=names)
def test_subset_inverts_prefixed(values, prefix):
    prefixed = parameters.prefixed(values, prefix)
    assert all(name.startswith(f"{prefix}.") for name in prefixed)
    assert parameters.subset(prefixed, prefix) == values
    assert parameters.subset({f"{prefix}_2.bias": 1, f"-.{prefix}.bias": 2, prefix: 3}, prefix) == {}
