"""Outcomes that a dev metric summarises, one per query or pair, and how sure a difference between two models is."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import scipy.stats
from jaxtyping import Float, Int

from diffcse_jax.evaluation import retrieval, sts
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.storage.selection import Outcomes

RESAMPLES = 1000


@runtime_checkable
class Evidence(Protocol):
    """The dev text of a metric."""

    def of(self, encoder: Encoder) -> Outcomes:
        """The outcomes of an encoder."""

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        """A 95 % interval for the metric of the model less that of the start."""

    def describe(self) -> str:
        """The units that are resampled, as "1,000 queries"."""


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries with a target each, for mean reciprocal ranks; outcomes are reciprocal ranks, x 100."""

    queries: Sequence[str]
    targets: Sequence[str]
    batch_size: int = 64

    def of(self, encoder: Encoder) -> Outcomes:
        vectors = encoder.encode([*self.queries, *self.targets], batch_size=self.batch_size)
        ranks = retrieval.target_ranks(vectors[: len(self.queries)], vectors[len(self.queries) :])
        return [(100 / ranks).tolist()]

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        return paired_interval(start, model, [None])

    def describe(self) -> str:
        return f"{len(self.queries):,} queries"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sets of pairs with human scores, for the mean of their Spearman correlations; outcomes are similarities."""

    sets: Sequence[sts.ScoredPairs]
    batch_size: int = 64

    def of(self, encoder: Encoder) -> Outcomes:
        sets = {str(index): pairs for index, pairs in enumerate(self.sets)}
        return [similarities.tolist() for similarities in sts.similarities(encoder, sets, self.batch_size).values()]

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        return paired_interval(start, model, [pairs.gold for pairs in self.sets])

    def describe(self) -> str:
        return f"{sum(len(pairs.gold) for pairs in self.sets):,} pairs"


def paired_interval(
    start: Outcomes,
    model: Outcomes,
    golds: Sequence[Float[np.ndarray, " _"] | None],
    seed: int = 0,
    *,
    ranked: bool = True,
) -> tuple[float, float]:
    """A 95 % interval of the difference between two models on the same data, by the paired bootstrap.

    Each resample draws as many queries (or pairs) of a set as it has, with replacement, and takes the metrics of both
    models on the same draw (Efron and Tibshirani 1993, the percentile method).

    Args:
        start: of each data set, the first model's outcomes.
        model: the second model's.
        golds: of each data set, the human scores that outcomes are correlated with; None: outcomes are averaged.
        seed: of the draws.
        ranked: correlations are Spearman's; else Pearson's.

    Returns:
        The 2.5th and the 97.5th percentile of the second model's metric less the first's, averaged over data sets.
    """
    rng = np.random.default_rng(seed)
    differences = np.zeros(RESAMPLES)
    for first, second, gold in zip(map(np.array, start), map(np.array, model), golds, strict=True):
        for index, rows in enumerate(rng.integers(len(first), size=(RESAMPLES, len(first)))):
            before, after = (_statistic(outcomes, gold, rows, ranked=ranked) for outcomes in (first, second))
            differences[index] += after - before
    low, high = np.percentile(differences / len(golds), (2.5, 97.5))
    return float(low), float(high)


def _statistic(
    outcomes: Float[np.ndarray, " pairs"],
    gold: Float[np.ndarray, " pairs"] | None,
    rows: Int[np.ndarray, " draws"],
    *,
    ranked: bool,
) -> float:
    """The metric on some rows: the mean, or the correlation with human scores (of ranks, Spearman's), x 100."""
    if gold is None:
        return float(outcomes[rows].mean())
    values = outcomes[rows], gold[rows]
    if ranked:
        values = scipy.stats.rankdata(values[0]), scipy.stats.rankdata(values[1])
    if np.ptp(values[0]) == 0 or np.ptp(values[1]) == 0:  # a constant orders nothing
        return 0.0
    return 100 * float(np.corrcoef(*values)[0, 1])
