import numpy as np
import pytest
import scipy.stats
from test_sts import TableEncoder

from diffcse_jax.evaluation import outcomes
from diffcse_jax.evaluation.outcomes import Pairs, Queries, paired_interval
from diffcse_jax.evaluation.remembering import Remembering
from diffcse_jax.evaluation.sts import ScoredPairs


def test_equal_models_differ_by_nothing_and_a_constant_gain_is_certain():
    first = np.random.default_rng(0).random(50)
    assert paired_interval([first.tolist()], [first.tolist()], [None]) == (0.0, 0.0)
    assert paired_interval([first.tolist()], [(first + 3).tolist()], [None]) == pytest.approx((3.0, 3.0))


def test_the_interval_of_a_mean_is_that_of_normal_theory():
    rng = np.random.default_rng(1)
    first, gain = rng.normal(0, 5, 400), rng.normal(1.0, 2.0, 400)
    low, high = paired_interval([first.tolist()], [(first + gain).tolist()], [None])
    error = 1.96 * gain.std() / np.sqrt(400)  # unpaired, it would be three times as wide
    assert low == pytest.approx(gain.mean() - error, abs=0.05)
    assert high == pytest.approx(gain.mean() + error, abs=0.05)


def test_correlations_are_resampled_with_their_scores(monkeypatch):
    monkeypatch.setattr(outcomes, "RESAMPLES", 40)
    rng = np.random.default_rng(2)
    golds = [rng.integers(0, 6, count).astype(float) for count in (30, 20)]
    first, second = ([(gold + rng.normal(0, noise, len(gold))).tolist() for gold in golds] for noise in (3.0, 1.0))
    draws, differences = np.random.default_rng(0), np.zeros(40)
    for a, b, gold in zip(map(np.array, first), map(np.array, second), golds, strict=True):
        rows = draws.integers(len(gold), size=(40, len(gold)))
        for i in range(40):
            after, before = (scipy.stats.spearmanr(x[rows[i]], gold[rows[i]]).statistic for x in (b, a))
            differences[i] += 100 * (after - before) / 2
    assert paired_interval(first, second, golds) == pytest.approx(np.percentile(differences, (2.5, 97.5)))


def angles(**names):
    return TableEncoder({name: [np.cos(angle), np.sin(angle)] for name, angle in names.items()})


def test_outcomes_are_what_the_metrics_summarise():
    encoder = Remembering(angles(a=0.0, b=0.9, c=1.0, d=0.1))
    queries = Queries(["a", "c"], ["b", "d"])
    assert queries.of(encoder) == [[50.0, 50.0]]
    assert queries.describe() == "2 queries"
    (similarities,) = Pairs([ScoredPairs(["a", "a"], ["b", "d"], np.array([1.0, 2.0]))]).of(encoder)
    assert similarities == pytest.approx([np.cos(0.9), np.cos(0.1)])


def test_a_remembering_encoder_computes_each_sentence_once():
    encoder = angles(a=0.0, b=0.9, c=1.0)
    remembering = Remembering(encoder)
    first, second = remembering.encode(["b", "a", "b"]), remembering.encode(["c", "a"])
    assert encoder.asked == ["b", "a", "c"]
    np.testing.assert_array_equal(first, encoder.encode(["b", "a", "b"]))
    np.testing.assert_array_equal(second, encoder.encode(["c", "a"]))
