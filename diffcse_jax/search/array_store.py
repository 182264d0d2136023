"""Texts and embeddings as arrays, in memory or mapped from a file, and the exact search for the nearest rows."""

import collections
import dataclasses
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from jaxtyping import Array, Float32, Int, Int8, Int32, Shaped, UInt32

from diffcse_jax.errors import ConfigError

BLOCK_ROWS = 8192  # embeddings compared at once
BLOCK_QUERIES = 1024  # their similarities with a block of embeddings take 32 MiB
STORAGES = ("float32", "float16", "int8", "bits")
RESCORED = 8  # rows per hit that bits choose and int8 scores
_FILES = ("vectors.npy", "scale.npy", "precise.npy")

Vectors = Float32[np.ndarray, "rows dimension"]
Queries = Float32[np.ndarray, "queries dimension"]
Nearest = tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]  # scores and rows, best first
Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # the same on the device


@dataclasses.dataclass(frozen=True)
class ArrayStore:
    """Texts and embeddings of length 1. Without embeddings, only words are searched.

    With bits, a search compares the signs of all dimensions, and then scores the nearest rows with int8.
    """

    table: pa.Table
    vectors: Shaped[np.ndarray, "rows columns"] | None = None  # float32, float16, int8, or 32 bits in a uint32
    scale: Float32[np.ndarray, " dimension"] | None = None  # of int8: the embeddings are the numbers times this
    precise: Int8[np.ndarray, "rows dimension"] | None = None  # next to bits

    @classmethod
    def of(cls, blocks: Callable[[], Iterable[Vectors]], table: pa.Table, storage: str) -> "ArrayStore":
        """Convert embeddings of length 1. `blocks` starts a pass; int8 and bits need several."""
        if storage not in STORAGES:
            raise ConfigError(f"storage={storage!r}: use one of: {', '.join(STORAGES)}")
        if storage in ("float32", "float16"):
            return cls(table, _filled(blocks(), len(table), lambda block: block.astype(storage, copy=False)))
        scale = np.maximum(np.max([np.abs(block).max(axis=0, initial=0) for block in blocks()], axis=0) / 127, 1e-12)
        codes = _filled(blocks(), len(table), lambda block: np.rint(block / scale).astype(np.int8))
        if storage == "int8":
            return cls(table, codes, scale)
        return cls(table, _filled(blocks(), len(table), _bits), scale, codes)

    @classmethod
    def load(cls, folder: Path, table: pa.Table) -> "ArrayStore":
        """Map what `save` has written into memory."""
        paths = (folder / name for name in _FILES)
        return cls(table, *(np.load(path, mmap_mode="r") if path.exists() else None for path in paths))

    def save(self, folder: Path) -> None:
        """Write the embeddings, without the texts, to a folder."""
        for name, array in zip(_FILES, (self.vectors, self.scale, self.precise), strict=True):
            if array is not None:
                np.save(folder / name, array)

    def __len__(self) -> int:
        return len(self.table)

    def row(self, number: int) -> dict[str, Any]:
        """Return the text of a row, and its other columns with a value."""
        (found,) = self.table.slice(number, 1).to_pylist()
        return {name: value for name, value in found.items() if value is not None}

    def embeddings(self, numbers: Int[np.ndarray, " rows"] | slice) -> Vectors:
        """Return embeddings of length 1, up to rounding."""
        stored = self.vectors if self.precise is None else self.precise
        assert stored is not None
        found = np.asarray(stored[numbers]).astype(np.float32, copy=False)
        return found if self.scale is None else found * self.scale

    def unit_blocks(self) -> Iterator[Vectors]:
        """Return the embeddings of all rows in their order, in blocks of at most `BLOCK_ROWS`."""
        return (self.embeddings(slice(start, start + BLOCK_ROWS)) for start in range(0, len(self), BLOCK_ROWS))

    def nearest(self, queries: Queries, k: int) -> Nearest:
        """Find the rows with the highest cosine similarities; see `nearest`."""
        assert self.vectors is not None
        vectors = self.vectors
        blocks = (np.asarray(vectors[start : start + BLOCK_ROWS]) for start in range(0, len(self), BLOCK_ROWS))
        if self.precise is None:
            return nearest(queries if self.scale is None else queries * self.scale, blocks, len(self), k)
        rows = np.sort(nearest(_bits(queries), blocks, len(self), RESCORED * k)[1], axis=1)
        scores = np.stack([self.embeddings(each) @ query for each, query in zip(rows, queries, strict=True)])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def _filled(
    blocks: Iterable[Vectors], rows: int, convert: Callable[[Vectors], np.ndarray]
) -> Shaped[np.ndarray, "rows columns"]:
    """Return converted blocks as one array, at the start of a page of memory, which JAX reads without a copy."""
    filled, start = np.zeros((0, 0), np.float32), 0
    for block in map(convert, blocks):
        if not start:
            numbers = rows * block.shape[1]
            room = mmap.mmap(-1, max(numbers * block.itemsize, 1))
            filled = np.frombuffer(room, block.dtype, numbers).reshape(rows, block.shape[1])
        filled[start : start + len(block)] = block
        start += len(block)
    return filled


def _bits(vectors: Vectors) -> UInt32[np.ndarray, "rows words"]:
    padded = np.pad(vectors > 0, ((0, 0), (0, -vectors.shape[1] % 32)))
    return np.packbits(padded, axis=1).view(np.uint32)


def nearest(
    queries: Shaped[np.ndarray, "queries columns"], blocks: Iterable[Shaped[np.ndarray, "_ columns"]], rows: int, k: int
) -> Nearest:
    """Find the rows with the highest inner products, best first; of equal ones the earlier row first.

    Memory holds three blocks of embeddings, and the similarities of one of them with one block of queries.

    Args:
        queries: Embeddings of length 1, or their bits.
        blocks: Embeddings of length 1 as float32, float16 or int8, or their bits, 32 in a uint32. At most `BLOCK_ROWS`
            at a time; fewer than 2^31 in all.
        rows: The number of embeddings.
        k: The number of hits for each query; all rows if there are fewer.

    Returns:
        Inner products (of bits: the number of different ones, negative) and row numbers, from 0.
    """
    found = min(k, rows)
    if not found or not len(queries):
        return np.zeros((len(queries), found), np.float32), np.zeros((len(queries), found), np.int64)
    # Shapes are powers of two, so that few are compiled. All blocks have the same one, so that equal rows score alike.
    size = _power_of_two(rows, BLOCK_ROWS)
    count = 1 if len(queries) == 1 else _power_of_two(len(queries), BLOCK_QUERIES)
    asked = [jnp.asarray(_padded(queries[start : start + count], count)) for start in range(0, len(queries), count)]
    shape = (count, _power_of_two(found))
    best: list[Best] = [(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))] * len(asked)
    running: collections.deque[list[Best]] = collections.deque()
    first = 0
    for block in blocks:
        on_device = jax.device_put(_padded(block, size), may_alias=True)  # CPUs read aligned blocks where they are
        place = np.int32(first), np.int32(len(block))
        best = [_better(*earlier, each, on_device, *place) for earlier, each in zip(best, asked, strict=True)]
        first += len(block)
        running.append(best)
        if len(running) > 2:  # otherwise the host would copy the whole corpus before the device has compared it
            jax.block_until_ready(running.popleft())
    scores, numbers = (np.concatenate([np.asarray(each[part]) for each in best]) for part in (0, 1))
    return scores[: len(queries), :found], numbers[: len(queries), :found].astype(np.int64)


@jax.jit
def _better(
    best: Float32[Array, "queries k"],
    best_rows: Int32[Array, "queries k"],
    queries: Shaped[Array, "queries columns"],
    block: Shaped[Array, "rows columns"],
    first: Int32[Array, ""] | np.int32,
    count: Int32[Array, ""] | np.int32,
) -> Best:
    """Merge the best hits so far with those of a block, whose first `count` embeddings are rows `first`, ..."""
    if block.dtype == jnp.uint32:
        different = jax.lax.population_count(queries[:, None] ^ block[None]).sum(axis=-1)
        scores = -different.astype(jnp.float32)
    else:
        with jax.default_matmul_precision("highest"):  # the default of accelerators is below float32
            scores = queries @ block.astype(jnp.float32).T
    real = jnp.arange(len(block), dtype=jnp.int32) < count
    # Of equal values `top_k` takes the one at the lower place, so earlier rows come first here and below.
    scores, columns = jax.lax.top_k(jnp.where(real[None], scores, -jnp.inf), min(best.shape[1], len(block)))
    rows = jnp.concatenate([best_rows, columns + first], axis=1)
    scores, places = jax.lax.top_k(jnp.concatenate([best, scores], axis=1), best.shape[1])
    return scores, jnp.take_along_axis(rows, places, axis=1)


def _padded(vectors: Shaped[np.ndarray, "_ columns"], rows: int) -> Shaped[np.ndarray, "rows columns"]:
    return vectors if len(vectors) == rows else np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))


def _power_of_two(count: int, most: int = 1 << 31) -> int:
    return min(most, max(8, 1 << (count - 1).bit_length()))
