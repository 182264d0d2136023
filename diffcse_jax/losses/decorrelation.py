"""Losses between the dimensions of embeddings: dimension-wise contrast (SimCSE++) and Barlow Twins.

`contrastive.py` compares the rows of a batch. These losses compare its columns: each dimension of
one view should correlate with the same dimension of the other view, and not with other dimensions.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.losses import Loss, Metrics, View
from diffcse_jax.models.forward import SharedForward
from diffcse_jax.models.pooling import dot_product, standardize
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class DimensionContrast(Loss):
    """Dimension-wise contrastive learning, DCL, of the first two views (SimCSE++ Eq. 5)."""

    weight: float = option(
        0.0, "weight of dimension-wise contrast (SimCSE++ Eq. 5; published: 0.1)", low=0.0
    )
    temperature: float = option(5.0, "temperature of the correlations between dimensions", low=1e-6)
    form: str = option(
        "code",
        "`code`: C / batch size, a mean; `paper`: C, a sum (Eq. 5)",
        choices=("code", "paper"),
    )
    compares_embeddings = True
    papers = ("simcsepp",)

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        z1, z2, *_ = forward.projected_views
        per_dimension = dimension_contrast(z1, z2, temperature=self.temperature, form=self.form)
        return (per_dimension.mean() if self.form == "code" else per_dimension.sum()), {}


def dimension_contrast(
    z1: View, z2: View, *, temperature: float, form: str
) -> Float[Array, " dim"]:
    """Compute DCL, one value per dimension (SimCSE++ Eq. 5).

    l_c = -log exp(C_cc / tau) / sum_d exp(C_cd / tau), C = z1^T z2, with the columns of both views
    standardised.

    The authors' code divides C by the batch size, adds 1e-5 to the biased variance, and takes the
    mean of l_c. The paper does not divide, has an unbiased variance without epsilon, and takes the
    sum. tau = 5 and the weight 0.1 belong to the code's scale.
    """
    ddof, epsilon = (0, 1e-5) if form == "code" else (1, 0.0)
    z1, z2 = (standardize(z, ddof=ddof, epsilon=epsilon) for z in (z1, z2))
    correlation = jnp.matmul(z1.T, z2, precision="highest") / (len(z1) if form == "code" else 1)
    return -jnp.diagonal(jax.nn.log_softmax(correlation / temperature, axis=1))


@dataclasses.dataclass(frozen=True)
class BarlowTwins(Loss):
    """Barlow Twins of the first two views (Zbontar et al. 2021; SimCSE++ Eq. 4 and Table 2).

    The rank of the cross-correlation is at most the number of rows. If it is below the dimension,
    the identity matrix, where the loss is 0, cannot be reached. Artificial rows lift the rank. Both
    views get the same ones: independent rows would pull the diagonal to 0.
    """

    weight: float = option(
        0.0, "weight of the Barlow Twins loss, a sum over dimensions (SimCSE++ Eq. 4)", low=0.0
    )
    off_diagonal_weight: float = option(
        0.013, "weight of correlations between dimensions (lambda)", low=0.0
    )
    artificial_rows: int = option(
        0, "rows of N(0, I) appended to both views (SimCSE++ Table 2: 100, 300, 704)", low=0
    )
    compares_embeddings = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("barlow_twins", "simcsepp") if self.artificial_rows else ("barlow_twins",)

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        z1, z2, *_ = forward.projected_views
        if self.artificial_rows:
            rows = jax.random.normal(key, (self.artificial_rows, z1.shape[1]))
            z1, z2 = jnp.concatenate([z1, rows]), jnp.concatenate([z2, rows])
        return decorrelation(z1, z2, off_diagonal_weight=self.off_diagonal_weight).sum(), {}


def decorrelation(z1: View, z2: View, *, off_diagonal_weight: float) -> Float[Array, " dim"]:
    """Compute the Barlow Twins loss, one value per dimension (Zbontar et al. 2021, Eq. 1).

    The loss is their sum.

    l_c = (1 - C_cc)^2 + lambda sum_{d != c} C_cd^2, C = z1^T z2 / rows, with columns standardised
    over the rows (biased variance + 1e-5, as BatchNorm does).
    """
    z1, z2 = (standardize(z, ddof=0, epsilon=1e-5) for z in (z1, z2))
    correlation = dot_product(z1.T, z2.T) / len(z1)
    off_diagonal = jnp.where(jnp.eye(len(correlation), dtype=bool), 0.0, correlation)
    on_diagonal = (1 - jnp.diagonal(correlation)) ** 2
    return on_diagonal + off_diagonal_weight * jnp.sum(off_diagonal**2, axis=1)
