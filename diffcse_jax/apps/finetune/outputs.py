"""The files that a fine-tuning writes: predictions, confusion matrices, and heads that transformers can read."""

import csv
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from diffcse_jax.apps.finetune.model import TaskModel, decided, named
from diffcse_jax.apps.finetune.tasks import Rows, TaskData
from diffcse_jax.errors import require_extra
from diffcse_jax.export import write_folder
from diffcse_jax.io import disk_errors, read_json, replace_dir, write_json, write_tensors
from diffcse_jax.losses.finetune import Task
from diffcse_jax.models import families, hf
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.saved_encoder import SavedEncoder


def write_outputs(
    model: TaskModel, tasks: Sequence[TaskData], workdir: Path, style: str, batch_size: int
) -> list[Path]:
    """Write predictions of dev and test rows, and a confusion matrix for each classification. Return the files.

    They are `predictions/TASK-dev.csv`, `predictions/TASK-test.csv` and `report/confusion_TASK.png`.
    """
    files = []
    for data in tasks:
        for split, rows in (("dev", data.dev), ("test", data.test)):
            if rows is None:
                continue
            values = decided(data.task, model.outputs(data.name, rows.texts, batch_size))
            files.append(workdir / "predictions" / f"{data.name}-{split}.csv")
            write_predictions(files[-1], data.task, rows, named(data.task, values), style)
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
    """Draw counts by class (row) and predicted class (column), coloured by their share of the class.

    With more than 30 classes, cells and axes have no text.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [label if len(label) <= 24 else f"{label[:21]}..." for label in labels] if len(labels) <= 30 else []
    size = min(1.4 + 0.08 * max(map(len, names), default=0) + 0.75 * len(labels), 20.0)  # inches
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=(size + 1.0, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(counts) if names else ():
        text, color = f"{count:,}\n{shares[row, column]:.0%}", "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)  # names may contain dollar signs
    axes.set_yticks(range(len(names)), names, parse_math=False)
    accuracy = np.trace(counts) / max(counts.sum(), 1)
    axes.set(title=f"{name}, dev: accuracy {accuracy:.1%}", xlabel="predicted", ylabel="class")
    figure.colorbar(image, ax=axes, aspect=30, label="share of the class")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"confusion_{name}.png"
    figure.savefig(path, dpi=120)
    return path


# Heads


def write_heads(model: TaskModel, saved: SavedEncoder, folder: Path) -> dict[str, str]:
    """Write `FOLDER/TASK/task.json`, `head.safetensors` and, if transformers has a class, `sequence_classification/`.

    Returns:
        What was written, by task, in words.
    """
    written = {}
    for name, task in model.tasks.items():
        with disk_errors(folder, safe="The checkpoints are complete."), replace_dir(folder / name) as new:
            write_tensors(new / "head.safetensors", model.heads[name])
            reason = why_not(task, saved)
            record: dict[str, Any] = {"task": dataclasses.asdict(task), "pooler": saved.pooler, "head_alone": reason}
            written[name] = f"only the head: {reason}"
            if not reason:
                write_sequence_classifier(task, model.heads[name], saved, new / "sequence_classification")
                written[name] = "a sequence-classification model"
            write_json(new / "task.json", record)
    return written


def why_not(task: Task, saved: SavedEncoder) -> str:
    """Return why transformers' classifiers cannot hold a head, or an empty string."""
    family = saved.transformer_config.family
    classifier = families.FAMILIES[family].sequence_classifier
    if task.is_pair:
        return "transformers reads a pair as one sequence, but this head compares two embeddings"
    if classifier is None:
        return f"the classifier of {family} has other layers in transformers"
    if layers := saved.sentence_head.layers:
        return f"transformers' classifiers have no {', '.join(layer.kind for layer in layers)} after the pooling"
    if saved.pooler not in ("cls", "cls_before_pooler"):
        return f"transformers' classifiers read position 0, but the pooler of this encoder is {saved.pooler}"
    layer = (1, "tanh") if saved.pooler == "cls" else (2, task.activation)  # cls already has a dense + tanh layer
    if (task.depth, classifier.activation) != layer:
        return (
            f"the classifier of {family} is dense, {classifier.activation}, dense, but the pooler {saved.pooler} with "
            f"this head is not: depth={task.depth}, activation={task.activation!r}"
        )
    return ""


def write_sequence_classifier(task: Task, head: Params, saved: SavedEncoder, folder: Path) -> None:
    """Write a model of transformers into a new folder. `why_not` must be empty."""
    folder.mkdir()
    write_folder(saved, folder)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    for module in folder.glob("[0-9]_*"):
        shutil.rmtree(module)
    sizes, family = saved.transformer_config, families.FAMILIES[saved.transformer_config.family]
    layers = [(head[f"layers.{n}.kernel"], head[f"layers.{n}.bias"]) for n in range(task.depth)]
    if saved.pooler_head and saved.pooler == "cls":
        layers.insert(0, (saved.pooler_head["dense.kernel"], saved.pooler_head["dense.bias"]))
    if task.chosen_loss == "binary_cross_entropy":  # transformers expects two logits: the first class's is always 0
        kernel, bias = (np.concatenate([np.zeros_like(part), part], axis=-1) for part in layers[1])
        layers[1] = kernel, bias
    encoder = hf.to_hf(saved.transformer, "transformer", sizes)
    tensors = {family.prefix + name: value for name, value in encoder.items()}
    assert family.sequence_classifier is not None
    names = family.sequence_classifier.dense, family.sequence_classifier.classifier
    for name, (kernel, bias) in zip(names, layers, strict=True):
        tensors |= {f"{name}.weight": np.asarray(kernel).T, f"{name}.bias": np.asarray(bias)}
    write_tensors(folder / "model.safetensors", tensors)
    labels = task.labels or ("value",)
    config = read_json(folder / "config.json")
    config |= {
        "architectures": [f"{family.architecture.removesuffix('Model')}ForSequenceClassification"],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification" if task.labels else "regression",
    }
    write_json(folder / "config.json", config)
