"""The files that a fine-tuning writes: heads, predictions and confusion matrices."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from diffcse_jax.apps.finetune.model import TaskModel, decided, named
from diffcse_jax.apps.finetune.tasks import Rows, TaskData
from diffcse_jax.errors import require_extra
from diffcse_jax.io import replace_dir, write_json, write_tensors
from diffcse_jax.losses.finetune import Task
from diffcse_jax.run_folder.folder import read_config


def write_outputs(workdir: Path, tasks: Sequence[TaskData]) -> list[Path]:
    """Write the heads and predictions of a run, and a confusion matrix for each classification. Return the files.

    They are `tasks/TASK/task.json`, `tasks/TASK/head.safetensors`, `predictions/TASK-dev.csv`,
    `predictions/TASK-test.csv` and `report/confusion_TASK.png`.
    """
    model, config, files = TaskModel.from_run(workdir), read_config(workdir), []
    for data in tasks:
        folder = workdir / "tasks" / data.name
        with replace_dir(folder) as new:
            write_tensors(new / "head.safetensors", model.heads[data.name])
            write_json(new / "task.json", dataclasses.asdict(data.task) | {"pooler": model.encoder.pooler})
        files += [folder / "task.json", folder / "head.safetensors"]
        for split, rows in (("dev", data.dev), ("test", data.test)):
            if rows is None:
                continue
            values = decided(data.task, model.outputs(data.name, rows.texts, config.eval.batch_size))
            files.append(workdir / "predictions" / f"{data.name}-{split}.csv")
            write_predictions(files[-1], data.task, rows, named(data.task, values), config.finetune.predictions)
            if split == "dev" and data.task.kind == "classification":
                counts = np.zeros([len(data.task.labels)] * 2, np.int64)
                np.add.at(counts, (data.dev.labels, values), 1)
                files.append(draw_confusion(counts, data.task.labels, data.name, workdir / "report"))
    return files


def write_predictions(path: Path, task: Task, rows: Rows, values: Sequence[str] | Sequence[float], style: str) -> None:
    """Write the names of rows and their predictions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [value if isinstance(value, str) else f"{value:.6g}" for value in values]
    pairs = list(zip(rows.ids, texts, strict=True))
    with path.open("w", encoding="utf-8", newline="") as file:
        if style == "cs224n":
            file.write(f"id \t {task.prediction} \n")
            file.writelines(f"{name} , {value} \n" for name, value in pairs)
        else:
            csv.writer(file, lineterminator="\n").writerows([("id", task.prediction), *pairs])


def draw_confusion(counts: Int[np.ndarray, "classes classes"], labels: Sequence[str], name: str, folder: Path) -> Path:
    """Draw counts by class (row) and predicted class (column), coloured by their share of the class."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = min(3.0 + 0.75 * len(labels), 20.0)  # inches
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=(size + 1.0, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= 30:  # with more, text would overlap
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
        names = [label[:24] for label in labels]
        axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)  # names may contain dollar signs
        axes.set_yticks(range(len(names)), names, parse_math=False)
    accuracy = np.trace(counts) / max(counts.sum(), 1)
    axes.set(title=f"{name}, dev: accuracy {accuracy:.1%}", xlabel="predicted", ylabel="class")
    figure.colorbar(image, ax=axes, aspect=30, label="share of the class")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"confusion_{name}.png"
    figure.savefig(path, dpi=120)
    return path
