"""SentEval's classifier.

SentEval trains one PyTorch model after the other and sets all seeds to 1111 before each. Fits on equally many rows
therefore start from the same weights and see the same permutations, whatever the rows and the L2 regularization. Here
several classifiers train side by side in one compiled program, each with all regularizations. Initial weights, batches,
updates and early stopping are those of the original (`tools/classifier.py` with `nhid` 0); only the order of float32
sums differs.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int, Int32

SEED = 1111
REGULARIZATIONS = (1e-5, 1e-4, 1e-3, 1e-2)
DEV_FRACTION = 0.05
LAST_PASS = 200  # no block starts after this many passes
FITS_AT_ONCE = 16  # with more, batches no longer fit into the caches of a CPU
NO_ROW = -1

Inputs = Float32[np.ndarray, "_ dim"]
Weights = Float32[np.ndarray, "classes dim_and_bias"]
Batches = Int32[Array | np.ndarray, "*fits batches batch_size"]
_State = tuple[Any, optax.OptState]  # weights and state of the optimizer, of all fits or under `jax.vmap` of one


# As in PyTorch, epsilon is added to the square root.
ADAM = optax.adam(1e-3)
RMSPROP = optax.rmsprop(1e-2, decay=0.99, eps=1e-8, eps_in_sqrt=False)


class Recipe(NamedTuple):
    """How a classifier is trained."""

    optimizer: optax.GradientTransformation
    batch_size: int  # rows per update; the last batch of a pass may be smaller
    tenacity: int  # blocks without improvement that are allowed; the next one ends training
    passes_per_block: int  # passes over the training rows between two tests on the dev rows (SentEval's `epoch_size`)
    folds: int = 10  # of cross-validation


class Fit(NamedTuple):
    """The rows of one fit, to train on and for early stopping. Permutations refer to the order of `train`."""

    train: Int[np.ndarray, " train"]
    dev: Int[np.ndarray, " dev"]
    permuted: int = 0  # number of rows that a permutation split into `train` and `dev`; 0 if the split was given


class Classifiers(NamedTuple):
    """The best snapshot of each fit and regularization, and its fraction of correct dev rows."""

    dev_accuracy: Float[np.ndarray, "fits regularizations"]
    weights: Float32[np.ndarray, "fits regularizations classes dim_and_bias"]


def hold_out(rows: Int[np.ndarray, " rows"]) -> Fit:
    """Return a fit whose dev rows are a random 5 % of these rows."""
    permuted = rows[np.random.RandomState(SEED).permutation(len(rows))]
    dev = int(DEV_FRACTION * len(rows))
    return Fit(train=permuted[dev:], dev=permuted[:dev], permuted=len(rows))


def train_classifiers(
    features: Inputs, labels: Int[np.ndarray, " _"], classes: int, fits: Sequence[Fit], recipe: Recipe
) -> Classifiers:
    """Train a classifier for each fit and each of `REGULARIZATIONS`. The fits refer to rows of `features`."""
    data = jnp.asarray(with_bias(features)), jnp.asarray(labels, jnp.int32)
    dev_rows = _padded([fit.dev for fit in fits])
    shape = (len(fits), len(REGULARIZATIONS), classes, features.shape[1] + 1)
    weights = np.broadcast_to(initial_weights(classes, features.shape[1]), shape)
    state: _State = jax.tree.map(np.array, (weights, jax.vmap(recipe.optimizer.init)(weights)))
    best, best_weights, failures = np.full(shape[:2], -1), weights.copy(), np.zeros(shape[:2], int)
    for batches in _blocks(fits, recipe):
        running = np.flatnonzero((failures <= recipe.tenacity).any(axis=1))
        for start in range(0, len(running), FITS_AT_ONCE):
            # All groups have the same size, so that one compilation serves all. Repetition fills the last group.
            group = np.resize(running[start : start + FITS_AT_ONCE], min(len(fits), FITS_AT_ONCE))
            before = jax.tree.map(lambda part, group=group: part[group], state)
            after, counts = _train_block(before, *data, batches[group], dev_rows[group], recipe.optimizer)
            for part, new in zip(*map(jax.tree.leaves, (state, after)), strict=True):
                part[group] = new
            correct = np.asarray(counts)
            better = (correct > best[group]) & (failures[group] <= recipe.tenacity)
            best[group] = np.where(better, correct, best[group])
            best_weights[group] = np.where(better[:, :, None, None], after[0], best_weights[group])
            failures[group] += ~better
        if not running.size:
            break
    return Classifiers(best / np.array([[len(fit.dev)] for fit in fits]), best_weights)


def predict(weights: Weights, features: Inputs) -> Int[np.ndarray, " rows"]:
    """Return the most probable class of each row."""
    return (with_bias(features) @ weights.T).argmax(axis=1)


def initial_weights(classes: int, dim: int) -> Weights:
    """Return the weights of `torch.nn.Linear(dim, classes)` after `torch.manual_seed(1111)`, bit for bit."""
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
    optimizer: optax.GradientTransformation,
) -> tuple[_State, Int32[Array, "group regularizations"]]:
    """Train on these batches, then count the dev rows that are classified correctly."""
    most_batches = (jnp.asarray(batches)[:, :, 0] != NO_ROW).sum(axis=1).max()

    def train_fit(state: _State, batches: Array, dev_rows: Array) -> tuple[_State, Array]:
        def update(index: Array, state: _State) -> _State:
            (weights, opt_state), rows = state, batches[index]
            gradient = _gradient(weights, features[rows], labels[rows], rows != NO_ROW)
            updates, opt_state = optimizer.update(gradient, opt_state)
            updated = optax.apply_updates(weights, updates), opt_state
            has_batch = rows[0] != NO_ROW  # false after the last batch of a fit with fewer rows than others
            return jax.tree.map(lambda new, old: jnp.where(has_batch, new, old), updated, state)

        state = jax.lax.fori_loop(0, most_batches, update, state)
        predicted = _logits(state[0], features[dev_rows]).argmax(axis=2)
        correct = (predicted == labels[dev_rows][:, None]) & (dev_rows != NO_ROW)[:, None]
        return state, correct.sum(axis=0)

    return jax.vmap(train_fit)(states, jnp.asarray(batches), jnp.asarray(dev_rows))


def _gradient(weights: Array, features: Array, labels: Array, real: Array) -> Array:
    """Return the gradient of the mean cross-entropy over real rows, plus regularization times weights."""
    errors = jax.nn.softmax(_logits(weights, features)) - jax.nn.one_hot(labels, weights.shape[1])[:, None]
    weight = real.astype(jnp.float32) / jnp.maximum(real.sum(), 1).astype(jnp.float32)
    penalty = jnp.array(REGULARIZATIONS)[:, None, None] * weights
    return jnp.einsum("brc,bd->rcd", errors * weight[:, None, None], features, precision="highest") + penalty


def _logits(weights: Array | np.ndarray, features: Array) -> Array:
    return jnp.einsum("rcd,bd->brc", weights, features, precision="highest")
