"""The nearest of many vectors, exactly: block by block on the device, so that memory does not grow with the corpus."""

import collections
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

BLOCK_ROWS = 8192  # vectors that are compared at once; with so many queries their similarities take 32 MiB
BLOCK_QUERIES = 1024
_FEWEST = 8  # queries and hits are filled up to powers of two from here, so that few shapes are compiled

Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # similarities and rows


def nearest(
    queries: Float32[np.ndarray, "queries dimension"],
    blocks: Iterable[Float[np.ndarray, "_ dimension"]],
    rows: int,
    top_k: int,
    *,
    unit: bool,
) -> tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
    """The rows with the highest inner products, best first; of equal ones the earlier row is first.

    Memory holds three blocks of vectors and the similarities of one block of them with one of queries.

    Args:
        queries: of length 1 for cosine similarities.
        blocks: vectors of float32 or float16, in blocks of any size, read once; fewer than 2^31 in all.
        rows: how many vectors there are.
        top_k: at most so many rows for a query; of fewer vectors all.
        unit: the vectors have length 1; otherwise products are those with the vectors scaled to it (zero ones stay).

    Returns:
        Inner products and row numbers, from 0.
    """
    found = min(top_k, rows)
    if not found or not len(queries):
        return np.zeros((len(queries), found), np.float32), np.zeros((len(queries), found), np.int64)
    k = _power_of_two(found)
    query_blocks = [
        jnp.asarray(_filled(queries[start : start + BLOCK_QUERIES], _power_of_two(min(len(queries), BLOCK_QUERIES))))
        for start in range(0, len(queries), BLOCK_QUERIES)
    ]
    best = [_nothing(len(block), k) for block in query_blocks]
    running: collections.deque[list[Best]] = collections.deque()
    first = 0
    for block, count in _even(blocks, min(BLOCK_ROWS, _power_of_two(rows))):
        on_device = jnp.asarray(block)
        offset, size = np.int32(first), np.int32(count)
        best = [
            _better(earlier, asked, on_device, offset, size, unit=unit)
            for earlier, asked in zip(best, query_blocks, strict=True)
        ]
        first += count
        running.append(best)
        if len(running) > 2:  # else the host would hand over the whole corpus before the device has compared it
            jax.block_until_ready(running.popleft())
    scores, numbers = (np.concatenate([np.asarray(each[part]) for each in best]) for part in (0, 1))
    return scores[: len(queries), :found], numbers[: len(queries), :found].astype(np.int64)


def normalized(vectors: Float32[np.ndarray, "*n dimension"]) -> Float32[np.ndarray, "*n dimension"]:
    """Vectors of length 1; a zero vector stays zero."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms == 0, np.float32(1), norms)


@functools.partial(jax.jit, static_argnames="unit")
def _better(
    best: Best,
    queries: Float32[Array, "queries dimension"],
    block: Float[Array, "rows dimension"],
    first: Int32[Array, ""] | np.int32,
    count: Int32[Array, ""] | np.int32,
    *,
    unit: bool,
) -> Best:
    """The best of the earlier blocks and of this one, whose first `count` vectors are rows `first`, ..."""
    vectors = block.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):  # that of accelerators is below float32
        scores = queries @ vectors.T
    if not unit:
        lengths = jnp.linalg.norm(vectors, axis=1)
        scores = scores / jnp.where(lengths == 0, jnp.float32(1), lengths)[None]
    real: Bool[Array, " rows"] = jnp.arange(len(block), dtype=jnp.int32) < count
    # Of equal values `top_k` takes the one at the lower place, so that earlier rows come first here and below.
    scores, columns = jax.lax.top_k(jnp.where(real[None], scores, -jnp.inf), min(best[0].shape[1], len(block)))
    candidates = jnp.concatenate([best[0], scores], axis=1)
    rows = jnp.concatenate([best[1], columns + first], axis=1)
    scores, places = jax.lax.top_k(candidates, best[0].shape[1])
    return scores, jnp.take_along_axis(rows, places, axis=1)


def _nothing(queries: int, k: int) -> Best:
    return jnp.full((queries, k), -jnp.inf, jnp.float32), jnp.full((queries, k), -1, jnp.int32)


def _even(
    blocks: Iterable[Float[np.ndarray, "_ dimension"]], size: int
) -> Iterator[tuple[Float[np.ndarray, "size dimension"], int]]:
    """The same vectors in blocks of one size, the last one filled up, each with the number of its real vectors."""
    held: list[Float[np.ndarray, "_ dimension"]] = []
    count = 0
    for block in blocks:
        start = 0
        while start < len(block):
            piece = block[start : start + size - count]
            held.append(piece)
            start, count = start + len(piece), count + len(piece)
            if count == size:
                yield (held[0] if len(held) == 1 else np.concatenate(held)), count
                held, count = [], 0
    if held:
        yield _filled(np.concatenate(held), size), count


def _filled(vectors: Float[np.ndarray, "_ dimension"], rows: int) -> Float[np.ndarray, "rows dimension"]:
    """The vectors and as many zero ones as make so many rows."""
    return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))


def _power_of_two(count: int) -> int:
    return max(_FEWEST, 1 << (count - 1).bit_length())
