"""Computing over the rows of a batch: in chunks where memory is short, at few positions where a head is large.

None of it changes a result. What is random for a row is a function of a key of its own, so that a row is the same
whatever it is computed together with.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree, Shaped

from diffcse_jax.models.packing import blocks_of

# What `at_positions` chooses its capacity from, as shares of all positions; each is compiled.
FEW = (1 / 8, 1 / 4, 3 / 8, 1)  # masked tokens
MOST = (3 / 4, 7 / 8, 1)  # all but padding


def row_keys(key: PRNGKeyArray, rows: int) -> Key[Array, " rows"]:
    """One key per row, a function of `key` and the row's number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def real_share(lengths: Int[np.ndarray, "examples columns"], length: int, chunk_size: int) -> float:
    """The share of positions with real tokens, in the fullest part of a batch that the networks take at once.

    Rounded up to sixteenths, since each share is one more compilation.

    Args:
        lengths: tokens of each sentence of the global batch.
        length: what sentences are padded to.
        chunk_size: examples that are computed at once; 0: all.
    """
    chunks = len(lengths) // (chunk_size or len(lengths))
    views = np.broadcast_to(lengths, (len(lengths), max(2, lengths.shape[1])))
    fullest = max(_fullest(rows, chunks) for rows in (views.reshape(-1), views[:, 0]))
    return math.ceil(16 * fullest / length) / 16


def _fullest(lengths: Int[np.ndarray, " rows"], chunks: int) -> float:
    """The highest mean length of a block of a chunk: block by block as `pack_rows` forms them, chunks as below."""
    return lengths.reshape(blocks_of(len(lengths) // chunks), -1, chunks).mean(axis=1).max()


def in_chunks(function: Callable[..., PyTree], chunks: int, *rows: PyTree) -> PyTree:
    """`function(*rows)`, computed in `chunks` parts one after the other; the backward pass computes each part again.

    With `function` an encoder, only its output is held for the whole batch, and the activations of one chunk: the
    memory of GradCache (Gao et al. 2021) by rematerialisation.

    Args:
        function: of arrays with rows in front, to such arrays, each row for itself.
        chunks: divides the number of rows.
    """
    if chunks == 1:
        return function(*rows)

    # Chunk c is the rows c, c + chunks, ...: of a batch split over devices, each device has its share in every chunk.
    def split(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values.reshape(-1, chunks, *values.shape[1:]), 1, 0)

    def join(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values, 0, 1).reshape(-1, *values.shape[2:])

    # Inside a loop nothing can be merged with the forward pass, so that no barrier against it is needed.
    part = jax.checkpoint(lambda rows: function(*rows), prevent_cse=False)
    return jax.tree.map(join, jax.lax.map(part, jax.tree.map(split, rows)))


def at_positions(
    function: Callable[..., PyTree], where: Bool[Array, "rows length"], *values: PyTree, shares: tuple[float, ...]
) -> PyTree:
    """`function` of the values at the positions in `where`, and zeros elsewhere.

    The positions are gathered into the smallest of a few static capacities that holds them, which is found at run
    time: a vocabulary-sized head costs what its output is used for, and no batch is cut.

    Args:
        function: of arrays (tokens, ...), to such arrays, each token for itself.
        values: arrays (rows, length, ...).
        shares: the capacities as shares of all positions, rising to 1.

    Returns:
        What `function` returns, as arrays (rows, length, ...).
    """
    blocks = blocks_of(len(where))
    size = where.size // blocks
    capacities = [math.ceil(size * share) for share in shares]

    def in_block(capacity: int, where: jax.Array, values: PyTree) -> PyTree:
        (positions,) = jnp.nonzero(where, size=capacity, fill_value=size)
        results = function(*jax.tree.map(lambda array: array.at[positions].get(mode="clip"), values))

        def spread(array: jax.Array) -> jax.Array:
            return jnp.zeros((size, *array.shape[1:]), array.dtype).at[positions].set(array, mode="drop")

        return jax.tree.map(spread, results)

    # Checkpoints: otherwise the activations of all capacities, used or not, would be kept for the backward pass.
    branches = [jax.checkpoint(jax.vmap(partial(in_block, capacity))) for capacity in capacities]
    blockwise = jax.tree.map(lambda array: array.reshape(blocks, size, *array.shape[2:]), (where, values))
    most = blockwise[0].sum(axis=1).max()
    results = jax.lax.switch(jnp.searchsorted(jnp.array(capacities), most), branches, *blockwise)
    return jax.tree.map(lambda array: array.reshape(*where.shape, *array.shape[2:]), results)


def mean_where(values: Shaped[Array, "*shape"], where: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Mean over the positions in `where`; 0 where there are none."""
    weights = where.astype(jnp.float32)
    return jnp.sum(values.astype(jnp.float32) * weights) / jnp.maximum(weights.sum(), 1.0)
