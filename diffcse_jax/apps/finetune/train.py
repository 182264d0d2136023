"""A fine-tuning: labelled tasks trained together, or first the heads alone and then everything."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diffcse_jax import hosts
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.model import TaskEvaluation, TaskModel, TasksMetric, heads_in
from diffcse_jax.apps.finetune.outputs import write_outputs
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
from diffcse_jax.run_folder.saved_encoder import read_parameters
from diffcse_jax.training import networks
from diffcse_jax.training.curves import draw_curves
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import Built
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.step import make_optimizer
from diffcse_jax.training.train import run_training

Stored = Mapping[str, SentenceVectors]  # embeddings of training sentences by the frozen encoder, by task


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`. Return the verdict of the last stage."""

    def finish() -> None:
        export_with_curves(workdir)
        with disk_errors(workdir, safe="The checkpoints are complete."):
            if (workdir / HEADS).is_dir():
                draw_curves(workdir / HEADS)
            files = write_outputs(workdir, tasks)
        print("wrote", *files, sep="\n  ")
        print(verdict)

    with in_workdir(config, workdir):
        verdict, tasks = finetune(config, workdir)
        hosts.decided_by_first(finish)  # the other processes wait, because their end would end the first one
    return verdict


def finetune(config: Config, workdir: Path) -> tuple[str, tuple[TaskData, ...]]:
    """Train the encoder and the heads, in one stage or two, and resume if stopped. Return the verdict and the tasks."""
    tuning = Tuning(config)
    return tuning.train(workdir), tuning.tasks


class Tuning:
    """The encoder to start from and the rows of the tasks, which both stages share.

    The attribute `config` also has the pooler and the classes of the tasks.
    """

    def __init__(self, config: Config):
        self.mesh = make_mesh(config)
        config = resolved(config, self.mesh)
        _check(config)
        config, self.start, self.vocabulary = networks.open_start(config, self.mesh)
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
        self.stores = {
            each.name: build_or_open(
                each.train.corpus(each.task.texts),
                self.start.tokenizer,
                data.max_length,
                data.cache_dir,
                prompts=[self.start.prompts.default] * len(each.task.texts),
            )
            for each in self.tasks
        }

    def train(self, workdir: Path) -> str:
        """Train in one stage or two, and return the verdict of the last one."""
        config, start = self.config, self.start
        open_run(workdir, config, start.checkpoint, start.tokenizer, None)
        built = networks.build(config, start.checkpoint, None, self.vocabulary, projector=start.head)
        first_encoder = partial(start.encoder, config, built.params)
        if config.finetune.stages == "heads_first":
            heads = self._train_heads(workdir / HEADS, built, first_encoder())
            log_line("stage 2 of 2: training the encoder and the heads")
            built = built._replace(params=built.params | heads)
        checks_drift = config.eval.guard or config.eval.max_drop
        drift_check = build_drift_check(config.eval, first_encoder) if checks_drift else None
        return self._train(config, workdir, built, partial(start.encoder, config), drift_check=drift_check)

    def _train_heads(self, workdir: Path, built: Built, frozen: SentenceEncoder) -> Params:
        """Train the heads on embeddings of the frozen encoder, and return those that are best on dev.

        This stage takes `finetune.heads_steps` steps, or else `finetune.heads_epochs` passes, at most `train.steps`.
        """
        options, train = self.config.finetune, self.config.train
        passes = options.heads_epochs * (sum(len(each.train) for each in self.tasks) // train.batch_size)
        steps = options.heads_steps or min(passes, train.steps or passes)
        rate, decay = options.heads_learning_rate, options.heads_weight_decay
        config = dataclasses.replace(
            self.config,
            train=dataclasses.replace(train, steps=steps, chunk_size=0),
            optim=dataclasses.replace(self.config.optim, learning_rate=rate, weight_decay=decay),
            eval=dataclasses.replace(self.config.eval, guard=False, max_drop=0.0),
        )
        open_run(workdir, config, self.start.checkpoint, self.start.tokenizer, None)
        heads = f"the heads for {counted(steps, 'step{s}')} on embeddings of the frozen encoder"
        log_line(f"stage 1 of 2: training {heads}")
        stored = {data.name: self._embed(workdir / "vectors", data, frozen) for data in self.tasks}
        definitions = {name: each for name, each in built.networks.definitions.items() if self._is_head(name)}
        built = Built(Networks(self.vocabulary, definitions), self._of_heads(built.params), Params())
        encoder = CachedEncoder(frozen)
        verdict = self._train(config, workdir, built, lambda params: encoder, stored)
        log_line(f"stage 1 of 2: {verdict.partition(' Exported')[0]}")
        return read_parameters(workdir, None)[0]

    def _embed(self, folder: Path, data: TaskData, frozen: SentenceEncoder) -> SentenceVectors:
        """Compute the embeddings of a task's training sentences, or open them if a folder has them."""
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
            with disk_errors(path, safe="The checkpoints are complete."):
                make_arrays(path, make)

        hosts.decided_by_first(make_or_find)
        return SentenceVectors(path)

    def _train(
        self,
        config: Config,
        workdir: Path,
        built: Built,
        encoder_of: Callable[[Params], Encoder],
        stored: Stored | None = None,
        **checks: Any,
    ) -> str:
        """Train one stage, on tokens or on stored embeddings."""
        source, tasks = self._mixture(config, stored or {}), {data.name: data.task for data in self.tasks}
        text = json_digest([data.digest() for data in self.tasks])[:32]
        evaluation = TaskEvaluation(TasksMetric(self.tasks, config.eval.batch_size), text, **checks)
        optimizer = make_optimizer(config.optim, len(source), rests=True)

        def model_of(params: Params) -> TaskModel:  # processes that share parameters must all call this
            heads = {
                name: np.asarray(
                    jax.device_put(value, replicated(self.mesh)) if isinstance(value, jax.Array) else value
                )
                for name, value in self._of_heads(params).items()
            }
            return TaskModel(encoder_of(params), tasks, heads_in(heads, tasks))

        def rows_of(step: int) -> list[dict[str, Any]]:
            name, rows = source.text_rows(step - 1)
            (data,) = (each.train for each in self.tasks if each.name == name)
            return [{"file": str(data.file), "line": data.lines[row], "texts": data.texts[row]} for row in rows]

        parts = (self.mesh, self.start, built, optimizer, source, text, evaluation, rows_of)
        return run_training(Run(config, workdir, *parts, model_of=model_of))

    def _mixture(self, config: Config, stored: Stored) -> Mixture:
        """Return the batches of a stage: tokens, or stored embeddings if there are any."""
        options, train = config.finetune, config.train
        rows = [len(data.train) for data in self.tasks]
        steps = train.steps or train.epochs * (sum(rows) // train.batch_size)
        if options.mixing == "ratio":
            order = by_ratio([data.task.ratio for data in self.tasks], steps, train.seed)
        else:
            final = options.final_temperature or options.temperature
            order = by_temperature(rows, np.linspace(options.temperature, final, steps), train.seed)
        prompt_tokens = len(self.start.tokenizer.encode(self.start.prompts.default, add_special_tokens=False))
        sources = {
            data.name: BatchSource(
                self.stores[data.name],
                batch_size=train.batch_size,
                steps=int((order == number).sum()),
                seed=train.seed,
                pad_token_id=self.start.checkpoint.config.pad_token_id,
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

    def _is_head(self, network: str) -> bool:
        return any(network == head_of(data.name) for data in self.tasks)

    def _of_heads(self, params: Params) -> Params:
        return {name: value for name, value in params.items() if self._is_head(name.partition(".")[0])}


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
