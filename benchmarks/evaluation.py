r"""Compare SentEval's tasks with the same procedure in PyTorch: wall time and scores.

    python -m benchmarks.evaluation --tasks STS12,STS14,STSBenchmark,TREC,MR --mode test \
        --data_dir DIR --output benchmarks/results/NAME.json

The PyTorch side does what SentEval does: it encodes each split of a task, and each occurrence of a
sentence, in batches of 128. It trains one classifier after the other (`benchmarks.torch_senteval`).
Our side runs before and after it.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, torch_senteval
from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import reported_to_user
from diffcse_jax.evaluation import EvaluationSettings, Task, senteval, sts
from diffcse_jax.evaluation.runner import find_task
from diffcse_jax.evaluation.senteval_data import senteval_folder
from diffcse_jax.models import files

# What SentEval also encodes, to choose the regularization of a trained regression.
TRAINING_PAIRS = {
    "STSBenchmark": {"train": ("STS/STSBenchmark/sts-train.csv",)},
    "SICKRelatedness": {"train": ("SICK/SICK_train.txt",)},
}
TORCH_SETTINGS = {"test": ("adam", 64, 5, 4, 10), "fasttest": ("rmsprop", 128, 3, 2, 5)}


class Stopwatch:
    """Seconds for each part of the work."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def __call__(self, part: str, function: Callable, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        self.seconds[part] = time.perf_counter() - start
        return result


def ours(
    task: Task, folder: Path, encoder: SentenceEncoder, mode: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return scores and seconds of our evaluation."""
    watch = Stopwatch()
    if not isinstance(task.score, partial):  # one without a classifier
        scores = watch("encoding", task.run, encoder, folder, EvaluationSettings(mode=mode))
        return {"spearman": scores["spearman"], "pearson": scores["pearson"]}, watch.seconds
    splits = {split: task.load(folder, split) for split in task.splits}
    classes, procedure = (task.score.keywords[name] for name in ("classes", "procedure"))
    features = watch("encoding", senteval.encode_examples, encoder, splits, classes)
    scores = watch("classifiers", procedure, features, senteval.SETTINGS[mode])
    return {name: scores[name] for name in ("acc", "devacc", "f1") if name in scores}, watch.seconds


def theirs(
    task: Task, folder: Path, encoder: torch_senteval.Encoder, mode: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return scores and seconds of the procedure in PyTorch."""
    watch = Stopwatch()
    if isinstance(task.score, partial):
        features = watch("encoding", torch_features, task, folder, encoder)
        with torch_senteval.one_thread():
            return watch("classifiers", torch_accuracies, task, features, mode), watch.seconds
    sets = torch_pairs(task, folder)
    vectors = watch(
        "encoding",
        lambda: {
            name: (encoder(pairs.first), encoder(pairs.second)) for name, pairs in sets.items()
        },
    )
    scored = ["test"] if "test" in sets else list(sets)
    system = np.concatenate([sts.cosine(*vectors[name]) for name in scored])
    scores = sts.correlations(system, np.concatenate([sets[name].gold for name in scored]))
    return {"spearman": scores["spearman"], "pearson": scores["pearson"]}, watch.seconds


def torch_pairs(task: Task, folder: Path) -> dict[str, sts.ScoredPairs]:
    """Return all pairs that SentEval encodes for a task."""
    task = dataclasses.replace(task, splits={**task.splits, **TRAINING_PAIRS.get(task.name, {})})
    return {split: task.load(folder, split) for split in task.splits}


def torch_features(task: Task, folder: Path, encoder: torch_senteval.Encoder) -> dict[str, tuple]:
    """Return embeddings and labels by split."""
    features = {}
    for split in task.splits:
        examples = task.load(folder, split)
        first, *second = (
            encoder([example.sentences[side] for example in examples])
            for side in range(len(examples[0].sentences))
        )
        vectors = (
            np.concatenate([np.abs(first - second[0]), first * second[0]], axis=1)
            if second
            else first
        )
        features[split] = vectors, np.array([example.label for example in examples])
    return features


def torch_accuracies(task: Task, features: dict[str, tuple], mode: str) -> dict[str, float]:
    """Return `acc` and `devacc`, with `f1` for MRPC."""
    *recipe, folds = TORCH_SETTINGS[mode]
    dimension = features["train"][0].shape[1]

    def build(regularization: float) -> torch_senteval.Classifier:
        return torch_senteval.Classifier(
            dimension, len({*features["train"][1]}), regularization, *recipe
        )

    if "test" not in features:
        devacc, acc, *_ = torch_senteval.nested_cross_validation(*features["train"], folds, build)
        return {"acc": float(acc), "devacc": float(devacc)}
    if "dev" in features:
        devacc, acc = torch_senteval.fixed_splits(
            *features["train"], features["dev"], features["test"], build
        )
        return {"acc": float(acc), "devacc": float(devacc)}
    devacc, acc, predicted = torch_senteval.cross_validation(
        *features["train"], *features["test"], folds, build
    )
    scores = {"acc": float(acc), "devacc": float(devacc)}
    return scores | (
        {"f1": senteval.f1(predicted, features["test"][1])} if task.name == "MRPC" else {}
    )


def compare(
    task: Task, folder: Path, mode: str, model: str, theirs_encoder: torch_senteval.Encoder
) -> dict[str, Any]:
    """Return both sides' scores and seconds for one task.

    Ours compiles again each time, as a new command would.
    """
    runs = []
    import jax

    def run_ours() -> dict[str, float]:
        jax.clear_caches()
        encoder = SentenceEncoder.from_pretrained(model, pooler="avg")  # as PyTorch's side
        scores, seconds = ours(task, folder, encoder, mode)
        runs.append(seconds)
        return scores

    our_scores = run_ours()
    their_scores, their_seconds = theirs(task, folder, theirs_encoder, mode)
    run_ours()
    parts = {
        part: {
            "ours_seconds": [seconds[part] for seconds in runs],
            "torch_seconds": their_seconds[part],
            "ratio": their_seconds[part] / statistics.mean(seconds[part] for seconds in runs),
        }
        for part in their_seconds
    }
    return {"ours": our_scores, "torch": their_scores, "parts": parts}


def main(argv: list[str]) -> dict[str, Any]:
    """Run the command and return the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="minilm", help="a folder that records its pooler (default: minilm)"
    )
    parser.add_argument("--tasks", default="STSBenchmark,TREC", help="separated by commas")
    parser.add_argument("--mode", choices=("test", "fasttest"), default="test")
    parser.add_argument("--data_dir", default="", help="as of eval.py")
    parser.add_argument("--output", type=Path, help="JSON file (default: standard output)")
    options = parser.parse_args(argv)

    folder = senteval_folder(options.data_dir)
    torch_encoder = torch_senteval.Encoder(files.find_folder(options.model))
    record: dict[str, Any] = {"model": options.model, "mode": options.mode, "tasks": {}}
    for name in options.tasks.split(","):
        record["tasks"][name] = compare(
            find_task(name), folder, options.mode, options.model, torch_encoder
        )
        print(name, record["tasks"][name], file=sys.stderr)
        written = measure.write_record(options.output, "benchmarks.evaluation", argv, record)
    return written


if __name__ == "__main__":
    with reported_to_user():
        main(sys.argv[1:])
