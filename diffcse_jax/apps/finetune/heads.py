"""The first stage of two: training the heads on embeddings of the frozen encoder."""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray, Shaped
from safetensors.numpy import load_file

from diffcse_jax import hosts, io
from diffcse_jax.apps.finetune.metric import TasksMetric
from diffcse_jax.apps.finetune.model import TaskModel, embed
from diffcse_jax.apps.finetune.tasks import TaskData, labels_of
from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import counted
from diffcse_jax.evaluation import CachedEncoder
from diffcse_jax.hosts import log_line
from diffcse_jax.losses.finetune import (
    AVERAGE,
    LabelledTask,
    build_head,
    head_of,
    score_name,
    task_loss,
)
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.training.generator import HeadTraining, check_finite, make_head_step, train_head
from diffcse_jax.training.optimizer import make_optimizer


def trained_heads(
    config: Config,
    tasks: Sequence[TaskData],
    frozen: SentenceEncoder,
    params: Params,
    *,
    folder: Path,
    text: str,
) -> Params:
    """Return the heads after the first stage, the same on all processes.

    The first process trains them and writes them to the folder. If the folder holds heads that were
    trained on this text, they are only read.
    """
    weights, record = folder / "heads.safetensors", folder / "heads.json"
    remedy = f"Remove {folder} to train them again"

    def train() -> None:
        if record.is_file() and io.read_sealed(record, remedy).get("text") == text:
            return
        log_line("stage 1 of 2: training the heads on embeddings of the frozen encoder")
        heads = Params()
        for data in tasks:
            name = head_of(data.name)
            start = layers.subset(params, name)
            heads |= layers.prefixed(train_task_head(config, data, start, frozen), name)
        with io.disk_errors(folder, safe="The encoder and the texts are unchanged."):
            folder.mkdir(parents=True, exist_ok=True)
            io.write_tensors(weights, heads)
            io.write_sealed(record, {"text": text}, [weights])  # last: the heads are complete

    hosts.decided_by_first(train)
    return load_file(weights)


def train_task_head(
    config: Config,
    data: TaskData,
    start: Params,
    frozen: SentenceEncoder,
) -> Params:
    """Train the head of a task on embeddings of the frozen encoder.

    This takes `finetune.heads_steps` steps, or else `finetune.heads_epochs` passes, at most
    `train.steps`.

    Returns:
        The head with the best dev score.
    """
    options = config.finetune
    name = data.name
    task = data.task
    rows = len(data.train)
    size = config.train.batch_size
    passes = options.heads_epochs * rows // size
    steps = options.heads_steps or min(passes, config.train.steps or passes)
    log_line(f"task {name}: embedding {counted(rows, 'row{s}')}")
    texts = [row.texts for row in data.train]
    sides = embed(frozen, texts, config.eval.batch_size, show_progress=True)
    seed = [config.train.seed_of("order"), zlib.crc32(name.encode())]
    training = _head_training(config, task, start, steps, jax.random.key(seed[0] ^ seed[1]))
    batches = _batches(sides, labels_of(data.train), size, steps, np.random.default_rng(seed))
    metric = TasksMetric(AVERAGE, config.eval.batch_size, [data])
    encoder = CachedEncoder(frozen)
    best = start
    best_score = -np.inf

    def keep_best(step: int, head: Params, _: optax.OptState) -> None:
        nonlocal best, best_score
        if step != steps and (config.eval.every == 0 or step % config.eval.every):
            return
        score = metric.measure(TaskModel(encoder, {name: task}, {name: head})).scores[AVERAGE]
        if score > best_score:
            best = {key: np.array(array) for key, array in head.items()}
            best_score = score

    last = train_head(f"head of {name}", training, batches, steps, keep_best)
    rate = options.heads_learning_rate
    check_finite(f"the head of {name}", last, "finetune.heads_learning_rate", rate)
    score = f"{score_name(name, task)} {best_score:.2f}"
    log_line(f"head of {name}: {counted(steps, 'step{s}')}, {score}")
    return {key: np.asarray(array) for key, array in best.items()}


def _batches(
    sides: Float32[np.ndarray, "sides rows hidden"],
    labels: Shaped[np.ndarray, " rows"],
    size: int,
    steps: int,
    generator: np.random.Generator,
) -> Iterator[tuple[Any, ...]]:
    """Yield embeddings, labels and the index of each step. Each pass has an order of its own."""
    rows = len(labels)
    order = [generator.permutation(rows) for _ in range(steps * size // rows + 1)]
    for index, batch in enumerate(np.concatenate(order)[: steps * size].reshape(steps, size)):
        yield sides[:, batch], labels[batch], np.int32(index)


def _head_training(
    config: Config,
    task: LabelledTask,
    start: Params,
    steps: int,
    key: PRNGKeyArray,
) -> HeadTraining:
    """Return the start of a head's training, and its step of embeddings, labels and an index."""
    options = config.finetune
    rate, decay = options.heads_learning_rate, options.heads_weight_decay
    of_heads = dataclasses.replace(config.optim, learning_rate=rate, weight_decay=decay)
    optimizer = make_optimizer(of_heads, steps)

    def loss(
        head: Params,
        sides: Float[Array, "sides rows hidden"],
        labels: Shaped[Array, " rows"],
        index: Int[Array, ""],
    ) -> Float[Array, ""]:
        definition = layers.definition(build_head(task, sides.shape[-1]))
        network = layers.bind(definition, head)
        return task_loss(task, network, tuple(sides), labels, jax.random.fold_in(key, index))

    # The default of accelerators is below float32.
    loss = jax.default_matmul_precision("highest")(loss)
    return HeadTraining(start, optimizer.init(start), make_head_step(loss, optimizer))
