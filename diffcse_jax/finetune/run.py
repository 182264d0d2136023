"""A fine-tuning: labelled tasks through the machinery of training, everything at once or the heads first."""

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, Mixture, by_ratio, by_temperature
from diffcse_jax.data.stored_vectors import SentenceVectors
from diffcse_jax.data.token_store import TokenStore, build_or_open
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.dev import build_drift_check
from diffcse_jax.finetune import vectors
from diffcse_jax.finetune.data import TaskData, read_task
from diffcse_jax.finetune.evaluation import TaskEvaluation
from diffcse_jax.finetune.model import TaskModel, heads_in
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.losses.finetune import ENCODER, Finetune, head_of
from diffcse_jax.models import hf, parameters
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling_modules import RecordedPooler
from diffcse_jax.run_folder.folder import HEADS, open_run
from diffcse_jax.run_folder.saved_encoder import read_encoder, read_parameters
from diffcse_jax.training import networks
from diffcse_jax.training.metrics import report
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.start import Start, recorded_pooler, with_own_pooler
from diffcse_jax.training.train import carry_out


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The parts that both stages share.

    Attributes:
        config: the run, its pooler and the classes of its tasks known.
        mesh: the devices.
        start: the encoder that it starts from.
        vocabulary: the tokenizer's.
        tasks: with their rows.
        stores: the tokens of their training rows, by name.
    """

    config: Config
    mesh: Mesh
    start: Start
    vocabulary: Vocabulary
    tasks: tuple[TaskData, ...]
    stores: dict[str, TokenStore]

    @property
    def options(self) -> Finetune:
        """The group of keys."""
        return self.config.finetune

    @property
    def text(self) -> str:
        """Identifies all rows."""
        return hashlib.sha256(" ".join(data.digest() for data in self.tasks).encode()).hexdigest()[:32]


def finetune(config: Config, workdir: Path) -> tuple[str, tuple[TaskData, ...]]:
    """Trains encoder and heads, in one stage or two, from the start or from where an earlier run stopped.

    Args:
        config: the run.
        workdir: where it lives; the stage of the heads has a workdir `heads` in it.

    Returns:
        How the selected model compares with the start, in words; and the tasks with their rows.

    Raises:
        UserError: a configuration, checkpoint or file that cannot be used; or as `training.train.train`.
    """
    tuning = prepare(config)
    open_run(workdir, tuning.config, tuning.start.checkpoint, tuning.start.tokenizer, None)
    heads = train_heads(tuning, workdir / HEADS) if tuning.options.stages == "heads_first" else {}
    return train_everything(tuning, workdir, heads), tuning.tasks


def prepare(config: Config) -> Tuning:
    """Loads the start and reads the tasks.

    Raises:
        UserError: a configuration, checkpoint or file that cannot be used.
    """
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    _check(config)
    start = open_start(config, mesh)
    asked = config.model.pooler
    config = with_own_pooler(config, start.recorded)
    if about := start.about_pooler(asked, config):
        report(about)
    sizes = start.checkpoint.config
    networks.for_run(sizes, config)
    vocabulary = networks.vocabulary_of(config, start.tokenizer, sizes.vocab_size)
    networks.check_max_length(config, sizes, config.model.name_or_path)
    folder, on_bad_line = expand_path(config.finetune.data_dir), config.data.on_bad_line
    tasks = tuple(
        read_task(name, task, folder, on_bad_line=on_bad_line, report=report)
        for name, task in config.finetune.tasks.items()
    )
    _check_sizes(tasks, config)
    config = _with_classes(config, tasks)
    stores = {data.name: _store(data, config, start) for data in tasks}
    return Tuning(config, mesh, start, vocabulary, tasks, stores)


def open_start(config: Config, mesh: Mesh) -> Start:
    """The encoder that `model.name_or_path` names: a run's or a checkpoint's, or a model folder's.

    Raises:
        CheckpointError: nothing there to read.
    """
    name, hardware = config.model.name_or_path, (mesh.devices.flat[0].platform, mesh.shape["data"])
    path = expand_path(name)
    if not find_run(path):
        encoder = hf.read(name).on(*hardware)
        return Start(name, encoder, load_tokenizer(encoder.folder), recorded_pooler(encoder, config.model.pooler))
    saved = read_encoder(path)
    head = saved.pooler_head
    encoder = Pretrained(saved.folder, saved.hf_config, saved.transformer_config, saved.transformer, head, None)
    recorded = RecordedPooler(saved.pooler, head if saved.pooler == "cls" else None)
    return Start(name, encoder.on(*hardware), load_tokenizer(saved.folder), recorded)


def train_heads(tuning: Tuning, workdir: Path) -> Params:
    """The stage of the heads: the encoder is no part of the networks, which read its vectors, computed once and kept.

    Returns:
        The best heads on dev, under the names that they have in a checkpoint.
    """
    config, start = config_of_heads(tuning.config), tuning.start
    open_run(workdir, config, start.checkpoint, start.tokenizer, None)
    stored, looking = frozen_vectors(tuning, workdir / "vectors")

    built = build(tuning, config)
    definitions = {name: each for name, each in built.networks.definitions.items() if name in _heads(tuning)}
    heads = {name: value for name, value in built.params.items() if name.partition(".")[0] in definitions}
    built = networks.Built(Networks(tuning.vocabulary, definitions), heads, Params())
    verdict = _carry_out(
        tuning, config, workdir, built, stored, lambda params: _model(tuning, looking, params), heads_alone=True
    )
    report(f"heads: {verdict.partition('; exported')[0]}")
    params, _ = read_parameters(workdir, None)
    return params


def frozen_vectors(tuning: Tuning, folder: Path) -> tuple[dict[str, SentenceVectors], vectors.Looking]:
    """The frozen encoder's vectors, computed once and kept in a folder.

    Returns:
        Those of the training sentences by task, cut as training cuts them; those of the dev sentences.
    """
    frozen, options = start_encoder(tuning), tuning.config
    length, batch_size = options.data.max_length, options.eval.batch_size
    encode = partial(frozen.encode, batch_size=batch_size, show_progress=sys.stderr.isatty())
    report("heads: the vectors of the frozen encoder, computed once")
    encoder = frozen.fingerprint()[:16]  # another run may have begun here, and left its vectors
    stored = {
        data.name: vectors.kept(
            folder / f"{data.name}-{data.digest()[:16]}-{encoder}-{length}",
            data.train.sentences,
            partial(encode, max_length=length),
        )
        for data in tuning.tasks
    }
    dev = [sentence for data in tuning.tasks for sentence in data.dev.sentences]
    kept = vectors.kept(folder / f"dev-{tuning.text[:16]}-{encoder}", dev, encode).gather(np.arange(len(dev))[:, None])
    return stored, vectors.Looking(dict(zip(dev, kept[:, 0], strict=True)), frozen.pooler)


def train_everything(tuning: Tuning, workdir: Path, heads: Params) -> str:
    """The stage of encoder and heads.

    Args:
        tuning: the run.
        workdir: where it lives.
        heads: the parameters that heads start from, with a checkpoint's names; without them, their initial ones.

    Returns:
        How the selected model compares with the start of the stage, in words.
    """
    built = build(tuning, tuning.config)
    built = built._replace(params=built.params | heads)

    def model(params: Params) -> TaskModel:
        return _model(tuning, _encoder(tuning, params), params)

    return _carry_out(tuning, tuning.config, workdir, built, {}, model, heads_alone=False)


def build(tuning: Tuning, config: Config) -> networks.Built:
    """Encoder and heads, with their first weights."""
    start = tuning.start
    return networks.build(config, start.checkpoint, None, tuning.vocabulary, projector=start.head)


def mixture(
    tuning: Tuning, config: Config, stored: dict[str, SentenceVectors], *, without_tokens: bool = False
) -> Mixture:
    """The batches of a stage.

    Args:
        tuning: the run.
        config: of the stage.
        stored: the frozen encoder's vectors, by task; empty: the networks encode.
        without_tokens: views have the vectors alone.
    """
    options, train = config.finetune, config.train
    rows = [len(data.train) for data in tuning.tasks]
    steps = train.steps or train.epochs * (sum(rows) // train.batch_size)
    if options.mixing == "ratio":
        order = by_ratio([data.task.ratio for data in tuning.tasks], steps, train.seed)
    else:
        final = options.final_temperature or options.temperature
        order = by_temperature(rows, np.linspace(options.temperature, final, steps), train.seed)
    sources = {
        data.name: BatchSource(
            tuning.stores[data.name],
            batch_size=train.batch_size,
            steps=int((order == number).sum()),
            seed=train.seed,
            pad_token_id=tuning.start.checkpoint.config.pad_token_id,
            shards=shards_of(tuning.mesh),
            packing=packing_of(config, tuning.mesh, chunks=train.chunks),
            vectors={ENCODER: stored[data.name]} if stored else {},
            labels={data.name: data.train.labels},
        )
        for number, data in enumerate(tuning.tasks)
    }
    return Mixture(sources, order, without_tokens=without_tokens)


def rows_of_batch(tasks: Sequence[TaskData], source: Mixture, step: int) -> list[dict[str, Any]]:
    """The rows of a step's batch as their file has them, with their lines."""
    name, rows = source.text_rows(step - 1)
    (data,) = (data.train for data in tasks if data.name == name)
    return [{"file": str(data.file), "line": data.lines[row], "texts": data.texts[row]} for row in rows]


def start_encoder(tuning: Tuning) -> SentenceEncoder:
    """The start, with the pooler that the run trains."""
    start = tuning.start
    return SentenceEncoder(
        start.checkpoint.config,
        start.checkpoint.transformer,
        start.tokenizer,
        pooler=tuning.config.encoding_pooler,
        pooler_head=start.head,
    )


def _carry_out(
    tuning: Tuning,
    config: Config,
    workdir: Path,
    built: networks.Built,
    stored: dict[str, SentenceVectors],
    model: Any,
    *,
    heads_alone: bool,
) -> str:
    source = mixture(tuning, config, stored, without_tokens=heads_alone)
    guarded = (config.eval.guard or config.eval.max_drop) and not heads_alone
    guard = build_drift_check(config.eval, lambda: start_encoder(tuning)) if guarded else None

    return carry_out(
        config,
        workdir,
        mesh=tuning.mesh,
        start=tuning.start,
        built=built,
        optimizer=make_optimizer(config.optim, len(source), rests=True),
        source=source,
        text=tuning.text,
        evaluation=TaskEvaluation(tuning.tasks, config.eval.batch_size, guard),
        sentences=partial(rows_of_batch, tuning.tasks, source),
        model=model,
    )


def _model(tuning: Tuning, encoder: Encoder, params: Params) -> TaskModel:
    """An encoder with the heads among parameters, which every process gets whole."""
    heads = {name: value for name, value in params.items() if name.partition(".")[0] in _heads(tuning)}
    tasks = {data.name: data.task for data in tuning.tasks}
    return TaskModel(
        encoder, tasks, heads_in({name: _whole(value, tuning.mesh) for name, value in heads.items()}, tasks)
    )


def _whole(array: Any, mesh: Mesh) -> np.ndarray:
    """A parameter on the host. Only what several processes share is moved between them, which all of them must do."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = jax.device_put(array, replicated(mesh))
    return np.asarray(array)


def _encoder(tuning: Tuning, params: Params) -> SentenceEncoder:
    return SentenceEncoder(
        tuning.start.checkpoint.config,
        parameters.subset(params, "encoder"),
        tuning.start.tokenizer,
        pooler=tuning.config.encoding_pooler,
        pooler_head=parameters.subset(params, "projector"),
    )


def _heads(tuning: Tuning) -> set[str]:
    return {head_of(data.name) for data in tuning.tasks}


def _store(data: TaskData, config: Config, start: Start) -> TokenStore:
    length, cache_dir, quiet = config.data.max_length, config.data.cache_dir, jax.process_index() > 0
    return build_or_open(data.train.corpus(data.task.texts), start.tokenizer, length, cache_dir, quiet=quiet)


def config_of_heads(config: Config) -> Config:
    """The configuration of the stage of the heads."""
    options = config.finetune
    train = dataclasses.replace(config.train, steps=options.heads_steps, epochs=options.heads_epochs, chunk_size=0)
    optim = dataclasses.replace(
        config.optim, learning_rate=options.heads_learning_rate, weight_decay=options.heads_weight_decay
    )
    evaluation = dataclasses.replace(config.eval, guard=False, max_drop=0.0)
    return dataclasses.replace(config, train=train, optim=optim, eval=evaluation)


def _with_classes(config: Config, tasks: tuple[TaskData, ...]) -> Config:
    """The configuration with the classes that the rows have."""
    found = {data.name: dataclasses.asdict(data.task) for data in tasks}
    return Config.from_dict(config.to_dict() | {"finetune": dataclasses.asdict(config.finetune) | {"tasks": found}})


def _check(config: Config) -> None:
    """Refuses what fine-tuning has no form for."""
    if "finetune" not in config.losses:
        raise ConfigError("nothing to fine-tune: give finetune.tasks, with finetune.weight above 0")
    if others := [f"{name}.weight" for name in config.losses if name != "finetune"]:
        raise ConfigError(f"fine-tuning is on labelled tasks alone; set {' and '.join(others)} to 0")
    if config.model.projector != "none" and not config.keeps_projector:
        raise ConfigError(
            f"model.projector={config.model.projector!r} is dropped after training, and heads read the vectors that "
            "encoding gives; use model.projector='none'"
        )
    if config.data.augmentation != "none":
        raise ConfigError(
            f"data.augmentation={config.data.augmentation!r} makes second views of sentences, and fine-tuning reads "
            "labelled rows as they are; leave it out"
        )
    for key in ("keep_start", "interpolate", "hold"):
        if getattr(config.eval, key):
            raise ConfigError(f"eval.{key} compares encoders, and a fine-tuned one comes with heads; leave it out")
    if config.eval.beside:
        raise ConfigError("eval.beside: fine-tuning scores the dev rows of its tasks, and no other dev metrics")


def _check_sizes(tasks: tuple[TaskData, ...], config: Config) -> None:
    for data in tasks:
        if len(data.train) < config.train.batch_size:
            raise DataError(
                f"{data.train.file}: task {data.name} has {len(data.train):,} training rows, fewer than "
                f"train.batch_size={config.train.batch_size}"
            )
