"""The training loop: from a configuration to a trained, evaluated, checkpointed workdir."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import grain
import jax
import tqdm
from transformers import PreTrainedTokenizerFast

from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, batches_per_epoch, make_batches
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.tokens import TokenStore, build_or_open
from diffcse_jax.encoder import SentenceEncoder, load_tokenizer
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.training import networks
from diffcse_jax.training.checkpoint import Checkpoints, start_workdir
from diffcse_jax.training.generator import own_generator
from diffcse_jax.training.metrics import MetricsWriter
from diffcse_jax.training.optimizer import learning_rate_schedule, make_optimizer
from diffcse_jax.training.sharding import make_mesh, replicated, shard_batch
from diffcse_jax.training.step import TrainState, initial_state, make_train_step


class DevEvaluation(Protocol):
    """What chooses the best checkpoint."""

    metric: str

    def __call__(self, encoder: SentenceEncoder) -> dict[str, float]:
        """Named scores, among them `metric`; higher is better."""


class Interrupted(UserError):
    """Training was asked to stop and has saved its state."""

    exit_code = 130  # as of a program ended by Ctrl-C


def train(config: Config, workdir: Path, corpus: Corpus, evaluation: DevEvaluation) -> None:
    """Trains until `train.steps` or `train.epochs` is reached, from the start or from the workdir's last checkpoint.

    The start order: the pretrained networks; over them the workdir's last checkpoint, if there is one.

    Raises:
        UserError: a configuration, checkpoint or text that cannot be used; a loss that is no longer a number; or
            `Interrupted`, after SIGINT or SIGTERM, with everything saved.
    """
    # 1. What can be refused is refused before anything is computed.
    mesh = make_mesh(config)
    encoder = pretrained.load(config.model.name_or_path)
    tokenizer = load_tokenizer(encoder.folder)
    networks.with_dropout(encoder.config, config)
    vocabulary = networks.vocabulary_of(tokenizer, encoder.config.vocab_size)
    named_generator = config.uses_difference and config.generator.name_or_path
    generator = networks.load_generator(config, encoder) if named_generator else None
    start_workdir(workdir, config, encoder, tokenizer)

    # 2. Text to tokens, once.
    store = build_or_open(corpus, tokenizer, _max_length(config, encoder), config.data.cache_dir)
    if len(store.columns) == 3 and config.contrast.negatives != "dropout":
        raise ConfigError(
            f"contrast.negatives={config.contrast.negatives!r} has no form with hard negatives, but {corpus.name} has "
            "three columns; use contrast.negatives='dropout', or name one or two of them in data.columns"
        )
    total_steps = config.train.steps or config.train.epochs * batches_per_epoch(len(store), config.train.batch_size)
    batches = make_batches(_batch_source(config, store, total_steps, encoder.config.pad_token_id))

    # 3. The networks from their checkpoints; a generator of one's own is trained first.
    if config.uses_difference and generator is None:
        generator = own_generator(config, encoder, store, vocabulary, mesh, workdir)
    definitions, params, batch_stats, frozen = networks.build(config, encoder, generator, vocabulary)
    optimizer = make_optimizer(config.optim, total_steps)
    state = initial_state(params, batch_stats, optimizer, mesh)
    frozen = jax.device_put(frozen, replicated(mesh))

    # 4. Over them, where an earlier run of this workdir stopped.
    checkpoints = Checkpoints(workdir, config, evaluation.metric)
    if checkpoints.latest_step is not None:
        state, data_state = checkpoints.restore(state)
        batches.set_state(data_state)
        print(f"resumed at step {int(state.step)} of {total_steps} from {workdir}", file=sys.stderr)

    run = _Run(config, workdir, total_steps, evaluation, checkpoints, encoder.config, tokenizer)
    try:
        run.loop(make_train_step(definitions, config, optimizer, mesh), state, frozen, batches, mesh)
    finally:
        checkpoints.close()


class _Run:
    """What the loop writes to and reads from beside the train state."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        total_steps: int,
        evaluation: DevEvaluation,
        checkpoints: Checkpoints,
        sizes: TransformerConfig,
        tokenizer: PreTrainedTokenizerFast,
    ):
        self.config = config
        self.workdir = workdir
        self.total_steps = total_steps
        self.evaluation = evaluation
        self.checkpoints = checkpoints
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.schedule = learning_rate_schedule(config.optim, total_steps)

    def loop(
        self,
        train_step: Any,
        state: TrainState,
        frozen: Params,
        batches: grain.DatasetIterator,
        mesh: jax.sharding.Mesh,
    ) -> None:
        step = int(state.step)
        with (
            _metrics_writer(self.workdir, step) as write,
            _stop_requested() as stop,
            tqdm.tqdm(
                initial=step, total=self.total_steps, desc="training", unit=" steps", disable=_quiet(), mininterval=1.0
            ) as progress,
        ):
            if step == 0:
                self._evaluate(state, write)
            since, last_step = time.perf_counter(), step
            while step < self.total_steps:
                state, metrics = train_step(state, frozen, shard_batch(next(batches), mesh))
                step += 1
                progress.update()
                if self._logs_at(step):
                    row = self._fetch(step, metrics)
                    elapsed = time.perf_counter() - since
                    row["sentences_per_second"] = (step - last_step) * self.config.train.batch_size / elapsed
                    progress.set_postfix(loss=f"{row['loss']:.4f}", sentences_s=f"{row['sentences_per_second']:.0f}")
                    write(step, row)
                    since, last_step = time.perf_counter(), step
                if stop() and step < self.total_steps:
                    self._save_and_stop(state, batches)
                if self._evaluates_at(step):
                    paused = time.perf_counter()
                    dev = self._evaluate(state, write)
                    self.checkpoints.save(state, batches.get_state(), dev)
                    since += time.perf_counter() - paused

    def _logs_at(self, step: int) -> bool:
        return step in (1, self.total_steps) or step % self.config.train.log_every == 0

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.eval.every
        return step == self.total_steps or (every > 0 and step % every == 0)

    def _evaluate(self, state: TrainState, write: Any) -> dict[str, float]:
        """Dev scores of the present encoder, written and shown."""
        encoder = SentenceEncoder(  # the compiled function is shared by all encoders of these sizes
            self.sizes,
            parameters.subset(state.params, "encoder"),
            self.tokenizer,
            pooler=self.config.encoding_pooler,
            pooler_head=parameters.subset(state.params, "projector"),
        )
        dev = self.evaluation(encoder)
        write(int(state.step), {f"dev/{name}": score for name, score in dev.items()})
        scores = ", ".join(f"{name} {score:.2f}" for name, score in dev.items())
        tqdm.tqdm.write(f"step {int(state.step)}: {scores}", file=sys.stderr)
        return dev

    def _fetch(self, step: int, metrics: dict[str, jax.Array]) -> dict[str, float]:
        """The step's metrics as numbers.

        Raises:
            UserError: the loss is not a number, with what can be done.
        """
        row = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(row["loss"]):
            raise UserError(
                f"the loss became {row['loss']} by step {step}; the last checkpoint, of step "
                f"{self.checkpoints.latest_step}, is kept in {self.workdir}. A lower optim.learning_rate or "
                "precision=float32 usually helps"
            )
        return row | {"learning_rate": float(self.schedule(step - 1))}

    def _save_and_stop(self, state: TrainState, batches: grain.DatasetIterator) -> None:
        self.checkpoints.save(state, batches.get_state(), {})
        self.checkpoints.wait()
        raise Interrupted(
            f"stopped at step {int(state.step)}; everything is saved: the same command goes on from there"
        )


def _batch_source(config: Config, store: TokenStore, steps: int, pad_token_id: int) -> BatchSource:
    return BatchSource(
        store,
        batch_size=config.train.batch_size,
        steps=steps,
        seed=config.train.seed,
        pad_token_id=pad_token_id,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def _max_length(config: Config, encoder: pretrained.Pretrained) -> int:
    if config.data.max_length > encoder.config.max_length:
        raise ConfigError(
            f"data.max_length={config.data.max_length} is more than the {encoder.config.max_length} positions of "
            f"{config.model.name_or_path}"
        )
    return config.data.max_length


def _quiet() -> bool | None:
    """Hosts but the first draw no bar; None lets tqdm decide by whether there is a terminal."""
    return True if jax.process_index() else None


@contextmanager
def _metrics_writer(workdir: Path, resumed_at: int) -> Iterator[Any]:
    """A function that writes rows; on hosts but the first it does nothing."""
    if jax.process_index():
        yield lambda step, values: None
        return
    writer = MetricsWriter(workdir, resumed_at=resumed_at)
    try:
        yield writer.write
    finally:
        writer.close()


@contextmanager
def _stop_requested() -> Iterator[Any]:
    """A function that tells whether SIGINT or SIGTERM has come; a second Ctrl-C stops at once."""
    received = []

    def on_signal(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        print("\nstopping after this step; saving first", file=sys.stderr)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
