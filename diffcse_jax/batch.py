"""What data hands to networks: tokens, their mask and, if padding is left out, their packed layout.

Most of a transformer treats each token by itself: dense layers, norms, dropout. On packed tokens,
(tokens, ...), the cost of these depends only on the number of real tokens. `pack` and `unpack`
convert between rows, (rows, length, ...), and packed tokens. Without a layout, the packed tokens
are all positions, so that networks are written once for both. Values at real tokens are the same in
both cases, and nothing reads values at padding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, Shaped

from diffcse_jax.errors import ConfigError

RowKeys = Key[Array, " rows"] | None  # one dropout key per row, or None for no dropout
Tokens = Float[Array, "tokens hidden"]  # packed


class PackedLayout(NamedTuple):
    """The places of real tokens in a packed array of shape (blocks * capacity, ...).

    A block holds the tokens of the rows that one device computes, so gathering moves nothing
    between devices.

    Attributes:
        positions: The position of each slot in the flattened rows, or their size if the slot is
            unused. Shape (blocks, capacity), int32.
        slots: The slot of each position, or the capacity for padding. Shape (blocks, size), int32.
    """

    positions: Any
    slots: Any


class TokenRows(NamedTuple):
    """Sentences, one per row."""

    input_ids: Any  # (rows, length) int32
    attention_mask: Any  # (rows, length) int32: 1 for real tokens, which come first, 0 for padding
    layout: PackedLayout | None = None  # None: padding is computed as well

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> "TokenRows":
        """Return the rows of a tokenizer's output.

        Raise ConfigError for other token types than 0, such as those of pairs of texts, and for
        padding before a text.
        """
        if np.any(inputs.get("token_type_ids", 0)):
            raise ConfigError(
                "token_type_ids: networks add token type 0 everywhere, and these are others. "
                "Tokenise single texts, not pairs"
            )
        mask = np.asarray(inputs["attention_mask"])
        if (mask[:, 1:] > mask[:, :-1]).any():
            raise ConfigError(
                "attention_mask: padding stands before a text, and networks count positions from "
                "the first column. Set tokenizer.padding_side='right'"
            )
        return cls(jnp.asarray(inputs["input_ids"]), jnp.asarray(mask))

    def padded(self) -> "TokenRows":
        """Return the same rows without their layout, so that padding is computed."""
        return self._replace(layout=None)


class Ranked(NamedTuple):
    """Queries, the passages that they are compared with, and what a teacher thinks of these.

    Attributes:
        queries: Embeddings of length 1, by the starting checkpoint. Shape (examples, dim), float32.
        passages: Embeddings of length 1 that do not change. Shape (passages, dim), float32.
        scores: The teacher's scores, and -inf for passages that are left out of a query's ranking.
            Shape (examples, passages), float32.
        spread: The standard deviation of each query's cosine similarities before training. Shape
            (examples,), float32.
    """

    queries: Any
    passages: Any
    scores: Any
    spread: Any


class Batch(NamedTuple):
    """A batch of examples. The views of an example are its anchor, positive and hard negatives.

    Queries whose passages are ranked have embeddings and no tokens.

    Attributes:
        input_ids: Shape (examples, views, length), int32.
        attention_mask: Shape (examples, views, length), int32.
        layout: The layout of the rows of all views.
        anchor_layout: The layout of the anchors alone.
        next: The sentence that follows each example in its document, once per view.
        labels: Labels by the name of their task. Shape (examples,), int32 or float32.
        ranked: The examples as queries, with passages that a teacher ranks for them.
    """

    input_ids: Any = None
    attention_mask: Any = None
    layout: PackedLayout | None = None
    anchor_layout: PackedLayout | None = None
    next: "Batch | None" = None
    labels: Any = None
    ranked: Ranked | None = None

    @property
    def num_views(self) -> int:
        """The number of views: 2, plus one per column of hard negatives."""
        return self.input_ids.shape[1]

    @property
    def rows(self) -> TokenRows:
        """All views as rows.

        Row = example * num_views + view, so the rows of an example are on one device.
        """
        ids, mask = (
            values.reshape(-1, values.shape[-1]) for values in (self.input_ids, self.attention_mask)
        )
        return TokenRows(ids, mask, self.layout)

    def by_view(self, values: Any) -> tuple[Any, ...]:
        """Split values of all rows, shape (rows, ...), into those of each view."""
        of_examples = values.reshape(-1, self.num_views, *values.shape[1:])
        return tuple(of_examples[:, view] for view in range(self.num_views))

    @property
    def anchors(self) -> TokenRows:
        """The first view of each example."""
        return TokenRows(self.input_ids[:, 0], self.attention_mask[:, 0], self.anchor_layout)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know about a tokenizer."""

    size: int  # number of tokens; a model may have more embeddings
    mask_id: int | None
    special_ids: tuple[int, ...]  # never masked: [CLS], [SEP], [PAD], [UNK], [MASK]


def in_blocks(
    values: Shaped[np.ndarray, " rows"], devices: int, chunks: int
) -> Shaped[np.ndarray, "blocks rest"]:
    """Group values of rows into blocks that are computed together; block = device * chunks + chunk.

    A device has consecutive rows, and so has each of its chunks.
    """
    return values.reshape(devices * chunks, -1)


def lay_out(lengths: Int[np.ndarray, "blocks rows"], length: int, capacity: int) -> PackedLayout:
    """Return the layout of rows with these numbers of real tokens.

    Raise ValueError if a block's slots do not suffice. Rows have `length` positions, and blocks
    have `capacity` slots.
    """
    fullest = int(lengths.sum(axis=1).max())
    if fullest > capacity:
        raise ValueError(
            f"a block of rows has {fullest} tokens and its layout only {capacity} slots"
        )
    size = lengths.shape[1] * length
    real = (np.arange(length) < lengths[..., None]).reshape(len(lengths), size)
    slots = np.where(real, np.cumsum(real, axis=1) - 1, capacity).astype(np.int32)
    positions = np.full((len(lengths), capacity), size, np.int32)
    blocks, tokens = np.nonzero(real)
    positions[blocks, slots[real]] = tokens
    return PackedLayout(positions, slots)


def pack_ids(ids: Int[Array, "rows length"], rows: TokenRows, fill: int) -> Int[Array, " tokens"]:
    """Return the integers of the tokens, and `fill` in unused slots."""
    if rows.layout is None:
        return ids.reshape(-1)
    ids = ids.reshape(rows.layout.slots.shape)
    packed = jax.vmap(lambda ids, where: ids.at[where].get(mode="fill", fill_value=fill))(
        ids, rows.layout.positions
    )
    return packed.reshape(-1)


def pack(states: Float[Array, "rows length hidden"], rows: TokenRows) -> Tokens:
    """Return the states of the tokens."""
    if rows.layout is None:
        return states.reshape(-1, states.shape[-1])
    states = states.reshape(*rows.layout.slots.shape, states.shape[-1])
    return jax.vmap(_gather)(states, rows.layout.positions, rows.layout.slots).reshape(
        -1, states.shape[-1]
    )


def unpack(states: Tokens, rows: TokenRows) -> Float[Array, "rows length hidden"]:
    """Return the states as rows, with zeros at padding that was left out. The inverse of `pack`."""
    if rows.layout is not None:
        states = states.reshape(*rows.layout.positions.shape, -1)
        states = jax.vmap(_gather)(states, rows.layout.slots, rows.layout.positions)
    return states.reshape(*rows.input_ids.shape, states.shape[-1])


def position_keys(keys: Key[Array, " rows"], positions: int) -> Key[Array, "rows positions"]:
    """Return a key for each of the first positions of each row."""
    numbers = jnp.arange(positions)
    return jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, numbers))(keys)


def token_keys(keys: Key[Array, " rows"], rows: TokenRows) -> Key[Array, " tokens"]:
    """Return the key of `position_keys` for each token, which is the same in every layout."""
    length = rows.input_ids.shape[1]
    if rows.layout is None:
        return position_keys(keys, length).reshape(-1)
    where = rows.layout.positions

    # Unused slots lie beyond the last row. They get its key, which nothing reads.
    def gather(keys: jax.Array, numbers: jax.Array) -> jax.Array:
        return keys.at[numbers].get(mode="clip")

    of_rows = jax.vmap(gather)(keys.reshape(len(where), -1), where // length)
    return jax.vmap(jax.random.fold_in)(of_rows.reshape(-1), where.reshape(-1) % length)


@jax.custom_vjp
def _gather(
    values: Shaped[Array, "from hidden"], indices: Int[Array, " to"], inverse: Int[Array, " from"]
) -> Shaped[Array, "to hidden"]:
    """Return `values[indices]`, with zeros where an index is out of bounds.

    Each index occurs once, so the gradient is a gather by the inverse. Automatic differentiation
    would make it a scatter-add, which is slow.
    """
    del inverse
    return values.at[indices].get(mode="fill", fill_value=0)


_gather.defvjp(
    lambda values, indices, inverse: (_gather(values, indices, inverse), (indices, inverse)),
    lambda saved, gradient: (_gather(gradient, *saved[::-1]), None, None),
)
