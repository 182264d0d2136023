"""The value that a network reads: sentences as rows of tokens, their mask and, where padding is left out, their layout.

Nearly all of a transformer treats each token for itself: dense layers, norms, dropout. On packed tokens these cost what
the text costs, not what its longest sentence would; `models/packing.py` gathers them. The layout that it needs is made
here, on the host, where a batch is made, and travels with the tokens. A layout changes no result.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped


class PackedLayout(NamedTuple):
    """Where the real tokens of rows lie in a packed array, (blocks * capacity, ...).

    Each block holds the tokens of the rows that one device computes, so that gathering moves nothing between devices.
    """

    positions: Any  # (blocks, capacity) int32: of each slot in the block's rows, flattened; their size: an unused slot
    slots: Any  # (blocks, size) int32, the inverse: of each position of the block's rows; the capacity: padding


class TokenRows(NamedTuple):
    """Sentences, one a row."""

    input_ids: Any  # (rows, length) int32
    attention_mask: Any  # (rows, length) int32: 1 for real tokens, 0 for padding
    layout: PackedLayout | None = None  # None: padding is computed, too

    def padded(self) -> "TokenRows":
        """The same rows, whose padding is computed."""
        return self._replace(layout=None)


class Batch(NamedTuple):
    """A batch: of every example its views, which are anchor, positive and, in further columns, hard negatives."""

    input_ids: Any  # (examples, views, length) int32
    attention_mask: Any  # (examples, views, length) int32
    layout: PackedLayout | None = None  # of the rows of all views
    anchor_layout: PackedLayout | None = None  # of the anchors alone
    next: "Batch | None" = None  # the sentence after each example's in its document, once for every view
    vectors: Any = None  # stored ones of the views, by the names of their stores: (examples, views, dimension) float32
    labels: Any = None  # of the examples of a labelled task, by its name: (examples,) int32 or float32

    def padded(self) -> "Batch":
        """The same batch, whose padding is computed."""
        following = self.next and self.next.padded()
        return self._replace(layout=None, anchor_layout=None, next=following)

    @property
    def per_example(self) -> int:
        """The number of views: 2, and one for each column of hard negatives."""
        return self.input_ids.shape[1]

    @property
    def rows(self) -> TokenRows:
        """All views; row = example * count + view, so that the rows of an example are on one device."""
        ids, mask = (values.reshape(-1, values.shape[-1]) for values in (self.input_ids, self.attention_mask))
        return TokenRows(ids, mask, self.layout)

    def by_view(self, values: Any) -> tuple[Any, ...]:
        """Values of all rows, (rows, ...), as those of the first views, of the second ones, and so on."""
        of_examples = values.reshape(-1, self.per_example, *values.shape[1:])
        return tuple(of_examples[:, view] for view in range(self.per_example))

    @property
    def anchors(self) -> TokenRows:
        """The first view of every example."""
        return TokenRows(self.input_ids[:, 0], self.attention_mask[:, 0], self.anchor_layout)


def in_blocks(values: Shaped[np.ndarray, " rows"], devices: int, chunks: int) -> Shaped[np.ndarray, "blocks rest"]:
    """Values of rows as blocks of those computed together: block = device * chunks + chunk.

    A device has a run of consecutive rows; chunk c of a batch is its rows c, c + chunks, ...
    """
    return values.reshape(devices, -1, chunks).swapaxes(1, 2).reshape(devices * chunks, -1)


def lay_out(lengths: Int[np.ndarray, "blocks rows"], length: int, capacity: int) -> PackedLayout:
    """The layout of rows.

    Args:
        lengths: real tokens of every row.
        length: positions of every row, padding included.
        capacity: slots of a block.

    Raises:
        ValueError: a block has more tokens than slots.
    """
    fullest = int(lengths.sum(axis=1).max())
    if fullest > capacity:
        raise ValueError(f"a block of rows has {fullest} tokens and its layout only {capacity} slots")
    size = lengths.shape[1] * length
    real = (np.arange(length) < lengths[..., None]).reshape(len(lengths), size)
    slots = np.where(real, np.cumsum(real, axis=1) - 1, capacity).astype(np.int32)
    positions = np.full((len(lengths), capacity), size, np.int32)
    blocks, tokens = np.nonzero(real)
    positions[blocks, slots[real]] = tokens
    return PackedLayout(positions, slots)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Numbers of tokens."""

    size: int  # tokens of the tokenizer; a model may have more embeddings
    mask_id: int | None
    special_ids: tuple[int, ...]  # never masked: [CLS], [SEP], [PAD], [UNK], [MASK]
