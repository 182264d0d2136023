"""SentEval's transfer tasks: how well a linear classifier does on frozen sentence vectors.

Folds, choice of the regularization, rounding and random numbers are those of SentEval (`tools/validation.py`), in the
settings that SimCSE and DiffCSE report.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import transfer_data
from diffcse_jax.evaluation.classifier import (
    ADAM,
    RMSPROP,
    SEED,
    Classifiers,
    Fit,
    Recipe,
    hold_out,
    predict,
    train_classifiers,
)
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.transfer_data import Example, in_order, read_class

Scores = dict[str, Any]
Rows = Int[np.ndarray, "..."]
Labels = Int[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an evaluation mode: folds of cross-validation, and the recipe of classifiers."""

    folds: int
    recipe: Recipe


THOROUGH = Settings(folds=10, recipe=Recipe(ADAM, batch_size=64, tenacity=5, passes_per_block=4))
FAST = Settings(folds=5, recipe=Recipe(RMSPROP, batch_size=128, tenacity=3, passes_per_block=2))
SETTINGS = {"test": THOROUGH, "fasttest": FAST, "dev": FAST}

FEWEST_PER_CLASS = 20  # So that no fold of ten, nor one of ten within nine of them, lacks a class.


@dataclasses.dataclass(frozen=True)
class Features:
    """All examples of a task as a classifier sees them.

    Attributes:
        vectors: one per example.
        labels: class numbers from 0.
        classes: number of classes.
        splits: the rows of each split.
    """

    vectors: Float32[np.ndarray, "rows dimension"]
    labels: Int[np.ndarray, " rows"]
    classes: int
    splits: dict[str, Int[np.ndarray, "..."]]

    def train(self, fits: Sequence[Fit], recipe: Recipe) -> Classifiers:
        """The classifiers of these fits."""
        return train_classifiers(self.vectors, self.labels, self.classes, fits, recipe)

    def predict(self, weights: Float32[np.ndarray, "classes dimension_and_bias"], rows: Rows) -> Labels:
        """The classes that a classifier gives to these rows."""
        return predict(weights, self.vectors[rows])


@dataclasses.dataclass(frozen=True)
class TransferTask(abc.ABC):
    """One data set and the way it is scored.

    Attributes:
        folder: SentEval's `downstream` folder.
    """

    folder: Path

    modes: ClassVar = tuple(SETTINGS)
    name: ClassVar[str]
    classes: ClassVar[int]
    splits: ClassVar[dict[str, tuple[str, ...]]]  # split to files below the folder
    read: ClassVar["staticmethod[[Path], list[Example]]"]  # of a file that is a split; others have a `load`

    def files(self, mode: str) -> list[Path]:
        """The files that `run` reads in this mode."""
        return [path for split in self._splits_of_mode(mode) for path in self._paths(split)]

    def load(self, split: str) -> list[Example]:
        """The examples of a split, in the order in which SentEval numbers them.

        Raises:
            DataError: a file or row that cannot be read, with its file and line.
        """
        (path,) = self._paths(split)
        return in_order(self.read(path))

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> Scores:
        """Accuracies x 100, rounded as SentEval rounds them.

        Returns:
            `devacc`, of `ndev` examples, and `acc`, of `ntest`; with a dev split also `ntrain`. A task with
            a test split has no `acc` in mode `dev`.

        Raises:
            DataError: a file that cannot be read, or too few examples.
        """
        splits = {split: self.load(split) for split in self._splits_of_mode(mode)}
        self._check(splits["train"])
        return self.score(embed(encoder, splits, self.classes, batch_size), SETTINGS[mode])

    @abc.abstractmethod
    def score(self, features: Features, settings: Settings) -> Scores:
        """The scores that `run` returns, from vectors."""

    def test_scores(self, features: Features, weights: Float32[np.ndarray, "classes dimension_and_bias"]) -> Scores:
        """Scores of a classifier on the test split, if the mode has one."""
        if "test" not in features.splits:
            return {}
        rows = features.splits["test"]
        return {"acc": accuracy(features.predict(weights, rows), features.labels[rows]), "ntest": len(rows)}

    def _splits_of_mode(self, mode: str) -> list[str]:
        return [split for split in self.splits if mode != "dev" or split != "test"]

    def _paths(self, split: str) -> list[Path]:
        return [self.folder / file for file in self.splits[split]]

    def _check(self, train: list[Example]) -> None:
        labels = [example.label for example in train]
        fewest = min(range(self.classes), key=labels.count)
        if labels.count(fewest) < FEWEST_PER_CLASS:
            raise DataError(
                f"{', '.join(map(str, self._paths('train')))}: {labels.count(fewest)} examples of class {fewest}; "
                f"every class needs {FEWEST_PER_CLASS}"
            )


class NestedCrossValidation(TransferTask):
    """One set of examples: each outer fold is tested once, inner folds choose its regularization."""

    def score(self, features: Features, settings: Settings) -> Scores:
        outer = stratified_folds(features.splits["train"], features.labels, settings.folds)
        inner = [Fit(*fold) for train, _ in outer for fold in stratified_folds(train, features.labels, settings.folds)]
        classifiers = features.train([*inner, *(hold_out(train) for train, _ in outer)], settings.recipe)
        inner_accuracies = classifiers.dev_accuracy[: len(inner)].reshape(len(outer), settings.folds, -1)
        dev, test = [], []
        for accuracies, final, (_, rows) in zip(
            inner_accuracies, classifiers.weights[len(inner) :], outer, strict=True
        ):
            best, score = best_regularization(accuracies)
            dev.append(score)
            test.append(accuracy(features.predict(final[best], rows), features.labels[rows]))
        count = len(features.labels)
        return {"acc": rounded_mean(test), "devacc": rounded_mean(dev), "ndev": count, "ntest": count}


class CrossValidation(TransferTask):
    """Folds of the training split choose the regularization; one more fit is tested."""

    def score(self, features: Features, settings: Settings) -> Scores:
        train = features.splits["train"]
        folds = [Fit(*fold) for fold in stratified_folds(train, features.labels, settings.folds)]
        classifiers = features.train([*folds, hold_out(train)], settings.recipe)
        best, score = best_regularization(classifiers.dev_accuracy[:-1])
        return {"devacc": score, "ndev": len(train)} | self.test_scores(features, classifiers.weights[-1, best])


class FixedSplits(TransferTask):
    """The dev split chooses the regularization; that very fit is tested."""

    def score(self, features: Features, settings: Settings) -> Scores:
        train, dev = features.splits["train"], features.splits["dev"]
        classifiers = features.train([Fit(train, dev)], settings.recipe)
        best, score = best_regularization(classifiers.dev_accuracy)
        counts = {"ntrain": len(train), "ndev": len(dev)}
        return {"devacc": score} | counts | self.test_scores(features, classifiers.weights[0, best])


class Binary(NestedCrossValidation):
    """Two files, one for each class: first the one of label 1."""

    classes = 2

    def load(self, split: str) -> list[Example]:
        positive, negative = self._paths(split)
        return in_order([*read_class(positive, 1), *read_class(negative, 0)])


class MR(Binary):
    name = "MR"
    splits: ClassVar = {"train": ("MR/rt-polarity.pos", "MR/rt-polarity.neg")}


class CR(Binary):
    name = "CR"
    splits: ClassVar = {"train": ("CR/custrev.pos", "CR/custrev.neg")}


class SUBJ(Binary):
    name = "SUBJ"
    splits: ClassVar = {"train": ("SUBJ/subj.objective", "SUBJ/subj.subjective")}


class MPQA(Binary):
    name = "MPQA"
    splits: ClassVar = {"train": ("MPQA/mpqa.pos", "MPQA/mpqa.neg")}


class SST2(FixedSplits):
    name = "SST2"
    classes = 2
    splits: ClassVar = {split: (f"SST/binary/sentiment-{split}",) for split in ("train", "dev", "test")}
    read = staticmethod(transfer_data.read_sst)


class SST5(FixedSplits):
    name = "SST5"
    classes = 5
    splits: ClassVar = {split: (f"SST/fine/sentiment-{split}",) for split in ("train", "dev", "test")}
    read = staticmethod(transfer_data.read_sst_fine)


class TREC(CrossValidation):
    name = "TREC"
    classes = 6
    splits: ClassVar = {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)}
    read = staticmethod(transfer_data.read_trec)


class MRPC(CrossValidation):
    name = "MRPC"
    classes = 2
    splits: ClassVar = {split: (f"MRPC/msr_paraphrase_{split}.txt",) for split in ("train", "test")}
    read = staticmethod(transfer_data.read_mrpc)

    def test_scores(self, features: Features, weights: Float32[np.ndarray, "classes dimension_and_bias"]) -> Scores:
        """Accuracy, and F1 of the class of paraphrases."""
        scores = super().test_scores(features, weights)
        if scores:
            rows = features.splits["test"]
            scores["f1"] = f1(features.predict(weights, rows), features.labels[rows])
        return scores


class SICKEntailment(FixedSplits):
    name = "SICKEntailment"
    classes = 3
    splits: ClassVar = {
        "train": ("SICK/SICK_train.txt",),
        "dev": ("SICK/SICK_trial.txt",),
        "test": ("SICK/SICK_test_annotated.txt",),
    }
    read = staticmethod(transfer_data.read_sick_entailment)


def embed(encoder: Encoder, splits: Mapping[str, Sequence[Example]], classes: int, batch_size: int = 64) -> Features:
    """Vectors of sentences; for pairs u, v of sentences |u - v| and u * v, side by side."""
    examples = [example for split in splits.values() for example in split]
    columns = list(zip(*(example.sentences for example in examples), strict=True))
    vectors = encoder.encode([sentence for column in columns for sentence in column], batch_size=batch_size)
    if len(columns) == 2:
        u, v = np.split(vectors, 2)
        vectors = np.concatenate([np.abs(u - v), u * v], axis=1)
    ends = np.cumsum([len(split) for split in splits.values()])
    rows = dict(zip(splits, np.split(np.arange(len(examples)), ends[:-1]), strict=True))
    return Features(vectors, np.array([example.label for example in examples]), classes, rows)


def stratified_folds(rows: Rows, labels: Int[np.ndarray, " examples"], folds: int) -> list[tuple[Rows, Rows]]:
    """The rows of each fold's training part and of its held-out part, both in their given order.

    These are the folds of scikit-learn's `StratifiedKFold(folds, shuffle=True, random_state=1111)`.
    """
    _, first, classes = np.unique(labels[rows], return_index=True, return_inverse=True)
    classes = first.argsort().argsort()[classes]  # numbered by first appearance
    dealt = np.sort(classes)
    fold_of = np.empty(len(rows), int)
    generator = np.random.RandomState(SEED)
    for label in range(len(first)):
        shares = [int((dealt[fold::folds] == label).sum()) for fold in range(folds)]
        order = np.repeat(np.arange(folds), shares)
        generator.shuffle(order)
        fold_of[classes == label] = order
    return [(rows[fold_of != fold], rows[fold_of == fold]) for fold in range(folds)]


def best_regularization(accuracies: Float[np.ndarray, "folds regularizations"]) -> tuple[int, float]:
    """Position and mean accuracy, x 100, of the best one; the first of those that are equal after rounding."""
    scores = [float(np.round(100 * np.mean(column), 2)) for column in accuracies.T]
    return int(np.argmax(scores)), max(scores)


def rounded_mean(scores: Sequence[float]) -> float:
    """Mean with two decimals, rounded as NumPy rounds and not as Python does."""
    return float(np.round(np.mean(scores), 2))


def accuracy(predicted: Labels, labels: Labels) -> float:
    """Share of correct labels, x 100, with two decimals."""
    return round(100 * float(np.mean(predicted == labels)), 2)


def f1(predicted: Labels, labels: Labels) -> float:
    """F1 of class 1, x 100, with two decimals; 0 where nothing is of this class and nothing is taken for it."""
    hits = int((predicted & labels).sum())
    return round(100 * (2 * hits / max(int((predicted + labels).sum()), 1)), 2)
