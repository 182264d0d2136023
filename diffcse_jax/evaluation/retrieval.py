"""Retrieval without labels: how high does each query rank its own target?"""

import collections
import heapq
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.search.nearest import normalized

BLOCK = 1024  # queries whose similarities are held at once


def retrieval_scores(
    queries: Float32[np.ndarray, "n dimension"], targets: Float32[np.ndarray, "n dimension"]
) -> dict[str, float]:
    """Mean reciprocal rank and recall, x 100, of target i for query i among all targets, by cosine similarity.

    Returns:
        `mrr`, `recall@1`, `recall@5`, `recall@10`.
    """
    ranks = target_ranks(queries, targets)
    recalls = {f"recall@{k}": 100 * float(np.mean(ranks <= k)) for k in (1, 5, 10)}
    return {"mrr": 100 * float(np.mean(1 / ranks))} | recalls


def target_ranks(
    queries: Float32[np.ndarray, "n dimension"], targets: Float32[np.ndarray, "n dimension"]
) -> Float[np.ndarray, " n"]:
    """The rank, from 1, of target i for query i. Ties share their mean rank: a constant encoder gains nothing."""
    queries, targets = normalized(queries), normalized(targets)
    ranks = []
    for start in range(0, len(queries), BLOCK):
        similarities = queries[start : start + BLOCK] @ targets.T
        ranks.append(ranks_among(similarities, start + np.arange(len(similarities))))
    return np.concatenate(ranks)


def ranks_among(
    similarities: Float32[np.ndarray, "rows columns"], targets: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """The rank, from 1, of column `targets[i]` in row i, highest first. Ties share their mean rank."""
    own = similarities[np.arange(len(targets)), targets][:, None]
    return (similarities > own).sum(axis=1) + ((similarities == own).sum(axis=1) + 1) / 2


def halves(sentences: Iterable[str], limit: int, fewest_words: int) -> tuple[list[str], list[str]]:
    """First and second halves, by words, of the first `limit` distinct sentences of at least `fewest_words`."""
    first: list[str] = []
    second: list[str] = []
    seen = set()
    for sentence in sentences:
        if len(first) == limit:
            break
        if sentence in seen or len(sentence.split()) < fewest_words:
            continue
        seen.add(sentence)
        for texts, half in zip((first, second), halved(sentence), strict=True):
            texts.append(half)
    return first, second


def halved(sentence: str) -> tuple[str, str]:
    """A sentence's first and second half, by words."""
    words = sentence.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def chosen_pairs(pairs: Iterable[tuple[str, str]], limit: int, order: Callable[[str], int]) -> list[tuple[str, str]]:
    """At most `limit` queries with their targets, the same ones in whatever order all pairs come.

    Of pairs that share a text none is taken, for a query has one target. Memory holds four times the limit.

    Args:
        pairs: queries and targets.
        limit: how many to take.
        order: a hash of text; pairs of the lowest ones are taken.
    """
    lowest: dict[int, tuple[str, str]] = {}
    for pair in pairs:
        lowest[order(" ".join(pair))] = pair
        if len(lowest) > 4 * limit:
            lowest = dict(heapq.nsmallest(2 * limit, lowest.items()))
    candidates = [pair for _, pair in sorted(lowest.items())[: 2 * limit]]
    occurrences = collections.Counter(text for pair in candidates for text in pair)
    return [pair for pair in candidates if all(occurrences[text] == 1 for text in pair)][:limit]
