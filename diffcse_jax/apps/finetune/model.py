"""An encoder with the heads of labelled tasks: predictions and dev scores."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int

from diffcse_jax.apps.finetune.tasks import TaskData
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError, counted
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.evaluation.sts import correlations
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.losses.finetune import AVERAGE, Task, build_head, features, head_of, score_name
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.records import Measured
from diffcse_jax.run_folder.saved_encoder import read_encoder, read_parameters


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

    def outputs(
        self, name: str, texts: Sequence[tuple[str, ...]], batch_size: int = 64
    ) -> Float32[np.ndarray, "rows outputs"]:
        """Return the outputs of a task's head for rows of one or two sentences: logits, or values."""
        sentences = [text for row in texts for text in row]
        prompt = self.encoder.prompts.default  # as in training
        embeddings = self.encoder.encode(sentences, batch_size=batch_size, prompt=prompt)
        sides = np.moveaxis(embeddings.reshape(len(texts), -1, embeddings.shape[-1]), 1, 0)
        head = _compiled_head(self.tasks[name], embeddings.shape[-1])
        return np.asarray(head(self.heads[name], tuple(sides)))

    def predict(self, name: str, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[str] | list[float]:
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
        return named(task, decided(task, self.outputs(name, rows))) if rows else []


def heads_in(params: Params, tasks: Mapping[str, Task]) -> dict[str, Params]:
    """Return the heads among the parameters of a run, by task."""
    return {name: parameters.subset(params, head_of(name)) for name in tasks}


@functools.lru_cache
def _compiled_head(task: Task, size: int) -> Callable[..., Any]:
    definition = parameters.definition(build_head(task, size))

    @jax.jit
    def outputs(head: Params, sides: tuple[jax.Array, ...]) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return parameters.bind(definition, head)(features(task, sides))

    return outputs


def decided(task: Task, outputs: Float32[np.ndarray, "rows outputs"]) -> np.ndarray:
    """Return the predicted class numbers, or the values."""
    if task.chosen_loss == "squared_error":
        return outputs[:, 0]
    if task.chosen_loss == "binary_cross_entropy":
        return (outputs[:, 0] > 0).astype(np.int64)
    return outputs.argmax(axis=1)


def named(task: Task, values: Int[np.ndarray, " rows"] | Float32[np.ndarray, " rows"]) -> list[str] | list[float]:
    """Return the names of class numbers, or the values as they are."""
    return [task.labels[value] for value in values] if task.labels else [float(value) for value in values]


@dataclasses.dataclass(frozen=True)
class TasksMetric:
    """The average score of the tasks, which chooses the checkpoint; see `evaluation.dev.RetrievalMetric`."""

    tasks: Sequence[TaskData]
    batch_size: int  # sentences per encoding batch
    name = AVERAGE
    ranked = False

    @property
    def golds(self) -> list[np.ndarray | None]:
        return [data.dev.labels.astype(float) if data.task.kind == "regression" else None for data in self.tasks]

    @property
    def units(self) -> str:
        return counted(sum(len(data.dev) for data in self.tasks), "dev row{s}")


class TaskEvaluation(DevEvaluation):
    """The dev evaluation of a fine-tuning."""

    def measure(self, model: TaskModel) -> Measured:
        """Return the scores, and the correctness of each dev row (0 or 100) or its value."""
        scores, outcomes = {}, []
        for data in self.chosen.tasks:
            outputs = decided(data.task, model.outputs(data.name, data.dev.texts, self.chosen.batch_size))
            values = outputs if data.task.kind == "regression" else 100.0 * (outputs == data.dev.labels)
            outcomes.append(values.astype(float).tolist())
            name, golds = score_name(data.name, data.task), data.dev.labels.astype(float)
            if data.task.kind == "classification":
                scores[name] = float(values.mean())
            else:
                scores[name] = correlations(values.astype(float), golds)["pearson"]  # 0 if values are constant
        scores[AVERAGE] = sum(scores.values()) / len(scores)
        drift = {self.drift_check.name: self.drift_check.score(model.encoder)} if self.drift_check else {}
        return Measured(scores | drift, outcomes)
