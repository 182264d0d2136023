"""The devices of workers: several runs at a time on one host must not share a GPU."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping

from diffcse_jax.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(workers: int) -> list[dict[str, str]]:
    """The environment variables of each worker's processes.

    One worker has all devices. Several share the host's NVIDIA GPUs evenly, each having its own; on other devices they
    all see the same.

    Raises:
        ConfigError: fewer than one worker, or fewer GPUs than workers.
    """
    if workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {workers}")
    own = dict(os.environ)
    gpus = visible_gpus(own) if workers > 1 else []
    if not gpus:
        return [own] * workers
    if len(gpus) < workers:
        raise ConfigError(f"--workers {workers}: each worker needs a GPU of its own, and there are {len(gpus)}")
    bounds = [worker * len(gpus) // workers for worker in range(workers + 1)]
    return [own | {VISIBLE: ",".join(gpus[start:end])} for start, end in itertools.pairwise(bounds)]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that JAX would use, as CUDA_VISIBLE_DEVICES names them."""
    if "cpu" in environment.get("JAX_PLATFORMS", "").split(",")[:1]:
        return []
    if VISIBLE in environment:
        return [gpu.strip() for gpu in environment[VISIBLE].split(",") if gpu.strip() not in ("", "-1")]
    if not (command := shutil.which("nvidia-smi")):
        return []
    query = [command, "--query-gpu=index", "--format=csv,noheader"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False)
    return listing.stdout.split() if listing.returncode == 0 else []
