"""Processes and devices: several processes, signals, progress and compiled programs."""

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import tqdm
from jax._src.distributed import global_state  # it has no public name; Orbax reads it, too

from diffcse_jax import errors
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.io import cache_folder

# Processes


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


# Silent processes


_FOLDER = "diffcse_jax/alive"  # of the key-value store that the first process serves


class Watch:
    """Lets the other processes know that this one lives, and tells who of them does not.

    Args:
        index: of this process.
        count: of all.
        patience: seconds of silence after which a process is named.
        end: seconds of silence after which JAX ends the others, for the message.
    """

    def __init__(self, index: int, count: int, *, patience: float, end: float):
        self._index, self._count, self._patience, self._end = index, count, patience, end
        self._host = socket.gethostname()
        self._stopped = threading.Event()
        self._heard = {other: ("", time.monotonic()) for other in range(count)}  # latest words, and since when
        self._answered = time.monotonic()  # the first process, which serves the words of all
        self._told: set[int] = set()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._speak, self._listen)]

    def start(self) -> None:
        """Goes on until the interpreter ends."""
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)  # before JAX lets go of the store, which was registered earlier

    def stop(self) -> None:
        """Ends both threads, unless the first process keeps one waiting."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=1)

    def _speak(self) -> None:
        """Says that this process lives, and hears the others."""
        for number in itertools.count():
            try:
                client: Any = global_state.client  # there is one, once the processes have met
                client.key_value_set(f"{_FOLDER}/{self._index}", f"{self._host} {number}", allow_overwrite=True)
                self._hear(dict(client.key_value_dir_get(_FOLDER)), time.monotonic())
            except RuntimeError:  # the first process has ended, or does not answer in time
                pass
            if self._stopped.wait(self._patience / 5):
                return

    def _hear(self, words: Mapping[str, str], now: float) -> None:
        self._answered = now
        for key, said in words.items():
            other = int(key.rpartition("/")[2])
            if said != self._heard[other][0]:
                self._heard[other] = (said, now)
                self._told.discard(other)

    def _listen(self) -> None:
        while not self._stopped.wait(self._patience / 5):
            for line in self.silent(time.monotonic()):
                print(line, file=sys.stderr, flush=True)

    def silent(self, now: float) -> list[str]:
        """A line for each process that has become silent."""
        since = {other: heard for other, (_, heard) in self._heard.items()}
        if now - self._answered > self._patience:  # then nobody can be heard
            since = {0: self._answered}
        silent = [other for other in since if now - since[other] > self._patience]
        new = [other for other in silent if other not in (self._index, *self._told)]
        self._told.update(new)
        return [
            f"warning: process {other} of {self._count}, on host {self._host_of(other)}, has been silent for "
            f"{now - since[other]:.0f} s: it hangs, or cannot be reached; after {self._end:.0f} s the others end. What "
            "was saved is whole: the same command goes on from there"
            for other in new
        ]

    def _host_of(self, other: int) -> str:
        return self._heard[other][0].partition(" ")[0] or "unknown"


def watch(heartbeat: float) -> None:
    """Names processes that are silent for half of the time after which JAX ends the others."""
    if global_state.num_processes > 1:
        index, count = global_state.process_id, global_state.num_processes
        Watch(index, count, patience=heartbeat / 2, end=heartbeat).start()


# Signals


PAUSE = 0.1  # seconds until an interruption that was dropped is sent again


class StopRequest:
    """Whether work was asked to stop."""

    def __init__(self) -> None:
        self.made = False

    def make(self) -> None:
        """Asks it to stop as soon as what it has done is saved; from any thread."""
        self.made = True


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM in the block raises `KeyboardInterrupt`, as Ctrl-C does, so that what is partial is cleaned up.

    Python drops what is raised while it collects garbage, where JAX has a callback: such an interruption comes again.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled([signal.SIGTERM], interrupt), _dropped_interruptions_sent_again():
        yield


@contextlib.contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """A request that SIGINT or SIGTERM in the block makes; a second Ctrl-C stops at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.make()
        print("\nstopping soon; saving first", file=sys.stderr)

    with _handled([signal.SIGINT, signal.SIGTERM], on_signal):
        yield request


@contextlib.contextmanager
def _dropped_interruptions_sent_again() -> Iterator[None]:
    """Each as SIGTERM, which the block handles, unlike SIGINT where a shell has it ignored."""
    main, usual = threading.main_thread(), sys.unraisablehook
    if threading.current_thread() is not main or main.ident is None:
        yield
        return
    timers: list[threading.Timer] = []

    def hook(unraisable: "sys.UnraisableHookArgs", /) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            timers.append(threading.Timer(PAUSE, signal.pthread_kill, (main.ident, signal.SIGTERM)))
            timers[-1].start()
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()


@contextlib.contextmanager
def _handled(signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not of Python


# Progress


SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """A context manager that counts and tells, on stderr.

    Args:
        what: is done, as `embedding`.
        unit: what is counted, in the plural.
        total: how many there are; None where that is not known.
        quiet: report nothing.
    """

    def __init__(self, what: str, unit: str, total: int | None = None, *, quiet: bool = False):
        self._what, self._unit, self._total, self._quiet = what, unit, total, quiet
        self._done = 0
        self._bar = tqdm.tqdm(desc=what, unit=f" {unit}", total=total, disable=quiet or None)
        self._begun = self._told = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Tells of so many more."""
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and not self._quiet and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            of = f" of {self._total:,}" if self._total else ""
            rate = self._done / (now - self._begun)
            print(f"{self._what}: {self._done:,}{of} {self._unit}, {rate:,.0f} a second", file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        """Writes a line, above the bar if there is one."""
        self._bar.write(message, file=sys.stderr)


def log_line(message: str) -> None:
    """Print a line to standard error, above any progress bar, on the first process only."""
    if jax.process_index() == 0:
        tqdm.tqdm.write(message, file=sys.stderr)


# Libraries


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of loading weights in the block, and no tables of those that a folder lacks."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# Compiled programs


def keep_compiled() -> None:
    """Keeps what takes long to compile in the package's cache folder; $JAX_COMPILATION_CACHE_DIR names another one."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # an encoder's shape takes half a second
