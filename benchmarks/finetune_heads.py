"""Compare the training of task heads on embeddings of a frozen encoder with the same heads in PyTorch.

python -m benchmarks.finetune_heads --run runs/tasks --seeds 0 1 2 --output heads.json

The command reads the configuration of a fine-tuning with finetune.stages='heads_first', and the embeddings that it has
stored. Both sides have the same initial weights, batches and order, and use AdamW. Dropout masks and the epsilon of
AdamW differ. The score is the best dev average, computed every eval.every steps.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from diffcse_jax.apps.finetune.model import TaskEvaluation, TaskModel, TasksMetric, heads_in
from diffcse_jax.apps.finetune.train import Tuning
from diffcse_jax.batch import Batch
from diffcse_jax.losses.finetune import ENCODER, Task
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.folder import HEADS, read_config
from diffcse_jax.run_folder.records import read_metrics

ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "gelu": torch.nn.GELU}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a workdir of `diffcse finetune`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    results = [compare(options.run, seed) for seed in options.seeds]
    document = {"run": str(options.run), "seeds": results} | summary(results)
    options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(summary(results), indent=2))


def compare(run: Path, seed: int) -> dict:
    """Return dev scores and seconds of both sides."""
    config = read_config(run)
    tuning = Tuning(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed)))
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / HEADS
        shutil.copytree(run / HEADS / "vectors", workdir / "vectors")
        begun = time.perf_counter()
        tuning.train_heads(workdir)
        seconds = time.perf_counter() - begun
        rows = [row for row in read_metrics(workdir) if "dev/average" in row and row["step"]]
        scores, torch_seconds = in_torch(tuning, workdir / "vectors")
    best = max(row["dev/average"] for row in rows)
    return {"seed": seed, "ours": best, "torch": max(scores), "seconds": seconds, "torch_seconds": torch_seconds}


def summary(results: list[dict]) -> dict:
    """Return means and standard deviations over seeds."""
    columns = {name: np.array([each[name] for each in results]) for name in results[0] if name != "seed"}
    return {
        name: {"mean": column.mean(), "std": column.std(ddof=min(1, len(column) - 1))}
        for name, column in columns.items()
    }


def in_torch(tuning: Tuning, folder: Path) -> tuple[list[float], float]:
    """Train heads in PyTorch. Return their dev averages and the seconds of steps and evaluations."""
    config = tuning.config_of_heads()
    stored, encoder = tuning.frozen_vectors(folder)
    batches, first = tuning.mixture(config, stored), tuning.built(config).params
    torch.manual_seed(config.train.seed)
    heads = {data.name: head(data.task, heads_in(first, {data.name: data.task})[data.name]) for data in tuning.tasks}
    optimizer = torch.optim.AdamW(groups(heads, config.optim.weight_decay), lr=config.optim.learning_rate)
    evaluation = TaskEvaluation(TasksMetric(tuning.tasks, config.eval.batch_size), "")
    tasks, scores, begun = {data.name: data.task for data in tuning.tasks}, [], time.perf_counter()
    for step in range(len(batches)):
        train_step(heads, tasks, optimizer, batches[step], config.optim.clip_norm)
        if (step + 1) % (config.eval.every or len(batches)) == 0 or step + 1 == len(batches):
            model = TaskModel(encoder, tasks, {name: weights(each) for name, each in heads.items()})
            scores.append(evaluation.measure(model).scores["average"])
    return scores, time.perf_counter() - begun


def head(task: Task, params: Params) -> torch.nn.Sequential:
    """Return a task's head with our initial weights."""
    modules: list[torch.nn.Module] = []
    for number in range(task.depth):
        kernel, bias = (torch.tensor(np.asarray(params[f"layers.{number}.{part}"])) for part in ("kernel", "bias"))
        layer = torch.nn.Linear(*kernel.shape)
        layer.weight.data, layer.bias.data = kernel.T.contiguous(), bias
        modules += [ACTIVATIONS[task.activation]()] * bool(number) + [torch.nn.Dropout(task.dropout), layer]
    return torch.nn.Sequential(*modules)


def groups(heads: dict[str, torch.nn.Sequential], weight_decay: float) -> list[dict]:
    """Return all parameters. Weight decay applies to matrices."""
    every = [parameter for each in heads.values() for parameter in each.parameters()]
    matrices, biases = ([each for each in every if (each.ndim > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": biases, "weight_decay": 0.0}]


def train_step(
    heads: dict[str, torch.nn.Sequential],
    tasks: dict[str, Task],
    optimizer: torch.optim.Optimizer,
    views: Batch,
    clip_norm: float,
) -> None:
    """Train on one batch, which belongs to one task."""
    ((name, labels),) = views.labels.items()
    task, sides = tasks[name], torch.tensor(views.vectors[ENCODER]).unbind(dim=1)
    outputs = heads[name](features(task, sides))
    if task.chosen_loss == "cross_entropy":
        loss = torch.nn.functional.cross_entropy(outputs, torch.tensor(labels).long())
    elif task.chosen_loss == "binary_cross_entropy":
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], torch.tensor(labels).float())
    else:
        loss = torch.nn.functional.mse_loss(outputs[:, 0], torch.tensor(labels))
    optimizer.zero_grad()
    (task.weight * loss).backward()
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(
            [each for group in optimizer.param_groups for each in group["params"]], clip_norm
        )
    optimizer.step()


def features(task: Task, sides: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the input of a head."""
    if not task.is_pair:
        return sides[0]
    u, v = sides
    parts = {"first": u, "second": v, "difference": (u - v).abs(), "product": u * v}
    parts["cosine"] = torch.nn.functional.cosine_similarity(u, v)[:, None]
    return torch.cat([parts[name] for name in task.features], dim=1)


def weights(modules: torch.nn.Sequential) -> Params:
    """Return our names for the parameters of a head."""
    layers = [module for module in modules if isinstance(module, torch.nn.Linear)]
    named = {f"layers.{number}.kernel": layer.weight.detach().numpy().T for number, layer in enumerate(layers)}
    return named | {f"layers.{number}.bias": layer.bias.detach().numpy() for number, layer in enumerate(layers)}


if __name__ == "__main__":
    main()
