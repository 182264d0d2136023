"""The layers that all networks are made of.

Parameters are float32, whatever the computation type, and so are their gradients: a layer casts inside, in such a way
that what is summed over tokens, and over devices after that, is summed in float32.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, Shaped

Initializer = Callable[[PRNGKeyArray, tuple[int, ...]], jax.Array]


def _gelu(x: jax.Array) -> jax.Array:
    """The product x Phi(x) by erf, as PyTorch computes it; jax.nn.gelu's erfc takes twice the time on a CPU."""
    return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}

BERT_INIT = nnx.initializers.normal(0.02)


class Dense(nnx.Module):
    """A dense layer, x @ kernel + bias; initialised as BERT's, N(0, 0.02), unless told otherwise."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        kernel_init: Initializer = BERT_INIT,
        bias_init: Initializer = nnx.initializers.zeros,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(bias_init(rngs.params(), (outputs,))) if bias else None
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        product = matmul(x.astype(self.dtype), jnp.asarray(self.kernel[...]))
        return product if self.bias is None else _add(product, jnp.asarray(self.bias[...]))


class Embedding(nnx.Module):
    """A table of vectors, looked up by number."""

    def __init__(self, rows: int, features: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embedding = nnx.Param(BERT_INIT(rngs.params(), (rows, features)))
        self.dtype = dtype

    def __call__(self, numbers: Int[Array, "*tokens"]) -> Float[Array, "*tokens features"]:
        return jnp.take(self.embedding[...], numbers, axis=0, mode="clip").astype(self.dtype)


def layer_norm(size: int, epsilon: float, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A layer norm whose statistics are float32, by the two-pass variance: the fast one loses digits."""
    return nnx.LayerNorm(size, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


def dropout(x: Shaped[Array, "*shape"], rate: float, keys: Key[Array, "*leading"] | None) -> Shaped[Array, "*shape"]:
    """Zeroes elements with probability `rate` (to 1/65536) and rescales the rest; the identity without keys.

    An element takes half a random word, and `jax.random.bernoulli` a whole one, which takes twice the time.

    Args:
        x: values.
        rate: probability.
        keys: a key for each index of the leading axes: for each row, say, or each token.
    """
    if keys is None or rate == 0.0:
        return x
    kept = round((1.0 - rate) * 2**16)  # of 2^16 draws
    shape = (*x.shape[keys.ndim : -1], -(-x.shape[-1] // 2))
    words = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys.reshape(-1))
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)
    draws = halves.reshape(*x.shape[:-1], 2 * shape[-1])[..., : x.shape[-1]]
    return jnp.where(draws < kept, x / (kept / 2**16), 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "*rows inputs"], kernel: Float[Array, "inputs outputs"], dtype: DTypeLike | None = None
) -> Float[Array, "*rows outputs"]:
    """The product x @ kernel, in `dtype` or else the type of x; its gradient for the kernel has the kernel's type.

    The backward pass is two plain matrix products. Left to differentiation, the gradient of the kernel is a contraction
    over several axes with a transposed result, which XLA computes slowly on a CPU (a SimCSE step takes a sixth longer),
    and has the type of x: summed over the devices in bfloat16, it would lose digits.
    """
    return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=dtype or x.dtype)


def _matmul_forward(
    x: jax.Array, kernel: jax.Array, dtype: DTypeLike | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, kernel, dtype), (x, kernel)


def _matmul_backward(
    dtype: DTypeLike | None, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del dtype
    x, kernel = saved
    flat_x, flat_gradient = (rows.reshape(-1, rows.shape[-1]) for rows in (x, gradient.astype(x.dtype)))
    of_x = jnp.dot(flat_gradient, kernel.astype(x.dtype).T).reshape(x.shape)
    return of_x, jnp.dot(flat_x.T, flat_gradient, preferred_element_type=kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


@jax.custom_vjp
def _add(x: Float[Array, "*rows outputs"], bias: Float[Array, " outputs"]) -> Float[Array, "*rows outputs"]:
    """The sum x + bias in the type of x; the bias's gradient is summed in the bias's type."""
    return x + jnp.broadcast_to(bias.astype(x.dtype), x.shape)


def _add_forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add(x, bias), bias


def _add_backward(bias: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, gradient.reshape(-1, len(bias)).sum(axis=0, dtype=bias.dtype)


_add.defvjp(_add_forward, _add_backward)
