"""Embeddings of texts, in memory or mapped from files, and the exact search for the nearest ones."""

import collections
import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int8, Int32, Shaped, UInt32

from diffcse_jax.errors import ConfigError

BLOCK_ROWS = 8192  # embeddings compared at once
BLOCK_QUERIES = 1024  # their similarities with a block of embeddings take 32 MiB
STORAGES = ("float32", "float16", "int8", "bits")
RESCORED = 8  # rows per hit that bits choose and int8 scores
_FILES = ("vectors.npy", "scale.npy", "precise.npy")
_ALIGNMENT = 64  # bytes: a CPU compares arrays that start at a multiple of it without copying them

Vectors = Float32[np.ndarray, "rows dimension"]
Queries = Float32[np.ndarray, "queries dimension"]
Nearest = tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]  # scores and rows, best first
Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # the same on the device


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Embeddings of length 1, stored as one of `STORAGES`.

    With bits, a search compares the signs of all dimensions, and then scores the nearest rows with int8.
    """

    stored: Shaped[np.ndarray, "rows columns"]  # float32, float16, int8, or 32 bits in a uint32
    scale: Float32[np.ndarray, " dimension"] | None = None  # of int8: the embeddings are the numbers times this
    precise: Int8[np.ndarray, "rows dimension"] | None = None  # next to bits

    @classmethod
    def of(cls, vectors: Vectors, storage: str = "float32") -> "Embeddings":
        """Store embeddings of length 1. As float32, those of a mapped file stay there."""
        if storage not in STORAGES:
            raise ConfigError(f"storage={storage!r}: use one of: {', '.join(STORAGES)}")
        if storage == "float32" and vectors.ctypes.data % _ALIGNMENT == 0:
            return cls(vectors)
        if storage in ("float32", "float16"):
            return cls(_converted(vectors, lambda block: block.astype(storage)))
        largest = np.maximum(vectors.max(axis=0, initial=0), -vectors.min(axis=0, initial=0))
        scale = np.maximum(largest / 127, 1e-12)
        codes = _converted(vectors, lambda block: np.rint(block / scale).astype(np.int8))
        return cls(codes, scale) if storage == "int8" else cls(_converted(vectors, _bits), scale, codes)

    @classmethod
    def load(cls, folder: Path) -> "Embeddings":
        """Map what `save` has written into memory."""
        vectors, *others = (folder / name for name in _FILES)
        mapped = (np.load(path, mmap_mode="r") if path.exists() else None for path in others)
        return cls(np.load(vectors, mmap_mode="r"), *mapped)

    def save(self, folder: Path) -> None:
        """Write the embeddings to a folder."""
        for name, array in zip(_FILES, (self.stored, self.scale, self.precise), strict=True):
            if array is not None:
                np.save(folder / name, array)

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> Vectors:
        """Return the embeddings of some rows, of length 1 up to rounding."""
        found = np.asarray((self.stored if self.precise is None else self.precise)[numbers])
        return found.astype(np.float32, copy=False) if self.scale is None else found * self.scale

    def nearest(self, queries: Queries, k: int) -> Nearest:
        """Find the rows with the highest cosine similarities; see `nearest`."""
        if self.precise is None:
            return nearest(queries if self.scale is None else queries * self.scale, self.stored, k)
        rows = np.sort(nearest(_bits(queries), self.stored, RESCORED * k)[1], axis=1)
        scores = [self.rows(each) @ query for each, query in zip(rows, queries, strict=True)]
        by_score = np.array(scores, np.float32).reshape(rows.shape)
        order = np.argsort(-by_score, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(by_score, order, axis=1), np.take_along_axis(rows, order, axis=1)


def _converted(
    vectors: Vectors, convert: Callable[[Vectors], Shaped[np.ndarray, "block columns"]]
) -> Shaped[np.ndarray, "rows columns"]:
    """Return converted embeddings at the start of a page of memory."""
    empty = convert(vectors[:0])
    shape = (len(vectors), empty.shape[1])
    converted = np.ndarray(shape, empty.dtype, mmap.mmap(-1, max(1, empty.itemsize * shape[0] * shape[1])))
    for start in range(0, len(vectors), BLOCK_ROWS):
        converted[start : start + BLOCK_ROWS] = convert(vectors[start : start + BLOCK_ROWS])
    return converted


def _bits(vectors: Vectors) -> UInt32[np.ndarray, "rows words"]:
    padded = np.pad(vectors > 0, ((0, 0), (0, -vectors.shape[1] % 32)))
    return np.packbits(padded, axis=1).view(np.uint32)


def nearest(
    queries: Shaped[np.ndarray, "queries columns"], vectors: Shaped[np.ndarray, "rows columns"], k: int
) -> Nearest:
    """Find the rows with the highest inner products, best first; of equal ones the earlier row first.

    If `vectors` are mapped from a file, memory holds three blocks of them, and the similarities of one.

    Args:
        queries: Embeddings of length 1, or their bits.
        vectors: Embeddings of length 1 as float32, float16 or int8, or their bits, 32 in a uint32; fewer than 2^31.
        k: The number of hits for each query; all rows if there are fewer.

    Returns:
        Inner products (of bits: the number of different ones, negative) and row numbers, from 0.
    """
    found = min(k, len(vectors))
    if not found or not len(queries):
        return np.zeros((len(queries), found), np.float32), np.zeros((len(queries), found), np.int64)
    # Shapes are powers of two, so that few are compiled. All blocks have the same one, so that equal rows score alike.
    size = _power_of_two(len(vectors), BLOCK_ROWS)
    count = 1 if len(queries) == 1 else _power_of_two(len(queries), BLOCK_QUERIES)
    asked = [jnp.asarray(_padded(queries[start : start + count], count)) for start in range(0, len(queries), count)]
    shape = (count, _power_of_two(found))
    best: list[Best] = [(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))] * len(asked)
    running: collections.deque[list[Best]] = collections.deque()
    for first in range(0, len(vectors), BLOCK_ROWS):
        block = np.asarray(vectors[first : first + BLOCK_ROWS])
        on_device = jax.device_put(_padded(block, size), may_alias=True)
        place = np.int32(first), np.int32(len(block))
        best = [_better(*earlier, each, on_device, *place) for earlier, each in zip(best, asked, strict=True)]
        running.append(best)
        if len(running) > 2:  # otherwise the host would copy the whole corpus before the device has compared it
            jax.block_until_ready(running.popleft())
    scores, rows = (np.concatenate([np.asarray(each[part]) for each in best]) for part in (0, 1))
    return scores[: len(queries), :found], rows[: len(queries), :found].astype(np.int64)


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
