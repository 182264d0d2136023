"""InfoCSE's reconstruction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, deeper, random_batch, views_of

from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import prepare
from diffcse_jax.models.forward import Computation
from diffcse_jax.models.heads import ReconstructionHead, reconstruction_start
from diffcse_jax.models.layers import bind, definition
from diffcse_jax.training import networks
from diffcse_jax.training.step import loss_of_batch

GENERATOR = deeper(GENERATOR)
SIZES = GENERATOR.config
ALONE = {"contrast": {"weight": 0.0}, "difference": {"weight": 0.0}, "model": {"projector": "mlp"}}
HALF = {"reconstruction": {"weight": 1.0, "blocks": 1}}


def test_given_its_own_state_the_head_is_the_masked_lm():
    rows = jax.tree.map(jnp.asarray, views_of(random_batch(), packed=True)).rows
    build = functools.partial(networks.Transformer, SIZES)
    states = bind(definition(build), GENERATOR.transformer)(rows)
    start = reconstruction_start(GENERATOR.transformer, GENERATOR.mlm_head, SIZES, 1)
    head = bind(definition(functools.partial(ReconstructionHead, SIZES, 1)), start)
    real = np.asarray(rows.attention_mask) == 1
    outputs = head(rows, states[1], states[1][:, 0])
    np.testing.assert_allclose(np.asarray(outputs)[real], np.asarray(states[2])[real], rtol=1e-5, atol=1e-5)
    other = head(rows, states[1], -states[1][:, 0])
    assert (np.abs(outputs - other).max(axis=-1) > 1e-3)[real].all()  # every token reads the vector


@pytest.mark.slow
def test_the_encoder_learns_through_the_embedding_alone():
    config = config_of(ALONE, HALF, {"reconstruction": HALF["reconstruction"] | {"condition": "projected"}})
    built = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    views = jax.tree.map(jnp.asarray, views_of(random_batch(), packed=True))
    assert {name.partition(".")[0] for name in built.frozen} == {"generator", "generator_head"}

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def grad_of_loss(params, frozen, key):
        given = prepare(config.losses, Computation(built.networks, frozen), views, key, config.run_info)

        def loss(params, given):
            return loss_of_batch(config, Computation(built.networks, params), views, given, key)

        return jax.grad(loss, has_aux=True)(params, given), given["reconstruction"]

    (grads, metrics), given = grad_of_loss(built.params, built.frozen, jax.random.key(0))
    per_token, selected = metrics["reconstruction_per_token"], given.masked.selected
    np.testing.assert_allclose(metrics["loss"], per_token * float(selected.sum()), rtol=1e-5)
    build = functools.partial(networks.Transformer, SIZES)
    states = bind(definition(build), GENERATOR.transformer)(given.masked.rows.padded())[1]
    real = np.asarray(views.rows.attention_mask) == 1
    np.testing.assert_allclose(np.asarray(given.states)[real], np.asarray(states)[real], rtol=1e-5, atol=1e-5)
    reached = {name.partition(".")[0] for name, grad in grads.items() if np.abs(grad).max() > 1e-4}
    assert reached == {"encoder", "reconstruction_head", "projector"}
    # Of the word embeddings, only those of the sentences as they are: masked tokens are read by the generator.
    of_words = np.abs(grads["encoder.embeddings.word.embedding"]).max(axis=1) > 0
    assert set(np.flatnonzero(of_words)) <= set(np.unique(views.input_ids))


def test_generators_that_do_not_fit_are_refused():
    for options, sizes, message in (
        ({}, {"hidden_size": 8}, "embeddings of size 16, but the generator has hidden states of size 8"),
        ({"blocks": 3}, {}, "reconstruction.blocks=3, but the generator has 2 blocks"),
        ({"layer": 3}, {}, "reconstruction.layer=3, but the generator has 2 blocks"),
    ):
        config = config_of({"reconstruction": {"weight": 1.0} | options})
        generator = dataclasses.replace(GENERATOR, config=dataclasses.replace(SIZES, **sizes))
        with pytest.raises(ConfigError, match=message):
            networks.build(config, ENCODER, generator, VOCABULARY)
