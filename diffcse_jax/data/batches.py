"""Batches of tokens for the train step. Batch `i` is a function of the store, the seed and `i`.

NumPy gathers a whole batch at once, because Grain is slow with single sentences. The train step is
compiled for each shape of a batch, so a run has few shapes. Lengths depend on the text alone, not
on devices or packing.
"""

import collections
import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from diffcse_jax.batch import Batch, PackedLayout, in_blocks, lay_out
from diffcse_jax.data.sampling import Augmentation
from diffcse_jax.data.token_store import Examples

if TYPE_CHECKING:
    import grain

COMPILATION_STEPS = 8  # a program takes at least as long to compile as so many steps take
SAMPLE = 512  # batches that determine the shapes of a longer run
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)  # lengths in tokens
STEPS_OF_SHARE = 16


# Shapes


class BatchShape(NamedTuple):
    """A length, and the share of a batch's positions, in sixteenths, that may be real tokens."""

    length: int
    sixteenths: int

    @property
    def packed(self) -> bool:
        """Return whether padding is left out."""
        return self.sixteenths < STEPS_OF_SHARE

    def capacity(self, positions: int) -> int:
        """Return the number of slots for real tokens in a batch with this many positions."""
        return math.ceil(positions * self.sixteenths / STEPS_OF_SHARE)

    @classmethod
    def of(cls, length: int, share: float) -> "BatchShape":
        """Return the smallest shape of a length that holds this share of real tokens."""
        return cls(length, math.ceil(STEPS_OF_SHARE * share))


def choose_lengths(longest: Iterable[int], max_length: int) -> tuple[int, ...]:
    """Choose `max_length` and perhaps a shorter length for batches with these longest sentences."""
    counts = collections.Counter(longest)

    def positions(shorter: int) -> int:
        return sum(
            count * (shorter if length <= shorter else max_length)
            for length, count in counts.items()
        )

    best = min((max_length, *(length for length in BUCKETS if length < max_length)), key=positions)
    return tuple(sorted({best, max_length}))


def choose_shapes(
    needed: Sequence[BatchShape], lengths: Sequence[int], steps: int
) -> tuple[BatchShape, ...]:
    """Choose at most four shapes that fit all batches.

    Each one added is the one that saves the most positions. It must save more than its compilation
    costs.

    Args:
        needed: The shapes that a sample of the batches needs.
        lengths: The lengths of batches.
        steps: The number of steps of the run.
    """
    counts = collections.Counter(needed)
    chosen = [BatchShape(length, STEPS_OF_SHARE) for length in lengths]
    compilation = COMPILATION_STEPS * max(map(math.prod, counts))

    def cost(shapes: Sequence[BatchShape]) -> float:
        positions = 0
        used = set()
        for shape, count in counts.items():
            smallest = smallest_shape(shapes, shape)
            used.add(smallest)
            positions += count * math.prod(smallest)
        return positions * steps / len(needed) + compilation * len(used)

    while len(chosen) < 4:
        more = min(([*chosen, shape] for shape in sorted(counts)), key=cost)
        if cost(more) >= cost(chosen):
            break
        chosen = more
    return tuple(sorted(chosen))


def smallest_shape(shapes: Sequence[BatchShape], needed: BatchShape) -> BatchShape:
    """Return the smallest shape of the same length that holds a batch."""
    return min(shape for shape in shapes if shape.length == needed.length and shape >= needed)


# Batches of one text


class Shards(NamedTuple):
    """The part of each global batch that one process feeds: shards along the mesh's data axis."""

    local: range = range(1)
    total: int = 1

    def of(self, rows: int) -> slice:
        """Return the process's slice of these rows."""
        return slice(self.local.start * rows // self.total, self.local.stop * rows // self.total)


class Packing(NamedTuple):
    """How batches without padding are laid out."""

    chunks: int = 1  # parts that the networks compute one after the other
    anchors: bool = False  # also lay out the anchors alone, but not those of next sentences
    # Sixteenths of real positions. Fuller batches keep their padding.
    fullest: int = STEPS_OF_SHARE - 1


@dataclasses.dataclass(eq=False)
class BatchSource:
    """Random access to the batches of a run, with the rows of one process.

    A batch is a `Batch` of NumPy arrays. The sentence of a single column becomes two views, which
    dropout or an augmentation makes different, unless no loss compares views. All processes pad a
    batch to the smallest of the run's lengths that holds the longest sentence of the global batch.

    Attributes:
        store: The examples.
        batch_size: Examples in a batch, over all processes.
        steps: The number of batches.
        seed: Determines the order of the examples, together with the epoch.
        pad_token_id: The token at padding.
        shards: The part of each global batch to return.
        packing: How batches are laid out. None: padding is computed as well.
        next_sentence: Whether the last column is the next sentence and not a view.
        augmentation: Changes second views, as a function of the seed and the batch's number.
        prompt_tokens: Tokens at the start of the first column, which `augmentation` keeps.
        labels: Labels by task, which are added to the batches.
        compares_views: If false, a single column stays one view.
        shapes: The shapes of the batches.
        largest: The number of a batch, among the first, that needs the largest shape.
    """

    store: Examples
    _: dataclasses.KW_ONLY
    batch_size: int
    steps: int
    seed: int
    pad_token_id: int
    shards: Shards = dataclasses.field(default_factory=Shards)
    packing: Packing | None = None
    next_sentence: bool = False
    augmentation: Augmentation | None = None
    prompt_tokens: int = 0
    labels: Mapping[str, Shaped[np.ndarray, " examples"]] = dataclasses.field(default_factory=dict)
    compares_views: bool = True

    def __post_init__(self) -> None:
        if self.batch_size % self.shards.total:
            raise ValueError(
                f"a batch of {self.batch_size} does not split evenly over {self.shards.total} "
                "shards"
            )
        columns = list(range(len(self.store.columns)))
        views = columns[:-1] if self.next_sentence else columns
        # A labelled sentence stays one view.
        if len(views) == 1 and self.compares_views and not self.labels:
            views = views * 2
        # The columns of the views, and the next sentence, if there is one, once for each view.
        self._columns = [views]
        if self.next_sentence:
            self._columns.append(columns[-1:] * len(views))
        self._lock = threading.Lock()
        # Prefetching threads straddle two epochs. Augmented views are read twice: for their
        # lengths, and for their tokens.
        self._order = functools.lru_cache(maxsize=2)(self._ordered)
        self._augmented = functools.lru_cache(maxsize=2)(self._augmentations)
        sample = [self._lengths(index) for index in range(min(SAMPLE, max(1, self.steps)))]
        longest = [max(int(part.max()) for part in lengths) for lengths in sample]
        self._lengths_of_batches = choose_lengths(longest, self.store.max_length)
        needed = [*map(self._needed_shape, sample)]
        self.shapes = choose_shapes(needed, self._lengths_of_batches, self.steps)
        self.largest = needed.index(max(needed))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        lengths = self._lengths(index)
        shape = smallest_shape(self.shapes, self._needed_shape(lengths))
        local = self.shards.of(self.batch_size)
        rows = self._rows(index)[local]
        input_ids = self.store.gather(rows, shape.length, self.pad_token_id)[0]
        parts = [input_ids[:, columns] for columns in self._columns]
        if self.augmentation:
            parts[0][:, 1] = self._augmented(index)[0][local, : shape.length]
        views = self._batch(parts[0], lengths[0][local], shape)
        if self.packing and self.packing.anchors and shape.packed:
            views = views._replace(anchor_layout=self._layout(lengths[0][local, 0], shape))
        if self.next_sentence:
            views = views._replace(next=self._batch(parts[1], lengths[1][local], shape))
        if self.labels:
            views = views._replace(labels={name: each[rows] for name, each in self.labels.items()})
        return views

    def _needed_shape(self, lengths: Sequence[Int[np.ndarray, "B V"]]) -> BatchShape:
        """Return the smallest shape that holds a global batch."""
        longest = max(int(part.max()) for part in lengths)
        length = min(length for length in self._lengths_of_batches if length >= longest)
        if self.packing is None:
            return BatchShape.of(length, 1.0)
        parts = [part.reshape(-1) for part in lengths]
        if self.packing.anchors:
            parts.append(lengths[0][:, 0])
        fullest = max(
            in_blocks(part, self.shards.total, self.packing.chunks).mean(axis=1).max()
            for part in parts
        )
        shape = BatchShape.of(length, fullest / length)
        return shape if shape.sixteenths <= self.packing.fullest else BatchShape.of(length, 1.0)

    def _batch(
        self,
        input_ids: Int[np.ndarray, "B V T"],
        lengths: Int[np.ndarray, "B V"],
        shape: BatchShape,
    ) -> Batch:
        """Return this process's views, with their layout if padding is left out."""
        batch = Batch(input_ids, (np.arange(shape.length) < lengths[..., None]).astype(np.int32))
        if not shape.packed:
            return batch
        return batch._replace(layout=self._layout(lengths.reshape(-1), shape))

    def _layout(self, lengths: Int[np.ndarray, " rows"], shape: BatchShape) -> PackedLayout:
        """Return the layout of this process's rows of these lengths."""
        assert self.packing is not None
        blocks = in_blocks(lengths, len(self.shards.local), self.packing.chunks)
        return lay_out(blocks, shape.length, shape.capacity(blocks.shape[1] * shape.length))

    def _lengths(self, index: int) -> list[Int[np.ndarray, "B V"]]:
        """Return the tokens of each view of a global batch, and of the next sentences."""
        lengths = self.store.lengths(self._rows(index))
        parts = [lengths[:, columns] for columns in self._columns]
        if self.augmentation:
            parts[0][:, 1] = self._augmented(index)[1]
        return parts

    def _augmentations(self, index: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
        """Return the padded second views of a global batch, and their lengths."""
        assert self.augmentation is not None
        input_ids, lengths = self.store.gather(self._rows(index), self.store.max_length, 0)
        generator = np.random.Generator(
            np.random.Philox([self.seed, index, zlib.crc32(b"augmentation")])
        )
        second, lengths = self.augmentation(
            input_ids[:, 0], lengths[:, 0], generator, self.prompt_tokens
        )
        padding = np.arange(second.shape[1]) >= lengths[:, None]
        return np.where(padding, np.int32(self.pad_token_id), second), lengths

    def _ordered(self, epoch: int) -> Int[np.ndarray, " examples"]:
        return self.store.order(np.random.Generator(np.random.Philox([self.seed, epoch])))

    def _rows(self, index: int) -> Int[np.ndarray, " B"]:
        """Return the examples of a global batch.

        The last, incomplete batch of an epoch is left out.
        """
        epoch, batch = divmod(index, len(self.store) // self.batch_size)
        with self._lock:  # one thread shuffles, the others wait for it
            order = self._order(epoch)
        return order[batch * self.batch_size : (batch + 1) * self.batch_size]


@runtime_checkable
class Batches(Protocol):
    """Random access to the batches of a run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


def make_batches(source: Batches) -> "grain.DatasetIterator":
    """Return an iterator that prepares batches in threads.

    `get_state()` is a small dict that counts the delivered batches. After `set_state()` the same
    batches follow.
    """
    import grain  # here, because the rest of this module and a train step run without it

    read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))
