"""Ranking consistency between the views of a batch (RankCSE, Liu et al. 2023)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.models.forward import SharedForward
from diffcse_jax.models.pooling import cosine_similarity
from diffcse_jax.objectives import Metrics, Objective
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of ranking consistency (beta of RankCSE)", low=0.0)
    temperature: float = option(0.05, "temperature of the rankings that are made consistent (tau1)", low=1e-6)


class RankingConsistency(Objective):
    """Both views of a sentence rank the batch alike; hard negatives are not ranked."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("rankcse",)

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del corrupted, key
        z1, z2, *_ = forward.projected_views
        return ranking_consistency(z1, z2, temperature=self.options.temperature).mean(), {}


def ranking_consistency(
    z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"], *, temperature: float
) -> Float[Array, " batch"]:
    """Divergence between a sentence's ranking of the second views and its second view's ranking of the first ones.

    l_i = JS(softmax_j(cos(z1_i, z2_j) / tau), softmax_j(cos(z1_j, z2_i) / tau)), JS the Jensen-Shannon divergence.
    """
    # Not by a transpose, which would move similarities between devices that split the rows.
    return jensen_shannon(cosine_similarity(z1, z2) / temperature, cosine_similarity(z2, z1) / temperature)


def jensen_shannon(p: Float[Array, "rows columns"], q: Float[Array, "rows columns"]) -> Float[Array, " rows"]:
    """(KL(P | M) + KL(Q | M)) / 2 with the mixture M = (P + Q) / 2, in nats: from 0 to log 2.

    Args:
        p: logits of P, a distribution per row.
        q: logits of Q.
    """
    log_p, log_q = jax.nn.log_softmax(p, axis=1), jax.nn.log_softmax(q, axis=1)
    log_mixture = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    terms = jnp.exp(log_p) * (log_p - log_mixture) + jnp.exp(log_q) * (log_q - log_mixture)
    return terms.sum(axis=1) / 2


objective = RankingConsistency
