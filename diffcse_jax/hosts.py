"""Processes that run one command together, on one host or many."""

import os

import jax

from diffcse_jax.errors import ConfigError

HEARTBEAT_SECONDS = 60  # a process that is silent for so long ends the others


def join() -> None:
    """Joins the other processes: JAX finds them, or JAX_COORDINATOR_ADDRESS and its companions tell where they are.

    Raises:
        ConfigError: there are none to be found, or they cannot be reached.
    """
    index, count = process_from_environment() or (None, None)
    try:
        jax.distributed.initialize(num_processes=count, process_id=index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the other processes were not found: {str(error).strip().splitlines()[0]} JAX knows them on TPU pods, "
            "GKE, Slurm and Open MPI; elsewhere set JAX_COORDINATOR_ADDRESS (host:port of the first), "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error


def process_from_environment() -> tuple[int, int] | None:
    """JAX_PROCESS_ID and JAX_NUM_PROCESSES; None where neither is set.

    Raises:
        ConfigError: one is set without the other, or they are no number from 0 and a larger one.
    """
    index, count = os.environ.get("JAX_PROCESS_ID"), os.environ.get("JAX_NUM_PROCESSES")
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ConfigError("JAX_PROCESS_ID and JAX_NUM_PROCESSES go together, and only one of them is set")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(
            f"JAX_PROCESS_ID={index} with JAX_NUM_PROCESSES={count}: expected a number from 0 below the other"
        )
    return int(index), int(count)
