"""What observes a run: metrics.jsonl, TensorBoard, Weights & Biases, and the user's own callbacks.

All callbacks are called on the first process only, in the thread that trains.
"""

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from diffcse_jax.config import Config, flat
from diffcse_jax.errors import UserError, require_extra
from diffcse_jax.hosts import log_line
from diffcse_jax.io import append_line, disk_errors, write_bytes, write_json, write_text
from diffcse_jax.run_folder.records import METRICS, parse_rows
from diffcse_jax.run_folder.start import damaged_path


def format_scores(scores: Mapping[str, float]) -> str:
    """Return scores as text, such as `stsb_spearman 78.21, uniformity -2.31`."""
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


@dataclasses.dataclass(frozen=True)
class Training:
    """A run as callbacks see it before its first step.

    `stop`, in any thread, asks training to stop, as Ctrl-C does: it saves, then raises
    `diffcse_jax.Interrupted`.
    """

    config: Config
    workdir: Path
    step: int  # that training resumes from; 0 for a new run
    total_steps: int  # of the whole run
    start_scores: Mapping[str, float]  # dev scores of the starting checkpoint, the baseline
    stop: Callable[[], None]


class Callback:
    """Base class of callbacks.

    Override the methods you need. An exception in a callback ends training.
    """

    def on_start(self, training: Training) -> None:
        """Run before the first step."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Run after every step, counted from 1.

        The metrics are `loss`, the loss of each term, `learning_rate`, `sentences_per_second` and
        others, as in metrics.jsonl, without NaN and infinite values. They are empty except at steps
        that have a row there, because reading them from the device takes time. The first ones of a
        process have no `sentences_per_second`, because most of that time is compilation.
        """

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Run after a dev evaluation. At step 0 it is of the embedding that will be trained."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Run after a checkpoint is complete. Later checkpoints may replace it."""

    def on_end(self) -> None:
        """Run after the last step, or when training ends for another reason."""


@contextlib.contextmanager
def started(callbacks: Sequence[Callback], training: Training) -> Iterator[Callback]:
    """Start the callbacks, yield them as one, and end them.

    On other processes than the first there are none.
    """
    callbacks = () if jax.process_index() else callbacks

    def call(method: str, *arguments: Any) -> None:
        for each in callbacks:
            getattr(each, method)(*arguments)

    with contextlib.ExitStack() as ends:
        for each in callbacks:
            each.on_start(training)
            ends.callback(each.on_end)
        together = Callback()
        for method in ("on_step", "on_evaluation", "on_save"):
            setattr(together, method, functools.partial(call, method))
        yield together


class RowWriter(Callback):
    """Base class of callbacks that write rows: metrics, `dev/NAME`, and at step 0 `start/NAME`."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row."""
        raise NotImplementedError

    def on_start(self, training: Training) -> None:
        self._start_scores = training.start_scores

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.write(step, metrics)

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        before = self._start_scores if step == 0 else {}
        start = {f"start/{name}": score for name, score in before.items()}
        self.write(step, start | {f"dev/{name}": score for name, score in scores.items()})


class MetricsFile(RowWriter):
    """Append rows, `{"step": step, name: value}`, to `metrics.jsonl`.

    Rows after the step that training resumes from are removed: a run that was killed after its last
    checkpoint left them. If lines are unreadable, a copy of the file is kept in `WORKDIR/damaged`.
    """

    def on_start(self, training: Training) -> None:
        super().on_start(training)
        self._path = path = training.workdir / METRICS
        self._writing = functools.partial(
            disk_errors, path.parent, safe="The earlier rows and checkpoints are intact."
        )
        with self._writing():
            before = path.read_bytes() if path.is_file() else b""
            rows, unreadable = parse_rows(before)
            if unreadable:
                copy = damaged_path(training.workdir, METRICS)
                write_bytes(copy, before)
                log_line(f"warning: {path}: {unreadable}. A copy of the file is kept in {copy}")
            kept = [row for row in rows if training.step and row["step"] <= training.step]
            text = "".join(f"{json.dumps(row)}\n" for row in kept)
            if text.encode() != before or not before:
                write_text(path, text)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with self._writing():
            append_line(self._path, json.dumps({"step": step, **values}))


class TensorBoard(RowWriter):
    """Write TensorBoard events to `WORKDIR/tensorboard`, if tensorboardX is installed."""

    _events: Any = None

    def on_start(self, training: Training) -> None:
        super().on_start(training)
        try:  # not SummaryWriter: its thread ends on a full disk, and training then waits for it
            writer = require_extra("tensorboardX.event_file_writer", "report").EventsWriter
        except UserError as error:
            log_line(f"notice: no TensorBoard events are written: {error}")
            return
        folder = training.workdir / "tensorboard"
        self._writing = functools.partial(
            disk_errors, folder, safe="Checkpoints and earlier rows are intact."
        )
        with self._writing():
            folder.mkdir(exist_ok=True)
            self._events = writer(str(folder / "events"), f".{os.getpid()}")
        if training.step:  # makes TensorBoard drop earlier rows of later steps
            self._write(training.step + 1, session_log={"status": "START"})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._events:
            entries = [{"tag": name, "simple_value": value} for name, value in values.items()]
            self._write(step, summary={"value": entries})

    def on_end(self) -> None:
        if self._events:
            with self._writing():
                self._events.close()

    def _write(self, step: int, **content: Any) -> None:
        event = require_extra("tensorboardX.proto.event_pb2", "report").Event
        with self._writing():
            self._events.write_event(event(wall_time=time.time(), step=step, **content))
            self._events.flush()


class WandB(RowWriter):
    """Send rows and the configuration to Weights & Biases. A resumed run also resumes there.

    Args:
        project: The name of the project.
        options: Further arguments of `wandb.init`, such as `entity`, `tags` or `mode="offline"`.
    """

    def __init__(self, project: str = "diffcse", **options: Any):
        wandb = require_extra("wandb", "wandb")  # slow to import
        self._init = lambda **run: wandb.init(project=project, **run | options)

    def on_start(self, training: Training) -> None:
        super().on_start(training)
        workdir = training.workdir
        config = flat(training.config.to_dict())
        record = workdir / "wandb.json"
        known = json.loads(record.read_text()) if training.step and record.is_file() else {}
        self._run = self._init(dir=str(workdir), name=workdir.name, config=config, **known)
        write_json(record, {"id": self._run.id, "resume": "allow"})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def on_end(self) -> None:
        self._run.finish()
