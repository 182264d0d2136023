"""An encoder with the heads of labelled tasks: predictions, dev scores, and the files that hold them."""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Shaped

from diffcse_jax.apps.finetune.tasks import TaskData
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, counted
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.evaluation.metrics import Metric, paired_interval
from diffcse_jax.evaluation.sts import correlations
from diffcse_jax.io import expand_path, find_run, replace_dir, write_json, write_tensors
from diffcse_jax.losses.finetune import AVERAGE, Task, build_head, features, head_of, score_name
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.checkpoints import read_encoder, read_parameters
from diffcse_jax.run_folder.records import Measured, Outcomes


class TaskModel:
    """An encoder with a head for each task.

    Args:
        encoder: Computes embeddings.
        tasks: The tasks by name. Their classes are known.
        heads: The parameters of the heads by task, as NumPy arrays.
    """

    def __init__(self, encoder: Encoder, tasks: Mapping[str, Task], heads: Mapping[str, Params]):
        self.encoder, self.tasks, self.heads = encoder, dict(tasks), dict(heads)

    @classmethod
    def from_run(cls, path: str | Path) -> "TaskModel":
        """Load the model that a fine-tuning has selected so far, or one of its checkpoints.

        Raises:
            CheckpointError: The path is not a fine-tuning, or it cannot be read.
        """
        path = expand_path(path)
        workdir = find_run(path) or path
        saved = read_encoder(path)
        tasks = saved.config.finetune.tasks
        if not tasks:
            raise CheckpointError(f"{workdir} is not a fine-tuning: its configuration has no finetune.tasks")
        params, _ = read_parameters(workdir, None if path == workdir else int(path.name))
        return cls(SentenceEncoder.from_saved(saved), tasks, heads_in(params, tasks))

    def decide(
        self, name: str, texts: Sequence[tuple[str, ...]], batch_size: int = 64
    ) -> Shaped[np.ndarray, " rows"]:  # fmt: skip
        """Return the predicted class numbers, or the values, of a task's rows of one or two sentences."""
        task = self.tasks[name]
        outputs = np.asarray(_head_outputs(task, self.heads[name], embed(self.encoder, texts, batch_size)))
        if task.loss == "cross_entropy":
            return outputs.argmax(axis=1)
        return outputs[:, 0] if task.loss == "squared_error" else (outputs[:, 0] > 0).astype(np.int64)

    def predict(
        self, name: str, texts: Sequence[str] | Sequence[tuple[str, ...]], batch_size: int = 64
    ) -> list[str] | list[float]:
        """Return the predicted class, or value, of each sentence or pair.

        Raises:
            ConfigError: There is no such task, or a row has the wrong number of sentences.
        """
        if name not in self.tasks:
            raise ConfigError(f"there is no task {name!r}. Known: {', '.join(self.tasks)}")
        task = self.tasks[name]
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        if wrong := next((row for row in rows if len(row) != len(task.texts)), None):
            raise ConfigError(f"task {name} takes rows of {len(task.texts)}: {task.texts}; got {wrong!r}")
        values = self.decide(name, rows, batch_size).tolist() if rows else []
        return [task.labels[value] for value in values] if task.labels else values


def embed(
    encoder: Any, texts: Sequence[tuple[str, ...]], batch_size: int, **options: Any
) -> tuple[Float32[np.ndarray, "rows hidden"], ...]:
    """Return the embeddings of the first sentences of rows and, if they are pairs, of the second ones."""
    sentences = [text for row in texts for text in row]
    embeddings = encoder.encode(sentences, batch_size, prompt=encoder.prompts.default, **options)
    return tuple(np.moveaxis(embeddings.reshape(len(texts), -1, embeddings.shape[-1]), 1, 0))


@partial(jax.jit, static_argnames="task")
def _head_outputs(
    task: Task, head: Params, sides: tuple[Float32[jax.Array, "rows hidden"], ...]
) -> Float32[jax.Array, "rows outputs"]:
    definition = layers.definition(build_head(task, sides[0].shape[1]))
    with jax.default_matmul_precision("highest"):
        return layers.bind(definition, head)(features(task, sides))


def heads_in(params: Params, tasks: Mapping[str, Task]) -> dict[str, Params]:
    """Return the heads among the parameters of a run, by task."""
    return {name: layers.subset(params, head_of(name)) for name in tasks}


@dataclasses.dataclass(frozen=True)
class TasksMetric(Metric):
    """The average score of the tasks, which chooses the checkpoint."""

    tasks: Sequence[TaskData]

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        golds = [data.dev.labels.astype(float) if data.task.kind == "regression" else None for data in self.tasks]
        return paired_interval(before, after, golds, ranked=False)

    @property
    def units(self) -> str:
        return counted(sum(len(data.dev) for data in self.tasks), "dev row{s}")

    def measure(self, model: Any) -> Measured:
        """Return the scores of a `TaskModel`, and the correctness of each dev row (0 or 100) or its value."""
        scores, outcomes = {}, []
        for data in self.tasks:
            name, values = score_name(data.name, data.task), model.decide(data.name, data.dev.texts, self.batch_size)
            if data.task.kind == "classification":
                values = 100.0 * (values == data.dev.labels)
                scores[name] = float(values.mean())
            else:  # 0 if values are constant
                scores[name] = correlations(values.astype(float), data.dev.labels.astype(float))["pearson"]
            outcomes.append(values.astype(float).tolist())
        return Measured(scores | {AVERAGE: sum(scores.values()) / len(scores)}, outcomes)


class TaskEvaluation(DevEvaluation):
    """The dev evaluation of a fine-tuning, whose models are not encoders."""

    def measure(self, model: TaskModel) -> Measured:
        """Return the scores of the tasks; see `TasksMetric`."""
        return self.chosen.measure(model)


def write_outputs(workdir: Path, tasks: Sequence[TaskData], batch_size: int) -> list[Path]:
    """Write the heads and predictions of a run, and return the files.

    They are `tasks/TASK/task.json`, `tasks/TASK/head.safetensors`, `predictions/TASK-dev.csv` and
    `predictions/TASK-test.csv`.
    """
    model, files = TaskModel.from_run(workdir), []
    (workdir / "predictions").mkdir(exist_ok=True)
    for data in tasks:
        folder = workdir / "tasks" / data.name
        with replace_dir(folder) as new:
            write_tensors(new / "head.safetensors", model.heads[data.name])
            write_json(new / "task.json", dataclasses.asdict(data.task) | {"pooler": model.encoder.pooler})
        files += [folder / "task.json", folder / "head.safetensors"]
        for split, rows in (("dev", data.dev), ("test", data.test)):
            if rows is None:
                continue
            values = model.predict(data.name, rows.texts, batch_size)
            files.append(workdir / "predictions" / f"{data.name}-{split}.csv")
            with files[-1].open("w", encoding="utf-8", newline="") as file:
                texts = [value if isinstance(value, str) else f"{value:.6g}" for value in values]
                names = [row.id for row in rows.rows]
                csv.writer(file, lineterminator="\n").writerows([("id", "prediction"), *zip(names, texts, strict=True)])
    return files
