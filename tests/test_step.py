"""The train step, and the messages while it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.training import networks
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import _first_bad, initial_state, make_optimizer, make_train_step

CONFIG = config_of({"train": {"batch_size": 8}, "mesh": {"data": 1}, "optim": {"learning_rate": 1e-3}})


@pytest.fixture(scope="module", autouse=True)
def donation():
    """JAX reuses no memory while it looks for NaNs."""
    with jax.debug_nans(False):
        yield


@pytest.fixture(scope="module")
def run():
    """A compiled train step of the state, and a maker of the initial state."""
    definitions, params, frozen = networks.build(CONFIG, ENCODER, GENERATOR, VOCABULARY)
    mesh, optimizer = make_mesh(CONFIG), make_optimizer(CONFIG.optim, total_steps=100)
    step, frozen = make_train_step(definitions, CONFIG, optimizer, mesh), jax.device_put(frozen)
    before, views = jax.tree.map(np.asarray, frozen), views_of(random_batch())
    yield lambda state: step(state, frozen, views), lambda: initial_state(params, optimizer, CONFIG, mesh)
    jax.tree.map(np.testing.assert_array_equal, frozen, before)


def test_a_step_is_a_function_of_state_and_batch(run):
    step, start = run
    (first, first_metrics), (second, second_metrics) = (step(start()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, (first, first_metrics), (second, second_metrics))
    state = start()
    _, later = step(state._replace(step=jax.device_put(np.int32(7), state.step.sharding)))  # other masks and dropout
    assert all(first_metrics[name] != later[name] for name in ("loss_contrast", "loss_difference"))


def test_what_a_step_changes(run):
    step, start = run
    state, old = start(), jax.tree.map(np.asarray, start())
    new, metrics = step(state)
    assert new.step == 1
    assert metrics["grad_norm"] > 0
    assert new.bad_steps == metrics["bad_steps"] == metrics["bad_gradient"] == 0
    for name, value in new.params.items():
        assert value.dtype == jnp.float32
        if not name.endswith("attention.key.bias"):  # softmax ignores it: its gradient is rounding noise
            assert (value != old.params[name]).any(), name
    assert all(array.is_deleted() for array in state.params.values())  # the new state has their memory
    step(new)
    assert metrics["bad_steps"] == 0  # readable though the state was given up


@pytest.mark.parametrize("spoilt", ["encoder.embeddings.word.embedding", "encoder.blocks.0.attention.query.kernel"])
def test_a_step_whose_loss_is_no_number_changes_nothing(run, spoilt):
    """Weights of 1e38 overflow in the loss, or in the gradient."""
    step, start = run
    state = start()
    huge = jax.device_put(jnp.full_like(state.params[spoilt], 1e38), state.params[spoilt].sharding)
    state = state._replace(params=state.params | {spoilt: huge})
    before = jax.tree.map(np.asarray, state)
    for number in (1, 2):
        state, metrics = step(state)
        assert not np.isfinite(metrics["loss"] + metrics["grad_norm"])
        assert metrics["bad_steps"] == state.bad_steps == state.step == number
    after = state._replace(step=before.step, bad_steps=before.bad_steps)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_the_first_gradient_that_is_not_finite_is_named():
    grads = {"b": jnp.ones(3), "a": jnp.ones((2, 2)), "c": jnp.array([1.0, jnp.inf]), "d": jnp.array([jnp.nan])}
    assert _first_bad(grads) == 3
    assert _first_bad({name: jnp.ones(2) for name in grads}) == 0
