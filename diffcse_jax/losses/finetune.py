"""Losses of labelled tasks, for fine-tuning on several tasks at a time.

They follow the report on adjusting dropout. A task is a group of keys in the table
`finetune.tasks`. Each batch belongs to one task. `diffcse finetune` reads the data, mixes the
batches and scores the tasks.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from diffcse_jax.losses import Loss, Metrics, PretrainedCheckpoints, RunInfo, Table
from diffcse_jax.models.forward import SharedForward, row_keys
from diffcse_jax.models.heads import TaskHead
from diffcse_jax.models.layers import Network
from diffcse_jax.options import option

AVERAGE = "average"  # the dev score that chooses the checkpoint: the mean of the tasks' scores


@dataclasses.dataclass(frozen=True)
class LabelledTask:
    """A labelled task: its files, its head and its loss."""

    file: str = option(
        "", "training rows: a table with named columns (csv, tsv, json, jsonl, Parquet or Arrow)"
    )
    dev_file: str = option("", "dev rows; empty: the share dev_share of `file`")
    dev_share: float = option(
        0.1, "share of `file` used as dev rows, chosen by a hash of the text", low=0.0, high=0.5
    )
    test_file: str = option("", "rows without labels, for predictions; empty: no predictions")
    texts: tuple[str, ...] = option(
        ("sentence",), "column of the sentence, or the two columns of a sentence pair"
    )
    label: str = option("label", "column of the label or value")
    id: str = option("", "column with the names of the rows in predictions; empty: line numbers")
    kind: str = option(
        "classification",
        "kind of label: a class or a number",
        choices=("classification", "regression"),
    )
    labels: tuple[str, ...] = option(
        (), "the classes; empty: the classes of the training rows, sorted"
    )
    weight: float = option(1.0, "weight of the task's loss", low=0.0)
    ratio: int = option(1, "batches of this task in each block of batches", low=1)
    features: tuple[str, ...] = option(
        ("difference", "product"),
        "what the head reads of embeddings u, v: `first` u, `second` v, `difference` |u - v|, "
        "`product` u v, `cosine`",
        choices=("first", "second", "difference", "product", "cosine"),
    )
    depth: int = option(1, "dense layers of the head", low=1)
    activation: str = option(
        "tanh", "activation between the layers of the head", choices=("tanh", "relu", "gelu")
    )
    dropout: float = option(0.2, "dropout rate before each layer of the head", low=0.0, high=0.99)

    @property
    def is_pair(self) -> bool:
        """True if an example has two sentences."""
        return len(self.texts) == 2

    @property
    def loss(self) -> str:
        """The name of the loss in `FUNCTIONS`. The classes must be known."""
        if self.kind == "regression":
            return "squared_error"
        return "binary_cross_entropy" if len(self.labels) == 2 else "cross_entropy"

    @property
    def outputs(self) -> int:
        """The outputs of the head: a logit per class, a single one for two classes, or a value."""
        return len(self.labels) if self.loss == "cross_entropy" else 1


@dataclasses.dataclass(frozen=True)
class Finetune(Loss):
    """The loss of the task that a batch belongs to, on the embeddings that encoding gives."""

    weight: float = option(
        0.0, "weight of the labelled tasks, which `diffcse finetune` trains", low=0.0
    )
    tasks: Table = Table()  # noqa: RUF009 - groups of the type `LabelledTask` by name
    data_dir: str = option(
        "", "folder that file names are relative to; empty: the current one", changes="nothing"
    )
    stages: str = option(
        "together", "train all together, or the heads first", choices=("together", "heads_first")
    )
    heads_epochs: int = option(10, "passes over a task's rows while only the heads train", low=1)
    heads_steps: int = option(
        0, "steps of each head while only the heads train; 0: from heads_epochs", low=0
    )
    heads_learning_rate: float = option(
        3e-5, "peak learning rate while only the heads train", low=0.0
    )
    heads_weight_decay: float = option(
        1e-3, "decoupled weight decay while only the heads train", low=0.0
    )

    def active(self) -> Loss | None:
        return self if self.weight > 0 and self.tasks else None

    @property
    def panels(self) -> dict[str, tuple[str, ...]]:
        return {"loss by task": tuple(f"loss_{name}" for name in self.tasks)}

    @property
    def data_description(self) -> str:
        return ", ".join(
            f"{name} ({PurePath(task.file).name}, labelled)" for name, task in self.tasks.items()
        )

    needs = frozenset({"embeddings", "labels"})

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> dict[str, Network]:
        size = checkpoints.encoder.embedding_size(run.pooler)
        return {head_of(name): Network(build_head(task, size)) for name, task in self.tasks.items()}

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        ((name, labels),) = forward.batch.labels.items()
        task: LabelledTask = self.tasks[name]
        head = forward.computation.network(head_of(name))
        value = task_loss(task, head, forward.encoded_views, labels, key)
        return task.weight * value, {f"loss_{name}": value}


def task_loss(
    task: LabelledTask,
    head: TaskHead,
    embeddings: Sequence[Float[Array, "rows hidden"]],
    labels: Shaped[Array, " rows"],
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Return the mean loss of a task's rows, given the embeddings of their sentences.

    `key` is for dropout.
    """
    outputs = head(features(task, embeddings), keys=row_keys(key, len(labels)))
    return FUNCTIONS[task.loss](outputs, labels).mean()


def head_of(task: str) -> str:
    """Return the name of a task's head among the networks."""
    return f"head_{task}"


def score_name(name: str, task: LabelledTask) -> str:
    """Return the name of a task's dev score."""
    return f"{name}_{'pearson' if task.kind == 'regression' else 'accuracy'}"


def build_head(task: LabelledTask, size: int) -> partial[TaskHead]:
    """Return a function that builds the head of a task for embeddings of a size.

    The classes of the task must be known.
    """
    inputs = (
        sum(1 if name == "cosine" else size for name in task.features) if task.is_pair else size
    )
    return partial(
        TaskHead,
        inputs,
        size,
        task.outputs,
        depth=task.depth,
        activation=task.activation,
        rate=task.dropout,
    )


def features(
    task: LabelledTask, embeddings: Sequence[Float[Array, "rows hidden"]]
) -> Float[Array, "rows features"]:
    """Return what the head reads: embeddings of single sentences, or `task.features` of pairs."""
    if not task.is_pair:
        return embeddings[0]
    u, v = embeddings
    parts = {"first": u, "second": v, "difference": jnp.abs(u - v), "product": u * v}
    if "cosine" in task.features:
        norms = jnp.linalg.norm(u, axis=1) * jnp.linalg.norm(v, axis=1)
        parts["cosine"] = ((u * v).sum(axis=1) / jnp.maximum(norms, 1e-8))[:, None]
    return jnp.concatenate([parts[name] for name in task.features], axis=1)


FUNCTIONS = {  # of outputs and labels, one value per example
    "cross_entropy": optax.softmax_cross_entropy_with_integer_labels,
    "binary_cross_entropy": lambda logits, labels: optax.sigmoid_binary_cross_entropy(
        logits[:, 0], labels
    ),
    "squared_error": lambda outputs, labels: optax.squared_error(outputs[:, 0], labels),
}
