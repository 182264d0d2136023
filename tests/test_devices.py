"""Training on several devices is training on one."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from tiny_networks import (
    ENCODER,
    GENERATOR,
    MASK,
    MODERN,
    SIMCSE,
    VOCABULARY,
    config_of,
    random_batch,
    views_of,
)

from diffcse_jax.config import Config
from diffcse_jax.data.batches import Shards
from diffcse_jax.errors import ConfigError
from diffcse_jax.training import networks
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import (
    by_rules,
    make_mesh,
    padded,
    resolved,
    shard_batch,
    shards_of,
    without_padding,
)
from diffcse_jax.training.step import initial_state, make_train_step, root_key

# All that mixes examples: in-batch negatives, BatchNorm, standardised columns, means over tokens;
# and dropout.
OBJECTIVES = {
    "contrast": {
        "negatives": "off_dropout",
        "negative_ratio": 0.9,
        "mask_duplicates": "similarity",
        "duplicate_similarity": 0.8,
    },
    "barlow_twins": {"weight": 0.01, "artificial_rows": 8},
    "dcl": {"weight": 0.1},
    "difference": {"weight": 0.5},
    "mlm": {"weight": 0.1},
    "consistency": {"weight": 1.0},
    "distillation": {"weight": 0.1, "teachers": ("start",)},
    "reconstruction": {"weight": 0.001, "blocks": 1},
    "finetune": {
        "weight": 0.5,
        "tasks": {"pair": {"texts": ("a", "b"), "kind": "regression", "depth": 2}},
    },
    "optim": {"learning_rate": 1e-4},
}
# What edits sentences: the next ones, the anchors, the second views. The networks are ModernBERTs.
EDITS = {
    "data": {"pairs": "dropout", "augmentation": "mlm", "max_length": 16},
    "difference": {"weight": 0.5, "objective": "conditional_mlm", "sentence": "next"},
    "edited_contrast": {"weight": 0.5, "edit": "mixed"},
    "generator": {"decode": "sample"},
    "optim": {"learning_rate": 1e-4},
}
STEPS = 3


@functools.cache
def train(
    data: int, model: int = 1, fully_sharded: bool = False, *, edits: bool = False
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Return the metrics of a few steps, and the parameters after them."""
    mesh_options = {"data": data, "model": model, "fully_sharded": fully_sharded}
    config = config_of(
        EDITS if edits else OBJECTIVES, {"train": {"batch_size": 16}, "mesh": mesh_options}
    )
    encoder, generator = (
        network.on(jax.devices()[0], data)
        for network in ((MODERN, MODERN) if edits else (ENCODER, GENERATOR))
    )
    definitions, params, frozen = networks.build(config, encoder, generator, VOCABULARY)
    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=STEPS)
    frozen = jax.device_put(frozen, by_rules(frozen, mesh, config))
    step = make_train_step(definitions, config, optimizer, mesh)
    state = initial_state(params, optimizer, config, mesh)
    expected = by_rules(state, mesh, config)
    assert jax.tree.map(lambda array: array.sharding, state) == expected
    # Each step has other tokens, but sentences of the same lengths: a step is compiled for each
    # layout of a batch.
    first = random_batch(size=16, columns=2, length=16)
    ids, ordinary = first["input_ids"], VOCABULARY.size - MASK - 1
    other_ids = [
        np.where(ids > MASK, MASK + 1 + (ids + 11 * index) % ordinary, ids)
        for index in range(STEPS + 1)
    ]
    batches = [first | {"input_ids": each} for each in other_ids]
    history = []
    for batch, following in itertools.pairwise(batches):
        views = views_of(batch, packed=True, devices=data, following=following if edits else None)
        if not edits:
            views = views._replace(labels={"pair": np.arange(16, dtype=np.float32)})
        state, metrics = step(state, frozen, shard_batch(views, mesh), root_key(config))
        history.append({name: float(value) for name, value in metrics.items()})
    assert all(len(array.sharding.device_set) == data * model for array in state.params.values())
    assert jax.tree.map(lambda array: array.sharding, state) == expected
    return history, jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "edits"), [((4, 2, False), False), ((8, 1, True), True)])
def test_devices_change_nothing_but_rounding(mesh, edits):
    (one, arrays_of_one), (many, arrays_of_many) = train(1, edits=edits), train(*mesh, edits=edits)
    for step, metrics in enumerate(one):
        for name, value in metrics.items():
            np.testing.assert_allclose(
                many[step][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}"
            )
    for name, array in arrays_of_one.items():
        np.testing.assert_allclose(arrays_of_many[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_gradients_in_bfloat16_do_not_depend_on_the_number_of_devices():
    """They are summed over the devices in float32: in bfloat16 the sums would differ in the third digit."""
    moments = []
    for data in (1, 8):
        config = config_of(
            SIMCSE, {"train": {"batch_size": 16}, "mesh": {"data": data}, "precision": "bfloat16"}
        )
        built = networks.build(config, ENCODER, None, VOCABULARY)
        mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=STEPS)
        state = initial_state(built.params, optimizer, config, mesh)
        views = shard_batch(views_of(random_batch(size=16)), mesh)
        step = make_train_step(built.networks, config, optimizer, mesh)
        state, _ = step(state, {}, views, root_key(config))
        (adam,) = (part for part in state.opt_state if isinstance(part, optax.ScaleByAdamState))
        moments.append(jax.tree.map(np.asarray, adam.mu))
    for name, one in moments[0].items():
        # softmax ignores it: its gradient is rounding noise
        if not name.endswith("attention.key.bias"):
            # On average: a rounding to bfloat16 may fall the other way at a single token.
            assert np.abs(moments[1][name][: len(one)] - one).mean() < 3e-4 * np.abs(one).mean(), (
                name
            )


def test_what_is_left_to_the_machine_is_decided_by_the_mesh():
    config = Config.from_dict({})
    assert (config.precision, config.train.packing, config.train.recompute) == (
        "auto",
        "auto",
        "auto",
    )
    tpu, gpu = (
        mock.Mock(spec=Mesh, devices=np.array([mock.Mock(platform=name)]))
        for name in ("tpu", "gpu")
    )
    for mesh, expected in (
        (make_mesh(config), ("float32", "on", "on")),
        (tpu, ("bfloat16", "on", "off")),
        (gpu, ("bfloat16", "off", "off")),
    ):
        decided = resolved(config, mesh)
        assert (decided.precision, decided.train.packing, decided.train.recompute) == expected
    chosen = Config.from_dict(
        {"precision": "bfloat16", "train": {"packing": "off", "recompute": "off"}}
    )
    assert resolved(chosen, make_mesh(chosen)) == chosen


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": {"batch_size": 12}}, r"train\.batch_size=12 is not divisible by the 8 devices"),
        (
            {"generator": {"name_or_path": "", "head_batch_size": 4}},
            r"generator\.head_batch_size=4 is not divisible",
        ),
        ({"mesh": {"data": 3, "model": 3}}, r"mesh\.data=3, mesh\.model=3: this run has 8 devices"),
        ({"mesh": {"model": 9}}, r"mesh\.model=9: this run has 8 devices"),
    ],
)
def test_a_mesh_takes_all_devices_or_the_first_ones(parts, message):
    assert make_mesh(config_of()).size == 8
    assert list(make_mesh(config_of({"mesh": {"data": 2}})).devices.flat) == jax.devices()[:2]
    with pytest.raises(ConfigError, match=message):
        make_mesh(config_of(parts))


def test_full_sharding_splits_weights_and_moments():
    config = config_of({"mesh": {"fully_sharded": True}})
    _, params, _ = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    mesh, optimizer = make_mesh(config), make_optimizer(config.optim, total_steps=STEPS)
    state = initial_state(params, optimizer, config, mesh)

    def bytes_of(tree, held):
        return sum(held(array) * array.dtype.itemsize for array in jax.tree.leaves(tree))

    held = bytes_of(state, lambda array: array.addressable_shards[0].data.size)
    # an eighth, but for biases and norms
    assert held < 0.2 * bytes_of(state, lambda array: array.size)


def test_rows_that_the_devices_do_not_divide_are_padded():
    mesh = make_mesh(config_of({"mesh": {"data": 4, "model": 2}}))
    table = "encoder.embeddings.word.embedding"
    params = {table: jnp.ones((60, 16)), "encoder.output_norm.bias": jnp.ones(15)}
    whole = padded(params, mesh)
    assert [array.shape for array in whole.values()] == [(64, 16), (15,)]
    assert whole[table].sum() == 60 * 16
    jax.tree.map(np.testing.assert_array_equal, without_padding(whole, params, mesh), params)


def test_every_parameter_has_a_rule():
    everything = config_of(OBJECTIVES, {"model": {"projector": "batchnorm"}})
    _, params, frozen = networks.build(everything, ENCODER, GENERATOR, VOCABULARY)
    mesh = make_mesh(everything)
    by_rules(params | frozen, mesh, everything)
    with pytest.raises(
        ValueError, match=r"no sharding rule covers the parameter encoder\.gate\.weights"
    ):
        by_rules({"encoder.gate.weights": params["projector.expand.kernel"]}, mesh, everything)


def test_each_device_holds_its_rows():
    mesh, batch = make_mesh(config_of()), random_batch(size=16)
    sharded = shard_batch(views_of(batch), mesh).input_ids
    for shard in sharded.addressable_shards:
        np.testing.assert_array_equal(shard.data[:, 0], batch["input_ids"][shard.index[0], 0])
        assert shard.data.shape[0] == 2


def device(number: int, process: int, **described) -> mock.Mock:
    return mock.Mock(spec=jax.Device, id=number, process_index=process, **described)


def tpu_slice(side: int) -> list[mock.Mock]:
    """Return the chips of a square of hosts with 2 x 2 chips each, numbered in rows over all hosts."""
    places = [(x, y) for y in range(side) for x in range(side)]
    described = {
        "platform": "tpu",
        "device_kind": "TPU v5 lite",
        "core_on_chip": 0,
        "slice_index": 0,
    }
    hosts = [y // 2 * (side // 2) + x // 2 for x, y in places]
    return [
        device(number, host, coords=(*place, 0), **described)
        for number, (host, place) in enumerate(zip(hosts, places, strict=True))
    ]


def gpu_nodes(nodes: int) -> list[mock.Mock]:
    """Return four GPUs a node, each node a slice of its own."""
    described = {"platform": "gpu", "device_kind": "H100"}
    return [
        device(index, index // 4, slice_index=index // 4, **described) for index in range(4 * nodes)
    ]


@pytest.mark.parametrize(
    ("devices", "model", "expected"),
    [
        (tpu_slice(4), 1, [[index // 4] for index in range(16)]),
        # the model axis stays within a host
        (tpu_slice(4), 2, [[index // 2] * 2 for index in range(8)]),
        (tpu_slice(4), 8, [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]),
        (gpu_nodes(2), 1, [[index // 4] for index in range(8)]),
        (gpu_nodes(2)[::-1], 4, [[0] * 4, [1] * 4]),
    ],
)
def test_each_process_has_its_devices_together(devices, model, expected, monkeypatch):
    """JAX's own order of a 4 x 4 slice begins with the hosts 0, 0, 1, 1, 1, 1, 0, 2; of two GPU nodes it has none."""
    mesh = make_mesh(config_of({"train": {"batch_size": 16}, "mesh": {"model": model}}), devices)
    assert [[one.process_index for one in row] for row in mesh.devices] == expected
    assert mesh.axis_types == (AxisType.Auto,) * 2
    fed = []
    for process in range(max(one.process_index for one in devices) + 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        fed += shards_of(mesh).local
    assert set(fed) == set(range(len(expected)))


def test_devices_of_one_process_are_in_the_order_of_jax():
    mesh = make_mesh(config_of({"train": {"batch_size": 16}}), tpu_slice(2))
    assert [one.id for one in mesh.devices.flat] == [0, 1, 3, 2]  # a ring


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([[0, 0], [0, 0]], Shards(range(2), 2)),
        ([[0], [0], [1], [1]], Shards(range(2), 4)),
        # a model axis over two processes: both feed all rows
        ([[0, 1], [0, 1]], Shards(range(2), 2)),
        ([[0, 1], [2, 3]], Shards(range(1), 2)),
        ([[1]], "no device"),
        ([[0], [1], [0]], "not neighbours"),
    ],
)
def test_a_process_feeds_the_rows_of_its_devices(processes, expected):
    devices = np.vectorize(lambda process: mock.Mock(process_index=process), otypes=[object])(
        processes
    )
    shape = dict(zip(("data", "model"), devices.shape, strict=True))
    mesh = mock.Mock(spec=Mesh, devices=devices, axis_names=("data", "model"), shape=shape)
    if isinstance(expected, Shards):
        assert shards_of(mesh) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        shards_of(mesh)
