"""Ranking consistency, ranking distillation and the anchor: formulas, and what they read."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from tiny_model import random_params
from tiny_networks import ENCODER, NO_DROPOUT, SIZES, VOCABULARY, config_of, forward_of, random_batch, views_of

from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import prepare
from diffcse_jax.losses.ranking import RankingConsistency, divergence, jensen_shannon, list_mle, list_net
from diffcse_jax.models.forward import Computation, SentenceNetwork, start_as_teacher
from diffcse_jax.models.layers import Network, bind, definition
from diffcse_jax.training import networks
from diffcse_jax.training.step import loss_of_batch

RNG = np.random.default_rng(0)
SCORES, OTHERS = jnp.array(RNG.normal(0.0, 3.0, (2, 5, 4)), jnp.float32)
BUILD = functools.partial(SentenceNetwork, pooler="cls")
TEACHER = Network(functools.partial(BUILD, SIZES), random_params(BUILD, SIZES, seed=5), frozen=True)
OFF = {"contrast": {"weight": 0.0}, "difference": {"weight": 0.0}}


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(np.float64(logits))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (np.float64(x) / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return a @ b.T


def test_the_divergence_of_jensen_and_shannon():
    expected = jensenshannon(softmax(SCORES), softmax(OTHERS), axis=1) ** 2  # SciPy gives its root
    np.testing.assert_allclose(jensen_shannon(SCORES, OTHERS), expected, rtol=1e-4)
    np.testing.assert_allclose(jensen_shannon(SCORES, SCORES), 0.0, atol=1e-6)
    apart = jnp.array([[100.0, 0.0], [0.0, 100.0]])
    np.testing.assert_allclose(jensen_shannon(apart, apart[::-1]), np.log(2.0), rtol=1e-6)


def test_consistency_compares_rows_with_columns():
    z1, z2 = jnp.array(RNG.normal(size=(2, 6, 8)), jnp.float32)
    similarity = cosines(z1, z2) / 0.3
    expected = jensenshannon(softmax(similarity), softmax(similarity.T), axis=1) ** 2
    for second, value in ((z2, expected.mean()), (z1, 0.0)):
        loss, _ = RankingConsistency(temperature=0.3).loss(forward_of(z1, second), None, jax.random.key(0))
        np.testing.assert_allclose(loss, value, rtol=1e-4, atol=1e-6)


def test_the_orders_of_a_list_are_a_distribution():
    scores = SCORES[:1]
    likelihoods = []
    for order in itertools.permutations(range(4)):
        teacher = jnp.zeros((1, 4)).at[0, jnp.array(order)].set(jnp.array([4.0, 3.0, 2.0, 1.0]))
        left, expected = np.exp(np.float64(scores[0])), 1.0
        for candidate in order:  # drawn one after the other, each by its share of what is left
            expected *= left[candidate] / left.sum()
            left[candidate] = 0.0
        likelihoods.append(np.exp(-list_mle(scores, teacher)[0]))
        np.testing.assert_allclose(likelihoods[-1], expected, rtol=1e-4)
    np.testing.assert_allclose(sum(likelihoods), 1.0, rtol=1e-5)


def test_list_net_is_a_cross_entropy_and_the_anchor_what_it_exceeds_the_entropy_by():
    teacher = softmax(OTHERS)
    cross_entropy = -(teacher * np.log(softmax(SCORES))).sum(axis=1)
    entropy = -(teacher * np.log(teacher)).sum(axis=1)
    np.testing.assert_allclose(list_net(SCORES, OTHERS), cross_entropy, rtol=1e-5)
    np.testing.assert_allclose(divergence(OTHERS, SCORES), cross_entropy - entropy, rtol=1e-4)
    np.testing.assert_allclose(jax.grad(lambda scores: list_net(scores, OTHERS).sum())(OTHERS), 0.0, atol=1e-6)


def evaluated(*parts, columns: int = 2) -> tuple[dict, dict]:
    """The metrics and what objectives read beside the batch."""
    config = config_of(OFF, {"model": {"projector": "mlp"}}, *parts)
    built = networks.build(config, ENCODER, None, VOCABULARY, {"other": TEACHER})
    assert not any(name.startswith(("start", "teacher")) for name in built.params)
    views = jax.tree.map(jnp.asarray, views_of(random_batch(columns=columns), packed=True))

    @jax.jit
    def run(params, frozen, views, key):
        corrupted = prepare(config.losses, Computation(built.networks, frozen), views, key, config.run_info)
        _, metrics = loss_of_batch(config, Computation(built.networks, params), views, corrupted, key)
        return metrics, corrupted

    return run(built.params, built.frozen, views, jax.random.key(0))


def vectors(teacher: Network, columns: int = 2) -> tuple[np.ndarray, ...]:
    views = jax.tree.map(jnp.asarray, views_of(random_batch(columns=columns)))
    return views.by_view(np.asarray(bind(definition(teacher.build), teacher.params)(views.rows)))


def test_the_anchor_is_at_rest_at_the_start_and_dropout_moves_it():
    anchor = {"anchor": {"weight": 1.0}}
    at_rest, moved = evaluated(NO_DROPOUT, anchor)[0], evaluated(anchor)[0]
    np.testing.assert_allclose(at_rest["loss_anchor"], 0.0, atol=1e-6)
    assert moved["loss_anchor"] > 1e-3


def test_teachers_are_mixed_and_have_no_dropout():
    columns = 3
    teachers = {"weight": 1.0, "teachers": ("other", "start"), "shares": (1.0, 3.0), "form": "listnet"}
    parts = {"distillation": teachers, "consistency": {"weight": 1.0}}
    metrics, corrupted = evaluated(parts, columns=columns)
    encoded = [vectors(teacher, columns) for teacher in (TEACHER, start_as_teacher(ENCODER, "cls"))]
    lists = [cosines(anchors, np.concatenate(others)) for anchors, *others in encoded]
    np.testing.assert_allclose(corrupted["distillation"], 0.25 * lists[0] + 0.75 * lists[1], atol=1e-5)
    assert np.isfinite(metrics["loss_distillation"])
    assert metrics["loss_consistency"] > 0
    assert metrics["loss"] == pytest.approx(float(metrics["loss_distillation"] + metrics["loss_consistency"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": ("a", "b"), "poolers": ("avg",)}, "distillation.poolers has 1 value for 2 teachers"),
        ({"teachers": ("a",), "shares": (0.0,)}, "distillation.shares are all 0"),
        ({"teachers": ("start",), "poolers": ("avg",)}, "model.pooler is the pooler of `start`"),
    ],
)
def test_teachers_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        config_of({"distillation": {"weight": 1.0} | options})
