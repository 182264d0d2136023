"""Similarity, standardised columns, alignment and uniformity of sentence vectors."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cosine_similarity(a: Float[Array, "rows dim"], b: Float[Array, "columns dim"]) -> Float[Array, "rows columns"]:
    """Cosine similarity of every row of `a` with every row of `b`. Zero vectors have similarity 0."""
    return dot_product(unit(a), unit(b))


def dot_product(a: Float[Array, "rows dim"], b: Float[Array, "columns dim"]) -> Float[Array, "rows columns"]:
    """Dot product of every row of `a` with every row of `b`."""
    # Full float32: accelerators multiply in less by default, and a small temperature magnifies the error.
    return jnp.matmul(a, b.T, precision="highest")


def similarity_lists(views: Sequence[Float[Array, "batch dim"]]) -> Float[Array, "batch candidates"]:
    """Cosine similarity of every first view with all other views of the batch.

    Args:
        views: the vectors of the first views of all examples, of the second ones, and so on.

    Returns:
        A row per example; the columns are the second views of all examples, then the third ones, where there are any.
    """
    anchors, *others = views
    return cosine_similarity(anchors, jnp.concatenate(others))


def unit(vectors: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
    """Rows scaled to length 1, norms clipped at 1e-8 as PyTorch's cosine similarity does."""
    squared = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors / jnp.sqrt(jnp.maximum(squared, 1e-16))


def standardised(z: Float[Array, "rows dim"], *, ddof: int, epsilon: float) -> Float[Array, "rows dim"]:
    """Columns with mean 0 and variance 1 over the rows.

    Args:
        ddof: 0: biased variance, 1: unbiased.
        epsilon: added to the variance.
    """
    deviation = z - z.mean(axis=0, keepdims=True)
    return deviation * jax.lax.rsqrt(z.var(axis=0, ddof=ddof, keepdims=True) + epsilon)


def alignment(z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"]) -> Float[Array, " batch"]:
    """Squared distance of normalised positives (Wang and Isola 2020); 0 is best."""
    return jnp.sum((unit(z1) - unit(z2)) ** 2, axis=1)


def uniformity(z: Float[Array, "batch dim"]) -> Float[Array, ""]:
    """Log of the mean of exp(-2 d^2) over pairs of distinct normalised vectors (Wang and Isola 2020); low is good."""
    squared_distance = 2.0 - 2.0 * cosine_similarity(z, z)
    pairs = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, -2.0 * squared_distance)
    return jax.nn.logsumexp(pairs) - jnp.log(jnp.float32(len(z) * (len(z) - 1)))
