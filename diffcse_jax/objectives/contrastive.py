"""Contrast between sentence vectors: InfoNCE and its variants, alignment and uniformity.

All of them contrast rows only (view 1 against the others), as SimCSE, DiffCSE and SimCSE++ do.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cosine_similarity(a: Float[Array, "rows dim"], b: Float[Array, "columns dim"]) -> Float[Array, "rows columns"]:
    """Cosine similarity of every row of `a` with every row of `b`. Zero vectors have similarity 0."""
    # Full float32: accelerators multiply in less by default, and a small temperature magnifies the error.
    return jnp.matmul(unit(a), unit(b).T, precision="highest")


def unit(vectors: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
    """Rows scaled to length 1, norms clipped at 1e-8 as PyTorch's cosine similarity does."""
    squared = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    return vectors / jnp.sqrt(jnp.maximum(squared, 1e-16))


def info_nce(
    z1: Float[Array, "batch dim"],
    z2: Float[Array, "batch dim"],
    *,
    temperature: float,
    hard_negatives: Float[Array, "batch dim"] | None = None,
    hard_negative_weight: float = 1.0,
) -> Float[Array, " batch"]:
    """Contrast of each vector with its positive against the batch (SimCSE Eq. 4; with hard negatives Eq. 8).

    l_i = -log exp(s(z1_i, z2_i)) / sum_j [exp(s(z1_i, z2_j)) + alpha^[i=j] exp(s(z1_i, z3_j))], s = cos / temperature.

    Args:
        z1: anchors.
        z2: positives; row j is a negative of anchor i != j.
        hard_negatives: z3, one per anchor, negatives of every anchor.
        hard_negative_weight: alpha, the weight of an anchor's own hard negative.
    """
    logits = cosine_similarity(z1, z2) / temperature
    if hard_negatives is not None:
        hard_logits = cosine_similarity(z1, hard_negatives) / temperature
        hard_logits += jnp.log(hard_negative_weight) * jnp.eye(len(z1), dtype=hard_logits.dtype)
        logits = jnp.concatenate([logits, hard_logits], axis=1)
    # log_softmax subtracts the maximum before it sums; logsumexp - positive would lose digits, in the gradient too.
    return -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))


def off_dropout_info_nce(
    z1: Float[Array, "batch dim"],
    z2: Float[Array, "batch dim"],
    negatives: Float[Array, "batch dim"],
    *,
    temperature: float,
    ratio: float,
    form: str,
) -> Float[Array, " batch"]:
    """Contrast whose negatives come from other vectors than its positives (SimCSE++ Eq. 3).

    Paper: l_i = -log exp(s+) / (exp(s+) + m sum_{j != i} exp(s(z_i, z_j))), s+ = s(z1_i, z2_i). Code: no factor on the
    sum; m multiplies s+ in numerator and denominator. The published numbers come from the code.

    Args:
        z1: first view, with dropout.
        z2: second view, with dropout.
        negatives: z, the same sentences in a pass without dropout.
        ratio: m.
        form: `code` or `paper`.
    """
    positive = jnp.sum(unit(z1) * unit(z2), axis=1) / temperature
    if form == "code":
        positive *= ratio
    others = cosine_similarity(negatives, negatives) / temperature
    if form == "paper":
        others += jnp.log(ratio)
    others = jnp.where(jnp.eye(len(z1), dtype=bool), -jnp.inf, others)
    return -jax.nn.log_softmax(jnp.concatenate([positive[:, None], others], axis=1), axis=1)[:, 0]


def alignment(z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"]) -> Float[Array, " batch"]:
    """Squared distance of normalised positives (Wang and Isola 2020); 0 is best."""
    return jnp.sum((unit(z1) - unit(z2)) ** 2, axis=1)


def uniformity(z: Float[Array, "batch dim"]) -> Float[Array, ""]:
    """Log of the mean of exp(-2 d^2) over pairs of distinct normalised vectors (Wang and Isola 2020); low is good."""
    squared_distance = 2.0 - 2.0 * cosine_similarity(z, z)
    pairs = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, -2.0 * squared_distance)
    return jax.nn.logsumexp(pairs) - jnp.log(jnp.float32(len(z) * (len(z) - 1)))
