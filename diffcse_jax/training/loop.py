"""The training loop: steps, and between them logs, dev evaluations and checkpoints."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils

from diffcse_jax import hosts
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import Interrupted, UserError
from diffcse_jax.hosts import StopRequest, stop_requested
from diffcse_jax.io import CHECKPOINTS
from diffcse_jax.losses.base import Metrics
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.checkpoints import Checkpoints, TrainState
from diffcse_jax.run_folder.records import NOTHING, Measured, Record, read_metrics
from diffcse_jax.training.bad_steps import BadSteps
from diffcse_jax.training.callbacks import Callback, MetricsFile, Progress, TensorBoard, Training, started
from diffcse_jax.training.metrics import report, shown
from diffcse_jax.training.optimizer import learning_rate_schedule
from diffcse_jax.training.selection import Evaluation
from diffcse_jax.training.start import Start
from diffcse_jax.training.stopping import holds_guard, reason_to_stop

SHORT_RUN = 100  # a run of at most this many steps logs each of them, whatever train.log_every


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, as the loop sees it: all but the train state."""

    config: Config
    workdir: Path
    total_steps: int
    evaluation: Evaluation
    checkpoints: Checkpoints
    start: Start
    baseline: Record  # the start's
    sentences: Callable[[int], Sequence[Any]] = lambda step: ()  # of the batch of a step, as JSON
    callbacks: Sequence[Callback] = ()  # the user's
    model: Callable[[Params], Any] | None = None  # makes what is evaluated of the parameters; None: the encoder

    def logs_at(self, step: int) -> bool:
        """True if a row of metrics is written after this step: in a short run after every step."""
        every = self.config.train.log_every if self.total_steps > SHORT_RUN else 1
        return step in (1, self.total_steps) or step % every == 0

    def evaluates_at(self, step: int) -> bool:
        """True if the encoder is evaluated and saved after this step."""
        every = self.config.eval.every
        return step == self.total_steps or (every > 0 and step % every == 0)

    def may_be_best(self, measured: Measured) -> bool:
        """True unless the encoder has lost more general quality than it may."""
        options, guard = self.config.eval, self.evaluation.drift_metric
        return bool(options.interpolate) or holds_guard(options, guard, self.baseline.dev, measured.scores)

    def ends_at(self, step: int) -> bool:
        """True if training is over after this step, which is then said; the first process decides for all."""
        if step == self.total_steps:
            return True
        options = self.config.eval
        if not options.patience and not options.max_drop:
            return False

        def decide() -> str:
            metric, guard = self.evaluation.metric, self.evaluation.drift_metric
            rows = [row for row in read_metrics(self.workdir) if 0 < row["step"] <= step and f"dev/{metric}" in row]
            evaluations = [
                {name.removeprefix("dev/"): value for name, value in row.items() if name.startswith("dev/")}
                for row in rows
            ]
            return reason_to_stop(options, metric, guard, self.baseline.dev, evaluations)

        reason = hosts.decided_by_first(decide)
        if reason:
            report(f"training ends at step {step} of {self.total_steps}: {reason}")
        return bool(reason)


def loop(
    run: Run,
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: grain.DatasetIterator,
) -> None:
    """Steps, and between them logs, dev evaluations and checkpoints, until the run is complete or asked to stop."""
    step = int(state.step)
    with stop_requested() as stop, _callbacks(run, step, stop) as tell:
        if step == 0:
            show_baseline(run, state, tell)
        clock = _Clock(step, run.config.train.batch_size)
        bad_steps = BadSteps(
            run.workdir,
            limit=run.config.train.max_bad_steps,
            already=int(state.bad_steps),
            parameters=list(state.params),
            sentences=run.sentences,
        )
        log, saves = _Log(run, clock, tell, bad_steps), _Saves(run, tell)
        while step < run.total_steps:
            state, metrics = train_step(state, next(batches))
            step += 1
            bad_steps.remember(step, metrics)
            log.flush()  # an earlier step's row, now that the device has this one to work on
            saves.flush()
            logs, evaluates = run.logs_at(step), run.evaluates_at(step)
            stops = _agreed(stop, at=logs) and step < run.total_steps
            if logs:
                log.add(step, metrics)
            else:
                tell.on_step(step, {})
            if evaluates or stops:
                log.flush()
                log.check(step, metrics)
            if evaluates:
                with clock.paused():
                    measured = evaluate(run, state, tell)
                    saves.start(state, batches, measured, eligible=run.may_be_best(measured))
                if run.ends_at(step):
                    break
            if stops:
                if not evaluates:
                    saves.start(state, batches, NOTHING)
                saves.finish()
                raise Interrupted(f"stopped at step {step}; everything is saved: the same command goes on from there")
        saves.finish()


def _callbacks(run: Run, step: int, stop: StopRequest) -> AbstractContextManager[Callback]:
    """All that follows the run, its own first: `Run.ends_at` reads the rows."""
    training = Training(run.config, run.workdir, step, run.total_steps, run.baseline.dev, stop.make)
    return started((MetricsFile(), TensorBoard(), Progress(), *run.callbacks), training)


def show_baseline(run: Run, state: TrainState, tell: Callback) -> None:
    """The dev scores of the start, written and shown, and beside them those of the vector that will be trained."""
    start, baseline, config = run.start, run.baseline, run.config
    recorded = "which it records" if start.recorded else "as this run has it, for it records none"
    recorded = recorded if run.model is None else "as this run trains it"
    report(f"the start, {start.name} with the pooler {baseline.pooler}, {recorded}: {shown(baseline.dev)}")
    scores = baseline.dev
    if run.model is None and not start.is_trained_vector(config):
        tell.on_evaluation_start(0)
        scores = run.evaluation.measure(_encoder(run, state)).scores
        report(f"step 0, the vector that is trained, {config.encoding_pooler}: {shown(scores)}")
    tell.on_evaluation(0, scores)


def evaluate(run: Run, state: TrainState, tell: Callback) -> Measured:
    """The dev evaluation of the present encoder, its scores written and shown."""
    step, metric = int(state.step), run.evaluation.metric
    tell.on_evaluation_start(step)
    measured = run.evaluation.measure(_encoder(run, state))
    tell.on_evaluation(step, measured.scores)
    report(f"step {step}: {shown(measured.scores)} (the start: {metric} {run.baseline.dev[metric]:.2f})")
    return measured


def _encoder(run: Run, state: TrainState) -> Any:
    """The encoder, or what `run.model` makes of the parameters."""
    if run.model is not None:
        return run.model(state.params)
    return SentenceEncoder(  # the compiled function is shared by all encoders of these sizes
        run.start.checkpoint.config,
        parameters.subset(state.params, "encoder"),
        run.start.tokenizer,
        pooler=run.config.encoding_pooler,
        pooler_head=parameters.subset(state.params, "projector"),
    )


class _Log:
    """Rows of metrics, read from the device once the next step is on its way, so that it never waits for the host."""

    def __init__(self, run: Run, clock: "_Clock", tell: Callback, bad_steps: BadSteps):
        self._run, self._clock, self._tell = run, clock, tell
        self._bad_steps, self._still = bad_steps, False
        self._unread: tuple[int, Metrics] | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        """Starts to copy the metrics of a step."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._unread = step, metrics

    def flush(self) -> None:
        """Writes the row that was added last, unless that is done.

        Raises:
            UserError: too many steps were not applied.
        """
        if self._unread is None:
            return
        step, metrics = self._unread
        self._unread = None
        row = self.check(step, metrics)
        updates = max(step - int(row["bad_steps"]), 1)
        row["learning_rate"] = float(learning_rate_schedule(self._run.config.optim, self._run.total_steps)(updates - 1))
        row["sentences_per_second"] = self._clock.rate(step)
        self._tell.on_step(step, {name: value for name, value in row.items() if math.isfinite(value)})

    def check(self, step: int, metrics: Metrics) -> dict[str, float]:
        """The metrics of a step as numbers.

        Raises:
            UserError: too many steps were not applied, with what can be done.
        """
        row = {name: float(value) for name, value in metrics.items()}
        try:
            self._bad_steps.check(step, row)
        except UserError as error:
            raise UserError(
                f"{error}; the last checkpoint, of step {self._run.checkpoints.latest_step}, is kept in "
                f"{self._run.workdir}. A lower optim.learning_rate or precision=float32 usually helps"
            ) from error
        if row["grad_norm"] == 0 and not self._still:
            self._still = True
            report(f"warning: the gradient is 0 at step {step}: nothing is learned (a learning rate that is too high?)")
        return {name: value for name, value in row.items() if name != "bad_gradient"}


class _Saves:
    """Checkpoints, told of once they are whole: they are written in the background."""

    def __init__(self, run: Run, tell: Callback):
        self._checkpoints, self._folder, self._tell = run.checkpoints, run.workdir / CHECKPOINTS, tell
        self._unfinished: list[int] = []

    def start(
        self, state: TrainState, batches: grain.DatasetIterator, measured: Measured, *, eligible: bool = True
    ) -> None:
        self._checkpoints.save(state, batches.get_state(), measured, eligible=eligible)
        self._unfinished.append(int(state.step))
        self.flush()

    def flush(self) -> None:
        """Tells of those that were finished meanwhile: only then they have their names."""
        for step in [step for step in self._unfinished if (self._folder / str(step)).is_dir()]:
            self._unfinished.remove(step)
            self._tell.on_save(step, self._folder / str(step))

    def finish(self) -> None:
        self._checkpoints.wait()
        self.flush()


class _Clock:
    """Sentences per second since the last reading, without pauses."""

    def __init__(self, step: int, batch_size: int):
        self._step, self._since, self._batch_size = step, time.perf_counter(), batch_size

    def rate(self, step: int) -> float:
        now = time.perf_counter()
        rate = (step - self._step) * self._batch_size / (now - self._since)
        self._step, self._since = step, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start


def _agreed(stop: StopRequest, *, at: bool) -> bool:
    """True if any host was asked to stop. They ask one another at logged steps only, so that all stop at the same."""
    if jax.process_count() == 1:
        return stop.made
    return at and bool(multihost_utils.process_allgather(np.int32(stop.made)).any())
