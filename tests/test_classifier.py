"""The trained models of SentEval, against PyTorch."""

import copy

import numpy as np
import pytest
import scipy.stats
import torch
from test_senteval import DEV, BagOfWords, write

from benchmarks import torch_senteval
from diffcse_jax.evaluation import classifier
from diffcse_jax.evaluation.classifier import ADAM, REGULARIZATIONS, RMSPROP, Fit, Recipe
from diffcse_jax.evaluation.tasks import TASKS

OPTIMIZERS = {"adam": ADAM, "rmsprop": RMSPROP}
LEVELS = np.arange(1, 6)
COEFFICIENTS = {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr}


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
    return [*fits, Fit(order[:-40], order[-40:]), classifier.hold_out(order[7:])]


@pytest.mark.parametrize(("dimension", "classes"), [(100, 3), (768, 6), (1536, 2)])
def test_initial_weights_are_those_of_torch(dimension, classes):
    torch.manual_seed(1111)
    layer = torch.nn.Linear(dimension, classes)
    weights = classifier.initial_weights(classes, dimension)
    np.testing.assert_array_equal(weights[:, :-1], layer.weight.detach().numpy())
    np.testing.assert_array_equal(weights[:, -1], layer.bias.detach().numpy())


@pytest.mark.parametrize(
    ("optimizer", "batch_size", "tenacity", "passes", "classes"),
    [("adam", 64, 5, 4, 2), ("rmsprop", 7, 0, 1, 6)],
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
    fit = Fit(np.arange(40), np.arange(40, 60))
    assert len(list(classifier._blocks([fit], Recipe(RMSPROP, batch_size=32, tenacity=0, passes_per_block=50)))) == 5


# Regression


def shares(scores):
    """Tai, Socher and Manning's distribution, score by score."""
    rows = np.zeros((len(scores), 5), np.float32)
    for row, score in zip(rows, scores, strict=True):
        below = int(np.floor(score))
        if below < 5:
            row[below] = score - below
        if below > 0:
            row[below - 1] = below + 1 - score
    return rows


def fitted_by_torch(x, y, dev_x, dev_y, coefficient):
    """SentEval's relatedness regression: the best model and its dev coefficient."""
    np.random.seed(1111)
    torch.manual_seed(1111)
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 5), torch.nn.Softmax(dim=-1))
    optimizer = torch.optim.Adam(model.parameters())
    x, targets, dev_x = torch.from_numpy(x), torch.from_numpy(shares(y)), torch.from_numpy(dev_x)
    best, failures, passes = -1.0, 0, 0
    while passes <= 1000:
        for _ in range(50):
            order = np.random.permutation(len(x))
            for start in range(0, len(x), 64):
                rows = torch.from_numpy(order[start : start + 64])
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x[rows]), targets[rows]).backward()
                optimizer.step()
        passes += 50
        with torch.no_grad():
            score = coefficient(model(dev_x).numpy() @ LEVELS, dev_y)[0]
        if score > best:
            best, kept = score, copy.deepcopy(model)
        elif failures >= 3:
            break
        else:
            failures += 1
    return kept, 100 * best


def test_scores_become_distributions_over_their_neighbours():
    scores = np.r_[np.linspace(0, 5, 51), 4.75]
    np.testing.assert_allclose(classifier.level_weights(scores), shares(scores), atol=1e-6)
    np.testing.assert_allclose((classifier.level_weights(scores) @ LEVELS)[10:], scores[10:], atol=1e-6)


@pytest.mark.parametrize(("suffix", "blocks"), [("finetune", 3), ("senteval", 2)])
def test_each_copy_of_senteval_stops_by_its_own_coefficient(suffix, blocks, monkeypatch):
    """SimCSE's tasks take the block that is best by Spearman, the original's the one that is best by Pearson."""
    dev_scores = iter([(70, 60), (80, 70), (75, 80), *[(60, 60)] * 4])  # Pearson, Spearman
    monkeypatch.setattr(classifier, "correlations", lambda *_: dict(zip(COEFFICIENTS, next(dev_scores), strict=True)))
    monkeypatch.setattr(classifier, "_regression_block", lambda weights, opt_state, *_: (weights + 1, opt_state))
    rows = np.ones((4, 3), np.float32)
    stops_by = TASKS[f"SICKRelatedness-{suffix}"].stops_by
    weights = classifier.train_regression(rows, np.ones(4), rows, np.ones(4), stops_by)
    np.testing.assert_allclose(weights - classifier.initial_weights(5, 3), blocks, atol=1e-6)


@pytest.mark.parametrize(("suffix", "stops_by"), [("senteval", "pearson"), ("finetune", "spearman")])
def test_a_regression_task_is_sentevals(suffix, stops_by, tmp_path):
    generator = np.random.default_rng(1)
    features, golds = {}, {}
    for split, rows in (("train", 40), ("dev", 20), ("test", 30)):
        pairs = []
        for _ in range(rows):
            words = [f"{generator.integers(0, 5)}{generator.integers(0, 9)}" for _ in range(4)]
            common = int(generator.integers(0, 5))
            pairs.append((" ".join(words), " ".join(words[:common] + ["99"] * (4 - common)), 1.0 + common))
        write(tmp_path, f"STS/STSBenchmark/sts-{split}.csv", [f"-\t-\t-\t-\t{gold}\t{a}\t{b}" for a, b, gold in pairs])
        first, second, gold = zip(*sorted(pairs, key=lambda pair: pair[2]), strict=True)  # all have four words
        u, v = BagOfWords().encode(first), BagOfWords().encode(second)
        features[split], golds[split] = np.c_[np.abs(u - v), u * v], np.array(gold)
    coefficient = COEFFICIENTS[stops_by]
    model, dev_score = fitted_by_torch(features["train"], golds["train"], features["dev"], golds["dev"], coefficient)
    with torch.no_grad():
        predicted = model(torch.from_numpy(features["test"])).numpy() @ LEVELS
    task = TASKS[f"STSBenchmark-{suffix}"]
    scores = task.run(BagOfWords(), tmp_path)
    assert scores["n"] == 30
    assert scores[stops_by] == pytest.approx(100 * coefficient(predicted, golds["test"])[0], abs=0.05)
    assert scores["dev"][stops_by] == pytest.approx(dev_score, abs=0.05)
    if suffix == "senteval":
        (tmp_path / "STS/STSBenchmark/sts-test.csv").unlink()
        assert task.run(BagOfWords(), tmp_path, DEV)["pearson"] == scores["dev"]["pearson"]
