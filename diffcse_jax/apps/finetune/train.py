"""A fine-tuning: labelled tasks trained together, or first the heads alone and then everything."""

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diffcse_jax import hosts
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.model import TaskEvaluation, TaskModel, TasksMetric, heads_in
from diffcse_jax.apps.finetune.outputs import write_heads, write_outputs
from diffcse_jax.apps.finetune.tasks import TaskData, read_task
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, Mixture, by_ratio, by_temperature
from diffcse_jax.data.token_store import SentenceVectors, build_or_open, make_arrays
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.evaluation import CachedEncoder, Encoder
from diffcse_jax.evaluation.dev import build_drift_check
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, expand_path, json_digest
from diffcse_jax.losses.finetune import ENCODER, head_of
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.folder import HEADS, open_run
from diffcse_jax.run_folder.saved_encoder import read_encoder, read_parameters
from diffcse_jax.training import networks
from diffcse_jax.training.curves import draw_curves
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import Built
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.step import make_optimizer
from diffcse_jax.training.train import run_training

_SAFE = "The checkpoints are complete."


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`. Return the verdict of the last stage."""

    def finish() -> None:
        export_with_curves(workdir)
        model, saved = TaskModel.from_run(workdir), read_encoder(workdir)
        for name, written in write_heads(model, saved, workdir / "tasks").items():
            print(f"task {name}: wrote {workdir / 'tasks' / name}, {written}")
        with disk_errors(workdir, safe=_SAFE):
            if (workdir / HEADS).is_dir():
                draw_curves(workdir / HEADS)
            files = write_outputs(model, tasks, workdir, config.finetune.predictions, config.eval.batch_size)
        print("wrote", *files, sep="\n  ")
        print(verdict)

    with in_workdir(config, workdir):
        verdict, tasks = finetune(config, workdir)
        hosts.decided_by_first(finish)  # the other processes wait, because their end would end the first one
    return verdict


def finetune(config: Config, workdir: Path) -> tuple[str, tuple[TaskData, ...]]:
    """Train the encoder and the heads, in one stage or two, and resume if stopped. Return the verdict and the tasks."""
    tuning = Tuning(config)
    open_run(workdir, tuning.config, tuning.checkpoint, tuning.tokenizer, None)
    heads: Params = {}
    if tuning.config.finetune.stages == "heads_first":
        heads = tuning.train_heads(workdir / HEADS)
        log_line("stage 2 of 2: training the encoder and the heads")
    return tuning.train_everything(workdir, heads), tuning.tasks


class Tuning:
    """The encoder to start from and the rows of the tasks, which both stages share.

    The attribute `config` also has the pooler and the classes of the tasks.
    """

    def __init__(self, config: Config):
        self.mesh = make_mesh(config)
        config = resolved(config, self.mesh)
        _check(config)
        config, self.start, self.vocabulary = networks.open_start(config, self.mesh)
        self.checkpoint, self.tokenizer = self.start.checkpoint, self.start.tokenizer
        folder, data, size = expand_path(config.finetune.data_dir), config.data, config.train.batch_size
        self.tasks = tuple(
            read_task(name, task, folder, data.on_bad_line) for name, task in config.finetune.tasks.items()
        )
        for each in self.tasks:
            if len(each.train) < size:
                rows = counted(len(each.train), "training row{s}")
                raise DataError(
                    f"{each.train.file}: task {each.name} has {rows}, fewer than "
                    f"train.batch_size={size}. Set train.batch_size={len(each.train)} or less"
                )
        found = {"tasks": {each.name: dataclasses.asdict(each.task) for each in self.tasks}}  # with their classes
        self.config = Config.from_dict(config.to_dict() | {"finetune": dataclasses.asdict(config.finetune) | found})
        self.heads = {head_of(each.name) for each in self.tasks}
        self.stores = {
            each.name: build_or_open(
                each.train.corpus(each.task.texts),
                self.tokenizer,
                data.max_length,
                data.cache_dir,
                prompts=[self.start.prompts.default] * len(each.task.texts),
            )
            for each in self.tasks
        }

    def built(self, config: Config) -> Built:
        """Return the encoder and the heads with their first weights."""
        return networks.build(config, self.checkpoint, None, self.vocabulary, projector=self.start.head)

    def start_encoder(self) -> SentenceEncoder:
        """Return the encoder before the first step."""
        return self.start.encoder(self.config, self.built(self.config).params)

    def train_heads(self, workdir: Path) -> Params:
        """Train the heads on embeddings of the frozen encoder, and return those that are best on dev."""
        config = self.config_of_heads()
        open_run(workdir, config, self.checkpoint, self.tokenizer, None)
        steps = counted(config.train.steps, "step{s}")
        log_line(f"stage 1 of 2: training the heads for {steps} on embeddings of the frozen encoder")
        stored, frozen = self.frozen_vectors(workdir / "vectors")
        built = self.built(config)
        definitions = {name: each for name, each in built.networks.definitions.items() if name in self.heads}
        built = Built(Networks(self.vocabulary, definitions), self._of_heads(built.params), Params())
        verdict = self._train(config, workdir, built, partial(self._model, frozen), stored)
        log_line(f"stage 1 of 2: {verdict.partition(' Exported')[0]}")
        return read_parameters(workdir, None)[0]

    def train_everything(self, workdir: Path, heads: Params) -> str:
        """Train the encoder and the heads, from trained heads or at random, and return the verdict of this stage."""
        built = self.built(self.config)

        def model(params: Params) -> TaskModel:
            return self._model(self.start.encoder(self.config, params), params)

        return self._train(self.config, workdir, built._replace(params=built.params | heads), model, {})

    def config_of_heads(self) -> Config:
        """Return the configuration of the stage that trains only the heads.

        It has `finetune.heads_steps` steps. If that is 0, it has `finetune.heads_epochs` passes, at most `train.steps`.
        """
        config, options = self.config, self.config.finetune
        passes = options.heads_epochs * (sum(len(each.train) for each in self.tasks) // config.train.batch_size)
        steps = options.heads_steps or min(passes, config.train.steps or passes)
        rate, decay = options.heads_learning_rate, options.heads_weight_decay
        return dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, steps=steps, chunk_size=0),
            optim=dataclasses.replace(config.optim, learning_rate=rate, weight_decay=decay),
            eval=dataclasses.replace(config.eval, guard=False, max_drop=0.0),
        )

    def frozen_vectors(self, folder: Path) -> tuple[dict[str, SentenceVectors], CachedEncoder]:
        """Compute the embeddings of training sentences, by task, with the frozen encoder; return that encoder, too.

        They are kept in a folder, of sentences cut to `data.max_length`.
        """
        frozen = self.start_encoder()
        return {data.name: self._stored(folder, data, frozen) for data in self.tasks}, CachedEncoder(frozen)

    def _stored(self, folder: Path, data: TaskData, frozen: SentenceEncoder) -> SentenceVectors:
        batch_size, length = self.config.eval.batch_size, self.config.data.max_length
        # Another run may have left its embeddings here, so the name says what they are of.
        path = folder / f"{data.name}-{data.digest()[:16]}-{frozen.fingerprint()[:16]}-{length}"
        distinct = {sentence: row for row, sentence in enumerate(dict.fromkeys(data.train.sentences))}

        def make(new: Path) -> None:
            log_line(f"task {data.name}: embedding {counted(len(distinct), 'sentence{s}')}")
            options: dict[str, Any] = {"max_length": length, "prompt": frozen.prompts.default}
            np.save(new / "vectors.npy", frozen.encode([*distinct], batch_size, show_progress=True, **options))
            np.save(new / "rows.npy", np.array([distinct[sentence] for sentence in data.train.sentences], np.int64))

        def make_or_find() -> None:
            with disk_errors(path, safe=_SAFE):
                make_arrays(path, make)

        hosts.decided_by_first(make_or_find)
        return SentenceVectors(path)

    def mixture(self, config: Config, stored: dict[str, SentenceVectors]) -> Mixture:
        """Return the batches of a stage: tokens, or embeddings of the frozen encoder by task if they are given."""
        options, train = config.finetune, config.train
        rows = [len(data.train) for data in self.tasks]
        steps = train.steps or train.epochs * (sum(rows) // train.batch_size)
        if options.mixing == "ratio":
            order = by_ratio([data.task.ratio for data in self.tasks], steps, train.seed)
        else:
            final = options.final_temperature or options.temperature
            order = by_temperature(rows, np.linspace(options.temperature, final, steps), train.seed)
        prompt_tokens = len(self.tokenizer.encode(self.start.prompts.default, add_special_tokens=False))
        sources = {
            data.name: BatchSource(
                self.stores[data.name],
                batch_size=train.batch_size,
                steps=int((order == number).sum()),
                seed=train.seed,
                pad_token_id=self.checkpoint.config.pad_token_id,
                shards=shards_of(self.mesh),
                packing=packing_of(config, self.mesh, chunks=train.chunks),
                prompt_tokens=[prompt_tokens] * len(data.task.texts),
                pools_prompts=self.start.prompts.pooled,
                vectors={ENCODER: stored[data.name]} if stored else {},
                labels={data.name: data.train.labels},
            )
            for number, data in enumerate(self.tasks)
        }
        return Mixture(sources, order, without_tokens=bool(stored))

    def rows_of_batch(self, source: Mixture, step: int) -> list[dict[str, Any]]:
        """Return the rows of a step's batch as in their file, with their lines."""
        name, rows = source.text_rows(step - 1)
        (data,) = (each.train for each in self.tasks if each.name == name)
        return [{"file": str(data.file), "line": data.lines[row], "texts": data.texts[row]} for row in rows]

    def _train(
        self,
        config: Config,
        workdir: Path,
        built: Built,
        model: Callable[[Params], TaskModel],
        stored: dict[str, SentenceVectors],
    ) -> str:
        source = self.mixture(config, stored)
        checks_drift = (config.eval.guard or config.eval.max_drop) and not stored
        drift_check = build_drift_check(config.eval, self.start_encoder) if checks_drift else None
        rows = " ".join(data.digest() for data in self.tasks)
        text = hashlib.sha256(rows.encode()).hexdigest()[:32]
        optimizer = make_optimizer(config.optim, len(source), rests=True)
        digests = json_digest([data.digest() for data in self.tasks])
        evaluation = TaskEvaluation(TasksMetric(self.tasks, config.eval.batch_size), digests, drift_check=drift_check)
        rows_of = partial(self.rows_of_batch, source)
        parts = (self.mesh, self.start, built, optimizer, source, text, evaluation, rows_of)
        return run_training(Run(config, workdir, *parts, model_of=model))

    def _of_heads(self, params: Params) -> Params:
        return {name: value for name, value in params.items() if name.partition(".")[0] in self.heads}

    def _model(self, encoder: Encoder, params: Params) -> TaskModel:
        """Return an encoder with the heads among parameters. If processes share them, all must call this."""
        tasks = {data.name: data.task for data in self.tasks}
        whole = {
            name: np.asarray(jax.device_put(value, replicated(self.mesh)) if isinstance(value, jax.Array) else value)
            for name, value in self._of_heads(params).items()
        }
        return TaskModel(encoder, tasks, heads_in(whole, tasks))


def _check(config: Config) -> None:
    """Refuse settings that fine-tuning does not support."""
    if "finetune" not in config.losses:
        raise ConfigError("nothing to fine-tune: give finetune.tasks, with finetune.weight above 0")
    if others := [f"{name}.weight" for name in config.losses if name != "finetune"]:
        raise ConfigError(f"fine-tuning trains labelled tasks only. Set {' and '.join(others)} to 0")
    if config.model.projector != "none" and not config.keeps_projector:
        raise ConfigError("model.projector is dropped after training, but heads read the final embeddings. Use 'none'")
    if config.data.augmentation != "none":
        raise ConfigError("data.augmentation: fine-tuning reads labelled rows as they are. Use 'none'")
    for key in ("keep_start", "interpolate", "hold", "beside"):
        if getattr(config.eval, key):
            raise ConfigError(f"eval.{key}: fine-tuning scores only the dev rows of its tasks. Leave it out")
