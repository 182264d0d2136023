"""Batches of tokens for the train step, in an order that is a function of the seed.

One Grain item is one whole batch, gathered by NumPy: item by item, Grain costs a hundred times more per sentence.
Batch `i` depends on nothing but the store, the seed and `i`, so an iterator's whole state is the next index.
"""

import functools
import threading

import grain
import numpy as np
from jaxtyping import Int, Int32

from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import ConfigError, DataError

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
MAX_BUCKETS = 6  # each length met in training is one more compilation

Batch = dict[str, Int32[np.ndarray, "..."]]


def bucket_lengths(max_length: int) -> tuple[int, ...]:
    """The lengths, in tokens, that batches are padded to: at most six, the last of them `max_length`."""
    shorter = [length for length in BUCKETS if length < max_length]
    return (*shorter[1 - MAX_BUCKETS :], max_length)


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
    """Random access to the batches of a training run, as the rows of one process.

    Item `i` is a dict of `input_ids` and `attention_mask`, (B, C, T) int32: B rows of this process, C columns, T the
    smallest bucket that holds the longest sentence of the global batch, hence the same on all processes; and of
    `lengths`, (global B, C), the tokens of every sentence of the global batch.

    Args:
        store: the tokens.
        batch_size: examples per batch over all processes.
        steps: the number of batches.
        seed: with the epoch, it determines the order of the examples.
        pad_token_id: the id that fills sentences up to T.
        process_index: which slice of each global batch to yield.
        process_count: the number of slices.

    Raises:
        DataError: the store holds less than one batch.
        ConfigError: the processes cannot share a batch evenly.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        pad_token_id: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        if batch_size % process_count:
            raise ConfigError(f"train.batch_size={batch_size} cannot be split evenly over {process_count} processes")
        self._store = store
        self._batch_size = batch_size
        self._steps = steps
        self._seed = seed
        self._pad_token_id = pad_token_id
        local_size = batch_size // process_count
        self._local = slice(process_index * local_size, (process_index + 1) * local_size)
        self._batches_per_epoch = batches_per_epoch(len(store), batch_size)
        self._buckets = np.asarray(bucket_lengths(store.max_length))
        self._lock = threading.Lock()
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)  # prefetching threads straddle two epochs

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        rows = self._rows(index)
        lengths = self._store.lengths(rows).astype(np.int32)
        width = int(self._buckets[np.searchsorted(self._buckets, lengths.max())])
        input_ids, local_lengths = self._store.gather(rows[self._local], width, self._pad_token_id)
        attention_mask = (np.arange(width) < local_lengths[..., None]).astype(np.int32)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "lengths": lengths}

    def _rows(self, index: int) -> Int[np.ndarray, " B"]:
        """The examples of the global batch `index`."""
        epoch, batch = divmod(index, self._batches_per_epoch)
        with self._lock:  # one thread shuffles, the others wait for it
            order = self._order(epoch)
        return order[batch * self._batch_size : (batch + 1) * self._batch_size]

    def _shuffled(self, epoch: int) -> Int[np.ndarray, " examples"]:
        return np.random.Generator(np.random.Philox([self._seed, epoch])).permutation(len(self._store))


def make_batches(source: BatchSource) -> grain.DatasetIterator:
    """An iterator that prepares batches ahead in threads.

    `get_state()` is a small dict that counts the batches delivered, not those prepared; after `set_state()` with it
    the same batches follow.
    """
    read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))
