"""Contrast between sentence vectors: InfoNCE and its variants.

They contrast rows only (view 1 against the others), as SimCSE, DiffCSE and SimCSE++ do, unless `symmetric` is set.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.duplicates import equal_texts, guide_vectors, near_duplicates, share
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name
from diffcse_jax.models.pooling import cosine_similarity, dot_product, normalize
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.objectives import Metrics, Network, Objective, Starts
from diffcse_jax.options import option

SIMILARITIES = {"cosine": cosine_similarity, "dot": dot_product}
Pair = tuple[Float[Array, "batch dim"], Float[Array, "batch dim"]]


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(1.0, "weight of the InfoNCE loss (SimCSE Eq. 4)", low=0.0)
    similarity: str = option(
        "cosine",
        "similarity of two vectors: `cosine`, or their `dot` product (SimCSE Table D.1, there without a temperature: "
        "contrast.temperature=1)",
        choices=tuple(SIMILARITIES),
    )
    temperature: float = option(0.05, "what the similarities are divided by, dot products too", low=1e-6)
    positives: str = option(
        "dropout",
        "vectors of a positive pair: the two views (`dropout`), these with Gaussian `noise`, or the `mean` of several "
        "dropout samples of each (SimCSE++ Table 1)",
        choices=("dropout", "noise", "mean"),
    )
    negatives: str = option(
        "dropout",
        "vectors of negative pairs: the two views (`dropout`), a pass without dropout (`off_dropout`, SimCSE++ Eq. 3), "
        "the views with Gaussian `noise`, or the `mean` of both views (SimCSE++ code, models_both.py), taken over "
        "several dropout samples of each (SimCSE++ Table 1)",
        choices=("dropout", "off_dropout", "noise", "mean"),
    )
    noise_variance: float = option(0.1, "variance of Gaussian noise (SimCSE++ Table 1)", low=0.0)
    samples: int = option(
        1,
        "dropout samples of each view in a mean, each of them a pass of the encoder: K of SimCSE++ Table 1 (10 there) "
        "in positives, half of K in negatives, whose mean is over both views",
        low=1,
    )
    negative_ratio: float = option(
        1.0, "m of SimCSE++; not read where positives and negatives are both `dropout`", low=1e-6
    )
    negative_ratio_form: str = option(
        "code",
        "`code`: m multiplies the positive logit (published numbers); `paper`: m multiplies the negative sum (Eq. 3)",
        choices=("code", "paper"),
    )
    hard_negative_weight: float = option(
        1.0,
        "alpha of supervised SimCSE (Eq. 8), of an anchor's own hard negatives; data of three columns or more",
        low=1e-6,
    )
    symmetric: bool = option(
        False,
        "the mean of both directions: from view 1 find view 2 among the batch's, and from view 2 view 1 (CLIP, "
        "Radford et al. 2021); hard negatives are those of view 1",
    )
    second_encoder: bool = option(
        False,
        "embed positives and hard negatives by an encoder of their own, which starts as the first one does (SimCSE "
        "Table 2); both share the projector, and the first is evaluated and exported",
    )
    mask_duplicates: str = option(
        "none",
        "pairs of different examples that leave the denominator: `none` (published); those of equal `text`; or by "
        "`similarity` to the encoder as it was at the start, frozen: those of equal text, and near-duplicates",
        choices=("none", "text", "similarity"),
    )
    duplicate_similarity: float = option(
        0.0,
        "cosine above which a pair counts as near-duplicates; 0: that of the anchor and its own positive (GISTEmbed)",
        low=0.0,
        high=1.0,
    )


class Contrast(Objective):
    """Dropout contrast (SimCSE), off-dropout negatives (SimCSE++), hard negatives (supervised SimCSE)."""

    options: Options
    prefixes = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("simcse", "simcsepp") if self.options.negatives == "off_dropout" else ("simcse",)

    @property
    def needs(self) -> frozenset[str]:
        extra = {"anchors"} if self.options.negatives == "off_dropout" else set()
        if self.options.positives == "dropout":
            extra.add("dropout")
        return frozenset({"vectors"} | extra)

    def check_columns(self, count: int) -> None:
        options = self.options
        if count > 2 and not self._both_are_views:
            raise ConfigError(
                f"contrast.positives={options.positives!r} with contrast.negatives={options.negatives!r} has no form "
                f"with hard negatives, and the text has {count} columns; use 'dropout' for both, or name one or two "
                "columns in data.columns"
            )
        if count == 1 and options.mask_duplicates == "similarity" and not options.duplicate_similarity:
            raise ConfigError(
                "contrast.mask_duplicates='similarity' with contrast.duplicate_similarity=0 compares with the anchor's "
                "own positive, and in text of one column that is the anchor itself, which nothing is more similar to; "
                "set contrast.duplicate_similarity, such as 0.9"
            )

    def networks(self, starts: Starts) -> dict[str, Network]:
        """Where the options ask for them: the second encoder, and the frozen start that tells near-duplicates."""
        copy = Network(partial(Transformer, starts.encoder.config), starts.encoder.transformer)
        networks = {"second_encoder": copy} if self.options.second_encoder else {}
        if self.options.mask_duplicates == "similarity":
            networks["guide"] = copy._replace(frozen=True)
        return networks

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Bool[Array, "batch negatives"] | None:
        """The mask of duplicates, where they leave the denominator."""
        del key
        options = self.options
        if options.mask_duplicates == "none":
            return None
        duplicates = equal_texts(views.input_ids)
        if options.mask_duplicates == "similarity":
            vectors = guide_vectors(frozen, views, self.config.model.pooler)
            duplicates |= near_duplicates(vectors, threshold=options.duplicate_similarity)
        return duplicates

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        options = self.options
        duplicates: Bool[Array, "batch negatives"] | None = corrupted
        if self._both_are_views:
            z1, z2, *hard_negatives = forward.projected_views
            per_example = info_nce(
                z1,
                z2,
                temperature=options.temperature,
                similarity=options.similarity,
                hard_negatives=hard_negatives,
                hard_negative_weight=options.hard_negative_weight,
                left_out=duplicates,
            )
            if options.symmetric:
                swapped = None if duplicates is None else duplicates[:, : len(z1)].T
                per_example = (per_example + self._backwards(z1, z2, swapped)) / 2
        else:
            per_example = separate_info_nce(
                *self._pairs(forward, key),
                temperature=options.temperature,
                similarity=options.similarity,
                ratio=options.negative_ratio,
                form=options.negative_ratio_form,
                left_out=duplicates,
            )
        return per_example.mean(), {} if duplicates is None else {"negatives_masked": share(duplicates)}

    def _backwards(
        self, z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"], left_out: Bool[Array, "batch batch"] | None
    ) -> Float[Array, " batch"]:
        """The contrast from view 2 to view 1."""
        options = self.options
        return info_nce(z2, z1, temperature=options.temperature, similarity=options.similarity, left_out=left_out)

    @property
    def _both_are_views(self) -> bool:
        return self.options.positives == self.options.negatives == "dropout"

    def _pairs(self, forward: SharedForward, key: PRNGKeyArray) -> tuple[Pair, Pair]:
        """The vectors of positive and of negative pairs."""
        of_positives, of_negatives = self.options.positives, self.options.negatives
        # What both need is computed once.
        pairs = {kind: self._pair(kind, forward, key) for kind in dict.fromkeys((of_positives, of_negatives))}
        n1, n2 = pairs[of_negatives]
        if of_negatives == "mean":
            n1 = n2 = (n1 + n2) / 2
        return pairs[of_positives], (n1, n2)

    def _pair(self, kind: str, forward: SharedForward, key: PRNGKeyArray) -> Pair:
        if kind == "off_dropout":
            return forward.off_dropout, forward.off_dropout
        z1, z2 = forward.projected_means(self.options.samples if kind == "mean" else 1)
        if kind == "noise":
            noise = jax.random.normal(fold_in_name(key, "noise"), (2, *z1.shape)) * self.options.noise_variance**0.5
            z1, z2 = z1 + noise[0], z2 + noise[1]
        return z1, z2


def info_nce(
    z1: Float[Array, "batch dim"],
    z2: Float[Array, "batch dim"],
    *,
    temperature: float,
    similarity: str = "cosine",
    hard_negatives: Sequence[Float[Array, "batch dim"]] = (),
    hard_negative_weight: float = 1.0,
    left_out: Bool[Array, "batch negatives"] | None = None,
) -> Float[Array, " batch"]:
    """Contrast of each vector with its positive against the batch (SimCSE Eq. 4; with hard negatives Eq. 8).

    l_i = -log exp(s(z1_i, z2_i)) / sum_j [exp(s(z1_i, z2_j)) + alpha^[i=j] sum_k exp(s(z1_i, z3k_j))],
    s = cos / temperature.

    Args:
        z1: anchors.
        z2: positives; row j is a negative of anchor i != j.
        similarity: `cosine` or `dot`.
        hard_negatives: z3k, of each column one per anchor, negatives of every anchor.
        hard_negative_weight: alpha, the weight of an anchor's own hard negatives.
        left_out: what leaves the denominator: of z2, then of the hard negatives column by column; no own positives.
    """
    similarities = jnp.concatenate([SIMILARITIES[similarity](z1, z) for z in (z2, *hard_negatives)], axis=1)
    # Relative to the positives, which changes no softmax: divided by the temperature first, what is near them would
    # lose digits to a number twenty times as large.
    positives = jax.lax.stop_gradient(jnp.diagonal(similarities))
    logits = (similarities - positives[:, None]) / temperature
    own_weight = jnp.log(hard_negative_weight) * jnp.eye(len(z1), dtype=logits.dtype)
    weights = [jnp.zeros_like(own_weight), *[own_weight] * len(hard_negatives)]
    logits = _without(logits + jnp.concatenate(weights, axis=1), left_out)
    # log_softmax subtracts the maximum before it sums; logsumexp - positive would lose digits, in the gradient too.
    return -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))


def separate_info_nce(
    positives: Pair,
    negatives: Pair,
    *,
    temperature: float,
    ratio: float,
    form: str,
    similarity: str = "cosine",
    left_out: Bool[Array, "batch batch"] | None = None,
) -> Float[Array, " batch"]:
    """Contrast whose negatives come from other vectors than its positives (SimCSE++ Eq. 3).

    Paper: l_i = -log exp(s+) / (exp(s+) + m sum_{j != i} exp(s(n1_i, n2_j))), s+ = s(z1_i, z2_i). Code: no factor on
    the sum; m multiplies s+ in numerator and denominator. The published numbers come from the code.

    Args:
        positives: z1 and z2; in the equation, the views with dropout.
        negatives: n1 and n2; in the equation, both the same sentences in a pass without dropout.
        ratio: m.
        form: `code` or `paper`.
        similarity: `cosine` or `dot`.
        left_out: the pairs i != j that leave the sum.
    """
    z1, z2 = (normalize(z) if similarity == "cosine" else z for z in positives)
    positive = jnp.sum(z1 * z2, axis=1) / temperature
    if form == "code":
        positive *= ratio
    others = SIMILARITIES[similarity](*negatives) / temperature
    if form == "paper":
        others += jnp.log(ratio)
    others = _without(_without(others, jnp.eye(len(z1), dtype=bool)), left_out)
    return -jax.nn.log_softmax(jnp.concatenate([positive[:, None], others], axis=1), axis=1)[:, 0]


def _without(logits: Float[Array, "batch negatives"], left_out: jax.Array | None) -> Float[Array, "batch negatives"]:
    return logits if left_out is None else jnp.where(left_out, -jnp.inf, logits)


def objective(options: Options, config: RunConfig) -> Contrast:
    """The contrast.

    Raises:
        ConfigError: two encoders, and negatives that take one vector of each sentence; two directions of a contrast
            whose positives and negatives are not the two views.
    """
    if options.weight and options.symmetric and not options.positives == options.negatives == "dropout":
        raise ConfigError(
            f"contrast.symmetric=True has no form with contrast.positives={options.positives!r} and "
            f"contrast.negatives={options.negatives!r}; use 'dropout' for both"
        )
    if options.weight and options.second_encoder and options.negatives in ("off_dropout", "mean"):
        raise ConfigError(
            f"contrast.negatives={options.negatives!r} compares vectors of one encoder, and with "
            "contrast.second_encoder=True there are two; use 'dropout' or 'noise' negatives, or one encoder"
        )
    return Contrast(options, config)
