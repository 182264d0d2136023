"""Decorrelation of the dimensions of the sentence vector: Barlow Twins (SimCSE++ Eq. 4 and Table 2)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.models.forward import SharedForward
from diffcse_jax.models.pooling import dot_product, standardize
from diffcse_jax.objectives import Metrics, Objective
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of the Barlow Twins loss, a sum over dimensions (SimCSE++ Eq. 4)", low=0.0)
    off_diagonal_weight: float = option(0.013, "lambda, weight of correlations between different dimensions", low=0.0)
    artificial_rows: int = option(
        0,
        "M, rows ~ N(0, I) that are drawn anew in every step and appended to the vectors of both views, the same rows "
        "to both (SimCSE++ Table 2: 100, 300, 704)",
        low=0,
    )


class BarlowTwins(Objective):
    """Barlow Twins over the first two views."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("barlow_twins", "simcsepp") if self.options.artificial_rows else ("barlow_twins",)

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del corrupted
        z1, z2, *_ = forward.projected_views
        options = self.options
        if options.artificial_rows:
            z1, z2 = with_artificial_rows(z1, z2, options.artificial_rows, key)
        return decorrelation(z1, z2, off_diagonal_weight=options.off_diagonal_weight).sum(), {}


def decorrelation(
    z1: Float[Array, "rows dim"], z2: Float[Array, "rows dim"], *, off_diagonal_weight: float
) -> Float[Array, " dim"]:
    """The Barlow Twins loss, one value per dimension; the loss is their sum (Zbontar et al. 2021, Eq. 1).

    l_c = (1 - C_cc)^2 + lambda sum_{d != c} C_cd^2, C = z~1^T z~2 / rows, columns standardize over the rows (biased
    variance + 1e-5, as BatchNorm does).

    Args:
        off_diagonal_weight: lambda.
    """
    z1, z2 = (standardize(z, ddof=0, epsilon=1e-5) for z in (z1, z2))
    correlation = dot_product(z1.T, z2.T) / len(z1)
    off_diagonal = jnp.where(jnp.eye(len(correlation), dtype=bool), 0.0, correlation)
    return (1 - jnp.diagonal(correlation)) ** 2 + off_diagonal_weight * jnp.sum(off_diagonal**2, axis=1)


def with_artificial_rows(
    z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"], count: int, key: PRNGKeyArray
) -> tuple[Float[Array, "rows dim"], Float[Array, "rows dim"]]:
    """Both views with so many rows ~ N(0, I) below theirs (SimCSE++ Table 2).

    They lift the rank of the cross-correlation, which is at most the number of rows, towards the dimension: below it
    the identity matrix, where the loss is 0, cannot be reached. Both views receive the same rows: independent ones
    would lift the rank, too, but pull the diagonal to 0 and the identity out of reach again.
    """
    rows = jax.random.normal(key, (count, z1.shape[1]))
    return jnp.concatenate([z1, rows]), jnp.concatenate([z2, rows])


objective = BarlowTwins
