"""Whether whole batches fit into memory, or are cut into chunks (`train.chunking=auto`)."""

import contextlib
import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from diffcse_jax import hosts
from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.config.groups import AUTOMATIC_CHUNK
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.hosts import log_line
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.checkpoints import saved_steps
from diffcse_jax.run_folder.finding import CHECKPOINTS
from diffcse_jax.run_folder.records import read_starts
from diffcse_jax.training.networks import Built
from diffcse_jax.training.sharding import shard_batch
from diffcse_jax.training.step import loss_of_step, root_key

# A step needs more memory than the values that its forward pass keeps: 1.34 times as much in the
# plan of XLA for `adapt` on a CPU (docs/scaling.md).
PER_KEPT_BYTE = 2


def fitted_to_memory(
    config: Config, source: BatchSource, built: Built, *, mesh: Mesh, workdir: Path
) -> tuple[BatchSource, int]:
    """Cut batches into chunks if `train.chunking=auto` asks for that, and say so.

    A resumed run keeps its chunks, so that its results stay the same.

    Returns:
        The batches, and the size of their chunks: the largest equal ones of at most
        `AUTOMATIC_CHUNK` sentences. 0: as the configuration says.
    """
    train = config.train
    if train.chunking != "auto" or train.chunk_size or train.batch_size <= AUTOMATIC_CHUNK:
        return source, 0
    batch = shard_batch(source[source.largest], mesh)
    kept = kept_bytes(config, built, batch, mesh) // mesh.size
    # The devices of a CPU share its memory.
    sharing = len(mesh.local_devices) if mesh.devices.flat[0].platform == "cpu" else 1
    needed = PER_KEPT_BYTE * kept * sharing
    unit = mesh.shape["data"]
    sizes = range(unit, AUTOMATIC_CHUNK + 1, unit)
    largest = max((size for size in sizes if train.batch_size % size == 0), default=0)

    def choose() -> int:
        before = read_starts(workdir) if saved_steps(workdir / CHECKPOINTS) else []
        kept_size = before[-1].get("devices", {}).get("chunk_size") if before else 0
        if kept_size and kept_size % unit == 0:
            return int(kept_size)
        free = free_memory(mesh.local_devices[0])
        if free is not None and free >= needed:
            return 0
        known = "the free memory is not known"
        if free is not None:
            known = f"{free / 1e9:.1f} GB are free"
        small = largest < AUTOMATIC_CHUNK / 4
        then = f"They are computed in chunks of {largest}, which takes longer"
        if small:
            then = f"If it runs out, choose a train.batch_size that {AUTOMATIC_CHUNK} divides"
        log_line(
            f"memory: batches of {train.batch_size} sentences may need {needed / 1e9:.1f} GB, and "
            f"{known}. {then} (train.chunking=auto)"
        )
        return 0 if small else largest

    chunk_size = int(hosts.decided_by_first(choose))
    if chunk_size and source.packing:
        packing = source.packing._replace(chunks=train.batch_size // chunk_size)
        source = dataclasses.replace(source, packing=packing)
    return source, chunk_size


def kept_bytes(config: Config, built: Built, batch: Batch, mesh: Mesh) -> int:
    """Return the bytes that the forward pass of a step keeps for its backward pass.

    They are those of all devices together. Nothing is computed.
    """

    def kept(params: Params, frozen: Params, batch: Batch, root: PRNGKeyArray) -> PyTree:
        step = jnp.zeros([], jnp.int32)
        loss = loss_of_step(built.networks, config, mesh, step, frozen, batch=batch, root=root)
        return jax.vjp(loss, params, has_aux=True)[1]

    arrays = jax.eval_shape(kept, built.params, built.frozen, batch, root_key(config))
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def free_memory(device: jax.Device, root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that are free on a device; None if nothing says so.

    For a CPU, that is what Linux calls available, within the limits of a container or a batch
    system (control groups).
    """
    with contextlib.suppress(OSError, LookupError, ValueError):
        if device.platform != "cpu":
            statistics = device.memory_stats() or {}
            return statistics["bytes_limit"] - statistics["bytes_in_use"]
        available = 1024 * _fields(root / "proc/meminfo")["MemAvailable"]
        return min([available, *_left_in_groups(root)])
    return None


def _left_in_groups(root: Path) -> list[int]:
    """Return what the control groups of this process leave, of both versions of them.

    Files that the system has cached there count as free.
    """
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, used, cached = "memory.max", "memory.current", "inactive_file"
        if controllers:
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = f"total_{cached}"
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        for folder in itertools.chain([group], group.parents):
            # In a container, the folders of its group may be at the top.
            with contextlib.suppress(OSError, LookupError, ValueError):  # "max" is no limit
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                left.append(free + _fields(folder / "memory.stat")[cached])
            if folder == top:
                break
    return left


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines such as `inactive_file 1024` or `MemFree: 5000 kB`."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(value) for name, value, *_ in lines}
