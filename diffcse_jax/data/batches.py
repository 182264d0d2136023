"""Batches of tokens for the train step, in an order that is a function of the seed.

One Grain item is one whole batch, gathered by NumPy: item by item, Grain costs a hundred times more per sentence.
Batch `i` depends on nothing but the store, the seed and `i`, so an iterator's whole state is the next index.
"""

import functools
import threading
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer, Shaped

from diffcse_jax.batch import Batch, PackedLayout, in_blocks, lay_out
from diffcse_jax.data.augmentation import Augmentation
from diffcse_jax.data.examples import Crops, Neighbours
from diffcse_jax.data.shapes import STEPS_OF_SHARE, BatchShape, choose_lengths, choose_shapes, smallest, smallest_shape
from diffcse_jax.data.stored_vectors import SentenceVectors
from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import DataError

if TYPE_CHECKING:
    import grain

SAMPLE = 512  # batches that a run's shapes are chosen by


class Shards(NamedTuple):
    """The part of every global batch that one process feeds, in shares of the devices along the mesh's data axis."""

    local: range = range(1)
    total: int = 1

    def of(self, rows: int) -> slice:
        """The process's slice of so many rows."""
        return slice(self.local.start * rows // self.total, self.local.stop * rows // self.total)


class Packing(NamedTuple):
    """The layout of batches without padding."""

    chunks: int = 1  # parts that the networks take one after the other
    anchors: bool = False  # the anchors alone have a layout, too
    fullest: int = STEPS_OF_SHARE - 1  # sixteenths of positions that are real: batches with more are left as they are


def batches_per_epoch(examples: int, batch_size: int) -> int:
    """Whole batches in one pass; the rest of an epoch is left out.

    Raises:
        DataError: there are fewer examples than a batch holds.
    """
    if examples < batch_size:
        smaller = f", or a smaller batch, such as {1 << examples.bit_length() - 1}" if examples > 1 else ""
        raise DataError(
            f"data.train_file holds {examples:,} examples, fewer than train.batch_size={batch_size}: use a larger file"
            f"{smaller}"
        )
    return examples // batch_size


class BatchSource:
    """Random access to the batches of a training run, as the rows of one process: `data.rows.Batch` of NumPy arrays.

    A single column is doubled: a sentence is its own second view, which dropout or an augmentation tells apart. A batch
    is padded to the smallest of the run's lengths that holds the longest sentence of the global batch: the same on all
    processes.

    Args:
        store: the tokens.
        batch_size: examples per batch over all processes.
        steps: the number of batches.
        seed: with the epoch, it determines the order of the examples.
        pad_token_id: the id that fills sentences up to their length.
        shards: the part of each global batch to yield.
        packing: how batches are laid out; None: padding is computed, too.
        next_sentence: the last column is no view, but the next sentence.
        augmentation: changes second views, as a function of the seed and the batch's number.
        vectors: stored ones of the sentences, by the names of their stores; they travel with the views.
        labels: of all examples, by the name of their task; they travel, too, and a single column is not doubled.

    Attributes:
        shapes: what the shapes of batches are chosen from.

    Raises:
        DataError: the store holds less than one batch.
        ValueError: the shards cannot share a batch evenly.
    """

    def __init__(
        self,
        store: TokenStore | Neighbours | Crops,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        pad_token_id: int,
        shards: Shards = Shards(),  # noqa: B008
        packing: Packing | None = None,
        next_sentence: bool = False,
        augmentation: Augmentation | None = None,
        vectors: Mapping[str, SentenceVectors] = MappingProxyType({}),
        labels: Mapping[str, Shaped[np.ndarray, " examples"]] = MappingProxyType({}),
    ):
        if batch_size % shards.total:
            raise ValueError(f"a batch of {batch_size} does not split evenly over {shards.total} shards")
        self._store = store
        self._batch_size = batch_size
        self._steps = steps
        self._seed = seed
        self._pad_token_id = pad_token_id
        self._shards = shards
        self._packing = packing
        self._next_sentence = next_sentence
        self._augmentation = augmentation
        self._vectors = vectors
        self._labels = labels
        columns = list(range(len(store.columns)))
        single = len(columns) == 1 + next_sentence and not labels
        self._columns = [0, *columns] if single else columns  # of the views, and of the next sentence
        self._batches_per_epoch = batches_per_epoch(len(store), batch_size)
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)  # prefetching threads straddle two epochs
        self._augmented = functools.lru_cache(maxsize=2)(self._augmentations)  # read for lengths first, then tokens
        sample = [self._lengths(index) for index in range(SAMPLE)]
        self._lengths_of_batches = choose_lengths([int(lengths.max()) for lengths in sample], store.max_length)
        self.shapes = choose_shapes(map(self._needed, sample), self._lengths_of_batches)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        lengths = self._lengths(index)
        shape = self._shape(lengths)
        local = self._shards.of(self._batch_size)
        rows = self._rows(index)[local]
        input_ids, _ = self._store.gather(rows, shape.length, self._pad_token_id)
        input_ids = input_ids[:, self._columns]
        if self._augmentation:
            input_ids[:, 1] = self._augmented(index)[0][local, : shape.length]
        parts = zip(self._parts(input_ids), self._parts(lengths[local]), strict=True)
        views, *following = (self._views(*part, shape) for part in parts)
        if self._vectors:
            assert not isinstance(self._store, Crops)  # parts of sentences; refused where the vectors are named
            sentences = self._store.sentences(rows)[:, self._columns[: views.per_example]]
            views = views._replace(vectors={name: each.gather(sentences) for name, each in self._vectors.items()})
        if self._labels:
            views = views._replace(labels={name: each[rows] for name, each in self._labels.items()})
        return views._replace(next=following[0]) if following else views

    def text_rows(self, index: int) -> Integer[np.ndarray, " B"]:
        """The numbers, from 0, of the rows of the text that the anchors of a batch are from; of this process alone."""
        return self._store.text_rows(self._rows(index)[self._shards.of(self._batch_size)])

    def shapes_of(self, indices: range) -> dict[BatchShape, int]:
        """The shapes of these batches, each with the index of the first batch that has it, in this order."""
        first: dict[BatchShape, int] = {}
        for index in indices:
            first.setdefault(self._shape(self._lengths(index)), index)
        return first

    def _shape(self, lengths: Int[np.ndarray, "B C"]) -> BatchShape:
        return smallest_shape(self.shapes, self._needed(lengths))

    def _needed(self, lengths: Int[np.ndarray, "B C"]) -> BatchShape:
        """The smallest shape that holds a global batch."""
        length = smallest(self._lengths_of_batches, int(lengths.max()))
        if self._packing is None:
            return BatchShape.of(length, 1.0)
        parts = [part.reshape(-1) for part in self._parts(lengths)]
        if self._packing.anchors:
            parts.append(lengths[:, 0])
        fullest = max(in_blocks(part, self._shards.total, self._packing.chunks).mean(axis=1).max() for part in parts)
        shape = BatchShape.of(length, fullest / length)
        return shape if shape.sixteenths <= self._packing.fullest else BatchShape.of(length, 1.0)

    def _views(self, input_ids: Int[np.ndarray, "B V T"], lengths: Int[np.ndarray, "B V"], shape: BatchShape) -> Batch:
        attention_mask = (np.arange(shape.length) < lengths[..., None]).astype(np.int32)
        return Batch(input_ids, attention_mask, *self._layouts(lengths, shape))

    def _parts(self, values: Int[np.ndarray, "B C *T"]) -> list[np.ndarray]:
        """Values of the views, and, where there is one, of the next sentence, once for every view."""
        if not self._next_sentence:
            return [values]
        views, following = values[:, :-1], values[:, -1:]
        return [views, np.repeat(following, views.shape[1], axis=1)]

    def _layouts(
        self, lengths: Int[np.ndarray, "B C"], shape: BatchShape
    ) -> tuple[PackedLayout | None, PackedLayout | None]:
        """The layouts of all views and of the anchors, of this process's rows."""
        packing = self._packing
        if packing is None or not shape.packed:
            return None, None

        def layout(lengths: Int[np.ndarray, " rows"]) -> PackedLayout:
            blocks = in_blocks(lengths, len(self._shards.local), packing.chunks)
            return lay_out(blocks, shape.length, shape.capacity(blocks.shape[1] * shape.length))

        return layout(lengths.reshape(-1)), layout(lengths[:, 0]) if packing.anchors else None

    def _lengths(self, index: int) -> Int[np.ndarray, "B C"]:
        """Tokens of every view of the global batch `index`, and of the next sentence."""
        lengths = self._store.lengths(self._rows(index))[:, self._columns]
        if self._augmentation:
            lengths[:, 1] = self._augmented(index)[1]
        return lengths

    def _augmentations(self, index: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
        """The second views of the global batch `index`, padded to the maximal length, and their lengths."""
        assert self._augmentation is not None
        input_ids, lengths = self._store.gather(self._rows(index), self._store.max_length, self._pad_token_id)
        generator = np.random.Generator(np.random.Philox([self._seed, index, zlib.crc32(b"augmentation")]))
        second, lengths = self._augmentation(input_ids[:, 0], lengths[:, 0], generator)
        padding = np.arange(second.shape[1]) >= lengths[:, None]
        return np.where(padding, np.int32(self._pad_token_id), second), lengths

    def _rows(self, index: int) -> Int[np.ndarray, " B"]:
        """The examples of the global batch `index`."""
        epoch, batch = divmod(index, self._batches_per_epoch)
        with self._lock:  # one thread shuffles, the others wait for it
            order = self._order(epoch)
        return order[batch * self._batch_size : (batch + 1) * self._batch_size]

    def _shuffled(self, epoch: int) -> Int[np.ndarray, " examples"]:
        return self._store.order(np.random.Generator(np.random.Philox([self._seed, epoch])))


@runtime_checkable
class Batches(Protocol):
    """Random access to the batches of a run, of one source or mixed from several."""

    def __len__(self) -> int:
        """The number of batches."""

    def __getitem__(self, index: int) -> Batch:
        """A batch, as the rows of one process."""

    def shapes_of(self, indices: range) -> Mapping[Any, int]:
        """The shapes of these batches, each with the index of the first batch that has it, in this order."""


def make_batches(source: Batches) -> "grain.DatasetIterator":
    """An iterator that prepares batches ahead in threads.

    `get_state()` is a small dict that counts the batches delivered, not those prepared; after `set_state()` with it
    the same batches follow.
    """
    import grain  # here, because all else in this module, and a train step over it, runs without it

    read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))
