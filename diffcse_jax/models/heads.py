"""Heads: projectors, modules after the pooling, and heads of masked LMs and tasks.

There are also the heads of ELECTRA and of InfoCSE.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import RowKeys, TokenRows, pack
from diffcse_jax.models.layers import (
    ACTIVATIONS,
    BERT_INIT,
    Dense,
    LayerNorm,
    Params,
    dropout,
    matmul,
    prefixed,
    subset,
)
from diffcse_jax.models.pooling import normalize, standardize
from diffcse_jax.models.transformer import Blocks, TransformerConfig, new_keys


class MlpProjector(nnx.Module):
    """Dense + tanh: SimCSE's projector, and the pooler of Hugging Face's BERT and RoBERTa."""

    def __init__(
        self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        self.dense = Dense(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, pooled: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        return jnp.tanh(self.dense(pooled))


class BatchNormProjector(nnx.Module):
    """Linear(D, 2D) - BatchNorm - ReLU - Linear(2D, D) - BatchNorm (DiffCSE appendix A).

    The last BatchNorm has neither scale nor shift.
    """

    def __init__(
        self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
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

    Mean and variance are those of the global batch, in float32. There are no running statistics: a
    projector with batch normalisation is dropped when encoding.
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

    def __init__(
        self,
        config: TransformerConfig,
        *,
        tied: bool = True,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        size = config.word_size
        self.transform = Dense(
            config.hidden_size, size, bias=config.mlm_transform_bias, dtype=dtype, rngs=rngs
        )
        self.norm = LayerNorm(size, config.norm_epsilon, bias=config.norm_bias, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.decoder = (
            None if tied else nnx.Param(BERT_INIT(rngs.params(), (config.vocab_size, size)))
        )
        self.activation = config.mlm_activation or config.activation

    def __call__(
        self,
        hidden_states: Float[Array, "*tokens hidden"],
        word_embeddings: Float[Array, "vocab size"] | None = None,
    ) -> Float[Array, "*tokens vocab"]:
        """Return float32 logits over the vocabulary."""
        decoder = word_embeddings if self.decoder is None else self.decoder[...]
        transformed = self.norm(ACTIVATIONS[self.activation](self.transform(hidden_states)))
        logits = matmul(transformed, jnp.asarray(decoder).T, jnp.float32)
        return logits + jnp.broadcast_to(self.bias[...], logits.shape)


class ReplacedTokenHead(nnx.Module):
    """ELECTRA's head for replaced tokens (Clark et al. 2020): dense, activation, dense."""

    def __init__(
        self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        self.dense = Dense(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.output = Dense(config.hidden_size, 1, dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, hidden_states: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens 2"]:
        """Return the logits of the classes kept, which is always 0, and replaced."""
        replaced = self.output(ACTIVATIONS[self.activation](self.dense(hidden_states)))
        return jnp.concatenate([jnp.zeros_like(replaced), replaced], axis=-1)


class ReconstructionHead(Blocks):
    """The last `count` blocks of a masked LM and its head (InfoCSE, Wu et al. 2022).

    They are applied to a lower block's states. A sentence embedding at position 0 helps them to
    reconstruct the masked tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        count: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            config, range(config.num_blocks - count, config.num_blocks), dtype=dtype, rngs=rngs
        )
        self.vocabulary = MaskedLMHead(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        rows: TokenRows,
        states: Float[Array, "rows length hidden"],
        condition: Float[Array, "rows hidden"],
        *,
        keys: RowKeys = None,
    ) -> Float[Array, "rows length hidden"]:
        """Return the last hidden states of masked sentences, given a lower block's output."""
        keys_of_blocks: list[RowKeys] = []
        for _ in self.blocks:
            keys, block_keys = new_keys(keys, 2)
            keys_of_blocks.append(block_keys)
        states = pack(states.at[:, 0].set(condition.astype(states.dtype)), rows)
        return self.run(states, rows, keys_of_blocks)[-1]


def reconstruction_start(
    transformer: Params, mlm_head: Params, config: TransformerConfig, count: int
) -> Params:
    """Return a masked LM's own parameters for a `ReconstructionHead` with `count` blocks."""
    start = prefixed(mlm_head, "vocabulary")
    for name in ("attention_bias", "final_norm"):
        start |= prefixed(subset(transformer, name), name)
    for block in range(count):
        start |= prefixed(
            subset(transformer, f"blocks.{config.num_blocks - count + block}"), f"blocks.{block}"
        )
    return start


def linear(inputs: int, outputs: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> Dense:
    """Return a dense layer that starts, as PyTorch's, from U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    bound = inputs**-0.5

    def uniform(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return Dense(inputs, outputs, kernel_init=uniform, bias_init=uniform, dtype=dtype, rngs=rngs)


class TaskHead(nnx.Module):
    """Dense layers over features of a sentence or a pair.

    There is an activation between them, and dropout before each layer.
    """

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
        self.layers = nnx.List(
            linear(*pair, dtype=dtype, rngs=rngs) for pair in itertools.pairwise(sizes)
        )
        self.activation = activation
        self.rate = rate

    def __call__(
        self, features: Float[Array, "rows inputs"], *, keys: RowKeys = None
    ) -> Float[Array, "rows outputs"]:
        """Return float32 outputs."""
        states = features
        for number, layer in enumerate(self.layers):
            if number:
                states = ACTIVATIONS[self.activation](states)
            layer_keys = (
                None if keys is None else jax.vmap(partial(jax.random.fold_in, data=number))(keys)
            )
            states = layer(dropout(states, self.rate, layer_keys))
        return states.astype(jnp.float32)


# Modules after the pooling.

SENTENCE_HEAD = "sentence_head"  # among the networks of a run
QUERY_PROJECTION = "query_projection"  # as well
_IDENTITY = "torch.nn.modules.linear.Identity"
# Activations of torch.nn with their default arguments, by the names of the classes.
TORCH_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Identity": jax.nn.identity, "Tanh": jnp.tanh, "ReLU": jax.nn.relu, "GELU": ACTIVATIONS["gelu"],
    "SiLU": jax.nn.silu, "Sigmoid": jax.nn.sigmoid, "LeakyReLU": jax.nn.leaky_relu,
    "ELU": jax.nn.elu, "CELU": jax.nn.celu, "SELU": jax.nn.selu, "Mish": jax.nn.mish,
    "ReLU6": jax.nn.relu6, "Softplus": jax.nn.softplus, "Softsign": jax.nn.soft_sign,
    "Hardtanh": jax.nn.hard_tanh, "Hardswish": jax.nn.hard_swish,
    "Hardsigmoid": jax.nn.hard_sigmoid, "LogSigmoid": jax.nn.log_sigmoid,
}  # fmt: skip


class HeadLayer(NamedTuple):
    """A module after the pooling, with its settings in sentence-transformers.

    `HEAD_SETTINGS` has the settings of each kind.
    """

    kind: str  # the name of the class
    in_features: int = 0
    out_features: int = 0
    bias: bool = True
    activation_function: str = ""  # such as `torch.nn.modules.activation.Tanh`
    dimension: int = 0
    dropout: float = 0.0  # is not applied


HEAD_SETTINGS = {
    "Dense": ("in_features", "out_features", "bias", "activation_function"),
    "LayerNorm": ("dimension",),
    "Normalize": (),
    "Dropout": ("dropout",),
}


class RecordedHead(NamedTuple):
    """The modules after the pooling that a checkpoint records.

    The dense + tanh head of the pooler `cls` is not one of them.
    """

    pooler: str = ""  # of the embeddings that the modules read
    layers: tuple[HeadLayer, ...] = ()
    params: Params = Params()  # of `SentenceHead`
    # How embeddings are compared (`similarity_fn_name`): a name in `pooling.SIMILARITIES`.
    similarity: str = "cosine"

    def of(self, pooler: str, trained: Params | None = None) -> "RecordedHead":
        """Return the head, which is empty for another pooler than the recorded one.

        If its trained parameters are given, it has them.
        """
        if pooler != self.pooler:
            return NO_HEAD
        return self if trained is None else self._replace(params=subset(trained, SENTENCE_HEAD))

    def with_projection(
        self, pooler: str, kernel: Float[Array | np.ndarray, "size size"]
    ) -> "RecordedHead":
        """Return the head of a query encoder: a linear layer follows the modules of this one.

        Embeddings that have a length of 1 have it afterwards, too.
        """
        head = self.of(pooler)
        size = len(kernel)
        layer = HeadLayer("Dense", size, size, bias=False, activation_function=_IDENTITY)
        last = [each for each in head.layers[-1:] if each.kind == "Normalize"]
        place = f"layers.{len(head.layers)}.linear.kernel"
        params = Params({**head.params, place: kernel})
        return head._replace(pooler=pooler, layers=(*head.layers, layer, *last), params=params)

    @property
    def projection(self) -> Float[Array | np.ndarray, "size size"]:
        """The kernel of the linear layer that `with_projection` appends."""
        places = [place for place, layer in enumerate(self.layers) if layer.kind == "Dense"]
        return self.params[f"layers.{places[-1]}.linear.kernel"]

    def applied(self, pooler: str) -> str:
        """Return the name of a pooler and of the modules after it, such as `avg + Normalize`."""
        kinds = [layer.kind for layer in self.of(pooler).layers if layer.kind != "Dropout"]
        return " + ".join([pooler, *kinds])

    def embedding_size(self, pooler: str, hidden_size: int) -> int:
        """Return the size of the embeddings by a pooler.

        If the pooler is the recorded one, it is the size after the modules.
        """
        sizes = [layer.out_features for layer in self.of(pooler).layers if layer.out_features]
        return sizes[-1] if sizes else hidden_size * len(pooler.split("+"))

    @property
    def has_weights(self) -> bool:
        """Whether a module has parameters, so that embeddings without it are others."""
        return any(layer.kind in ("Dense", "LayerNorm") for layer in self.layers)

    @property
    def ranks_by_cosine(self) -> bool:
        """Whether the recorded similarity ranks embeddings as the cosine similarity does."""
        has_length_1 = bool(self.layers) and self.layers[-1].kind == "Normalize"
        return self.similarity == "cosine" or (
            has_length_1 and self.similarity in ("dot", "euclidean")
        )


NO_HEAD = RecordedHead()


class QueryProjection(nnx.Module):
    """A linear map of queries' embeddings, which starts as the identity.

    It computes in float32, because what it changes is small.
    """

    def __init__(self, size: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        del dtype, rngs
        self.kernel = nnx.Param(jnp.eye(size))

    def __call__(self, queries: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
        return jnp.matmul(queries, jnp.asarray(self.kernel[...]), precision="highest")


class SentenceHead(nnx.Module):
    """Applies modules to pooled embeddings, one after the other."""

    def __init__(
        self, layers: tuple[HeadLayer, ...], *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        self.layers = nnx.List(_Module(layer, dtype=dtype, rngs=rngs) for layer in layers)

    def __call__(self, pooled: Float[Array, "rows size"]) -> Float[Array, "rows dimension"]:
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


class _Module(nnx.Module):
    def __init__(self, layer: HeadLayer, *, dtype: DTypeLike, rngs: nnx.Rngs):
        sizes = layer.in_features, layer.out_features
        self.layer = layer
        is_dense = layer.kind == "Dense"
        self.linear = Dense(*sizes, bias=layer.bias, dtype=dtype, rngs=rngs) if is_dense else None
        self.norm = (
            LayerNorm(layer.dimension, 1e-5, dtype=dtype) if layer.kind == "LayerNorm" else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.linear is not None:
            return TORCH_ACTIVATIONS[self.layer.activation_function.rpartition(".")[2]](
                self.linear(x)
            )
        if self.norm is not None:
            return self.norm(x)
        return normalize(x) if self.layer.kind == "Normalize" else x
