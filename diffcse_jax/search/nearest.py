"""Exact search: the rows with the highest inner products, block by block."""

import collections
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32, Shaped

BLOCK_ROWS = 8192  # embeddings compared at once
BLOCK_QUERIES = 1024  # their similarities with a block of embeddings take 32 MiB

Vectors = Float32[np.ndarray, "rows dimension"]
Queries = Float32[np.ndarray, "queries dimension"]
Nearest = tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]  # scores and rows, best first
Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # the same on the device


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
    size, count = (
        _power_of_two(rows, BLOCK_ROWS),
        1 if len(queries) == 1 else _power_of_two(len(queries), BLOCK_QUERIES),
    )
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
