"""Batches of tokens for the train step. Batch `i` is a function of the store, the seed and `i`.

NumPy gathers a whole batch at once, because Grain is slow with single sentences. The train step is compiled for each
shape of a batch, so a run has few shapes. Lengths depend on the text alone, so that no result depends on devices or
packing.
"""

import collections
import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer, Shaped

from diffcse_jax.batch import Batch, in_blocks, lay_out
from diffcse_jax.data.augmentation import Augmentation
from diffcse_jax.data.token_store import Examples, SentenceVectors

if TYPE_CHECKING:
    import grain

SAMPLE = 512  # batches that determine a run's shapes
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)  # lengths in tokens
MAX_LENGTHS = 2
MAX_SHAPES = 4
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
    """Choose at most `MAX_LENGTHS` lengths, including `max_length`, for batches with these longest sentences."""
    counts = collections.Counter(longest)
    buckets = (*(length for length in BUCKETS if length < max_length), max_length)
    return _greedy(
        [max_length],
        buckets,
        MAX_LENGTHS,
        lambda lengths: sum(count * smallest(lengths, length) for length, count in counts.items()),
    )


def smallest(lengths: Sequence[int], longest: int) -> int:
    """Return the smallest length that holds a sentence."""
    return min(length for length in lengths if length >= longest)


def choose_shapes(needed: Iterable[BatchShape], lengths: Sequence[int]) -> tuple[BatchShape, ...]:
    """Choose at most `MAX_SHAPES` shapes that fit all batches and compute the fewest positions for a sample."""
    counts = collections.Counter(needed)
    return _greedy(
        [BatchShape(length, STEPS_OF_SHARE) for length in lengths],
        sorted(counts),
        MAX_SHAPES,
        lambda shapes: sum(count * math.prod(smallest_shape(shapes, shape)) for shape, count in counts.items()),
    )


def smallest_shape(shapes: Sequence[BatchShape], needed: BatchShape) -> BatchShape:
    """Return the smallest shape of the same length that holds a batch."""
    return min(shape for shape in shapes if shape.length == needed.length and shape >= needed)


def _greedy(
    chosen: Sequence[Any], candidates: Sequence[Any], most: int, cost: Callable[[Sequence[Any]], int]
) -> tuple[Any, ...]:
    """Add candidates, each time the one that lowers the cost the most."""
    while len(chosen) < most:
        best = min(candidates, key=lambda candidate: cost([*chosen, candidate]))
        if cost([*chosen, best]) >= cost(chosen):
            break
        chosen = [*chosen, best]
    return tuple(sorted(chosen))


# Batches of one text


class Shards(NamedTuple):
    """The part of each global batch that one process feeds, in shards along the mesh's data axis."""

    local: range = range(1)
    total: int = 1

    def of(self, rows: int) -> slice:
        """Return the process's slice of these rows."""
        return slice(self.local.start * rows // self.total, self.local.stop * rows // self.total)


class Packing(NamedTuple):
    """How batches without padding are laid out."""

    chunks: int = 1  # parts that the networks compute one after the other
    anchors: bool = False  # the anchors alone also have a layout
    fullest: int = STEPS_OF_SHARE - 1  # sixteenths of real positions; fuller batches keep their padding


class BatchSource:
    """Random access to the batches of a run: a `Batch` of NumPy arrays with the rows of one process.

    The sentence of a single column becomes two views, which dropout or an augmentation makes different. All processes
    pad a batch to the smallest of the run's lengths that holds the longest sentence of the global batch.

    Args:
        store: The tokens.
        batch_size: Examples per batch over all processes.
        steps: The number of batches.
        seed: Determines the order of the examples, together with the epoch.
        pad_token_id: The id that fills sentences up to their length.
        shards: The part of each global batch to return.
        packing: How batches are laid out. None: padding is also computed.
        next_sentence: The last column is the next sentence and not a view.
        augmentation: Changes second views, as a function of the seed and the batch's number.
        prompt_tokens: The tokens of the prompt of each column, after [CLS]. An augmentation does not change them.
        pools_prompts: Whether pooling reads the prompts' tokens.
        vectors: Stored embeddings of the sentences, by name, which are added to the batches.
        labels: Labels of all examples, by task, which are added to the batches. A single column then stays one view.

    Attributes:
        shapes: The shapes that batches can have.
    """

    def __init__(
        self,
        store: Examples,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        pad_token_id: int,
        shards: Shards = Shards(),  # noqa: B008
        packing: Packing | None = None,
        next_sentence: bool = False,
        augmentation: Augmentation | None = None,
        prompt_tokens: Sequence[int] = (),
        pools_prompts: bool = True,
        vectors: Mapping[str, SentenceVectors] = MappingProxyType({}),
        labels: Mapping[str, Shaped[np.ndarray, " examples"]] = MappingProxyType({}),
    ):
        if batch_size % shards.total:
            raise ValueError(f"a batch of {batch_size} does not split evenly over {shards.total} shards")
        self._store, self._batch_size, self._steps, self._seed = store, batch_size, steps, seed
        self._pad_token_id, self._shards, self._packing = pad_token_id, shards, packing
        self._next_sentence, self._augmentation = next_sentence, augmentation
        self._vectors, self._labels = vectors, labels
        self._prompt_tokens = np.array([*prompt_tokens] or [0] * len(store.columns), np.int32)
        self._pools_prompts = pools_prompts or not self._prompt_tokens.any()
        columns = list(range(len(store.columns)))
        single = len(columns) == 1 + next_sentence and not labels
        self._columns = [0, *columns] if single else columns  # of the views, and of the next sentence
        self._batches_per_epoch = len(store) // batch_size  # the last, incomplete batch is left out
        self._lock = threading.Lock()
        # Prefetching threads straddle two epochs.
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch: store.order(np.random.Generator(np.random.Philox([seed, epoch])))
        )
        self._augmented = functools.lru_cache(maxsize=2)(self._augmentations)  # read for lengths first, then tokens
        sample = [self._lengths(index) for index in range(SAMPLE)]
        self._lengths_of_batches = choose_lengths([int(lengths.max()) for lengths in sample], store.max_length)
        self.shapes = choose_shapes(map(self._needed_shape, sample), self._lengths_of_batches)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        lengths = self._lengths(index)
        shape = smallest_shape(self.shapes, self._needed_shape(lengths))
        local = self._shards.of(self._batch_size)
        rows = self._rows(index)[local]
        input_ids = self._store.gather(rows, shape.length, self._pad_token_id)[0][:, self._columns]
        if self._augmentation:
            input_ids[:, 1] = self._augmented(index)[0][local, : shape.length]
        parts = zip(self._views_and_next(input_ids), self._views_and_next(lengths[local]), strict=True)
        views, *following = (self._views(*part, shape) for part in parts)
        if not self._pools_prompts:  # as in sentence-transformers, [CLS] counts as a part of the prompt
            prompt_tokens = self._prompt_tokens[self._columns[: views.per_example]]
            prompt_tokens = np.where(prompt_tokens, prompt_tokens + 1, 0).astype(np.int32)
            views = views._replace(prompt_tokens=np.tile(prompt_tokens, (len(rows), 1)))
        if self._vectors:
            sentences = self._store.sentences(rows)[:, self._columns[: views.per_example]]
            views = views._replace(vectors={name: each.gather(sentences) for name, each in self._vectors.items()})
        if self._labels:
            views = views._replace(labels={name: each[rows] for name, each in self._labels.items()})
        return views._replace(next=following[0]) if following else views

    def text_rows(self, index: int) -> Integer[np.ndarray, " B"]:
        """Return the rows of the text, from 0, of a batch's anchors; this process's only."""
        return self._store.text_rows(self._rows(index)[self._shards.of(self._batch_size)])

    def shapes_of(self, indices: range) -> dict[BatchShape, int]:
        """Return the shapes of these batches, each with the first batch that has it, in this order."""
        first: dict[BatchShape, int] = {}
        for index in indices:
            first.setdefault(smallest_shape(self.shapes, self._needed_shape(self._lengths(index))), index)
        return first

    def _needed_shape(self, lengths: Int[np.ndarray, "B C"]) -> BatchShape:
        """Return the smallest shape that holds a global batch."""
        length = smallest(self._lengths_of_batches, int(lengths.max()))
        if self._packing is None:
            return BatchShape.of(length, 1.0)
        parts = [part.reshape(-1) for part in self._views_and_next(lengths)]
        if self._packing.anchors:
            parts.append(lengths[:, 0])
        fullest = max(in_blocks(part, self._shards.total, self._packing.chunks).mean(axis=1).max() for part in parts)
        shape = BatchShape.of(length, fullest / length)
        return shape if shape.sixteenths <= self._packing.fullest else BatchShape.of(length, 1.0)

    def _views_and_next(self, values: Int[np.ndarray, "B C *T"]) -> list[np.ndarray]:
        """Split values into those of the views and, if there is one, those of the next sentence, repeated per view."""
        if not self._next_sentence:
            return [values]
        views, following = values[:, :-1], values[:, -1:]
        return [views, np.repeat(following, views.shape[1], axis=1)]

    def _views(self, input_ids: Int[np.ndarray, "B V T"], lengths: Int[np.ndarray, "B V"], shape: BatchShape) -> Batch:
        """Return this process's views, with the layouts of all views and of the anchors if padding is left out."""
        batch = Batch(input_ids, (np.arange(shape.length) < lengths[..., None]).astype(np.int32))
        packing = self._packing
        if packing is None or not shape.packed:
            return batch
        rows = (lengths.reshape(-1), lengths[:, 0])[: 1 + packing.anchors]
        blocks = [in_blocks(each, len(self._shards.local), packing.chunks) for each in rows]
        layouts = [lay_out(each, shape.length, shape.capacity(each.shape[1] * shape.length)) for each in blocks]
        return batch._replace(layout=layouts[0], anchor_layout=layouts[1] if packing.anchors else None)

    def _lengths(self, index: int) -> Int[np.ndarray, "B C"]:
        """Return the tokens of each view of a global batch, and of the next sentence."""
        lengths = self._store.lengths(self._rows(index))[:, self._columns]
        if self._augmentation:
            lengths[:, 1] = self._augmented(index)[1]
        return lengths

    def _augmentations(self, index: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
        """Return the second views of a global batch, padded to the maximal length, and their lengths."""
        assert self._augmentation is not None
        input_ids, lengths = self._store.gather(self._rows(index), self._store.max_length, self._pad_token_id)
        generator = np.random.Generator(np.random.Philox([self._seed, index, zlib.crc32(b"augmentation")]))
        first, prompt = input_ids[:, 0], np.s_[1 : 1 + self._prompt_tokens[0]]
        without_prompt = np.delete(first, prompt, axis=1), lengths[:, 0] - self._prompt_tokens[0]
        second, lengths = self._augmentation(*without_prompt, generator)
        second = np.concatenate([second[:, :1], first[:, prompt], second[:, 1:]], axis=1)
        lengths = lengths + self._prompt_tokens[0]
        padding = np.arange(second.shape[1]) >= lengths[:, None]
        return np.where(padding, np.int32(self._pad_token_id), second), lengths

    def _rows(self, index: int) -> Int[np.ndarray, " B"]:
        """Return the examples of a global batch."""
        epoch, batch = divmod(index, self._batches_per_epoch)
        with self._lock:  # one thread shuffles, the others wait for it
            order = self._order(epoch)
        return order[batch * self._batch_size : (batch + 1) * self._batch_size]


# Batches of several tasks


class Mixture:
    """Random access to batches of several tasks.

    Args:
        sources: The batches of each task, as many as `order` asks for.
        order: The number of the source of each batch.
        without_tokens: Keep only the first token of each view, for networks that read stored embeddings. All batches of
            a task then have one shape.
    """

    def __init__(
        self, sources: Mapping[str, BatchSource], order: Int[np.ndarray, " batches"], *, without_tokens: bool = False
    ):
        self._sources, self._order, self._without_tokens = dict(sources), order, without_tokens
        self._places = places(order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Batch:
        task, place = self._find(index)
        batch = self._sources[task][place]
        if not self._without_tokens:
            return batch
        ids, mask = (tokens[..., :1] for tokens in (batch.input_ids, batch.attention_mask))
        return batch._replace(input_ids=ids, attention_mask=mask, layout=None, anchor_layout=None)

    def text_rows(self, index: int) -> tuple[str, Integer[np.ndarray, " B"]]:
        """Return the task of a batch and the rows, from 0, of the task's text; this process's only."""
        task, place = self._find(index)
        return task, self._sources[task].text_rows(place)

    def shapes_of(self, indices: range) -> dict[tuple[str, BatchShape | None], int]:
        """Return the tasks and shapes of these batches, each with the first batch that has it, in this order."""
        first: dict[tuple[str, BatchShape | None], int] = {}
        for index in indices:
            task, place = self._find(index)
            (shape,) = self._sources[task].shapes_of(range(place, place + 1))
            first.setdefault((task, None if self._without_tokens else shape), index)
        return first

    def _find(self, index: int) -> tuple[str, int]:
        """Return the task of a batch, and the batch's number there."""
        return [*self._sources][self._order[index]], int(self._places[index])


def places(order: Int[np.ndarray, " batches"]) -> Int[np.ndarray, " batches"]:
    """Return the number of each batch, from 0, among the batches of the same source."""
    numbers = np.zeros(len(order), np.int64)
    for source in np.unique(order):
        numbers[order == source] = np.arange((order == source).sum())
    return numbers


def by_ratio(ratios: Sequence[int], steps: int, seed: int) -> Int[np.ndarray, " steps"]:
    """Order the sources in blocks. Each block has `ratios` batches of the sources, in a random order."""
    block, rng = np.repeat(np.arange(len(ratios)), ratios), np.random.default_rng([seed, 0])
    blocks = [rng.permutation(block) for _ in range(-(-steps // len(block)))]
    return np.concatenate([np.zeros(0, np.int64), *blocks])[:steps]


def by_temperature(
    rows: Sequence[int], temperatures: Float[np.ndarray, " steps"], seed: int
) -> Int[np.ndarray, " steps"]:  # fmt: skip
    """Draw a source for each batch with probabilities proportional to its number of rows^(1 / temperature)."""
    logits = np.log(np.array(rows, np.float64))[None] / temperatures[:, None]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    bounds = np.cumsum(shares / shares.sum(axis=1, keepdims=True), axis=1)
    draws = np.random.default_rng([seed, 1]).random(len(temperatures))
    return (draws[:, None] >= bounds[:, :-1]).sum(axis=1)


Batches = BatchSource | Mixture  # random access to the batches of a run


def make_batches(source: Batches) -> "grain.DatasetIterator":
    """Return an iterator that prepares batches in threads.

    `get_state()` is a small dict that counts the delivered batches. After `set_state()` the same batches follow.
    """
    import grain  # here, because the rest of this module and a train step run without it

    read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))
