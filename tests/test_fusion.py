"""BM25 and embeddings in one ranking, against the formula."""

import numpy as np

from diffcse_jax.evaluation.hybrid_weight import choose_weight
from diffcse_jax.search.fusion import combine
from diffcse_jax.search.modes import DEFAULT_WEIGHT


def test_scores_are_combined_after_standardising():
    dense, words = np.array([0.9, 0.5, 0.1]), np.array([0.0, 0.0, 6.0])
    one, other, rows = np.sqrt(1.5), np.sqrt(2), np.array([2, 0])
    expected = [-0.75 * one + 0.25 * other, 0.75 * one - 0.25 / other]
    np.testing.assert_allclose(combine(dense[rows], words[rows], 0.25, dense, words), expected)
    alone = combine(dense, np.zeros(3), 0.25, dense, np.zeros(3))
    np.testing.assert_allclose(alone, 0.75 * np.array([one, 0, -one]), atol=1e-9)
    assert combine(*2 * [np.zeros(0)], 0.5, *2 * [np.zeros(0)]).shape == (0,)


def test_the_weight_is_chosen_on_held_out_queries():
    rng = np.random.default_rng(0)
    relevant = [[row] for row in range(60)]
    noise, signal = rng.normal(size=(60, 200)), rng.normal(size=(60, 200)) + 3 * np.eye(60, 200)
    assert choose_weight(noise, np.maximum(signal, 0), relevant) >= 0.8
    assert choose_weight(signal, np.maximum(noise, 0), relevant) <= DEFAULT_WEIGHT
    # no weight is better
    assert choose_weight(noise[:2], noise[:2], relevant[:2]) == DEFAULT_WEIGHT
    unanswered = [[], *relevant[1:]]  # do not count
    assert choose_weight(noise, np.maximum(signal, 0), unanswered) >= 0.8
    assert choose_weight(np.zeros((0, 5)), np.zeros((0, 5)), []) == DEFAULT_WEIGHT
