"""SentEval's trained tasks: the accuracy of a linear classifier on embeddings.

File formats, folds, choice of the regularization, rounding and random numbers are those of SentEval
(`tools/validation.py`), in the settings that SimCSE and DiffCSE report.

SentEval trains one PyTorch model after the other and sets all seeds to 1111 before each. Fits on
equally many rows therefore start from the same weights and see the same permutations, whatever the
rows and the L2 regularization. Here several classifiers train side by side in one compiled program,
each with all regularizations. Initial weights, batches, updates and early stopping are those of the
original (`tools/classifier.py` with `nhid` 0), up to rounding.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int, Int32

from diffcse_jax.errors import DataError, counted
from diffcse_jax.evaluation import Encoder, EvaluationSettings, Task, encode_groups
from diffcse_jax.evaluation.senteval_data import (
    LabelledColumns,
    numbered_lines,
    parse_rows,
    read_lines,
    single_spaced,
)

SEED = 1111
REGULARIZATIONS = (1e-5, 1e-4, 1e-3, 1e-2)
DEV_FRACTION = 0.05
LAST_PASS = 200  # no block starts after this many passes
FITS_AT_ONCE = 16  # with more, batches no longer fit into the caches of a CPU
NO_ROW = -1
# Every class must be in each of ten folds, and in each of ten folds within nine of them.
FEWEST_PER_CLASS = 20
BINARY = {"0": 0, "1": 1}
QUESTIONS = {"ABBR": 0, "DESC": 1, "ENTY": 2, "HUM": 3, "LOC": 4, "NUM": 5}

Scores = dict[str, Any]
RowNumbers = Int[np.ndarray, "..."]
Inputs = Float32[np.ndarray, "_ dim"]
Weights = Float32[np.ndarray, "classes dim_and_bias"]
Batches = Int32[Array | np.ndarray, "*fits batches batch_size"]
# The weights and the optimizer's state, of all fits or, under `jax.vmap`, of one.
_State = tuple[Any, optax.OptState]


class Recipe(NamedTuple):
    """How a classifier is trained."""

    optimizer: optax.GradientTransformation
    batch_size: int  # rows per update; the last batch of a pass may be smaller
    tenacity: int  # blocks without improvement that are allowed; the next one ends training
    # Passes over the training rows between two tests on the dev rows (SentEval's `epoch_size`).
    passes_per_block: int
    folds: int = 10  # of cross-validation


ADAM = optax.adam(1e-3)
RMSPROP = optax.rmsprop(1e-2, decay=0.99, eps=1e-8, eps_in_sqrt=False)  # as in PyTorch
THOROUGH = Recipe(ADAM, batch_size=64, tenacity=5, passes_per_block=4, folds=10)
FAST = Recipe(RMSPROP, batch_size=128, tenacity=3, passes_per_block=2, folds=5)
SETTINGS = {"test": THOROUGH, "fasttest": FAST, "dev": FAST}


class Example(NamedTuple):
    """One sentence, or two, and its class."""

    sentences: tuple[str, ...]
    label: int


class Features(NamedTuple):
    """A task as a classifier sees it: inputs, classes from 0, and the rows of each split."""

    inputs: Inputs
    labels: Int[np.ndarray, " rows"]
    classes: int
    splits: dict[str, RowNumbers]

    def test(self, weights: Weights, rows: RowNumbers | None, *, with_f1: bool = False) -> Scores:
        """Return a classifier's scores on these rows, x 100 with two decimals.

        If `rows` is None, there are no scores.
        """
        if rows is None:
            return {}
        predicted = predict(weights, self.inputs[rows])
        labels = self.labels[rows]
        scores = {"acc": round(100 * float(np.mean(predicted == labels)), 2), "ntest": len(rows)}
        return scores | ({"f1": f1(predicted, labels)} if with_f1 else {})


class Fit(NamedTuple):
    """The rows of one fit, to train on and for early stopping.

    Permutations refer to the order of `train`.
    """

    train: Int[np.ndarray, " train"]
    dev: Int[np.ndarray, " dev"]
    # The number of rows that were permuted and split into `train` and `dev`; 0 if these were given.
    permuted: int = 0


def encode_examples(
    encoder: Encoder, splits: Mapping[str, Sequence[Example]], classes: int
) -> Features:
    """Return embeddings of sentences.

    For pairs with embeddings u and v, these are |u - v| and u * v next to each other.
    """
    examples = [example for split in splits.values() for example in split]
    sides = [list(side) for side in zip(*(example.sentences for example in examples), strict=True)]
    u, *others = encode_groups(encoder, sides)
    inputs = np.concatenate([np.abs(u - others[0]), u * others[0]], axis=1) if others else u
    ends = np.cumsum([len(split) for split in splits.values()])
    rows = dict(zip(splits, np.split(np.arange(len(examples)), ends[:-1]), strict=True))
    return Features(inputs, np.array([example.label for example in examples]), classes, rows)


def nested_cross_validation(features: Features, recipe: Recipe) -> Scores:
    """Test each outer fold once; inner folds choose its regularization."""
    outer = stratified_folds(features.splits["train"], features.labels, recipe.folds)
    inner = [
        fit for fold in outer for fit in stratified_folds(fold.train, features.labels, recipe.folds)
    ]
    accuracies, weights = train_classifiers(
        features, [*inner, *(hold_out(fold.train) for fold in outer)], recipe
    )
    by_fold = accuracies[: len(inner)].reshape(len(outer), recipe.folds, -1)
    dev, test = [], []
    for of_fold, final, fold in zip(by_fold, weights[len(inner) :], outer, strict=True):
        best, score = best_regularization(of_fold)
        dev.append(score)
        test.append(features.test(final[best], fold.dev)["acc"])
    # NumPy rounds differently from Python.
    acc, devacc = (float(np.round(np.mean(scores), 2)) for scores in (test, dev))
    return {
        "acc": acc,
        "devacc": devacc,
        "ndev": len(features.labels),
        "ntest": len(features.labels),
    }


def cross_validation(features: Features, recipe: Recipe) -> Scores:
    """Choose the regularization by folds of the training split.

    A classifier is then fitted once more, and tested.
    """
    train = features.splits["train"]
    folds = stratified_folds(train, features.labels, recipe.folds)
    accuracies, weights = train_classifiers(features, [*folds, hold_out(train)], recipe)
    best, score = best_regularization(accuracies[:-1])
    with_f1 = features.classes == 2  # MRPC; SentEval has no F1 for other tasks
    tested = features.test(weights[-1, best], features.splits.get("test"), with_f1=with_f1)
    return {"devacc": score, "ndev": len(train)} | tested


def fixed_splits(features: Features, recipe: Recipe) -> Scores:
    """Choose the regularization by the dev split, and test that same classifier."""
    train, dev = features.splits["train"], features.splits["dev"]
    accuracies, weights = train_classifiers(features, [Fit(train, dev)], recipe)
    best, score = best_regularization(accuracies)
    tested = features.test(weights[0, best], features.splits.get("test"))
    return {"devacc": score, "ntrain": len(train), "ndev": len(dev)} | tested


def stratified_folds(
    rows: RowNumbers, labels: Int[np.ndarray, " examples"], folds: int
) -> list[Fit]:
    """Return a fit for each fold, whose dev rows are those of the fold. Rows keep their order.

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
    return [Fit(rows[fold_of != fold], rows[fold_of == fold]) for fold in range(folds)]


def best_regularization(
    accuracies: Float[np.ndarray, "folds regularizations"],
) -> tuple[int, float]:
    """Return the position of the best regularization, and its score, x 100.

    If rounded scores are equal, it is the first.
    """
    scores = [float(np.round(100 * np.mean(column), 2)) for column in accuracies.T]
    return int(np.argmax(scores)), max(scores)


def f1(predicted: RowNumbers, labels: RowNumbers) -> float:
    """Return F1 of class 1, x 100, with two decimals.

    If class 1 is neither present nor predicted, it is 0.
    """
    hits = int((predicted & labels).sum())
    return round(100 * (2 * hits / max(int((predicted + labels).sum()), 1)), 2)


def hold_out(rows: Int[np.ndarray, " rows"]) -> Fit:
    """Return a fit whose dev rows are a random 5 % of these rows."""
    permuted = rows[np.random.RandomState(SEED).permutation(len(rows))]
    dev = int(DEV_FRACTION * len(rows))
    return Fit(train=permuted[dev:], dev=permuted[:dev], permuted=len(rows))


def train_classifiers(
    features: Features, fits: Sequence[Fit], recipe: Recipe
) -> tuple[
    Float[np.ndarray, "fits regularizations"],
    Float32[np.ndarray, "fits regularizations classes dim_and_bias"],
]:
    """Train a classifier for each fit and each of `REGULARIZATIONS`.

    The fits refer to rows of `features`.

    Returns:
        The fraction of correct dev rows of the best snapshot of each classifier, and its weights.
    """
    data = jnp.asarray(with_bias(features.inputs)), jnp.asarray(features.labels, jnp.int32)
    dev_rows = _padded([fit.dev for fit in fits])
    initial = initial_weights(features.classes, features.inputs.shape[1])
    weights = np.broadcast_to(initial, (len(fits), len(REGULARIZATIONS), *initial.shape))
    state: _State = jax.tree.map(np.array, (weights, jax.vmap(recipe.optimizer.init)(weights)))
    best = np.full(weights.shape[:2], -1)
    best_weights = weights.copy()
    failures = np.zeros(weights.shape[:2], int)
    for batches in _blocks(fits, recipe):
        running = np.flatnonzero((failures <= recipe.tenacity).any(axis=1))
        if not running.size:
            break
        for start in range(0, len(running), FITS_AT_ONCE):
            # Repetition fills the last group, so that one compilation serves groups of one size.
            group = np.resize(running[start : start + FITS_AT_ONCE], min(len(fits), FITS_AT_ONCE))
            before = jax.tree.map(lambda part, group=group: part[group], state)
            of_group = batches[group], dev_rows[group]
            after, counts = _train_block(before, *data, *of_group, optimizer=recipe.optimizer)
            for part, new in zip(*map(jax.tree.leaves, (state, after)), strict=True):
                part[group] = new
            correct = np.asarray(counts)
            better = (correct > best[group]) & (failures[group] <= recipe.tenacity)
            best[group] = np.where(better, correct, best[group])
            best_weights[group] = np.where(better[:, :, None, None], after[0], best_weights[group])
            failures[group] += ~better
    return best / np.array([[len(fit.dev)] for fit in fits]), best_weights


def predict(weights: Weights, features: Inputs) -> Int[np.ndarray, " rows"]:
    """Return the most probable class of each row."""
    return (with_bias(features) @ weights.T).argmax(axis=1)


def initial_weights(classes: int, dim: int) -> Weights:
    """Return the weights of `torch.nn.Linear(dim, classes)` after `torch.manual_seed(1111)`."""
    bound = float(np.float32(dim**-0.5))
    words = np.random.RandomState(SEED).randint(2**32, size=classes * (dim + 1), dtype=np.uint32)
    uniform = (words & 0xFFFFFF) * 2.0**-24
    # PyTorch rounds once, after a fused multiply-add; float64 holds the product exactly.
    values = (uniform * (2 * bound) - bound).astype(np.float32)
    return np.column_stack([values[:-classes].reshape(classes, dim), values[-classes:]])


def with_bias(features: Inputs) -> Float32[np.ndarray, "_ dim_and_bias"]:
    """Append a column of ones, the input of the bias."""
    return np.pad(features, ((0, 0), (0, 1)), constant_values=1)


def _blocks(fits: Sequence[Fit], recipe: Recipe) -> Iterator[Batches]:
    generators = {(fit.permuted, len(fit.train)): np.random.RandomState(SEED) for fit in fits}
    for (permuted, _), generator in generators.items():
        generator.permutation(permuted)
    for _ in range(0, LAST_PASS + 1, recipe.passes_per_block):
        positions = {
            key: _positions(generator, key[1], recipe) for key, generator in generators.items()
        }
        # Position NO_ROW is the last one: it finds the NO_ROW that is appended.
        yield _padded(
            [np.append(fit.train, NO_ROW)[positions[fit.permuted, len(fit.train)]] for fit in fits]
        )


def _positions(
    generator: np.random.RandomState, rows: int, recipe: Recipe
) -> Int[np.ndarray, "batches batch_size"]:
    """Cut permutations of `range(rows)` into batches.

    `NO_ROW` fills the last batch of each pass.
    """
    batches_per_pass = -(-rows // recipe.batch_size)
    passes = np.full((recipe.passes_per_block, batches_per_pass * recipe.batch_size), NO_ROW)
    for order in passes:
        order[:rows] = generator.permutation(rows)
    return passes.reshape(-1, recipe.batch_size)


def _padded(arrays: Sequence[Int[np.ndarray, "..."]]) -> Int32[np.ndarray, "..."]:
    """Stack arrays that differ in length, with `NO_ROW` after the shorter ones."""
    stacked = np.full((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), NO_ROW, np.int32)
    for target, array in zip(stacked, arrays, strict=True):
        target[: len(array)] = array
    return stacked


@functools.partial(jax.jit, static_argnames="optimizer")
def _train_block(
    states: _State,
    features: Float32[Array, "rows dim_and_bias"],
    labels: Int32[Array, " rows"],
    batches: Batches,
    dev_rows: Int32[Array | np.ndarray, "group dev"],
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[_State, Int32[Array, "group regularizations"]]:
    """Train on these batches, then count the dev rows that are classified correctly."""
    most_batches = (jnp.asarray(batches)[:, :, 0] != NO_ROW).sum(axis=1).max()

    def train_fit(state: _State, batches: Array, dev_rows: Array) -> tuple[_State, Array]:
        def update(index: Array, state: _State) -> _State:
            (weights, opt_state) = state
            rows = batches[index]
            gradient = _gradient(weights, features[rows], labels[rows], rows != NO_ROW)
            updates, opt_state = optimizer.update(gradient, opt_state)
            updated = optax.apply_updates(weights, updates), opt_state
            # False after the last batch of a fit with fewer rows than others.
            has_batch = rows[0] != NO_ROW
            return jax.tree.map(lambda new, old: jnp.where(has_batch, new, old), updated, state)

        state = jax.lax.fori_loop(0, most_batches, update, state)
        predicted = _logits(state[0], features[dev_rows]).argmax(axis=2)
        correct = (predicted == labels[dev_rows][:, None]) & (dev_rows != NO_ROW)[:, None]
        return state, correct.sum(axis=0)

    return jax.vmap(train_fit)(states, jnp.asarray(batches), jnp.asarray(dev_rows))


def _gradient(weights: Array, features: Array, labels: Array, real: Array) -> Array:
    """Return the gradient of the loss: mean cross-entropy over real rows, and a penalty.

    The gradient of the penalty is regularization times weights.
    """
    errors = (
        jax.nn.softmax(_logits(weights, features))
        - jax.nn.one_hot(labels, weights.shape[1])[:, None]
    )
    weight = real.astype(jnp.float32) / jnp.maximum(real.sum(), 1).astype(jnp.float32)
    penalty = jnp.array(REGULARIZATIONS)[:, None, None] * weights
    return (
        jnp.einsum("brc,bd->rcd", errors * weight[:, None, None], features, precision="highest")
        + penalty
    )


def _logits(weights: Array | np.ndarray, features: Array) -> Array:
    return jnp.einsum("rcd,bd->brc", weights, features, precision="highest")


# Tasks


def read_examples(path: Path, columns: LabelledColumns) -> list[Example]:
    """Read a file whose rows name their class."""
    return _sorted(parse_rows(numbered_lines(path, columns.encoding), columns, path))


def read_two_classes(positive: Path, negative: Path) -> list[Example]:
    """Read a file for each of two classes, in Latin-1, with a sentence on each line."""
    examples: list[tuple[int, tuple[str, ...]]] = []
    for label, path in ((1, positive), (0, negative)):
        for line in read_lines(path, "latin-1"):
            parts = f"{line}\n".splitlines()  # 0x85 also ends a line; an empty line is a sentence
            examples += [(label, (single_spaced(part),)) for part in parts]
    return _sorted(examples)


def _sorted(rows: Sequence[tuple[int, tuple[str, ...]]]) -> list[Example]:
    """Sort examples by word counts and label: SentEval numbers and splits them so."""
    examples = (Example(sentences, label) for label, sentences in rows)
    return sorted(
        examples,
        key=lambda example: (*(len(each.split()) for each in example.sentences), example.label),
    )


def score_examples(
    encoder: Encoder,
    content: Mapping[str, list[Example]],
    settings: EvaluationSettings,
    *,
    classes: int,
    procedure: Callable[[Features, Recipe], Scores],
) -> Scores:
    """Return accuracies, x 100, rounded as SentEval rounds them.

    `devacc` chooses the regularization, `acc` is of the test split, and `ntrain`, `ndev` and
    `ntest` count examples.
    """
    labels = [example.label for example in content["train"]]
    fewest = min(range(classes), key=labels.count)
    if (count := labels.count(fewest)) < FEWEST_PER_CLASS:
        counts = counted(count, "training example{s}")
        raise DataError(
            f"there are {counts} of class {fewest}; every class needs {FEWEST_PER_CLASS}"
        )
    return procedure(encode_examples(encoder, content, classes), SETTINGS[settings.mode])


def _task(
    name: str,
    splits: Mapping[str, tuple[str, ...]],
    read: Callable[..., list[Example]],
    procedure: Callable[[Features, Recipe], Scores],
    classes: int = 2,
) -> Task:
    return Task(
        name, splits, read, functools.partial(score_examples, classes=classes, procedure=procedure)
    )


TWO_FILES = {
    "MR": ("rt-polarity.pos", "rt-polarity.neg"),
    "CR": ("custrev.pos", "custrev.neg"),
    "SUBJ": ("subj.objective", "subj.subjective"),
    "MPQA": ("mpqa.pos", "mpqa.neg"),
}
_SST2 = functools.partial(read_examples, columns=LabelledColumns(1, (0,), BINARY))
_TREC = functools.partial(
    read_examples, columns=LabelledColumns(0, (2,), QUESTIONS, "latin-1", separators=": ")
)
_MRPC = functools.partial(read_examples, columns=LabelledColumns(0, (3, 4), BINARY, header=True))

TRANSFER_TASKS = (
    *(
        _task(
            name,
            {"train": tuple(f"{name}/{file}" for file in files)},
            read_two_classes,
            nested_cross_validation,
        )
        for name, files in TWO_FILES.items()
    ),
    _task(
        "SST2",
        {split: (f"SST/binary/sentiment-{split}",) for split in ("train", "dev", "test")},
        _SST2,
        fixed_splits,
    ),
    _task(
        "TREC",
        {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)},
        _TREC,
        cross_validation,
        6,
    ),
    _task(
        "MRPC",
        {split: (f"MRPC/msr_paraphrase_{split}.txt",) for split in ("train", "test")},
        _MRPC,
        cross_validation,
    ),
)
