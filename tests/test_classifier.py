import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import torch_senteval
from diffcse_jax.evaluation import classifier
from diffcse_jax.evaluation.classifier import ADAM, REGULARIZATIONS, RMSPROP, Fit, Recipe

OPTIMIZERS = {"adam": ADAM, "rmsprop": RMSPROP}


@pytest.fixture(autouse=True)
def _one_torch_thread():
    with torch_senteval.one_thread():
        yield


def clusters(rows, dimension, classes, seed=0):
    """Overlapping Gaussian clusters, one for each class."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, rows)
    centers = 0.4 * generator.normal(size=(classes, dimension))
    return (centers[labels] + generator.normal(size=(rows, dimension))).astype(np.float32), labels


def overlapping_fits(rows):
    """Fits of different sizes on rows in no particular order; the last draws its dev rows."""
    order = np.random.default_rng(1).permutation(rows)
    fits = [Fit(order[start:], order[:start]) for start in (40, 77)]
    return [*fits, Fit(order[:-40], order[-40:]), classifier.hold_out(order[7:])]


@pytest.mark.parametrize(("dimension", "classes"), [(48, 2), (100, 3), (384, 2), (768, 6), (1024, 2), (1536, 2)])
def test_initial_weights_are_those_of_torch(dimension, classes):
    torch.manual_seed(1111)
    layer = torch.nn.Linear(dimension, classes)
    weights = classifier.initial_weights(classes, dimension)
    np.testing.assert_array_equal(weights[:, :-1], layer.weight.detach().numpy())
    np.testing.assert_array_equal(weights[:, -1], layer.bias.detach().numpy())


@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize(
    ("optimizer", "batch_size", "tenacity", "passes"),
    [("adam", 64, 5, 4), ("rmsprop", 128, 3, 2), ("rmsprop", 7, 0, 1)],
)
def test_every_fit_is_that_of_torch(optimizer, batch_size, tenacity, passes, classes):
    dimension = 20
    features, labels = clusters(261, dimension, classes)
    fits = overlapping_fits(261)
    recipe = Recipe(OPTIMIZERS[optimizer], batch_size, tenacity, passes)
    ours = classifier.train_classifiers(features, labels, classes, fits, recipe)
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
            np.testing.assert_array_equal(classifier.predict(weights, features), theirs.predict(features))


def test_groups_change_nothing_and_compile_once(monkeypatch):
    features, labels = clusters(200, 13, 3)
    fits = overlapping_fits(200)
    recipe = Recipe(ADAM, batch_size=32, tenacity=1, passes_per_block=1)
    together = classifier.train_classifiers(features, labels, 3, fits, recipe)
    monkeypatch.setattr(classifier, "FITS_AT_ONCE", 2)
    compiled = classifier._train_block._cache_size()
    apart = classifier.train_classifiers(features, labels, 3, fits, recipe)
    assert classifier._train_block._cache_size() == compiled + 1
    np.testing.assert_array_equal(apart.dev_accuracy, together.dev_accuracy)
    np.testing.assert_allclose(apart.weights, together.weights, rtol=1e-5, atol=1e-6)


def test_training_stops_after_the_last_pass():
    # Dev labels are noise, and failures are forgiven: only the number of passes ends the training.
    features, labels = clusters(60, 5, 2)
    fit = Fit(np.arange(40), np.arange(40, 60))
    recipe = Recipe(RMSPROP, batch_size=32, tenacity=1000, passes_per_block=50)
    ours = classifier.train_classifiers(features, labels, 2, [fit], recipe)
    theirs = torch_senteval.Classifier(5, 2, REGULARIZATIONS[0], "rmsprop", 32, 1000, 50)
    accuracy = theirs.fit(features[:40], labels[:40], dev=(features[40:], labels[40:]))
    assert ours.dev_accuracy[0, 0] == accuracy
    np.testing.assert_allclose(ours.weights[0, 0, :, :-1], theirs.model[0].weight.detach(), rtol=1e-4, atol=1e-5)
    assert len(list(classifier._blocks([fit], recipe))) == 5


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 3))
def test_each_pass_visits_each_training_row_once(rows, batch_size, passes):
    fits = [Fit(np.arange(100, 100 + size), np.arange(1)) for size in (rows, 50)]
    batches = next(classifier._blocks(fits, Recipe(ADAM, batch_size, 0, passes)))
    visited = batches[0].reshape(-1, batch_size)
    per_pass = -(-rows // batch_size)
    assert (visited[passes * per_pass :] == classifier.NO_ROW).all()
    for start in range(0, passes * per_pass, per_pass):
        one_pass = visited[start : start + per_pass].ravel()
        assert sorted(one_pass[:rows]) == list(range(100, 100 + rows))
        assert (one_pass[rows:] == classifier.NO_ROW).all()


@given(st.integers(20, 300))
def test_five_percent_are_held_out(rows):
    fit = classifier.hold_out(np.arange(rows) * 3)
    assert len(fit.dev) == rows // 20
    assert sorted([*fit.dev, *fit.train]) == list(range(0, 3 * rows, 3))


def test_weak_regularization_lets_weights_grow():
    features, labels = clusters(200, 8, 2)
    fit = Fit(np.arange(200), np.arange(200))
    weights = classifier.train_classifiers(features, labels, 2, [fit], Recipe(RMSPROP, 64, 1000, 40)).weights[0]
    norms = np.linalg.norm(weights.reshape(len(REGULARIZATIONS), -1), axis=1)
    assert norms[0] > norms[-1]
