"""The results of a fine-tuning beside its checkpoints: predictions, dev scores, pictures of what is confused."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffcse_jax.finetune.data import Rows, TaskData
from diffcse_jax.finetune.model import TaskModel, decided, named
from diffcse_jax.losses.finetune import Task

# Of a picture: inches of a cell and of the largest one; classes up to which cells have text; names along an axis.
CELL, LARGEST = 0.75, 20.0
MOST_WITH_TEXT, MOST_NAMES = 30, 150


def write_outputs(
    model: TaskModel, tasks: Sequence[TaskData], workdir: Path, style: str, batch_size: int
) -> list[Path]:
    """Predictions of dev and test rows, and a picture for each classification.

    Args:
        model: the encoder with its heads.
        tasks: with their rows.
        workdir: gets `predictions/TASK-dev.csv`, `predictions/TASK-test.csv`, `report/confusion_TASK.png`.
        style: of predictions, `csv` or `cs224n`.
        batch_size: sentences per encoding batch.

    Returns:
        The files.
    """
    files = []
    for data in tasks:
        for split, rows in (("dev", data.dev), ("test", data.test)):
            if rows is None:
                continue
            values = decided(data.task, model.outputs(data.name, rows.texts, batch_size))
            path = workdir / "predictions" / f"{data.name}-{split}.csv"
            write_predictions(path, data.task, rows, named(data.task, values), style)
            files.append(path)
            if split == "dev" and data.task.kind == "classification":
                counts = confusion(data.dev.labels, values, len(data.task.labels))
                files.append(draw_confusion(counts, data.task.labels, data.name, workdir / "report"))
    return files


def write_predictions(path: Path, task: Task, rows: Rows, values: Sequence[str] | Sequence[float], style: str) -> None:
    """Writes the names of rows and what was predicted for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = [value if isinstance(value, str) else f"{value:.6g}" for value in values]
    with path.open("w", encoding="utf-8", newline="") as file:
        if style == "cs224n":
            file.write(f"id \t {task.prediction} \n")
            file.writelines(f"{name} , {value} \n" for name, value in zip(rows.ids, shown, strict=True))
        else:
            csv.writer(file, lineterminator="\n").writerows(
                [("id", task.prediction), *zip(rows.ids, shown, strict=True)]
            )


def confusion(
    labels: Int[np.ndarray, " rows"], predicted: Int[np.ndarray, " rows"], classes: int
) -> Int[np.ndarray, "classes classes"]:
    """Counts of rows by their class (row) and the predicted one (column)."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def draw_confusion(counts: Int[np.ndarray, "classes classes"], labels: Sequence[str], name: str, folder: Path) -> Path:
    """Draws counts, coloured by their share of the class, into `confusion_NAME.png`, and returns that path.

    Of many classes the cells are small: they have no text, and where names would overlap only every so many is written.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shown = range(0, len(labels), math.ceil(len(labels) / MOST_NAMES))
    names = [_short(labels[number]) for number in shown]
    size = min(1.4 + 0.08 * max(map(len, names)) + CELL * len(labels), LARGEST)
    figure = Figure(figsize=(size + 1.0, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= MOST_WITH_TEXT:
        _write_cells(axes, counts, shares)
    fontsize = 10 if len(labels) <= MOST_WITH_TEXT else 7
    is_wide = len(labels) > MOST_WITH_TEXT or max(map(len, names)) > 8
    # Names are no formulas, though they may have dollar signs.
    axes.set_xticks(shown, names, fontsize=fontsize, rotation=90 if is_wide else 0, parse_math=False)
    axes.set_yticks(shown, names, fontsize=fontsize, parse_math=False)
    accuracy = np.trace(counts) / max(counts.sum(), 1)
    axes.set(title=f"{name}, dev: accuracy {accuracy:.1%}", xlabel="predicted", ylabel="class")
    figure.colorbar(image, ax=axes, aspect=30, label="share of the class")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"confusion_{name}.png"
    figure.savefig(path, dpi=120)
    return path


def _write_cells(
    axes: Axes, counts: Int[np.ndarray, "classes classes"], shares: Float[np.ndarray, "classes classes"]
) -> None:
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(
            column, row, f"{count:,}\n{shares[row, column]:.0%}", ha="center", va="center", color=color, fontsize=8
        )


def _short(name: str) -> str:
    """A class on one line, of few characters."""
    line = " ".join(name.split())
    return line if len(line) <= 24 else f"{line[:21]}..."
