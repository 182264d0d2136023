"""The training loop: steps, and between them rows of metrics, dev evaluations and checkpoints."""

import collections
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from diffcse_jax import hosts
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.data.batches import Batches
from diffcse_jax.errors import Interrupted, UserError
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.hosts import log_line, stop_requested
from diffcse_jax.io import append_line, disk_errors
from diffcse_jax.losses import Metrics
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.checkpoints import Checkpoints
from diffcse_jax.run_folder.finding import CHECKPOINTS
from diffcse_jax.run_folder.records import Measured, Record, read_metrics
from diffcse_jax.run_folder.state import TrainState
from diffcse_jax.training import callbacks
from diffcse_jax.training.callbacks import Callback, format_scores
from diffcse_jax.training.networks import Built, StartingCheckpoint
from diffcse_jax.training.optimizer import alike, learning_rate_schedule
from diffcse_jax.training.sharding import shard_batch
from diffcse_jax.training.step import TrainStep

SHORT_RUN = 100  # runs of at most this many steps log every step, whatever train.log_every is
# Metrics of this many steps are kept, until a row shows whether one of them was bad.
RECENT_STEPS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that training needs, except for what changes while it trains."""

    config: Config
    workdir: Path
    mesh: Mesh
    base: StartingCheckpoint
    built: Built
    optimizer: optax.GradientTransformationExtraArgs
    source: Batches  # all batches
    chunk_size: int = 0  # chosen for the free memory; 0: as the configuration says
    text: str  # identifies the text that they are made of
    unknown: float = 0.0  # the share of its sentences that consist largely of unknown words
    evaluation: DevEvaluation
    sentences: Callable[[int], Sequence[Any]]  # the sentences of a step's batch, as JSON values
    callbacks: Sequence[Callback] = ()
    # Builds the model to evaluate from parameters, and the baseline from the initial ones. None:
    # the sentence encoder, and as baseline the starting checkpoint with its own pooler.
    model_of: Callable[[Params], Any] | None = None

    @property
    def computing(self) -> Config:
        """The configuration with the chunks that were chosen for the free memory."""
        train = self.config.train
        chunk_size = self.chunk_size or train.chunk_size
        return dataclasses.replace(
            self.config, train=dataclasses.replace(train, chunk_size=chunk_size)
        )

    def measure(self, params: Params) -> Measured:
        """Evaluate the model with these parameters on the dev data."""
        model = self.model_of(params) if self.model_of else self.base.encoder(self.config, params)
        return self.evaluation.measure(model)

    def keeps_quality(self, start: Mapping[str, float], scores: Mapping[str, float]) -> bool:
        """Return whether general quality has dropped by at most `eval.max_drop`."""
        metric = self.evaluation.drift_metric
        most = self.config.eval.max_drop
        return not (metric and most) or scores[metric] >= start[metric] - most

    def evaluates_at(self, step: int) -> bool:
        """Return whether a dev evaluation and a checkpoint follow this step."""
        every = self.config.eval.every
        return step == len(self.source) or (every > 0 and step % every == 0)

    def logs_at(self, step: int) -> bool:
        """Return whether this step has a row of metrics, even without a dev evaluation."""
        every = self.config.train.log_every if len(self.source) > SHORT_RUN else 1
        return step == 1 or step % every == 0

    def ends_at(self, step: int, baseline: Record) -> bool:
        """Return whether training is over after this step.

        The first process decides for all, and says why. `eval.max_drop` ends it, unless
        `eval.interpolate` will look for models within it. `eval.patience` ends it after that many
        evaluations in a row without a new best score. The scores are those in `metrics.jsonl`.
        """
        options = self.config.eval
        total_steps = len(self.source)
        if step == total_steps or not (options.patience or options.max_drop):
            return step == total_steps

        def reason() -> str:
            metric, drift = self.evaluation.metric, self.evaluation.drift_metric
            known = [row for row in read_metrics(self.workdir) if f"dev/{metric}" in row]
            rows = [row for row in known if 0 < row["step"] <= step]
            if not rows:
                return ""
            latest = {name.removeprefix("dev/"): value for name, value in rows[-1].items()}
            if not options.interpolate and not self.keeps_quality(baseline.dev, latest):
                change = f"from {baseline.dev[drift]:.2f} to {latest[drift]:.2f}"
                return f"{drift} fell {change}, by more than eval.max_drop={options.max_drop:g}"
            scores = [row[f"dev/{metric}"] for row in rows]
            since_best = len(scores) - 1 - scores.index(max(scores))
            if options.patience and since_best >= options.patience:
                evaluations = f"{since_best} evaluations (eval.patience={options.patience})"
                return f"{metric} has not improved in {evaluations}"
            return ""

        if why := hosts.decided_by_first(reason):
            log_line(f"Training ends at step {step} of {total_steps}: {why}.")
        return bool(why)


def loop(
    run: Run,
    baseline: Record,
    checkpoints: Checkpoints,
    train_step: TrainStep,
    state: TrainState,
    *,
    frozen: Params,
    root: PRNGKeyArray,
    batches: grain.DatasetIterator,
    compiled: "CompiledShapes",
) -> None:
    """Train until the run is complete or asked to stop.

    At most two steps are in flight: while the device computes one, the next one is prepared and
    queued. More would not be faster, and a request to stop would have to wait for all of them.

    Raises:
        UserError: Too many steps had a NaN or infinite loss or gradient.
        Interrupted: A signal or a callback asked to stop. Everything is saved.
    """
    config = run.config
    step = int(state.step)
    total_steps = len(run.source)
    with (
        stop_requested() as stop,
        # The rows come first, because `Run.ends_at` reads them.
        callbacks.started(
            (callbacks.MetricsFile(), callbacks.TensorBoard(), *run.callbacks),
            callbacks.Training(config, run.workdir, step, total_steps, baseline.dev, stop.make),
        ) as observer,
        hosts.Progress("training", "steps", total_steps, done_before=step) as progress,
    ):
        if step == 0:
            observer.on_evaluation(0, _scores_before_training(run, baseline, state))
        logger = MetricLogger(run, observer, progress, state)
        saves = _Saves(run.workdir / CHECKPOINTS, observer)
        previous: Metrics = {}
        ended = stops = False
        while not (ended or stops):
            batch = shard_batch(next(batches), run.mesh)
            # The first step of a process is traced, even if it has been compiled meanwhile.
            if compiled.announce(batch) or not previous:
                progress.leave_out()
            state, metrics = train_step(state, frozen, batch, root)
            step += 1
            jax.block_until_ready(previous)
            previous = metrics
            logger.flush()  # the previous step's row, now that the device has this step to work on
            saves.report()
            evaluates = run.evaluates_at(step)
            logs = evaluates or run.logs_at(step)
            stops = stop.is_agreed(may_ask=logs)
            logger.add(step, metrics, logs=logs or stops)
            if not (evaluates or stops):
                continue
            logger.flush()
            measured, eligible = Measured({}, []), True
            if evaluates:
                measured = run.measure(state.params)
                eligible = _report_scores(run, baseline, step, measured, observer)
            checkpoints.save(state, batches.get_state(), measured, eligible=eligible)
            saves.begun(step)
            logger.restart_clock()
            ended = evaluates and run.ends_at(step, baseline)
        checkpoints.wait()
        saves.report()
        if not ended:
            raise Interrupted(
                f"Stopped at step {step}. Everything is saved; run the same command again to "
                "resume."
            )


def _scores_before_training(run: Run, baseline: Record, state: TrainState) -> Mapping[str, float]:
    """Log the baseline's dev scores, and return those of the embedding that will be trained."""
    head = run.base.checkpoint.sentence_head
    with_pooler = f"with the pooler {head.applied(baseline.pooler)}"
    log_line(f"{run.base.name} before training, {with_pooler}: {format_scores(baseline.dev)}")
    if run.model_of is not None or run.base.is_trained_embedding(run.config):
        return baseline.dev
    scores = run.measure(state.params).scores
    pooler = head.applied(run.config.encoding_pooler)
    log_line(f"step 0, with the pooler that is trained, {pooler}: {format_scores(scores)}")
    return scores


def _report_scores(
    run: Run, baseline: Record, step: int, measured: Measured, observer: Callback
) -> bool:
    """Report the dev scores of a step, and return whether it may be the best checkpoint."""
    observer.on_evaluation(step, measured.scores)
    metric = run.evaluation.metric
    before = f"{run.base.name} before training: {metric} {baseline.dev[metric]:.2f}"
    log_line(f"step {step}: {format_scores(measured.scores)} ({before})")
    return bool(run.config.eval.interpolate) or run.keeps_quality(baseline.dev, measured.scores)


class CompiledShapes:
    """Announces when a batch has a new shape, for which the train step must be compiled."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def announce(self, batch: Batch) -> bool:
        """Return whether the shape is new, and say so."""
        # What `jax.jit` compiles for. The name of a labelled task is in the structure.
        arrays, structure = jax.tree.flatten(batch)
        form = structure, tuple(array.shape for array in arrays)
        if form in self._known:
            return False
        self._known.add(form)
        if batch.ranked:
            shape = f"{len(batch.ranked.queries)} queries, {len(batch.ranked.passages):,} passages"
        else:
            shape = f"{' x '.join(map(str, batch.input_ids.shape))} tokens"
        shape += f", {batch.layout.positions.size} without padding" if batch.layout else ""
        shape += f", task {', '.join(batch.labels)}" if batch.labels else ""
        log_line(f"compiling the train step for batches of {shape}")  # which takes a while
        return True


class _Saves:
    """Reports checkpoints to the callbacks once they are complete."""

    def __init__(self, folder: Path, observer: Callback):
        self._folder, self._observer = folder, observer
        self._running: list[Path] = []

    def begun(self, step: int) -> None:
        self._running.append(self._folder / str(step))

    def report(self) -> None:
        # A checkpoint gets its name when it is complete.
        while self._running and self._running[0].is_dir():
            self._observer.on_save(int(self._running[0].name), self._running.pop(0))


class MetricLogger:
    """Write rows of metrics, and report skipped steps.

    A step is skipped if its loss or gradient is NaN or infinite. A row is read from the device
    while the next step runs, so that the device never waits. If its number of skipped steps has
    grown, the metrics of the steps since the last row show which ones were skipped, and why. Their
    sentences are written to `WORKDIR/report/bad_steps.jsonl`: each process adds a line with those
    of its part of the batch.
    """

    def __init__(self, run: Run, observer: Callback, progress: hosts.Progress, state: TrainState):
        self._run, self._observer, self._progress = run, observer, progress
        self._groups, self._bad_steps = alike(state.params), int(state.bad_steps)
        self._recent = collections.deque[tuple[int, Metrics]](maxlen=RECENT_STEPS)
        self._is_row = False
        self._warned = False
        self._last_row = int(state.step)
        # All at once: a rate that is computed between steps would wait for the step that runs.
        schedule = learning_rate_schedule(run.config.optim, len(run.source))
        self._learning_rates = np.asarray(schedule(np.arange(len(run.source))))
        # The time of the last row. Before the first one, most of the time is compilation.
        self._time: float | None = None

    def restart_clock(self) -> None:
        """Leave the time since the last row out of the rate of sentences per second."""
        self._time = time.perf_counter()

    def add(self, step: int, metrics: Metrics, *, logs: bool) -> None:
        """Keep the metrics of a step on the device.

        If the step is logged, start to copy them to the host.
        """
        self._recent.append((step, metrics))
        self._is_row = logs
        if logs:
            for value in metrics.values():
                value.copy_to_host_async()
        else:
            self._observer.on_step(step, {})
            self._progress.update(1)

    def flush(self) -> None:
        """Write the row of the step that was added last, if it is logged and not written yet.

        Raises:
            UserError: More steps than `train.max_bad_steps` were skipped.
        """
        if not self._is_row:
            return
        step, metrics = self._recent[-1]
        config = self._run.config
        row = {name: float(value) for name, value in metrics.items()}  # waits for the step
        now = time.perf_counter()
        if (count := int(row["bad_steps"])) > self._bad_steps:
            self._bad_steps = count
            self._report_bad_steps(step, row)
        if row["grad_norm"] == 0 and not self._warned:
            self._warned = True
            log_line(
                f"warning: the gradient is 0 at step {step}, so nothing is learned. Try a lower "
                "learning rate."
            )
        del row["bad_gradient"]
        row["learning_rate"] = float(self._learning_rates[max(step - count, 1) - 1])
        if self._time is not None:
            sentences = (step - self._last_row) * config.train.batch_size
            row["sentences_per_second"] = sentences / (now - self._time)
        finite = {name: value for name, value in row.items() if math.isfinite(value)}
        self._observer.on_step(step, finite)
        self._progress.update(1, f"loss {row['loss']:.4f}")
        self._is_row = False
        self._last_row = step
        self._time = now
        self._recent.clear()

    def _report_bad_steps(self, step: int, row: Mapping[str, float]) -> None:
        limit = self._run.config.train.max_bad_steps
        workdir = self._run.workdir
        path = workdir / "report" / "bad_steps.jsonl"
        latest = f"the skipped steps were before step {step - RECENT_STEPS + 1}"
        for at, metrics in self._recent:
            values = {name: float(value) for name, value in metrics.items()}
            if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
                continue
            bad = [name for name, value in values.items() if not math.isfinite(value)]
            losses = [name for name in bad if name.startswith("loss_")]
            where = ", ".join(f"{name} is {values[name]}" for name in losses)
            if not losses and (position := int(values["bad_gradient"])):
                first, *others = self._groups[position - 1]
                where = f"the gradient of {first}" + " or of another block" * bool(others)
            where = where or f"loss {values['loss']}, gradient norm {values['grad_norm']}"
            latest = f"{where} at step {at} (its sentences are in {path})"
            record = {"step": at, "where": where, "sentences": list(self._run.sentences(at))}
            with disk_errors(path, safe="The checkpoints are intact."):
                path.parent.mkdir(exist_ok=True)
                append_line(path, json.dumps(record, ensure_ascii=False))
        count = "1 step was" if self._bad_steps == 1 else f"{self._bad_steps} steps were"
        why = "because a number is NaN or infinite"
        message = f"{count} skipped so far {why}. The latest: {latest}."
        if self._bad_steps > limit:
            raise UserError(
                f"{message} That is more than train.max_bad_steps={limit}. At step {step} the loss "
                f"is {row['loss']} and the gradient norm {row['grad_norm']}. The last checkpoint "
                f"is kept in {workdir}. Try a lower optim.learning_rate, or precision=float32."
            )
        log_line(f"warning: {message}")
