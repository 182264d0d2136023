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
RESCORED = 8  # for each hit, the signs choose this many rows, which int8 then scores
_FILES = ("vectors.npy", "scale.npy", "center.npy", "precise.npy")
_ALIGNMENT = 64  # bytes; on a CPU, JAX reads arrays that start at a multiple of this without copying them

Vectors = Float32[np.ndarray, "rows dimension"]
Queries = Float32[np.ndarray, "queries dimension"]
Nearest = tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]  # scores and rows, best first
Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # the same on the device


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Embeddings of length 1, stored as one of `STORAGES`.

    `int8` and `bits` store differences from the mean embedding, because all embeddings of encoders such as e5 are near
    it. With `bits`, a search compares the signs of the differences, and then scores the nearest rows with int8.
    """

    stored: Shaped[np.ndarray, "rows columns"]  # float32, float16, int8, or uint32 with 32 bits each
    scale: Float32[np.ndarray, " dimension"] | None = None  # of int8 numbers: embeddings are center + scale * numbers
    center: Float32[np.ndarray, " dimension"] | None = None
    precise: Int8[np.ndarray, "rows dimension"] | None = None  # the int8 numbers, if `stored` holds bits

    @classmethod
    def of(cls, vectors: Vectors, storage: str = "float32") -> "Embeddings":
        """Store embeddings of length 1. As float32, the embeddings of a mapped file stay in the file."""
        check_storage(storage)
        if storage == "float32" and vectors.ctypes.data % _ALIGNMENT == 0:
            return cls(vectors)
        if storage in ("float32", "float16"):
            return cls(_converted(vectors, lambda block: block.astype(storage)))
        center = vectors.sum(axis=0) / np.float32(max(1, len(vectors)))
        largest = np.maximum(vectors.max(axis=0, initial=-1) - center, center - vectors.min(axis=0, initial=1))
        scale = np.maximum(largest / 127, 1e-12)
        codes = _converted(vectors, lambda block: np.rint((block - center) / scale).astype(np.int8))
        if storage == "int8":
            return cls(codes, scale, center)
        return cls(_converted(vectors, lambda block: _bits(block - center)), scale, center, codes)

    @classmethod
    def load(cls, folder: Path) -> "Embeddings":
        """Open the files of `save`. They are mapped into memory."""
        vectors, *others = (folder / name for name in _FILES)
        mapped = (np.load(path, mmap_mode="r") if path.exists() else None for path in others)
        return cls(np.load(vectors, mmap_mode="r"), *mapped)

    def save(self, folder: Path) -> None:
        """Write the embeddings to a folder."""
        for name, array in zip(_FILES, (self.stored, self.scale, self.center, self.precise), strict=True):
            if array is not None:
                np.save(folder / name, array)

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> Vectors:
        """Return the embeddings of some rows. Their length is 1 up to rounding."""
        numeric = self.stored if self.precise is None else self.precise
        found = np.asarray(numeric[numbers])
        return found.astype(np.float32, copy=False) if self.scale is None else found * self.scale + self.center

    def nearest(self, queries: Queries, k: int) -> Nearest:
        """Find the rows with the highest cosine similarities; see `nearest`."""
        if self.scale is None:
            return nearest(queries, self.stored, k)
        if self.precise is None:
            scores, rows = nearest(queries * self.scale, self.stored, k)
            return scores + (queries @ self.center)[:, None], rows
        found = nearest(_bits(queries - self.center), self.stored, RESCORED * k)[1]
        rows = np.sort(found, axis=1)  # equal scores keep this order
        scores = np.zeros(rows.shape, np.float32)
        for number, query in enumerate(queries):
            scores[number] = self.rows(rows[number]) @ query
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def check_storage(storage: str) -> None:
    """Raise `ConfigError` unless the storage is one of `STORAGES`."""
    if storage not in STORAGES:
        raise ConfigError(f"storage={storage!r}: use one of: {', '.join(STORAGES)}")


def _converted(
    vectors: Vectors, convert: Callable[[Vectors], Shaped[np.ndarray, "block columns"]]
) -> Shaped[np.ndarray, "rows columns"]:
    """Return converted embeddings, block by block, in memory that starts at a page (see `_ALIGNMENT`)."""
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
    """Find the rows with the highest inner products, best first. Rows with equal products keep their order.

    If `vectors` are mapped from a file, memory holds at most three blocks of them, and the products of one.

    Args:
        queries: Embeddings of length 1, or their bits.
        vectors: Fewer than 2^31 embeddings of length 1 as float32, float16 or int8, or their bits, 32 in a uint32.
        k: The number of hits for each query. If there are fewer rows, all of them are hits.

    Returns:
        Inner products (for bits: minus the number of bits that differ) and row numbers, from 0.
    """
    found = min(k, len(vectors))
    if not found or not len(queries):
        return np.zeros((len(queries), found), np.float32), np.zeros((len(queries), found), np.int64)
    # Sizes are powers of two: few programs are compiled. All blocks have the same size: equal rows score alike.
    size = _power_of_two(len(vectors), BLOCK_ROWS)
    count = 1 if len(queries) == 1 else _power_of_two(len(queries), BLOCK_QUERIES)
    batches = [jnp.asarray(_padded(queries[start : start + count], count)) for start in range(0, len(queries), count)]
    shape = (count, _power_of_two(found))
    best: list[Best] = [(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))] * len(batches)
    running: collections.deque[list[Best]] = collections.deque()
    for first in range(0, len(vectors), BLOCK_ROWS):
        block = np.asarray(vectors[first : first + BLOCK_ROWS])
        on_device = jax.device_put(_padded(block, size), may_alias=True)
        place = np.int32(first), np.int32(len(block))
        best = [_better(*hits, batch, on_device, *place) for hits, batch in zip(best, batches, strict=True)]
        running.append(best)
        if len(running) > 2:  # otherwise the host would copy the whole corpus before the device has compared it
            jax.block_until_ready(running.popleft())
    scores = np.concatenate([np.asarray(scores) for scores, _ in best])
    rows = np.concatenate([np.asarray(rows) for _, rows in best])
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
