"""The device mesh and where arrays live on it.

The mesh has two axes. Batches are split over `data`, and so are the optimizer's moments: each
device sums and applies its part of the gradients, then all gather the new parameters. That moves as
many bytes as summing whole gradients on every device, and divides the time and memory of the update
by the number of devices (Xu et al. 2020, arXiv:2004.13336). Parameters are copied to every device,
unless the configuration splits them over `data` (`mesh.fully_sharded`) or over `model`
(`mesh.model` above 1).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.data.batches import Packing, Shards
from diffcse_jax.errors import ConfigError, counted
from diffcse_jax.models.layers import Params

# Packing pays if at most this many sixteenths of the positions are tokens: measured on CPUs,
# estimated by the compiler for TPUs (docs/scaling.md).
PACKED = {"cpu": 15, "tpu": 14}
# The axes over which each dimension of a parameter may be split. The first rule that matches a name
# counts. `model` splits heads, intermediate units and the vocabulary. `data` splits what is left:
# rows where possible, because parts of rows are copied before they move between devices. An axis
# splits the first dimension that it divides.
RULES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (r"embeddings\.word\.embedding|\.decoder", (("model", "data"), ("data",))),
    (r"\.embedding", (("data",), ("data",))),
    (r"\.(query|key|value|intermediate|gate)\.kernel", (("data",), ("model",))),
    (r"\.(query|key|value|intermediate|gate)\.bias", (("model",),)),
    (r"\.output\.kernel", (("model", "data"), ())),
    (r"\.kernel", (("data",), ())),
    (r"(bias|scale)", ((),)),
)


def make_mesh(config: Config, available: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh with the axes `data` and `model` over all devices.

    If `mesh.data` is set, only the first `mesh.data` x `mesh.model` devices are used. Devices of
    one process are in JAX's order, which suits the connections of a slice. Devices of several
    processes follow one another process by process, because each process feeds the rows of its own
    devices. The model axis then stays within a host if its size divides the devices of a host.

    Args:
        config: Gives the sizes.
        available: Devices, which may belong to a topology that is only compiled for. None: the
            devices of all hosts.
    """
    available = jax.devices() if available is None else available
    model = config.mesh.model
    train = config.train
    data = config.mesh.data or len(available) // model
    if not 0 < data * model <= len(available):
        asked = f"mesh.data={config.mesh.data}, mesh.model={model}"
        raise ConfigError(
            f"{asked}: this run has {counted(len(available), 'device{s}')}. The product of the "
            "two must be at most that."
        )
    sizes = {f"train.batch_size={train.batch_size}": train.batch_size}
    if train.chunks > 1:
        chunk = train.batch_size // train.chunks
        of = f"train.batch_size={train.batch_size}, train.chunk_size={train.chunk_size}"
        sizes[f"the chunk of {chunk} sentences ({of}; 0 turns chunks off)"] = chunk
    if config.trains_generator_head:
        head = config.generator.head_batch_size
        sizes[f"generator.head_batch_size={head}"] = head
    for name, size in sizes.items():
        if size % data:
            raise ConfigError(
                f"{name} is not divisible by the {data} devices of the mesh's data axis"
            )
    # With explicit axes, the matrix of a batch's similarities would be a type error.
    names = ("data", "model")
    types = (AxisType.Auto,) * 2
    if len({device.process_index for device in available}) == 1:
        return jax.make_mesh(
            (data, model), names, axis_types=types, devices=available[: data * model]
        )
    # jax.make_mesh has no order for hosts of several slices, as GPU hosts appear.
    ordered = sorted(available, key=lambda device: (device.process_index, device.id))
    devices = np.array(ordered[: data * model], object)
    return Mesh(devices.reshape(data, model), names, axis_types=types)


def resolved(config: Config, mesh: Mesh) -> Config:
    """Return the configuration with each `auto` replaced by the choice for the mesh's devices.

    That of `train.chunking` stays, because it depends on the batches (`training.memory`).
    """
    platform = mesh.devices.flat[0].platform
    train = config.train
    precision = config.precision
    if train.packing == "auto":
        train = dataclasses.replace(train, packing="on" if platform in PACKED else "off")
    if train.recompute == "auto":
        train = dataclasses.replace(train, recompute="on" if platform == "cpu" else "off")
    if precision == "auto":
        precision = "float32" if platform == "cpu" else "bfloat16"
    return dataclasses.replace(config, train=train, precision=precision)


def packing_of(
    config: Config, mesh: Mesh, *, chunks: int = 1, anchors: bool = False
) -> Packing | None:
    """Return how batches are packed for the devices of a mesh; None if `train.packing` is off.

    With `anchors`, the networks also process the anchors alone.
    """
    if config.train.packing != "on":
        return None
    return Packing(chunks, anchors, PACKED.get(mesh.devices.flat[0].platform, max(PACKED.values())))


def in_precision(precision: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose products of float32 matrices are in float32, if that is wanted.

    Accelerators multiply them in lower precision by default.
    """
    return jax.default_matmul_precision("highest")(function) if precision == "float32" else function


def shards_of(mesh: Mesh) -> Shards:
    """Return the part of every batch that this process feeds.

    It has the rows of its devices, which must be neighbours.
    """
    return _shards_of(mesh, jax.process_index())


@functools.cache  # it walks over all devices, and each batch asks
def _shards_of(mesh: Mesh, here: int) -> Shards:
    processes = [[device.process_index for device in devices] for devices in mesh.devices]
    local = [row for row, indices in enumerate(processes) if here in indices]
    if not local or local[-1] - local[0] + 1 != len(local):
        problem = "has no device in the mesh"
        if local:
            problem = "has devices that are not neighbours on the data axis"
        raise ConfigError(
            f"mesh.data={mesh.shape['data']}, mesh.model={mesh.shape['model']}: process {here} "
            f"{problem}. Set mesh.data=0 and a mesh.model that divides the devices of a host, or "
            "that such devices divide."
        )
    return Shards(range(local[0], local[-1] + 1), len(mesh.devices))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding with which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_rules(state: PyTree, mesh: Mesh, config: Config) -> PyTree:
    """Return the sharding of every array of a train state, or of a dict of parameters by name."""

    def sharding(
        path: tuple, array: jax.Array | np.ndarray | jax.ShapeDtypeStruct
    ) -> NamedSharding:
        if not isinstance(path[-1], jax.tree_util.DictKey):
            return replicated(mesh)  # counters
        of_optimizer = path[0] == jax.tree_util.GetAttrKey("opt_state")
        over_data = of_optimizer or config.mesh.fully_sharded
        return _by_name(path[-1].key, array.shape, mesh, over_data=over_data)

    return jax.tree_util.tree_map_with_path(sharding, state)


def gathered(params: Params, mesh: Mesh) -> Params:
    """Gather parameters from the data axis, as layers need them, inside a compiled function.

    Without this, XLA would move activations instead of parameters that the data axis splits
    (`mesh.fully_sharded`).
    """
    whole = {
        name: _by_name(name, array.shape, mesh, over_data=False) for name, array in params.items()
    }
    return jax.lax.with_sharding_constraint(params, whole)


def split_over_data(params: Params, mesh: Mesh) -> Params:
    """Split gradients or parameters as the optimizer's moments are, inside a compiled function."""
    parts = {
        name: _by_name(name, array.shape, mesh, over_data=True) for name, array in params.items()
    }
    return jax.lax.with_sharding_constraint(params, parts)


def padded(params: Params, mesh: Mesh) -> Params:
    """Append rows of zeros where the mesh would not divide the rows of an array by the rules.

    A vocabulary has any number of tokens. Splitting the columns of its table would be slow.
    """

    def pad(name: str, array: jax.Array) -> jax.Array:
        axes = _axes_of(name)[0]
        parts = math.prod(mesh.shape[axis] for axis in axes) if "data" in axes else 1
        missing = -array.shape[0] % parts
        return jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1))) if missing else array

    return {name: pad(name, array) for name, array in params.items()}


def without_padding(params: Params, like: Params, mesh: Mesh) -> Params:
    """Undo `padded`: return the rows that the arrays of `like` have."""
    rows = {name: len(array) for name, array in like.items() if len(array) < len(params[name])}
    whole = gathered({name: params[name] for name in rows}, mesh)
    return params | {name: array[: rows[name]] for name, array in whole.items()}


def _axes_of(name: str) -> tuple[tuple[str, ...], ...]:
    axes = next((axes for pattern, axes in RULES if re.search(pattern + "$", name)), None)
    if axes is None:
        raise ValueError(f"no sharding rule covers the parameter {name}")
    return axes


def _by_name(name: str, shape: tuple[int, ...], mesh: Mesh, *, over_data: bool) -> NamedSharding:
    split: list[tuple[str, ...]] = []
    for of_dimension, size in zip(_axes_of(name), shape, strict=True):
        splitting: tuple[str, ...] = ()
        for axis in of_dimension:
            parts = math.prod(mesh.shape[each] for each in (*splitting, axis))
            used = any(axis in axes for axes in split)
            allowed = (axis == "model" or over_data) and not used
            if allowed and mesh.shape[axis] > 1 and size % parts == 0:
                splitting += (axis,)
        split.append(splitting)
    while split and not split[-1]:  # the form that compiled functions return
        split.pop()
    named = (axes if len(axes) > 1 else next(iter(axes), None) for axes in split)
    return NamedSharding(mesh, PartitionSpec(*named))


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Return a global batch from the rows of this process, split over the data axis."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    shards = shards_of(mesh)

    def placed(local: np.ndarray) -> jax.Array:
        rows = len(local) * shards.total // len(shards.local)
        return jax.make_array_from_process_local_data(sharding, local, (rows, *local.shape[1:]))

    return jax.tree.map(placed, batch)
