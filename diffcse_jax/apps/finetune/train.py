"""A fine-tuning: labelled tasks trained together, or first the heads alone and then everything."""

from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from diffcse_jax import hosts
from diffcse_jax.api import export_with_curves, in_workdir
from diffcse_jax.apps.finetune.heads import train_head
from diffcse_jax.apps.finetune.model import TaskEvaluation, TaskModel, TasksMetric, heads_in, write_outputs
from diffcse_jax.apps.finetune.tasks import read_task
from diffcse_jax.config import Config, flat
from diffcse_jax.data.batches import BatchSource, Mixture, by_ratio
from diffcse_jax.data.tokens import build_or_open
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.hosts import log_line
from diffcse_jax.io import CHECKPOINTS, disk_errors, expand_path, json_digest, read_sealed, write_sealed, write_tensors
from diffcse_jax.losses.finetune import AVERAGE, head_of
from diffcse_jax.models import layers
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder import HEADS, open_run
from diffcse_jax.run_folder.checkpoints import saved_steps
from diffcse_jax.run_folder.records import read_baseline
from diffcse_jax.training import networks
from diffcse_jax.training.loop import Run
from diffcse_jax.training.sharding import make_mesh, packing_of, replicated, resolved, shards_of
from diffcse_jax.training.step import make_optimizer
from diffcse_jax.training.train import run_training


def run_finetune(config: Config, workdir: Path) -> str:
    """Fine-tune, export and predict: the work of `diffcse finetune`. Return the verdict of the last stage."""

    def finish() -> None:
        export_with_curves(workdir)
        with disk_errors(workdir, safe="The checkpoints are complete."):
            files = write_outputs(workdir, tuning.tasks, config.eval.batch_size)
        print("wrote", *files, sep="\n  ")
        print(verdict)

    with in_workdir(config, workdir):
        tuning = Tuning(config)
        verdict = tuning.train(workdir)
        hosts.decided_by_first(finish)  # the other processes wait, because their end would end the first one
    return verdict


class Tuning:
    """The encoder to start from and the rows of the tasks.

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
        """Train in one stage or two, and resume if stopped. Return how the selected model compares with the first."""
        config, start = self.config, self.start
        open_run(workdir, config, start.checkpoint, start.tokenizer, None)
        built = networks.build(config, start.checkpoint, None, self.vocabulary, projector=start.recorded.head)
        text = json_digest([data.digest() for data in self.tasks])[:32]
        resumes = saved_steps(workdir / CHECKPOINTS) and read_baseline(workdir)  # from heads in the checkpoint
        if config.finetune.stages == "heads_first" and not resumes:
            built = built._replace(params=built.params | self._trained_heads(workdir / HEADS, built.params, text))
            log_line("stage 2 of 2: training the encoder and the heads")
        source, tasks = self._mixture(), {data.name: data.task for data in self.tasks}
        evaluation = TaskEvaluation(TasksMetric(AVERAGE, config.eval.batch_size, self.tasks), text)
        optimizer = make_optimizer(config.optim, len(source), rests=True)

        def model_of(params: Params) -> TaskModel:  # processes that share parameters must all call this
            heads = jax.device_put(heads_in(params, tasks), replicated(self.mesh))
            return TaskModel(start.encoder(config, params), tasks, jax.tree.map(np.asarray, heads))

        def sentences_of(step: int) -> list[str]:
            return start.tokenizer.batch_decode(source[step - 1].rows.input_ids, skip_special_tokens=True)

        parts = (self.mesh, start, built, optimizer, source, text, evaluation, sentences_of)
        return run_training(Run(config, workdir, *parts, model_of=model_of))

    def _trained_heads(self, folder: Path, params: Params, text: str) -> Params:
        """Train the heads on embeddings of the frozen encoder, or read them if that has been done with this text."""
        weights, record = folder / "heads.safetensors", folder / "heads.json"

        def train_or_check() -> None:
            if record.is_file() and read_sealed(record, f"Remove {folder} to train them again").get("text") == text:
                return
            log_line("stage 1 of 2: training the heads on embeddings of the frozen encoder")
            frozen, heads, scores = self.start.encoder(self.config, params), Params(), {}
            for data in self.tasks:
                head = layers.subset(params, head_of(data.name))
                head, scores[data.name] = train_head(self.config, data, head, frozen)
                heads |= layers.prefixed(head, head_of(data.name))
            with disk_errors(folder, safe="The encoder and the texts are unchanged."):
                folder.mkdir(parents=True, exist_ok=True)
                write_tensors(weights, heads)
                write_sealed(record, {"text": text, "scores": scores}, [weights])  # last: the heads are complete

        hosts.decided_by_first(train_or_check)
        return load_file(weights)

    def _mixture(self) -> Mixture:
        """Return the batches of all tasks."""
        config, train, prompts = self.config, self.config.train, self.start.prompts
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
                labels={data.name: data.train.labels},
            )
            for number, data in enumerate(self.tasks)
        }
        return Mixture(sources, order)


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
