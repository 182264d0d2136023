"""What a run records: metrics, dev scores, the selected model, and each start's environment."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from diffcse_jax import io
from diffcse_jax.config import Config
from diffcse_jax.hosts import log_line
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.finding import SELECTION
from diffcse_jax.run_folder.start import START
from diffcse_jax.version import __version__

METRICS = "metrics.jsonl"
# Weights of a selected model that is not a checkpoint, under the names of a checkpoint.
SELECTED_WEIGHTS = "selected.safetensors"
STARTS = "starts.jsonl"

_BASELINE = "start_scores.json"
_SAFE = "The checkpoints are complete."
_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "transformers",
    "tokenizers",
)


# Dev scores and the selected model

Outcomes = list[list[float]]  # for each data set of a dev metric, one value per query or pair
# Documents, or queries or pairs without documents. With fewer, the bootstrap interval is too narrow
# and a verdict does not say "better" (docs/records/adaptation.md).
FEWEST = 20


class Measured(NamedTuple):
    """A dev evaluation of an encoder.

    It has the scores by name, and the outcomes that the dev metric summarises.
    """

    scores: dict[str, float]
    outcomes: Outcomes


@dataclasses.dataclass(frozen=True)
class Record:
    """An encoder of a run and its dev evaluation."""

    step: int  # 0 for the starting checkpoint
    pooler: str
    dev: dict[str, float]  # dev scores by name; empty if it was not evaluated
    dev_metric: str  # the dev score that chooses the best checkpoint
    text: str = ""  # identifies the tokenised training text
    outcomes: Outcomes = dataclasses.field(default_factory=list)  # that `dev_metric` summarises
    eligible: bool = True  # whether it may be the best checkpoint
    # number of steps that were skipped because of a NaN or infinite loss or gradient
    bad_steps: int = 0
    dev_text: str = ""  # identifies the text that `dev_metric` is measured on
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the position in the data
    # size and SHA-256 of the metrics before it
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # of the items of a checkpoint
    digests: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # share of the training sentences that consist largely of words that the tokenizer does not know
    unknown: float = 0.0

    @property
    def score(self) -> float | None:
        """The dev score that chooses the best checkpoint.

        If there is none, or if the checkpoint is not eligible, it is None.
        """
        return self.dev[self.dev_metric] if self.dev and self.eligible else None

    def content(self) -> dict[str, Any]:
        """Return everything but the digests."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name != "digests"
        }


@dataclasses.dataclass(frozen=True)
class Selection:
    """The model that a finished run exports."""

    record: Record  # its step is that of the checkpoint that it was made from, or 0
    # the share of the trained weights: 1 for the checkpoint, 0 for the starting checkpoint
    interpolation: float
    # how it compares with the starting checkpoint, what is exported and why: a line in words, then
    # lines of numbers
    verdict: str
    # the scores of the starting checkpoint and of the exported model that the verdict compares
    judged: Sequence[float] | None = None
    # ways to search, if they were compared
    systems: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # how to search with it: `mode` and `weight`, and the search that is recommended `instead`
    search: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def origin(interpolation: float, step: int) -> str:
    """Describe where the weights of a model are from."""
    if interpolation == 0:
        return "the starting checkpoint, unchanged"
    if interpolation == 1:
        return f"step {step}"
    return f"{interpolation:g} x step {step} + {1 - interpolation:g} x the starting checkpoint"


def write_baseline(workdir: Path, record: Record) -> None:
    """Write the record of the starting checkpoint."""
    with io.disk_errors(workdir / _BASELINE, safe=_SAFE):
        io.write_sealed(workdir / _BASELINE, record.content())


def read_baseline(workdir: Path) -> Record | None:
    """Return the record of the starting checkpoint, or None if it is not evaluated yet."""
    path = workdir / _BASELINE
    remedy = "Remove it and run the command again: it evaluates the starting checkpoint again"
    return Record(**io.read_sealed(path, remedy)) if path.is_file() else None


def write_selection(workdir: Path, selection: Selection, weights: Params) -> None:
    """Write the selected model, and its weights if no checkpoint has them.

    The weights have the names of a checkpoint.
    """
    with io.disk_errors(workdir / SELECTION, safe=_SAFE):
        for name in (SELECTION, SELECTED_WEIGHTS):  # of an earlier selection
            (workdir / name).unlink(missing_ok=True)
        files = [workdir / SELECTED_WEIGHTS] if selection.interpolation < 1 else []
        for path in files:
            io.write_tensors(path, weights)
        # Last: it shows that the weights are complete.
        io.write_sealed(workdir / SELECTION, dataclasses.asdict(selection), files)


def read_selection(workdir: Path) -> Selection | None:
    """Return the selection, or None while training is not finished."""
    path = workdir / SELECTION
    if not path.is_file():
        return None
    content = io.read_sealed(
        path, "Run the command that trained the run again: it repeats the selection"
    )
    return Selection(**content | {"record": Record(**content["record"])})


# Metrics


def read_metrics(workdir: Path) -> list[dict[str, float]]:
    """Return the rows of a run's `metrics.jsonl`; unreadable lines are skipped with a warning."""
    path = workdir / METRICS
    rows, unreadable = parse_rows(path.read_bytes() if path.is_file() else b"")
    if unreadable:
        log_line(f"warning: {path}: {unreadable}")
    return rows


def parse_rows(content: bytes) -> tuple[list[dict[str, float]], str]:
    """Return the rows and, in words, how many lines are unreadable.

    A truncated last line is ignored.
    """
    rows, unreadable = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            numbers = [float(value) for value in row.values() if isinstance(value, int | float)]
            if type(row["step"]) is not int or len(numbers) < len(row):
                raise ValueError(line)
            rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            unreadable.append(number)
    return (
        rows,
        f"skipped {len(unreadable)} unreadable lines, the first is line {unreadable[0]}"
        if unreadable
        else "",
    )


# The environment of each start

# The entries under `devices` in messages.
_NAMES_OF_DEVICES = {
    "kind": "the kind of device",
    "count": "the number of devices",
    "hosts": "the number of processes",
    "chunk_size": "the size of chunks (0: whole batches)",
}


def record_start(
    workdir: Path, config: Config, *, text: str, step: int, chunk_size: int = 0
) -> None:
    """Append a line to `starts.jsonl`, and report what differs from the previous start.

    Versions and devices are compared, and the size of chunks that the free memory asked for. At
    step 0 the file begins anew: nothing is resumed, and its lines may be of a run that this one
    replaces.
    """
    before: dict[str, Any] = next(reversed(read_starts(workdir)), {}) if step else {}
    now: dict[str, Any] = {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"python": platform.python_version(), "diffcse_jax": __version__}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "devices": {
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "hosts": jax.process_count(),
            "chunk_size": chunk_size,
        },
        "git": commit(Path(__file__).parents[1]),
        "step": step,
        "configuration": config.to_dict(),
        "digests": {"text": text, **io.read_json(workdir / START)},
    }
    with io.disk_errors(workdir / STARTS, safe=_SAFE):
        if not step:
            (workdir / STARTS).unlink(missing_ok=True)
        io.append_line(workdir / STARTS, json.dumps(now))
    changed = [
        f"{_NAMES_OF_DEVICES.get(name, name)} was {before[group][name]}, now {value}"
        for group in ("versions", "devices")
        for name, value in now[group].items()
        if before and before[group].get(name, value) != value
    ]
    if changed:
        log_line(
            f"notice: results may differ in their last digits from here on: {', '.join(changed)}"
        )


def read_starts(workdir: Path) -> list[dict[str, Any]]:
    """Return the lines of `starts.jsonl`.

    Unreadable lines are skipped, because the last one may be truncated.
    """
    path = workdir / STARTS
    starts = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with contextlib.suppress(ValueError):
            start = json.loads(line)
            if isinstance(start, dict):
                starts.append(start)
    return starts


def commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that tracks the folder, or None.

    It also says whether tracked files differ.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        if not git("ls-files", "."):
            return None
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.SubprocessError):  # no git, no repository or no commit
        return None
