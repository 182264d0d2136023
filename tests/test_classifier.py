"""The classifier of SentEval, against PyTorch."""

import numpy as np
import pytest

from benchmarks import torch_senteval
from diffcse_jax.evaluation import senteval
from diffcse_jax.evaluation.senteval import ADAM, REGULARIZATIONS, RMSPROP, Features, Fit, Recipe

OPTIMIZERS = {"adam": ADAM, "rmsprop": RMSPROP}


@pytest.fixture(autouse=True)
def _one_torch_thread():
    with torch_senteval.one_thread():
        yield


def clusters(rows, dimension, classes):
    """Overlapping Gaussian clusters, one for each class."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, classes, rows)
    centers = 0.4 * generator.normal(size=(classes, dimension))
    return (centers[labels] + generator.normal(size=(rows, dimension))).astype(np.float32), labels


def overlapping_fits(rows):
    """Fits of different sizes on rows in no particular order; the last draws its dev rows."""
    order = np.random.default_rng(1).permutation(rows)
    fits = [Fit(order[start:], order[:start]) for start in (40, 77)]
    return [*fits, Fit(order[:-40], order[-40:]), senteval.hold_out(order[7:])]


@pytest.mark.parametrize(
    ("optimizer", "batch_size", "tenacity", "passes", "classes"),
    [("adam", 64, 2, 2, 2), ("rmsprop", 7, 0, 1, 6)],
)
def test_every_fit_is_that_of_torch(optimizer, batch_size, tenacity, passes, classes, monkeypatch):
    monkeypatch.setattr(senteval, "FITS_AT_ONCE", 3)  # of 4: the last group is filled up
    dimension = 20
    features, labels = clusters(261, dimension, classes)
    fits = overlapping_fits(261)
    recipe = Recipe(OPTIMIZERS[optimizer], batch_size, tenacity, passes)
    ours = senteval.train_classifiers(Features(features, labels, classes, {}), fits, recipe)
    for column, regularization in enumerate(REGULARIZATIONS):
        for row, fit in enumerate(fits):
            theirs = torch_senteval.Classifier(
                dimension, classes, regularization, optimizer, batch_size, tenacity, passes
            )
            if fit.permuted:
                rows = np.random.default_rng(1).permutation(261)[7:]
                accuracy = theirs.fit(features[rows], labels[rows])
            else:
                dev = features[fit.dev], labels[fit.dev]
                accuracy = theirs.fit(features[fit.train], labels[fit.train], dev=dev)
            assert ours.dev_accuracy[row, column] == accuracy
            weights = ours.weights[row, column]
            np.testing.assert_allclose(weights[:, :-1], theirs.model[0].weight.detach(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(weights[:, -1], theirs.model[0].bias.detach(), rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(senteval.predict(weights, features), theirs.predict(features))
