"""Training on several devices is training on one."""

import functools

import jax
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, VOCABULARY, config_of, random_batch

from diffcse_jax.errors import ConfigError
from diffcse_jax.training import networks
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh, replicated, shard_batch
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
def train(devices: int) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The metrics of five steps, and the parameters and batch statistics behind them."""
    config = config_of(OBJECTIVES, {"train": {"batch_size": 16}, "mesh": {"data": devices}})
    definitions, params, batch_stats, frozen = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=STEPS)
    step, frozen = make_train_step(definitions, config, optimizer, mesh), jax.device_put(frozen, replicated(mesh))
    state = initial_state(params, batch_stats, optimizer, mesh)
    history = []
    for index in range(STEPS):
        state, metrics = step(state, frozen, shard_batch(random_batch(size=16, columns=2, seed=index), mesh))
        history.append({name: float(value) for name, value in metrics.items()})
    assert all(len(array.sharding.device_set) == devices for array in state.params.values())
    return history, jax.tree.map(np.asarray, state.params | state.batch_stats)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_change_nothing_but_rounding(devices):
    (one, arrays_of_one), (many, arrays_of_many) = train(1), train(devices)
    for step, metrics in enumerate(one):
        for name, value in metrics.items():
            np.testing.assert_allclose(many[step][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")
    for name, array in arrays_of_one.items():
        np.testing.assert_allclose(arrays_of_many[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": {"batch_size": 12}}, r"train\.batch_size=12 is not divisible by the 8 devices"),
        (
            {"generator": {"name_or_path": "", "head_batch_size": 4}},
            r"generator\.head_batch_size=4 is not divisible by the 8 devices",
        ),
        ({"mesh": {"data": 9}}, r"mesh\.data=9, but there are 8 devices"),
    ],
)
def test_meshes_that_cannot_be(parts, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(config_of(parts))


def test_a_mesh_takes_all_devices_or_the_first_ones():
    assert make_mesh(config_of()).size == 8
    assert list(make_mesh(config_of({"mesh": {"data": 2}})).devices) == jax.devices()[:2]


def test_each_device_holds_its_rows():
    mesh, batch = make_mesh(config_of()), random_batch(size=16)
    sharded = shard_batch(batch, mesh)["input_ids"]
    for shard in sharded.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch["input_ids"][shard.index])
        assert shard.data.shape[0] == 2
