"""Search systems on the same held-out queries: BM25, encoders, and each encoder with BM25. Recommend one of them.

Before anyone trains, they try BM25, and then BM25 added to an encoder. A gain over the starting checkpoint alone says
little if one of these is better.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from diffcse_jax.config import DataConfig
from diffcse_jax.evaluation import Encoder, Settings
from diffcse_jax.evaluation.dev import MOST_PAIRS, RetrievalMetric, paired_interval
from diffcse_jax.evaluation.held_out import held_out_queries
from diffcse_jax.evaluation.retrieval import competing, encode_pairs, ranks_among
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.lexical import LexicalIndex, choose_weight, combine

BM25 = "BM25"
HYBRID = "mrr with BM25"
MOST_TOKENS = 128  # of a passage that is searched

Scores = Float32[np.ndarray, "queries texts"]


@dataclasses.dataclass(frozen=True)
class System:
    """A way to search, and its mean reciprocal rank on held-out queries, x 100."""

    name: str  # `BM25`, the name of an encoder, or `NAME + BM25`
    mode: str  # `lexical`, `dense` or `hybrid`, as in `SentenceEncoder.build_index`
    encoder: str  # the name of the encoder; empty for BM25
    weight: float  # of BM25 in hybrid search, chosen on all queries
    # 100 / rank of each query's target. In hybrid search the weight is chosen on the other half of the queries.
    reciprocal_ranks: Sequence[float]
    documents: Sequence[int] | None = None  # of each query, as intervals resample documents; None: queries

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
        before = [0.0] * len(self.reciprocal_ranks) if other is None else list(other.reciprocal_ranks)
        return paired_interval([before], [list(self.reciprocal_ranks)], documents=self.documents)


def compare_systems(encoders: Mapping[str, Encoder], metric: RetrievalMetric) -> list[System]:
    """Search for the targets of a dev metric, by BM25, each encoder, and each encoder with BM25, in this order."""
    index = LexicalIndex.build(metric.targets)
    words, own = competing(np.stack([index.scores(query) for query in metric.queries]), metric.passages)
    of = metric.document_of
    systems = [System(BM25, "lexical", "", 1.0, (100 / ranks_among(words, own)).tolist(), of)]
    for name, encoder in encoders.items():
        queries, targets = map(normalize, encode_pairs(encoder, metric.queries, metric.targets, metric.batch_size))
        similarities, own = competing(queries @ targets.T, metric.passages)
        systems.append(System(name, "dense", name, 0.0, (100 / ranks_among(similarities, own)).tolist(), of))
        weight, ranks = _hybrid(similarities, words, own)
        systems.append(System(f"{name} + {BM25}", "hybrid", name, weight, ranks, of))
    return systems


def queries_of_documents(file: str) -> RetrievalMetric:
    """Return the dev metric `mixed_retrieval` of all documents of a file, folder or collection."""
    data = DataConfig(train_file=file, held_out=1.0, max_length=MOST_TOKENS)
    found = held_out_queries(data, "mixed_retrieval", MOST_PAIRS)
    return RetrievalMetric("mixed_retrieval", 64, *map(list, zip(*found, strict=True)))


def recommend(systems: Sequence[System]) -> System:
    """Return the first system, in their order, that is not significantly worse than the best one.

    The order is from simple to complex, so a system is recommended over simpler ones only if they are worse.
    """
    best = max(systems, key=lambda system: system.score)
    return next(system for system in systems if system is best or best.interval(system)[0] <= 0)


def _hybrid(similarities: Scores, words: Scores, own: Int[np.ndarray, " queries"]) -> tuple[float, list[float]]:
    """Return the weight of BM25 for all queries, and reciprocal ranks with weights from the other half of them."""

    def chosen(half: slice) -> float:
        return choose_weight(similarities[half], words[half], own[half, None].tolist())

    even, odd = slice(0, None, 2), slice(1, None, 2)
    ranks = np.zeros(len(words))
    for half, other in ((even, odd), (odd, even)):
        pairs, weight = zip(similarities[half], words[half], strict=True), chosen(other)
        fused = np.stack([combine(one, found, weight, one, found) for one, found in pairs])
        ranks[half] = 100 / ranks_among(fused, own[half])
    return chosen(slice(None)), ranks.tolist()


def describe(systems: Sequence[System]) -> list[str]:
    """Return lines of a table: each system's score and its interval."""
    width = max(len(system.name) for system in systems)
    return [
        f"  {system.name:<{width}}  {system.score:6.2f}  ({low:.2f} to {high:.2f})"
        for system in systems
        for low, high in [system.interval()]
    ]


def describe_recommendation(systems: Sequence[System], recommended: System) -> str:
    """Return what to use, and why, as one or two sentences."""
    best = max(systems, key=lambda system: system.score)
    if recommended is best:
        return f"Recommended for search: {recommended.name}."
    low, high = best.interval(recommended)
    return (
        f"Recommended for search: {recommended.name}. {best.name} is {best.score - recommended.score:.2f} higher, but "
        f"this may be chance (95% interval {low:+.2f} to {high:+.2f})."
    )


# The task


def score_documents(encoder: Encoder, file: str, settings: Settings) -> dict[str, Any]:
    """Compare BM25, the encoder, and both together on queries made of the user's documents, without any labels."""
    metric = queries_of_documents(file)
    bm25, dense, hybrid = systems = compare_systems({"encoder": encoder}, metric)
    found = {"mrr": dense.score, HYBRID: hybrid.score, "BM25": bm25.score, "n": len(metric.queries)}
    return found | {"systems": [system.summary() for system in systems]}
