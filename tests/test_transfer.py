import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold

from benchmarks import torch_senteval
from diffcse_jax import SentenceEncoder
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import transfer
from diffcse_jax.evaluation.classifier import ADAM, RMSPROP, Recipe
from diffcse_jax.evaluation.transfer_data import Example

DIMENSION = 16
TORCH = {"quick": ("rmsprop", 32, 1, 1), "patient": ("adam", 32, 2, 3)}
SETTINGS = {
    "quick": transfer.Settings(folds=3, recipe=Recipe(RMSPROP, batch_size=32, tenacity=1, passes_per_block=1)),
    "patient": transfer.Settings(folds=3, recipe=Recipe(ADAM, batch_size=32, tenacity=2, passes_per_block=3)),
}


@pytest.fixture(autouse=True)
def _one_torch_thread():
    with torch_senteval.one_thread():
        yield


@pytest.fixture(params=["quick", "patient"])
def settings(request, monkeypatch):
    """Replaces folds and training of all modes; gives the reference's classifiers for classes and a dimension."""
    monkeypatch.setattr(transfer, "SETTINGS", dict.fromkeys(("test", "fasttest", "dev"), SETTINGS[request.param]))
    return lambda classes, dimension: (
        lambda regularization: torch_senteval.Classifier(dimension, classes, regularization, *TORCH[request.param])
    )


class BagOfWords:
    """Adds up a random vector for each word."""

    pooler = "avg"
    truncate_dim = None

    def encode(self, sentences, batch_size=64):
        return np.stack([sum((word_vector(word) for word in text.split()), word_vector("")) for text in sentences])


def word_vector(word):
    """Noise, but for what words with the same first letter have in common."""
    return noise(word) + 2 * noise(word[:1])


def noise(word):
    return np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIMENSION).astype(np.float32)


def sentence(generator, label):
    """Words of all classes, more of its own."""
    words = [f"{generator.integers(0, 6)}{generator.integers(0, 9)}" for _ in range(generator.integers(0, 5))]
    return " ".join(words + [f"{label}{generator.integers(0, 9)}" for _ in range(3)])


def write(folder, file, lines):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def vectors_and_labels(examples):
    """In SentEval's order, which is sorted by words and label."""
    examples = sorted(examples, key=lambda example: (*(len(text.split()) for text in example[0]), example[1]))
    first, *second = (BagOfWords().encode(column) for column in zip(*(texts for texts, _ in examples), strict=True))
    vectors = np.c_[np.abs(first - second[0]), first * second[0]] if second else first
    return vectors, np.array([label for _, label in examples])


def test_nested_cross_validation_is_sentevals(settings, tmp_path):
    generator = np.random.default_rng(0)
    sentences = {label: [sentence(generator, label) for _ in range(rows)] for label, rows in ((1, 120), (0, 81))}
    write(tmp_path, "MR/rt-polarity.pos", sentences[1])
    write(tmp_path, "MR/rt-polarity.neg", sentences[0])
    x, y = vectors_and_labels([((text,), label) for label, texts in sentences.items() for text in texts])
    devacc, acc, *_ = torch_senteval.nested_cross_validation(x, y, 3, settings(2, DIMENSION))
    assert 60 < acc < 99.5
    task = transfer.MR(tmp_path)
    expected = {"acc": acc, "devacc": devacc, "ndev": 201, "ntest": 201}
    assert task.run(BagOfWords(), "test") == expected
    assert task.run(BagOfWords(), "dev") == expected


def test_cross_validation_with_six_classes_is_sentevals(settings, tmp_path):
    generator = np.random.default_rng(1)
    names = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    splits = {}
    for split, file, rows in (("train", "train_5500", 205), ("test", "TREC_10", 70)):
        labels = generator.permutation(np.arange(rows) % 6)
        splits[split] = [((sentence(generator, label),), label) for label in labels]
        write(tmp_path, f"TREC/{file}.label", [f"{names[label]}:fine {text}" for (text,), label in splits[split]])
    train, test = vectors_and_labels(splits["train"]), vectors_and_labels(splits["test"])
    devacc, acc, _ = torch_senteval.cross_validation(*train, *test, 3, settings(6, DIMENSION))
    assert 30 < acc < 99.5
    task = transfer.TREC(tmp_path)
    assert task.run(BagOfWords(), "test") == {"acc": acc, "devacc": devacc, "ndev": 205, "ntest": 70}
    assert task.run(BagOfWords(), "dev") == {"devacc": devacc, "ndev": 205}


def test_pairs_and_f1_are_sentevals(settings, tmp_path):
    generator = np.random.default_rng(2)
    splits = {}
    for split, rows in (("train", 180), ("test", 70)):
        splits[split] = []
        for label in generator.integers(0, 2, rows):
            first = sentence(generator, 0)
            second = first + f" {generator.integers(0, 6)}0" if label else sentence(generator, 0)
            splits[split].append(((first, second), label))
        lines = ["header", *(f"{label}\t-\t-\t{first}\t{second}" for (first, second), label in splits[split])]
        write(tmp_path, f"MRPC/msr_paraphrase_{split}.txt", lines)
    train, test = vectors_and_labels(splits["train"]), vectors_and_labels(splits["test"])
    devacc, acc, predicted = torch_senteval.cross_validation(*train, *test, 3, settings(2, 2 * DIMENSION))
    scores = transfer.MRPC(tmp_path).run(BagOfWords(), "test")
    f1 = round(100 * float(f1_score(test[1], predicted)), 2)
    assert scores == {"acc": acc, "devacc": devacc, "f1": f1, "ndev": 180, "ntest": 70}
    assert f1 != acc


def test_fixed_splits_are_sentevals(settings, tmp_path):
    generator = np.random.default_rng(3)
    splits = {}
    for split, rows in (("train", 250), ("dev", 60), ("test", 90)):
        splits[split] = [((sentence(generator, label),), label) for label in generator.integers(0, 5, rows)]
        write(tmp_path, f"SST/fine/sentiment-{split}", [f"{label} {text}" for (text,), label in splits[split]])
    train, dev, test = (vectors_and_labels(examples) for examples in splits.values())
    devacc, acc = torch_senteval.fixed_splits(*train, dev, test, settings(5, DIMENSION))
    task = transfer.SST5(tmp_path)
    assert task.run(BagOfWords(), "fasttest") == {
        "acc": acc, "devacc": devacc, "ntrain": 250, "ndev": 60, "ntest": 90,
    }  # fmt: skip
    assert task.run(BagOfWords(), "dev") == {"devacc": devacc, "ntrain": 250, "ndev": 60}


@pytest.mark.parametrize(
    ("task", "dev", "test"),
    [
        (transfer.SUBJ, ["SUBJ/subj.objective", "SUBJ/subj.subjective"], []),
        (transfer.MPQA, ["MPQA/mpqa.pos", "MPQA/mpqa.neg"], []),
        (transfer.SST2, ["SST/binary/sentiment-train", "SST/binary/sentiment-dev"], ["SST/binary/sentiment-test"]),
        (transfer.SICKEntailment, ["SICK/SICK_train.txt", "SICK/SICK_trial.txt"], ["SICK/SICK_test_annotated.txt"]),
        (transfer.TREC, ["TREC/train_5500.label"], ["TREC/TREC_10.label"]),
    ],
)
def test_dev_reads_no_test_file(task, dev, test, tmp_path):
    assert task(tmp_path).files("dev") == [tmp_path / file for file in dev]
    assert task(tmp_path).files("test") == task(tmp_path).files("fasttest") == [tmp_path / file for file in dev + test]


def test_too_few_examples_are_refused(tmp_path):
    write(tmp_path, "MR/rt-polarity.pos", ["good"] * 20)
    write(tmp_path, "MR/rt-polarity.neg", ["bad"] * 19)
    with pytest.raises(DataError, match=r"rt-polarity\.neg: 19 examples of class 0; every class needs 20"):
        transfer.MR(tmp_path).run(BagOfWords(), "test")


@given(st.lists(st.integers(0, 5), min_size=60, max_size=200), st.sampled_from([2, 5, 10]))
def test_folds_are_those_of_scikit_learn(labels, folds):
    labels = np.array([*labels, *range(6)] + [0] * folds)  # scikit-learn wants one class that fills all folds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # others may be smaller
        expected = list(StratifiedKFold(folds, shuffle=True, random_state=1111).split(labels, labels))
    rows = np.arange(len(labels)) * 2 + 1  # among other rows
    spread = np.repeat(labels, 2)
    for ours, theirs in zip(transfer.stratified_folds(rows, spread, folds), expected, strict=True):
        np.testing.assert_array_equal(ours[0], rows[theirs[0]])
        np.testing.assert_array_equal(ours[1], rows[theirs[1]])


def test_the_first_of_equal_regularizations_wins():
    # Means 0.5, 0.700004, 0.70000 and 0.6: the second and third are equal with two decimals.
    accuracies = np.array([[0.4, 0.700003, 0.7, 0.6], [0.6, 0.700005, 0.7, 0.6]])
    assert transfer.best_regularization(accuracies) == (1, 70.0)
    assert transfer.best_regularization(accuracies[:, ::-1]) == (1, 70.0)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_f1_is_that_of_scikit_learn(pairs):
    predicted, labels = np.array(pairs).T
    if not predicted.any() and not labels.any():
        return
    assert transfer.f1(predicted, labels) == pytest.approx(100 * f1_score(labels, predicted), abs=0.00501)


def test_pairs_become_difference_and_product():
    splits = {"train": [Example(("a", "b"), 1)], "test": [Example(("c", "c"), 0), Example(("a", "c"), 0)]}
    features = transfer.embed(BagOfWords(), splits, classes=2)
    a, b, c = (word_vector("") + word_vector(word) for word in "abc")
    np.testing.assert_allclose(features.vectors[0], [*np.abs(a - b), *(a * b)], rtol=1e-6)
    np.testing.assert_allclose(features.vectors[1], [*np.zeros(DIMENSION), *(c * c)], rtol=1e-6)
    assert features.labels.tolist() == [1, 0, 0]
    assert {split: rows.tolist() for split, rows in features.splits.items()} == {"train": [0], "test": [1, 2]}


@pytest.mark.slow
def test_minilm_on_trec_agrees_with_torch(data_dir):
    task = transfer.TREC(data_dir / "senteval")
    splits = {split: task.load(split) for split in task.splits}
    features = transfer.embed(SentenceEncoder.from_pretrained("minilm"), splits, task.classes)
    train, test = (
        (features.vectors[features.splits[split]], features.labels[features.splits[split]]) for split in splits
    )
    devacc, acc, _ = torch_senteval.cross_validation(
        *train,
        *test,
        5,
        lambda regularization: torch_senteval.Classifier(384, 6, regularization, "rmsprop", 128, 3, 2),
    )
    ours = task.score(features, transfer.SETTINGS["fasttest"])
    assert ours["acc"] == pytest.approx(acc, abs=0.41)  # two of 500 questions
    assert ours["devacc"] == pytest.approx(devacc, abs=0.05)


def test_f1_without_any_example_of_the_class_is_0():
    assert transfer.f1(np.array([0, 0]), np.array([0, 0])) == 0
    assert transfer.f1(np.array([0, 1]), np.array([0, 1])) == 100
