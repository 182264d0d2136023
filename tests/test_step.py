"""The train step and the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.config import OptimConfig
from diffcse_jax.training import networks
from diffcse_jax.training.optimizer import alike, decays, learning_rate_schedule, make_optimizer
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import initial_state, make_train_step, root_key

CONFIG = config_of(
    {"train": {"batch_size": 8}, "mesh": {"data": 1}, "optim": {"learning_rate": 1e-3}}
)


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
    yield (
        lambda state: step(state, frozen, views, root_key(CONFIG)),
        lambda: initial_state(params, optimizer, CONFIG, mesh),
    )
    jax.tree.map(np.testing.assert_array_equal, frozen, before)


def test_a_step_is_a_function_of_state_and_batch(run):
    step, start = run
    (first, first_metrics), (second, second_metrics) = (step(start()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, (first, first_metrics), (second, second_metrics))
    state = start()
    # other masks and dropout
    _, later = step(state._replace(step=jax.device_put(np.int32(7), state.step.sharding)))
    assert all(first_metrics[name] != later[name] for name in ("loss_contrast", "loss_difference"))


def test_all_seeds_share_a_compiled_step():
    """Runs of a study that differ in the seed must not compile again."""
    programs = set()
    for seed in (1, 2):
        config = config_of({"mesh": {"data": 1}, "train": {"seed": seed, "batch_size": 8}})
        definitions, params, frozen = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
        mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=100)
        state = initial_state(params, optimizer, config, mesh)
        step = make_train_step(definitions, config, optimizer, mesh)
        lowered = step.lower(state, frozen, views_of(random_batch()), root_key(config))
        programs.add(lowered.as_text())
    assert len(programs) == 1


@pytest.mark.parametrize("changes", ["heads", "dropout"])
def test_a_seed_changes_what_it_is_asked_to(run, changes):
    step, start = run
    config = config_of(
        {"mesh": {"data": 1}, "train": {"seed": 7, "seed_changes": (changes,), "batch_size": 8}}
    )
    definitions, params, frozen = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    same_heads = all(np.array_equal(params[name], array) for name, array in start().params.items())
    # A loss draws its heads with the seed of heads, too.
    assert same_heads == (config.run_info.seed == config_of({}).run_info.seed)
    other_step = make_train_step(
        definitions, config, make_optimizer(config.optim, total_steps=100), make_mesh(config)
    )
    _, metrics = other_step(
        start(), jax.device_put(frozen), views_of(random_batch()), root_key(config)
    )
    same_dropout = metrics["loss"] == step(start())[1]["loss"]
    assert (same_heads, same_dropout) == (changes != "heads", changes != "dropout")


def test_what_a_step_changes(run):
    step, start = run
    state, old = start(), jax.tree.map(np.asarray, start())
    new, metrics = step(state)
    assert new.step == 1
    assert metrics["grad_norm"] > 0
    assert new.bad_steps == metrics["bad_steps"] == metrics["bad_gradient"] == 0
    for name, value in new.params.items():
        assert value.dtype == jnp.float32
        # softmax ignores it: its gradient is rounding noise
        if not name.endswith("attention.key.bias"):
            assert (value != old.params[name]).any(), name
    # the new state has their memory
    assert all(array.is_deleted() for array in state.params.values())
    step(new)
    assert metrics["bad_steps"] == 0  # readable though the state was given up


@pytest.mark.parametrize(
    "spoilt", ["encoder.embeddings.word.embedding", "encoder.blocks.0.attention.query.kernel"]
)
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
        assert 0 < metrics["bad_gradient"] <= len(alike(before.params))
    after = state._replace(step=before.step, bad_steps=before.bad_steps)
    jax.tree.map(np.testing.assert_array_equal, after, before)


# The optimizer


# the second is near epsilon
@pytest.mark.parametrize(("scale", "weight_decay"), [(1.0, 0.1), (1e-7, 0.0)])
def test_updates_are_those_of_the_originals_adamw(scale, weight_decay):
    """transformers 4.2.1, optimization.py:AdamW, in float64."""
    rng, shapes = (
        np.random.default_rng(0),
        {"encoder.output.kernel": (3, 4), "encoder.output.bias": (4,)},
    )
    config = OptimConfig(
        learning_rate=0.01, schedule="constant", clip_norm=0.0, weight_decay=weight_decay
    )
    optimizer = make_optimizer(config, total_steps=10)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    state, expected = (
        optimizer.init(params),
        {name: np.float64(value) for name, value in params.items()},
    )
    mean, square = dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0)
    for t in range(1, 8):
        grads = {
            name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()
        }
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name, grad in grads.items():
            grad = np.float64(grad)
            mean[name] = 0.9 * mean[name] + 0.1 * grad
            square[name] = 0.999 * square[name] + 0.001 * grad**2
            step_size = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            step = step_size * mean[name] / (np.sqrt(square[name]) + 1e-8)
            decay = weight_decay * 0.01 if name.endswith("kernel") else 0.0
            expected[name] = (expected[name] - step) - decay * expected[name]
            # Ours decays before Adam's step; the difference is of second order in the learning
            # rate.
            atol = 1e-6 + 2e-5 * t * (weight_decay > 0)
            np.testing.assert_allclose(params[name], expected[name], atol=atol)


@pytest.mark.parametrize(
    ("warmup_steps", "schedule", "expected"),
    [
        (0, "linear", [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]),
        (2, "constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rates(warmup_steps, schedule, expected):
    config = OptimConfig(learning_rate=0.5, warmup_steps=warmup_steps, schedule=schedule)
    rate = learning_rate_schedule(config, total_steps=5)
    np.testing.assert_allclose(
        [rate(jnp.int32(step)) for step in range(6)], 0.5 * np.array(expected), atol=1e-7
    )


def test_decay_spares_biases_and_norms():
    decayed = ["embeddings.word.embedding", "blocks.11.attention.query.kernel", "mlm_head.decoder"]
    spared = [
        "embeddings.norm.scale",
        "embeddings.norm.bias",
        "blocks.11.attention.query.bias",
        "mlm_head.bias",
    ]
    spared += ["blocks.11.attention_norm.scale", "projector.expand_norm.scale"]
    assert decays(dict.fromkeys([*decayed, *spared])) == dict.fromkeys(
        decayed, True
    ) | dict.fromkeys(spared, False)
