"""Nearest vectors by faiss, for corpora that are searched often. Needs the optional extra: pip install faiss-cpu."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.search.nearest import normalized

TRAINING_ROWS = 1 << 17  # vectors that an inverted file is made from, evenly spaced over the corpus


class FaissSearch:
    """A faiss index of vectors of length 1, compared by inner product.

    Scores are those that faiss computes from what it stores. They are cosines where that is the vectors (`Flat`,
    `IVF1024,Flat`, `HNSW32`), close to them after a quantisation (`IVF1024,SQ8`), and none after a PCA, which takes the
    mean away and drops numbers: a threshold then has another meaning. `,RFlat` at the end (`PCA64,IVF1024,Flat,RFlat`)
    keeps the vectors, too, and gives the cosines of what was found.

    Args:
        index: faiss's own.
    """

    def __init__(self, index: Any):
        self._index = index
        inverted = _faiss().try_extract_index_ivf(index)  # also where it is part of another index; None: there is none
        if inverted is not None:  # how many of its lists are looked through, 10 of 100 as in SimCSE's tool
            inverted.nprobe = max(1, round(math.sqrt(inverted.nlist)))

    @classmethod
    def build(
        cls, factory: str, dimension: int, rows: int, blocks: Callable[[], Iterable[Float[np.ndarray, "_ dimension"]]]
    ) -> "FaissSearch":
        """Makes the index.

        Args:
            factory: faiss's description of it: `Flat` is exact, `IVF1024,Flat` and `HNSW32` are not.
            dimension: numbers of a vector.
            rows: how many vectors there are.
            blocks: begins to read them; they are scaled to length 1.

        Raises:
            ConfigError: faiss is not installed, or cannot make such an index of these vectors.
        """
        faiss = _faiss()
        try:
            index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                step = max(1, rows // TRAINING_ROWS)
                index.train(np.concatenate([_unit(block[::step]) for block in blocks()]))
            for block in blocks():
                index.add(_unit(block))
        except RuntimeError as error:
            raise ConfigError(f"faiss makes no index {factory!r} of {rows:,} vectors: {_reason(error)}") from error
        return cls(index)

    @classmethod
    def load(cls, path: Path) -> "FaissSearch":
        """Reads what `save` has written.

        Raises:
            CheckpointError: the file cannot be read.
            ConfigError: faiss is not installed.
        """
        faiss = _faiss()
        try:
            return cls(faiss.read_index(str(path)))
        except RuntimeError as error:
            raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error

    def save(self, path: Path) -> None:
        """Writes the index with its vectors."""
        _faiss().write_index(self._index, str(path))

    def __len__(self) -> int:
        return self._index.ntotal

    def nearest(
        self, queries: Float32[np.ndarray, "queries dimension"], top_k: int
    ) -> tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        """Inner products and rows as `search.nearest.nearest` gives them; row -1 where fewer were found."""
        scores, rows = self._index.search(np.ascontiguousarray(queries), min(top_k, len(self)))
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def _unit(vectors: Float[np.ndarray, "_ dimension"]) -> Float32[np.ndarray, "_ dimension"]:
    return normalized(np.ascontiguousarray(vectors, np.float32))


def _reason(error: Exception) -> str:
    """The message of a faiss error, without the place in its source."""
    return str(error).strip().splitlines()[0].split("Error: ")[-1][:200]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "faiss is not installed: pip install '.[faiss]' in the repository, or search without it"
        ) from error
    return faiss
