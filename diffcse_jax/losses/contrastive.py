"""Contrast between the sentences of a batch: SimCSE (Gao et al. 2021) and the variants of SimCSE++.

Each anchor should be closer to its own positive than to the negatives in the batch. Negatives are
compared with the first view only, as in the papers, unless `symmetric` is set.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import Loss, Metrics, PretrainedCheckpoints, RunInfo, View
from diffcse_jax.models.forward import (
    STARTING_CHECKPOINT,
    Computation,
    SharedForward,
    fold_in_name,
    start_as_teacher,
)
from diffcse_jax.models.layers import Network
from diffcse_jax.models.pooling import cosine_similarity, dot_product, normalize
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.options import option

COMPARISONS = {"cosine": cosine_similarity, "dot": dot_product}
Pair = tuple[View, View]


def info_nce(
    anchors: View,
    positives: View,
    *,
    temperature: float,
    similarity: str = "cosine",
    hard_negatives: Sequence[View] = (),
    hard_negative_weight: float = 1.0,
    left_out: Bool[Array, "batch negatives"] | None = None,
) -> Float[Array, " batch"]:
    """Compute the contrastive loss of SimCSE per anchor (Gao et al. 2021, Eq. 4 and 8).

    Each anchor should be closest to its own positive. The other positives in the batch act as
    negatives. Equation 8 adds hard negatives:

    l_i = -log exp(s(a_i, p_i)) / sum_j [exp(s(a_i, p_j)) + alpha^[i=j] sum_k exp(s(a_i, n_kj))],
    s = cos / temperature

    Args:
        anchors: Embeddings a. They are normalised here.
        positives: Embeddings p of the matching texts.
        temperature: Divides the similarities. Smaller values sharpen the softmax.
        similarity: `cosine` or `dot`.
        hard_negatives: Embeddings n_k. Each array holds one per anchor, which is a negative of all
            anchors.
        hard_negative_weight: alpha, the weight of an anchor's own hard negatives.
        left_out: Pairs that are not in the denominator: columns for the positives, then for each
            array of hard negatives. An anchor's own positive must not be among them.
    """
    similarities = jnp.concatenate(
        [COMPARISONS[similarity](anchors, z) for z in (positives, *hard_negatives)], axis=1
    )
    # Subtracting a row's positive changes no softmax. It is done before the division, which makes
    # numbers twenty times as large: similarities close to the positive then keep their digits.
    positive = jax.lax.stop_gradient(jnp.diagonal(similarities))
    logits = (similarities - positive[:, None]) / temperature
    own_weight = jnp.log(hard_negative_weight) * jnp.eye(len(anchors), dtype=logits.dtype)
    logits += jnp.concatenate(
        [jnp.zeros_like(own_weight), *[own_weight] * len(hard_negatives)], axis=1
    )
    if left_out is not None:
        logits = jnp.where(left_out, -jnp.inf, logits)
    # log_softmax subtracts the maximum first. logsumexp - positive would lose digits, as would its
    # gradient.
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
    """Compute a contrast whose negatives have embeddings of their own (SimCSE++ Eq. 3).

    Paper: l_i = -log exp(s+) / (exp(s+) + m sum_{j != i} exp(s(n1_i, n2_j))), s+ = s(z1_i, z2_i).
    The authors' code has no factor on the sum: m multiplies s+ in numerator and denominator. The
    published numbers come from the code.

    Args:
        positives: z1 and z2. In the equation: the views, with dropout.
        negatives: n1 and n2. In the equation: both are the same sentences in a pass without
            dropout.
        temperature: Divides the similarities.
        ratio: m.
        form: `code` or `paper`.
        similarity: `cosine` or `dot`.
        left_out: Pairs i != j that leave the sum.
    """
    z1, z2 = (normalize(z) if similarity == "cosine" else z for z in positives)
    positive = jnp.sum(z1 * z2, axis=1) / temperature
    others = COMPARISONS[similarity](*negatives) / temperature
    if form == "code":
        positive *= ratio
    else:
        others += jnp.log(ratio)
    diagonal = jnp.eye(len(z1), dtype=bool)
    others = jnp.where(diagonal if left_out is None else diagonal | left_out, -jnp.inf, others)
    return -jax.nn.log_softmax(jnp.concatenate([positive[:, None], others], axis=1), axis=1)[:, 0]


# Duplicates: texts that say the same should not be negatives of one another. A mask has a row for
# each anchor and, as the logits of InfoNCE, a column for each positive and then for each hard
# negative. It never masks an own positive.


def equal_texts(input_ids: Int[Array, "batch views length"]) -> Bool[Array, "batch negatives"]:
    """Find negatives whose text equals the anchor's or its positive's.

    Texts are compared up to the length at which sentences are cut. The positive of another example
    is a duplicate if either text of that example equals either text of this one. A hard negative is
    a duplicate if it equals either text of this example.
    """
    anchors, positives, *hard_negatives = jnp.moveaxis(input_ids, 1, 0)

    def equals(ours: jax.Array, others: jax.Array) -> jax.Array:
        return (ours[:, None] == others[None]).all(axis=-1)

    def equals_the_pair(others: jax.Array) -> jax.Array:
        return equals(anchors, others) | equals(positives, others)

    of_positives = equals_the_pair(anchors) | equals_the_pair(positives)
    return _without_own_positives([of_positives, *map(equals_the_pair, hard_negatives)])


def near_duplicates(
    views: Sequence[View], *, threshold: float | None
) -> Bool[Array, "batch negatives"]:
    """Find negatives that are more similar to the anchor than a bound.

    Args:
        views: Another encoder's embeddings of the anchors, of the positives, and of each column of
            hard negatives.
        threshold: The bound, a cosine. None: the anchor's similarity to its positive, as in
            GISTEmbed (Solatorio 2024).
    """
    anchors, *others = views
    similarities = [cosine_similarity(anchors, candidates) for candidates in others]
    bound = jnp.diagonal(similarities[0])[:, None] if threshold is None else threshold
    return _without_own_positives([similarity > bound for similarity in similarities])


def _without_own_positives(blocks: list[jax.Array]) -> Bool[Array, "batch negatives"]:
    duplicates = jnp.concatenate(blocks, axis=1)
    return duplicates & ~jnp.eye(len(duplicates), duplicates.shape[1], dtype=bool)


@dataclasses.dataclass(frozen=True)
class Contrast(Loss):
    """Contrast of the two views: SimCSE, supervised SimCSE and the variants of SimCSE++."""

    weight: float = option(1.0, "weight of the InfoNCE loss (SimCSE Eq. 4)", low=0.0)
    similarity: str = option(
        "cosine", "how embeddings are compared: SimCSE Table D.1", choices=tuple(COMPARISONS)
    )
    temperature: float = option(
        0.05, "temperature that divides the similarities (Table D.1: 1 for `dot`)", low=1e-6
    )
    positives: str = option(
        "dropout",
        "positive pairs (SimCSE++ Table 1): the two views, with Gaussian `noise`, or each a `mean` "
        "of samples",
        choices=("dropout", "noise", "mean"),
    )
    negatives: str = option(
        "dropout",
        "negative pairs: the two views (`dropout`), a pass without dropout (`off_dropout`, "
        "SimCSE++ Eq. 3), the views with Gaussian `noise`, or the `mean` of both views (SimCSE++ "
        "code) over several dropout samples (Table 1)",
        choices=("dropout", "off_dropout", "noise", "mean"),
    )
    noise_variance: float = option(
        0.1, "variance of the Gaussian noise (SimCSE++ Table 1)", low=0.0
    )
    samples: int = option(
        1,
        "dropout samples of each view in a mean, each a pass of the encoder: for positives K of "
        "SimCSE++ Table 1 (10), for negatives half of K, because their mean is over both views",
        low=1,
    )
    negative_ratio: float = option(
        1.0, "ratio m of SimCSE++; unused if both kinds of pairs are `dropout`", low=1e-6
    )
    negative_ratio_form: str = option(
        "code",
        "what m multiplies: positives (`code`, published) or negatives (Eq. 3)",
        choices=("code", "paper"),
    )
    hard_negative_weight: float = option(
        1.0, "weight of own hard negatives (alpha of SimCSE Eq. 8)", low=1e-6
    )
    symmetric: bool = option(
        False, "train the mean of both directions (CLIP); hard negatives belong to view 1"
    )
    second_encoder: bool = option(
        False,
        "embed positives and hard negatives with a second encoder, at first a copy of the first "
        "(SimCSE Table 2); both share the projector, and the first encoder is evaluated and "
        "exported",
    )
    mask_duplicates: str = option(
        "none",
        "pairs not used as negatives: of equal `text`, or also by `similarity` under the starting "
        "checkpoint",
        choices=("none", "text", "similarity"),
    )
    duplicate_similarity: float = option(
        0.0,
        "cosine above which pairs are near-duplicates; 0: that of the anchor's pair (GISTEmbed)",
        low=0.0,
        high=1.0,
    )
    compares_embeddings = True

    @property
    def papers(self) -> tuple[str, ...]:
        return ("simcse",) if self._pairs_are_views else ("simcse", "simcsepp")

    @property
    def needs(self) -> frozenset[str]:
        extra = {"anchors": self.negatives == "off_dropout", "dropout": self.positives != "noise"}
        return frozenset({"embeddings", *(name for name, needed in extra.items() if needed)})

    @property
    def _pairs_are_views(self) -> bool:
        return self.positives == self.negatives == "dropout"

    def check(self, run: RunInfo) -> None:
        if self.symmetric and not self._pairs_are_views:
            raise ConfigError(
                "contrast.symmetric=True does not work with positives or negatives other than "
                "'dropout'"
            )
        if self.second_encoder and self.negatives in ("off_dropout", "mean"):
            raise ConfigError(
                f"contrast.negatives={self.negatives!r} compares embeddings of one encoder. Use "
                "'dropout' or 'noise', or contrast.second_encoder=False."
            )
        if self.negative_ratio != 1 and self._pairs_are_views:
            raise ConfigError(
                f"contrast.negative_ratio={self.negative_ratio} is read only with other positives "
                "or negatives than 'dropout'. Set contrast.negatives='off_dropout' (SimCSE++), or "
                "contrast.negative_ratio=1.0"
            )
        if self.samples > 1 and "mean" not in (self.positives, self.negatives):
            raise ConfigError(
                f"contrast.samples={self.samples} is read only with contrast.positives='mean' or "
                "contrast.negatives='mean'. Set one of them, or contrast.samples=1"
            )
        if self.duplicate_similarity and self.mask_duplicates != "similarity":
            raise ConfigError(
                f"contrast.duplicate_similarity={self.duplicate_similarity} is read only with "
                "contrast.mask_duplicates='similarity'. Set that, or "
                "contrast.duplicate_similarity=0.0"
            )

    def check_columns(self, count: int) -> None:
        if count > 2 and not self._pairs_are_views:
            raise ConfigError(
                f"contrast.positives={self.positives!r} with contrast.negatives={self.negatives!r} "
                f"cannot use hard negatives, and the text has {count} columns. Use 'dropout' for "
                "both, or name one or two columns in data.columns."
            )
        if count == 1 and self.mask_duplicates == "similarity" and not self.duplicate_similarity:
            raise ConfigError(
                "contrast.mask_duplicates='similarity' compares negatives with the anchor's own "
                "positive. In text of one column the positive is the anchor itself, and nothing is "
                "more similar to it. Set contrast.duplicate_similarity, such as 0.9."
            )

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> dict[str, Network]:
        """Return the second encoder, and the frozen checkpoint that finds near-duplicates."""
        encoder = checkpoints.encoder
        networks = {}
        if self.second_encoder:
            build = partial(Transformer, encoder.config)
            networks["second_encoder"] = Network(build, encoder.transformer)
        if self.mask_duplicates == "similarity":
            networks[STARTING_CHECKPOINT] = start_as_teacher(encoder, run.pooler)
        return networks

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Find the pairs to leave out.

        In one direction first views are the anchors, in the other second views (`symmetric`).
        """
        if self.mask_duplicates == "none":
            return None
        duplicates = equal_texts(batch.input_ids)
        backward = duplicates[:, : len(duplicates)]  # equality is symmetric
        if self.mask_duplicates == "similarity":
            views = batch.by_view(
                frozen.map_chunks(frozen.network(STARTING_CHECKPOINT), batch.rows)
            )
            duplicates |= near_duplicates(views, threshold=self.duplicate_similarity or None)
            # View 2 is the anchor.
            backward |= near_duplicates(views[1::-1], threshold=self.duplicate_similarity or None)
        return duplicates, backward

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        left_out, left_out_backward = (None, None) if inputs is None else inputs
        if self._pairs_are_views:
            z1, z2, *hard = forward.projected_views
            contrast = partial(info_nce, temperature=self.temperature, similarity=self.similarity)
            losses = contrast(
                z1,
                z2,
                hard_negatives=hard,
                hard_negative_weight=self.hard_negative_weight,
                left_out=left_out,
            )
            if self.symmetric:
                losses = (losses + contrast(z2, z1, left_out=left_out_backward)) / 2
        else:
            losses = separate_info_nce(
                *self._pairs(forward, key),
                temperature=self.temperature,
                similarity=self.similarity,
                ratio=self.negative_ratio,
                form=self.negative_ratio_form,
                left_out=left_out,
            )
        if left_out is None:
            return losses.mean(), {}
        share = left_out.sum().astype(jnp.float32) / (left_out.size - len(left_out))
        return losses.mean(), {"negatives_masked": share}

    def _pairs(self, forward: SharedForward, key: PRNGKeyArray) -> tuple[Pair, Pair]:
        """Return the embeddings of positive and of negative pairs."""

        def pair(kind: str) -> Pair:
            if kind == "off_dropout":
                return (forward.projected(forward.batch.anchors, None, name="off_dropout"),) * 2
            z1, z2 = forward.projected_means(self.samples if kind == "mean" else 1)
            if kind == "noise":
                standard = jax.random.normal(fold_in_name(key, "noise"), (2, *z1.shape))
                noise = standard * self.noise_variance**0.5
                z1, z2 = z1 + noise[0], z2 + noise[1]
            return z1, z2

        n1, n2 = pair(self.negatives)
        if self.negatives == "mean":
            n1 = n2 = (n1 + n2) / 2
        return pair(self.positives), (n1, n2)
