"""Dev metrics of a training run. One of them chooses the best checkpoint.

All processes of a run must call the encoder in the same way, because otherwise they wait for one another forever.
Therefore the first process decides on the metrics and reads their text. The others get both from it and need no files.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.stats
from jaxtyping import Float

from diffcse_jax.config import Config, EvalConfig
from diffcse_jax.errors import DataError, counted
from diffcse_jax.evaluation import CachedEncoder, Encoder, retrieval, search_collections
from diffcse_jax.evaluation.geometry import uniformity
from diffcse_jax.evaluation.held_out import HELD_OUT_PAIRS, held_out_queries, training_halves
from diffcse_jax.evaluation.retrieval import read_retrieval_pairs
from diffcse_jax.evaluation.senteval_data import Form, is_local, senteval_folder
from diffcse_jax.evaluation.sts import SICKR, STSB, ScoredPairs, correlations, read_pairs, similarities, size_problem
from diffcse_jax.hosts import decided_by_first, log_line
from diffcse_jax.io import expand_path, json_digest
from diffcse_jax.models.pooling import normalize
from diffcse_jax.run_folder.records import FEWEST, Measured, Outcomes

STS_METRICS = {"stsb_spearman", "average_spearman"}
SYMMETRIC_METRICS = {"neighbours_retrieval", "halves_retrieval"}  # both texts are of one kind
STS_TASKS = {"STSBenchmark": (STSB, "stsb_spearman"), "SICKRelatedness": (SICKR, "sickr_spearman")}
DRIFT_STSB, DRIFT_AGREEMENT = "guard_stsb_spearman", "guard_agreement"  # scores of general quality
MOST_PAIRS = 1000
MOST_HOLD_PAIRS = 4000  # they are scored only once, and find losses that 1,000 pairs cannot tell from chance
RESAMPLES = 1000

Training = Callable[[], Iterable[str]]
Texts = dict[str, Any]  # a metric's `name`, and its text: `queries`, a `collection` or `sets` of rated pairs


# Metrics


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
    passages: Sequence[int] | None = None  # of each query; see `retrieval.target_ranks`
    document_of: Sequence[int] | None = None  # of each query; intervals resample documents

    def measure(self, encoder: Encoder) -> Measured:
        symmetric = self.name in SYMMETRIC_METRICS
        sides = retrieval.encode_pairs(encoder, self.queries, self.targets, self.batch_size, symmetric=symmetric)
        ranks = retrieval.target_ranks(*sides, self.passages)
        scores = {f"{self.name}_{name}": value for name, value in retrieval.rank_scores(ranks).items()}
        scores = {self.name: scores.pop(f"{self.name}_mrr")} | scores
        return Measured(scores | {"uniformity": uniformity(np.concatenate(sides))}, [(100 / ranks).tolist()])

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        return paired_interval(before, after, documents=self.document_of)

    @property
    def units(self) -> str:
        documents = len(set(self.document_of or self.queries))
        of = f" of {documents:,} documents" if self.document_of and documents < len(self.queries) else ""
        return f"{len(self.queries):,} queries{of}"


@dataclasses.dataclass(frozen=True)
class CorrelationMetric(Metric):
    """Spearman's correlation of cosine similarities with human ratings: of one set of pairs, or the average of all."""

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
        ranking = search_collections.search(encoder, self.collection, self.batch_size)
        by_query = search_collections.measure(self.collection.judgements, ranking)
        means = {f"{self.name}_{measure}": float(np.mean([*each.values()])) for measure, each in by_query.items()}
        chosen = means.pop(f"{self.name}_{search_collections.CHOOSES}")
        return Measured({self.name: chosen} | means, [[*by_query[search_collections.CHOOSES].values()]])

    @property
    def units(self) -> str:
        return f"{len(self.collection.queries):,} queries"


@dataclasses.dataclass(frozen=True)
class AgreementMetric(Metric):
    """Spearman's correlation of the cosine similarities of general sentences with those of another encoder."""

    others: Float[np.ndarray, " pairs"]

    def measure(self, encoder: Encoder) -> Measured:
        agreement = scipy.stats.spearmanr(self.others, _general_cosines(encoder, self.batch_size)).statistic
        return Measured({self.name: 100 * float(agreement)}, [])


def paired_interval(
    before: Outcomes,
    after: Outcomes,
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
        documents: The document of each item of averaged scores: a draw has all items of a document or none. None: each
            item is drawn by itself.
    """

    def correlation(scores: np.ndarray, gold: np.ndarray) -> float:
        values = [scipy.stats.rankdata(each) for each in (scores, gold)] if ranked else [scores, gold]
        return 0.0 if min(map(np.ptp, values)) == 0 else 100 * float(np.corrcoef(values[0], values[1])[0, 1])

    rng = np.random.default_rng(0)
    differences = np.zeros(RESAMPLES)
    for first, second, gold in zip(map(np.array, before), map(np.array, after), golds, strict=True):
        if gold is None:
            of = np.unique(np.arange(len(first)) if documents is None else documents, return_inverse=True)[1]
            gains, sizes = np.bincount(of, second - first), np.bincount(of)
            drawn = rng.integers(len(sizes), size=(RESAMPLES, len(sizes)))
            differences += gains[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
            continue
        for index, rows in enumerate(rng.integers(len(first), size=(RESAMPLES, len(first)))):
            differences[index] += correlation(second[rows], gold[rows]) - correlation(first[rows], gold[rows])
    low, high = np.percentile(differences / len(golds), (2.5, 97.5))
    return float(low), float(high)


# The evaluation


@dataclasses.dataclass(frozen=True)
class DevEvaluation:
    """The dev evaluation of a run."""

    chosen: Any  # the metric that chooses the best checkpoint; in fine-tuning it measures another kind of model
    text: str  # identifies the text of that metric
    also: Sequence[Metric] = ()  # metrics of `eval.beside`, which are only reported
    hold: Sequence[RetrievalMetric] = ()  # metrics of `eval.hold`, which the exported model may not lower
    drift_check: Metric | None = None  # of general quality, which training on a narrow domain may lower

    @property
    def metric(self) -> str:
        return self.chosen.name

    @property
    def drift_metric(self) -> str:
        """The score of general quality, for `eval.max_drop`; empty if it is not measured."""
        return self.drift_check.name if self.drift_check else ""

    def measure(self, encoder: Any) -> Measured:
        """Return the scores of an encoder, and what the chosen metric summarises."""
        encoder = CachedEncoder(encoder)
        chosen = self.chosen.measure(encoder)
        also = {metric.name: metric.measure(encoder).scores[metric.name] for metric in self.also}
        drift = self.drift_check.measure(encoder).scores if self.drift_check else {}
        return Measured(chosen.scores | also | drift, chosen.outcomes)

    def held(self, encoder: Encoder) -> dict[str, Outcomes]:
        """Return the outcomes of the metrics of `eval.hold`, by name."""
        encoder = CachedEncoder(encoder)
        return {metric.name: metric.measure(encoder).outcomes for metric in self.hold}

    def regressions(self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]) -> list[str]:
        """Return the metrics of `eval.hold` in which the model is significantly worse, as text."""
        found = []
        for metric in self.hold:
            name = metric.name
            low, high = metric.interval(start[name], model[name])
            if high < 0:
                interval = f"95% interval {low:+.2f} to {high:+.2f} over {metric.units}"
                found.append(f"{name} {np.mean(model[name]):.2f}, was {np.mean(start[name]):.2f} ({interval})")
        return found


def build_dev_evaluation(
    config: Config, training: Training, start: Callable[[], Encoder] | None = None
) -> DevEvaluation:
    """Build the evaluation that `eval` describes, the same on all processes.

    If STS data is needed and missing, the halves of training sentences replace it as the metric that chooses, and other
    metrics that need it are left out. Standard error says so.

    Args:
        config: The run's configuration.
        training: Starts a pass over the sentences of the training text.
        start: Returns the encoder of the starting checkpoint, for the drift check. None: no drift check.
    """
    options = config.eval
    chosen, also, hold = decided_by_first(lambda: _all_texts(config, training))
    return DevEvaluation(
        chosen=_metric_of(chosen, options.batch_size),
        text=json_digest(chosen),
        also=[_metric_of(texts, options.batch_size) for texts in also],
        hold=[_metric_of(texts, options.batch_size) for texts in hold],
        drift_check=build_drift_check(options, start) if start and (options.guard or options.max_drop) else None,
    )


def build_drift_check(options: EvalConfig, start: Callable[[], Encoder]) -> Metric:
    """Use Spearman on STS-B dev or, if that is not found, agreement with the starting checkpoint's similarities."""

    def stsb_dev() -> ScoredPairs | None:  # nothing is downloaded
        if not is_local(options.data_dir) or _missing_sts_data(options.data_dir, ["STSBenchmark"]):
            return None
        return STSB.load(senteval_folder(options.data_dir), "dev")

    if stsb := decided_by_first(stsb_dev):
        return CorrelationMetric(DRIFT_STSB, options.batch_size, {DRIFT_STSB: ScoredPairs(*stsb)})
    return AgreementMetric(DRIFT_AGREEMENT, options.batch_size, _general_cosines(start(), options.batch_size))


def general_sentences() -> list[str]:
    """Return plain English sentences on everyday subjects, shipped with the package."""
    return Path(__file__).with_name("general_sentences.txt").read_text(encoding="utf-8").splitlines()


def _general_cosines(encoder: Encoder, batch_size: int) -> Float[np.ndarray, " pairs"]:
    sentences = general_sentences()
    embeddings = normalize(encoder.encode(sentences, batch_size=batch_size, prompt=encoder.prompts.default))
    return (embeddings @ embeddings.T)[np.triu_indices(len(sentences), k=1)]


# The text of metrics


def _all_texts(config: Config, training: Training) -> tuple[Texts, list[Texts], list[Texts]]:
    """Return the text of the metric that chooses, of the metrics of `eval.beside`, and of those of `eval.hold`."""
    options, metric = config.eval, config.eval.metric
    also = [name for name in dict.fromkeys(options.beside) if name != metric]
    needs_sts = STS_METRICS.intersection([metric, *also])
    if problem := _missing_sts_data(options.data_dir, options.tasks) if needs_sts else "":
        if metric in STS_METRICS:
            metric = "halves_retrieval"
            log_line(f"warning: eval.metric={options.metric} is replaced by {metric}, which needs no labels: {problem}")
        if left_out := STS_METRICS.intersection(also):
            log_line(f"notice: eval.beside: {', '.join(sorted(left_out))} is left out: {problem}")
        also = [name for name in also if name not in {*STS_METRICS, metric}]
    chosen, *others = [_texts(config, name, training) for name in (metric, *also)]
    hold = []
    for name in dict.fromkeys(options.hold):
        try:
            texts = _texts(config, name, training, MOST_HOLD_PAIRS)
            if (count := len(texts["queries"])) < FEWEST:
                raise DataError(f"it has {counted(count, 'pair{s}')} and needs at least {FEWEST}")
            hold.append(texts)
        except DataError as error:
            log_line(f"notice: eval.hold: {name} is left out: {error}")
    return chosen, others, hold


def _texts(config: Config, metric: str, training: Training, most: int = MOST_PAIRS) -> Texts:
    """Return a metric and its text; of pairs made from documents or sentences, at most `most`."""
    options = config.eval
    kind, _, file = metric.partition(":")
    texts: Texts = {"name": metric}
    if metric in STS_METRICS:
        return texts | {"sets": _sts_pairs(options)}
    if metric in HELD_OUT_PAIRS and config.data.held_out:
        return texts | {"queries": held_out_queries(config.data, metric, most)}
    if metric == "halves_retrieval":
        if len(found := training_halves(training, most)) < 2:
            raise DataError(
                f"data.train_file={config.data.train_file} has too few sentences. The dev metric halves_retrieval "
                "needs two different sentences of at least two words"
            )
        return texts | {"queries": found}
    if kind == "pairs_retrieval":
        return texts | {"queries": read_retrieval_pairs(file or options.pairs_file)}
    if kind == search_collections.KIND:
        return texts | {"collection": search_collections.read_collection(expand_path(file))}
    path = expand_path(options.pairs_file)
    own = read_pairs(path, Form(0, (1, 2)))
    if np.ptp(own.gold) == 0:
        raise DataError(f"{path}: eval.metric=pairs_spearman needs at least two pairs with different scores")
    return texts | {"sets": {metric: own}}


def _metric_of(texts: Texts, batch_size: int) -> Any:
    """Return the metric of `_texts`, which may have been JSON."""
    name = texts["name"]
    if "queries" in texts:
        return RetrievalMetric(name, batch_size, *map(list, zip(*texts["queries"], strict=True)))
    if "collection" in texts:
        return CollectionMetric(name, batch_size, search_collections.Collection(*texts["collection"]))
    return CorrelationMetric(name, batch_size, {key: ScoredPairs(*each) for key, each in texts["sets"].items()})


def _missing_sts_data(data_dir: str, tasks: Sequence[str]) -> str:
    """Say why these tasks cannot be scored, or return an empty string."""
    try:
        folder = senteval_folder(data_dir)
    except DataError as error:
        return f"{error} (eval.data_dir)"
    missing = [path for task in tasks for path in STS_TASKS[task][0].missing(folder, "dev")]
    return f"not found: {', '.join(map(str, missing))}" if missing else ""


def _sts_pairs(options: EvalConfig) -> dict[str, ScoredPairs]:
    """Read the dev splits of `eval.tasks`, by the name of their score."""
    folder = senteval_folder(options.data_dir)
    found = {}
    for name in options.tasks:
        task, score = STS_TASKS[name]
        found[score] = task.load(folder, "dev")
        if problem := size_problem(name, {"n": len(found[score].gold)}, "dev"):
            log_line(f"notice: {name} in {folder} is not the official data: {problem}")
    return found
