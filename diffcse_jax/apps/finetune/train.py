"""Training an encoder and its heads on labelled tasks, in one stage or two."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from diffcse_jax import io
from diffcse_jax.apps.finetune.heads import trained_heads
from diffcse_jax.apps.finetune.metric import TasksMetric
from diffcse_jax.apps.finetune.mixture import Mixture, by_ratio, resting
from diffcse_jax.apps.finetune.model import TaskModel
from diffcse_jax.apps.finetune.tasks import TaskData, labels_of, read_tasks
from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config, flat
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.data.token_store import Corpus, Row, TokenStore
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.hosts import log_line
from diffcse_jax.losses.finetune import AVERAGE, head_of
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.checkpoints import read_encoder, saved_steps
from diffcse_jax.run_folder.finding import CHECKPOINTS, find_run
from diffcse_jax.run_folder.records import read_baseline
from diffcse_jax.run_folder.start import HEADS, open_run
from diffcse_jax.training import networks
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.run import train_and_select
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.tokens import open_tokens, require_same_text


def tune(config: Config, workdir: Path) -> tuple[list[TaskData], str]:
    """Train in one stage or two, and resume if stopped.

    Return the rows of the tasks, and the verdict.
    """
    # 1. The encoder to start from, and the rows.
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    _check(config)
    config, start, vocabulary = open_start_or_run(config, mesh)
    tasks = read_tasks(config)
    classes = {f"finetune.tasks.{data.name}.labels": data.task.labels for data in tasks}
    config = Config.from_dict(flat(config.to_dict()) | classes)
    splits = [rows for data in tasks for rows in (data.train, data.dev)]
    text = io.json_digest([[(row.texts, row.label) for row in rows] for rows in splits])[:32]
    require_same_text(text, "the rows of finetune.tasks")

    # 2. The batches of all tasks.
    train = config.train
    rows = sum(len(data.train) for data in tasks)
    steps = train.steps or train.epochs * (rows // train.batch_size)
    order = by_ratio([data.task.ratio for data in tasks], steps, train.seed_of("order"))
    counts = np.bincount(order, minlength=len(tasks)).tolist()
    stores = [_tokens(config, data, start) for data in tasks]
    sources = {
        data.name: _batches(config, data, store, start, mesh=mesh, steps=count)
        for data, store, count in zip(tasks, stores, counts, strict=True)
    }
    source = Mixture(sources, order)
    sentences = [len(store) * len(store.columns) for store in stores]

    # 3. The networks. The heads may be trained first.
    open_run(
        workdir, config, start.checkpoint, start.tokenizer, None, prompts=start.recorded.prompts
    )
    built = networks.build(
        config, start.checkpoint, None, vocabulary, projector=start.recorded.head
    )
    # It resumes from the heads in a checkpoint.
    resumes = saved_steps(workdir / CHECKPOINTS) and read_baseline(workdir)
    if config.finetune.stages == "heads_first" and not resumes:
        frozen = start.encoder(config, built.params)
        heads = trained_heads(
            config, tasks, frozen, built.params, folder=workdir / HEADS, text=text
        )
        built = built._replace(params=built.params | heads)
        log_line("stage 2 of 2: training the encoder and the heads")

    # 4. Training.
    def on_host(array: jax.Array | np.ndarray) -> np.ndarray:
        # Only the first process scores the start, whose arrays are its own.
        is_shared = isinstance(array, jax.Array) and not array.is_fully_addressable
        return np.asarray(jax.device_put(array, replicated(mesh)) if is_shared else array)

    def model_of(params: Params) -> TaskModel:  # processes that share parameters must all call this
        heads = {data.name: layers.subset(params, head_of(data.name)) for data in tasks}
        heads = jax.tree.map(on_host, heads)
        return TaskModel(start.encoder(config, params), config.finetune.tasks, heads)

    def sentences_of(step: int) -> list[str]:
        return start.tokenizer.batch_decode(
            source[step - 1].rows.input_ids, skip_special_tokens=True
        )

    run = Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        base=start,
        built=built,
        optimizer=make_optimizer(config.optim, steps, around=resting),
        source=source,
        text=text,
        unknown=float(np.average([store.unknown for store in stores], weights=sentences)),
        evaluation=DevEvaluation(TasksMetric(AVERAGE, config.eval.batch_size, tasks), text),
        sentences=sentences_of,
        model_of=model_of,
    )
    return tasks, train_and_select(run)


def _check(config: Config) -> None:
    """Refuse settings that fine-tuning does not support."""
    if "finetune" not in config.losses:
        raise ConfigError("nothing to fine-tune: give finetune.tasks, with finetune.weight above 0")
    if others := [f"{name}.weight" for name in config.losses if name != "finetune"]:
        raise ConfigError(
            f"fine-tuning trains labelled tasks only. Set {' and '.join(others)} to 0"
        )
    if config.model.projector != "none" and not config.keeps_projector:
        raise ConfigError(
            "model.projector is dropped after training, but heads read the final embeddings. Use "
            "'none'"
        )
    if config.data.augmentation != "none":
        raise ConfigError(
            "data.augmentation: fine-tuning reads labelled rows as they are. Use 'none'"
        )
    if config.train.chunking == "auto":
        raise ConfigError(
            "train.chunking=auto: the batches of fine-tuning may have any task. Set "
            "train.chunk_size if they do not fit into memory"
        )
    for key in ("keep_start", "interpolate", "hold", "beside", "guard", "max_drop"):
        if getattr(config.eval, key):
            raise ConfigError(
                f"eval.{key}: fine-tuning scores only the dev rows of its tasks. Leave it out"
            )


def open_start_or_run(config: Config, mesh: Mesh) -> tuple[Config, StartingCheckpoint, Vocabulary]:
    """Open the starting checkpoint, which may also be a run or one of its checkpoints.

    Returns:
        The configuration with its pooler resolved, the starting checkpoint and the tokenizer's
        vocabulary.
    """
    path = io.expand_path(config.model.name_or_path)
    if not find_run(path):
        return networks.open_start(config, mesh)
    saved = read_encoder(path)
    if saved.documents is not None:
        raise ConfigError(
            f"{path} has a query encoder and a document encoder. Name one of them: "
            f"{path}/export/query or {path}/export/document"
        )
    return networks.prepare_start(config, mesh, saved.checkpoint, saved.record_of(saved.checkpoint))


def _tokens(config: Config, data: TaskData, start: StartingCheckpoint) -> TokenStore:
    """Return the tokens of one task's training rows."""
    columns = data.task.texts
    rows = [(row.line, row.texts) for row in data.train]

    def read(_: Ledger) -> Iterator[list[Row]]:
        file = str(data.file)
        yield [Row(texts, number, Place(file, line)) for number, (line, texts) in enumerate(rows)]

    corpus = Corpus(str(data.file), columns, read, partial(io.json_digest, rows))
    length = config.data.max_length
    prompts = [start.recorded.prompts.default] * len(columns)
    return open_tokens(corpus, start.tokenizer, length, config.data.cache_dir, prompts=prompts)


def _batches(
    config: Config,
    data: TaskData,
    store: TokenStore,
    start: StartingCheckpoint,
    *,
    mesh: Mesh,
    steps: int,
) -> BatchSource:
    """Return the batches of one task."""
    return BatchSource(
        store,
        batch_size=config.train.batch_size,
        steps=steps,
        seed=config.train.seed_of("order"),
        pad_token_id=start.checkpoint.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh, chunks=config.train.chunks),
        labels={data.name: labels_of(data.train)},
    )
