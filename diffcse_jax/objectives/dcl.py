"""Contrast between the dimensions of the sentence vector: dimension-wise contrastive learning, DCL (SimCSE++ Eq. 5)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.models.forward import SharedForward
from diffcse_jax.models.pooling import standardize
from diffcse_jax.objectives import Metrics, Objective
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of dimension-wise contrast (SimCSE++ Eq. 5; published: 0.1)", low=0.0)
    temperature: float = option(5.0, "temperature of the dimension-wise correlations", low=1e-6)
    form: str = option(
        "code", "`code`: divided by N, mean over dimensions; `paper`: no 1/N, sum (Eq. 5)", choices=("code", "paper")
    )


class DimensionContrast(Objective):
    """DCL over the first two views."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("simcsepp",)

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del corrupted, key
        z1, z2, *_ = forward.projected_views
        options = self.options
        per_dimension = dimension_contrast(z1, z2, temperature=options.temperature, form=options.form)
        return (per_dimension.mean() if options.form == "code" else per_dimension.sum()), {}


def dimension_contrast(
    z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"], *, temperature: float, form: str
) -> Float[Array, " dim"]:
    """Dimension-wise contrastive learning, DCL: one value per dimension (SimCSE++ Eq. 5).

    l_c = -log exp(C_cc / tau) / sum_d exp(C_cd / tau), C = z~1^T z~2, columns standardize over the batch.

    The code divides C by the batch size, takes the biased variance + 1e-5, and the MEAN of l_c is the loss; the paper
    has neither the division nor the epsilon, an unbiased variance, and the loss is the SUM of l_c. tau = 5 and weight
    0.1 belong to the code's scale.

    Args:
        form: `code` or `paper`.
    """
    if form == "code":
        z1, z2 = (standardize(z, ddof=0, epsilon=1e-5) for z in (z1, z2))
    else:
        z1, z2 = (standardize(z, ddof=1, epsilon=0.0) for z in (z1, z2))
    correlation = jnp.matmul(z1.T, z2, precision="highest") / (len(z1) if form == "code" else 1)
    logits = correlation / temperature
    return -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))


objective = DimensionContrast
