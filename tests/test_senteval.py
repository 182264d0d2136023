"""SentEval's tasks and its classifier, against PyTorch and scikit-learn."""

import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold
from test_sts import TableEncoder

from benchmarks import torch_senteval
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import EvaluationSettings, senteval
from diffcse_jax.evaluation.runner import TASKS
from diffcse_jax.evaluation.senteval import (
    ADAM,
    REGULARIZATIONS,
    RMSPROP,
    Example,
    Features,
    Fit,
    Recipe,
)

DIMENSION = 16
DEV = EvaluationSettings(mode="dev")
OPTIMIZERS = {"adam": ADAM, "rmsprop": RMSPROP}
# optimizer, batch size, tenacity, passes
QUICK, PATIENT = ("rmsprop", 32, 1, 1), ("adam", 32, 2, 3)


@pytest.fixture(autouse=True)
def _one_torch_thread():
    with torch_senteval.one_thread():
        yield


@pytest.fixture
def trained(monkeypatch):
    """Replaces the recipe of all modes; gives the reference's classifiers of two classes."""

    def trained(optimizer, *recipe, dimension=DIMENSION):
        ours = Recipe(OPTIMIZERS[optimizer], *recipe, folds=3)
        monkeypatch.setattr(senteval, "SETTINGS", dict.fromkeys(senteval.SETTINGS, ours))
        return lambda regularization: torch_senteval.Classifier(
            dimension, 2, regularization, optimizer, *recipe
        )

    return trained


def bag_of_words() -> TableEncoder:
    """Sums a vector for each word: noise, and a part that words with the same first letter share."""

    def noise(word):
        return (
            np.random.default_rng(zlib.crc32(word.encode()))
            .normal(size=DIMENSION)
            .astype(np.float32)
        )

    return TableEncoder(
        lambda text: sum(noise(word) + 2 * noise(word[:1]) for word in ["", *text.split()])
    )


def sentence(generator, label):
    """Words of all classes, more of the label's class."""
    words = [
        f"{generator.integers(0, 6)}{generator.integers(0, 9)}"
        for _ in range(generator.integers(0, 5))
    ]
    return " ".join(words + [f"{label}{generator.integers(0, 9)}" for _ in range(3)])


def write(folder, file, lines):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
    )
    return path


def vectors_and_labels(examples):
    """In SentEval's order, which is sorted by words and label."""
    examples = sorted(
        examples, key=lambda example: (*(len(text.split()) for text in example[0]), example[1])
    )
    first, *second = (
        bag_of_words().encode(column)
        for column in zip(*(texts for texts, _ in examples), strict=True)
    )
    vectors = np.c_[np.abs(first - second[0]), first * second[0]] if second else first
    return vectors, np.array([label for _, label in examples])


@pytest.mark.parametrize(
    ("recipe", "classes"), [(("adam", 64, 2, 2), 2), (("rmsprop", 7, 0, 1), 6)]
)
def test_every_fit_is_that_of_torch(recipe, classes, monkeypatch):
    monkeypatch.setattr(senteval, "FITS_AT_ONCE", 3)  # of 4: the last group is filled up
    rng = np.random.default_rng(0)
    labels, centers = rng.integers(0, classes, 261), 0.4 * rng.normal(size=(classes, 20))
    # overlapping clusters
    features = (centers[labels] + rng.normal(size=(261, 20))).astype(np.float32)
    order = rng.permutation(261)
    fits = [
        *(Fit(order[start:], order[:start]) for start in (40, 77)),
        Fit(order[:-40], order[-40:]),
    ]
    fits.append(senteval.hold_out(order[7:]))  # draws its dev rows
    settings = Recipe(OPTIMIZERS[recipe[0]], *recipe[1:])
    accuracies, ours = senteval.train_classifiers(
        Features(features, labels, classes, {}), fits, settings
    )
    for column, regularization in enumerate(REGULARIZATIONS):
        for row, fit in enumerate(fits):
            theirs = torch_senteval.Classifier(20, classes, regularization, *recipe)
            rows, dev = (
                (order[7:], None)
                if fit.permuted
                else (fit.train, (features[fit.dev], labels[fit.dev]))
            )
            assert accuracies[row, column] == theirs.fit(features[rows], labels[rows], dev=dev)
            weights = ours[row, column]
            np.testing.assert_allclose(
                weights[:, :-1], theirs.model[0].weight.detach(), rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(
                weights[:, -1], theirs.model[0].bias.detach(), rtol=1e-4, atol=1e-5
            )
            np.testing.assert_array_equal(
                senteval.predict(weights, features), theirs.predict(features)
            )


def test_nested_cross_validation_is_sentevals(trained, tmp_path):
    generator = np.random.default_rng(0)
    sentences = {
        label: [sentence(generator, label) for _ in range(rows)]
        for label, rows in ((1, 120), (0, 81))
    }
    write(tmp_path, "MR/rt-polarity.pos", sentences[1])
    write(tmp_path, "MR/rt-polarity.neg", sentences[0])
    x, y = vectors_and_labels(
        [((text,), label) for label, texts in sentences.items() for text in texts]
    )
    devacc, acc, *_ = torch_senteval.nested_cross_validation(x, y, 3, trained(*QUICK))
    assert 60 < acc < 99.5
    expected = {"acc": acc, "devacc": devacc, "ndev": 201, "ntest": 201}
    assert TASKS["MR"].run(bag_of_words(), tmp_path) == expected


def test_pairs_and_f1_are_sentevals(trained, tmp_path):
    generator = np.random.default_rng(2)
    splits = {}
    for split, rows in (("train", 180), ("test", 70)):
        splits[split] = []
        for label in generator.integers(0, 2, rows):
            first = sentence(generator, 0)
            second = first + f" {generator.integers(0, 6)}0" if label else sentence(generator, 0)
            splits[split].append(((first, second), label))
        lines = [
            "header",
            *(f"{label}\t-\t-\t{first}\t{second}" for (first, second), label in splits[split]),
        ]
        write(tmp_path, f"MRPC/msr_paraphrase_{split}.txt", lines)
    train, test = vectors_and_labels(splits["train"]), vectors_and_labels(splits["test"])
    devacc, acc, predicted = torch_senteval.cross_validation(
        *train, *test, 3, trained(*QUICK, dimension=2 * DIMENSION)
    )
    scores = TASKS["MRPC"].run(bag_of_words(), tmp_path)
    f1 = round(100 * float(f1_score(test[1], predicted)), 2)
    assert scores == {"acc": acc, "devacc": devacc, "f1": f1, "ndev": 180, "ntest": 70}
    assert f1 != acc
    assert TASKS["MRPC"].run(bag_of_words(), tmp_path, DEV) == {"devacc": devacc, "ndev": 180}


def test_fixed_splits_are_sentevals(trained, tmp_path):
    generator = np.random.default_rng(3)
    splits = {}
    for split, rows in (("train", 250), ("dev", 60), ("test", 90)):
        splits[split] = [
            ((sentence(generator, label),), label) for label in generator.integers(0, 2, rows)
        ]
        write(
            tmp_path,
            f"SST/binary/sentiment-{split}",
            [f"{text}\t{label}" for (text,), label in splits[split]],
        )
    train, dev, test = (vectors_and_labels(examples) for examples in splits.values())
    devacc, acc = torch_senteval.fixed_splits(*train, dev, test, trained(*PATIENT))
    scores = TASKS["SST2"].run(bag_of_words(), tmp_path)
    # and no F1
    assert scores == {"acc": acc, "devacc": devacc, "ntrain": 250, "ndev": 60, "ntest": 90}
    assert TASKS["SST2"].run(bag_of_words(), tmp_path, DEV) == {
        "devacc": devacc,
        "ntrain": 250,
        "ndev": 60,
    }


def test_too_few_examples_are_refused(tmp_path):
    for name, rows in (("pos", 20), ("neg", 19)):
        write(tmp_path, f"MR/rt-polarity.{name}", ["word"] * rows)
    with pytest.raises(
        DataError, match=r"rt-polarity\.neg: there are 19 training examples of class 0; every class"
    ):
        TASKS["MR"].run(bag_of_words(), tmp_path)


@given(st.lists(st.integers(0, 5), min_size=60, max_size=200), st.sampled_from([2, 5, 10]))
def test_folds_are_those_of_scikit_learn(labels, folds):
    # scikit-learn wants one class that fills all folds
    labels = np.array([*labels, *range(6)] + [0] * folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # others may be smaller
        expected = list(
            StratifiedKFold(folds, shuffle=True, random_state=1111).split(labels, labels)
        )
    rows = np.arange(len(labels)) * 2 + 1  # among other rows
    spread = np.repeat(labels, 2)
    for ours, theirs in zip(senteval.stratified_folds(rows, spread, folds), expected, strict=True):
        np.testing.assert_array_equal(ours[0], rows[theirs[0]])
        np.testing.assert_array_equal(ours[1], rows[theirs[1]])


def test_of_equal_regularizations_the_first_wins():
    # equal with two decimals
    accuracies = np.array([[0.4, 0.700003, 0.7, 0.6], [0.6, 0.700005, 0.7, 0.6]])
    assert senteval.best_regularization(accuracies) == (1, 70.0)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_f1_is_that_of_scikit_learn(pairs):
    predicted, labels = np.array(pairs).T
    expected = 100 * f1_score(labels, predicted, zero_division=0.0)
    assert senteval.f1(predicted, labels) == pytest.approx(expected, abs=0.00501)


def test_sentences_are_read_in_latin_1_and_in_sentevals_order(tmp_path):
    # 0xa0 is a space and 0x85 ends a line in Latin-1, as in SentEval; an empty line is an empty
    # sentence.
    write(tmp_path, "CR/custrev.pos", b"caf\xe9  is\xa0good \n\ntwo\x85lines\n")
    write(tmp_path, "CR/custrev.neg", b"d\ne e\n")
    examples = TASKS["CR"].load(tmp_path, "train")
    expected = [("", 1), ("d", 0), ("two", 1), ("lines", 1), ("e e", 0), ("caf\u00e9 is good", 1)]
    assert [(text, label) for (text,), label in examples] == expected
    content = b"NUM:dist How far is : it ?\nABBR:exp What  is caf\xe9 ?\n"
    examples = TASKS["TREC"].read(write(tmp_path, "data", content))
    assert examples == [Example(("What is caf\u00e9 ?",), 0), Example(("How far is : it ?",), 5)]


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("SST2", b"fine\t1\nwrong\t2\n", "line 2: expected one of 0, 1 as label, found '2'"),
        (
            "TREC",
            b"HUM:ind Who ?\nHUM:ind\n",
            "line 2: expected 3 columns separated by ':' and ' ', found 2 in 'HUM",
        ),
        ("MRPC", b"1\t2\t3\ta\tb\n0\t2\t3\tc\td\n", "line 1: expected a header, found data"),
        ("SST2", b"\xff\xfe\t1\n", "'utf-8' codec can't decode byte"),
        ("TREC", b"", "no sentences"),
    ],
)
def test_unreadable_files_are_named(task, content, message, tmp_path):
    with pytest.raises(DataError, match=rf"{tmp_path}/data.*{message}"):
        TASKS[task].read(write(tmp_path, "data", content))
