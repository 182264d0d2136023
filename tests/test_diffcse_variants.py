"""The ablations of DiffCSE."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, softmax
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, random_batch, shared_forward, views_of

from diffcse_jax.errors import ConfigError
from diffcse_jax.losses.diffcse_variants import corrective_language_model
from diffcse_jax.models.forward import Computation, SharedForward
from diffcse_jax.training import networks


@given(st.integers(0, 1000))
def test_corrective_lm_is_the_mixture_of_copying_and_the_language_model(seed):
    rng = np.random.default_rng(seed)
    logits, copy_logits = (rng.normal(0, 5, shape).astype(np.float32) for shape in ((3, 4, 11), (3, 4)))
    inputs, targets = rng.integers(0, 3, (2, 3, 4))

    def loss(copy_logits):
        losses = corrective_language_model(
            jnp.array(logits), copy_logits, jnp.array(inputs == targets), jnp.array(targets)
        )
        return losses.sum(), losses

    gradient, losses = jax.grad(loss, has_aux=True)(jnp.array(copy_logits))
    copied = expit(np.float64(copy_logits))[..., None]
    mixture = copied * np.eye(11)[inputs] + (1 - copied) * softmax(np.float64(logits), axis=-1)
    np.testing.assert_allclose(mixture.sum(axis=-1), 1)
    expected = -np.log(np.take_along_axis(mixture, targets[..., None], axis=-1)[..., 0])
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(gradient, 0.0)  # the language model does not train the copy probability


NETWORKS = {"conditional_mlm": {"discriminator_lm_head"}, "corrective_lm": {"discriminator_lm_head", "copy_head"}}


def difference_of(**options) -> tuple:
    """The objective of these options, its networks and a batch with next sentences."""
    data = {"pairs": "dropout", "max_length": 16}
    config = config_of({"difference": options, "contrast": {"weight": 0.0}, "data": data})
    built = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    views = views_of(random_batch(size=4), following=random_batch(size=4, seed=1))
    return config, config.losses["difference"], built, jax.tree.map(jnp.asarray, views)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sentence"), [("conditional_mlm", "next"), ("corrective_lm", "same")])
def test_the_encoder_learns_through_the_sentence_vector_alone(kind, sentence):
    config, objective, built, views = difference_of(objective=kind, sentence=sentence)
    assert {name.partition(".")[0] for name in built.params} == {
        "encoder", "projector", "discriminator", *NETWORKS[kind],
    }  # fmt: skip
    assert {name.partition(".")[0] for name in built.frozen} == (
        {"generator", "generator_head"} if kind == "corrective_lm" else set()
    )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def grads(params, cut):
        frozen = Computation(built.networks, jax.device_put(built.frozen))
        corrupted = objective.prepare(frozen, views, jax.random.key(1), config.run_info)

        def loss(params):
            forward = shared_forward(config, Computation(built.networks, params), views, jax.random.key(0))
            cut_off = jax.lax.stop_gradient(forward.embeddings)
            forward._results["embeddings"] = jax.tree.map(partial(jnp.where, cut), cut_off, forward.embeddings)
            return objective.loss(forward, corrupted, jax.random.key(2))[0]

        return jax.grad(loss)(params)

    params = jax.device_put(built.params)
    whole, without = grads(params, False), grads(params, True)
    for name, grad in whole.items():
        if name.startswith(("encoder.", "projector.")):
            np.testing.assert_array_equal(without[name], 0.0, err_msg=name)
        else:
            np.testing.assert_allclose(without[name], grad, rtol=1e-5, atol=1e-7, err_msg=name)
    assert all(
        any(np.abs(grad).max() > 1e-6 for name, grad in whole.items() if name.startswith(network + "."))
        for network in ("encoder", "projector", "discriminator", *NETWORKS[kind])
    )


def test_both_sentences_are_the_mean_of_the_two():
    rng = np.random.default_rng(0)
    values = dict(zip(("same", "next"), map(jnp.float32, rng.normal(size=2)), strict=True))
    _, objective, _, _ = difference_of(sentence="both")
    predicted = {name: (value, {"metric": 2 * value}) for name, value in values.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(objective), "predict", lambda self, forward, edited, key: predicted[edited])
        forward = mock.Mock(spec=SharedForward)
        loss, metrics = objective.loss(forward, {"same": "same", "next": "next"}, jax.random.key(0))
    mean = sum(values.values()) / 2
    np.testing.assert_allclose([loss, metrics["metric"]], [mean, 2 * mean], rtol=1e-6)


@pytest.mark.parametrize("kind", ["conditional_mlm", "corrective_lm"])
def test_what_recovers_originals_takes_no_other_edits(kind):
    with pytest.raises(ConfigError, match=rf"difference\.edit='insert' needs difference\.objective='rtd': '{kind}'"):
        config_of({"difference": {"objective": kind, "edit": "insert"}})
