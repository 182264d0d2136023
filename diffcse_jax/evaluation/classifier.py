"""SentEval's classifier: logistic regression with early stopping, for all fits of a task in one compiled program.

SentEval trains one PyTorch model after the other and sets all seeds to 1111 before each. Fits on equally many rows
therefore start from the same weights and see the same permutations, whatever the rows and the L2 regularization. Here
several fits train side by side, each with all regularizations. Initial weights, batches, updates and early stopping are
those of the original (`tools/classifier.py` with `nhid` 0); only the order of float32 sums differs.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

SEED = 1111
REGULARIZATIONS = (1e-5, 1e-4, 1e-3, 1e-2)
DEV_FRACTION = 0.05
LAST_PASS = 200  # no block starts after this many passes
FITS_AT_ONCE = 16  # with more, batches no longer fit into the caches of a CPU
NO_ROW = -1

Weights = Float32[Array | np.ndarray, "fits regularizations classes dim_and_bias"]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam as PyTorch computes it. RMSprop is the case without momentum and bias correction."""

    learning_rate: float
    mean_decay: float
    square_decay: float
    bias_correction: bool
    epsilon: float = 1e-8


ADAM = Optimizer(learning_rate=1e-3, mean_decay=0.9, square_decay=0.999, bias_correction=True)
RMSPROP = Optimizer(learning_rate=1e-2, mean_decay=0.0, square_decay=0.99, bias_correction=False)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a classifier is trained.

    Attributes:
        optimizer: The update rule.
        batch_size: Rows per update. The last batch of a pass may be smaller.
        tenacity: Blocks without improvement that are forgiven. The next one ends training.
        passes_per_block: Passes over the training rows between two tests on the dev rows (SentEval's `epoch_size`).
    """

    optimizer: Optimizer
    batch_size: int
    tenacity: int
    passes_per_block: int


@dataclasses.dataclass(frozen=True)
class Fit:
    """The rows of one fit. Permutations refer to the order of `train`.

    Attributes:
        train: Rows to train on.
        dev: Rows for early stopping.
        permuted: Number of rows that a permutation split into `train` and `dev`; 0 if the split was given.
    """

    train: Int[np.ndarray, " train"]
    dev: Int[np.ndarray, " dev"]
    permuted: int = 0


@dataclasses.dataclass(frozen=True)
class Classifiers:
    """The best snapshot of each fit and regularization.

    Attributes:
        dev_accuracy: Fraction of correct dev rows.
        weights: Coefficients, the bias last.
    """

    dev_accuracy: Float[np.ndarray, "fits regularizations"]
    weights: Float32[np.ndarray, "fits regularizations classes dim_and_bias"]


class _State(NamedTuple):
    weights: Weights
    mean: Weights
    square: Weights
    updates: Int32[Array | np.ndarray, " fits"]


def hold_out(rows: Int[np.ndarray, " rows"]) -> Fit:
    """Return a fit whose dev rows are a random 5 % of these rows."""
    permuted = rows[np.random.RandomState(SEED).permutation(len(rows))]
    dev = int(DEV_FRACTION * len(rows))
    return Fit(train=permuted[dev:], dev=permuted[:dev], permuted=len(rows))


def train_classifiers(
    features: Float32[np.ndarray, "rows dimension"],
    labels: Int[np.ndarray, " rows"],
    classes: int,
    fits: Sequence[Fit],
    recipe: Recipe,
) -> Classifiers:
    """Train a classifier for each fit and each of `REGULARIZATIONS`.

    Args:
        features: Inputs of all rows that the fits refer to.
        labels: Classes, from 0.
        classes: Number of classes.
        fits: Which rows to use.
        recipe: How to train.
    """
    data = jnp.asarray(with_bias(features)), jnp.asarray(labels, jnp.int32)
    state = _initial_state(len(fits), classes, features.shape[1])
    stopping = _EarlyStopping(state.weights, recipe.tenacity)
    dev_rows = _padded([fit.dev for fit in fits])
    for batches in _blocks(fits, recipe):
        running = stopping.running()
        if not running.size:
            break
        for group in _groups(running, len(fits)):
            before = _State(*(part[group] for part in state))
            after, correct = _train_block(before, *data, batches[group], dev_rows[group], recipe.optimizer)
            for part, new in zip(state, after, strict=True):
                part[group] = new
            stopping.update(group, np.asarray(correct), np.asarray(after.weights))
    dev_sizes = np.array([[len(fit.dev)] for fit in fits])
    return Classifiers(stopping.correct / dev_sizes, stopping.weights)


def predict(
    weights: Float32[np.ndarray, "classes dim_and_bias"], features: Float32[np.ndarray, "rows dimension"]
) -> Int[np.ndarray, " rows"]:
    """Return the most probable class of each row."""
    return (with_bias(features) @ weights.T).argmax(axis=1)


def initial_weights(classes: int, dimension: int) -> Float32[np.ndarray, "classes dim_and_bias"]:
    """Return the weights of `torch.nn.Linear(dimension, classes)` after `torch.manual_seed(1111)`, bit for bit."""
    bound = float(np.float32(dimension**-0.5))
    words = np.random.RandomState(SEED).randint(2**32, size=classes * (dimension + 1), dtype=np.uint32)
    uniform = (words & 0xFFFFFF) * 2.0**-24
    # PyTorch rounds once, after a fused multiply-add; float64 holds the product exactly.
    values = (uniform * (2 * bound) - bound).astype(np.float32)
    return np.column_stack([values[:-classes].reshape(classes, dimension), values[-classes:]])


class _EarlyStopping:
    """Keeps the best weights of each fit and regularization, and counts the tests that found no better ones."""

    def __init__(self, weights: Weights, tenacity: int):
        self.weights = np.array(weights)
        self.tenacity = tenacity
        self.correct = np.full(weights.shape[:2], -1)
        self.failures = np.zeros(weights.shape[:2], int)

    def running(self) -> Int[np.ndarray, " running"]:
        return np.flatnonzero((self.failures <= self.tenacity).any(axis=1))

    def update(self, group: Int[np.ndarray, " group"], correct: Int[np.ndarray, "group r"], weights: Weights) -> None:
        """Record weights that classify more dev rows correctly than before, unless training has stopped."""
        better = (correct > self.correct[group]) & (self.failures[group] <= self.tenacity)
        self.correct[group] = np.where(better, correct, self.correct[group])
        self.weights[group] = np.where(better[:, :, None, None], weights, self.weights[group])
        self.failures[group] += ~better


def _initial_state(fits: int, classes: int, dimension: int) -> _State:
    shape = (fits, len(REGULARIZATIONS), classes, dimension + 1)
    weights = np.broadcast_to(initial_weights(classes, dimension), shape).copy()
    return _State(weights, np.zeros_like(weights), np.zeros_like(weights), np.zeros(fits, np.int32))


def _blocks(fits: Sequence[Fit], recipe: Recipe) -> Iterator[Int32[np.ndarray, "fits batches batch_size"]]:
    generators = {(fit.permuted, len(fit.train)): np.random.RandomState(SEED) for fit in fits}
    for (permuted, _), generator in generators.items():
        generator.permutation(permuted)
    for _ in range(0, LAST_PASS + 1, recipe.passes_per_block):
        positions = {key: _positions(generator, key[1], recipe) for key, generator in generators.items()}
        # Position NO_ROW is the last one: it finds the NO_ROW that is appended.
        yield _padded([np.append(fit.train, NO_ROW)[positions[fit.permuted, len(fit.train)]] for fit in fits])


def _positions(generator: np.random.RandomState, rows: int, recipe: Recipe) -> Int[np.ndarray, "batches batch_size"]:
    """Cut permutations of `range(rows)` into batches. `NO_ROW` fills the last batch of each pass."""
    batches_per_pass = -(-rows // recipe.batch_size)
    passes = np.full((recipe.passes_per_block, batches_per_pass * recipe.batch_size), NO_ROW)
    for order in passes:
        order[:rows] = generator.permutation(rows)
    return passes.reshape(-1, recipe.batch_size)


def _groups(running: Int[np.ndarray, " running"], fits: int) -> Iterator[Int[np.ndarray, " group"]]:
    """Split into groups of equal size, so that one compilation serves all. Repetition fills the last group."""
    for start in range(0, len(running), FITS_AT_ONCE):
        yield np.resize(running[start : start + FITS_AT_ONCE], min(fits, FITS_AT_ONCE))


def _padded(arrays: Sequence[Int[np.ndarray, "..."]]) -> Int32[np.ndarray, "..."]:
    """Stack arrays that differ in length, with `NO_ROW` after the shorter ones."""
    stacked = np.full((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), NO_ROW, np.int32)
    for target, array in zip(stacked, arrays, strict=True):
        target[: len(array)] = array
    return stacked


def with_bias(features: Float32[np.ndarray, "rows dimension"]) -> Float32[np.ndarray, "rows dim_and_bias"]:
    """Append a column of ones, the input of the bias."""
    return np.pad(features, ((0, 0), (0, 1)), constant_values=1)


@functools.partial(jax.jit, static_argnames="optimizer")
def _train_block(
    state: _State,
    features: Float32[Array, "rows dim_and_bias"],
    labels: Int32[Array, " rows"],
    batches: Int32[Array | np.ndarray, "group batches batch_size"],
    dev_rows: Int32[Array | np.ndarray, "group dev"],
    optimizer: Optimizer,
) -> tuple[_State, Int32[Array, "group regularizations"]]:
    """Train on these batches, then count the dev rows that are classified correctly."""

    def update(index: Int32[Array, ""], state: _State) -> _State:
        rows = batches[:, index]
        gradient = _gradient(state.weights, features[rows], labels[rows], rows != NO_ROW)
        updated = _updated(state, gradient, optimizer)
        has_batch = rows[:, 0] != NO_ROW  # false after the last batch of a fit with fewer rows than others
        return jax.tree.map(lambda new, old: jnp.where(_expand(has_batch, new.ndim), new, old), updated, state)

    batches = jnp.asarray(batches)
    most_batches = (batches[:, :, 0] != NO_ROW).sum(axis=1).max()
    state = jax.lax.fori_loop(0, most_batches, update, state)
    predicted = _logits(state.weights, features[dev_rows]).argmax(axis=3)
    correct = (predicted == labels[dev_rows][:, :, None]) & (dev_rows != NO_ROW)[:, :, None]
    return state, correct.sum(axis=1)


def _logits(
    weights: Weights, features: Float32[Array, "fits rows dim_and_bias"]
) -> Float32[Array, "fits rows regularizations classes"]:
    return jnp.einsum("frcd,fbd->fbrc", weights, features, precision="highest")


def _gradient(
    weights: Weights,
    features: Float32[Array, "fits batch_size dim_and_bias"],
    labels: Int32[Array, "fits batch_size"],
    real: Bool[Array, "fits batch_size"],
) -> Weights:
    """Return the gradient of the mean cross-entropy over real rows, plus regularization times weights."""
    probabilities = jax.nn.softmax(_logits(weights, features))
    errors = probabilities - jax.nn.one_hot(labels, weights.shape[2])[:, :, None]
    weight = real.astype(jnp.float32) / jnp.maximum(real.sum(axis=1, keepdims=True), 1).astype(jnp.float32)
    errors = errors * weight[:, :, None, None]
    penalty = jnp.array(REGULARIZATIONS)[None, :, None, None] * weights
    return jnp.einsum("fbrc,fbd->frcd", errors, features, precision="highest") + penalty


def _updated(state: _State, gradient: Weights, optimizer: Optimizer) -> _State:
    updates = state.updates + 1
    mean = optimizer.mean_decay * state.mean + (1 - optimizer.mean_decay) * gradient
    square = optimizer.square_decay * state.square + (1 - optimizer.square_decay) * gradient**2
    direction, scale = mean, jnp.sqrt(square)
    if optimizer.bias_correction:
        direction = direction / _bias_correction(optimizer.mean_decay, updates)
        scale = scale / jnp.sqrt(_bias_correction(optimizer.square_decay, updates))
    weights = state.weights - optimizer.learning_rate * direction / (scale + optimizer.epsilon)
    return _State(weights, mean, square, updates)


def _bias_correction(decay: float, updates: Int32[Array | np.ndarray, " fits"]) -> Float32[Array, "fits 1 1 1"]:
    """Return 1 - decay ** updates, without cancellation, which would leave four digits in float32."""
    return _expand(-jnp.expm1(updates.astype(jnp.float32) * float(np.log(decay))), 4)


def _expand(per_fit: Array, ndim: int) -> Array:
    return jax.lax.expand_dims(per_fit, range(1, ndim))
