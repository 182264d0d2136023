"""SentEval's trained tasks: the accuracy of a linear classifier on embeddings.

File formats, folds, choice of the regularization, rounding and random numbers are those of SentEval
(`tools/validation.py`), in the settings that SimCSE and DiffCSE report.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import DataError, counted
from diffcse_jax.evaluation import Encoder, Settings, Task, classifier, sts
from diffcse_jax.evaluation.classifier import ADAM, RMSPROP, SEED, Classifiers, Fit, Recipe, Weights, hold_out
from diffcse_jax.evaluation.senteval_data import Form, numbered_lines, parse_rows, read_lines, single_spaced

Scores = dict[str, Any]
Rows = Int[np.ndarray, "..."]

FEWEST_PER_CLASS = 20  # so that every class is in each of ten folds, and in each of ten folds within nine of them
BINARY = {"0": 0, "1": 1}
QUESTIONS = {"ABBR": 0, "DESC": 1, "ENTY": 2, "HUM": 3, "LOC": 4, "NUM": 5}


class Example(NamedTuple):
    """One sentence, or two, and its class."""

    sentences: tuple[str, ...]
    label: int


# Procedures


THOROUGH = Recipe(ADAM, batch_size=64, tenacity=5, passes_per_block=4, folds=10)
FAST = Recipe(RMSPROP, batch_size=128, tenacity=3, passes_per_block=2, folds=5)
SETTINGS = {"test": THOROUGH, "fasttest": FAST, "dev": FAST}


@dataclasses.dataclass(frozen=True)
class Features:
    """A task's examples as a classifier sees them: inputs, classes from 0, and the rows of each split."""

    inputs: Float32[np.ndarray, "rows dim"]
    labels: Int[np.ndarray, " rows"]
    classes: int
    splits: dict[str, Rows]

    def train(self, fits: Sequence[Fit], recipe: Recipe) -> Classifiers:
        return classifier.train_classifiers(self.inputs, self.labels, self.classes, fits, recipe)

    def test(self, weights: Weights, rows: Rows | None, *, with_f1: bool = False) -> Scores:
        """Return a classifier's scores on these rows, x 100 with two decimals. Without rows, there are none."""
        if rows is None:
            return {}
        predicted, labels = classifier.predict(weights, self.inputs[rows]), self.labels[rows]
        scores = {"acc": round(100 * float(np.mean(predicted == labels)), 2), "ntest": len(rows)}
        return scores | ({"f1": f1(predicted, labels)} if with_f1 else {})


def encode_examples(encoder: Encoder, splits: Mapping[str, Sequence[Example]], classes: int) -> Features:
    """Return embeddings of sentences; for pairs with embeddings u and v, |u - v| and u * v next to each other."""
    examples = [example for split in splits.values() for example in split]
    sides = [list(side) for side in zip(*(example.sentences for example in examples), strict=True)]
    u, *others = sts.encode_groups(encoder, sides)
    inputs = np.concatenate([np.abs(u - others[0]), u * others[0]], axis=1) if others else u
    ends = np.cumsum([len(split) for split in splits.values()])
    rows = dict(zip(splits, np.split(np.arange(len(examples)), ends[:-1]), strict=True))
    return Features(inputs, np.array([example.label for example in examples]), classes, rows)


def nested_cross_validation(features: Features, recipe: Recipe) -> Scores:
    """Test each outer fold once; inner folds choose its regularization."""
    outer = stratified_folds(features.splits["train"], features.labels, recipe.folds)
    inner = [Fit(*fold) for train, _ in outer for fold in stratified_folds(train, features.labels, recipe.folds)]
    classifiers = features.train([*inner, *(hold_out(train) for train, _ in outer)], recipe)
    inner_accuracies = classifiers.dev_accuracy[: len(inner)].reshape(len(outer), recipe.folds, -1)
    dev, test = [], []
    for accuracies, final, (_, rows) in zip(inner_accuracies, classifiers.weights[len(inner) :], outer, strict=True):
        best, score = best_regularization(accuracies)
        dev.append(score)
        test.append(features.test(final[best], rows)["acc"])
    # NumPy rounds differently from Python.
    acc, devacc = (float(np.round(np.mean(scores), 2)) for scores in (test, dev))
    return {"acc": acc, "devacc": devacc, "ndev": len(features.labels), "ntest": len(features.labels)}


def cross_validation(features: Features, recipe: Recipe) -> Scores:
    """Choose the regularization by folds of the training split, fit once more, and test that classifier."""
    train = features.splits["train"]
    folds = [Fit(*fold) for fold in stratified_folds(train, features.labels, recipe.folds)]
    classifiers = features.train([*folds, hold_out(train)], recipe)
    best, score = best_regularization(classifiers.dev_accuracy[:-1])
    with_f1 = features.classes == 2  # MRPC; SentEval has no F1 for other tasks
    tested = features.test(classifiers.weights[-1, best], features.splits.get("test"), with_f1=with_f1)
    return {"devacc": score, "ndev": len(train)} | tested


def fixed_splits(features: Features, recipe: Recipe) -> Scores:
    """Choose the regularization by the dev split, and test that same classifier."""
    train, dev = features.splits["train"], features.splits["dev"]
    classifiers = features.train([Fit(train, dev)], recipe)
    best, score = best_regularization(classifiers.dev_accuracy)
    tested = features.test(classifiers.weights[0, best], features.splits.get("test"))
    return {"devacc": score, "ntrain": len(train), "ndev": len(dev)} | tested


def stratified_folds(rows: Rows, labels: Int[np.ndarray, " examples"], folds: int) -> list[tuple[Rows, Rows]]:
    """Return the training rows and the held-out rows of each fold, in their given order.

    The folds are those of scikit-learn's `StratifiedKFold(folds, shuffle=True, random_state=1111)`.
    """
    _, first, classes = np.unique(labels[rows], return_index=True, return_inverse=True)
    classes = first.argsort().argsort()[classes]  # numbered by first appearance
    dealt = np.sort(classes)
    fold_of = np.empty(len(rows), int)
    generator = np.random.RandomState(SEED)
    for label in range(len(first)):
        sizes = [int((dealt[fold::folds] == label).sum()) for fold in range(folds)]
        order = np.repeat(np.arange(folds), sizes)
        generator.shuffle(order)
        fold_of[classes == label] = order
    return [(rows[fold_of != fold], rows[fold_of == fold]) for fold in range(folds)]


def best_regularization(accuracies: Float[np.ndarray, "folds regularizations"]) -> tuple[int, float]:
    """Return position and mean accuracy, x 100, of the best regularization: the first after rounding."""
    scores = [float(np.round(100 * np.mean(column), 2)) for column in accuracies.T]
    return int(np.argmax(scores)), max(scores)


def f1(predicted: Rows, labels: Rows) -> float:
    """Return F1 of class 1, x 100, with two decimals; 0 if class 1 is neither present nor predicted."""
    hits = int((predicted & labels).sum())
    return round(100 * (2 * hits / max(int((predicted + labels).sum()), 1)), 2)


# Tasks


def read_examples(*paths: Path, labels: Mapping[str, int], form: Form | None) -> list[Example]:
    """Return the examples of files, sorted by word counts and label: SentEval numbers and splits them so.

    Args:
        paths: The files of a split.
        labels: Classes by their name in the files.
        form: None: one file per class, in Latin-1, with a sentence on each line.
    """
    rows: list[tuple[str, tuple[str, ...]]] = []
    for path in paths:
        if form is None:  # 0x85 ends a line, too; empty lines are empty sentences
            lines = [part for line in read_lines(path, "latin-1") for part in f"{line}\n".splitlines()]
            rows += [(path.name, (single_spaced(line),)) for line in lines]
        else:
            expected = f"one of {', '.join(labels)} as label"
            rows += parse_rows(numbered_lines(path, form.encoding), form, labels.__contains__, expected, path)
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no sentences")
    examples = [Example(sentences, labels[label]) for label, sentences in rows]
    return sorted(examples, key=lambda example: (*(len(each.split()) for each in example.sentences), example.label))


def score_examples(
    encoder: Encoder,
    content: Mapping[str, list[Example]],
    settings: Settings,
    *,
    labels: Mapping[str, int],
    procedure: Callable[[Features, Recipe], Scores],
) -> Scores:
    """Return accuracies, x 100, rounded as SentEval rounds them.

    `devacc` chooses the regularization, `acc` is that of the test split, and `ntrain`, `ndev` and `ntest` count
    examples.
    """
    found = [example.label for example in content["train"]]
    fewest = min(labels.values(), key=found.count)
    if (count := found.count(fewest)) < FEWEST_PER_CLASS:
        counts = counted(count, "training example{s}")
        raise DataError(f"there are {counts} of class {fewest}; every class needs {FEWEST_PER_CLASS}")
    return procedure(encode_examples(encoder, content, len(labels)), SETTINGS[settings.mode])


def _task(
    name: str,
    splits: Mapping[str, tuple[str, ...]],
    labels: Mapping[str, int],
    form: Form | None,
    procedure: Callable[[Features, Recipe], Scores],
) -> Task:
    read = partial(read_examples, labels=labels, form=form)
    return Task(name, splits, read, partial(score_examples, labels=labels, procedure=procedure))


def _binary(name: str, positive: str, negative: str) -> Task:
    splits = {"train": (f"{name}/{positive}", f"{name}/{negative}")}
    return _task(name, splits, {positive: 1, negative: 0}, None, nested_cross_validation)


_SST2 = {split: (f"SST/binary/sentiment-{split}",) for split in ("train", "dev", "test")}
_TREC = {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)}
_MRPC = {split: (f"MRPC/msr_paraphrase_{split}.txt",) for split in ("train", "test")}

TRANSFER_TASKS = (
    _binary("MR", "rt-polarity.pos", "rt-polarity.neg"),
    _binary("CR", "custrev.pos", "custrev.neg"),
    _binary("SUBJ", "subj.objective", "subj.subjective"),
    _binary("MPQA", "mpqa.pos", "mpqa.neg"),
    _task("SST2", _SST2, BINARY, Form(label=1, sentences=(0,)), fixed_splits),
    # A line is LABEL:finer_label question.
    _task("TREC", _TREC, QUESTIONS, Form(0, (2,), encoding="latin-1", separators=": "), cross_validation),
    _task("MRPC", _MRPC, BINARY, Form(0, (3, 4), header=True), cross_validation),
)
