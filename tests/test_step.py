import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.training import networks
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import _first_bad, initial_state, make_train_step

CONFIG = config_of(
    {"train": {"batch_size": 8}, "mesh": {"data": 1}, "optim": {"learning_rate": 1e-3}, "mlm": {"weight": 0.1}}
)


@pytest.fixture(scope="module", autouse=True)
def donation():
    """JAX reuses no memory while it looks for NaNs."""
    with jax.debug_nans(False):
        yield


@pytest.fixture(scope="module")
def run():
    """A compiled train step, a maker of its initial state, and the frozen parameters."""
    definitions, params, frozen = networks.build(CONFIG, ENCODER, GENERATOR, VOCABULARY)
    mesh, optimizer = make_mesh(CONFIG), make_optimizer(CONFIG.optim, total_steps=100)
    step = make_train_step(definitions, CONFIG, optimizer, mesh)
    return step, lambda: initial_state(params, optimizer, CONFIG, mesh), jax.device_put(frozen)


def test_a_step_is_a_function_of_state_and_batch(run):
    step, start, frozen = run
    views = views_of(random_batch())
    (first, first_metrics), (second, second_metrics) = (step(start(), frozen, views) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, (first, first_metrics), (second, second_metrics))


def test_masks_and_dropout_differ_from_step_to_step(run):
    step, start, frozen = run
    views = views_of(random_batch())
    _, first = step(start(), frozen, views)
    state = start()
    _, later = step(state._replace(step=jax.device_put(np.int32(7), state.step.sharding)), frozen, views)
    assert all(first[name] != later[name] for name in ("loss_contrast", "loss_mlm", "loss_difference"))


def test_what_a_step_changes(run):
    step, start, frozen = run
    frozen_before = jax.tree.map(np.asarray, frozen)
    old = jax.tree.map(np.asarray, start())
    new, metrics = step(start(), frozen, views_of(random_batch()))
    assert new.step == 1
    assert metrics["grad_norm"] > 0
    assert new.params.keys() == old.params.keys()
    for name, value in new.params.items():
        assert value.dtype == jnp.float32
        if not name.endswith("attention.key.bias"):  # softmax ignores it: its gradient is rounding noise
            assert (value != old.params[name]).any(), name
    jax.tree.map(np.testing.assert_array_equal, frozen, frozen_before)


def test_the_old_state_is_given_up_and_the_pretrained_arrays_are_not(run):
    step, start, frozen = run
    before = {name: array.copy() for name, array in ENCODER.transformer.items()}
    state = start()
    step(state, frozen, views_of(random_batch()))
    assert not [name for name, array in state.params.items() if not array.is_deleted()]
    jax.tree.map(np.testing.assert_array_equal, ENCODER.transformer, before)


def test_training_on_one_batch_lowers_the_loss(run):
    step, start, frozen = run
    state, losses = start(), []
    for _ in range(80):
        state, metrics = step(state, frozen, views_of(random_batch()))
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-20:]) < 0.9 * np.mean(losses[:20])


@pytest.mark.parametrize("spoilt", ["encoder.embeddings.word.embedding", "encoder.blocks.0.attention.query.kernel"])
def test_a_step_whose_loss_is_no_number_changes_nothing(run, spoilt):
    """Weights of 1e38 overflow in the loss, or in the gradient."""
    step, start, frozen = run
    state = start()
    huge = jax.device_put(jnp.full_like(state.params[spoilt], 1e38), state.params[spoilt].sharding)
    state = state._replace(params=state.params | {spoilt: huge})
    before = jax.tree.map(np.asarray, state)
    for number in (1, 2):
        state, metrics = step(state, frozen, views_of(random_batch()))
        assert not np.isfinite(metrics["loss"] + metrics["grad_norm"])
        assert metrics["bad_steps"] == state.bad_steps == state.step == number
    after = state._replace(step=before.step, bad_steps=before.bad_steps)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_good_steps_are_not_counted(run):
    step, start, frozen = run
    state, metrics = step(start(), frozen, views_of(random_batch()))
    assert state.bad_steps == metrics["bad_steps"] == metrics["bad_gradient"] == 0
    rest, _ = step(state, frozen, views_of(random_batch()))
    assert metrics["bad_steps"] == 0  # readable though the state was given up
    assert rest.step == 2


def test_the_first_gradient_that_is_not_finite_is_told():
    grads = {"b": jnp.ones(3), "a": jnp.ones((2, 2)), "c": jnp.array([1.0, jnp.inf]), "d": jnp.array([jnp.nan])}
    assert _first_bad(grads) == 3
    assert _first_bad({name: jnp.ones(2) for name in grads}) == 0
