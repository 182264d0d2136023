"""Contrast between sentence vectors: InfoNCE and its variants.

All of them contrast rows only (view 1 against the others), as SimCSE, DiffCSE and SimCSE++ do.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.errors import ConfigError
from diffcse_jax.models.computation import Forward
from diffcse_jax.models.flops import BatchSize, projector_flops, transformer_flops
from diffcse_jax.models.vectors import cosine_similarity, unit
from diffcse_jax.objectives import Metrics, Objective
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(1.0, "weight of the InfoNCE loss (SimCSE Eq. 4)", low=0.0)
    temperature: float = option(0.05, "temperature of the cosine similarities", low=1e-6)
    negatives: str = option(
        "dropout",
        "where negatives come from: the second `dropout` view, a pass without dropout (`off_dropout`, SimCSE++ "
        "Eq. 3), or the `mean` of both views (SimCSE++ code, models_both.py)",
        choices=("dropout", "off_dropout", "mean"),
    )
    negative_ratio: float = option(1.0, "m of SimCSE++; read with `off_dropout` and `mean` negatives", low=1e-6)
    negative_ratio_form: str = option(
        "code",
        "`code`: m multiplies the positive logit (published numbers); `paper`: m multiplies the negative sum (Eq. 3)",
        choices=("code", "paper"),
    )
    hard_negative_weight: float = option(1.0, "alpha of supervised SimCSE (Eq. 8); three-column data only", low=1e-6)


class Contrast(Objective):
    """Dropout contrast (SimCSE), off-dropout negatives (SimCSE++), hard negatives (supervised SimCSE)."""

    options: Options
    prefixes = True

    @property
    def needs(self) -> frozenset[str]:
        extra = {"off_dropout"} if self.options.negatives == "off_dropout" else set()
        return frozenset({"vectors"} | extra)

    def check_columns(self, count: int) -> None:
        if count == 3 and self.options.negatives != "dropout":
            raise ConfigError(
                f"contrast.negatives={self.options.negatives!r} has no form with hard negatives, and the text has "
                "three columns; use contrast.negatives='dropout', or name one or two of them in data.columns"
            )

    def loss(self, forward: Forward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del corrupted, key
        options = self.options
        z1, z2, *hard_negatives = forward.projected_views
        if options.negatives == "dropout":
            per_example = info_nce(
                z1,
                z2,
                temperature=options.temperature,
                hard_negatives=hard_negatives[0] if hard_negatives else None,
                hard_negative_weight=options.hard_negative_weight,
            )
        else:
            per_example = off_dropout_info_nce(
                z1,
                z2,
                (z1 + z2) / 2 if options.negatives == "mean" else forward.off_dropout,
                temperature=options.temperature,
                ratio=options.negative_ratio,
                form=options.negative_ratio_form,
            )
        return per_example.mean(), {}

    def flops(self, batch: BatchSize) -> tuple[float, float]:
        hidden = batch.encoder.hidden_size
        trained = 2 * batch.examples**2 * hidden * (batch.views - 1)  # the similarity matrix
        if "off_dropout" in self.needs:
            trained += transformer_flops(batch.encoder, batch.examples, batch.length)
            trained += projector_flops(self.config.model.projector, hidden, batch.examples)
        return trained, 0.0


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


objective = Contrast
