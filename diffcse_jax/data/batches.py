"""Batches of tokens for the train step, in an order that is a function of the seed.

One Grain item is one whole batch, gathered by NumPy: item by item, Grain costs a hundred times more per sentence.
Batch `i` depends on nothing but the store, the seed and `i`, so an iterator's whole state is the next index.
"""

import functools
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from diffcse_jax.data.rows import Layout, Views, in_blocks, lay_out
from diffcse_jax.data.shapes import BatchShape, choose_lengths, choose_shapes, smallest, smallest_shape
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


def batches_per_epoch(examples: int, batch_size: int) -> int:
    """Whole batches in one pass; the rest of an epoch is left out.

    Raises:
        DataError: there are fewer examples than a batch holds.
    """
    if examples < batch_size:
        raise DataError(
            f"data.train_file holds {examples:,} examples, fewer than train.batch_size={batch_size}: "
            "use a larger file or a smaller batch"
        )
    return examples // batch_size


class BatchSource:
    """Random access to the batches of a training run, as the rows of one process: `data.rows.Views` of NumPy arrays.

    A single column is doubled: a sentence is its own second view, which dropout tells apart. A batch is padded to the
    smallest of the run's lengths that holds the longest sentence of the global batch: the same on all processes.

    Args:
        store: the tokens.
        batch_size: examples per batch over all processes.
        steps: the number of batches.
        seed: with the epoch, it determines the order of the examples.
        pad_token_id: the id that fills sentences up to their length.
        shards: the part of each global batch to yield.
        packing: how batches are laid out; None: padding is computed, too.

    Attributes:
        shapes: what the shapes of batches are chosen from.

    Raises:
        DataError: the store holds less than one batch.
        ValueError: the shards cannot share a batch evenly.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        pad_token_id: int,
        shards: Shards = Shards(),  # noqa: B008
        packing: Packing | None = None,
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
        self._batches_per_epoch = batches_per_epoch(len(store), batch_size)
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)  # prefetching threads straddle two epochs
        sample = [self._lengths(self._rows(index)) for index in range(SAMPLE)]
        self._lengths_of_batches = choose_lengths([int(lengths.max()) for lengths in sample], store.max_length)
        self.shapes = choose_shapes(map(self._needed, sample), self._lengths_of_batches)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Views:
        rows = self._rows(index)
        lengths = self._lengths(rows)
        shape = self._shape(lengths)
        local = self._shards.of(self._batch_size)
        input_ids, local_lengths = self._store.gather(rows[local], shape.length, self._pad_token_id)
        attention_mask = (np.arange(shape.length) < local_lengths[..., None]).astype(np.int32)
        views = (len(local_lengths), lengths.shape[1], shape.length)
        input_ids, attention_mask = (np.broadcast_to(values, views) for values in (input_ids, attention_mask))
        return Views(input_ids, attention_mask, *self._layouts(lengths[local], shape))

    def shapes_of(self, indices: range) -> dict[BatchShape, int]:
        """The shapes of these batches, each with the index of the first batch that has it, in this order."""
        first: dict[BatchShape, int] = {}
        for index in indices:
            first.setdefault(self._shape(self._lengths(self._rows(index))), index)
        return first

    def _shape(self, lengths: Int[np.ndarray, "B C"]) -> BatchShape:
        return smallest_shape(self.shapes, self._needed(lengths))

    def _needed(self, lengths: Int[np.ndarray, "B C"]) -> BatchShape:
        """The smallest shape that holds a global batch."""
        length = smallest(self._lengths_of_batches, int(lengths.max()))
        if self._packing is None:
            return BatchShape.of(length, 1.0)
        parts = [lengths.reshape(-1), lengths[:, 0]] if self._packing.anchors else [lengths.reshape(-1)]
        fullest = max(in_blocks(part, self._shards.total, self._packing.chunks).mean(axis=1).max() for part in parts)
        return BatchShape.of(length, fullest / length)

    def _layouts(self, lengths: Int[np.ndarray, "B C"], shape: BatchShape) -> tuple[Layout | None, Layout | None]:
        """The layouts of all views and of the anchors, of this process's rows."""
        packing = self._packing
        if packing is None or not shape.packed:
            return None, None

        def layout(lengths: Int[np.ndarray, " rows"]) -> Layout:
            blocks = in_blocks(lengths, len(self._shards.local), packing.chunks)
            return lay_out(blocks, shape.length, shape.capacity(blocks.shape[1] * shape.length))

        return layout(lengths.reshape(-1)), layout(lengths[:, 0]) if packing.anchors else None

    def _lengths(self, rows: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Tokens of every view of these examples."""
        lengths = self._store.lengths(rows)
        return np.repeat(lengths, 2, axis=1) if lengths.shape[1] == 1 else lengths

    def _rows(self, index: int) -> Int[np.ndarray, " B"]:
        """The examples of the global batch `index`."""
        epoch, batch = divmod(index, self._batches_per_epoch)
        with self._lock:  # one thread shuffles, the others wait for it
            order = self._order(epoch)
        return order[batch * self._batch_size : (batch + 1) * self._batch_size]

    def _shuffled(self, epoch: int) -> Int[np.ndarray, " examples"]:
        return np.random.Generator(np.random.Philox([self._seed, epoch])).permutation(len(self._store))


def make_batches(source: BatchSource) -> "grain.DatasetIterator":
    """An iterator that prepares batches ahead in threads.

    `get_state()` is a small dict that counts the batches delivered, not those prepared; after `set_state()` with it
    the same batches follow.
    """
    import grain  # here, because all else in this module, and a train step over it, runs without it

    read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))
