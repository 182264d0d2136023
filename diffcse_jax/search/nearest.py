"""Nearest neighbours of queries among many embeddings: exactly, block by block on the device, or by faiss."""

import collections
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from diffcse_jax.errors import CheckpointError, ConfigError, require_extra

BLOCK_ROWS = 8192  # embeddings compared at once; with a block of queries their similarities take 32 MiB
BLOCK_QUERIES = 1024
FAISS_TRAINING_ROWS = 1 << 17  # embeddings that faiss clusters, evenly spaced over the corpus

Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # similarities and rows
Blocks = Iterable[Float[np.ndarray, "_ dimension"]]  # float32 or float16, each of at most BLOCK_ROWS embeddings


def nearest(
    queries: Float32[np.ndarray, "queries dimension"], blocks: Blocks, rows: int, top_k: int
) -> tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
    """Find the rows with the highest inner products, best first; of equal ones the earlier row first.

    Memory holds three blocks of embeddings, and the similarities of one of them with one block of queries.

    Args:
        queries: Embeddings of length 1.
        blocks: Embeddings of length 1, block by block; fewer than 2^31 in all.
        rows: The number of embeddings.
        top_k: The number of hits for each query; all rows if there are fewer.

    Returns:
        Inner products and row numbers, from 0.
    """
    found = min(top_k, rows)
    if not found or not len(queries):
        return np.zeros((len(queries), found), np.float32), np.zeros((len(queries), found), np.int64)
    # Shapes are powers of two, so that few are compiled. All blocks have the same one, so that equal rows score alike.
    k, size = _power_of_two(found), min(BLOCK_ROWS, _power_of_two(rows))
    asked = [
        jnp.asarray(_padded(queries[start : start + BLOCK_QUERIES], _power_of_two(min(len(queries), BLOCK_QUERIES))))
        for start in range(0, len(queries), BLOCK_QUERIES)
    ]
    shapes = [(len(each), k) for each in asked]
    best = [(jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)) for shape in shapes]
    running: collections.deque[list[Best]] = collections.deque()
    first = 0
    for block in blocks:
        on_device, place = jnp.asarray(_padded(block, size)), (np.int32(first), np.int32(len(block)))
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
    queries: Float32[Array, "queries dimension"],
    block: Float32[Array, "rows dimension"],
    first: Int32[Array, ""] | np.int32,
    count: Int32[Array, ""] | np.int32,
) -> Best:
    """Merge the best hits so far with those of a block, whose first `count` embeddings are rows `first`, ..."""
    with jax.default_matmul_precision("highest"):  # the default of accelerators is below float32
        scores = queries @ block.T
    real = jnp.arange(len(block), dtype=jnp.int32) < count
    # Of equal values `top_k` takes the one at the lower place, so earlier rows come first here and below.
    scores, columns = jax.lax.top_k(jnp.where(real[None], scores, -jnp.inf), min(best.shape[1], len(block)))
    rows = jnp.concatenate([best_rows, columns + first], axis=1)
    scores, places = jax.lax.top_k(jnp.concatenate([best, scores], axis=1), best.shape[1])
    return scores, jnp.take_along_axis(rows, places, axis=1)


def _padded(vectors: Float32[np.ndarray, "_ dimension"], rows: int) -> Float32[np.ndarray, "rows dimension"]:
    return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))


def _power_of_two(count: int) -> int:
    return max(8, 1 << (count - 1).bit_length())


class FaissSearch:
    """A faiss index of embeddings of length 1, compared by inner product.

    If faiss stores the embeddings themselves (`Flat`, `IVF1024,Flat`, `HNSW32`), scores are cosine similarities. After
    quantisation (`IVF1024,SQ8`) they are close to these. After a PCA they are not, so a threshold has another meaning;
    with `,RFlat` at the end (`PCA64,IVF1024,Flat,RFlat`) faiss also keeps the embeddings and returns the similarities.

    Args:
        index: The index of faiss.
    """

    def __init__(self, index: Any):
        self._index = index
        inverted = require_extra("faiss", "search").try_extract_index_ivf(index)  # also as a part of another index
        if inverted is not None:  # the number of lists to look through: 10 of 100, as in SimCSE's tool
            inverted.nprobe = max(1, round(math.sqrt(inverted.nlist)))

    @classmethod
    def build(cls, factory: str, dimension: int, rows: int, blocks: Callable[[], Blocks]) -> "FaissSearch":
        """Build the index that `factory` describes in faiss's terms.

        Args:
            factory: `Flat` is exact; `IVF1024,Flat` and `HNSW32` are not.
            dimension: The embedding size.
            rows: The number of embeddings.
            blocks: Starts to read the embeddings, of length 1.

        Raises:
            UserError: faiss is not installed.
            ConfigError: faiss cannot build such an index of these embeddings.
        """
        faiss = require_extra("faiss", "search")
        try:
            index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                step = max(1, rows // FAISS_TRAINING_ROWS)
                index.train(np.concatenate([block[::step] for block in blocks()]))
            for block in blocks():
                index.add(np.ascontiguousarray(block))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].split("Error: ")[-1][:200]
            raise ConfigError(f"faiss cannot build {factory!r} for {rows:,} embeddings: {reason}") from error
        return cls(index)

    @classmethod
    def load(cls, path: Path) -> "FaissSearch":
        """Read what `save` has written.

        Raises:
            UserError: faiss is not installed.
            CheckpointError: The file cannot be read.
        """
        try:
            return cls(require_extra("faiss", "search").read_index(str(path)))
        except RuntimeError as error:
            raise CheckpointError(f"{path} cannot be read ({error}). Build the index again") from error

    def save(self, path: Path) -> None:
        """Write the index."""
        require_extra("faiss", "search").write_index(self._index, str(path))

    def nearest(
        self, queries: Float32[np.ndarray, "queries dimension"], top_k: int
    ) -> tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        """Return inner products and rows like the function `nearest`; row -1 where fewer were found."""
        scores, rows = self._index.search(np.ascontiguousarray(queries), min(top_k, self._index.ntotal))
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
