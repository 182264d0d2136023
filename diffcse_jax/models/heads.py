"""Heads: projectors of the embedding, heads of masked LMs, of ELECTRA and of InfoCSE, task heads."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import RowKeys, TokenRows, pack
from diffcse_jax.models.layers import ACTIVATIONS, BERT_INIT, Dense, LayerNorm, dropout, matmul
from diffcse_jax.models.parameters import Params, prefixed, subset
from diffcse_jax.models.pooling import standardize
from diffcse_jax.models.transformer import Blocks, TransformerConfig, new_keys


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

    def __init__(self, size: int, *, affine: bool):
        self.scale = nnx.Param(jnp.ones(size)) if affine else None
        self.bias = nnx.Param(jnp.zeros(size)) if affine else None

    def __call__(self, rows: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
        normalised = standardize(rows.astype(jnp.float32), ddof=0, epsilon=1e-5)
        if self.scale is not None and self.bias is not None:
            normalised = normalised * self.scale[None] + self.bias[None]
        return normalised.astype(rows.dtype)


PROJECTORS = {"mlp": MlpProjector, "batchnorm": BatchNormProjector}


class MaskedLMHead(nnx.Module):
    """Hidden states to vocabulary logits: dense, activation, norm, decoder with a bias.

    If `tied`, the decoder is the encoder's table of word embeddings, which each call receives.
    """

    def __init__(self, config: TransformerConfig, *, tied: bool = True, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        size = config.word_size
        self.transform = Dense(config.hidden_size, size, bias=config.mlm_transform_bias, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(size, config.norm_epsilon, bias=config.norm_bias, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        shape = (config.vocab_size, size)
        self.decoder = None if tied else nnx.Param(BERT_INIT(rngs.params(), shape))
        self.activation = config.mlm_activation or config.activation

    def __call__(
        self, hidden_states: Float[Array, "*tokens hidden"], word_embeddings: Float[Array, "vocab size"] | None = None
    ) -> Float[Array, "*tokens vocab"]:
        """Return float32 logits over the vocabulary."""
        decoder = word_embeddings if self.decoder is None else self.decoder[...]
        transformed = self.norm(ACTIVATIONS[self.activation](self.transform(hidden_states)))
        logits = matmul(transformed, jnp.asarray(decoder).T, jnp.float32)
        return logits + jnp.broadcast_to(self.bias[...], logits.shape)


class ReplacedTokenHead(nnx.Module):
    """ELECTRA's head for replaced tokens (Clark et al. 2020): dense, activation, dense."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.dense = Dense(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.output = Dense(config.hidden_size, 1, dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, hidden_states: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens 2"]:
        """Return the logits of the classes kept, which is always 0, and replaced."""
        replaced = self.output(ACTIVATIONS[self.activation](self.dense(hidden_states)))
        return jnp.concatenate([jnp.zeros_like(replaced), replaced], axis=-1)


class ReconstructionHead(Blocks):
    """The last `count` blocks of a masked LM and its head, applied to a lower block's states (InfoCSE, Wu et al. 2022).

    A sentence embedding at position 0 helps them to reconstruct the masked tokens.
    """

    def __init__(self, config: TransformerConfig, count: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, range(config.num_blocks - count, config.num_blocks), dtype=dtype, rngs=rngs)
        self.vocabulary = MaskedLMHead(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        rows: TokenRows,
        states: Float[Array, "rows length hidden"],
        condition: Float[Array, "rows hidden"],
        *,
        keys: RowKeys = None,
    ) -> Float[Array, "rows length hidden"]:
        """Return the last hidden states of masked sentences, given the output of a lower block for them."""
        keys_of_blocks: list[RowKeys] = []
        for _ in self.blocks:
            keys, block_keys = new_keys(keys, 2)
            keys_of_blocks.append(block_keys)
        states = pack(states.at[:, 0].set(condition.astype(states.dtype)), rows)
        return self.run(states, rows, keys_of_blocks)[-1]


def reconstruction_start(
    transformer: Mapping[str, Any], mlm_head: Mapping[str, Any], config: TransformerConfig, count: int
) -> Params:
    """Return the initial parameters of a `ReconstructionHead` with `count` blocks: those of the masked LM itself."""
    start = prefixed(mlm_head, "vocabulary")
    for name in ("attention_bias", "final_norm"):
        start |= prefixed(subset(transformer, name), name)
    for block in range(count):
        start |= prefixed(subset(transformer, f"blocks.{config.num_blocks - count + block}"), f"blocks.{block}")
    return start


def linear(inputs: int, outputs: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> Dense:
    """Return a dense layer, initialised as PyTorch's `nn.Linear`: U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    bound = inputs**-0.5

    def uniform(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return Dense(inputs, outputs, kernel_init=uniform, bias_init=uniform, dtype=dtype, rngs=rngs)


class TaskHead(nnx.Module):
    """Dense layers over features of a sentence or a pair, with an activation between and dropout before each layer."""

    def __init__(
        self,
        inputs: int,
        hidden: int,  # number of units between layers
        outputs: int,  # number of logits, or 1 for a value
        *,
        depth: int,  # number of layers
        activation: str,  # a name in `ACTIVATIONS`
        rate: float,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = (inputs, *(hidden,) * (depth - 1), outputs)
        self.layers = nnx.List(linear(*pair, dtype=dtype, rngs=rngs) for pair in itertools.pairwise(sizes))
        self.activation = activation
        self.rate = rate

    def __call__(
        self, features: Float[Array, "rows features"], *, keys: RowKeys = None
    ) -> Float[Array, "rows outputs"]:
        """Return float32 outputs."""
        states = features
        for number, layer in enumerate(self.layers):
            if number:
                states = ACTIVATIONS[self.activation](states)
            layer_keys = None if keys is None else jax.vmap(partial(jax.random.fold_in, data=number))(keys)
            states = layer(dropout(states, self.rate, layer_keys))
        return states.astype(jnp.float32)
