"""Training on several devices is training on one."""

import functools

import jax
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, random_batch

from diffcse_jax.errors import ConfigError
from diffcse_jax.training import networks
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.rows import real_share
from diffcse_jax.training.sharding import by_rules, make_mesh, shard_batch
from diffcse_jax.training.step import initial_state, make_train_step

# All that mixes examples: in-batch negatives, BatchNorm, standardised columns, means over tokens; and dropout.
OBJECTIVES = {
    "contrast": {"negatives": "off_dropout", "negative_ratio": 0.9},
    "dcl": {"weight": 0.1},
    "difference": {"weight": 0.5},
    "mlm": {"weight": 0.1},
    "optim": {"learning_rate": 1e-4},
}
STEPS = 5


@functools.cache
def train(
    data: int, model: int = 1, fully_sharded: bool = False
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The metrics of five steps, and the parameters and batch statistics behind them."""
    mesh_options = {"data": data, "model": model, "fully_sharded": fully_sharded}
    config = config_of(OBJECTIVES, {"train": {"batch_size": 16}, "mesh": mesh_options})
    definitions, params, batch_stats, frozen = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=STEPS)
    frozen = jax.device_put(frozen, by_rules(frozen, mesh, config))
    step = make_train_step(definitions, config, optimizer, mesh)
    state = initial_state(params, batch_stats, optimizer, config, mesh)
    expected = by_rules(state, mesh, config)
    assert jax.tree.map(lambda array: array.sharding, state) == expected
    batches = [random_batch(size=16, columns=2, seed=index, length=16) for index in range(STEPS)]
    share = max(real_share(batch["lengths"], 16, 0) for batch in batches)
    history = []
    for batch in batches:
        state, metrics = step(state, frozen, shard_batch(batch, mesh), share)
        history.append({name: float(value) for name, value in metrics.items()})
    assert all(len(array.sharding.device_set) == data * model for array in state.params.values())
    assert jax.tree.map(lambda array: array.sharding, state) == expected
    assert step._cache_size() == 1
    return history, jax.tree.map(np.asarray, state.params | state.batch_stats)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (4,), (8,), (8, 1, True), (4, 2, False), (2, 2, True)])
def test_devices_change_nothing_but_rounding(mesh):
    (one, arrays_of_one), (many, arrays_of_many) = train(1), train(*mesh)
    for step, metrics in enumerate(one):
        for name, value in metrics.items():
            np.testing.assert_allclose(many[step][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")
    for name, array in arrays_of_one.items():
        np.testing.assert_allclose(arrays_of_many[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": {"batch_size": 12}}, r"train\.batch_size=12 is not divisible by the 8 devices"),
        ({"mesh": {"data": 3, "model": 3}}, r"mesh\.data=3, mesh\.model=3, but there are 8 devices"),
        ({"mesh": {"model": 9}}, r"mesh\.model=9, but there are 8 devices"),
        (
            {"generator": {"name_or_path": "", "head_batch_size": 4}},
            r"generator\.head_batch_size=4 is not divisible by the 8 devices",
        ),
        ({"mesh": {"data": 9}}, r"mesh\.data=9, mesh\.model=1, but there are 8 devices"),
    ],
)
def test_meshes_that_cannot_be(parts, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(config_of(parts))


def test_a_mesh_takes_all_devices_or_the_first_ones():
    assert make_mesh(config_of()).size == 8
    assert list(make_mesh(config_of({"mesh": {"data": 2}})).devices) == jax.devices()[:2]


def test_full_sharding_splits_weights_and_moments():
    config = config_of({"mesh": {"fully_sharded": True}})
    _, params, batch_stats, _ = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=STEPS)
    state = initial_state(params, batch_stats, optimizer, config, mesh)
    bytes_of = lambda tree, held: sum(held(array) * array.dtype.itemsize for array in jax.tree.leaves(tree))  # noqa: E731
    held = bytes_of(state, lambda array: array.addressable_shards[0].data.size)
    assert held < 0.2 * bytes_of(state, lambda array: array.size)  # an eighth, but for biases and norms


def test_every_parameter_has_a_rule():
    everything = config_of(OBJECTIVES, {"model": {"projector": "batchnorm"}})
    _, params, batch_stats, frozen = networks.build(everything, ENCODER, GENERATOR, VOCABULARY)
    mesh = make_mesh(everything)
    by_rules(params | batch_stats | frozen, mesh, everything)
    with pytest.raises(ValueError, match=r"no sharding rule covers the parameter encoder\.gate\.kernel"):
        by_rules({"encoder.gate.kernel": params["projector.expand.kernel"]}, mesh, everything)


def test_each_device_holds_its_rows():
    mesh, batch = make_mesh(config_of()), random_batch(size=16)
    sharded = shard_batch(batch, mesh)["input_ids"]
    for shard in sharded.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch["input_ids"][shard.index])
        assert shard.data.shape[0] == 2
