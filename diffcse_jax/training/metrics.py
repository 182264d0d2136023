"""A run's reports: `metrics.jsonl`, TensorBoard events, lines on the terminal."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import tqdm
from tensorboardX import SummaryWriter

from diffcse_jax.storage.files import write_text


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and TensorBoard events of a workdir.

    Args:
        workdir: where the files are.
        resumed_at: the step of the checkpoint training goes on from, or 0. Rows of later steps, left by a run that was
            killed after its last checkpoint, are removed.
    """

    def __init__(self, workdir: Path, *, resumed_at: int):
        self._path = workdir / "metrics.jsonl"
        kept = [row for row in read_metrics(workdir) if row["step"] <= resumed_at] if resumed_at else []
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row; names become `{"step": step, name: value}` and TensorBoard scalars."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes the events."""
        self._events.close()


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
    """The rows of a workdir's `metrics.jsonl`; a last row cut off by a kill is left out."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
