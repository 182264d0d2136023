"""Ways to search, compared on the queries of a dev metric: BM25, encoders, and encoders with BM25.

BM25, and an encoder with BM25, need no training. A gain by training says little if one of these is
better.

Queries that are made of documents favour BM25 more than people's questions do, and would choose a
weight that is too high for these (docs/records/search.md).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from diffcse_jax.documents.sentences import canonical
from diffcse_jax.errors import counted
from diffcse_jax.evaluation import Encoder, encode_pairs, retrieval
from diffcse_jax.evaluation.answers import first_rows, groups_of
from diffcse_jax.evaluation.hybrid_weight import choose_weight
from diffcse_jax.evaluation.metrics import RetrievalMetric, paired_interval
from diffcse_jax.hosts import log_line
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.fusion import combine
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import DEFAULT_WEIGHT, HIGHER_WEIGHT
from diffcse_jax.search.words import LanguageChoice, choose_language

BM25 = "BM25"
HYBRID = "mrr with BM25"
PREFERRED_MODES = ("hybrid", "dense", "lexical")
FEWEST_DOCUMENTS = 100  # whose queries tell whether BM25 is worse than an encoder

Scores = Float32[np.ndarray, "queries texts"]
Ranks = Float[np.ndarray, " queries"]


class Contest(NamedTuple):
    """Queries, and two scores of the texts that they rank."""

    similarities: Scores
    words: Scores  # of BM25
    target: Int[np.ndarray, " queries"]  # the text that each query should find
    ignored: Bool[np.ndarray, "queries texts"]  # texts that do not compete

    def of(self, queries: Bool[np.ndarray, " all_queries"]) -> "Contest":
        """Return the contest of some queries."""
        return Contest(*(each[queries] for each in self))

    def weight(self) -> float:
        """Return the weight of BM25 that is best for these queries."""
        similarities, words = self._lowered()
        return choose_weight(similarities, words, self.target[:, None].tolist())

    def ranks(self, weight: float) -> Ranks:
        """Return the rank of each query's own text by both scores."""
        scores = zip(*self._lowered(), strict=True)
        fused = [combine(dense, lexical, weight, dense, lexical) for dense, lexical in scores]
        if not fused:
            return np.zeros(0)
        return retrieval.ranks_among(np.stack(fused), self.target, self.ignored)

    def _lowered(self) -> list[Scores]:
        """Return both scores, in which texts that do not compete have the lowest score of a row."""
        return [
            np.where(self.ignored, scores.min(axis=1, keepdims=True), scores)
            for scores in (self.similarities, self.words)
        ]


@dataclasses.dataclass(frozen=True)
class System:
    """A way to search, and its mean reciprocal rank on held-out queries, x 100."""

    name: str  # `BM25`, the name of an encoder, or `NAME + BM25`
    mode: str  # `lexical`, `dense` or `hybrid`, as in `SentenceEncoder.build_index`
    encoder: str  # the name of the encoder; empty for BM25
    weight: float  # of BM25 in hybrid search
    # 100 / rank of the target of each query that judges. In hybrid search, other queries have
    # chosen the weight, unless the queries were made of documents.
    reciprocal_ranks: Float[np.ndarray, " queries"]
    groups: Int[np.ndarray, " queries"] | None = None  # for intervals; see `paired_interval`

    @property
    def score(self) -> float:
        """The mean reciprocal rank, x 100."""
        return float(np.mean(self.reciprocal_ranks))

    def summary(self) -> dict[str, Any]:
        """Return everything but the single ranks, with the interval of the score."""
        low, high = self.interval()
        kept = ("name", "mode", "encoder", "weight", "score")
        return {name: getattr(self, name) for name in kept} | {"low": low, "high": high}

    def interval(self, other: "System | None" = None) -> tuple[float, float]:
        """Return a 95% interval of the score, or of the difference from another system.

        It is that of the paired bootstrap.
        """
        before = other.reciprocal_ranks if other else np.zeros_like(self.reciprocal_ranks)
        return paired_interval([before], [self.reciprocal_ranks], groups=self.groups)


def compare_systems(
    encoders: Mapping[str, Encoder], metric: RetrievalMetric, weight: float = DEFAULT_WEIGHT
) -> list[System]:
    """Search for the targets of a dev metric: by BM25, then by encoders, alone and with BM25.

    If the queries of the metric are divided, those that judge are compared, and the others choose
    weights.

    Args:
        encoders: The encoders by name.
        metric: The queries and their targets.
        weight: The weight of BM25 beside encoders, if the queries were made of documents. Such
            queries would choose one that is too high.
    """
    words, language = _word_scores(metric)
    log_line(f"BM25: {language}")
    return _compared(encoders, metric, words, weight)


def _compared(
    encoders: Mapping[str, Encoder], metric: RetrievalMetric, words: Scores, weight: float
) -> list[System]:
    answers = metric.answers
    groups = metric.groups[metric.judging]
    ignored = answers.ignored(0, len(metric.queries))

    def system(name: str, mode: str, encoder: str, weight: float, ranks: Ranks) -> System:
        return System(name, mode, encoder, weight, 100 / ranks, groups)

    words = answers.scores(words)
    ranks = retrieval.ranks_among(words, answers.target, ignored)[metric.judging]
    systems = [system(BM25, "lexical", "", 1.0, ranks)]
    for name, encoder in encoders.items():
        embeddings = encode_pairs(encoder, metric.queries, metric.targets, metric.batch_size)
        queries, targets = map(normalize, embeddings)
        similarities = answers.scores(queries @ targets.T)
        ranks = retrieval.ranks_among(similarities, answers.target, ignored)[metric.judging]
        systems.append(system(name, "dense", name, 0.0, ranks))
        contest = Contest(similarities, words, answers.target, ignored)
        chosen, ranks = _hybrid(contest, metric, weight)
        systems.append(system(f"{name} + {BM25}", "hybrid", name, chosen, ranks))
    return systems


def words_find_as_much(name: str, encoder: Encoder, metric: RetrievalMetric) -> bool | None:
    """Return whether BM25 alone is not significantly worse than an encoder alone, and say so.

    Return None if too few documents tell. Queries all of whose words stand in their targets do not
    count.

    Args:
        name: The name of the encoder.
        encoder: One that has not trained on the documents.
        metric: Queries that were made of documents.
    """
    metric = metric.without_repetitions()
    documents, _ = metric.sample
    if documents < FEWEST_DOCUMENTS:
        log_line(
            f"{BM25} weighs {DEFAULT_WEIGHT:g} beside an encoder: made queries of "
            f"{counted(documents, 'document{s}')} cannot tell whether more is better"
        )
        return None
    scores, _ = _word_scores(metric)
    words, dense, _ = _compared({name: encoder}, metric, scores, DEFAULT_WEIGHT)
    is_worse = dense.interval(words)[0] > 0
    log_line(
        f"{BM25} alone is {'' if is_worse else 'not '}clearly worse than {name} alone "
        f"({words.score:.2f} and {dense.score:.2f} on {metric.units}), so beside an encoder it "
        f"weighs {made_weight(not is_worse):g}"
    )
    return not is_worse


def made_weight(is_as_good: bool | None) -> float:
    """Return the weight of BM25 beside an encoder, if the queries were made of documents.

    On people's questions, collections whose words find as much as the encoder gained by the higher
    weight, and others lost by it (docs/records/search.md).
    """
    return HIGHER_WEIGHT if is_as_good else DEFAULT_WEIGHT


def _word_scores(metric: RetrievalMetric) -> tuple[Scores, LanguageChoice]:
    """Return the BM25 score of each target for each query, and the language of the words.

    Copies of a target are indexed once.
    """
    copies = groups_of([canonical(text) for text in metric.targets])
    texts = [metric.targets[row] for row in first_rows(copies)]
    choice = choose_language(texts)
    index = LexicalIndex.build(texts, choice.language)
    return np.stack([index.scores(query) for query in metric.queries])[:, copies], choice


def _hybrid(contest: Contest, metric: RetrievalMetric, of_made: float) -> tuple[float, Ranks]:
    """Return the weight of BM25, and the ranks of the queries that judge.

    Queries that were made of documents have the weight `of_made`. If all others choose and judge,
    each half of the groups is ranked with the weight of the other half.
    """
    if metric.is_made:
        return of_made, contest.of(metric.judging).ranks(of_made)
    if metric.judges is not None:
        weight = contest.of(metric.choosing).weight()
        return weight, contest.of(metric.judging).ranks(weight)
    ranks = np.zeros(len(metric.groups))
    is_even = metric.groups % 2 == 0
    for half in (is_even, ~is_even):
        ranks[half] = contest.of(half).ranks(contest.of(~half).weight())
    return contest.weight(), ranks


def recommend(systems: Sequence[System], preferred: str = "") -> System:
    """Return the first system, by preference, that is not significantly worse than the best one.

    Encoders with BM25 are preferred to encoders alone, and these to BM25 alone: on people's
    questions, BM25 with the weight of a run was never significantly worse than leaving it out, and
    often better (docs/records/search.md).

    Args:
        systems: The systems, from simple to complex.
        preferred: The name of the encoder that comes first among the systems of a mode. Without
            one, the simplest comes first.
    """
    candidates = [system for system in systems if system.mode != "hybrid" or system.weight]
    best = max(candidates, key=lambda system: system.score)
    in_order = sorted(
        candidates, key=lambda each: (PREFERRED_MODES.index(each.mode), each.encoder != preferred)
    )
    return next(system for system in in_order if system is best or best.interval(system)[0] <= 0)


def describe(systems: Sequence[System]) -> list[str]:
    """Return lines of a table: each system's score, its interval and the weight of BM25."""
    width = max(len(system.name) for system in systems)
    lines = []
    for system in systems:
        low, high = system.interval()
        line = f"  {system.name:<{width}}  {system.score:6.2f}  ({low:.2f} to {high:.2f})"
        weight = describe_weight(system.mode, system.weight)
        lines.append(f"{line}  weight of BM25: {weight}" if weight else line)
    return lines


def describe_weight(mode: str, weight: float) -> str:
    """Return the chosen weight of BM25 in hybrid search. Otherwise, return an empty string."""
    if mode != "hybrid":
        return ""
    return f"{weight:g}" if weight else "0, which leaves BM25 out"


def describe_difference(higher: System, lower: System) -> str:
    """Return how much higher one score is than another, with an interval."""
    low, high = higher.interval(lower)
    gain = f"{higher.score - lower.score:.2f} higher than that of {lower.name}"
    doubt = "" if low > 0 else ", but this may be chance"
    interval = f"95% interval {low:+.2f} to {high:+.2f}"
    return f"The score of {higher.name} is {gain}{doubt} ({interval})."
