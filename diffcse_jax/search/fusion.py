"""Fusion: one ranking from the scores of embeddings and of BM25."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

CANDIDATES = 100  # best rows of each half, whose scores are combined
DEFAULT_WEIGHT = 0.3  # of BM25; docs/records/search.md has the measurement
WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))


def best_rows(scores: Float[np.ndarray, " rows"], count: int) -> Int[np.ndarray, " best"]:
    """Return the rows with the highest scores, best first; of equal ones the earlier row first."""
    count = min(count, len(scores))
    if not count:
        return np.zeros(0, np.int64)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    rows = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    return rows[np.argsort(-scores[rows], kind="stable")]


def found_by_words(scores: Float[np.ndarray, " rows"], count: int) -> Int[np.ndarray, " best"]:
    """Return the rows with the highest BM25 scores, without those that share no word with the query."""
    rows = np.flatnonzero(scores > 0)  # first, because partitioning many equal values takes 30 ms
    return rows[best_rows(scores[rows], count)]


def combine(
    dense: Float[np.ndarray, " candidates"],
    lexical: Float[np.ndarray, " candidates"],
    weight: float,
    all_dense: Float[np.ndarray, " sample"],
    all_lexical: Float[np.ndarray, " rows"],
) -> Float[np.ndarray, " candidates"]:
    """Return the weighted mean of two z-scores: `weight` for BM25, the rest for the embeddings.

    Args:
        dense: Cosine similarities of a query's candidates.
        lexical: BM25 scores of the same candidates.
        weight: From 0 (embeddings only) to 1 (BM25 only).
        all_dense: Cosine similarities of all rows, or of a sample, whose mean and deviation standardise.
        all_lexical: BM25 scores of all rows, for the same.
    """
    return (1 - weight) * _standardised(dense, all_dense) + weight * _standardised(lexical, all_lexical)


def choose_weight(
    dense: Float[np.ndarray, "queries rows"],
    lexical: Float[np.ndarray, "queries rows"],
    relevant: Sequence[Collection[int]],
) -> float:
    """Choose the weight of BM25 for held-out queries, each with the rows that it should find, by nDCG@10.

    `dense` are cosine similarities, `lexical` BM25 scores. The weight is the default, unless another of `WEIGHTS` is
    better by more than one standard error over the queries.
    """

    def gain(one: np.ndarray, other: np.ndarray, wanted: Collection[int], weight: float) -> float:
        return ndcg(best_rows(combine(one, other, weight, one, other), 10), dict.fromkeys(wanted, 1.0))

    tried = [DEFAULT_WEIGHT, *(weight for weight in WEIGHTS if weight != DEFAULT_WEIGHT)]
    queries = zip(dense, lexical, relevant, strict=True)
    gains = np.array([[gain(*query, weight) for weight in tried] for query in queries])
    if not len(gains):
        return DEFAULT_WEIGHT
    best = int(gains.mean(axis=0).argmax())
    gained = gains[:, best] - gains[:, 0]
    return tried[best] if gained.mean() > gained.std() / len(gained) ** 0.5 else DEFAULT_WEIGHT


def ndcg(order: Int[np.ndarray, " k"], grades: Mapping[int, float]) -> float:
    """Return nDCG@10 of a ranking, from 0 to 1; rows without a grade count 0."""
    discounts = 1 / np.log2(np.arange(2, 12))
    ideal = np.sort([*grades.values()])[::-1][:10]
    found = np.array([grades.get(row, 0) for row in order[:10].tolist()])
    return float(found @ discounts[: len(found)] / (ideal @ discounts[: len(ideal)]))


def _standardised(
    scores: Float[np.ndarray, " candidates"], of: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " candidates"]:
    scale = of.std() if len(of) else 0
    return (scores - of.mean()) / scale if scale > 1e-9 else np.zeros_like(scores)
