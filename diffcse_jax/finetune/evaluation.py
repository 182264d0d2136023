"""The dev scores of labelled tasks, whose average chooses the best checkpoint."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats
from jaxtyping import Float

from diffcse_jax.evaluation.dev import DriftCheck, paired_interval
from diffcse_jax.finetune.data import TaskData
from diffcse_jax.finetune.model import TaskModel, decided
from diffcse_jax.io import json_digest
from diffcse_jax.losses.finetune import AVERAGE, score_name
from diffcse_jax.run_folder.records import Measured, Outcomes


@dataclasses.dataclass(frozen=True)
class TaskEvaluation:
    """Accuracy of classes and Pearson's correlation of values on dev rows, x 100, and the average over tasks.

    Attributes:
        tasks: with their dev rows.
        batch_size: sentences per encoding batch.
        drift_check: Scores general quality. None: it is off.
    """

    tasks: Sequence[TaskData]
    batch_size: int
    drift_check: DriftCheck | None = None

    @property
    def metric(self) -> str:
        """The score that chooses."""
        return AVERAGE

    @property
    def text(self) -> str:
        """Identifies the rows of the tasks."""
        return json_digest([data.digest() for data in self.tasks])

    @property
    def drift_metric(self) -> str:
        """The name of the score of general quality; empty if it is off."""
        return self.drift_check.name if self.drift_check else ""

    @property
    def units(self) -> str:
        """The units that the interval is over."""
        return f"{sum(len(data.dev) for data in self.tasks):,} dev rows"

    @property
    def caveat(self) -> str:
        """None: the tasks are labelled."""
        return ""

    def measure(self, model: TaskModel) -> Measured:
        """The scores, and of each task the correctness of its dev rows (0 or 100), or their values."""
        scores, outcomes = {}, []
        for data in self.tasks:
            outputs = decided(data.task, model.outputs(data.name, data.dev.texts, self.batch_size))
            values = outputs if data.task.kind == "regression" else 100.0 * (outputs == data.dev.labels)
            outcomes.append(values.astype(float).tolist())
            scores[score_name(data.name, data.task)] = score(data, values)
        scores[AVERAGE] = sum(scores.values()) / len(scores)
        drift = {self.drift_check.name: self.drift_check.score(model.encoder)} if self.drift_check else {}
        return Measured(scores | drift, outcomes)

    def held(self, model: TaskModel) -> dict[str, Outcomes]:
        """Nothing: the metrics of `eval.hold` are of documents."""
        del model
        return {}

    def regressions(self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]) -> list[str]:
        """None of them."""
        del start, model
        return []

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        """A 95 % interval for the average of a model less that of the start."""
        golds = [data.dev.labels.astype(float) if data.task.kind == "regression" else None for data in self.tasks]
        return paired_interval(start, model, golds, ranked=False)


def score(data: TaskData, values: Float[np.ndarray, " rows"]) -> float:
    """The accuracy of outcomes, or the correlation of values with those of the rows, x 100."""
    if data.task.kind == "classification":
        return float(values.mean())
    if np.ptp(values) == 0 or np.ptp(data.dev.labels) == 0:  # a constant orders nothing
        return 0.0
    return 100 * float(scipy.stats.pearsonr(values.astype(float), data.dev.labels.astype(float)).statistic)
