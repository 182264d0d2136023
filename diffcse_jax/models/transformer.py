"""The transformer encoder: embeddings and blocks of self-attention and a feed-forward network.

`TransformerConfig` holds what differs between families (BERT, ModernBERT, ...). The modules in
`families/` fill it. Inputs are single sentences, so token type 0 is added everywhere.

Dropout depends on explicit keys, one per row, so a row does not depend on the rest of its batch. A
call without keys is deterministic. Modules hold no random state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from diffcse_jax.batch import (
    RowKeys,
    TokenRows,
    Tokens,
    pack,
    pack_ids,
    position_keys,
    token_keys,
    unpack,
)
from diffcse_jax.models.layers import ACTIVATIONS, Dense, Embedding, LayerNorm, dropout

LogitBias = Float[Array, "rows #heads _queries _length"]  # one for all queries, or one for each
# Queries, keys or values of heads, or of groups of heads.
Grouped = Float[Array, "groups rows _length features"]
# The bias on logits of tokens that are not seen. A sum of two is finite.
UNSEEN = np.finfo(np.float32).min / 2


class InputEmbeddings(nnx.Module):
    """The sum of word, position and token-type embeddings, normalised.

    Positions are numbered from 0. With rotary positions, there are no position embeddings.
    """

    def __init__(self, config: "TransformerConfig", *, dtype: DTypeLike, rngs: nnx.Rngs):
        embed = partial(
            Embedding, features=config.word_size, devices=config.devices, dtype=dtype, rngs=rngs
        )
        self.word = embed(config.vocab_size)
        self.position = None if config.rotary_bases else embed(config.max_positions)
        self.token_type = embed(config.type_vocab_size) if config.type_vocab_size else None
        self.norm = LayerNorm(
            config.word_size, config.norm_epsilon, bias=config.norm_bias, dtype=dtype
        )
        self.pad_token_id = config.pad_token_id
        self.rate = config.embedding_dropout

    def __call__(self, rows: TokenRows, *, keys: RowKeys) -> Tokens:
        input_ids = pack_ids(rows.input_ids, rows, fill=self.pad_token_id)
        # DiffCSE's loss reads padding too, but the padding row is not trained (PyTorch's
        # padding_idx).
        embedded = trained_where(input_ids != self.pad_token_id, self.word(input_ids))
        if self.position is not None:
            embedded += self.embed_positions(self.position, rows)
        if self.token_type is not None:
            embedded += self.token_type(jnp.zeros_like(input_ids))
        keys = None if keys is None else token_keys(keys, rows)
        return dropout(self.norm(embedded), self.rate, keys)

    def embed_positions(self, table: Embedding, rows: TokenRows) -> Tokens:
        """Look up the position of every token in a table of position embeddings."""
        numbers = jnp.broadcast_to(jnp.arange(rows.input_ids.shape[1]), rows.input_ids.shape)
        return table(pack_ids(numbers, rows, fill=0))


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes of an encoder and what is particular to its family.

    The fields from `recompute` on say how to compute. They change embeddings by rounding errors
    only, and `most_queries` also dropout masks.

    Attributes:
        family: The `model_type` of its checkpoints.
        max_positions: Rows of the position table, or the longest text with rotary positions.
        type_vocab_size: The number of token types. 0: none.
        hidden_dropout: One rate per block.
        attention_dropout: One rate per block.
        position_offset: The position number of the first token.
        attention_output_dropout: Whether hidden dropout applies to the output of self-attention.
        rotary_factor: Rotary positions are divided by it.
        mlm_activation: The activation of the masked-LM head. Empty: `activation`.
        mlm_transform_bias: Whether the masked-LM head's first layer has a bias.
        embedding_size: The size of word embeddings. 0: `hidden_size`.
        norm_bias: Whether norms have a bias.
        final_norm: Whether a norm follows the last block.
        embeddings: The module of the input embeddings.
        block: A module with the arguments and calls of `Block`. None: `Block`.
        rotary_bases: The base of the rotary positions of each block. Empty: position embeddings.
        windows: For each block, how many tokens to either side a token sees. 0 or empty: all.
        attention_bias: Builds a module `module(config, rngs=rngs)` that all blocks share. It maps a
            number of positions to a bias on attention logits, shape (1, heads, positions,
            positions), in float32.
        recompute: Whether the backward pass computes activations again.
        lanes: The lanes of a register, which attention fills with several heads.
        devices: The number of devices that rows are split over.
        most_queries: Attention divides longer sentences into parts.
        fused: Whether the device has a kernel for attention.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int
    norm_epsilon: float
    activation: str
    pad_token_id: int
    embedding_dropout: float
    hidden_dropout: tuple[float, ...]
    attention_dropout: tuple[float, ...]
    position_offset: int = 0
    attention_output_dropout: bool = True
    rotary_factor: float = 1.0
    mlm_activation: str = ""
    mlm_transform_bias: bool = True
    embedding_size: int = 0
    norm_bias: bool = True
    final_norm: bool = False
    embeddings: type[InputEmbeddings] = InputEmbeddings
    block: Callable[..., Any] | None = None
    rotary_bases: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    attention_bias: Callable[..., nnx.Module] | None = None
    recompute: bool = dataclasses.field(default=True, repr=False)
    lanes: int = dataclasses.field(default=1, repr=False)
    devices: int = dataclasses.field(default=1, repr=False)
    most_queries: int = dataclasses.field(default=512, repr=False)
    fused: bool = dataclasses.field(default=False, repr=False)

    @property
    def word_size(self) -> int:
        """The size of word embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest sentence that has positions."""
        return self.max_positions - self.position_offset

    def on(self, device: jax.Device, devices: int = 1) -> "TransformerConfig":
        """Return the same encoder for a kind of device, with rows split over `devices` of them."""
        lanes = 128 if device.platform == "tpu" else 1
        return dataclasses.replace(
            self, lanes=lanes, devices=devices, fused=has_fused_attention(device)
        )

    def with_dropout(
        self, hidden: tuple[float, ...], attention: tuple[float, ...]
    ) -> "TransformerConfig":
        """Return the same encoder with other dropout rates, as `block_rates` reads them.

        A single hidden rate for all blocks also applies to the embedding layer, as in the
        originals. Otherwise the embedding layer keeps the checkpoint's rate.
        """
        return dataclasses.replace(
            self,
            embedding_dropout=hidden[0] if len(hidden) == 1 else self.embedding_dropout,
            hidden_dropout=block_rates(hidden, self.num_blocks),
            attention_dropout=block_rates(attention, self.num_blocks),
        )


def block_rates(rates: tuple[float, ...], num_blocks: int) -> tuple[float, ...]:
    """Return one dropout rate for each block, from one for all blocks or one for each.

    Raises:
        ValueError: The number of rates is neither 1 nor `num_blocks`.
    """
    if len(rates) not in (1, num_blocks):
        raise ValueError(
            f"{len(rates)} rates for {num_blocks} blocks. Give 1 rate, or {num_blocks}, one for "
            "each block"
        )
    return rates * (num_blocks // len(rates))


class Blocks(nnx.Module):
    """Blocks of an encoder, the attention bias that they share, and the last norm.

    The bias is added to attention logits.
    """

    def __init__(
        self, config: TransformerConfig, indices: range, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.attention_bias = (
            config.attention_bias(config, rngs=rngs) if config.attention_bias else None
        )
        build = config.block or Block
        self.blocks = nnx.List(build(config, index, dtype=dtype, rngs=rngs) for index in indices)
        norm = partial(
            LayerNorm, config.hidden_size, config.norm_epsilon, bias=config.norm_bias, dtype=dtype
        )
        self.final_norm = norm() if config.final_norm else None

    def run(
        self,
        states: Tokens,
        rows: TokenRows,
        keys: Sequence[RowKeys],
        last_positions: int | None = None,
    ) -> list[Float[Array, "rows _length hidden"]]:
        """Return the output of each block, which has dropout keys of its own.

        The last block computes only the first `last_positions` (None: all).
        """
        bias = logit_bias(rows.attention_mask, self.attention_bias)
        of_blocks = split_keys(keys, rows, last_positions, self.blocks[0].outputs_dropped)
        outputs = []
        for index, (block, own) in enumerate(zip(self.blocks, of_blocks, strict=True), start=1):
            positions = last_positions if index == len(self.blocks) else None
            states = block(states, rows, bias, keys=own, positions=positions)
            if index == len(self.blocks) and self.final_norm is not None:
                states = self.final_norm(states)
            outputs.append(states if positions else unpack(states, rows))
        return outputs


class Transformer(Blocks):
    """An encoder: tokens to hidden states. `dtype` is the computation type."""

    def __init__(
        self, config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        self.embeddings = config.embeddings(config, dtype=dtype, rngs=rngs)
        super().__init__(config, range(config.num_blocks), dtype=dtype, rngs=rngs)

    def __call__(
        self,
        rows: TokenRows,
        *,
        condition: Float[Array, "rows hidden"] | None = None,
        keys: RowKeys = None,
        last_positions: int | None = None,
    ) -> tuple[Float[Array, "rows _length hidden"], ...]:
        """Return the hidden states: the output of the embedding layer and of each block.

        Ignore values at padding.

        Args:
            rows: Sentences.
            condition: Embeddings that replace position 0 of the embedding layer's output, after its
                norm and dropout. DiffCSE conditions its discriminator in this way (Section 3).
            keys: A dropout key for each row. None: no dropout.
            last_positions: How many of the first positions the last block computes. None: all.
        """
        embedding_keys, *keys_of_blocks = new_keys(keys, 1 + len(self.blocks))
        states = self.embeddings(rows, keys=embedding_keys)
        embedded = unpack(states, rows)
        if condition is not None:
            embedded = embedded.at[:, 0].set(condition.astype(states.dtype))
            states = pack(embedded, rows)
        return (embedded, *self.run(states, rows, keys_of_blocks, last_positions))


class Block(nnx.Module):
    """Self-attention and a feed-forward network, each followed by a residual connection and a norm.

    `bias` says whether dense layers have biases, and `unit_bias` whether units and gates have them
    (None: as `bias`). With `gated`, units are multiplied by a gate. With `unit_dropout`, hidden
    dropout applies to the product as well.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        *,
        bias: bool = True,
        gated: bool = False,
        unit_bias: bool | None = None,
        unit_dropout: bool = False,
        attention_norm: bool = True,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        dense = partial(Dense, dtype=dtype, rngs=rngs)
        unit_bias = bias if unit_bias is None else unit_bias
        units = partial(dense, config.hidden_size, config.intermediate_size, bias=unit_bias)
        norm = partial(
            LayerNorm, config.hidden_size, config.norm_epsilon, bias=config.norm_bias, dtype=dtype
        )
        self.attention = SelfAttention(config, index, bias=bias, dtype=dtype, rngs=rngs)
        self.attention_norm = norm() if attention_norm else None
        self.intermediate = units()
        self.output = dense(config.intermediate_size, config.hidden_size, bias=bias)
        self.output_norm = norm()
        self.gate = units() if gated else None
        self.outputs_dropped = 3 if unit_dropout else 2
        self.activation = config.activation
        self.output_dropout = config.hidden_dropout[index]
        self.attention_output_dropout = (
            self.output_dropout if config.attention_output_dropout else 0.0
        )
        self.recompute = config.recompute

    def __call__(
        self,
        hidden_states: Tokens,
        rows: TokenRows,
        bias: LogitBias,
        *,
        keys: "BlockKeys",
        positions: int | None = None,
    ) -> Float[Array, "*outputs hidden"]:
        """Return the output at all tokens or, with `positions`, at the first positions.

        These attend to all tokens, and are returned as rows.
        """
        attention_keys, output_keys, *unit_keys = keys.outputs
        attended = self.attention(
            hidden_states, rows, bias, keys=keys.attention, positions=positions
        )
        if positions is not None:
            hidden_states = unpack(hidden_states, rows)[:, :positions]
        attended = dropout(attended, self.attention_output_dropout, attention_keys)
        assert self.attention_norm is not None
        hidden_states = self.attention_norm(hidden_states + attended)
        units = self.activated(hidden_states)
        if unit_keys:
            units = dropout(units, self.output_dropout, unit_keys[0])
        transformed = dropout(self.output(units), self.output_dropout, output_keys)
        return self.output_norm(hidden_states + transformed)

    def activated(
        self, hidden_states: Float[Array, "*outputs hidden"]
    ) -> Float[Array, "*outputs intermediate"]:
        """Return the activated units of the feed-forward network.

        If there are gates, the units are multiplied by them (Shazeer 2020).
        """

        def activate(units: jax.Array, gate: jax.Array | None) -> jax.Array:
            activated = ACTIVATIONS[self.activation](units)
            return activated if gate is None else activated * gate

        units = self.intermediate(hidden_states)
        gate = None if self.gate is None else self.gate(hidden_states)
        with jax.named_scope("activation"):
            return (jax.checkpoint(activate) if self.recompute else activate)(units, gate)


class SelfAttention(nnx.Module):
    """Multi-head attention over the real tokens of a sentence, with dropout on the probabilities.

    A token sees all others, or those in a window. Positions may be rotary.

    On a TPU, heads are computed in groups whose features together fill the lanes of a register. A
    head sees zeros in place of the other heads' features, so results do not change. The products
    write the groups, unless padding is left out. Elsewhere a group is one head.

    Sentences of more than `most_queries` tokens are computed in parts, or by the device's kernel if
    it can: in bfloat16, without a window and without dropout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        *,
        bias: bool = True,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        project = partial(
            Dense, config.hidden_size, config.hidden_size, bias=bias, dtype=dtype, rngs=rngs
        )
        self.query, self.key, self.value, self.output = project(), project(), project(), project()
        self.num_heads = config.num_heads
        self.head_size = config.hidden_size // config.num_heads
        fitting = max(1, config.lanes // self.head_size)
        self.heads_of_group = fitting if config.num_heads % fitting == 0 else 1
        self.num_groups = config.num_heads // self.heads_of_group
        self.splits_in_product = config.lanes > 1
        self.rate = config.attention_dropout[index]
        self.rotary_base = config.rotary_bases[index] if config.rotary_bases else 0.0
        self.rotary_factor = config.rotary_factor
        self.window = config.windows[index] if config.windows else 0
        self.most_queries = config.most_queries
        self.has_own_bias = config.attention_bias is not None
        self.has_kernel = (
            config.fused and self.head_size % 8 == 0 and self.head_size <= 128 and not self.window
        )

    @jax.named_scope("attention")
    def __call__(
        self,
        hidden_states: Tokens,
        rows: TokenRows,
        bias: LogitBias,
        *,
        keys: RowKeys,
        positions: int | None,
    ) -> Float[Array, "*outputs hidden"]:
        """Return the output at all tokens. With `positions`, return rows of the first positions."""
        key = self._of_rows(self.key, hidden_states, rows)
        value = self._of_rows(self.value, hidden_states, rows)
        if positions is None:
            query = self._of_rows(self.query, hidden_states, rows)
        else:
            query = self._groups(self.query(unpack(hidden_states, rows)[:, :positions]))
            bias = bias[:, :, :positions]
        if self.rotary_base:
            turn = partial(
                rotate, base=self.rotary_base, head_size=self.head_size, factor=self.rotary_factor
            )
            query, key = turn(query), turn(key)
        # A family's own bias is as large as the logits, so parts would save nothing.
        is_long = query.shape[2] > self.most_queries and not self.has_own_bias
        # cuDNN trains no odd length.
        fits = query.dtype == jnp.bfloat16 and query.shape[2] % 2 == key.shape[2] % 2 == 0
        if is_long and fits and self.has_kernel and (keys is None or self.rate == 0.0):
            attended = fused_attention(query, key, value, rows.attention_mask.sum(axis=1))
        else:
            attend = self._attend_in_parts if is_long else self._attend
            attended = attend(query, key, value, bias, keys)
        # First one axis of tokens, which a TPU moves behind the groups without a copy.
        joined = attended.reshape(self.num_groups, -1, attended.shape[-1]).swapaxes(0, 1)
        joined = joined.reshape(*attended.shape[1:3], -1)
        return self.output(joined if positions else pack(joined, rows))

    def _attend(
        self,
        query: Grouped,
        key: Grouped,
        value: Grouped,
        bias: LogitBias,
        keys: RowKeys,
        *,
        first: int = 0,
    ) -> Grouped:
        """Return the weighted means of the values.

        `first` is the position of the first query among the keys.
        """
        if self.window:
            positions = jnp.arange(first, first + query.shape[2])
            distance = jnp.abs(positions[:, None] - jnp.arange(key.shape[2])[None])
            bias += jnp.where(distance <= self.window, 0.0, UNSEEN)[None, None]
        # Padding is masked by a bias, which XLA fuses.
        query = self._own_features(query[:, :, None])
        logits = jnp.einsum("GBHTD,GBSD->GBHTS", query, key, preferred_element_type=jnp.float32)
        logits = logits / jnp.sqrt(jnp.float32(self.head_size)) + self._heads_by_group(bias)
        # The masks are of each row, so rows come first.
        probabilities = jax.nn.softmax(logits).astype(value.dtype).swapaxes(0, 1)
        kept = dropout(probabilities, self.rate, keys).swapaxes(0, 1)
        attended = jnp.einsum("GBHTS,GBSD->GBHTD", kept, value, preferred_element_type=jnp.float32)
        if self.window:  # padding may see no real token
            sees_some = logits.max(axis=-1, keepdims=True) > UNSEEN / 2
            attended = jnp.where(sees_some, attended, 0.0)
        return self._own_features(attended).sum(axis=2).astype(value.dtype)

    def _attend_in_parts(
        self, query: Grouped, key: Grouped, value: Grouped, bias: LogitBias, keys: RowKeys
    ) -> Grouped:
        """Return what `_attend` returns, for one part of the queries after the other.

        The dropout masks differ. The backward pass computes each part again, so memory grows with
        the length and not with its square. With a window, a part reads only the keys in its
        windows, so time grows with the length as well.
        """
        count = query.shape[2]
        window = self.window
        parts = -(-count // self.most_queries)
        queries = -(-count // parts)  # of a part
        padding = parts * queries - count
        seen = queries + 2 * window if window else key.shape[2]  # keys that a part reads
        # Positions that the windows of the first and last queries reach.
        outside = (window, window + padding)
        query = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0)))
        if window:
            key, value = (jnp.pad(each, ((0, 0), (0, 0), outside, (0, 0))) for each in (key, value))
            bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), outside), constant_values=UNSEEN)

        def attend(part: jax.Array, query: jax.Array) -> jax.Array:
            near = partial(
                jax.lax.dynamic_slice_in_dim,
                start_index=part * queries if window else 0,
                slice_size=seen,
            )
            part_keys = (
                None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, part)
            )
            states = query, near(key, axis=2), near(value, axis=2)
            return self._attend(*states, near(bias, axis=3), part_keys, first=window)

        # A loop's forward and backward passes cannot be merged.
        attend = jax.checkpoint(attend, prevent_cse=False)
        by_part = query.reshape(*query.shape[:2], parts, queries, -1).transpose(2, 0, 1, 3, 4)
        attended = jax.lax.map(lambda each: attend(*each), (jnp.arange(parts), by_part))
        return attended.transpose(1, 2, 0, 3, 4).reshape(query.shape)[:, :, :count]

    def _of_rows(self, project: Dense, hidden_states: Tokens, rows: TokenRows) -> Grouped:
        if rows.layout is not None or not self.splits_in_product:
            return self._groups(unpack(project(hidden_states), rows))
        by_group = project.by_group(hidden_states, self.num_groups)
        return by_group.reshape(self.num_groups, *rows.input_ids.shape, by_group.shape[-1])

    def _groups(self, states: Float[Array, "rows length hidden"]) -> Grouped:
        return states.reshape(*states.shape[:2], self.num_groups, -1).transpose(2, 0, 1, 3)

    def _heads_by_group(
        self, bias: LogitBias
    ) -> Float[Array, "#groups rows #heads _queries _length"]:
        rows, heads, *others = bias.shape
        groups = 1 if heads == 1 else self.num_groups
        return bias.reshape(rows, groups, heads // groups, *others).swapaxes(0, 1)

    def _own_features(
        self, states: jax.Array
    ) -> Float[Array, "groups rows heads _length features"]:
        """Return each head's own features.

        In place of the features of the other heads of its group, there are zeros.
        """
        if self.heads_of_group == 1:
            return states
        head_of_feature = np.arange(states.shape[-1]) // self.head_size
        is_of_head = head_of_feature == np.arange(self.heads_of_group)[:, None]
        return jnp.where(is_of_head[None, None, :, None], states, 0.0)


def has_fused_attention(device: jax.Device) -> bool:
    """Return whether `fused_attention` runs on a device: NVIDIA's GPUs since Ampere (8.0)."""
    # For AMD's GPUs, this is a name.
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "gpu" and capability.isdigit() and int(capability) >= 8


def fused_attention(
    query: Grouped, key: Grouped, value: Grouped, lengths: Int[Array, " rows"]
) -> Grouped:
    """Return the weighted means of the first `lengths` values, by cuDNN's kernel.

    The kernel keeps no logits.
    """
    lengths = jnp.maximum(lengths, 1)  # a row without tokens would be a mean of nothing
    by_token = (states.transpose(1, 2, 0, 3) for states in (query, key, value))
    attended = jax.nn.dot_product_attention(
        *by_token, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return attended.transpose(2, 0, 1, 3)


def logit_bias(
    attention_mask: Int[Array, "rows length"], of_positions: nnx.Module | None = None
) -> LogitBias:
    """Return the bias on attention logits: a family's own bias, and what hides padding."""
    bias = jnp.where(attention_mask > 0, 0.0, UNSEEN)[:, None, None, :]
    return bias if of_positions is None else bias + of_positions(attention_mask.shape[1])


def rotate(states: Grouped, base: float, head_size: int, factor: float = 1.0) -> Grouped:
    """Add rotary positions to queries or keys (RoPE, Su et al. 2021, Section 3.4.2).

    These are of one or several heads. The features i and i + head_size / 2 of a head are a point in
    a plane. At position p, it is turned by the angle p / factor * base^(-2i / head_size). The
    product of a query and a key then depends on their distance.
    """
    half = head_size // 2
    (length, features) = states.shape[2:]
    frequencies = np.float32(1) / np.float32(base) ** (
        np.arange(0, head_size, 2, dtype=np.float32) / head_size
    )
    frequencies /= np.float32(factor)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None]
    cosines, sines = (
        jnp.tile(function(angles), features // half)[None, None] for function in (jnp.cos, jnp.sin)
    )
    x = states.astype(jnp.float32)
    is_first = np.arange(features) % head_size < half
    # Each point, turned by a quarter.
    turned = jnp.where(is_first, -jnp.roll(x, -half, axis=-1), jnp.roll(x, half, axis=-1))
    return (x * cosines + turned * sines).astype(states.dtype)


def trained_where(
    mask: Bool[Array, "*tokens"], vectors: Float[Array, "*tokens hidden"]
) -> Float[Array, "*tokens hidden"]:
    """Return the vectors, with gradient 0 outside the mask."""
    return jnp.where(mask[..., None], vectors, jax.lax.stop_gradient(vectors))


class BlockKeys(NamedTuple):
    """A block's dropout keys: for the rows of its attention, and for the tokens of its outputs."""

    attention: RowKeys
    outputs: tuple[Key[Array, "..."] | None, ...]


def split_keys(
    keys: Sequence[RowKeys], rows: TokenRows, last_positions: int | None, outputs: int
) -> list[BlockKeys]:
    """Return the dropout keys of each block, from a key for each row.

    They are made for all blocks at once, because an accelerator takes as long for a few keys as for
    many. The last block has outputs at its first `last_positions` only (None: all).
    """
    given = [of_block for of_block in keys if of_block is not None]
    if not given:
        return [BlockKeys(None, (None,) * outputs)] * len(keys)
    split = jax.vmap(jax.vmap(partial(jax.random.split, num=1 + outputs), out_axes=1))
    of_parts = split(jnp.stack(given))  # (blocks, 1 + outputs, rows)
    of_attention, of_outputs = of_parts[:, 0], of_parts[:, 1:]
    of_tokens = list(jax.vmap(jax.vmap(lambda part: token_keys(part, rows)))(of_outputs))
    if last_positions is not None:
        of_tokens[-1] = jax.vmap(lambda part: position_keys(part, last_positions))(of_outputs[-1])
    return [
        BlockKeys(*of_block) for of_block in zip(of_attention, map(tuple, of_tokens), strict=True)
    ]


def new_keys(keys: RowKeys, count: int) -> list[RowKeys]:
    """Return `count` new keys for each row."""
    if keys is None:
        return [None] * count
    return list(jax.vmap(partial(jax.random.split, num=count), out_axes=1)(keys))
