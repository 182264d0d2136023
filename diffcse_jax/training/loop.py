"""The training loop: steps, and between them rows of metrics, dev evaluations and checkpoints."""

import collections
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils

from diffcse_jax import hosts
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config, EvalConfig
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import Interrupted, UserError
from diffcse_jax.hosts import StopRequest, log_line, stop_requested
from diffcse_jax.io import CHECKPOINTS, append_line, disk_errors
from diffcse_jax.losses.base import Metrics
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.checkpoints import Checkpoints, TrainState
from diffcse_jax.run_folder.records import NOTHING, Measured, Outcomes, Record, read_metrics
from diffcse_jax.training.callbacks import (
    Callback,
    MetricsFile,
    Progress,
    TensorBoard,
    Training,
    format_scores,
    started,
)
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.optimizer import learning_rate_schedule

SHORT_RUN = 100  # runs of at most this many steps log each of them, whatever train.log_every
RECENT_STEPS = 100  # metrics of this many steps are kept until a row shows whether one of them was bad

Scores = Mapping[str, float]


@runtime_checkable
class Evaluation(Protocol):
    """What training needs of a dev evaluation, such as `evaluation.dev.DevEvaluation`.

    Attributes:
        metric: The score that chooses the best checkpoint.
        text: Identifies the text that the metric is measured on.
        drift_metric: The score of general quality, for `eval.max_drop`; empty if it is not measured.
        units: What intervals are computed over, such as "1,000 queries".
        caveat: Why a gain in the metric says little about the text; empty if it does not.
    """

    @property
    def metric(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def drift_metric(self) -> str: ...

    @property
    def units(self) -> str: ...

    @property
    def caveat(self) -> str: ...

    def measure(self, encoder: Any) -> Measured:
        """Return the scores of an encoder (higher is better), and what the metric summarizes."""

    def interval(self, start: Outcomes, model: Outcomes) -> tuple[float, float]:
        """Return a 95% interval of the metric's difference between the model and the starting checkpoint."""

    def held(self, encoder: Any) -> Mapping[str, Outcomes]:
        """Return the outcomes of the metrics of `eval.hold`, by name."""

    def regressions(self, start: Mapping[str, Outcomes], model: Mapping[str, Outcomes]) -> Sequence[str]:
        """Return the metrics of `eval.hold` in which the model is significantly worse, as text."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything about a run that the loop needs, except for the train state.

    Attributes:
        config: The configuration.
        workdir: The run folder.
        total_steps: Number of steps of the whole run.
        evaluation: The dev evaluation.
        checkpoints: Writes checkpoints.
        base: The starting checkpoint.
        baseline: Its dev scores.
        sentences: Returns the sentences of a step's batch, as JSON values.
        callbacks: The user's callbacks.
        model: Makes what is evaluated from the parameters. None: the sentence encoder.
    """

    config: Config
    workdir: Path
    total_steps: int
    evaluation: Evaluation
    checkpoints: Checkpoints
    base: StartingCheckpoint
    baseline: Record
    sentences: Callable[[int], Sequence[Any]] = lambda step: ()
    callbacks: Sequence[Callback] = ()
    model: Callable[[Params], Any] | None = None

    def logs_at(self, step: int) -> bool:
        """Return whether a row of metrics is written after this step."""
        every = self.config.train.log_every if self.total_steps > SHORT_RUN else 1
        return step in (1, self.total_steps) or step % every == 0

    def evaluates_at(self, step: int) -> bool:
        """Return whether the encoder is evaluated and saved after this step."""
        every = self.config.eval.every
        return step == self.total_steps or (every > 0 and step % every == 0)

    def may_be_best(self, measured: Measured) -> bool:
        """Return whether the encoder kept enough general quality to be selected."""
        options, drift = self.config.eval, self.evaluation.drift_metric
        return bool(options.interpolate) or keeps_quality(options, drift, self.baseline.dev, measured.scores)

    def ends_at(self, step: int) -> bool:
        """Return whether training is over after this step. The first process decides for all, and says why."""
        if step == self.total_steps:
            return True
        options = self.config.eval
        if not options.patience and not options.max_drop:
            return False

        def decide() -> str:
            metric = self.evaluation.metric
            rows = [row for row in read_metrics(self.workdir) if 0 < row["step"] <= step and f"dev/{metric}" in row]
            evaluations = [
                {name.removeprefix("dev/"): value for name, value in row.items() if name.startswith("dev/")}
                for row in rows
            ]
            return reason_to_stop(options, metric, self.evaluation.drift_metric, self.baseline.dev, evaluations)

        reason = hosts.decided_by_first(decide)
        if reason:
            log_line(f"Training ends at step {step} of {self.total_steps}: {reason}.")
        return bool(reason)


def loop(
    run: Run,
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: grain.DatasetIterator,
) -> None:
    """Train until the run is complete or asked to stop.

    At most two steps are in flight: while the device computes one, the next one is prepared and queued. More would
    not be faster, and a request to stop would have to wait for all of them.

    Raises:
        UserError: Too many steps had a NaN or infinite loss or gradient.
        Interrupted: A signal or a callback asked to stop. Everything is saved.
    """
    step = int(state.step)
    with stop_requested() as stop, _all_callbacks(run, step, stop) as observer:
        if step == 0:
            show_baseline(run, state, observer)
        throughput = Throughput(step, run.config.train.batch_size)
        bad_steps = BadSteps(
            run.workdir,
            limit=run.config.train.max_bad_steps,
            already=int(state.bad_steps),
            parameters=list(state.params),
            sentences=run.sentences,
        )
        logger, writer = MetricLogger(run, throughput, observer, bad_steps), CheckpointWriter(run, observer)
        previous: Metrics = {}
        while step < run.total_steps:
            state, metrics = train_step(state, next(batches))
            step += 1
            jax.block_until_ready(previous)
            previous = metrics
            bad_steps.remember(step, metrics)
            logger.flush()  # the previous step's row, now that the device has this step to work on
            writer.flush()
            logs, evaluates = run.logs_at(step), run.evaluates_at(step)
            stops = _any_host_stops(stop, asks=logs) and step < run.total_steps
            if logs:
                logger.add(step, metrics)
            else:
                observer.on_step(step, {})
            if evaluates or stops:
                logger.flush()
                logger.check(step, metrics)
            if evaluates:
                with throughput.paused():
                    measured = evaluate(run, state, observer)
                    writer.start(state, batches, measured, eligible=run.may_be_best(measured))
                if run.ends_at(step):
                    break
            if stops:
                if not evaluates:
                    writer.start(state, batches, NOTHING)
                writer.finish()
                raise Interrupted(f"Stopped at step {step}. Everything is saved; run the same command again to resume.")
        writer.finish()


def _all_callbacks(run: Run, step: int, stop: StopRequest) -> AbstractContextManager[Callback]:
    """Return the run's own callbacks and the user's. The rows come first, because `Run.ends_at` reads them."""
    training = Training(run.config, run.workdir, step, run.total_steps, run.baseline.dev, stop.make)
    return started((MetricsFile(), TensorBoard(), Progress(), *run.callbacks), training)


def _any_host_stops(stop: StopRequest, *, asks: bool) -> bool:
    """Return whether any host was asked to stop. Hosts ask one another at logged steps, so that all stop together."""
    if jax.process_count() == 1:
        return stop.made
    return asks and bool(multihost_utils.process_allgather(np.int32(stop.made)).any())


# Evaluation


def show_baseline(run: Run, state: TrainState, observer: Callback) -> None:
    """Log the dev scores of the starting checkpoint and, if it differs, of the embedding that will be trained."""
    base, baseline, config = run.base, run.baseline, run.config
    scores = baseline.dev
    log_line(f"{base.name} before training, with the pooler {baseline.pooler}: {format_scores(scores)}")
    if run.model is None and not base.is_trained_embedding(config):
        observer.on_evaluation_start(0)
        scores = run.evaluation.measure(_model(run, state)).scores
        log_line(f"step 0, with the pooler that is trained, {config.encoding_pooler}: {format_scores(scores)}")
    observer.on_evaluation(0, scores)


def evaluate(run: Run, state: TrainState, observer: Callback) -> Measured:
    """Evaluate the current encoder on the dev data and log the scores."""
    step, metric = int(state.step), run.evaluation.metric
    observer.on_evaluation_start(step)
    measured = run.evaluation.measure(_model(run, state))
    observer.on_evaluation(step, measured.scores)
    before = f"{run.base.name} before training: {metric} {run.baseline.dev[metric]:.2f}"
    log_line(f"step {step}: {format_scores(measured.scores)} ({before})")
    return measured


def _model(run: Run, state: TrainState) -> Any:
    if run.model is not None:
        return run.model(state.params)
    return SentenceEncoder(  # all encoders of the same sizes share one compiled function
        run.base.checkpoint.config,
        parameters.subset(state.params, "encoder"),
        run.base.tokenizer,
        pooler=run.config.encoding_pooler,
        pooler_head=parameters.subset(state.params, "projector"),
    )


# Stopping


def keeps_quality(options: EvalConfig, drift_metric: str, start: Scores, scores: Scores) -> bool:
    """Return whether the score of general quality is at most `eval.max_drop` below the starting checkpoint's."""
    return not (drift_metric and options.max_drop) or scores[drift_metric] >= start[drift_metric] - options.max_drop


def reason_to_stop(
    options: EvalConfig, metric: str, drift_metric: str, start: Scores, evaluations: Sequence[Scores]
) -> str:
    """Return why training ends now, or an empty string if it continues.

    Args:
        options: `max_drop` ends training, unless `interpolate` will look for models within it. `patience` ends training
            after that many evaluations in a row without a new best score.
        metric: The dev score that chooses the best checkpoint.
        drift_metric: The score of general quality; empty if it is not measured.
        start: Scores of the starting checkpoint.
        evaluations: Scores of the run so far, in order.
    """
    if not evaluations:
        return ""
    if not options.interpolate and not keeps_quality(options, drift_metric, start, evaluations[-1]):
        return (
            f"{drift_metric} fell from {start[drift_metric]:.2f} to {evaluations[-1][drift_metric]:.2f}, by more than "
            f"eval.max_drop={options.max_drop:g}"
        )
    scores = [each[metric] for each in evaluations]
    since_best = len(scores) - 1 - scores.index(max(scores))
    if options.patience and since_best >= options.patience:
        return f"{metric} has not improved in {since_best} evaluations (eval.patience={options.patience})"
    return ""


# What is written between steps


class MetricLogger:
    """Write rows of metrics. A row is read from the device while the next step runs, so that the device never waits."""

    def __init__(self, run: Run, throughput: "Throughput", observer: Callback, bad_steps: "BadSteps"):
        self._run, self._throughput, self._observer = run, throughput, observer
        self._bad_steps, self._warned = bad_steps, False
        self._unread: tuple[int, Metrics] | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        """Start to copy the metrics of a step to the host."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._unread = step, metrics

    def flush(self) -> None:
        """Write the row that was added last, if that is still to do.

        Raises:
            UserError: Too many steps were skipped.
        """
        if self._unread is None:
            return
        step, metrics = self._unread
        self._unread = None
        row = self.check(step, metrics)
        updates = max(step - int(row["bad_steps"]), 1)
        row["learning_rate"] = float(learning_rate_schedule(self._run.config.optim, self._run.total_steps)(updates - 1))
        row["sentences_per_second"] = self._throughput.rate(step)
        self._observer.on_step(step, {name: value for name, value in row.items() if math.isfinite(value)})

    def check(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Return the metrics of a step as numbers.

        Raises:
            UserError: Too many steps were skipped.
        """
        row = {name: float(value) for name, value in metrics.items()}
        try:
            self._bad_steps.check(step, row)
        except UserError as error:
            raise UserError(
                f"{error} The last checkpoint, of step {self._run.checkpoints.latest_step}, is kept in "
                f"{self._run.workdir}. Try a lower optim.learning_rate, or precision=float32."
            ) from error
        if row["grad_norm"] == 0 and not self._warned:
            self._warned = True
            log_line(f"warning: the gradient is 0 at step {step}, so nothing is learned. Try a lower learning rate.")
        return {name: value for name, value in row.items() if name != "bad_gradient"}


class CheckpointWriter:
    """Start checkpoints, which are written in the background, and report them once they are complete."""

    def __init__(self, run: Run, observer: Callback):
        self._checkpoints, self._folder, self._observer = run.checkpoints, run.workdir / CHECKPOINTS, observer
        self._unfinished: list[int] = []

    def start(
        self, state: TrainState, batches: grain.DatasetIterator, measured: Measured, *, eligible: bool = True
    ) -> None:
        """Start to write a checkpoint.

        Args:
            state: The train state.
            batches: The iterator, whose position is saved.
            measured: The dev evaluation of the state, or `NOTHING`.
            eligible: Whether the checkpoint may be selected as the best one.
        """
        self._checkpoints.save(state, batches.get_state(), measured, eligible=eligible)
        self._unfinished.append(int(state.step))
        self.flush()

    def flush(self) -> None:
        """Report checkpoints that were completed meanwhile. A folder gets its name only when it is complete."""
        for step in [step for step in self._unfinished if (self._folder / str(step)).is_dir()]:
            self._unfinished.remove(step)
            self._observer.on_save(step, self._folder / str(step))

    def finish(self) -> None:
        """Wait until all checkpoints are complete."""
        self._checkpoints.wait()
        self.flush()


class Throughput:
    """Measure sentences per second since the last reading, without pauses."""

    def __init__(self, step: int, batch_size: int):
        self._step, self._since, self._batch_size = step, time.perf_counter(), batch_size

    def rate(self, step: int) -> float:
        """Return the rate between the last reading and this step."""
        now = time.perf_counter()
        rate = (step - self._step) * self._batch_size / (now - self._since)
        self._step, self._since = step, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that the block takes out of the rate."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start


class BadSteps:
    """Find steps that were skipped because their loss or gradient is NaN or infinite.

    Each row of metrics has the number of skipped steps so far. Only if it grew are the metrics of the steps since the
    last row read from the device. They name the step and its loss or parameter; the sentences of its batch are
    written to `WORKDIR/report/bad_steps.jsonl`.

    Args:
        workdir: The run folder.
        limit: How many skipped steps are allowed.
        already: How many there were when the run was resumed.
        parameters: Names of the trained parameters.
        sentences: Returns the sentences of a step's batch, as JSON values.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        limit: int,
        already: int,
        parameters: Sequence[str],
        sentences: Callable[[int], Sequence[Any]],
    ):
        self._path, self._limit, self._known = workdir / "report" / "bad_steps.jsonl", limit, already
        self._parameters, self._sentences = sorted(parameters), sentences
        self._recent: collections.deque[tuple[int, Metrics]] = collections.deque(maxlen=RECENT_STEPS)

    def remember(self, step: int, metrics: Metrics) -> None:
        """Keep the metrics of a step, on the device."""
        self._recent.append((step, metrics))

    def check(self, step: int, row: dict[str, float]) -> None:
        """Warn of steps that were skipped since the last row.

        Raises:
            UserError: More steps were skipped than allowed.
        """
        number = int(row["bad_steps"])
        if number > self._known:
            seen = [(at, metrics) for at, metrics in self._recent if at <= step]
            found = [self._describe(at, metrics) for at, metrics in seen if not _is_finite(metrics)]
            latest = found[-1] if found else f"the skipped steps were before step {step - RECENT_STEPS}"
            count = "1 step was" if number == 1 else f"{number} steps were"
            message = f"{count} skipped so far because a number is NaN or infinite. The latest: {latest}."
            self._known = number
            if number > self._limit:
                raise UserError(
                    f"{message} That is more than train.max_bad_steps={self._limit}. At step {step} the loss is "
                    f"{row['loss']} and the gradient norm {row['grad_norm']}."
                )
            log_line(f"warning: {message}")
        while self._recent and self._recent[0][0] <= step:
            self._recent.popleft()

    def _describe(self, step: int, metrics: Metrics) -> str:
        """Describe a skipped step as far as it is known, and write its sentences to the file."""
        values = {name: float(value) for name, value in metrics.items()}
        names = [name for name, value in values.items() if name.startswith("loss_") and not math.isfinite(value)]
        index = int(values.get("bad_gradient", 0))
        if names:
            where = ", ".join(f"{name} is {values[name]}" for name in names)
        elif index:
            where = f"the gradient of {self._parameters[index - 1]}"
        else:
            where = f"loss {values['loss']}, gradient norm {values['grad_norm']}"
        sentences = list(self._sentences(step))
        line = json.dumps({"step": step, "where": where, "sentences": sentences}, ensure_ascii=False)
        with disk_errors(self._path, safe="The checkpoints are whole."):
            self._path.parent.mkdir(exist_ok=True)
            append_line(self._path, line)
        return f"{where} at step {step} (its sentences are in {self._path})"


def _is_finite(metrics: Metrics) -> bool:
    return math.isfinite(float(metrics["loss"])) and math.isfinite(float(metrics["grad_norm"]))
