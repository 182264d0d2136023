"""Devices for which programs can be compiled without having them: TPU slices, and one GPU.

The TPU's compiler comes with the package `libtpu` (the extra `compile`; Google Cloud Platform Terms
of Service), and runs on any Linux machine. A GPU needs JAX's CUDA plugin (`jax[cuda13]`) and a
description of the device.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from diffcse_jax.errors import ConfigError


class Chip(NamedTuple):
    """A kind of chip."""

    kind: str  # JAX's name
    memory_bytes: int  # that the compiler allows a program
    dimensions: int  # of the torus that connects the chips of a slice


TPUS = {
    "v5e": Chip("TPU v5 lite", int(15.75 * 2**30), 2),
    "v5p": Chip("TPU v5", int(95.73 * 2**30), 3),
    "v6e": Chip("TPU v6 lite", int(31.24 * 2**30), 2),
}
H100 = Chip("H100 80GB HBM3", 80 * 10**9, 1)
CHIPS_OF_A_HOST = (2, 2, 1)
H100_DESCRIPTION = Path(__file__).with_name("h100.txtpb")


class Target(NamedTuple):
    """Devices of one kind, which need not exist here."""

    name: str
    chip: Chip
    devices: Sequence[jax.Device]


def prepare_environment() -> None:
    """Make JAX compile for TPUs and GPUs on a machine without any. Call this before JAX is used."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # for arrays, which the devices of a topology cannot hold
    # There is no metadata server to ask for the machine's TPUs.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # which would need a driver
    # Nobody owns a TPU, so several processes may compile.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")


def find(name: str) -> Target:
    """Return the devices of a target.

    Args:
        name: `v5e:4x4`, `v5p:2x2x1`, `v6e:1x1`, ... or `h100`.

    Raises:
        ConfigError: The name is unknown, or its compiler is not installed.
    """
    if name == "h100":
        return Target(name, H100, _gpu())
    kind, _, shape = name.partition(":")
    chip = TPUS.get(kind)
    if chip is None or not re.fullmatch(r"\d+" + r"x\d+" * (chip.dimensions - 1), shape):
        raise ConfigError(
            f"--target {name}: unknown. Use v5e:AxB, v6e:AxB or v5p:AxBxC (chips), or h100"
        )
    sizes = [int(size) for size in shape.split("x")] + [1] * (3 - chip.dimensions)
    host = [min(size, most) for size, most in zip(sizes, CHIPS_OF_A_HOST, strict=True)]
    return Target(name, chip, _tpus(name, host))


def _tpus(name: str, chips_of_a_host: list[int]) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--target {name} needs the TPU's compiler: pip install libtpu (Google Cloud Platform "
            "Terms of Service)"
        ) from error
    try:
        topology = topologies.get_topology_desc(
            platform="tpu",
            topology_name=name,
            chips_per_host_bounds=tuple(chips_of_a_host),
            num_slices=1,
        )
    except Exception as error:
        raise ConfigError(
            f"--target {name}: libtpu does not know this slice ({str(error).splitlines()[0]})"
        ) from error
    return topology.devices


def _gpu() -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H100_DESCRIPTION.read_text(), topology="1x1x1"
        )
    except Exception as error:
        raise ConfigError(
            "--target h100 needs JAX's CUDA plugin: pip install 'jax[cuda13]' "
            f"({str(error).splitlines()[0]})"
        ) from error
    return topology.devices
