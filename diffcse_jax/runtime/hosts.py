"""Processes that run one command together, on one host or many."""

import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.distributed import global_state  # it has no public name; Orbax reads it, too

from diffcse_jax import errors
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.runtime.watch import watch

INITIALIZATION_SECONDS = 100  # in which all processes must have come
HEARTBEAT_SECONDS = 60  # a process that is silent for so long ends the others
SHUTDOWN_SECONDS = 30  # for so long a process that has ended waits for the others, which its end then ends
DECISION_SECONDS = 7 * 24 * 3600  # for so long, if they live, processes wait for what the first of them does alone

_DECISIONS = "diffcse_jax/decisions"  # of the key-value store that the first process serves
_NUMBERS = itertools.count()  # of the decisions, the same on all processes


def join() -> None:
    """Joins the other processes: JAX finds them, or JAX_COORDINATOR_ADDRESS and its companions tell where they are.

    Where this process has joined them before, for an earlier run, it stays with them.

    Raises:
        ConfigError: there are none to be found, or they cannot be reached.
    """
    if jax.distributed.is_initialized():
        return
    index, count = process_from_environment() or (None, None)
    try:
        with _not_waiting_for_ever(index, count):
            jax.distributed.initialize(
                num_processes=count,
                process_id=index,
                initialization_timeout=2 * INITIALIZATION_SECONDS,  # it ends the process without a word for people
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the other processes were not found: {str(error).strip().splitlines()[0]} JAX knows them on TPU pods, "
            "GKE, Slurm and Open MPI; elsewhere set JAX_COORDINATOR_ADDRESS (host:port of the first), "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
    watch(HEARTBEAT_SECONDS)


@contextlib.contextmanager
def _not_waiting_for_ever(index: int | None, count: int | None) -> Iterator[None]:
    """Ends the process, with a paragraph, where the block takes longer than all processes may take to come."""

    def end() -> None:
        print(f"error: {_nobody_came(index, count)}", file=sys.stderr, flush=True)
        os._exit(ConfigError.exit_code)  # the block cannot be interrupted

    timer = threading.Timer(INITIALIZATION_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _nobody_came(index: int | None, count: int | None) -> str:
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "the address that the cluster gives")
    waited = f"after {INITIALIZATION_SECONDS} s"
    if index is None or count is None:
        return f"{waited} the processes of this job have not found one another: are all of them running?"
    if index == 0:
        return (
            f"{waited} process 0 of {count}, at {address}, has not been joined by all the others: are they running, "
            "and can they reach that port?"
        )
    return (
        f"{waited} process {index} of {count} has not reached process 0 at {address}: is that running, is the port "
        "open, and is JAX_COORDINATOR_ADDRESS the same for all?"
    )


def require_alone() -> None:
    """Refuses the environment of several processes: without `distributed` each of them would train the whole run.

    Raises:
        ConfigError: JAX_NUM_PROCESSES is more than 1, or JAX_PROCESS_ID and JAX_NUM_PROCESSES are no such pair.
    """
    _, count = process_from_environment() or (0, 1)
    if count > 1:
        raise ConfigError(
            f"JAX_NUM_PROCESSES={count} makes this one of {count} processes, but distributed=False lets each train "
            "alone in the same workdir: set distributed=True, or unset JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        )


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


def decided_by_first(decide: Callable[[], Any]) -> Any:
    """The decision of process 0, on all processes: each of them calls this, `decide` runs on the first alone.

    They wait for it however long it takes, and for nothing else than its life: not by a collective, which fails on CPUs
    where one of them comes 30 s later than the others.

    Args:
        decide: returns a value that JSON can hold.

    Raises:
        UserError: the error of `decide`, on every process, so that none waits for the others.
    """
    if jax.process_count() == 1:
        return decide()
    client: Any = global_state.client
    number = next(_NUMBERS)
    key = f"{_DECISIONS}/{number}"
    if jax.process_index() == 0:
        try:
            outcome = {"value": decide()}
        except UserError as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        client.key_value_set(key, json.dumps(outcome))
    client.wait_at_barrier(key, 1000 * DECISION_SECONDS)
    outcome = json.loads(client.blocking_key_value_get(key, 1000 * HEARTBEAT_SECONDS))
    if jax.process_index() == 0 and number:
        client.key_value_delete(f"{_DECISIONS}/{number - 1}")  # whoever has come to this one has read that
    if "error" in outcome:
        raise getattr(errors, outcome["error"], UserError)(outcome["message"])
    return outcome["value"]


def wait_for_all() -> None:
    """Waits until all processes have come here, however long that takes: the first to exit would end the others."""
    decided_by_first(lambda: None)
