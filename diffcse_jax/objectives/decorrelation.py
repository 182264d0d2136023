"""Contrast between dimensions of the sentence vector."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dimension_contrast(
    z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"], *, temperature: float, form: str
) -> Float[Array, " dim"]:
    """Dimension-wise contrastive learning, DCL: one value per dimension (SimCSE++ Eq. 5).

    l_c = -log exp(C_cc / tau) / sum_d exp(C_cd / tau), C = z~1^T z~2, columns standardised over the batch.

    The code divides C by the batch size, takes the biased variance + 1e-5, and the MEAN of l_c is the loss; the paper
    has neither the division nor the epsilon, an unbiased variance, and the loss is the SUM of l_c. tau = 5 and weight
    0.1 belong to the code's scale.

    Args:
        form: `code` or `paper`.
    """
    if form == "code":
        z1, z2 = (_standardised(z, ddof=0, epsilon=1e-5) for z in (z1, z2))
    else:
        z1, z2 = (_standardised(z, ddof=1, epsilon=0.0) for z in (z1, z2))
    correlation = jnp.matmul(z1.T, z2, precision="highest") / (len(z1) if form == "code" else 1)
    logits = correlation / temperature
    return -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))


def _standardised(z: jax.Array, *, ddof: int, epsilon: float) -> jax.Array:
    deviation = z - z.mean(axis=0, keepdims=True)
    return deviation * jax.lax.rsqrt(z.var(axis=0, ddof=ddof, keepdims=True) + epsilon)
