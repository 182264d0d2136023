"""A fine-tuning: labelled tasks trained together, or first the heads alone and then everything."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diffcse_jax import hosts
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.model import TaskEvaluation, TaskModel, heads_in
from diffcse_jax.apps.finetune.outputs import write_heads, write_outputs
from diffcse_jax.apps.finetune.tasks import TaskData, read_task
from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, Mixture, by_ratio, by_temperature
from diffcse_jax.data.token_store import SentenceVectors, TokenStore, build_or_open, make_arrays
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import CachedEncoder, Encoder
from diffcse_jax.evaluation.dev import build_drift_check
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, expand_path, find_run
from diffcse_jax.losses.finetune import ENCODER, Finetune, head_of
from diffcse_jax.models import hf, parameters
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling_modules import RecordedPooler
from diffcse_jax.run_folder.folder import HEADS, open_run
from diffcse_jax.run_folder.saved_encoder import read_encoder, read_parameters
from diffcse_jax.training import networks
from diffcse_jax.training.curves import draw_curves
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint, recorded_pooler, with_own_pooler
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.train import run_training

_BLOCK, _SECONDS = 4096, 10.0  # embeddings are computed in blocks, and progress is logged at most this often
_SAFE = "The checkpoints are complete."


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What both stages share.

    Attributes:
        config: The run. Its pooler and the classes of its tasks are known.
        mesh: The devices.
        start: The encoder to start from.
        vocabulary: The vocabulary of the tokenizer.
        tasks: The tasks with their rows.
        stores: The tokens of their training rows, by task.
    """

    config: Config
    mesh: Mesh
    start: StartingCheckpoint
    vocabulary: Vocabulary
    tasks: tuple[TaskData, ...]
    stores: dict[str, TokenStore]

    @property
    def options(self) -> Finetune:
        """The group of keys of fine-tuning."""
        return self.config.finetune

    @property
    def text(self) -> str:
        """Identify all rows."""
        return hashlib.sha256(" ".join(data.digest() for data in self.tasks).encode()).hexdigest()[:32]


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`.

    Args:
        config: The run.
        workdir: The folder of the run. It receives `export/`, `tasks/`, `predictions/` and `report/`.

    Returns:
        The verdict: how the selected model compares with the start of the last stage.

    Raises:
        UserError: The configuration, a checkpoint or a file cannot be used.
        Interrupted: The run was asked to stop. Everything is saved.
    """
    with in_workdir(config, workdir):
        return _finetune_and_export(config, workdir)


def _finetune_and_export(config: Config, workdir: Path) -> str:
    verdict, tasks = finetune(config, workdir)

    def finish() -> None:
        export_with_curves(config, workdir)
        model, saved = TaskModel.from_run(workdir), read_encoder(workdir)
        for name, written in write_heads(model, saved, workdir / "tasks").items():
            print(f"task {name}: wrote {workdir / 'tasks' / name}, {written}")
        with disk_errors(workdir, safe=_SAFE):
            if (workdir / HEADS).is_dir():
                draw_curves(workdir / HEADS, config)
            files = write_outputs(model, tasks, workdir, config.finetune.predictions, config.eval.batch_size)
        print("wrote", *files, sep="\n  ")
        print(verdict)

    hosts.decided_by_first(finish)  # the other processes wait, because their end would end the first one
    return verdict


def finetune(config: Config, workdir: Path) -> tuple[str, tuple[TaskData, ...]]:
    """Train the encoder and the heads, in one stage or two. A run that was stopped resumes.

    Returns:
        The verdict, and the tasks with their rows.

    Raises:
        UserError: A configuration, checkpoint or file cannot be used.
    """
    tuning = prepare(config)
    open_run(workdir, tuning.config, tuning.start.checkpoint, tuning.start.tokenizer, None)
    heads: Params = {}
    if tuning.options.stages == "heads_first":
        heads = train_heads(tuning, workdir / HEADS)
        log_line("stage 2 of 2: training the encoder and the heads")
    return train_everything(tuning, workdir, heads), tuning.tasks


def prepare(config: Config) -> Tuning:
    """Load the encoder and read the tasks.

    Raises:
        UserError: A configuration, checkpoint or file cannot be used.
    """
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    _check(config)
    start = open_start(config, mesh)
    asked = config.model.pooler
    config = with_own_pooler(config, start.recorded)
    if about := start.describe_pooler(asked, config):
        log_line(about)
    sizes = start.checkpoint.config
    networks.for_run(sizes, config)
    vocabulary = networks.vocabulary_of(config, start.tokenizer, sizes.vocab_size)
    networks.check_max_length(config, sizes, config.model.name_or_path)
    folder, on_bad_line = expand_path(config.finetune.data_dir), config.data.on_bad_line
    tasks = tuple(
        read_task(name, task, folder, on_bad_line=on_bad_line, report=log_line)
        for name, task in config.finetune.tasks.items()
    )
    for data in tasks:
        if len(data.train) < config.train.batch_size:
            raise DataError(
                f"{data.train.file}: task {data.name} has {len(data.train):,} training rows, fewer than "
                f"train.batch_size={config.train.batch_size}. Set train.batch_size={len(data.train)} or less"
            )
    found = {data.name: dataclasses.asdict(data.task) for data in tasks}  # with their classes
    config = Config.from_dict(config.to_dict() | {"finetune": dataclasses.asdict(config.finetune) | {"tasks": found}})
    stores = {data.name: _store(data, config, start) for data in tasks}
    return Tuning(config, mesh, start, vocabulary, tasks, stores)


def open_start(config: Config, mesh: Mesh) -> StartingCheckpoint:
    """Load the encoder that `model.name_or_path` names: a run, a checkpoint, or a model folder.

    Raises:
        CheckpointError: It cannot be read.
    """
    name, hardware = config.model.name_or_path, (mesh.devices.flat[0].platform, mesh.shape["data"])
    path = expand_path(name)
    if not find_run(path):
        encoder = hf.read(name).on(*hardware)
        recorded = recorded_pooler(encoder, config.model.pooler)
        return StartingCheckpoint(name, encoder, load_tokenizer(encoder.folder), recorded)
    saved = read_encoder(path)
    head = saved.pooler_head
    encoder = Pretrained(saved.folder, saved.hf_config, saved.transformer_config, saved.transformer, head, None)
    recorded = RecordedPooler(saved.pooler, head if saved.pooler == "cls" else None)
    return StartingCheckpoint(name, encoder.on(*hardware), load_tokenizer(saved.folder), recorded)


def train_heads(tuning: Tuning, workdir: Path) -> Params:
    """Train the heads on embeddings of the frozen encoder, which are computed once and kept.

    Returns:
        The best heads on dev, by their names in a checkpoint.
    """
    config, start = config_of_heads(tuning), tuning.start
    open_run(workdir, config, start.checkpoint, start.tokenizer, None)
    log_line(f"stage 1 of 2: training the heads for {config.train.steps:,} steps on embeddings of the frozen encoder")
    stored, frozen = frozen_vectors(tuning, workdir / "vectors")
    built = build(tuning, config)
    definitions = {name: each for name, each in built.networks.definitions.items() if name in _head_names(tuning)}
    heads = {name: value for name, value in built.params.items() if name.partition(".")[0] in definitions}
    built = networks.Built(Networks(tuning.vocabulary, definitions), heads, Params())
    model = partial(_model, tuning, frozen)
    verdict = _train(tuning, config, workdir, built, stored, model, heads_alone=True)
    log_line(f"stage 1 of 2: {verdict.partition(' Exported')[0]}")
    params, _ = read_parameters(workdir, None)
    return params


def frozen_vectors(tuning: Tuning, folder: Path) -> tuple[dict[str, SentenceVectors], CachedEncoder]:
    """Compute the embeddings of the training sentences with the frozen encoder, and keep them in a folder.

    Returns:
        The embeddings by task, of sentences cut to `data.max_length`, and the frozen encoder for dev sentences.
    """
    frozen, config = start_encoder(tuning), tuning.config
    length = config.data.max_length
    encode = partial(frozen.encode, batch_size=config.eval.batch_size, max_length=length)
    stored = {}
    for data in tuning.tasks:  # another run may have left its embeddings here, so the name says what they are of
        name = f"{data.name}-{data.digest()[:16]}-{frozen.fingerprint()[:16]}-{length}"
        stored[data.name] = _stored(folder / name, data, encode)
    return stored, CachedEncoder(frozen)


def _stored(folder: Path, data: TaskData, encode: Callable[[list[str]], np.ndarray]) -> SentenceVectors:
    """Return the embeddings of a task's training sentences. The first process computes each distinct sentence once."""
    distinct = {sentence: row for row, sentence in enumerate(dict.fromkeys(data.train.sentences))}

    def make(new: Path) -> None:
        np.save(new / "vectors.npy", _encode_with_progress([*distinct], encode, data.name))
        np.save(new / "rows.npy", np.array([distinct[sentence] for sentence in data.train.sentences], np.int64))

    def make_or_find() -> None:
        with disk_errors(folder, safe=_SAFE):
            make_arrays(folder, make)

    hosts.decided_by_first(make_or_find)
    return SentenceVectors(folder)


def _encode_with_progress(sentences: list[str], encode: Callable[[list[str]], np.ndarray], name: str) -> np.ndarray:
    """Return embeddings, and log how many are done every few seconds."""
    log_line(f"task {name}: embedding {len(sentences):,} sentences")
    blocks, logged = [], time.monotonic()
    for start in range(0, len(sentences), _BLOCK):
        blocks.append(encode(sentences[start : start + _BLOCK]))
        if time.monotonic() - logged >= _SECONDS:
            logged = time.monotonic()
            log_line(f"task {name}: embedded {min(start + _BLOCK, len(sentences)):,} of {len(sentences):,} sentences")
    return np.concatenate(blocks)


def train_everything(tuning: Tuning, workdir: Path, heads: Params) -> str:
    """Train the encoder and the heads.

    Args:
        tuning: The run.
        workdir: The folder of the run.
        heads: The parameters of trained heads by their names in a checkpoint. Without them, heads start at random.

    Returns:
        The verdict: how the selected model compares with the start of this stage.
    """
    built = build(tuning, tuning.config)
    built = built._replace(params=built.params | heads)

    def model(params: Params) -> TaskModel:
        encoder = SentenceEncoder(
            tuning.start.checkpoint.config,
            parameters.subset(params, "encoder"),
            tuning.start.tokenizer,
            pooler=tuning.config.encoding_pooler,
            pooler_head=parameters.subset(params, "projector"),
        )
        return _model(tuning, encoder, params)

    return _train(tuning, tuning.config, workdir, built, {}, model, heads_alone=False)


def build(tuning: Tuning, config: Config) -> networks.Built:
    """Return the encoder and the heads with their first weights."""
    start = tuning.start
    return networks.build(config, start.checkpoint, None, tuning.vocabulary, projector=start.head)


def mixture(
    tuning: Tuning, config: Config, stored: dict[str, SentenceVectors], *, without_tokens: bool = False
) -> Mixture:
    """Return the batches of a stage.

    Args:
        tuning: The run.
        config: The configuration of the stage.
        stored: Embeddings of the frozen encoder by task. Empty: the networks encode the sentences.
        without_tokens: The batches have embeddings but no tokens.
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
    """Return the rows of a step's batch as in their file, with their lines."""
    name, rows = source.text_rows(step - 1)
    (data,) = (data.train for data in tasks if data.name == name)
    return [{"file": str(data.file), "line": data.lines[row], "texts": data.texts[row]} for row in rows]


def start_encoder(tuning: Tuning) -> SentenceEncoder:
    """Return the encoder to start from, with the pooler that the run trains."""
    start = tuning.start
    return SentenceEncoder(
        start.checkpoint.config,
        start.checkpoint.transformer,
        start.tokenizer,
        pooler=tuning.config.encoding_pooler,
        pooler_head=start.head,
    )


def config_of_heads(tuning: Tuning) -> Config:
    """Return the configuration of the stage that trains only the heads.

    It has `finetune.heads_steps` steps. If that is 0, it has `finetune.heads_epochs` passes, at most `train.steps`.
    """
    config, options = tuning.config, tuning.options
    passes = options.heads_epochs * (sum(len(data.train) for data in tuning.tasks) // config.train.batch_size)
    steps = options.heads_steps or min(passes, config.train.steps or passes)
    train = dataclasses.replace(config.train, steps=steps, chunk_size=0)
    optim = dataclasses.replace(
        config.optim, learning_rate=options.heads_learning_rate, weight_decay=options.heads_weight_decay
    )
    evaluation = dataclasses.replace(config.eval, guard=False, max_drop=0.0)
    return dataclasses.replace(config, train=train, optim=optim, eval=evaluation)


def _train(
    tuning: Tuning,
    config: Config,
    workdir: Path,
    built: networks.Built,
    stored: dict[str, SentenceVectors],
    model: Callable[[Params], TaskModel],
    *,
    heads_alone: bool,
) -> str:
    source = mixture(tuning, config, stored, without_tokens=heads_alone)
    checks_drift = (config.eval.guard or config.eval.max_drop) and not heads_alone
    drift_check = build_drift_check(config.eval, lambda: start_encoder(tuning)) if checks_drift else None
    optimizer = make_optimizer(config.optim, len(source), rests=True)
    evaluation = TaskEvaluation(tuning.tasks, config.eval.batch_size, drift_check)
    rows = partial(rows_of_batch, tuning.tasks, source)
    mesh, start, text = tuning.mesh, tuning.start, tuning.text
    return run_training(
        Run(config, workdir, mesh, start, built, optimizer, source, text, evaluation, rows, model=model)
    )


def _model(tuning: Tuning, encoder: Encoder, params: Params) -> TaskModel:
    """Return an encoder with the heads among parameters. Every process gets whole heads."""
    heads = {name: value for name, value in params.items() if name.partition(".")[0] in _head_names(tuning)}
    tasks = {data.name: data.task for data in tuning.tasks}
    whole = {name: _on_host(value, tuning.mesh) for name, value in heads.items()}
    return TaskModel(encoder, tasks, heads_in(whole, tasks))


def _on_host(array: Any, mesh: Mesh) -> np.ndarray:
    """Return a parameter as a NumPy array. If processes share it, all of them must call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = jax.device_put(array, replicated(mesh))
    return np.asarray(array)


def _head_names(tuning: Tuning) -> set[str]:
    return {head_of(data.name) for data in tuning.tasks}


def _store(data: TaskData, config: Config, start: StartingCheckpoint) -> TokenStore:
    length, cache_dir, quiet = config.data.max_length, config.data.cache_dir, jax.process_index() > 0
    return build_or_open(data.train.corpus(data.task.texts), start.tokenizer, length, cache_dir, quiet=quiet)


def _check(config: Config) -> None:
    """Refuse settings that fine-tuning does not support."""
    if "finetune" not in config.losses:
        raise ConfigError("nothing to fine-tune: give finetune.tasks, with finetune.weight above 0")
    if others := [f"{name}.weight" for name in config.losses if name != "finetune"]:
        raise ConfigError(f"fine-tuning trains labelled tasks only. Set {' and '.join(others)} to 0")
    if config.model.projector != "none" and not config.keeps_projector:
        raise ConfigError(
            f"model.projector={config.model.projector!r} is dropped after training, but heads read the final "
            "embeddings. Use model.projector='none'"
        )
    if config.data.augmentation != "none":
        raise ConfigError(
            f"data.augmentation={config.data.augmentation!r} changes sentences, but fine-tuning reads labelled rows as "
            "they are. Use data.augmentation='none'"
        )
    for key in ("keep_start", "interpolate", "hold"):
        if getattr(config.eval, key):
            raise ConfigError(f"eval.{key} compares encoders, but a fine-tuned encoder comes with heads. Leave it out")
    if config.eval.beside:
        raise ConfigError("eval.beside: fine-tuning scores the dev rows of its tasks and nothing else. Leave it out")
