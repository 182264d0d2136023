"""What a run records: metrics, dev scores, the selected model, and the environment of each start."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from safetensors.numpy import load_file

import diffcse_jax
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import (
    append_line,
    disk_errors,
    file_digests,
    first_changed,
    json_digest,
    read_json,
    read_json_object,
    write_json,
    write_tensors,
    write_text,
)
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.folder import START, damaged_path, read_config

METRICS = "metrics.jsonl"
SELECTION = "selection.json"
STARTS = "starts.jsonl"

_BASELINE = "start_scores.json"
_WEIGHTS = "selected.safetensors"
_CHECKSUM = "sha256"
_SAFE = "The checkpoints are complete."
_SELECT_AGAIN = "Run the command that trained the run again: it repeats the selection"
_MEASURE_AGAIN = "Remove it and run the command again: it evaluates the starting checkpoint again"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "transformers", "tokenizers")


# Dev scores and the selected model


Outcomes = list[list[float]]  # for each data set of a dev metric, one value per query or pair
FEWEST = 20  # outcomes: with fewer, the bootstrap interval is too narrow


class Measured(NamedTuple):
    """A dev evaluation of an encoder: its scores by name, and the outcomes that the dev metric summarises."""

    scores: dict[str, float]
    outcomes: Outcomes


NOTHING = Measured({}, [])  # for a checkpoint that was not evaluated


@dataclasses.dataclass(frozen=True)
class Record:
    """An encoder of a run and its dev evaluation.

    Attributes:
        step: The training step; 0 for the starting checkpoint.
        pooler: How the encoder pools.
        dev: The dev scores by name; empty if it was not evaluated.
        dev_metric: The dev score that chooses the best checkpoint.
        text: Identifies the tokenised training text.
        outcomes: The outcomes that `dev_metric` summarises.
        eligible: Whether it may be the best checkpoint.
        bad_steps: Number of steps that were skipped because of a NaN or infinite loss or gradient.
        dev_text: Identifies the text that `dev_metric` is measured on.
        metrics: For a checkpoint, size and SHA-256 of the metrics written before it.
        digests: For a checkpoint, the digests of its items.
    """

    step: int
    pooler: str
    dev: dict[str, float]
    dev_metric: str
    text: str
    outcomes: Outcomes = dataclasses.field(default_factory=list)
    eligible: bool = True
    bad_steps: int = 0
    dev_text: str = ""
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    digests: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The dev score that chooses the best checkpoint, or None if there is none or it is not eligible."""
        return self.dev[self.dev_metric] if self.dev and self.eligible else None

    def content(self) -> dict[str, Any]:
        """Return everything but the digests."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "digests"}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The model that a finished run exports.

    Attributes:
        record: Its record. The step is that of the checkpoint that it was made from, or 0.
        interpolation: The share of the trained weights: 1 for the checkpoint itself, 0 for the starting checkpoint, a
            value in between for a weighted mean of both.
        verdict: One line on how the best model compares with the starting checkpoint and what is exported.
    """

    record: Record
    interpolation: float
    verdict: str


_Kept = TypeVar("_Kept", Record, Selection)


def origin(interpolation: float, step: int) -> str:
    """Describe where the weights of a model are from."""
    if interpolation == 0:
        return "the starting checkpoint, unchanged"
    if interpolation == 1:
        return f"step {step}"
    return f"{interpolation:g} x step {step} + {1 - interpolation:g} x the starting checkpoint"


def write_baseline(workdir: Path, record: Record) -> None:
    """Write the record of the starting checkpoint."""
    with disk_errors(workdir / _BASELINE, safe=_SAFE):
        _write_with_checksum(workdir / _BASELINE, record.content())


def read_baseline(workdir: Path) -> Record | None:
    """Return the record of the starting checkpoint, or None if it is not evaluated yet.

    Raises:
        CheckpointError: The record is damaged.
    """
    path = workdir / _BASELINE
    return _build(Record, _read_with_checksum(path, _MEASURE_AGAIN), path) if path.is_file() else None


def write_selection(workdir: Path, selection: Selection, weights: Params) -> None:
    """Write the selected model.

    Args:
        workdir: The run's folder.
        selection: The selection.
        weights: Its weights under the names of a checkpoint. They are written only if no checkpoint has them.
    """
    clear_selection(workdir)
    with disk_errors(workdir / SELECTION, safe=_SAFE):
        files = {}
        if selection.interpolation < 1:
            write_tensors(workdir / _WEIGHTS, weights)
            files = file_digests(workdir, [workdir / _WEIGHTS])
        content = dataclasses.asdict(selection) | {"files": files}
        _write_with_checksum(workdir / SELECTION, content)  # last: it shows that the weights are complete


def clear_selection(workdir: Path) -> None:
    """Remove an earlier selection."""
    with disk_errors(workdir, safe=_SAFE):
        for name in (SELECTION, _WEIGHTS):
            (workdir / name).unlink(missing_ok=True)


def read_selection(workdir: Path) -> Selection | None:
    """Return the selection, or None while training is not finished.

    Raises:
        CheckpointError: The record or its weights are damaged.
    """
    path = workdir / SELECTION
    if not path.is_file():
        return None
    values = _read_with_checksum(path, _SELECT_AGAIN)
    if name := first_changed(workdir, values.pop("files", {})):
        raise CheckpointError(f"{workdir / name} differs from its checksum. {_SELECT_AGAIN}")
    return _build(Selection, values | {"record": _build(Record, values.get("record", {}), path)}, path)


def read_weights(workdir: Path) -> Params:
    """Return the weights of a selected model that is not a checkpoint, under the names of a checkpoint."""
    return load_file(workdir / _WEIGHTS)


def _write_with_checksum(path: Path, content: dict[str, Any]) -> None:
    write_json(path, content | {_CHECKSUM: json_digest(content)})


def _read_with_checksum(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = read_json_object(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {remedy}") from error
    if content.pop(_CHECKSUM, None) != json_digest(content):
        raise CheckpointError(f"{path} differs from its checksum. {remedy}")
    return content


def _build(kind: type[_Kept], values: dict[str, Any], path: Path) -> _Kept:
    try:
        return kind(**values)
    except TypeError as error:  # an unknown or missing key
        raise CheckpointError(f"{path} is not a record of this version: {error}") from error


# Metrics


class MetricsWriter:
    """Appends rows to a run's `metrics.jsonl`.

    Args:
        workdir: The run's folder.
        resumed_at: The step of the checkpoint that training resumes from, or 0. Later rows are removed: a run that was
            killed after its last checkpoint left them. If lines are unreadable, a copy of the file is kept in
            `WORKDIR/damaged`.

    Raises:
        DiskError: The file cannot be written, here or in `write`.
    """

    def __init__(self, workdir: Path, *, resumed_at: int):
        self._path = workdir / METRICS
        with self._disk_errors():
            before = self._path.read_bytes() if self._path.is_file() else b""
            rows, unreadable = _parse_rows(before)
            if unreadable:
                copy = damaged_path(workdir, METRICS)
                copy.write_bytes(before)
                log_line(f"warning: {_skipped(self._path, unreadable)}. A copy of the file is kept in {copy}")
            kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= resumed_at) if resumed_at else ""
            if kept.encode() != before or not before:
                write_text(self._path, kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row, `{"step": step, name: value}`."""
        with self._disk_errors():
            append_line(self._path, json.dumps({"step": step, **values}))

    def _disk_errors(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self._path.parent, safe="The earlier rows and the checkpoints are complete.")


def read_metrics(workdir: Path) -> list[dict[str, float]]:
    """Return the rows of a run's `metrics.jsonl`; unreadable lines are skipped with a warning."""
    path = workdir / METRICS
    rows, unreadable = _parse_rows(path.read_bytes()) if path.is_file() else ([], [])
    if unreadable:
        log_line(f"warning: {_skipped(path, unreadable)}")
    return rows


def _parse_rows(content: bytes) -> tuple[list[dict[str, float]], list[int]]:
    """Return the rows and the numbers of the unreadable lines. A truncated last line is ignored."""
    rows, unreadable = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int or not all(isinstance(value, int | float) for value in row.values()):
                raise ValueError(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            unreadable.append(number)
        else:
            rows.append(row)
    return rows, unreadable


def _skipped(path: Path, lines: Sequence[int]) -> str:
    numbers = ", ".join(map(str, lines[:5])) + (" ..." if len(lines) > 5 else "")
    return f"{path}: skipped {len(lines)} unreadable line{'s' if len(lines) > 1 else ''}: {numbers}"


# The environment of each start


def record_start(workdir: Path, config: Config, *, text: str, step: int) -> None:
    """Append a line to `starts.jsonl`, and report versions and devices that differ from those of the start before.

    Args:
        workdir: The run's folder.
        config: The resolved configuration.
        text: Identifies the tokenised training text.
        step: The step that training starts or resumes from.
    """
    earlier = read_starts(workdir)
    before = earlier[-1] if earlier else {}
    now = environment() | {
        "step": step,
        "configuration": config.to_dict(),
        "digests": {"text": text, **read_json(workdir / START)},
    }
    with disk_errors(workdir / STARTS, safe=_SAFE):
        append_line(workdir / STARTS, json.dumps(now))
    changed = [
        f"{name} was {before[group][name]}, now {value}"
        for group in ("versions", "devices")
        for name, value in now[group].items()
        if before.get(group, {}).get(name, value) != value
    ]
    if changed:
        print(f"notice: results may differ in their last digits from here on: {', '.join(changed)}", file=sys.stderr)


def read_starts(workdir: Path) -> list[dict[str, Any]]:
    """Return the lines of `starts.jsonl`; unreadable lines are skipped, because the last one may be truncated."""
    path, starts = workdir / STARTS, []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):
            start = json.loads(line)
            if isinstance(start, dict) and all(isinstance(start.get(key), dict) for key in ("versions", "devices")):
                starts.append(start)
    return starts


def environment() -> dict[str, Any]:
    """Return the time, host, versions, devices, and the commit of the package if it is in a git repository."""
    return {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), "diffcse_jax": diffcse_jax.__version__}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "devices": {"kind": jax.devices()[0].device_kind, "count": jax.device_count(), "hosts": jax.process_count()},
        "git": commit(Path(diffcse_jax.__file__).parent),
    }


def commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that tracks the folder and whether tracked files differ, or None."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if not git("ls-files", "."):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):  # no git, no repository or no commit
        return None


# All of them


class Records(NamedTuple):
    """The records of a run.

    Attributes:
        config: The resolved configuration.
        rows: The rows of `metrics.jsonl`.
        baseline: The record of the starting checkpoint, or None if it is not evaluated yet.
        selection: The selected model, or None while training is not finished.
        starts: The lines of `starts.jsonl`.
    """

    config: Config
    rows: list[dict[str, float]]
    baseline: Record | None
    selection: Selection | None
    starts: list[dict[str, Any]]


def read_records(workdir: Path) -> Records:
    """Return the records of a run.

    Raises:
        CheckpointError: The folder is not a run's, or a record is damaged.
    """
    config, rows, starts = read_config(workdir), read_metrics(workdir), read_starts(workdir)
    return Records(config, rows, read_baseline(workdir), read_selection(workdir), starts)
