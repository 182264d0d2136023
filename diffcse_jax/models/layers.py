"""The layers that all networks are made of, and networks as plain dictionaries of arrays.

Parameters and their gradients are float32, whatever the computation type. A layer casts inside, so
that sums over tokens, and later over devices, are float32. Three layers have their own backward
pass for this reason and for speed: `python -m benchmarks.components` measures the alternatives.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, Shaped

Initializer = Callable[[PRNGKeyArray, tuple[int, ...]], jax.Array]


def _gelu(x: jax.Array) -> jax.Array:
    # By erf, as PyTorch computes it. The erfc of jax.nn.gelu takes twice the time on a CPU.
    return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


def _in_float32(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return an activation that keeps the digits of bfloat16 where it adds numbers near 1 and -1.

    The backward pass computes it again, because float32 values would take twice the memory of x.
    On a TPU, a barrier (`prevent_cse`) would keep that out of the product before it.
    """

    def applied(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return activation(x)

        def rounded(x: jax.Array) -> jax.Array:
            return activation(x.astype(jnp.float32)).astype(x.dtype)

        return jax.checkpoint(rounded, prevent_cse=False)(x)

    return applied


_GELU_BY_TANH = _in_float32(partial(jax.nn.gelu, approximate=True))
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _in_float32(_gelu),
    "gelu_new": _GELU_BY_TANH,
    "gelu_pytorch_tanh": _GELU_BY_TANH,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}

BERT_INIT = nnx.initializers.normal(0.02)


class Dense(nnx.Module):
    """A dense layer, x @ kernel + bias. The default initialisation is BERT's, N(0, 0.02)."""

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

    def by_group(
        self, x: Float[Array, "tokens inputs"], groups: int
    ) -> Float[Array, "groups tokens features"]:
        """Return the outputs in equal groups, whose axis comes first.

        On a TPU, the product writes the groups itself. Split afterwards, they would be copied.
        """
        bias = None if self.bias is None else jnp.asarray(self.bias[...])
        return _dense_by_group(x.astype(self.dtype), jnp.asarray(self.kernel[...]), bias, groups)


class Embedding(nnx.Module):
    """A table of `rows` vectors, looked up by numbers.

    The numbers are split over `devices` in equal, consecutive parts.
    """

    def __init__(
        self, rows: int, features: int, *, devices: int = 1, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.embedding = nnx.Param(BERT_INIT(rngs.params(), (rows, features)))
        self.devices = devices
        self.dtype = dtype

    @jax.named_scope("embedding")
    def __call__(self, numbers: Int[Array, "*tokens"]) -> Float[Array, "*tokens features"]:
        # Each device's numbers form a column. If a table is read twice, XLA concatenates both
        # readings along the first axis to sum their gradients at once. If devices split that axis,
        # tokens would move between them.
        columns = numbers.reshape(self.devices, -1).T
        vectors = jnp.take(self.embedding[...], columns, axis=0, mode="clip").astype(self.dtype)
        return vectors.swapaxes(0, 1).reshape(*numbers.shape, -1)


class LayerNorm(nnx.Module):
    """Layer normalisation with float32 statistics and gradients.

    The variance takes a second pass over float32 values, whose digits one pass would lose.
    """

    def __init__(self, size: int, epsilon: float, *, bias: bool = True, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size)) if bias else None
        self.epsilon = epsilon
        self.dtype = dtype

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        flat = x.reshape(-1, x.shape[-1])
        scale = jnp.asarray(self.scale[...])
        bias = jnp.zeros_like(scale) if self.bias is None else jnp.asarray(self.bias[...])
        normed = _normalise(flat, scale, bias, self.epsilon)
        return normed.astype(self.dtype).reshape(x.shape)


@jax.named_scope("dropout")
def dropout(
    x: Shaped[Array, "*shape"], rate: float, keys: Key[Array, "*leading"] | None
) -> Shaped[Array, "*shape"]:
    """Zero elements with probability `rate`, and rescale the others.

    The rate is in steps of 1/65536. Without keys, return `x`. An element uses half a random word.
    `jax.random.bernoulli` uses a whole word and takes twice the time.

    Args:
        x: Values.
        rate: Probability.
        keys: One key for each index of the leading axes, such as each row or each token.
    """
    if keys is None or rate == 0.0:
        return x
    kept = round((1.0 - rate) * 2**16)  # of 2^16 draws
    shape = (*x.shape[keys.ndim : -1], -(-x.shape[-1] // 2))
    words = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys.reshape(-1))
    words = words.reshape(*x.shape[:-1], shape[-1])
    mask = jnp.concatenate([(words & 0xFFFF) < kept, (words >> 16) < kept], axis=-1)
    return jnp.where(mask[..., : x.shape[-1]], x / (kept / 2**16), 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "*rows inputs"],
    kernel: Float[Array, "inputs outputs"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*rows outputs"]:
    """Return x @ kernel in `dtype`, by default the type of x.

    The kernel's gradient has the kernel's type. The backward pass is two plain matrix products.
    Automatic differentiation would make the kernel's gradient a contraction over several axes,
    which is slow on a CPU, in the type of x, which loses digits in sums of bfloat16.
    """
    return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=dtype or x.dtype)


def _matmul_backward(
    _dtype: Any, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, ...]:
    x, kernel = saved
    flat_x, flat_gradient = (
        rows.reshape(-1, rows.shape[-1]) for rows in (x, gradient.astype(x.dtype))
    )
    x_gradient = jnp.dot(flat_gradient, kernel.astype(x.dtype).T).reshape(x.shape)
    return x_gradient, jnp.dot(flat_x.T, flat_gradient, preferred_element_type=kernel.dtype)


matmul.defvjp(lambda x, kernel, dtype: (matmul(x, kernel, dtype), (x, kernel)), _matmul_backward)


@jax.custom_vjp
def _add(
    x: Float[Array, "*rows outputs"], bias: Float[Array, " outputs"]
) -> Float[Array, "*rows outputs"]:
    """Return x + bias in the type of x. The bias's gradient is summed in the bias's type."""
    return x + jnp.broadcast_to(bias.astype(x.dtype), x.shape)


_add.defvjp(
    lambda x, bias: (_add(x, bias), bias),
    lambda bias, gradient: (
        gradient,
        gradient.reshape(-1, len(bias)).sum(axis=0, dtype=bias.dtype),
    ),
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense_by_group(
    x: Float[Array, "tokens inputs"],
    kernel: Float[Array, "inputs outputs"],
    bias: Float[Array, " outputs"] | None,
    groups: int,
) -> Float[Array, "groups tokens features"]:
    """Return x @ kernel + bias by group, with the gradients of `matmul` and `_add`."""
    by_group = kernel.astype(x.dtype).reshape(len(kernel), groups, -1)
    product = jnp.einsum("ti,igf->gtf", x, by_group, preferred_element_type=x.dtype)
    return product if bias is None else product + bias.astype(x.dtype).reshape(groups, 1, -1)


def _dense_by_group_backward(
    _groups: int, saved: tuple[jax.Array, jax.Array, jax.Array | None], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, kernel, bias = saved
    by_group = kernel.astype(x.dtype).reshape(len(kernel), len(gradient), -1)
    x_gradient = jnp.einsum("gtf,igf->ti", gradient, by_group, preferred_element_type=x.dtype)
    # As one axis: CPUs have no other product of bfloat16 whose result is float32.
    flat = gradient.swapaxes(0, 1).reshape(len(x), -1)
    kernel_gradient = jnp.dot(x.T, flat, preferred_element_type=kernel.dtype)
    bias_gradient = None if bias is None else gradient.sum(axis=1, dtype=bias.dtype).reshape(-1)
    return x_gradient, kernel_gradient, bias_gradient


_dense_by_group.defvjp(
    lambda x, kernel, bias, groups: (_dense_by_group(x, kernel, bias, groups), (x, kernel, bias)),
    _dense_by_group_backward,
)


def _normalise_forward(
    x: Float[Array, "rows size"],
    scale: Float[Array, " size"],
    bias: Float[Array, " size"],
    epsilon: float,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return rows of mean 0 and variance 1, scaled and shifted.

    The backward pass keeps x, its mean and its deviation.
    """
    mean = x.mean(axis=1, keepdims=True, dtype=jnp.float32)
    deviation = x.astype(jnp.float32) - mean
    if x.dtype == jnp.bfloat16:
        # In one pass over x. It loses fewer digits than x did when it was rounded.
        squares = jnp.square(x.astype(jnp.float32)).mean(axis=1, keepdims=True)
        variance = jnp.maximum(squares - jnp.square(mean), 0.0)
    else:
        variance = jnp.square(deviation).mean(axis=1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + epsilon)
    return (deviation * inverse * scale[None] + bias[None]).astype(x.dtype), (
        x,
        mean,
        inverse,
        scale,
    )


def _normalise_backward(
    _epsilon: float, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, ...]:
    x, mean, inverse, scale = saved
    normalised = (x.astype(jnp.float32) - mean) * inverse
    gradient = gradient.astype(jnp.float32)
    scale_gradient = (gradient * normalised).sum(axis=0)
    bias_gradient = gradient.sum(axis=0)
    scaled = gradient * scale[None]
    along = (scaled * normalised).mean(axis=1, keepdims=True)
    x_gradient = (scaled - scaled.mean(axis=1, keepdims=True) - normalised * along) * inverse
    return x_gradient.astype(x.dtype), scale_gradient, bias_gradient


_normalise = jax.custom_vjp(
    lambda *arguments: _normalise_forward(*arguments)[0], nondiff_argnums=(3,)
)
_normalise.defvjp(_normalise_forward, _normalise_backward)


# Modules as plain dictionaries of arrays.
#
# A module is split once into its graph definition and a flat dictionary `{"blocks.0.output.kernel":
# array}`. `jax.jit`, optimizers, checkpoints, sharding rules and weight conversion see the
# dictionary. A compiled function binds it to the definition again. With flat names, a rule over
# parameters is one regular expression, and checkpoints are readable.

Build = Callable[..., nnx.Module]  # makes a module, given rngs=
Params = dict[str, Any]  # of jax.Array, numpy.ndarray or jax.ShapeDtypeStruct


class Network(NamedTuple):
    """A network of a run: how to build it, and what it starts from."""

    build: Build  # builds the module, given dtype= and rngs=
    params: Params | None = None  # its first parameters; None: initialised by `build`
    frozen: bool = False


def definition(build: Build) -> nnx.GraphDef:
    """Return the graph definition of the module that `build` makes. No arrays are allocated."""
    return nnx.split(_abstract(build), nnx.Param)[0]


def shapes(build: Build) -> Params:
    """Return the parameters of the module that `build` makes, as `jax.ShapeDtypeStruct`."""
    return _flat(_abstract(build))


def initial(build: Build, key: PRNGKeyArray) -> Params:
    """Return the initial parameters of the module that `build` makes."""
    return _flat(build(rngs=nnx.Rngs(key)))


def bind(graphdef: nnx.GraphDef, params: Mapping) -> Any:
    """Return the module of `graphdef` with these parameters."""
    paths = {
        tuple(int(part) if part.isdigit() else part for part in name.split(".")): params[name]
        for name in params
    }
    return nnx.merge(graphdef, nnx.from_flat_state(paths))


def subset(params: Mapping, prefix: str) -> Params:
    """Return the entries below `prefix.`, without the prefix."""
    begin = f"{prefix}."
    below = {name: value for name, value in params.items() if name.startswith(begin)}
    return {name.removeprefix(begin): value for name, value in below.items()}


def prefixed(params: Mapping, prefix: str) -> Params:
    """Return the entries with `prefix.` before each name. The inverse of `subset`."""
    return {f"{prefix}.{name}": value for name, value in params.items()}


class _OneKey(nnx.Rngs):
    """Gives the same key to all parameters. `nnx.Rngs` takes three times as long as the rest."""

    def __init__(self) -> None:
        pass

    def params(self) -> PRNGKeyArray:
        return jax.random.key(0)


def _abstract(build: Build) -> nnx.Module:
    return nnx.eval_shape(lambda: build(rngs=_OneKey()))


def _flat(module: nnx.Module) -> Params:
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in state}
