"""What data hands to networks: tokens, their mask and, if padding is left out, their packed layout.

Most of a transformer treats each token by itself: dense layers, norms, dropout. On packed tokens these cost what the
text costs, not what its longest sentence would. `models/packing.py` gathers the tokens. The layout is computed here, on
the host, and travels with the tokens. It changes no result.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped


class PackedLayout(NamedTuple):
    """The places of real tokens in a packed array of shape (blocks * capacity, ...).

    A block holds the tokens of the rows that one device computes, so gathering moves nothing between devices.
    """

    positions: Any  # (blocks, capacity) int32: each slot's position in the flattened rows; their size if unused
    slots: Any  # (blocks, size) int32: each position's slot; the capacity for padding


class TokenRows(NamedTuple):
    """Sentences, one per row."""

    input_ids: Any  # (rows, length) int32
    attention_mask: Any  # (rows, length) int32: 1 for real tokens, 0 for padding
    layout: PackedLayout | None = None  # None: padding is computed as well

    def padded(self) -> "TokenRows":
        """Return the same rows without their layout, so that padding is computed."""
        return self._replace(layout=None)


class Batch(NamedTuple):
    """A batch of examples. The views of an example are its anchor, positive and hard negatives."""

    input_ids: Any  # (examples, views, length) int32
    attention_mask: Any  # (examples, views, length) int32
    layout: PackedLayout | None = None  # layout of the rows of all views
    anchor_layout: PackedLayout | None = None  # layout of the anchors alone
    next: "Batch | None" = None  # the sentence that follows each example in its document, once per view
    vectors: Any = None  # stored embeddings by the name of their store: (examples, views, dim) float32
    labels: Any = None  # labels by the name of their task: (examples,) int32 or float32

    def padded(self) -> "Batch":
        """Return the same batch without its layouts, so that padding is computed."""
        following = self.next and self.next.padded()
        return self._replace(layout=None, anchor_layout=None, next=following)

    @property
    def per_example(self) -> int:
        """The number of views: 2, plus one per column of hard negatives."""
        return self.input_ids.shape[1]

    @property
    def rows(self) -> TokenRows:
        """All views as rows; row = example * count + view, so the rows of an example are on one device."""
        ids, mask = (values.reshape(-1, values.shape[-1]) for values in (self.input_ids, self.attention_mask))
        return TokenRows(ids, mask, self.layout)

    def by_view(self, values: Any) -> tuple[Any, ...]:
        """Split values of all rows, shape (rows, ...), into those of the first views, the second views, and so on."""
        of_examples = values.reshape(-1, self.per_example, *values.shape[1:])
        return tuple(of_examples[:, view] for view in range(self.per_example))

    @property
    def anchors(self) -> TokenRows:
        """The first view of each example."""
        return TokenRows(self.input_ids[:, 0], self.attention_mask[:, 0], self.anchor_layout)


def in_blocks(values: Shaped[np.ndarray, " rows"], devices: int, chunks: int) -> Shaped[np.ndarray, "blocks rest"]:
    """Group values of rows into blocks that are computed together; block = device * chunks + chunk.

    A device has consecutive rows. Chunk c of a batch is its rows c, c + chunks, ...
    """
    return values.reshape(devices, -1, chunks).swapaxes(1, 2).reshape(devices * chunks, -1)


def lay_out(lengths: Int[np.ndarray, "blocks rows"], length: int, capacity: int) -> PackedLayout:
    """Return the layout of rows.

    Args:
        lengths: Number of real tokens of each row.
        length: Number of positions of a row, including padding.
        capacity: Number of slots of a block.

    Raises:
        ValueError: A block has more tokens than slots.
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
    """What masking needs to know of a tokenizer."""

    size: int  # number of tokens; a model may have more embeddings
    mask_id: int | None
    special_ids: tuple[int, ...]  # never masked: [CLS], [SEP], [PAD], [UNK], [MASK]
