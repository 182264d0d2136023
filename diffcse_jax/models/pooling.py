"""From hidden states to one embedding per sentence, and the comparison of embeddings."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from diffcse_jax.batch import RowKeys, TokenRows
from diffcse_jax.models.poolers import AVERAGED_LAYERS, CLS_POOLERS

AnyArray = TypeVar("AnyArray", jax.Array, np.ndarray)


def _distances(a: np.ndarray, b: np.ndarray, metric: str) -> np.ndarray:
    from scipy.spatial.distance import cdist  # half a second to import, and rarely needed

    return cdist(a, b, metric)


# How embeddings are compared, by the names of sentence-transformers: distances are negative.
SIMILARITIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda a, b: np.inner(normalize(a), normalize(b)),
    "dot": np.inner,
    "euclidean": lambda a, b: -_distances(a, b, "euclidean"),
    "manhattan": lambda a, b: -_distances(a, b, "cityblock"),
}


def pool(
    hidden_states: tuple[Float[Array, "rows _positions hidden"], ...],
    attention_mask: Int[Array, "rows length"],
    pooler: str,
) -> Float[Array, "rows size"]:
    """Pool the outputs of the embedding layer and of each block, before any head.

    Each has all positions, but the last may have only the first ones if the pooler reads no others.

    `cls` and `cls_before_pooler` read position 0 of the last layer. `avg` is its mean over real
    tokens, `avg_top2` that of the last two layers, `avg_first_last` that of the embedding layer and
    the last layer (DiffCSE's code and SimCSE's paper), and `avg_first_block_last` that of the first
    block and the last layer (SimCSE's code since 2022). Over the real tokens of the last layer,
    `max` is the maximum, `mean_sqrt_len_tokens` the sum divided by the square root of their number,
    `weightedmean` the mean with weights 1, 2, 3, ..., and `lasttoken` the last one. Poolers joined
    by "+" are concatenated.
    """
    if "+" in pooler:
        pooled = [pool(hidden_states, attention_mask, each) for each in pooler.split("+")]
        return jnp.concatenate(pooled, axis=-1)
    last = hidden_states[-1]
    rows = jnp.arange(len(attention_mask))
    positions = jnp.arange(attention_mask.shape[1])[None]
    if pooler in CLS_POOLERS:
        return last[:, 0]
    if pooler == "lasttoken":
        return last[rows, jnp.where(attention_mask > 0, positions, 0).argmax(axis=1)]
    if pooler == "max":
        maxima = jnp.where(attention_mask[:, :, None] > 0, last, jnp.finfo(last.dtype).min).max(
            axis=1
        )
        # Rows without tokens fill up batches.
        return jnp.where(attention_mask.any(axis=1)[:, None], maxima, 0)
    layers = [hidden_states[layer] for layer in AVERAGED_LAYERS.get(pooler, (-1,))]
    # In float32: bfloat16 cannot count above 256.
    states = sum(layer.astype(jnp.float32) for layer in layers) / len(layers)
    weights = attention_mask.astype(jnp.float32)[:, :, None]
    if pooler == "weightedmean":
        weights = weights * (positions + 1).astype(jnp.float32)[:, :, None]
    total = jnp.maximum(weights.sum(axis=1), 1.0)
    return (states * weights).sum(axis=1) / (
        jnp.sqrt(total) if pooler == "mean_sqrt_len_tokens" else total
    )


def embed(
    network: Callable, rows: TokenRows, pooler: str, keys: RowKeys = None
) -> Float[Array, "rows size"]:
    """Return the pooled hidden states of sentences.

    The last block computes only the positions that are read.
    """
    positions = 1 if pooler in CLS_POOLERS else None
    states = network(rows, keys=keys, last_positions=positions)
    return pool(states, rows.attention_mask, pooler)


def normalize(embeddings: Float[AnyArray, "*rows dim"]) -> Float[AnyArray, "*rows dim"]:
    """Scale embeddings to length 1, in float32.

    Norms are clipped at 1e-8, as in PyTorch's cosine similarity.
    """
    xp = np if isinstance(embeddings, np.ndarray) else jnp
    embeddings = embeddings.astype(xp.float32, copy=False)
    squared = xp.sum(embeddings * embeddings, axis=-1, keepdims=True)
    return embeddings / xp.sqrt(xp.maximum(squared, 1e-16))


def similarities(
    a: Float[np.ndarray, "*rows dim"], b: Float[np.ndarray, "*columns dim"], name: str
) -> Float[np.ndarray, "*rows_and_columns"]:
    """Return the similarity of all pairs by a function of `SIMILARITIES`.

    A single embedding adds no axis.
    """
    compared = SIMILARITIES[name](np.atleast_2d(a), np.atleast_2d(b))
    return compared.astype(np.float32).reshape((*a.shape[:-1], *b.shape[:-1]))


def standardize(
    embeddings: Float[Array, "rows dim"], *, ddof: int, epsilon: float
) -> Float[Array, "rows dim"]:
    """Scale columns to mean 0 and variance 1 over the rows.

    `ddof` is 0 for the biased variance, and 1 for the unbiased one.
    """
    deviation = embeddings - embeddings.mean(axis=0, keepdims=True)
    return deviation * jax.lax.rsqrt(embeddings.var(axis=0, ddof=ddof, keepdims=True) + epsilon)


def dot_product(
    a: Float[Array, "rows dim"], b: Float[Array, "columns dim"]
) -> Float[Array, "rows columns"]:
    """Return the dot product of every row of `a` with every row of `b`."""
    # By default, accelerators multiply in less than float32. Small temperatures magnify the error.
    return jnp.matmul(a, b.T, precision="highest")


def cosine_similarity(
    a: Float[Array, "rows dim"], b: Float[Array, "columns dim"]
) -> Float[Array, "rows columns"]:
    """Return the cosine similarity of every row of `a` with every row of `b`.

    Zero rows have similarity 0.
    """
    return dot_product(normalize(a), normalize(b))


def similarity_lists(
    views: Sequence[Float[Array, "batch dim"]],
) -> Float[Array, "batch candidates"]:
    """Return the cosine similarity of every first view with all other views of the batch.

    There is one row per example. The columns are the second views of all examples, then the third
    views, and so on.
    """
    anchors, *others = views
    return cosine_similarity(anchors, jnp.concatenate(others))


def alignment(a: Float[Array, "batch dim"], b: Float[Array, "batch dim"]) -> Float[Array, " batch"]:
    """Return the squared distance of each pair after normalisation (Wang and Isola 2020).

    0 is best.
    """
    return jnp.sum((normalize(a) - normalize(b)) ** 2, axis=1)


def uniformity(embeddings: Float[Array, "batch dim"]) -> Float[Array, ""]:
    """Return log mean exp(-2 d^2) over pairs of different rows (Wang and Isola 2020).

    Rows are normalised first. Lower is better.
    """
    squared_distance = 2.0 - 2.0 * cosine_similarity(embeddings, embeddings)
    count = len(embeddings)
    pairs = jnp.where(jnp.eye(count, dtype=bool), -jnp.inf, -2.0 * squared_distance)
    return jax.nn.logsumexp(pairs) - jnp.log(jnp.float32(count * (count - 1)))
