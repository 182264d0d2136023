"""The transformer encoder: post-norm blocks of self-attention and a two-layer feed-forward network.

The particulars of a family (BERT, RoBERTa, ...) are in `TransformerConfig`, which the family's module in `families/`
fills. Inputs are single sentences, so token type 0 is added everywhere.

Dropout is a function of explicit keys, one per row, so that a row is the same whatever it is computed together with; a
call without keys is deterministic. Modules hold no random state.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from diffcse_jax.batch import TokenRows
from diffcse_jax.models.layers import ACTIVATIONS, Dense, Embedding, LayerNorm, dropout
from diffcse_jax.models.packing import pack, pack_ids, token_keys, unpack

TPU_LANES = 128


class Embeddings(nnx.Module):
    """Sum of word, position and token-type embeddings, normalised. Positions are numbered from 0."""

    def __init__(self, config: "TransformerConfig", *, dtype: DTypeLike, rngs: nnx.Rngs):
        embed = partial(Embedding, features=config.hidden_size, devices=config.devices, dtype=dtype, rngs=rngs)
        self.word = embed(config.vocab_size)
        self.position = embed(config.max_positions)
        self.token_type = embed(config.type_vocab_size) if config.type_vocab_size else None
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon, dtype=dtype)
        self.pad_token_id = config.pad_token_id
        self.rate = config.embedding_dropout

    def __call__(self, rows: TokenRows, *, keys: Key[Array, " rows"] | None) -> Float[Array, "tokens hidden"]:
        numbers = pack_ids(self.position_numbers(rows.input_ids), rows, fill=self.pad_token_id)
        input_ids = pack_ids(rows.input_ids, rows, fill=self.pad_token_id)
        # The padding row is not trained (PyTorch's padding_idx), though padding has a loss in DiffCSE.
        embedded = trained_where(input_ids != self.pad_token_id, self.word(input_ids))
        embedded += self.embedded_positions(input_ids, numbers)
        if self.token_type is not None:
            embedded += self.token_type(jnp.zeros_like(input_ids))
        keys = None if keys is None else token_keys(keys, rows)
        return dropout(self.norm(embedded), self.rate, keys)

    def position_numbers(self, input_ids: Int[Array, "rows length"]) -> Int[Array, "rows length"]:
        """The number of every token in the table of positions."""
        return jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)

    def embedded_positions(
        self, input_ids: Int[Array, " tokens"], numbers: Int[Array, " tokens"]
    ) -> Float[Array, "tokens hidden"]:
        """The vectors of the position numbers."""
        del input_ids
        return self.position(numbers)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of an encoder, and where its family goes its own way. Dropout rates are tuples with one rate per block."""

    family: str  # the `model_type` of its checkpoints, after which the module in `families/` is named
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    intermediate_size: int
    max_positions: int  # rows of the position table
    type_vocab_size: int  # 0: no token types
    norm_epsilon: float
    activation: str
    pad_token_id: int
    embedding_dropout: float
    hidden_dropout: tuple[float, ...]
    attention_dropout: tuple[float, ...]
    position_offset: int = 0  # the position number of the first token
    attention_output_dropout: bool = True  # on the output of self-attention, at the rate of hidden states
    mlm_activation: str = ""  # of the masked-LM head; empty: `activation`
    embeddings: type[Embeddings] = Embeddings
    # A module made as `module(config, rngs=rngs)` once for all blocks: positions -> (1, heads, positions, positions),
    # float32, added to attention logits.
    attention_bias: Callable[..., nnx.Module] | None = None
    # Not what is computed, but how:
    recompute: bool = dataclasses.field(default=True, repr=False)  # activations in the backward pass: not kept for it
    lanes: int = dataclasses.field(default=1, repr=False)  # of a register, which attention fills with several heads
    devices: int = dataclasses.field(default=1, repr=False)  # that rows are split over

    @property
    def max_length(self) -> int:
        """Longest sentence, in tokens, that has positions."""
        return self.max_positions - self.position_offset

    def on(self, platform: str, devices: int = 1) -> "TransformerConfig":
        """The same encoder, computed as so many devices of a platform (`cpu`, `gpu`, `tpu`) do it best.

        Args:
            platform: the kind of devices.
            devices: that rows are split over, which divides their number; read where there are gradients.
        """
        return dataclasses.replace(self, lanes=TPU_LANES if platform == "tpu" else 1, devices=devices)

    def without_dropout(self) -> "TransformerConfig":
        """The same encoder with every rate 0."""
        return self.with_dropout((0.0,), (0.0,))

    def with_dropout(self, hidden: tuple[float, ...], attention: tuple[float, ...]) -> "TransformerConfig":
        """The same encoder with one rate for all blocks, or one per block ("adjusting dropout").

        A single hidden rate is that of the embedding layer too, as in the originals; a list names blocks only, and
        the embedding layer keeps the checkpoint's rate.

        Raises:
            ValueError: a list whose length is neither 1 nor the number of blocks.
        """
        for name, rates in (("hidden", hidden), ("attention", attention)):
            if len(rates) not in (1, self.num_blocks):
                raise ValueError(f"{len(rates)} {name} dropout rates for {self.num_blocks} blocks; give 1 or one each")
        return dataclasses.replace(
            self,
            embedding_dropout=hidden[0] if len(hidden) == 1 else self.embedding_dropout,
            hidden_dropout=hidden * (self.num_blocks // len(hidden)),
            attention_dropout=attention * (self.num_blocks // len(attention)),
        )


class Transformer(nnx.Module):
    """Tokens to hidden states.

    Args:
        config: sizes.
        dtype: computation type.
        rngs: for the initial weights.
    """

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.embeddings = config.embeddings(config, dtype=dtype, rngs=rngs)
        self.attention_bias = config.attention_bias(config, rngs=rngs) if config.attention_bias else None
        self.blocks = nnx.List(Block(config, index, dtype=dtype, rngs=rngs) for index in range(config.num_blocks))

    def __call__(
        self,
        rows: TokenRows,
        *,
        condition: Float[Array, "rows hidden"] | None = None,
        keys: Key[Array, " rows"] | None = None,
        last_positions: int | None = None,
    ) -> dict[str, tuple[jax.Array, ...] | jax.Array]:
        """Runs the encoder.

        Args:
            rows: sentences, padded or with a layout.
            condition: vectors to put in place of position 0 of the embedding layer's output, after its norm and
                dropout (DiffCSE Section 3).
            keys: one dropout key per row; None: no dropout.
            last_positions: the last block computes this many positions only, the first ones; None: all.

        Returns:
            `hidden_states`, a tuple of the embedding output and each block's output, shapes (rows, length, hidden),
            and `last_hidden_state`, the last of them, (rows, last_positions, hidden). Values at padding mean nothing.
        """
        embedding_keys, *keys_of_blocks = _split(keys, 1 + len(self.blocks))
        states = self.embeddings(rows, keys=embedding_keys)
        hidden_states = [unpack(states, rows)]
        if condition is not None:
            hidden_states[0] = hidden_states[0].at[:, 0].set(condition.astype(states.dtype))
            states = pack(hidden_states[0], rows)
        bias = mask_bias(rows.attention_mask)
        if self.attention_bias is not None:
            bias = bias + self.attention_bias(rows.attention_mask.shape[1])
        for index, (block, block_keys) in enumerate(zip(self.blocks, keys_of_blocks, strict=True), start=1):
            positions = last_positions if index == len(self.blocks) else None
            states = block(states, rows, bias, keys=block_keys, positions=positions)
            hidden_states.append(states if positions else unpack(states, rows))
        return {"hidden_states": tuple(hidden_states), "last_hidden_state": hidden_states[-1]}


class Block(nnx.Module):
    """Self-attention and a feed-forward network, each followed by a residual connection and a norm."""

    def __init__(self, config: TransformerConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, config.attention_dropout[index], dtype=dtype, rngs=rngs)
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_epsilon, dtype=dtype)
        self.intermediate = Dense(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.output = Dense(config.intermediate_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.output_norm = LayerNorm(config.hidden_size, config.norm_epsilon, dtype=dtype)
        self.activation = config.activation
        self.output_dropout = config.hidden_dropout[index]
        self.attention_output_dropout = self.output_dropout if config.attention_output_dropout else 0.0
        self.recompute = config.recompute

    def __call__(
        self,
        hidden_states: Float[Array, "tokens hidden"],
        rows: TokenRows,
        bias: Float[Array, "#rows #heads #length length"],
        *,
        keys: Key[Array, " rows"] | None,
        positions: int | None = None,
    ) -> Float[Array, "*outputs hidden"]:
        """The output at all tokens; with `positions` as rows of the first positions, which attend to all."""
        probabilities_keys, attention_keys, output_keys = _split(keys, 3)
        attention_keys, output_keys = (
            None if part is None else token_keys(part, rows, positions) for part in (attention_keys, output_keys)
        )
        attended = self.attention(hidden_states, rows, bias, keys=probabilities_keys, positions=positions)
        if positions is not None:
            hidden_states = unpack(hidden_states, rows)[:, :positions]
        attended = dropout(attended, self.attention_output_dropout, attention_keys)
        hidden_states = self.attention_norm(hidden_states + attended)
        activated = self._activation(self.intermediate(hidden_states))
        transformed = dropout(self.output(activated), self.output_dropout, output_keys)
        return self.output_norm(hidden_states + transformed)

    @jax.named_scope("activation")
    def _activation(self, x: Float[Array, "*tokens inner"]) -> Float[Array, "*tokens inner"]:
        function = ACTIVATIONS[self.activation]
        return jax.checkpoint(function)(x) if self.recompute else function(x)


class SelfAttention(nnx.Module):
    """Multi-head attention over the real tokens of a sentence, with dropout on the probabilities.

    Heads are computed in groups: on a TPU those whose features together fill the lanes of a register, elsewhere each
    for itself. A head of a group meets zeros in place of the others' features, which changes no result. Heads of 64
    features alone would leave half of the lanes empty, and moving them about costs more than these zeros.
    """

    def __init__(self, config: TransformerConfig, rate: float, *, dtype: DTypeLike, rngs: nnx.Rngs):
        project = partial(Dense, config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.query, self.key, self.value, self.output = project(), project(), project(), project()
        self.num_heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        fitting = max(1, config.lanes // self.head_size)
        self.heads_of_group = fitting if config.num_heads % fitting == 0 else 1
        self.rate = rate

    @jax.named_scope("attention")
    def __call__(
        self,
        hidden_states: Float[Array, "tokens hidden"],
        rows: TokenRows,
        bias: Float[Array, "#rows #heads #length length"],
        *,
        keys: Key[Array, " rows"] | None,
        positions: int | None,
    ) -> Float[Array, "*outputs hidden"]:
        """The output at all tokens; with `positions` as rows of the first positions."""
        key, value = (self._groups(unpack(part(hidden_states), rows)) for part in (self.key, self.value))
        if positions is None:
            query = self._groups(unpack(self.query(hidden_states), rows))
        else:
            query = self._groups(self.query(unpack(hidden_states, rows)[:, :positions]))
            bias = bias[:, :, :positions]
        # Softmax in float32 whatever the computation type. It is divided by its sum after the product with the values,
        # which are fewer, and masked by a sum, which XLA fuses: both halve the time of the forward pass on a CPU.
        query = self._own_features(query[:, :, None])
        logits = jnp.einsum("BGHTD,BGSD->BGHTS", query, key, preferred_element_type=jnp.float32)
        by_group = logits.shape
        logits = logits.reshape(len(query), self.num_heads, *by_group[3:])
        logits = logits / jnp.sqrt(jnp.float32(self.head_size)) + bias
        exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
        kept = dropout(exponentials.astype(value.dtype), self.rate, keys).reshape(by_group)
        attended = jnp.einsum("BGHTS,BGSD->BGHTD", kept, value, preferred_element_type=jnp.float32)
        attended = attended / exponentials.sum(axis=-1).reshape(*by_group[:-1], 1)
        attended = self._own_features(attended).sum(axis=2).astype(value.dtype)
        attended = attended.transpose(0, 2, 1, 3).reshape(len(attended), by_group[3], -1)
        return self.output(attended if positions else pack(attended, rows))

    def _groups(self, states: Float[Array, "rows length hidden"]) -> Float[Array, "rows groups length features"]:
        """The features of the heads, group by group."""
        features = self.heads_of_group * self.head_size
        return states.reshape(*states.shape[:2], -1, features).transpose(0, 2, 1, 3)

    def _own_features(
        self, states: Float[Array, "rows groups #heads length features"]
    ) -> Float[Array, "rows groups heads length features"]:
        """Of every head of a group its own features, and zeros in place of the others'."""
        if self.heads_of_group == 1:
            return states
        head_of_feature = np.arange(states.shape[-1]) // self.head_size
        own = head_of_feature == np.arange(self.heads_of_group)[:, None]
        return jnp.where(own[None, None, :, None], states, 0.0)


def mask_bias(attention_mask: Int[Array, "rows length"]) -> Float[Array, "rows 1 1 length"]:
    """Additive attention bias: 0 at real tokens, half the float32 minimum at padding.

    Half, because another bias may be added to it, and the sum must stay finite.
    """
    return jnp.where(attention_mask > 0, 0.0, jnp.finfo(jnp.float32).min / 2)[:, None, None, :]


def trained_where(mask: jax.Array, vectors: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens hidden"]:
    """The vectors, whose gradient is 0 outside the mask."""
    return jnp.where(mask[..., None], vectors, jax.lax.stop_gradient(vectors))


def _split(keys: Key[Array, " rows"] | None, count: int) -> list[Key[Array, " rows"] | None]:
    """`count` new keys for each row."""
    return [None] * count if keys is None else list(jax.vmap(partial(jax.random.split, num=count), out_axes=1)(keys))
