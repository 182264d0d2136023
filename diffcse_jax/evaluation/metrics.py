"""Dev metrics of an encoder, with intervals of the difference between two models."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Float

from diffcse_jax.evaluation import Encoder, encode_pairs, retrieval, search_collections
from diffcse_jax.evaluation.sts import ScoredPairs, correlations, similarities
from diffcse_jax.models.pooling import normalize, uniformity
from diffcse_jax.run_folder.records import Measured, Outcomes

SYMMETRIC_METRICS = {"neighbours_retrieval", "halves_retrieval"}  # both texts are of one kind
RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Metric:
    """A dev metric."""

    name: str
    batch_size: int
    units: ClassVar[Any] = ""  # what intervals are computed over, such as `1,000 queries of 300 documents`

    def measure(self, encoder: Encoder) -> Measured:
        """Return scores x 100 by name, and what the metric summarises: a value per query or pair, by data set."""
        raise NotImplementedError

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        """Return a 95% interval of the metric's difference between two models."""
        return paired_interval(before, after)


@dataclasses.dataclass(frozen=True)
class RetrievalMetric(Metric):
    """Mean reciprocal rank of each query's target among all targets. Also recalls, and the uniformity of the texts."""

    queries: Sequence[str]
    targets: Sequence[str]
    passages: Sequence[int] | None = None  # the passage of each query; see `retrieval.target_ranks`
    document_of: Sequence[int] | None = None  # the document of each query; intervals resample documents

    def measure(self, encoder: Encoder) -> Measured:
        symmetric = self.name in SYMMETRIC_METRICS
        first, second = encode_pairs(encoder, self.queries, self.targets, self.batch_size, symmetric=symmetric)
        ranks = retrieval.target_ranks(first, second, self.passages)
        scores = {f"{self.name}_{name}": value for name, value in retrieval.rank_scores(ranks).items()}
        scores = {self.name: scores.pop(f"{self.name}_mrr")} | scores
        scores["uniformity"] = float(uniformity(jnp.asarray(np.concatenate([first, second]))))
        return Measured(scores, [(100 / ranks).tolist()])

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        return paired_interval(before, after, documents=self.document_of)

    @property
    def units(self) -> str:
        queries, documents = len(self.queries), len(set(self.document_of or ()))
        return f"{queries:,} queries" + (f" of {documents:,} documents" if 0 < documents < queries else "")


@dataclasses.dataclass(frozen=True)
class CorrelationMetric(Metric):
    """Spearman's correlation of cosine similarities with human ratings: on one set of pairs, or the mean over all."""

    sets: Mapping[str, ScoredPairs]  # by the name of their score

    def measure(self, encoder: Encoder) -> Measured:
        systems = similarities(encoder, self.sets, self.batch_size)
        scores = {name: correlations(systems[name], pairs.gold)["spearman"] for name, pairs in self.sets.items()}
        scores = {self.name: sum(scores.values()) / len(scores)} | scores
        return Measured(scores, [systems[name].tolist() for name in self.counted])

    @property
    def counted(self) -> Mapping[str, ScoredPairs]:
        """The sets that the metric is computed on."""
        return {self.name: self.sets[self.name]} if self.name in self.sets else self.sets

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        return paired_interval(before, after, [np.array(pairs.gold) for pairs in self.counted.values()])

    @property
    def units(self) -> str:
        return f"{sum(len(pairs.gold) for pairs in self.counted.values()):,} pairs"


@dataclasses.dataclass(frozen=True)
class CollectionMetric(Metric):
    """nDCG@10 on a search collection."""

    collection: search_collections.Collection

    def measure(self, encoder: Encoder) -> Measured:
        ranking = retrieval.search(encoder, self.collection, self.batch_size)
        by_query = retrieval.measure(self.collection.judgements, ranking)
        means = {f"{self.name}_{name}": float(np.mean([*each.values()])) for name, each in by_query.items()}
        chosen = means.pop(f"{self.name}_{retrieval.CHOOSES}")
        return Measured({self.name: chosen} | means, [[*by_query[retrieval.CHOOSES].values()]])

    @property
    def units(self) -> str:
        return f"{len(self.collection.queries):,} queries"


@dataclasses.dataclass(frozen=True)
class AgreementMetric(Metric):
    """Spearman's correlation of the cosine similarities of general sentences with those of another encoder."""

    others: Float[np.ndarray, " pairs"]

    def measure(self, encoder: Encoder) -> Measured:
        agreement = correlations(self.others, general_cosines(encoder, self.batch_size))
        return Measured({self.name: agreement["spearman"]}, [])


def general_sentences() -> list[str]:
    """Return plain English sentences on everyday subjects, shipped with the package."""
    return Path(__file__).with_name("general_sentences.txt").read_text(encoding="utf-8").splitlines()


def general_cosines(encoder: Encoder, batch_size: int) -> Float[np.ndarray, " pairs"]:
    """Return the cosine similarity of each pair of `general_sentences`."""
    sentences = general_sentences()
    embeddings = normalize(encoder.encode(sentences, batch_size=batch_size, prompt=encoder.prompts.default))
    return (embeddings @ embeddings.T)[np.triu_indices(len(sentences), k=1)]


def paired_interval(
    before: Sequence[Any],
    after: Sequence[Any],
    golds: Sequence[Float[np.ndarray, " _"] | None] = (None,),
    *,
    ranked: bool = True,
    documents: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Return a 95% interval of the difference between two models on the same data, by the paired bootstrap.

    Each resample draws as many documents, queries or pairs of a data set as it has, with replacement, and computes the
    metric of both models on the same draw (Efron and Tibshirani 1993, percentile method).

    Args:
        before, after: The scores of the models per item, by data set.
        golds: For each data set, the ratings to correlate with. None: scores are averaged.
        ranked: Correlate ranks (Spearman), not values (Pearson).
        documents: The document of each item, if scores are averaged: documents are drawn with all of their items.
            None: items are drawn.
    """

    def correlation(scores: np.ndarray, gold: np.ndarray) -> float:
        values = [scipy.stats.rankdata(each) for each in (scores, gold)] if ranked else [scores, gold]
        return 0.0 if min(map(np.ptp, values)) == 0 else 100 * float(np.corrcoef(values[0], values[1])[0, 1])

    rng = np.random.default_rng(0)
    differences = np.zeros(RESAMPLES)
    for first, second, gold in zip(map(np.array, before), map(np.array, after), golds, strict=True):
        if gold is None:
            document_of = np.arange(len(first)) if documents is None else np.unique(documents, return_inverse=True)[1]
            gains, sizes = np.bincount(document_of, second - first), np.bincount(document_of)
            drawn = rng.integers(len(sizes), size=(RESAMPLES, len(sizes)))
            differences += gains[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
            continue
        for index, rows in enumerate(rng.integers(len(first), size=(RESAMPLES, len(first)))):
            differences[index] += correlation(second[rows], gold[rows]) - correlation(first[rows], gold[rows])
    low, high = np.percentile(differences / len(golds), (2.5, 97.5))
    return float(low), float(high)
