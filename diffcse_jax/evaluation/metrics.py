"""Dev metrics of an encoder, with intervals of the difference between two models."""

import dataclasses
import functools
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Bool, Float, Int

from diffcse_jax.documents.document import digest
from diffcse_jax.documents.sentences import canonical, words
from diffcse_jax.errors import counted
from diffcse_jax.evaluation import Encoder, encode_pairs, retrieval, search_collections
from diffcse_jax.evaluation.answers import Answers, answers_of, first_rows, groups_of
from diffcse_jax.evaluation.sts import ScoredPairs, correlations, similarities
from diffcse_jax.models.pooling import normalize, uniformity
from diffcse_jax.run_folder.records import Measured, Outcomes

SYMMETRIC_METRICS = {"neighbours_retrieval", "halves_retrieval"}  # both texts are of one kind
RESAMPLES = 1000
DIVIDED_FROM = 50  # groups: each half then has more than the fewest of a verdict

Model = TypeVar("Model")
Values = Sequence[float] | Float[np.ndarray, " items"]  # one for each query or pair


@dataclasses.dataclass(frozen=True)
class Metric(Generic[Model]):
    """A dev metric of a kind of model: of encoders, or in fine-tuning of encoders with heads."""

    name: str
    batch_size: int
    # The aspect in which a model with a higher score is better, such as ` as a masked LM`.
    aspect: ClassVar[str] = ""

    @property
    def units(self) -> str:
        """What intervals are over, such as `1,000 queries of 300 documents`."""
        return ""

    @property
    def sample(self) -> tuple[int, str]:
        """The number of independent items, which intervals resample: `(300, "documents")`."""
        return 0, ""

    @property
    def remark(self) -> str:
        """What a reader must know about the scores, for the verdict."""
        return ""

    def measure(self, model: Model) -> Measured:
        """Return scores x 100 by name, and what the metric summarises.

        That is a value per query or pair, by data set.
        """
        raise NotImplementedError

    def judged(self, measured: Measured) -> float:
        """Return the score that a verdict states."""
        return measured.scores[self.name]

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        """Return a 95% interval of the difference between the scores of two models in a verdict."""
        return paired_interval(before, after)


@dataclasses.dataclass(frozen=True)
class QueryMetric(Metric[Encoder]):
    """A mean over queries. Some of them may choose the best checkpoint, and the others judge it."""

    # Whether each query judges and does not choose (`division`). None: all queries do both.
    judges: Sequence[bool] | None = dataclasses.field(default=None, kw_only=True)

    @property
    def identities(self) -> Sequence[str]:
        """A text for each query that tells it from the others."""
        raise NotImplementedError

    @property
    def groups(self) -> Int[np.ndarray, " queries"]:
        """The group of each query, such as its document. Intervals resample groups."""
        raise NotImplementedError

    @functools.cached_property
    def judging(self) -> Bool[np.ndarray, " queries"]:
        """Which queries a verdict is about."""
        return np.ones(len(self.groups), bool) if self.judges is None else np.array(self.judges)

    @functools.cached_property
    def choosing(self) -> Bool[np.ndarray, " queries"]:
        """Which queries the dev score is the mean of."""
        return self.judging if self.judges is None else ~self.judging

    def judged(self, measured: Measured) -> float:
        if self.judges is None:
            return super().judged(measured)
        return float(np.mean(np.array(measured.outcomes[0])[self.judging]))

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        first, second = ([np.array(values)[self.judging]] for (values,) in (before, after))
        return paired_interval(first, second, groups=self.groups[self.judging])

    @property
    def remark(self) -> str:
        same = "The same queries chose the checkpoint, which favours it a little."
        return same if self.judges is None else ""

    @property
    def role(self) -> str:
        """What the queries of a verdict did not do, for `units`."""
        return "" if self.judges is None else " that chose nothing"


@dataclasses.dataclass(frozen=True)
class RetrievalMetric(QueryMetric):
    """Mean reciprocal rank of each query's target. Also recalls, and the uniformity of the texts.

    Texts that occur more than once are explained in `answers`.
    """

    queries: Sequence[str]
    targets: Sequence[str]
    passages: Sequence[int] | None = None  # the passage of each target; see `answers_of`
    document_of: Sequence[int] | None = None  # the document of each query

    @classmethod
    def of_rows(
        cls,
        name: str,
        batch_size: int,
        rows: Sequence[Sequence[str | int]],
        judges: Sequence[bool] | None = None,
    ) -> "RetrievalMetric":
        """Return the metric of rows of a query, its target and perhaps the other fields."""
        columns: Iterator[Any] = map(list, zip(*rows, strict=True))
        return cls(name, batch_size, *columns, judges=judges)

    @property
    def is_made(self) -> bool:
        """Whether the queries were made of documents."""
        return self.document_of is not None

    def without_repetitions(self) -> "RetrievalMetric":
        """Return the metric without queries all of whose words stand in their targets.

        Search by words finds nearly all of these, such as the keywords of a passage.
        """
        pairs = zip(self.queries, self.targets, strict=True)
        rows = [row for row, (query, target) in enumerate(pairs) if not _repeats(query, target)]

        def kept(values: Sequence[Any] | None) -> Any:
            return None if values is None else [values[row] for row in rows]

        columns = ("queries", "targets", "passages", "document_of", "judges")
        return dataclasses.replace(self, **{name: kept(getattr(self, name)) for name in columns})

    @functools.cached_property
    def answers(self) -> Answers:
        """Which distinct targets answer which queries."""
        return answers_of(self.queries, self.targets, self.passages)

    @property
    def identities(self) -> Sequence[str]:
        pairs = zip(self.queries, self.targets, strict=True)
        return [f"{canonical(query)}\n{canonical(target)}" for query, target in pairs]

    @functools.cached_property
    def groups(self) -> Int[np.ndarray, " queries"]:
        """The group of each query. Queries of a document, or with a text in common, are in one."""
        texts = [list(map(canonical, each)) for each in (self.queries, self.targets)]
        return groups_of(*texts, *([] if self.document_of is None else [self.document_of]))

    def measure(self, model: Encoder) -> Measured:
        symmetric = self.name in SYMMETRIC_METRICS
        texts = self.queries, self.targets
        first, second = encode_pairs(model, *texts, self.batch_size, symmetric=symmetric)
        ranks = retrieval.target_ranks(first, second, self.answers)
        by_name = retrieval.rank_scores(ranks[self.choosing])
        scores = {self.name: by_name.pop("mrr")}
        scores |= {f"{self.name}_{name}": value for name, value in by_name.items()}
        distinct = [first_rows(groups_of(list(map(canonical, each)))) for each in texts]
        each_once = np.concatenate([first[distinct[0]], second[distinct[1]]])
        scores["uniformity"] = float(uniformity(jnp.asarray(each_once)))
        return Measured(scores, [(100 / ranks).tolist()])

    @property
    def units(self) -> str:
        queries = self.judging.sum()
        (groups, _) = self.sample
        if groups == queries:
            return f"{queries:,} queries{self.role}"
        what = "group{s} with equal texts" if self.document_of is None else "document{s}"
        return f"{queries:,} queries of {counted(groups, what)}{self.role}"

    @property
    def sample(self) -> tuple[int, str]:
        groups = len(first_rows(self.groups[self.judging]))
        if self.document_of is not None:
            return groups, "documents"
        return groups, "queries" if groups == self.judging.sum() else "groups with equal texts"


@dataclasses.dataclass(frozen=True)
class CorrelationMetric(Metric[Encoder]):
    """Spearman's correlation of cosine similarities with human ratings.

    It is that on one set of pairs, or the mean over all.
    """

    sets: Mapping[str, ScoredPairs]  # by the name of their score

    def measure(self, model: Encoder) -> Measured:
        systems = similarities(model, self.sets, self.batch_size)
        scores = {
            name: correlations(systems[name], pairs.gold)["spearman"]  # x 100
            for name, pairs in self.sets.items()
        }
        scores = {self.name: sum(scores.values()) / len(scores)} | scores
        return Measured(scores, [systems[name].tolist() for name in self.counted])

    @property
    def counted(self) -> Mapping[str, ScoredPairs]:
        """The sets that the metric is computed on."""
        return {self.name: self.sets[self.name]} if self.name in self.sets else self.sets

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        golds = [np.array(pairs.gold) for pairs in self.counted.values()]
        return paired_interval(before, after, golds)

    @property
    def units(self) -> str:
        return f"{self.sample[0]:,} pairs"

    @property
    def sample(self) -> tuple[int, str]:
        return sum(len(pairs.gold) for pairs in self.counted.values()), "pairs"


@dataclasses.dataclass(frozen=True)
class CollectionMetric(QueryMetric):
    """nDCG@10 on a search collection."""

    collection: search_collections.Collection

    @property
    def identities(self) -> Sequence[str]:
        return [*self.collection.judgements]

    @property
    def groups(self) -> Int[np.ndarray, " queries"]:
        return np.arange(len(self.collection.judgements))

    def measure(self, model: Encoder) -> Measured:
        ranking = retrieval.search(model, self.collection, self.batch_size)
        by_query = retrieval.measure(self.collection.judgements, ranking)
        means = {
            name: float(np.mean(np.array([*each.values()])[self.choosing]))
            for name, each in by_query.items()
        }
        scores = {self.name: means.pop(retrieval.CHOOSES)}
        scores |= {f"{self.name}_{name}": mean for name, mean in means.items()}
        return Measured(scores, [[*by_query[retrieval.CHOOSES].values()]])

    @property
    def units(self) -> str:
        return f"{self.sample[0]:,} queries{self.role}"

    @property
    def sample(self) -> tuple[int, str]:
        return int(self.judging.sum()), "queries"


@dataclasses.dataclass(frozen=True)
class AgreementMetric(Metric[Encoder]):
    """Spearman's correlation of cosine similarities of general sentences with another encoder's."""

    others: Float[np.ndarray, " pairs"]

    def measure(self, model: Encoder) -> Measured:
        agreement = correlations(self.others, general_cosines(model, self.batch_size))
        return Measured({self.name: agreement["spearman"]}, [])


def _repeats(query: str, target: str) -> bool:
    """Return whether all words of a query stand in its target, whatever their punctuation."""
    of_query, of_target = (
        {canonical(word).strip(string.punctuation) for word in words(text)}
        for text in (query, target)
    )
    return of_query <= of_target | {""}


def division(metric: QueryMetric) -> list[bool] | None:
    """Return whether each query of an undivided metric should judge. None: they are too few.

    Half of the groups judge. A hash of one text of each group chooses them, so it matters neither
    in which order the queries are nor how many a group has.
    """
    groups = metric.groups.tolist()
    names: dict[int, str] = {}
    for group, text in zip(groups, metric.identities, strict=True):
        names[group] = min(text, names.get(group, text))
    if len(names) < DIVIDED_FROM:
        return None
    by_hash = sorted(names, key=lambda group: digest(f"judges\n{names[group]}"))
    judging = set(by_hash[: -(-len(names) // 2)])
    return [group in judging for group in groups]


def general_sentences() -> list[str]:
    """Return plain English sentences on everyday subjects, shipped with the package."""
    path = Path(__file__).with_name("general_sentences.txt")
    return path.read_text(encoding="utf-8").splitlines()


def general_cosines(encoder: Encoder, batch_size: int) -> Float[np.ndarray, " pairs"]:
    """Return the cosine similarity of each pair of `general_sentences`."""
    sentences = general_sentences()
    prompt = encoder.prompts.default
    embeddings = normalize(encoder.encode(sentences, batch_size=batch_size, prompt=prompt))
    return (embeddings @ embeddings.T)[np.triu_indices(len(sentences), k=1)]


def paired_interval(
    before: Sequence[Values],
    after: Sequence[Values],
    golds: Sequence[Float[np.ndarray, " _"] | None] = (None,),
    *,
    ranked: bool = True,
    groups: Int[np.ndarray, " items"] | None = None,
) -> tuple[float, float]:
    """Return a 95% interval of the difference between two models on the same data.

    It is that of the paired bootstrap (Efron and Tibshirani 1993, percentile method). Each resample
    draws as many groups, queries or pairs of a data set as it has, with replacement, and computes
    the metric of both models on the same draw.

    Args:
        before: The scores of one model per item, by data set.
        after: The scores of the other model.
        golds: For each data set, the ratings to correlate with. None: scores are averaged.
        ranked: Correlate ranks (Spearman), not values (Pearson).
        groups: The group of each item, if scores are averaged: groups are drawn with all of their
            items. None, or a single group: items are drawn.
    """
    rng = np.random.default_rng(0)
    differences = np.zeros(RESAMPLES)
    for first, second, gold in zip(map(np.array, before), map(np.array, after), golds, strict=True):
        if gold is None:
            differences += _resampled_means(second - first, groups, rng)
            continue
        drawn = rng.integers(len(first), size=(RESAMPLES, len(first)))
        for index, rows in enumerate(drawn):
            gained = _correlation(second[rows], gold[rows], ranked=ranked)
            differences[index] += gained - _correlation(first[rows], gold[rows], ranked=ranked)
    low, high = np.percentile(differences / len(golds), (2.5, 97.5))
    return float(low), float(high)


def _resampled_means(
    gains: Float[np.ndarray, " items"],
    groups: Int[np.ndarray, " items"] | None,
    rng: np.random.Generator,
) -> Float[np.ndarray, " resamples"]:
    if groups is None or len(np.unique(groups)) == 1:
        groups = np.arange(len(gains))
    group_of = np.unique(groups, return_inverse=True)[1]
    sums = np.bincount(group_of, gains)
    sizes = np.bincount(group_of)
    drawn = rng.integers(len(sizes), size=(RESAMPLES, len(sizes)))
    return sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)


def _correlation(
    scores: Float[np.ndarray, " items"],
    gold: Float[np.ndarray, " items"],
    *,
    ranked: bool,
) -> float:
    values = [scipy.stats.rankdata(each) for each in (scores, gold)] if ranked else [scores, gold]
    if min(map(np.ptp, values)) == 0:
        return 0.0
    return 100 * float(np.corrcoef(values[0], values[1])[0, 1])
