"""The weight of BM25 in hybrid search, chosen on queries whose targets are known."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from diffcse_jax.search.fusion import combine
from diffcse_jax.search.lexical import best_rows
from diffcse_jax.search.modes import DEFAULT_WEIGHT

TRIED_WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))


def choose_weight(
    dense: Float[np.ndarray, "queries rows"],
    lexical: Float[np.ndarray, "queries rows"],
    relevant: Sequence[Collection[int]],
) -> float:
    """Choose the weight of BM25 for queries, each with the rows that it should find, by nDCG@10.

    `dense` are cosine similarities, and `lexical` are BM25 scores. The weight is the default,
    unless another one of `TRIED_WEIGHTS` is better by more than one standard error over the
    queries. Queries without such rows do not count.
    """
    tried = [DEFAULT_WEIGHT, *TRIED_WEIGHTS]
    answered = [each for each in zip(dense, lexical, relevant, strict=True) if each[2]]
    gains = np.zeros((len(answered), len(tried)))
    for query, (by_cosine, by_words, wanted) in enumerate(answered):
        for column, weight in enumerate(tried):
            scores = combine(by_cosine, by_words, weight, by_cosine, by_words)
            gains[query, column] = ndcg(best_rows(scores, 10), dict.fromkeys(wanted, 1.0))
    if not len(gains):
        return DEFAULT_WEIGHT
    best = int(gains.mean(axis=0).argmax())
    gained = gains[:, best] - gains[:, 0]
    return tried[best] if gained.mean() > gained.std() / len(gained) ** 0.5 else DEFAULT_WEIGHT


def ndcg(order: Int[np.ndarray, " k"], grades: Mapping[int, float]) -> float:
    """Return nDCG@10 of a ranking, from 0 to 1; rows without a grade count 0."""
    discounts = 1 / np.log2(np.arange(2, 12))
    ideal = np.sort([*grades.values()])[::-1][:10]
    gains = np.array([grades.get(row, 0) for row in order[:10].tolist()])
    return float(gains @ discounts[: len(gains)] / (ideal @ discounts[: len(ideal)]))
