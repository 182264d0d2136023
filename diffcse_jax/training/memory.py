"""Whether whole batches fit into memory, so that they need not be cut into chunks."""

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
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.hosts import log_line
from diffcse_jax.models.layers import Params
from diffcse_jax.training.networks import Built
from diffcse_jax.training.sharding import packing_of, shard_batch
from diffcse_jax.training.step import loss_of_step, root_key

# A step needs more memory than the values that its forward pass keeps: 1.34 times as much in the
# plan of XLA for `adapt` on a CPU (docs/scaling.md).
PER_KEPT_BYTE = 2


def without_needless_chunks(
    config: Config, source: BatchSource, built: Built, mesh: Mesh
) -> tuple[Config, BatchSource]:
    """Decide what `train.chunking=auto` left open, and say so.

    Returns:
        The configuration and the batches, without chunks if a whole batch surely fits into memory.
    """
    train = config.train
    if train.chunking != "auto" or train.chunks == 1:
        return config, source
    whole = dataclasses.replace(
        config, train=dataclasses.replace(train, chunk_size=0, chunking="off")
    )
    packing = packing_of(whole, mesh, anchors=whole.needs("anchors"))
    whole_batches = dataclasses.replace(source, packing=packing)
    batch = shard_batch(whole_batches[whole_batches.largest], mesh)
    kept = kept_bytes(whole, built, batch, mesh) // mesh.size
    # The devices of a CPU share its memory.
    sharing = len(mesh.local_devices) if mesh.devices.flat[0].platform == "cpu" else 1
    needed = PER_KEPT_BYTE * kept * sharing

    def fits() -> bool:
        free = free_memory(mesh.local_devices[0])
        need = f"memory: batches of {train.batch_size} sentences may need {needed / 1e9:.1f} GB"
        if free is None:
            log_line(f"{need}, and nothing says how much is free. {chunks}")
        elif free < needed:
            log_line(f"{need}, and {free / 1e9:.1f} GB are free. {chunks}")
        return free is not None and free >= needed

    chunks = (
        f"They are computed in chunks of {train.batch_size // train.chunks}, which takes longer "
        "(train.chunking=auto)"
    )
    return (whole, whole_batches) if hosts.decided_by_first(fits) else (config, source)


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
    if statistics := device.memory_stats():
        return statistics["bytes_limit"] - statistics["bytes_in_use"]
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        available = 1024 * int(fields["MemAvailable"].split()[0])
        return min([available, *_left_in_groups(root)])
    return None


def _left_in_groups(root: Path) -> list[int]:
    """Return what the control groups of this process leave, of both versions of them."""
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, used = "memory.max", "memory.current"
        if controllers:
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        for folder in itertools.chain([group], group.parents):
            # In a container, the folders of its group may be at the top.
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                left.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
            if folder == top:
                break
    return left
