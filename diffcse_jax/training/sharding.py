"""The device mesh and where arrays live on it: batches are split over the data axis, everything else is replicated."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diffcse_jax.config import Config
from diffcse_jax.errors import ConfigError


def make_mesh(config: Config) -> Mesh:
    """A mesh with one axis, `data`, over all devices of all hosts (or the first `mesh.data` of them).

    Raises:
        ConfigError: more devices asked for than there are, or a batch that does not split evenly.
    """
    available = jax.devices()
    count = config.mesh.data or len(available)
    if count > len(available):
        raise ConfigError(f"mesh.data={count}, but there are {len(available)} devices")
    sizes = {"train.batch_size": config.train.batch_size}
    if config.train.chunk_size:
        sizes["train.chunk_size"] = config.train.chunk_size
    if config.trains_generator_head:
        sizes["generator.head_batch_size"] = config.generator.head_batch_size
    for key, size in sizes.items():
        if size % count:
            raise ConfigError(f"{key}={size} is not divisible by the {count} devices of the mesh")
    # Auto: under Explicit axes the in-batch similarity matrix is a type error.
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=available[:count])


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def shard_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """A global batch from the rows of this process, split over the data axis."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
