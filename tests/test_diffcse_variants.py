"""The ablations of DiffCSE, and InfoCSE's reconstruction, which recover tokens."""

import dataclasses
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, softmax
from tiny_model import bound
from tiny_networks import (
    ENCODER,
    GENERATOR,
    VOCABULARY,
    config_of,
    deeper,
    random_batch,
    shared_forward,
    views_of,
)

from diffcse_jax.errors import ConfigError
from diffcse_jax.losses.diffcse import EDITS, PREDICTIONS, Edit, Edited
from diffcse_jax.losses.diffcse_variants import corrective_language_model, delete
from diffcse_jax.models.forward import Computation, Networks
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.training import networks

DEEP = deeper(GENERATOR)


@given(st.integers(0, 1000))
def test_corrective_lm_is_the_mixture_of_copying_and_the_language_model(seed):
    rng = np.random.default_rng(seed)
    logits, copy_logits = (
        rng.normal(0, 5, shape).astype(np.float32) for shape in ((3, 4, 11), (3, 4))
    )
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
    # the language model does not train the copy probability
    np.testing.assert_array_equal(gradient, 0.0)


def built_loss(name, **options) -> tuple:
    """A loss of these options, its networks and a batch with next sentences."""
    off = {"contrast": {"weight": 0.0}, "difference": {"weight": 0.0}}
    config = config_of(
        off, {name: {"weight": 1.0} | options, "data": {"pairs": "dropout", "max_length": 16}}
    )
    built = networks.build(config, ENCODER, DEEP, VOCABULARY)
    views = views_of(random_batch(size=4), following=random_batch(size=4, seed=1))
    return config, config.losses[name], built, jax.tree.map(jnp.asarray, views)


LANGUAGE_MODEL = {"discriminator", "discriminator_lm_head"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "trained", "frozen"),
    [
        ("difference", {"objective": "conditional_mlm", "sentence": "next"}, LANGUAGE_MODEL, False),
        ("difference", {"objective": "corrective_lm"}, {*LANGUAGE_MODEL, "copy_head"}, True),
        ("reconstruction", {"blocks": 1, "condition": "projected"}, {"reconstruction_head"}, True),
    ],
)
def test_the_encoder_learns_through_the_sentence_embedding_alone(name, options, trained, frozen):
    config, loss_of, built, views = built_loss(name, **options)
    trained = {"encoder", "projector"} | trained
    assert {name.partition(".")[0] for name in built.params} == trained
    assert {name.partition(".")[0] for name in built.frozen} == (
        {"generator", "generator_head"} if frozen else set()
    )

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def grads(params, cut):
        computation = Computation(built.networks, jax.device_put(built.frozen))
        inputs = loss_of.prepare(computation, views, jax.random.key(1), config.run_info)

        def loss(params):
            forward = shared_forward(
                config, Computation(built.networks, params), views, jax.random.key(0)
            )
            cut_off = jax.lax.stop_gradient(forward.embeddings)
            forward._results["embeddings"] = jax.tree.map(
                partial(jnp.where, cut), cut_off, forward.embeddings
            )
            return loss_of.loss(forward, inputs, jax.random.key(2))[0]

        return jax.grad(loss)(params)

    params = jax.device_put(built.params)
    whole, without = grads(params, False), grads(params, True)
    for array, grad in whole.items():
        if array.startswith(("encoder.", "projector.")):
            np.testing.assert_array_equal(without[array], 0.0, err_msg=array)
        else:
            np.testing.assert_allclose(without[array], grad, rtol=1e-5, atol=1e-7, err_msg=array)
    assert {
        array.partition(".")[0] for array, grad in whole.items() if np.abs(grad).max() > 1e-6
    } == trained


def test_given_its_own_state_the_reconstruction_head_is_the_masked_lm():
    config, reconstruction, built, views = built_loss("reconstruction", blocks=1)

    @jax.jit
    def run(params, frozen):
        given = reconstruction.prepare(
            Computation(built.networks, frozen), views, jax.random.key(0), config.run_info
        )
        rows, computation = given[0].rows, Computation(built.networks, params)
        states = bound(Transformer, DEEP.config, DEEP.transformer)(rows)
        forward = shared_forward(config, computation, views, jax.random.key(0))
        head = computation.network("reconstruction_head")
        outputs = [head(rows, states[1], h) for h in (states[1][:, 0], -states[1][:, 0])]
        return given, states, outputs, reconstruction.loss(forward, given, jax.random.key(0))

    (masked, given, _), states, (outputs, others), (loss, metrics) = run(built.params, built.frozen)
    real = np.asarray(masked.rows.attention_mask) == 1
    for ours, expected in ((given, states[1]), (outputs, states[2])):
        np.testing.assert_allclose(
            np.asarray(ours)[real], np.asarray(expected)[real], rtol=1e-5, atol=1e-5
        )
    # every token reads the embedding
    assert (np.abs(outputs - others).max(axis=-1) > 1e-3)[real].all()
    tokens = float(masked.selected.sum())
    np.testing.assert_allclose(loss, metrics["reconstruction_per_token"] * tokens, rtol=1e-5)


def test_generators_that_do_not_fit_are_refused():
    for options, sizes, message in (
        (
            {},
            {"hidden_size": 8},
            "embeddings of size 16, but the generator has hidden states of size 8",
        ),
        ({"blocks": 3}, {}, "reconstruction.blocks=3, but the generator has 2 blocks"),
        ({"layer": 3}, {}, "reconstruction.layer=3, but the generator has 2 blocks"),
    ):
        config = config_of({"reconstruction": {"weight": 1.0} | options})
        generator = dataclasses.replace(DEEP, config=dataclasses.replace(DEEP.config, **sizes))
        with pytest.raises(ConfigError, match=message):
            networks.build(config, ENCODER, generator, VOCABULARY)


def test_both_sentences_are_the_mean_of_the_two():
    config, loss_of, _, views = built_loss("difference", sentence="both")
    rows = {"same": views.rows, "next": views.next.rows}
    edits = {name: Edited(each, each.attention_mask > 0) for name, each in rows.items()}
    values = {"same": jnp.float32(0.3), "next": jnp.float32(-0.7)}

    def predict(options, forward, edited, original, key):
        (name,) = (name for name, each in edits.items() if each is edited)
        np.testing.assert_array_equal(original, rows[name].input_ids)
        return values[name], {"metric": 2 * values[name]}

    forward = shared_forward(
        config, Computation(Networks(VOCABULARY, {}), {}), views, jax.random.key(0)
    )
    with mock.patch.dict(PREDICTIONS, {"rtd": PREDICTIONS["rtd"]._replace(loss=predict)}):
        loss, metrics = loss_of.loss(forward, edits, jax.random.key(0))
    np.testing.assert_allclose([loss, metrics["metric"]], [-0.2, -0.4], rtol=1e-6)


def test_an_edit_and_a_prediction_are_a_function_and_a_line_in_a_table():
    options = {"edit": "my_edit", "objective": "my_prediction"}
    with pytest.raises(ConfigError, match="'my_edit' is not one of replace, insert, delete, mixed"):
        config_of({"difference": options})
    predicted = jnp.float32(0.3), {"metric": jnp.float32(0.4)}
    mine = PREDICTIONS["rtd"]._replace(loss=lambda *_: predicted, papers=("mine",))
    edits = mock.patch.dict(EDITS, my_edit=Edit(delete, needs=frozenset()))
    with edits, mock.patch.dict(PREDICTIONS, my_prediction=mine):
        config, loss_of, built, views = built_loss("difference", **options, delete_ratio=1.0)
        assert not config.needs("generator")
        assert loss_of.papers == ("mine",)
        frozen = Computation(built.networks, built.frozen)
        edited = loss_of.prepare(frozen, views, jax.random.key(0), config.run_info)
        assert edited.rows.attention_mask.sum() == 2 * len(views.rows.input_ids)  # [CLS] and [SEP]
        forward = shared_forward(
            config, Computation(built.networks, built.params), views, jax.random.key(0)
        )
        assert loss_of.loss(forward, edited, jax.random.key(0)) == predicted
