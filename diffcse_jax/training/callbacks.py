"""Observers of a run: rows of metrics, TensorBoard, Weights & Biases, progress on the terminal, and what users add.

All of them are called on the first process only, in the thread that trains.
"""

import abc
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import tqdm
from tensorboardX.event_file_writer import EventsWriter  # without the thread of SummaryWriter, which a full disk ends
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from diffcse_jax.config import Config, flat
from diffcse_jax.errors import ConfigError
from diffcse_jax.io import disk_errors
from diffcse_jax.run_folder.records import MetricsWriter

SECONDS_BETWEEN_LINES = 30
_ROWS_ARE_WHOLE = "The rows written before and the checkpoints are whole."


@dataclasses.dataclass(frozen=True)
class Training:
    """A run as callbacks see it when its steps begin.

    Attributes:
        config: the resolved configuration.
        workdir: the run's folder.
        step: from where training goes on; 0 for a new run.
        total_steps: of the whole run.
        start_scores: the dev scores of the start, the baseline.
        stop: asks training to end as Ctrl-C does: it saves, then raises `diffcse_jax.errors.Interrupted`. May be called
            from any thread.
    """

    config: Config
    workdir: Path
    step: int
    total_steps: int
    start_scores: Mapping[str, float]
    stop: Callable[[], None]


class Callback:
    """The base of callbacks: override what is of interest. An exception in one of them ends training."""

    def on_start(self, training: Training) -> None:
        """Before the first step."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every step.

        Args:
            step: its number, from 1.
            metrics: `loss`, each objective's, `learning_rate`, `sentences_per_second` and others, as in metrics.jsonl,
                every `train.log_every` steps, for reading them from the device costs time; empty after other steps.
                What is no finite number is left out.
        """

    def on_evaluation_start(self, step: int) -> None:
        """Before a dev evaluation."""

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """After a dev evaluation; that of step 0 is of the vector to be trained."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """After a checkpoint was written: the folder is whole. A later one may replace it."""

    def on_end(self) -> None:
        """After the last step, or where training ends for any other reason."""


class Together(Callback):
    """Several callbacks as one, called in their order."""

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = tuple(callbacks)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self._callbacks:
            each.on_step(step, metrics)

    def on_evaluation_start(self, step: int) -> None:
        for each in self._callbacks:
            each.on_evaluation_start(step)

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        for each in self._callbacks:
            each.on_evaluation(step, scores)

    def on_save(self, step: int, checkpoint: Path) -> None:
        for each in self._callbacks:
            each.on_save(step, checkpoint)


@contextlib.contextmanager
def started(callbacks: Iterable[Callback], training: Training) -> Iterator[Callback]:
    """The callbacks as one between their start and their end; on processes but the first one that does nothing."""
    if jax.process_index():
        yield Callback()
        return
    with contextlib.ExitStack() as ends:
        callbacks = tuple(callbacks)
        for each in callbacks:
            each.on_start(training)
            ends.callback(each.on_end)
        yield Together(callbacks)


class Rows(Callback, abc.ABC):
    """The base of callbacks that write rows of named numbers: metrics, `dev/NAME`, and at step 0 `start/NAME`."""

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row."""

    def on_start(self, training: Training) -> None:
        self._start_scores = training.start_scores

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.write(step, metrics)

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        start = self._start_scores if step == 0 else {}
        self.write(step, {f"start/{name}": score for name, score in start.items()} | _dev(scores))


class MetricsFile(Rows):
    """Rows of `metrics.jsonl`."""

    def on_start(self, training: Training) -> None:
        super().on_start(training)
        self._writer = MetricsWriter(training.workdir, resumed_at=training.step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write(step, values)


class TensorBoard(Rows):
    """TensorBoard events in `WORKDIR/tensorboard`.

    Raises:
        DiskError: they cannot be written.
    """

    def on_start(self, training: Training) -> None:
        super().on_start(training)
        self._workdir = training.workdir
        folder = training.workdir / "tensorboard"
        with self._writing():
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            if training.step:  # TensorBoard then leaves out the rows of later steps
                start = SessionLog(status=SessionLog.START)
                self._events.write_event(Event(wall_time=time.time(), step=training.step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        with self._writing():
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._events.flush()

    def on_end(self) -> None:
        with self._writing():
            self._events.close()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self._workdir, safe=_ROWS_ARE_WHOLE)


class WandB(Rows):
    """Rows and configuration in Weights & Biases. A run that goes on in its workdir goes on there.

    Args:
        project: its project.
        options: further arguments of `wandb.init`, such as `entity`, `tags` or `mode="offline"`.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, project: str = "diffcse", **options: Any):
        try:
            import wandb  # an extra, and slow to import
        except ImportError as error:
            raise ConfigError("WandB needs the package wandb: pip install '.[wandb]' in the repository") from error
        self._init = lambda **run: wandb.init(project=project, **run | options)

    def on_start(self, training: Training) -> None:
        super().on_start(training)
        record = training.workdir / "wandb.json"
        known = json.loads(record.read_text()) if training.step and record.is_file() else {}
        self._run = self._init(
            dir=str(training.workdir), name=training.workdir.name, config=flat(training.config.to_dict()), **known
        )
        record.write_text(json.dumps({"id": self._run.id, "resume": "allow"}))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def on_end(self) -> None:
        self._run.finish()


class Progress(Callback):
    """A bar on a terminal; elsewhere a line every 30 seconds or more."""

    def on_start(self, training: Training) -> None:
        self._step, self._total = training.step, training.total_steps
        self._numbers, self._told = "", time.monotonic()
        # Steps with metrics, and when these were there: others are on their way when they are told of. The first one
        # is compiled before.
        self._measured: list[tuple[int, float]] = []
        self._bar = tqdm.tqdm(
            desc="training",
            initial=training.step,
            total=training.total_steps,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            dynamic_ncols=True,
            mininterval=1.0,
            disable=None,  # where there is no terminal
        )

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        if metrics:
            rate = f", {metrics['sentences_per_second']:.0f} sentences/s" if self._measured else ""
            self._measured = [*self._measured[:1], (step, time.monotonic())]
            self._numbers = f"loss {metrics.get('loss', math.nan):.4f}{rate}"
            self._bar.set_postfix_str(self._numbers, refresh=False)
        self._bar.set_description_str("training", refresh=False)
        self._bar.update(step - self._bar.n)
        if self._bar.disable and self._numbers:
            self._tell(self._numbers)

    def on_evaluation_start(self, step: int) -> None:
        self._bar.set_description_str("scoring ")  # as long as `training`
        if self._bar.disable:
            self._tell("scoring")

    def on_end(self) -> None:
        self._bar.close()

    def _tell(self, text: str) -> None:
        """A line of this text, unless the last one was a moment ago."""
        now = time.monotonic()
        if now - self._told < SECONDS_BETWEEN_LINES:
            return
        self._told = now
        ending = ""
        if len(self._measured) == 2:
            (first, since), (last, until) = self._measured
            left = (until - since) / (last - first) * (self._total - self._step)
            ending = f", about {tqdm.tqdm.format_interval(left)} left"
        print(f"step {self._step:,} of {self._total:,}: {text}{ending}", file=sys.stderr, flush=True)


def _dev(scores: Mapping[str, float]) -> dict[str, float]:
    return {f"dev/{name}": score for name, score in scores.items()}
