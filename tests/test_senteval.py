import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold

from benchmarks import torch_senteval
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import Settings, senteval
from diffcse_jax.evaluation.runner import TASKS
from diffcse_jax.evaluation.senteval import ADAM, RMSPROP, Example, Recipe
from diffcse_jax.models.sentence_folder import NO_PROMPTS

DIMENSION = 16
DEV = Settings(mode="dev")
TORCH = {"quick": ("rmsprop", 32, 1, 1), "patient": ("adam", 32, 2, 3)}
RECIPES = {
    "quick": Recipe(RMSPROP, batch_size=32, tenacity=1, passes_per_block=1, folds=3),
    "patient": Recipe(ADAM, batch_size=32, tenacity=2, passes_per_block=3, folds=3),
}


@pytest.fixture(autouse=True)
def _one_torch_thread():
    with torch_senteval.one_thread():
        yield


@pytest.fixture
def trained(monkeypatch):
    """Replaces the recipe of all modes; gives the reference's classifiers for classes and a dimension."""

    def trained(name, classes, dimension):
        monkeypatch.setattr(senteval, "SETTINGS", dict.fromkeys(("test", "fasttest", "dev"), RECIPES[name]))
        return lambda regularization: torch_senteval.Classifier(dimension, classes, regularization, *TORCH[name])

    return trained


class BagOfWords:
    """Sums a random vector for each word."""

    pooler = "avg"
    truncate_dim = None
    prompts = NO_PROMPTS

    def encode(self, sentences, batch_size=64, *, prompt=None):
        return np.stack([sum((word_vector(word) for word in text.split()), word_vector("")) for text in sentences])


def word_vector(word):
    """Noise, and a part that words with the same first letter share."""
    return noise(word) + 2 * noise(word[:1])


def noise(word):
    return np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIMENSION).astype(np.float32)


def sentence(generator, label):
    """Words of all classes, more of the label's class."""
    words = [f"{generator.integers(0, 6)}{generator.integers(0, 9)}" for _ in range(generator.integers(0, 5))]
    return " ".join(words + [f"{label}{generator.integers(0, 9)}" for _ in range(3)])


def write(folder, file, lines):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode())
    return path


def vectors_and_labels(examples):
    """In SentEval's order, which is sorted by words and label."""
    examples = sorted(examples, key=lambda example: (*(len(text.split()) for text in example[0]), example[1]))
    first, *second = (BagOfWords().encode(column) for column in zip(*(texts for texts, _ in examples), strict=True))
    vectors = np.c_[np.abs(first - second[0]), first * second[0]] if second else first
    return vectors, np.array([label for _, label in examples])


def test_nested_cross_validation_is_sentevals(trained, tmp_path):
    generator = np.random.default_rng(0)
    sentences = {label: [sentence(generator, label) for _ in range(rows)] for label, rows in ((1, 120), (0, 81))}
    write(tmp_path, "MR/rt-polarity.pos", sentences[1])
    write(tmp_path, "MR/rt-polarity.neg", sentences[0])
    x, y = vectors_and_labels([((text,), label) for label, texts in sentences.items() for text in texts])
    devacc, acc, *_ = torch_senteval.nested_cross_validation(x, y, 3, trained("quick", 2, DIMENSION))
    assert 60 < acc < 99.5
    expected = {"acc": acc, "devacc": devacc, "ndev": 201, "ntest": 201}
    assert TASKS["MR"].run(BagOfWords(), tmp_path) == expected
    assert TASKS["MR"].run(BagOfWords(), tmp_path, DEV) == expected


def test_pairs_and_f1_are_sentevals(trained, tmp_path):
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
    devacc, acc, predicted = torch_senteval.cross_validation(*train, *test, 3, trained("quick", 2, 2 * DIMENSION))
    scores = TASKS["MRPC"].run(BagOfWords(), tmp_path)
    f1 = round(100 * float(f1_score(test[1], predicted)), 2)
    assert scores == {"acc": acc, "devacc": devacc, "f1": f1, "ndev": 180, "ntest": 70}
    assert f1 != acc
    assert TASKS["MRPC"].run(BagOfWords(), tmp_path, DEV) == {"devacc": devacc, "ndev": 180}


def test_fixed_splits_are_sentevals(trained, tmp_path):
    generator = np.random.default_rng(3)
    splits = {}
    for split, rows in (("train", 250), ("dev", 60), ("test", 90)):
        splits[split] = [((sentence(generator, label),), label) for label in generator.integers(0, 2, rows)]
        write(tmp_path, f"SST/binary/sentiment-{split}", [f"{text}\t{label}" for (text,), label in splits[split]])
    train, dev, test = (vectors_and_labels(examples) for examples in splits.values())
    devacc, acc = torch_senteval.fixed_splits(*train, dev, test, trained("patient", 2, DIMENSION))
    scores = TASKS["SST2"].run(BagOfWords(), tmp_path)
    assert scores == {"acc": acc, "devacc": devacc, "ntrain": 250, "ndev": 60, "ntest": 90}  # and no F1
    assert TASKS["SST2"].run(BagOfWords(), tmp_path, DEV) == {"devacc": devacc, "ntrain": 250, "ndev": 60}


@pytest.mark.parametrize(
    ("task", "dev", "test"),
    [
        ("SUBJ", ["SUBJ/subj.objective", "SUBJ/subj.subjective"], []),
        ("STSBenchmark", ["STS/STSBenchmark/sts-dev.csv"], ["STS/STSBenchmark/sts-test.csv"]),
    ],
)
def test_dev_reads_no_test_file(task, dev, test, tmp_path):
    files = {mode: TASKS[task].missing(tmp_path, mode) for mode in ("dev", "test")}
    assert files == {"dev": [tmp_path / file for file in dev], "test": [tmp_path / file for file in dev + test]}


def test_too_few_examples_are_refused(tmp_path):
    write(tmp_path, "MR/rt-polarity.pos", ["good"] * 20)
    write(tmp_path, "MR/rt-polarity.neg", ["bad"] * 19)
    with pytest.raises(DataError, match=r"rt-polarity\.neg: there are 19 training examples of class 0; every class"):
        TASKS["MR"].run(BagOfWords(), tmp_path)


@given(st.lists(st.integers(0, 5), min_size=60, max_size=200), st.sampled_from([2, 5, 10]))
def test_folds_are_those_of_scikit_learn(labels, folds):
    labels = np.array([*labels, *range(6)] + [0] * folds)  # scikit-learn wants one class that fills all folds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # others may be smaller
        expected = list(StratifiedKFold(folds, shuffle=True, random_state=1111).split(labels, labels))
    rows = np.arange(len(labels)) * 2 + 1  # among other rows
    spread = np.repeat(labels, 2)
    for ours, theirs in zip(senteval.stratified_folds(rows, spread, folds), expected, strict=True):
        np.testing.assert_array_equal(ours[0], rows[theirs[0]])
        np.testing.assert_array_equal(ours[1], rows[theirs[1]])


def test_of_equal_regularizations_the_first_wins():
    accuracies = np.array([[0.4, 0.700003, 0.7, 0.6], [0.6, 0.700005, 0.7, 0.6]])  # equal with two decimals
    assert senteval.best_regularization(accuracies) == (1, 70.0)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_f1_is_that_of_scikit_learn(pairs):
    predicted, labels = np.array(pairs).T
    expected = 100 * f1_score(labels, predicted, zero_division=0.0)
    assert senteval.f1(predicted, labels) == pytest.approx(expected, abs=0.00501)


def test_binary_tasks_read_latin_1_with_one_sentence_a_line_in_sentevals_order(tmp_path):
    # 0xa0 is a space and 0x85 ends a line in Latin-1, as in SentEval; an empty line is an empty sentence.
    write(tmp_path, "CR/custrev.pos", b"caf\xe9  is\xa0good \n\ntwo\x85lines\n")
    write(tmp_path, "CR/custrev.neg", b"d\ne e\n")
    examples = TASKS["CR"].load(tmp_path, "train")
    expected = [("", 1), ("d", 0), ("two", 1), ("lines", 1), ("e e", 0), ("caf\u00e9 is good", 1)]
    assert [(text, label) for (text,), label in examples] == expected


def test_questions_are_read_in_latin_1(tmp_path):
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
            "line 2: expected 3 columns separated by ':' and ' ', found 2 in 'HUM:ind'",
        ),
        ("MRPC", b"1\t2\t3\ta\tb\n0\t2\t3\tc\td\n", "line 1: expected a header, found data"),
        ("SST2", b"\xff\xfe\t1\n", "cannot read"),
        ("TREC", b"", "no sentences"),
    ],
)
def test_unreadable_files_are_named(task, content, message, tmp_path):
    path = write(tmp_path, "custrev.pos", content)
    with pytest.raises(DataError, match=message) as error:
        TASKS[task].read(path)
    assert str(path) in str(error.value)
