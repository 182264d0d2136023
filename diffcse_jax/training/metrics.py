"""A run's reports: `metrics.jsonl`, lines on the terminal."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import tqdm

from diffcse_jax.io import append_line, disk_errors, write_text
from diffcse_jax.storage.workdir import METRICS, place_for_damaged


class MetricsWriter:
    """Appends rows to `metrics.jsonl` of a workdir.

    Args:
        workdir: where the files are.
        resumed_at: the step of the checkpoint training goes on from, or 0. Rows of later steps, left by a run that was
            killed after its last checkpoint, are removed. Of a file with lines that cannot be read, a copy is kept in
            `WORKDIR/damaged`.

    Raises:
        DiskError: they cannot be written, here and in `write`.
    """

    def __init__(self, workdir: Path, *, resumed_at: int):
        self._path = workdir / METRICS
        with self._writing():
            before = self._path.read_bytes() if self._path.is_file() else b""
            rows, unreadable = _parsed(before)
            if unreadable:
                copy = place_for_damaged(workdir, METRICS)
                copy.write_bytes(before)
                report(f"warning: {_unreadable(self._path, unreadable)}; the file as it was is kept as {copy}")
            kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= resumed_at) if resumed_at else ""
            if kept.encode() != before or not before:
                write_text(self._path, kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row, `{"step": step, name: value}`."""
        with self._writing():
            append_line(self._path, json.dumps({"step": step, **values}))

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self._path.parent, safe="The rows written before and the checkpoints are whole.")


def report(message: str) -> None:
    """A line for the person at the terminal, above any progress bar; from the first host alone."""
    if jax.process_index() == 0:
        tqdm.tqdm.write(message, file=sys.stderr)


def shown(scores: Mapping[str, float]) -> str:
    """Scores for people."""
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


def no_bar() -> bool | None:
    """The value of tqdm's `disable`: None on the first host (a bar if there is a terminal), True on the others."""
    return True if jax.process_index() else None


def read_metrics(workdir: Path) -> list[dict[str, float]]:
    """The rows of a workdir's `metrics.jsonl`; lines that cannot be read are named and left out."""
    path = workdir / METRICS
    rows, unreadable = _parsed(path.read_bytes()) if path.is_file() else ([], [])
    if unreadable:
        report(f"warning: {_unreadable(path, unreadable)}")
    return rows


def _parsed(content: bytes) -> tuple[list[dict[str, float]], list[int]]:
    """The rows, and the numbers of the lines that are none. A last one cut off by a kill is neither."""
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


def _unreadable(path: Path, lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:5])) + (" ..." if len(lines) > 5 else "")
    return f"{path}: left out what cannot be read, {len(lines)} line{'s' if len(lines) > 1 else ''}: {shown}"
