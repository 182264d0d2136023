"""An encoder with a head for each task, and what it predicts."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

from diffcse_jax import io
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.losses.finetune import LabelledTask, build_head, features, head_of
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.checkpoints import read_encoder, read_parameters


@dataclasses.dataclass
class TaskModel:
    """An encoder with a head for each task."""

    encoder: Encoder
    tasks: Mapping[str, LabelledTask]  # by name; their classes are known
    heads: Mapping[str, Params]  # by task, as NumPy arrays

    @classmethod
    def from_run(cls, path: str | Path) -> "TaskModel":
        """Load the model that a fine-tuning has selected so far, or one of its checkpoints.

        Raises a `CheckpointError` if the path is neither.
        """
        path = io.expand_path(path)
        saved = read_encoder(path)
        tasks = saved.config.finetune.tasks
        if not tasks:
            raise CheckpointError(
                f"{path} is not a fine-tuning: its configuration has no finetune.tasks"
            )
        params, _ = read_parameters(path)
        heads = {name: layers.subset(params, head_of(name)) for name in tasks}
        return cls(SentenceEncoder.from_saved(saved), tasks, heads)

    def predict(
        self, name: str, texts: Sequence[str] | Sequence[tuple[str, ...]], batch_size: int = 64
    ) -> list[str] | list[float]:
        """Return the predicted class, or value, of each sentence or pair.

        Raises a `ConfigError` if there is no such task, if a single text is given, or if a row has
        the wrong number of sentences.
        """
        if name not in self.tasks:
            raise ConfigError(f"there is no task {name!r}. Known: {', '.join(self.tasks)}")
        if isinstance(texts, str):
            raise ConfigError(f"task {name} takes a list of rows, not one text: {texts[:60]!r}")
        task = self.tasks[name]
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        if wrong := next((row for row in rows if len(row) != len(task.texts)), None):
            raise ConfigError(
                f"task {name} takes rows of {len(task.texts)}: {task.texts}; got {wrong!r}"
            )
        values = self.decide(name, rows, batch_size).tolist() if rows else []
        return [task.labels[value] for value in values] if task.labels else values

    def decide(
        self, name: str, texts: Sequence[tuple[str, ...]], batch_size: int
    ) -> Shaped[np.ndarray, " rows"]:
        """Return the predicted class numbers, or the values, of rows of one or two sentences."""
        task = self.tasks[name]
        sides = embed(self.encoder, texts, batch_size)
        outputs = np.asarray(_head_outputs(task, self.heads[name], sides))
        if task.loss == "cross_entropy":
            return outputs.argmax(axis=1)
        if task.loss == "squared_error":
            return outputs[:, 0]
        return (outputs[:, 0] > 0).astype(np.int64)


def embed(
    encoder: Any, texts: Sequence[tuple[str, ...]], batch_size: int, **options: Any
) -> Float32[np.ndarray, "sides rows hidden"]:
    """Return the embeddings of the first sentences of rows and, for pairs, of the second."""
    sentences = [text for row in texts for text in row]
    embeddings = encoder.encode(
        sentences, batch_size=batch_size, prompt=encoder.prompts.default, **options
    )
    return np.moveaxis(embeddings.reshape(len(texts), -1, embeddings.shape[-1]), 1, 0)


@partial(jax.jit, static_argnames="task")
def _head_outputs(
    task: LabelledTask, head: Params, sides: Float[Array, "sides rows hidden"]
) -> Float[Array, "rows outputs"]:
    definition = layers.definition(build_head(task, sides.shape[-1]))
    with jax.default_matmul_precision("highest"):
        return layers.bind(definition, head)(features(task, tuple(sides)))
