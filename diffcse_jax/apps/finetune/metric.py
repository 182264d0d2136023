"""The dev metric of a fine-tuning: the average score of its tasks."""

import dataclasses
from collections.abc import Sequence

from diffcse_jax.apps.finetune.model import TaskModel
from diffcse_jax.apps.finetune.tasks import TaskData, labels_of
from diffcse_jax.errors import counted
from diffcse_jax.evaluation.metrics import Metric, paired_interval
from diffcse_jax.evaluation.sts import correlations
from diffcse_jax.losses.finetune import AVERAGE, score_name
from diffcse_jax.run_folder.records import Measured, Outcomes


@dataclasses.dataclass(frozen=True)
class TasksMetric(Metric[TaskModel]):
    """The average score of the tasks, which chooses the checkpoint."""

    tasks: Sequence[TaskData]

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        golds = [
            labels_of(data.dev).astype(float) if data.task.kind == "regression" else None
            for data in self.tasks
        ]
        return paired_interval(before, after, golds, ranked=False)

    @property
    def units(self) -> str:
        return counted(self.sample[0], "dev row{s}")

    @property
    def sample(self) -> tuple[int, str]:
        return sum(len(data.dev) for data in self.tasks), "dev rows"

    def measure(self, model: TaskModel) -> Measured:
        """Return the scores of a model, and the outcome of each dev row.

        An outcome is a value, or for classes 0 (wrong) or 100 (correct).
        """
        scores = {}
        outcomes = []
        for data in self.tasks:
            name = score_name(data.name, data.task)
            labels = labels_of(data.dev)
            values = model.decide(data.name, [row.texts for row in data.dev], self.batch_size)
            if data.task.kind == "classification":
                values = 100.0 * (values == labels)
                scores[name] = float(values.mean())
            else:  # 0 if values are constant
                scores[name] = correlations(values.astype(float), labels.astype(float))["pearson"]
            outcomes.append(values.astype(float).tolist())
        return Measured(scores | {AVERAGE: sum(scores.values()) / len(scores)}, outcomes)
