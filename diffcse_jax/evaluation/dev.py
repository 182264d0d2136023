"""The dev evaluation of a training run: the metric that chooses the best checkpoint, and others.

All processes of a run must call the encoder in the same way, because otherwise they wait for one
another forever. Therefore the first process decides on the metrics and reads their text. The others
get both from it and need no files.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import numpy as np

from diffcse_jax.config import Config, EvalConfig
from diffcse_jax.config.groups import MASKED_ACCURACY
from diffcse_jax.data.split import Split
from diffcse_jax.documents.sentences import canonical
from diffcse_jax.errors import counted
from diffcse_jax.evaluation import CachedEncoder, Encoder, Known, search_collections
from diffcse_jax.evaluation.dev_texts import AllTexts, Texts, missing_sts_data, read_texts
from diffcse_jax.evaluation.masked_lm import MaskedAccuracy, TrainingTokens
from diffcse_jax.evaluation.metrics import (
    AgreementMetric,
    CollectionMetric,
    CorrelationMetric,
    Metric,
    Model,
    QueryMetric,
    RetrievalMetric,
    division,
    general_cosines,
)
from diffcse_jax.evaluation.queries import TrainingTexts
from diffcse_jax.evaluation.senteval_data import is_local, senteval_folder
from diffcse_jax.evaluation.sts import STSB, ScoredPairs
from diffcse_jax.hosts import decided_by_first, log_line
from diffcse_jax.io import json_digest
from diffcse_jax.models.unread import added_up
from diffcse_jax.run_folder.records import Measured, Outcomes

MOST_TRAINED = 0.05  # the share of dev queries that a run may train on before it says so
DRIFT_STSB, DRIFT_AGREEMENT = "guard_stsb_spearman", "guard_agreement"  # scores of general quality


@dataclasses.dataclass(frozen=True)
class DevEvaluation(Generic[Model]):
    """The dev evaluation of a run, whose models may be encoders or, in fine-tuning, more."""

    chosen: Metric[Model]  # chooses the best checkpoint
    text: str  # identifies the text of that metric
    also: Sequence[Metric[Model]] = ()  # the metrics of `eval.beside`, which are only reported
    hold: Sequence[
        Metric[Model]
    ] = ()  # those of `eval.hold`, which the exported model may not lower
    # Measures general quality, which training on a narrow domain may lower.
    drift_check: Metric[Model] | None = None
    # Queries of all documents, which compare searches that need no training.
    of_all: RetrievalMetric | None = None

    @property
    def metric(self) -> str:
        return self.chosen.name

    @property
    def drift_metric(self) -> str:
        """The score of general quality, for `eval.max_drop`; empty if it is not measured."""
        return self.drift_check.name if self.drift_check else ""

    def measure(self, model: Model) -> Measured:
        """Return the scores of a model, and what the chosen metric summarises."""
        model = self.prepared(model)
        with added_up():
            chosen = self.chosen.measure(model)
            also = {metric.name: metric.measure(model).scores[metric.name] for metric in self.also}
            drift = self.drift_check.measure(model).scores if self.drift_check else {}
        return Measured(chosen.scores | also | drift, chosen.outcomes)

    def held(self, model: Model) -> dict[str, Outcomes]:
        """Return the outcomes of the metrics of `eval.hold`, by name."""
        model = self.prepared(model)
        return {metric.name: metric.measure(model).outcomes for metric in self.hold}

    def prepared(self, model: Model) -> Model:
        """Return the model as all metrics of one evaluation use it."""
        return model

    def regressions(
        self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]
    ) -> list[str]:
        """Return the metrics of `eval.hold` in which the model is significantly worse, as text."""
        worse = []
        for metric in self.hold:
            name = metric.name
            low, high = metric.interval(start[name], model[name])
            if high < 0:
                interval = f"95% interval {low:+.2f} to {high:+.2f} over {metric.units}"
                worse.append(
                    f"{name} {np.mean(model[name]):.2f}, was {np.mean(start[name]):.2f} "
                    f"({interval})"
                )
        return worse


@dataclasses.dataclass(frozen=True)
class EncoderEvaluation(DevEvaluation[Encoder]):
    """The dev evaluation of encoders, whose metrics share embeddings."""

    known: Known | None = None  # what all models share, if they encode documents alike

    def prepared(self, model: Encoder) -> Encoder:
        return CachedEncoder(model, self.known)


def build_dev_evaluation(
    config: Config,
    training: TrainingTexts,
    start: Callable[[], Encoder] | None = None,
    split: Split | None = None,
    tokens: TrainingTokens | None = None,
    *,
    others: Sequence[Metric[Encoder]] = (),
    keeps_documents: bool = False,
) -> EncoderEvaluation:
    """Build the evaluation that `eval` describes, the same on all processes.

    If STS data is needed and missing, `halves_retrieval` on training sentences replaces the metric
    that chooses, and other metrics that need the data are left out, with a warning on standard
    error.

    Args:
        config: The run's configuration.
        training: Starts a pass over the sentences of the training text.
        start: Returns the encoder of the starting checkpoint, for the drift check. None: no drift
            check.
        split: The documents of the text, if they are open already. They are not read again.
        tokens: The tokens of the training text, for `masked_accuracy`.
        others: Metrics that are only reported, beside those of `eval.beside`.
        keeps_documents: All models encode documents as the start does, so each text is encoded
            once for all evaluations.
    """
    options = config.eval

    def read() -> AllTexts:
        texts = read_texts(config, training, split, tokens)
        return texts._replace(chosen=_divided(texts.chosen))

    chosen, also, hold, of_all = decided_by_first(read)
    return EncoderEvaluation(
        chosen=_metric_of(chosen, options.batch_size, tokens),
        text=json_digest(chosen),
        also=[*(_metric_of(texts, options.batch_size, tokens) for texts in also), *others],
        hold=[_metric_of(texts, options.batch_size) for texts in hold],
        drift_check=build_drift_check(options, start)
        if start and (options.guard or options.max_drop)
        else None,
        known={} if keeps_documents else None,
        of_all=_retrieval(of_all, options.batch_size) if of_all else None,
    )


def warn_of_trained_queries(evaluation: DevEvaluation, training: TrainingTexts) -> None:
    """Say so if pairs of a file judge a run that trains on their first texts."""
    metric = evaluation.chosen
    if not isinstance(metric, RetrievalMetric) or not metric.name.startswith("pairs_retrieval"):
        return
    queries = {canonical(query) for query in metric.queries}

    def check() -> None:
        trained = queries.intersection(map(canonical, training()))
        if len(trained) > MOST_TRAINED * len(queries):
            log_line(
                f"warning: {len(trained):,} of {counted(len(queries), 'quer{y}')} of {metric.name} "
                "are also texts to train on, so their scores say little about others. Keep some "
                "pairs out of data.train_file, for eval.pairs_file alone"
            )

    decided_by_first(check)


def build_drift_check(options: EvalConfig, start: Callable[[], Encoder]) -> Metric[Encoder]:
    """Use Spearman on STS-B dev or, if that is not found, agreement with the start.

    Agreement compares similarities with those of the starting checkpoint.
    """

    def stsb_dev() -> ScoredPairs | None:  # nothing is downloaded
        if not is_local(options.data_dir) or missing_sts_data(options.data_dir, ["STSBenchmark"]):
            return None
        return STSB.load(senteval_folder(options.data_dir), "dev")

    if stsb := decided_by_first(stsb_dev):
        return CorrelationMetric(DRIFT_STSB, options.batch_size, {DRIFT_STSB: ScoredPairs(*stsb)})
    cosines = general_cosines(start(), options.batch_size)
    return AgreementMetric(DRIFT_AGREEMENT, options.batch_size, cosines)


def _metric_of(
    texts: Texts, batch_size: int, tokens: TrainingTokens | None = None
) -> Metric[Encoder]:
    """Return the metric of a text.

    Other processes receive its text as JSON, with lists instead of tuples.
    """
    name = texts["name"]
    if name == MASKED_ACCURACY:
        assert tokens is not None  # otherwise there are no texts
        return MaskedAccuracy(name, batch_size, texts["token_ids"], tokens)
    if "queries" in texts:
        return _retrieval(texts, batch_size)
    if "collection" in texts:
        collection = search_collections.Collection(*texts["collection"])
        return CollectionMetric(name, batch_size, collection, judges=texts.get("judges"))
    return CorrelationMetric(
        name, batch_size, {key: ScoredPairs(*each) for key, each in texts["sets"].items()}
    )


def _retrieval(texts: Texts, batch_size: int) -> RetrievalMetric:
    return RetrievalMetric.of_rows(texts["name"], batch_size, texts["queries"], texts.get("judges"))


def _divided(texts: Texts) -> Texts:
    """Return the text of the metric that chooses, and which queries judge if there are enough."""
    if "queries" not in texts and "collection" not in texts:
        return texts
    metric = _metric_of(texts, batch_size=1)
    assert isinstance(metric, QueryMetric)
    judges = division(metric)
    return texts | {"judges": judges} if judges else texts
