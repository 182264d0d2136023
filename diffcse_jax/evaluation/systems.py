"""Ways to search, compared on the queries of a dev metric: BM25, encoders, and encoders with BM25.

BM25, and an encoder with BM25, need no training. A gain by training says little if one of these is better.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.evaluation import Encoder, encode_pairs, retrieval
from diffcse_jax.evaluation.metrics import RetrievalMetric, paired_interval
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.lexical import LexicalIndex, choose_weight, combine

BM25 = "BM25"
HYBRID = "mrr with BM25"

Scores = Float32[np.ndarray, "queries texts"]


@dataclasses.dataclass(frozen=True)
class System:
    """A way to search, and its mean reciprocal rank on held-out queries, x 100."""

    name: str  # `BM25`, the name of an encoder, or `NAME + BM25`
    mode: str  # `lexical`, `dense` or `hybrid`, as in `SentenceEncoder.build_index`
    encoder: str  # the name of the encoder; empty for BM25
    weight: float  # of BM25 in hybrid search, chosen on all queries
    # 100 / rank of each query's target. In hybrid search the weight is chosen on the other half of the queries.
    reciprocal_ranks: Float[np.ndarray, " queries"]
    documents: Sequence[int] | None = None  # the document of each query, for intervals; see `paired_interval`

    @property
    def score(self) -> float:
        """The mean reciprocal rank, x 100."""
        return float(np.mean(self.reciprocal_ranks))

    def summary(self) -> dict[str, Any]:
        """Return everything but the single ranks, with the interval of the score."""
        low, high = self.interval()
        kept = {name: getattr(self, name) for name in ("name", "mode", "encoder", "weight", "score")}
        return kept | {"low": low, "high": high}

    def interval(self, other: "System | None" = None) -> tuple[float, float]:
        """Return a 95% interval of the score, or of the difference from another system, by the paired bootstrap."""
        before = other.reciprocal_ranks if other else np.zeros_like(self.reciprocal_ranks)
        return paired_interval([before], [self.reciprocal_ranks], documents=self.documents)


def compare_systems(encoders: Mapping[str, Encoder], metric: RetrievalMetric) -> list[System]:
    """Search for the targets of a dev metric: by BM25, then by each encoder, alone and with BM25."""
    index, documents = LexicalIndex.build(metric.targets), metric.document_of
    bm25 = np.stack([index.scores(query) for query in metric.queries])
    words, own = retrieval.competing(bm25, metric.passages)
    systems = [System(BM25, "lexical", "", 1.0, 100 / retrieval.ranks_among(words, own), documents)]
    for name, encoder in encoders.items():
        queries, targets = map(normalize, encode_pairs(encoder, metric.queries, metric.targets, metric.batch_size))
        similarities, _ = retrieval.competing(queries @ targets.T, metric.passages)
        systems.append(System(name, "dense", name, 0.0, 100 / retrieval.ranks_among(similarities, own), documents))
        weight, ranks = _hybrid(similarities, words, own)
        systems.append(System(f"{name} + {BM25}", "hybrid", name, weight, 100 / ranks, documents))
    return systems


def _hybrid(
    similarities: Scores, words: Scores, own: Int[np.ndarray, " queries"]
) -> tuple[float, Float[np.ndarray, " queries"]]:
    """Return the weight of BM25 for all queries, and ranks with a weight that the other half of the queries chose."""

    def chosen(half: slice) -> float:
        return choose_weight(similarities[half], words[half], own[half, None].tolist())

    ranks, even, odd = np.zeros(len(words)), slice(0, None, 2), slice(1, None, 2)
    for half, other in ((even, odd), (odd, even)):
        weight = chosen(other)
        scores = zip(similarities[half], words[half], strict=True)
        fused = np.stack([combine(dense, lexical, weight, dense, lexical) for dense, lexical in scores])
        ranks[half] = retrieval.ranks_among(fused, own[half])
    return chosen(slice(None)), ranks


def recommend(systems: Sequence[System]) -> System:
    """Return the first system, in their order, that is not significantly worse than the best one.

    The order is from simple to complex, so a system is recommended over simpler ones only if they are worse.
    """
    best = max(systems, key=lambda system: system.score)
    return next(system for system in systems if system is best or best.interval(system)[0] <= 0)


def describe(systems: Sequence[System]) -> list[str]:
    """Return lines of a table: each system's score and its interval."""
    width, lines = max(len(system.name) for system in systems), []
    for system in systems:
        low, high = system.interval()
        lines.append(f"  {system.name:<{width}}  {system.score:6.2f}  ({low:.2f} to {high:.2f})")
    return lines


def describe_recommendation(systems: Sequence[System], recommended: System) -> str:
    """Return what to use, and why, as one or two sentences."""
    best = max(systems, key=lambda system: system.score)
    if recommended is best:
        return f"Recommended for search: {recommended.name}."
    low, high = best.interval(recommended)
    return (
        f"Recommended for search: {recommended.name}. The score of {best.name} is {best.score - recommended.score:.2f} "
        f"higher, but this may be chance (95% interval {low:+.2f} to {high:+.2f})."
    )
