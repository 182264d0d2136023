"""Labelled tasks on the sentence vector: fine-tuning of several at a time (the "adjusting dropout" report).

A task is a group of keys in the table `finetune.tasks`; a batch is of one task. `diffcse_jax/finetune` reads the data,
mixes the batches and scores the tasks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import SharedForward, row_keys
from diffcse_jax.models.heads import HEAD_ACTIVATIONS, TaskHead
from diffcse_jax.objectives import Metrics, Network, Objective, Starts
from diffcse_jax.options import Table, option, table

FEATURES = ("first", "second", "difference", "product", "cosine")
ENCODER = "encoder"  # as the name of stored vectors: those of the frozen encoder
AVERAGE = "average"  # the dev score that chooses: the mean of those of the tasks


@dataclasses.dataclass(frozen=True)
class Task:
    file: str = option("", "training rows: csv, tsv or jsonl (also .gz, .xz) with named columns")
    dev_file: str = option("", "dev rows; empty: those that dev_share takes of `file`")
    dev_share: float = option(
        0.1, "share of the rows of `file`, by a hash of their text, without a dev_file", low=0.0, high=0.5
    )
    test_file: str = option("", "rows without labels, for predictions; empty: none")
    texts: tuple[str, ...] = option(("sentence",), "the column of the sentence, or those of both sentences of a pair")
    label: str = option("label", "the column of the label, or of the value")
    id: str = option("", "the column of the rows' names in predictions; empty: their numbers, from 0")
    prediction: str = option("prediction", "the column's name in predictions")
    kind: str = option(
        "classification", "what a label is: a class, or a number", choices=("classification", "regression")
    )
    labels: tuple[str, ...] = option((), "the classes; empty: those of the training rows, in order")
    loss: str = option(
        "auto",
        "`cross_entropy`; `binary_cross_entropy` of a single logit, for two classes; `squared_error`; `auto`: the one "
        "for the kind and the number of classes",
        choices=("auto", "cross_entropy", "binary_cross_entropy", "squared_error"),
    )
    weight: float = option(1.0, "weight of its loss", low=0.0)
    ratio: int = option(1, "its batches in every block of batches, with finetune.mixing='ratio'", low=1)
    features: tuple[str, ...] = option(
        ("difference", "product"),
        "what a head reads of a pair of vectors u, v: `first` u, `second` v, `difference` |u - v|, `product` u v, "
        "`cosine`; side by side",
        choices=FEATURES,
    )
    depth: int = option(1, "dense layers of its head", low=1)
    activation: str = option("tanh", "between the layers", choices=tuple(HEAD_ACTIVATIONS))
    dropout: float = option(0.2, "dropout rate of the head, before each layer", low=0.0, high=0.99)

    @property
    def is_pair(self) -> bool:
        """True if an example has two sentences."""
        return len(self.texts) == 2

    @property
    def chosen_loss(self) -> str:
        """The loss, with `auto` decided; its classes are known."""
        if self.loss != "auto":
            return self.loss
        if self.kind == "regression":
            return "squared_error"
        return "binary_cross_entropy" if len(self.labels) == 2 else "cross_entropy"

    @property
    def outputs(self) -> int:
        """Numbers that its head gives."""
        return len(self.labels) if self.chosen_loss == "cross_entropy" else 1


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of the labelled tasks, which `diffcse finetune` trains", low=0.0)
    tasks: Table = table(Task, "the tasks by name")  # noqa: RUF009
    data_dir: str = option("", "folder that names of files are relative to; empty: the working directory")
    stages: str = option(
        "together",
        "`together`: the encoder and all heads from the start; `heads_first`: the heads alone on the vectors of the "
        "frozen encoder, which are computed once, then everything",
        choices=("together", "heads_first"),
    )
    heads_epochs: int = option(10, "passes over all rows in the stage of the heads", low=1)
    heads_steps: int = option(0, "steps of that stage; 0: as many as heads_epochs gives", low=0)
    heads_learning_rate: float = option(3e-5, "peak learning rate of that stage", low=0.0)
    heads_weight_decay: float = option(1e-3, "decoupled weight decay of that stage", low=0.0)
    mixing: str = option(
        "ratio",
        "the task of a batch: `ratio`, in blocks in which every task has its `ratio` of batches, in random order; "
        "`temperature`, drawn with probabilities that go as rows^(1 / finetune.temperature)",
        choices=("ratio", "temperature"),
    )
    temperature: float = option(1.0, "of the draws: 1 goes by rows, a large one takes all tasks alike", low=1.0)
    final_temperature: float = option(
        0.0, "which it rises or falls to, in equal steps, until the last batch; 0: it stays", low=0.0
    )
    predictions: str = option(
        "csv",
        "format of predictions: `csv`; `cs224n`, that of the report's course: a line `id TAB name`, then `id , value`",
        choices=("csv", "cs224n"),
    )


class Finetune(Objective):
    """The loss of the task that a batch is of, on the vectors that encoding gives."""

    options: Options

    @property
    def panels(self) -> Mapping[str, tuple[str, ...]]:
        """The loss of each task: that of a step is the one of its batch."""
        return {"loss by task": tuple(f"loss_{name}" for name in self.options.tasks)}

    @property
    def own_text(self) -> str:
        tasks = self.options.tasks.items()
        return ", ".join(f"{name} ({PurePath(task.file).name}, labelled)" for name, task in tasks)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"vectors", "labels"})

    def networks(self, starts: Starts) -> Mapping[str, Network]:
        """A head for each task."""
        size = starts.encoder.config.hidden_size
        return {head_of(name): Network(build_head(task, size)) for name, task in self.options.tasks.items()}

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del corrupted
        views = forward.batch
        ((name, labels),) = views.labels.items()
        task: Task = self.options.tasks[name]
        kept = (views.vectors or {}).get(ENCODER)
        vectors = forward.encoded_views if kept is None else tuple(jnp.moveaxis(kept, 1, 0))
        head = forward.computation.network(head_of(name))
        outputs = head(features(task, vectors), keys=row_keys(key, len(labels)))
        value = FUNCTIONS[task.chosen_loss](outputs, labels).mean()
        return task.weight * value, {f"loss_{name}": value}


def head_of(task: str) -> str:
    """The name of a task's head among the networks."""
    return f"head_{task}"


def score_name(name: str, task: Task) -> str:
    """The name of a task's dev score."""
    return f"{name}_{'pearson' if task.kind == 'regression' else 'accuracy'}"


def build_head(task: Task, size: int) -> partial[TaskHead]:
    """Makes the head of a task whose classes are known, for vectors of so many numbers."""
    inputs = sum(1 if name == "cosine" else size for name in task.features) if task.is_pair else size
    return partial(
        TaskHead, inputs, size, task.outputs, depth=task.depth, activation=task.activation, rate=task.dropout
    )


def features(task: Task, vectors: Sequence[Float[Array, "rows hidden"]]) -> Float[Array, "rows features"]:
    """The vectors of single sentences, or what `task.features` says of those of pairs."""
    if not task.is_pair:
        return vectors[0]
    u, v = vectors
    parts = {
        "first": lambda: u,
        "second": lambda: v,
        "difference": lambda: jnp.abs(u - v),
        "product": lambda: u * v,
        "cosine": lambda: _cosine(u, v),
    }
    return jnp.concatenate([parts[name]() for name in task.features], axis=1)


def _cosine(u: Float[Array, "rows hidden"], v: Float[Array, "rows hidden"]) -> Float[Array, "rows 1"]:
    norms = jnp.linalg.norm(u, axis=1) * jnp.linalg.norm(v, axis=1)
    return ((u * v).sum(axis=1) / jnp.maximum(norms, 1e-8))[:, None]


def cross_entropy(logits: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """-log softmax(logits) at the label, one value per example."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), labels[:, None], axis=1)[:, 0]


def binary_cross_entropy(logits: Float[Array, "rows 1"], labels: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """-log sigmoid(logit) of the second class, -log (1 - sigmoid(logit)) of the first, one value per example."""
    signs = 2.0 * labels.astype(jnp.float32) - 1.0
    return jax.nn.softplus(-signs * logits[:, 0])


def squared_error(outputs: Float[Array, "rows 1"], labels: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """(output - label)^2, one value per example."""
    return (outputs[:, 0] - labels) ** 2


FUNCTIONS = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared_error": squared_error,
}


def objective(options: Options, config: RunConfig) -> Finetune | None:
    """The objective; None without tasks."""
    return Finetune(options, config) if options.tasks else None
