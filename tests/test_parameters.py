import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffcse_jax.models import parameters


class Toy(nnx.Module):
    """Twelve layers in a list, as in a transformer; as text, `10` and `11` sort before `2`."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(3, 3, rngs=rngs) for _ in range(12))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_a_bound_module_computes_what_the_original_does_and_its_definition_is_static():
    x, params = jnp.linspace(-1.0, 1.0, 3)[None], parameters.initial(Toy, jax.random.key(0))
    expected = Toy(rngs=nnx.Rngs(jax.random.key(0)))(x)
    apply = jax.jit(lambda definition, params: parameters.bind(definition, params)(x), static_argnums=0)
    for _ in range(2):
        definition = parameters.definition(Toy)
        np.testing.assert_array_equal(parameters.bind(definition, dict(sorted(params.items())))(x), expected)
        np.testing.assert_allclose(apply(definition, params), expected, rtol=1e-6)
    assert apply._cache_size() == 1
