"""Trains the head of a task on embeddings of the frozen encoder, the first of two stages."""

import dataclasses
import zlib

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Shaped

from diffcse_jax.apps.finetune.model import TaskModel, TasksMetric, embed
from diffcse_jax.apps.finetune.tasks import TaskData
from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, counted
from diffcse_jax.evaluation import CachedEncoder
from diffcse_jax.hosts import Progress, log_line
from diffcse_jax.losses.finetune import AVERAGE, build_head, score_name, task_loss
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.training.step import make_optimizer


def train_head(config: Config, data: TaskData, head: Params, frozen: SentenceEncoder) -> tuple[Params, float]:
    """Train the head of a task on embeddings of the frozen encoder.

    This takes `finetune.heads_steps` steps, or else `finetune.heads_epochs` passes, at most `train.steps`.

    Returns:
        The parameters at the evaluation with the best dev score, and that score.
    """
    options, size, task, rows = config.finetune, config.train.batch_size, data.task, len(data.train)
    passes = options.heads_epochs * rows // size
    steps = options.heads_steps or min(passes, config.train.steps or passes)
    log_line(f"task {data.name}: embedding {counted(rows, 'row{s}')}")
    sides = np.stack(embed(frozen, data.train.texts, config.eval.batch_size, show_progress=True))
    labels = data.train.labels
    rate, decay = options.heads_learning_rate, options.heads_weight_decay
    optimizer = make_optimizer(dataclasses.replace(config.optim, learning_rate=rate, weight_decay=decay), steps)
    definition = layers.definition(build_head(task, sides.shape[-1]))
    seed = [config.train.seed, zlib.crc32(data.name.encode())]
    key, generator = jax.random.key(seed[0] ^ seed[1]), np.random.default_rng(seed)

    @jax.jit
    def step(
        head: Params,
        state: optax.OptState,
        sides: Float[Array, "sides rows hidden"],
        labels: Shaped[Array, " rows"],
        index: Int[Array, ""],
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        def loss(head: Params) -> Float[Array, ""]:
            network = layers.bind(definition, head)
            return task_loss(task, network, tuple(sides), labels, jax.random.fold_in(key, index))

        with jax.default_matmul_precision("highest"):  # the default of accelerators is below float32
            value, gradients = jax.value_and_grad(loss)(head)
        updates, state = optimizer.update(gradients, state, head)
        return optax.apply_updates(head, updates), state, value

    state, best, best_score = optimizer.init(head), head, -np.inf
    metric, encoder = TasksMetric(AVERAGE, config.eval.batch_size, [data]), CachedEncoder(frozen)
    order = np.concatenate([generator.permutation(rows) for _ in range(steps * size // rows + 1)])
    with Progress(f"head of {data.name}", "steps", steps) as progress:
        for index in range(steps):
            chosen = order[index * size : (index + 1) * size]
            head, state, value = step(head, state, sides[:, chosen], labels[chosen], np.int32(index))
            progress.update(1, f"loss {float(value):.2f}" if index % 20 == 0 else "")
            if index + 1 == steps or (config.eval.every > 0 and (index + 1) % config.eval.every == 0):
                score = metric.measure(TaskModel(encoder, {data.name: task}, {data.name: head})).scores[AVERAGE]
                best, best_score = (head, score) if score > best_score else (best, best_score)
    if not all(np.isfinite(array).all() for array in head.values()):
        raise ConfigError(
            f"training the head of {data.name} diverged (it is NaN or infinite). Nothing was saved. Lower "
            f"finetune.heads_learning_rate={rate:g}."
        )
    log_line(f"head of {data.name}: {counted(steps, 'step{s}')}, {score_name(data.name, task)} {best_score:.2f}")
    return {name: np.asarray(array) for name, array in best.items()}, best_score
