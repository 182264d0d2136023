"""Trained heads as folders: a `sequence classification` model of transformers where its architecture is the head's."""

import dataclasses
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from diffcse_jax.errors import CheckpointError
from diffcse_jax.export import SAMPLES, TOLERANCE, write_folder
from diffcse_jax.finetune.model import TaskModel
from diffcse_jax.io import disk_errors, read_json, replace_dir, write_json, write_tensors
from diffcse_jax.losses.finetune import Task
from diffcse_jax.models import families, hf
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.saved_encoder import SavedEncoder

TASK_FILE, HEAD_FILE, MODEL_FOLDER = "task.json", "head.safetensors", "sequence_classification"
NOT_OF_IT = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def write_heads(model: TaskModel, saved: SavedEncoder, folder: Path) -> dict[str, str]:
    """Writes `FOLDER/TASK/task.json`, `head.safetensors` and, where there is one, `sequence_classification/`.

    Args:
        model: the encoder with its heads.
        saved: the encoder.
        folder: gets a folder for each task; an earlier one is replaced.

    Returns:
        Of each task what was written, in words.

    Raises:
        CheckpointError: a folder whose outputs, read by PyTorch, are not the model's.
    """
    told = {}
    for name, task in model.tasks.items():
        with disk_errors(folder, safe="The checkpoints are whole."), replace_dir(folder / name) as new:
            write_tensors(new / HEAD_FILE, model.heads[name])
            reason = why_not(task, saved)
            record: dict[str, Any] = {
                "task": dataclasses.asdict(task),
                "pooler": saved.pooler,
                "head_alone": reason,
            }
            told[name] = f"head only: {reason}"
            if not reason:
                write_sequence_classifier(task, model.heads[name], saved, new / MODEL_FOLDER)
                difference = check(model, name, new / MODEL_FOLDER, saved.transformer_config.max_length)
                record["maximal_absolute_difference"] = difference
                told[name] = "a sequence-classification model" + (
                    "" if difference is None else f"; its outputs differ by at most {difference:.1e} in PyTorch"
                )
            write_json(new / TASK_FILE, record)
    return told


def why_not(task: Task, saved: SavedEncoder) -> str:
    """The reason why transformers' class for labelled sentences cannot hold a head; empty if it can."""
    classifier = families.find(saved.transformer_config.family).sequence_classifier
    family = saved.transformer_config.family
    if task.is_pair:
        return "transformers reads pairs as one sequence, and this head compares the vectors of two"
    if saved.pooler not in ("cls", "cls_before_pooler"):
        return f"transformers' classifiers read position 0, and this encoder's vector is {saved.pooler}"
    if saved.pooler == "cls_before_pooler" and (task.depth, task.activation) != (2, classifier.activation):
        return (
            f"the classifier of {family} is dense, {classifier.activation}, dense on position 0, which is depth=2, "
            f"activation={classifier.activation!r}; this head has depth={task.depth}, activation={task.activation!r}"
        )
    if saved.pooler == "cls" and (task.depth, classifier.activation) != (1, "tanh"):
        return f"the pooler cls has a dense + tanh layer, to which the classifier of {family} adds one layer at most"
    return ""


def write_sequence_classifier(task: Task, head: Params, saved: SavedEncoder, folder: Path) -> None:
    """Writes a model of transformers into a new folder; `why_not` has no objection."""
    folder.mkdir()
    write_folder(saved, folder)
    for name in NOT_OF_IT:
        (folder / name).unlink()
    for module in folder.glob("[0-9]_*"):
        shutil.rmtree(module)
    sizes = saved.transformer_config
    family = families.find(sizes.family)
    layers = [_layer(head, number) for number in range(task.depth)]
    if saved.pooler == "cls":
        assert saved.pooler_head is not None
        layers.insert(0, (np.asarray(saved.pooler_head["dense.kernel"]), np.asarray(saved.pooler_head["dense.bias"])))
    tensors = {family.prefix + name: value for name, value in hf.to_hf(saved.transformer, "transformer", sizes).items()}
    names = family.sequence_classifier.dense, family.sequence_classifier.classifier
    for name, (kernel, bias) in zip(names, (layers[0], _as_logits(task, *layers[1])), strict=True):
        tensors |= {f"{name}.weight": np.ascontiguousarray(kernel.T), f"{name}.bias": bias}
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


def check(model: TaskModel, name: str, folder: Path, max_length: int) -> float | None:
    """The largest difference of outputs on sample sentences, computed by PyTorch; None where that is not installed.

    Raises:
        CheckpointError: it is more than 1e-4 of the outputs' scale.
    """
    if not importlib.util.find_spec("torch"):
        return None
    task = model.tasks[name]
    expected = model.outputs(name, [(sentence,) for sentence in SAMPLES])
    if task.chosen_loss == "binary_cross_entropy":
        expected = np.concatenate([np.zeros_like(expected), expected], axis=1)
    difference = float(np.abs(_outputs_in_torch(folder, SAMPLES, max_length) - expected).max())
    scale = max(float(np.abs(expected).max()), 1.0)
    if not difference <= TOLERANCE * scale:
        raise CheckpointError(
            f"task {name}: the sequence-classification model does not give the head's outputs: in PyTorch they differ "
            f"by {difference:.2e}, more than {TOLERANCE:.0e} of their scale of {scale:.2g}"
        )
    return difference


def _outputs_in_torch(
    folder: Path, sentences: Sequence[str], max_length: int
) -> Float32[np.ndarray, "sentences outputs"]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # of loading weights
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    inputs = tokenizer(list(sentences), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.inference_mode():
        return network.eval()(**inputs).logits.numpy()


def _layer(head: Params, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(head[f"layers.{number}.kernel"]), np.asarray(head[f"layers.{number}.bias"])


def _as_logits(task: Task, kernel: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last layer as transformers has it: for a single logit of two classes, one for the first that is always 0."""
    if task.chosen_loss != "binary_cross_entropy":
        return kernel, bias
    return np.concatenate([np.zeros_like(kernel), kernel], axis=1), np.concatenate([np.zeros_like(bias), bias])
