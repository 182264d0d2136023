"""An encoder with the heads of labelled tasks: sentences, or pairs of them, to classes and numbers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int

from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.losses.finetune import Task, build_head, features, head_of
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.saved_encoder import read_encoder, read_parameters


class TaskModel:
    """An encoder with a head for each task.

    Args:
        encoder: sentences to vectors.
        tasks: by name, their classes known.
        heads: the parameters of their heads by name, as NumPy arrays.
    """

    def __init__(self, encoder: Encoder, tasks: Mapping[str, Task], heads: Mapping[str, Params]):
        self.encoder, self.tasks, self.heads = encoder, dict(tasks), dict(heads)

    @classmethod
    def from_run(cls, path: str | Path) -> "TaskModel":
        """The model that a fine-tuning has selected so far, or that of one checkpoint in it.

        Raises:
            CheckpointError: nothing there to read, or no fine-tuning.
        """
        path = expand_path(path)
        workdir = find_run(path) or path
        saved = read_encoder(path)
        tasks = saved.config.finetune.tasks
        if not tasks:
            raise CheckpointError(f"{workdir} is no fine-tuning: its configuration has no finetune.tasks")
        params, _ = read_parameters(workdir, None if path == workdir else int(path.name))
        return cls(SentenceEncoder.from_saved(saved), tasks, heads_in(params, tasks))

    def outputs(
        self, name: str, texts: Sequence[tuple[str, ...]], batch_size: int = 64
    ) -> Float32[np.ndarray, "rows outputs"]:
        """The outputs of a task's head: logits, or values.

        Args:
            name: of the task.
            texts: of every row its sentence, or both.
            batch_size: sentences per encoding batch.
        """
        sentences = [text for row in texts for text in row]
        vectors = self.encoder.encode(sentences, batch_size=batch_size)
        vectors = vectors.reshape(len(texts), -1, vectors.shape[-1])
        return outputs_of(self.tasks[name], self.heads[name], np.moveaxis(vectors, 1, 0))

    def predict(self, name: str, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[str] | list[float]:
        """Classes of sentences or pairs, or their values.

        Raises:
            ConfigError: no such task, or pairs where it takes single sentences, or the other way round.
        """
        if name not in self.tasks:
            raise ConfigError(f"no task {name!r}; there are: {', '.join(self.tasks)}")
        task = self.tasks[name]
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        if wrong := next((row for row in rows if len(row) != len(task.texts)), None):
            raise ConfigError(f"task {name} takes rows of {len(task.texts)}: {task.texts}; got {wrong!r}")
        return named(task, decided(task, self.outputs(name, rows))) if rows else []


def heads_in(params: Params, tasks: Mapping[str, Task]) -> dict[str, Params]:
    """The heads among the parameters of a run, by the names of their tasks."""
    return {name: parameters.subset(params, head_of(name)) for name in tasks}


def outputs_of(
    task: Task, head: Params, vectors: Float32[np.ndarray, "sentences rows hidden"]
) -> Float32[np.ndarray, "rows outputs"]:
    """The outputs of a task's head over vectors of the first sentences of all rows, and of the second ones."""
    return np.asarray(_compiled_head(task, vectors.shape[-1])(head, tuple(vectors)))


@functools.lru_cache
def _compiled_head(task: Task, size: int) -> Callable[..., Any]:
    definition = parameters.definition(build_head(task, size))

    @jax.jit
    def outputs(head: Params, vectors: tuple[jax.Array, ...]) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return parameters.bind(definition, head)(features(task, vectors))

    return outputs


def decided(task: Task, outputs: Float32[np.ndarray, "rows outputs"]) -> np.ndarray:
    """The numbers of classes, or the values, that outputs stand for."""
    if task.chosen_loss == "squared_error":
        return outputs[:, 0]
    if task.chosen_loss == "binary_cross_entropy":
        return (outputs[:, 0] > 0).astype(np.int64)
    return outputs.argmax(axis=1)


def named(task: Task, values: Int[np.ndarray, " rows"] | Float32[np.ndarray, " rows"]) -> list[str] | list[float]:
    """Classes by their labels; values as they are."""
    return [task.labels[value] for value in values] if task.labels else [float(value) for value in values]
