"""A fine-tuning: labelled tasks trained together, or first the heads alone and then everything."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from diffcse_jax import hosts
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.model import TaskEvaluation, TaskModel, TasksMetric, heads_in, write_outputs
from diffcse_jax.apps.finetune.tasks import TaskData, read_task
from diffcse_jax.config import Config, flat
from diffcse_jax.data.batches import BatchSource, Mixture, by_ratio
from diffcse_jax.data.token_store import build_or_open
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.evaluation import CachedEncoder, Encoder
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, expand_path, json_digest
from diffcse_jax.losses.finetune import AVERAGE, ENCODER, head_of
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

Embeddings = Float32[np.ndarray, "sentences dimension"]
Stored = Mapping[str, Embeddings]  # of training sentences by the frozen encoder, by task


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`. Return the verdict of the last stage."""

    def finish() -> None:
        export_with_curves(workdir)
        with disk_errors(workdir, safe="The checkpoints are complete."):
            if (workdir / HEADS).is_dir():
                draw_curves(workdir / HEADS)
            files = write_outputs(workdir, tuning.tasks, config.eval.batch_size)
        print("wrote", *files, sep="\n  ")
        print(verdict)

    with in_workdir(config, workdir):
        tuning = Tuning(config)
        verdict = tuning.train(workdir)
        hosts.decided_by_first(finish)  # the other processes wait, because their end would end the first one
    return verdict


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
        self.tasks = [read_task(name, task, folder, data.on_bad_line) for name, task in config.finetune.tasks.items()]
        if few := next((each for each in self.tasks if len(each.train) < size), None):
            rows = counted(len(few.train), "training row{s}")
            raise DataError(
                f"{few.train.file}: task {few.name} has {rows}, fewer than train.batch_size={size}. Set "
                f"train.batch_size={len(few.train)} or less"
            )
        classes = {f"finetune.tasks.{each.name}.labels": each.task.labels for each in self.tasks}
        self.config = Config.from_dict(flat(config.to_dict()) | classes)
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
        """Train in one stage or two, and resume if stopped. Return the verdict of the last stage."""
        config, start = self.config, self.start
        open_run(workdir, config, start.checkpoint, start.tokenizer, None)
        built = networks.build(config, start.checkpoint, None, self.vocabulary, projector=start.recorded.head)
        if config.finetune.stages == "heads_first":
            heads = self._train_heads(workdir / HEADS, built)
            log_line("stage 2 of 2: training the encoder and the heads")
            built = built._replace(params=built.params | heads)
        return self._train(config, workdir, built, partial(start.encoder, config))

    def _train_heads(self, workdir: Path, built: Built) -> Params:
        """Train the heads on embeddings of the frozen encoder, and return those that are best on dev.

        This stage takes `finetune.heads_steps` steps, or else `finetune.heads_epochs` passes, at most `train.steps`.
        """
        options, train = self.config.finetune, self.config.train
        passes = options.heads_epochs * (sum(len(each.train) for each in self.tasks) // train.batch_size)
        steps = options.heads_steps or min(passes, train.steps or passes)
        changes = {
            "train.steps": steps,
            "train.chunk_size": 0,
            "optim.learning_rate": options.heads_learning_rate,
            "optim.weight_decay": options.heads_weight_decay,
        }
        config = Config.from_dict(flat(self.config.to_dict()) | changes)
        open_run(workdir, config, self.start.checkpoint, self.start.tokenizer, None)
        heads = f"the heads for {counted(steps, 'step{s}')} on embeddings of the frozen encoder"
        log_line(f"stage 1 of 2: training {heads}")
        frozen = self.start.encoder(config, built.params)
        stored = {data.name: self._embed(data, frozen) for data in self.tasks}
        definitions = {head_of(name): built.networks.definitions[head_of(name)] for name in stored}
        params = {name: value for name, value in built.params.items() if name.partition(".")[0] in definitions}
        built = Built(Networks(self.vocabulary, definitions), params, Params())
        cached = CachedEncoder(frozen)  # each evaluation asks for the same embeddings
        verdict = self._train(config, workdir, built, lambda params: cached, stored)
        log_line(f"stage 1 of 2: {verdict.partition(' Exported')[0]}")
        return read_parameters(workdir, None)[0]

    def _embed(self, data: TaskData, frozen: SentenceEncoder) -> Embeddings:
        """Return the embeddings of a task's training sentences."""
        sentences = [text for texts in data.train.texts for text in texts]
        log_line(f"task {data.name}: embedding {counted(len(sentences), 'sentence{s}')}")
        options: dict[str, Any] = {"max_length": self.config.data.max_length, "prompt": frozen.prompts.default}
        return frozen.encode(sentences, self.config.eval.batch_size, show_progress=True, **options)

    def _train(
        self,
        config: Config,
        workdir: Path,
        built: Built,
        encoder_of: Callable[[Params], Encoder],
        stored: Stored = MappingProxyType({}),
    ) -> str:
        """Train one stage, on tokens or on stored embeddings, and return the verdict."""
        source, tasks = self._mixture(config, stored), {data.name: data.task for data in self.tasks}
        text = json_digest([data.digest() for data in self.tasks])[:32]
        evaluation = TaskEvaluation(TasksMetric(AVERAGE, config.eval.batch_size, self.tasks), text)
        optimizer = make_optimizer(config.optim, len(source), rests=True)

        def model_of(params: Params) -> TaskModel:  # processes that share parameters must all call this
            heads = jax.device_put(heads_in(params, tasks), replicated(self.mesh))
            return TaskModel(encoder_of(params), tasks, jax.tree.map(np.asarray, heads))

        def sentences_of(step: int) -> list[str]:
            token_ids = source.with_tokens(step - 1).rows.input_ids
            return self.start.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

        parts = (self.mesh, self.start, built, optimizer, source, text, evaluation, sentences_of)
        return run_training(Run(config, workdir, *parts, model_of=model_of))

    def _mixture(self, config: Config, stored: Stored) -> Mixture:
        """Return the batches of a stage: tokens, or stored embeddings if there are any."""
        train, prompts = config.train, self.start.prompts
        steps = train.steps or train.epochs * (sum(len(data.train) for data in self.tasks) // train.batch_size)
        order = by_ratio([data.task.ratio for data in self.tasks], steps, train.seed)
        prompt_tokens = len(self.start.tokenizer.encode(prompts.default, add_special_tokens=False))
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
                pools_prompts=prompts.pooled,
                vectors={ENCODER: stored[data.name]} if stored else {},
                labels={data.name: data.train.labels},
            )
            for number, data in enumerate(self.tasks)
        }
        return Mixture(sources, order, without_tokens=bool(stored))


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
    for key in ("keep_start", "interpolate", "hold", "beside", "guard", "max_drop"):
        if getattr(config.eval, key):
            raise ConfigError(f"eval.{key}: fine-tuning scores only the dev rows of its tasks. Leave it out")
