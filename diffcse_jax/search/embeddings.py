"""Embeddings of texts, in memory or mapped from files, and the exact search for the nearest."""

import collections
import dataclasses
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int8, Int32, Shaped, UInt32

from diffcse_jax.errors import ConfigError
from diffcse_jax.search.modes import STORAGES

BLOCK_ROWS = 8192  # embeddings compared at once
BLOCK_QUERIES = 1024  # their similarities with a block of embeddings take 32 MiB
RESCORED = 8  # for each hit, the signs choose this many rows, which int8 then scores
MARGIN = 1.25  # of a scale that grows
LEVELS = 127  # the largest number that int8 stores
# In bytes. On a CPU, JAX reads arrays that start at a multiple of this without copying them.
_ALIGNMENT = 64

Vectors = Float32[np.ndarray, "rows dimension"]
Queries = Float32[np.ndarray, "queries dimension"]
# Scores and rows, best first.
Nearest = tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]
Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # the same on the device
Scalar = Int32[Array, ""] | np.int32
Numbers = Shaped[np.ndarray, "rows columns"]


@dataclasses.dataclass(frozen=True)
class StoredEmbeddings:
    """Embeddings of length 1, stored as one of `STORAGES`.

    `int8` and `bits` store differences from the mean embedding, because all embeddings of encoders
    such as e5 are near it. With `bits`, a search compares the signs of the differences, and then
    scores the nearest rows with int8.

    Attributes:
        vectors: float32, float16, int8, or uint32 with 32 bits each.
        scale: Of int8 numbers: embeddings are center + scale * numbers.
        center: The mean embedding when there were `measured` rows.
        precise: The int8 numbers, if `vectors` holds bits.
        measured: The number of rows that scale and center were computed from.
    """

    vectors: Numbers
    scale: Float32[np.ndarray, " dimension"] | None = None
    center: Float32[np.ndarray, " dimension"] | None = None
    precise: Int8[np.ndarray, "rows dimension"] | None = None
    measured: int = 0

    @classmethod
    def of(cls, vectors: Vectors, storage: str = "float32") -> "StoredEmbeddings":
        """Store embeddings of length 1. As float32, those of a mapped file stay in the file."""
        check_storage(storage)
        if storage == "float32" and vectors.ctypes.data % _ALIGNMENT == 0:
            return cls(vectors)
        if storage in ("float32", "float16"):
            return cls(_converted(vectors, lambda block: block.astype(storage)))
        center = vectors.sum(axis=0) / np.float32(max(1, len(vectors)))
        return cls._quantised(vectors, center, _scale_of(vectors, center), storage, len(vectors))

    @classmethod
    def _quantised(
        cls,
        vectors: Vectors,
        center: Float32[np.ndarray, " dimension"],
        scale: Float32[np.ndarray, " dimension"],
        storage: str,
        measured: int,
    ) -> "StoredEmbeddings":
        codes = _converted(vectors, lambda block: np.rint((block - center) / scale).astype(np.int8))
        if storage == "int8":
            return cls(codes, scale, center, measured=measured)
        return cls(
            _converted(vectors, lambda block: _bits(block - center)), scale, center, codes, measured
        )

    @property
    def storage(self) -> str:
        """The name of the storage."""
        return "bits" if self.precise is not None else self.vectors.dtype.name

    @property
    def dimension(self) -> int:
        """The size of an embedding."""
        return self.vectors.shape[1] if self.scale is None else len(self.scale)

    def arrays(self) -> Mapping[str, Shaped[np.ndarray, "..."]]:
        """Return the arrays that make up the storage, by the names of the attributes."""
        named = {name: getattr(self, name) for name in ("vectors", "scale", "center", "precise")}
        return {name: array for name, array in named.items() if array is not None}

    def updated(
        self, order: Int[np.ndarray, " rows"], added: Float32[np.ndarray, "new dimension"]
    ) -> "StoredEmbeddings":
        """Return the rows `order` of these embeddings, continued by the `added` ones.

        float32 and float16 are then as if stored anew. int8 and bits keep their center and scale,
        so that rows which stay lose nothing, until the number of rows has doubled. A scale that is
        too small for an added row grows.
        """
        if self.scale is None or self.center is None:
            return StoredEmbeddings(_taken(self.vectors, added.astype(self.vectors.dtype), order))
        if len(order) >= 2 * self.measured:
            old = self.rows(np.arange(len(self.vectors)))
            return StoredEmbeddings.of(_taken(old, added, order), self.storage)
        needed = _scale_of(added, self.center)
        # With a margin, so that it does not grow each time: growing rounds all rows again.
        scale = np.where(needed > self.scale, MARGIN * needed, self.scale).astype(np.float32)
        new = StoredEmbeddings._quantised(added, self.center, scale, self.storage, self.measured)
        codes = _taken(self._codes(scale), new._codes(scale), order)
        if self.precise is None:
            return dataclasses.replace(new, vectors=codes)
        bits = _taken(self.vectors, new.vectors, order)
        return dataclasses.replace(new, vectors=bits, precise=codes)

    def _codes(
        self, scale: Float32[np.ndarray, " dimension"]
    ) -> Int8[np.ndarray, "rows dimension"]:
        """Return the int8 numbers with another scale, which is at least as large."""
        codes = self.vectors if self.precise is None else self.precise
        if self.scale is None or not (scale > self.scale).any():
            return codes
        ratio = self.scale / scale
        return _converted(codes, lambda block: np.rint(block * ratio).astype(np.int8))

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> Vectors:
        """Return the embeddings of some rows. Their length is 1 up to rounding."""
        numeric = self.vectors if self.precise is None else self.precise
        chosen = np.asarray(numeric[numbers])
        if self.scale is None:
            return chosen.astype(np.float32, copy=False)
        return chosen * self.scale + self.center

    def nearest(self, queries: Queries, k: int) -> Nearest:
        """Find the rows with the highest cosine similarities; see `nearest`."""
        if self.scale is None or self.center is None:
            return nearest(queries, self.vectors, k)
        if self.precise is None:
            scores, rows = nearest(queries * self.scale, self.vectors, k)
            return scores + (queries @ self.center)[:, None], rows
        by_bits = nearest(_bits(queries - self.center), self.vectors, RESCORED * k)[1]
        rows = np.sort(by_bits, axis=1)  # equal scores keep this order
        scores = np.zeros(rows.shape, np.float32)
        for number, query in enumerate(queries):
            scores[number] = np.einsum("rd,d->r", self.rows(rows[number]), query)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def expected_arrays(
    storage: str, rows: int, dimension: int
) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return the type of numbers and the shape of each of `StoredEmbeddings.arrays`."""
    whole = (rows, dimension)
    line = (dimension,)
    if storage in ("float32", "float16"):
        return {"vectors": (storage, whole)}
    centered = {"scale": ("float32", line), "center": ("float32", line)}
    if storage == "int8":
        return {"vectors": ("int8", whole), **centered}
    bits = (rows, -(-dimension // 32))
    return {"vectors": ("uint32", bits), **centered, "precise": ("int8", whole)}


def check_storage(storage: str) -> None:
    """Raise `ConfigError` unless the storage is one of `STORAGES`."""
    if storage not in STORAGES:
        raise ConfigError(f"storage={storage!r}: use one of: {', '.join(STORAGES)}")


def _scale_of(
    vectors: Vectors, center: Float32[np.ndarray, " dimension"]
) -> Float32[np.ndarray, " dimension"]:
    """Return the scale with which int8 numbers reach all embeddings."""
    above = vectors.max(axis=0, initial=-1) - center
    below = center - vectors.min(axis=0, initial=1)
    return np.maximum(np.maximum(above, below) / LEVELS, 1e-12)


def _converted(
    numbers: Shaped[np.ndarray, "rows old_columns"],
    convert: Callable[
        [Shaped[np.ndarray, "block old_columns"]], Shaped[np.ndarray, "block columns"]
    ],
) -> Numbers:
    """Return converted rows, block by block, in aligned memory."""
    empty = convert(numbers[:0])
    converted = aligned((len(numbers), empty.shape[1]), empty.dtype)
    for start in range(0, len(numbers), BLOCK_ROWS):
        converted[start : start + BLOCK_ROWS] = convert(numbers[start : start + BLOCK_ROWS])
    return converted


def _taken(
    one: Shaped[np.ndarray, "old columns"],
    other: Shaped[np.ndarray, "new columns"],
    order: Int[np.ndarray, " rows"],
) -> Numbers:
    """Return rows of two arrays in aligned memory. The second continues the first."""
    taken = aligned((len(order), one.shape[1]), one.dtype)
    for start in range(0, len(order), BLOCK_ROWS):
        rows = order[start : start + BLOCK_ROWS]
        is_one = rows < len(one)
        block = taken[start : start + BLOCK_ROWS]
        block[is_one] = one[rows[is_one]]
        block[~is_one] = other[rows[~is_one] - len(one)]
    return taken


def aligned(shape: tuple[int, int], dtype: Any) -> Numbers:
    """Return an array in memory that starts at a page (see `_ALIGNMENT`)."""
    size = np.dtype(dtype).itemsize * shape[0] * shape[1]
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(1, size)))


def _bits(vectors: Vectors) -> UInt32[np.ndarray, "rows words"]:
    padded = np.pad(vectors > 0, ((0, 0), (0, -vectors.shape[1] % 32)))
    return np.packbits(padded, axis=1).view(np.uint32)


def nearest(
    queries: Shaped[np.ndarray, "queries columns"],
    vectors: Shaped[np.ndarray, "rows columns"],
    k: int,
) -> Nearest:
    """Find the rows with the highest inner products, best first.

    Rows with equal products keep their order.

    If `vectors` are mapped from a file, memory holds at most three blocks of them, and the products
    of one.

    Args:
        queries: Embeddings of length 1, or their bits.
        vectors: Fewer than 2^31 embeddings of length 1 as float32, float16 or int8, or their bits,
            32 in a uint32.
        k: The number of hits for each query. If there are fewer rows, all of them are hits.

    Returns:
        Inner products (for bits: minus the number of bits that differ) and row numbers, from 0.
    """
    k = min(k, len(vectors))
    if not k or not len(queries):
        return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
    # Sizes are powers of two, so that few programs are compiled, and blocks have one size, so that
    # equal rows score alike.
    size = _power_of_two(len(vectors), BLOCK_ROWS)
    count = 1 if len(queries) == 1 else _power_of_two(len(queries), BLOCK_QUERIES)
    batches = [
        jax.device_put(_padded(queries[start : start + count], count))
        for start in range(0, len(queries), count)
    ]
    shape = (count, _power_of_two(k))
    # Of NumPy: outside `jax.jit`, each call of jax.numpy is a program to compile or load.
    none = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)
    best: list[Best] = [jax.device_put(none)] * len(batches)
    running: collections.deque[list[Best]] = collections.deque()
    for first in range(0, len(vectors), BLOCK_ROWS):
        block = np.asarray(vectors[first : first + BLOCK_ROWS])
        on_device = jax.device_put(_padded(block, size), may_alias=True)
        place = np.int32(first), np.int32(len(block))
        best = [
            _better(hits, batch, on_device, place)
            for hits, batch in zip(best, batches, strict=True)
        ]
        running.append(best)
        # Otherwise the host would copy the whole corpus before the device has compared it.
        if len(running) > 2:
            jax.block_until_ready(running.popleft())
    scores = np.concatenate([np.asarray(scores) for scores, _ in best])
    rows = np.concatenate([np.asarray(rows) for _, rows in best])
    return scores[: len(queries), :k], rows[: len(queries), :k].astype(np.int64)


@jax.jit
def _better(
    best: Best,
    queries: Shaped[Array, "queries columns"],
    block: Shaped[Array, "rows columns"],
    place: tuple[Scalar, Scalar],
) -> Best:
    """Merge the best hits so far with those of a block.

    `place` is the row of its first embedding, and how many of its embeddings count.
    """
    (best_scores, best_rows), (first, count) = best, place
    if block.dtype == jnp.uint32:
        different = jax.lax.population_count(queries[:, None] ^ block[None]).sum(axis=-1)
        scores = -different.astype(jnp.float32)
    else:
        # The default of accelerators is below float32.
        with jax.default_matmul_precision("highest"):
            scores = queries @ block.astype(jnp.float32).T
    real = jnp.arange(len(block), dtype=jnp.int32) < count
    # Of equal values `top_k` takes the one at the lower place, so earlier rows come first.
    scores, columns = jax.lax.top_k(
        jnp.where(real[None], scores, -jnp.inf), min(best_rows.shape[1], len(block))
    )
    rows = jnp.concatenate([best_rows, columns + first], axis=1)
    scores, places = jax.lax.top_k(
        jnp.concatenate([best_scores, scores], axis=1), best_rows.shape[1]
    )
    return scores, jnp.take_along_axis(rows, places, axis=1)


def _padded(
    vectors: Shaped[np.ndarray, "_ columns"], rows: int
) -> Shaped[np.ndarray, "rows columns"]:
    return vectors if len(vectors) == rows else np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))


def _power_of_two(count: int, most: int = 1 << 31) -> int:
    return min(most, max(8, 1 << (count - 1).bit_length()))
