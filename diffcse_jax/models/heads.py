"""Heads: projectors of the sentence vector, the masked-LM head, the discriminator's token classifier, tasks' heads."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PRNGKeyArray

from diffcse_jax.models.layers import ACTIVATIONS, Dense, LayerNorm, dropout, matmul
from diffcse_jax.models.transformer import TransformerConfig


class MlpProjector(nnx.Module):
    """Dense + tanh: SimCSE's projector, and the pooler of Hugging Face's BERT and RoBERTa."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.dense = Dense(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, pooled: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        return jnp.tanh(self.dense(pooled))


class BatchNormProjector(nnx.Module):
    """Linear(D, 2D) - BatchNorm - ReLU - Linear(2D, D) - BatchNorm without scale and shift (DiffCSE appendix A)."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        size = config.hidden_size
        self.expand = Dense(size, 2 * size, bias=False, dtype=dtype, rngs=rngs)
        self.expand_norm = BatchNorm(2 * size, affine=True)
        self.contract = Dense(2 * size, size, bias=False, dtype=dtype, rngs=rngs)
        self.contract_norm = BatchNorm(size, affine=False)

    def __call__(self, pooled: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        expanded = jax.nn.relu(self.expand_norm(self.expand(pooled)))
        return self.contract_norm(self.contract(expanded))


class BatchNorm(nnx.Module):
    """Batch normalisation over rows, as PyTorch computes it in training mode.

    Mean and variance are those of the global batch, in float32. There are no running statistics: a projector with
    batch normalisation is dropped when encoding.
    """

    epsilon = 1e-5

    def __init__(self, size: int, *, affine: bool):
        self.scale = nnx.Param(jnp.ones(size)) if affine else None
        self.bias = nnx.Param(jnp.zeros(size)) if affine else None

    def __call__(self, rows: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
        values = rows.astype(jnp.float32)
        mean, var = values.mean(axis=0, keepdims=True), values.var(axis=0, keepdims=True)
        normalised = (values - mean) * jax.lax.rsqrt(var + self.epsilon)
        if self.scale is not None and self.bias is not None:
            normalised = normalised * self.scale[None] + self.bias[None]
        return normalised.astype(rows.dtype)


HEAD_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": ACTIVATIONS["gelu"]}
PROJECTORS = {"mlp": MlpProjector, "batchnorm": BatchNormProjector}


class MaskedLMHead(nnx.Module):
    """Hidden states to vocabulary logits: dense, activation, norm, decoder with a bias.

    Args:
        tied: the decoder is the encoder's word-embedding table, given to each call; otherwise the head has its own.
    """

    def __init__(self, config: TransformerConfig, *, tied: bool = True, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.transform = Dense(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        shape = (config.vocab_size, config.hidden_size)
        self.decoder = None if tied else nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        self.activation = config.mlm_activation or config.activation

    def __call__(
        self,
        hidden_states: Float[Array, "*tokens hidden"],
        word_embeddings: Float[Array, "vocab hidden"] | None = None,
    ) -> Float[Array, "*tokens vocab"]:
        """Float32 logits over the vocabulary."""
        decoder = word_embeddings if self.decoder is None else self.decoder[...]
        transformed = self.norm(ACTIVATIONS[self.activation](self.transform(hidden_states)))
        logits = matmul(transformed, jnp.asarray(decoder).T, jnp.float32)
        return logits + jnp.broadcast_to(self.bias[...], logits.shape)


def token_classifier(config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> Dense:
    """The discriminator's head: two logits per token, class 1 = replaced.

    Initialised as PyTorch's `nn.Linear`, U(-1/sqrt(hidden), 1/sqrt(hidden)), from which the published runs began
    (not BERT's N(0, 0.02)).
    """
    return linear(config.hidden_size, 2, dtype=dtype, rngs=rngs)


def linear(inputs: int, outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Dense:
    """A dense layer, initialised as PyTorch's `nn.Linear`: U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    bound = inputs**-0.5

    def uniform(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return Dense(inputs, outputs, kernel_init=uniform, bias_init=uniform, dtype=dtype, rngs=rngs)


class TaskHead(nnx.Module):
    """Dense layers over features of a sentence or a pair, with an activation between them and dropout before each.

    Args:
        inputs: number of features.
        hidden: units between layers.
        outputs: logits, or 1 value.
        depth: number of layers.
        activation: of `HEAD_ACTIVATIONS`.
        rate: dropout rate.
        dtype: computation type.
        rngs: for the initial weights.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        depth: int,
        activation: str,
        rate: float,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = (inputs, *(hidden,) * (depth - 1), outputs)
        self.layers = nnx.List(linear(*pair, dtype=dtype, rngs=rngs) for pair in itertools.pairwise(sizes))
        self.activation = activation
        self.rate = rate

    def __call__(
        self, features: Float[Array, "rows features"], *, keys: Key[Array, " rows"] | None = None
    ) -> Float[Array, "rows outputs"]:
        """Float32 outputs; without keys there is no dropout."""
        states = features
        for number, layer in enumerate(self.layers):
            if number:
                states = HEAD_ACTIVATIONS[self.activation](states)
            of_layer = None if keys is None else jax.vmap(partial(jax.random.fold_in, data=number))(keys)
            states = layer(dropout(states, self.rate, of_layer))
        return states.astype(jnp.float32)
