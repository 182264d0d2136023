"""Texts and embeddings as arrays, in memory or mapped from an index folder, in one of four kinds of numbers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int, Int8, Shaped, UInt32

from diffcse_jax.errors import ConfigError
from diffcse_jax.search.nearest import BLOCK_ROWS, Nearest, Queries, Vectors, nearest

STORAGES = ("float32", "float16", "int8", "bits")
RESCORED = 8  # rows per hit that bits choose and int8 scores
VECTORS, _SCALE, _PRECISE = "vectors.npy", "scale.npy", "precise.npy"


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
        paths = (folder / name for name in (VECTORS, _SCALE, _PRECISE))
        return cls(table, *(np.load(path, mmap_mode="r") if path.exists() else None for path in paths))

    def save(self, folder: Path) -> None:
        for name, array in ((VECTORS, self.vectors), (_SCALE, self.scale), (_PRECISE, self.precise)):
            if array is not None:
                np.save(folder / name, array)

    def __len__(self) -> int:
        return len(self.table)

    def texts(self) -> Iterator[pa.Table]:
        yield self.table

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> list[dict[str, Any]]:
        return [
            self.table.slice(number, 1).to_pylist()[0] for number in numbers.tolist()
        ]  # `take` has a limit of 2 GiB

    def embeddings(self, numbers: Int[np.ndarray, " rows"] | slice) -> Vectors:
        """Return embeddings of length 1, up to rounding."""
        stored = self.vectors if self.precise is None else self.precise
        assert stored is not None
        found = np.asarray(stored[numbers]).astype(np.float32, copy=False)
        return found if self.scale is None else found * self.scale

    def unit_blocks(self) -> Iterator[Vectors]:
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
    """Return converted blocks as one array, at an address that JAX reads without a copy."""
    filled, start = np.zeros((0, 0), np.float32), 0
    for block in map(convert, blocks):
        if not start:
            size = rows * block.shape[1] * block.itemsize
            room = np.empty(size + 64, np.uint8)
            filled = room[-room.ctypes.data % 64 :][:size].view(block.dtype).reshape(rows, block.shape[1])
        filled[start : start + len(block)] = block
        start += len(block)
    return filled


def _bits(vectors: Vectors) -> UInt32[np.ndarray, "rows words"]:
    padded = np.pad(vectors > 0, ((0, 0), (0, -vectors.shape[1] % 32)))
    return np.packbits(padded, axis=1).view(np.uint32)
