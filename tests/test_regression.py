import copy

import numpy as np
import pytest
import scipy.stats
import torch
from test_senteval import BagOfWords

from benchmarks import torch_senteval
from diffcse_jax import SentenceEncoder
from diffcse_jax.evaluation import classifier
from diffcse_jax.evaluation.classifier import initial_weights
from diffcse_jax.evaluation.sts import correlations
from diffcse_jax.evaluation.tasks import TASKS

LEVELS = np.arange(1, 6)
COEFFICIENTS = {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr}


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


@pytest.mark.parametrize("stops_by", COEFFICIENTS)
def test_the_fit_is_sentevals(stops_by):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 12)).astype(np.float32)
    y = np.clip(2.5 + x[:, :3].sum(axis=1) + generator.normal(size=200), 0, 5)
    with torch_senteval.one_thread():
        model, score = fitted_by_torch(x[:150], y[:150], x[150:], y[150:], COEFFICIENTS[stops_by])
    weights = classifier.train_regression(x[:150], y[:150], x[150:], y[150:], stops_by)
    expected = np.c_[model[0].weight.detach().numpy(), model[0].bias.detach().numpy()]
    np.testing.assert_allclose(weights, expected, atol=2e-4)
    assert correlations(classifier.predict_score(weights, x[150:]), y[150:])[stops_by] == pytest.approx(score, abs=0.01)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("STSBenchmark-finetune", 3),
        ("STSBenchmark-senteval", 2),
        ("SICKRelatedness-finetune", 3),
        ("SICKRelatedness-senteval", 2),
    ],
)
def test_each_copy_of_senteval_stops_by_its_own_coefficient(name, blocks, monkeypatch):
    """SimCSE's tasks take the block that is best by Spearman, the original's the one that is best by Pearson."""
    dev_scores = iter([(70, 60), (80, 70), (75, 80), *[(60, 60)] * 4])  # Pearson, Spearman
    monkeypatch.setattr(classifier, "correlations", lambda *_: dict(zip(COEFFICIENTS, next(dev_scores), strict=True)))
    monkeypatch.setattr(classifier, "_regression_block", lambda weights, opt_state, *_: (weights + 1, opt_state))
    rows = np.ones((4, 3), np.float32)
    weights = classifier.train_regression(rows, np.ones(4), rows, np.ones(4), TASKS[name].stops_by)
    np.testing.assert_allclose(weights - initial_weights(5, 3), blocks, atol=1e-6)


def write_split(folder, split, pairs):
    path = folder / f"STS/STSBenchmark/sts-{split}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"-\t-\t-\t-\t{score}\t{first}\t{second}\n" for first, second, score in pairs))


def test_a_task_is_trained_and_scored_on_its_splits(tmp_path):
    generator = np.random.default_rng(1)
    splits = {}
    for split, rows in (("train", 40), ("dev", 20), ("test", 30)):
        pairs = []
        for _ in range(rows):
            words = [f"{generator.integers(0, 5)}{generator.integers(0, 9)}" for _ in range(4)]
            common = int(generator.integers(0, 5))
            pairs.append((" ".join(words), " ".join(words[:common] + ["99"] * (4 - common)), 1.0 + common))
        splits[split] = sorted(pairs, key=lambda pair: (len(pair[0].split()), len(pair[1].split()), pair[2]))
        write_split(tmp_path, split, pairs)
    features = {}
    for split, pairs in splits.items():
        u, v = (BagOfWords().encode([pair[side] for pair in pairs]) for side in (0, 1))
        features[split] = np.c_[np.abs(u - v), u * v]
    golds = {split: np.array([pair[2] for pair in pairs]) for split, pairs in splits.items()}
    with torch_senteval.one_thread():
        model, dev_pearson = fitted_by_torch(
            features["train"], golds["train"], features["dev"], golds["dev"], COEFFICIENTS["pearson"]
        )
    with torch.no_grad():
        predicted = model(torch.from_numpy(features["test"])).numpy() @ LEVELS
    task = TASKS["STSBenchmark-senteval"]
    scores = task.run(BagOfWords(), tmp_path, "test")
    assert scores["n"] == 30
    assert scores["pearson"] == pytest.approx(100 * np.corrcoef(predicted, golds["test"])[0, 1], abs=0.05)
    assert scores["dev"]["pearson"] == pytest.approx(dev_pearson, abs=0.05)
    other = TASKS["STSBenchmark-finetune"].run(BagOfWords(), tmp_path, "test")
    assert other["dev"]["spearman"] > scores["dev"]["spearman"]
    assert other["dev"]["pearson"] < scores["dev"]["pearson"]
    dev_only = task.run(BagOfWords(), tmp_path, "dev")
    assert dev_only["pearson"] == scores["dev"]["pearson"]
    assert [path.name for path in task.files(tmp_path, "dev")] == ["sts-train.csv", "sts-dev.csv"]


@pytest.mark.slow
def test_minilm_on_sick_gains_from_training(data_dir):
    """SICK's relatedness is far better predicted with its training split than by cosine alone."""
    encoder = SentenceEncoder.from_pretrained("minilm")
    scores = TASKS["SICKRelatedness-senteval"].run(encoder, data_dir / "senteval", "dev")
    assert scores["n"] == 500
    assert scores["pearson"] > 82
