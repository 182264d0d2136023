"""SentEval's classifier, logistic regression with early stopping, for all fits of a task in one compiled program.

SentEval trains one PyTorch model after the other and sets all seeds to 1111 before each. So fits on equally many rows
start from the same weights and see the same permutations, whatever the rows and the L2 regularization. Here every fit
runs for all regularizations at once, several fits side by side; batches, updates and early stopping are those of the
original (SentEval's `tools/classifier.py` with `nhid` 0), so that results differ by the order of float32 sums only.
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
LAST_PASS = 200
FITS_AT_ONCE = 16  # More gain nothing on a CPU, whose caches no longer hold their batches.


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam with PyTorch's coupled L2; RMSprop is its special case without momentum and bias correction."""

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
        optimizer: the update rule.
        batch_size: rows per update; the last batch of a pass is smaller.
        tenacity: training stops at the first block without improvement after this many such blocks.
        passes_per_block: passes over the training rows between two looks at the dev rows (SentEval's `epoch_size`).
    """

    optimizer: Optimizer
    batch_size: int
    tenacity: int
    passes_per_block: int


@dataclasses.dataclass(frozen=True)
class Fit:
    """The rows of one fit, in the order in which the permutations count them.

    Attributes:
        train: rows to train on.
        dev: rows for early stopping.
        permuted: rows that a permutation split into `train` and `dev`; 0 if the two were given.
    """

    train: Int[np.ndarray, " train"]
    dev: Int[np.ndarray, " dev"]
    permuted: int = 0


@dataclasses.dataclass(frozen=True)
class FittedClassifiers:
    """The best snapshot of each fit and regularization.

    Attributes:
        accuracy: share of its dev rows that it classifies correctly.
        weights: coefficients, the last one the bias.
    """

    accuracy: Float[np.ndarray, "fits regularizations"]
    weights: Float32[np.ndarray, "fits regularizations classes dimension_and_bias"]


class _State(NamedTuple):
    """Weights and optimizer of some fits. Moments have the shape of the weights."""

    weights: Float32[Array | np.ndarray, "fits regularizations classes dimension_and_bias"]
    mean: Float32[Array | np.ndarray, "fits regularizations classes dimension_and_bias"]
    square: Float32[Array | np.ndarray, "fits regularizations classes dimension_and_bias"]
    steps: Int32[Array | np.ndarray, " fits"]


def hold_out(rows: Int[np.ndarray, " rows"]) -> Fit:
    """A fit on these rows, where a random 5 % are the dev rows."""
    permuted = rows[np.random.RandomState(SEED).permutation(len(rows))]
    dev = int(DEV_FRACTION * len(rows))
    return Fit(train=permuted[dev:], dev=permuted[:dev], permuted=len(rows))


def train_classifiers(
    features: Float32[np.ndarray, "rows dimension"],
    labels: Int[np.ndarray, " rows"],
    classes: int,
    fits: Sequence[Fit],
    recipe: Recipe,
) -> FittedClassifiers:
    """Trains a classifier for each fit and each of `REGULARIZATIONS`.

    Args:
        features: vectors of all rows that fits refer to.
        labels: class numbers from 0.
        classes: number of classes.
        fits: which rows to use.
        recipe: how to train.
    """
    features_on_device, labels_on_device = jnp.asarray(_with_bias(features)), jnp.asarray(labels, jnp.int32)
    state = _initial_state(len(fits), classes, features.shape[1])
    best_weights = state.weights.copy()
    best = np.full((len(fits), len(REGULARIZATIONS)), -1)
    failures = np.zeros_like(best)
    dev_rows = _stack([fit.dev for fit in fits])
    for batches in _blocks(fits, recipe):
        running = np.flatnonzero((failures <= recipe.tenacity).any(axis=1))
        if not running.size:
            break
        for start in range(0, len(running), FITS_AT_ONCE):
            chosen = running[start : start + FITS_AT_ONCE]
            # Repeated fits fill the last group: one shape, one compilation.
            group = np.resize(chosen, min(len(fits), FITS_AT_ONCE))
            trained, correct = _train_block(
                _State(*(part[group] for part in state)),
                features_on_device,
                labels_on_device,
                batches.rows(group),
                np.int32(batches.count(group)),
                dev_rows[group],
                recipe.optimizer,
            )
            for part, new in zip(state, trained, strict=True):
                part[chosen] = np.asarray(new)[: len(chosen)]
            correct = np.asarray(correct)[: len(chosen)]
            improved = (correct > best[chosen]) & (failures[chosen] <= recipe.tenacity)
            best[chosen] = np.where(improved, correct, best[chosen])
            best_weights[chosen] = np.where(improved[..., None, None], state.weights[chosen], best_weights[chosen])
            failures[chosen] += ~improved
    return FittedClassifiers(best / np.array([[len(fit.dev)] for fit in fits]), best_weights)
