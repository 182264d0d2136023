"""Several processes, stop signals, messages, progress and the cache of compiled programs."""

import atexit
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal

import jax
import numpy as np
import tqdm
from jax.experimental import multihost_utils

from diffcse_jax import errors
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.errors import ConfigError, UserError, counted, printable, printable_message
from diffcse_jax.io import cache_folder

INITIALIZATION_SECONDS = 100  # all processes must have started within this time
SIGN_SECONDS = 4  # between two signs of life of a process
# A process that is silent for this long ends the others. Long work of other libraries may hold
# Python's lock, and silence a process that is well.
SILENCE_SECONDS = 60
# JAX ends the others between half of this time and all of it, with messages of its own.
HEARTBEAT_SECONDS = 180
# A finished process waits this long for the others, because its exit would end them.
SHUTDOWN_SECONDS = 30
DECISION_SECONDS = 7 * 24 * 3600  # how long processes wait for work that the first one does alone
# Where there is no terminal, progress is a line after some seconds, and then from time to time.
SECONDS_BEFORE_FIRST_LINE = 5.0
SECONDS_BETWEEN_LINES = 30.0
SHORTEST_COMPILATION = 0.1  # seconds of a program that is kept for later processes

# Messages

Verbosity = Literal["quiet", "normal", "verbose"]
_verbosity: Verbosity = "normal"


def set_verbosity(verbosity: Verbosity) -> None:
    """Choose what is printed besides warnings and errors.

    These are notices and progress. With "verbose", libraries' logs are printed as well.
    """
    global _verbosity
    _verbosity = verbosity
    logging.basicConfig(
        level=logging.INFO if verbosity == "verbose" else logging.WARNING,
        force=verbosity == "verbose",
    )


def log_line(message: str, *, on_all: bool = False) -> None:
    """Print a line to standard error, above any progress bar.

    Only the first process prints, unless `on_all`. In quiet mode only lines that start with
    `warning:` are printed.
    """
    if (on_all or jax.process_index() == 0) and (
        _verbosity != "quiet" or message.startswith("warning:")
    ):
        tqdm.tqdm.write(printable_message(message), file=sys.stderr)


def report(ledger: Ledger) -> None:
    """Print what was read, and warn of what was lost or changed."""
    for line in ledger.account():
        log_line(line)


class _Bar(tqdm.tqdm):
    """A bar that shows the rate of `Progress`."""

    rate = 0.0  # units per second; 0: not known

    @property
    def format_dict(self) -> dict[str, Any]:
        speed = _speed(self.rate, self.unit)
        return super().format_dict | {"rate": self.rate, "speed": speed}


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Show progress on standard error, with the time that is left.

    It is a bar on a terminal, and lines elsewhere. `unit` is a plural in `s`. The bar appears after
    `delay` seconds.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None = None,
        *,
        done_before: int = 0,
        quiet: bool = False,
        delay: float = 0,
    ):
        what = printable(what)
        self._what, self._unit, self._total, self._quiet = what, unit, total, quiet
        self._done = done_before
        is_hidden = quiet or _verbosity == "quiet" or jax.process_index() > 0
        place = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}"
        if total is None:
            place = "{desc}: {n_fmt} {unit} [{elapsed}"
        self._bar = _Bar(
            desc=what,
            unit=unit,
            total=total,
            initial=done_before,
            dynamic_ncols=True,
            bar_format=place + "{speed}{postfix}]",
            disable=is_hidden or None,  # None: shown on terminals
            delay=delay,
        )
        self._begun = self._counted_from = time.monotonic()
        self._seconds, self._counted = 0.0, 0  # what the rate is made of
        self._is_counted = True
        self._next_line = self._begun + SECONDS_BEFORE_FIRST_LINE

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def leave_out(self) -> None:
        """Leave the time from the last update to the next one, a compilation, out of the rate."""
        self._is_counted = False

    def update(self, count: int, note: str = "") -> None:
        """Add this many to the count. A note, such as the latest loss, is shown next to it."""
        now = time.monotonic()
        self._done += count
        if self._is_counted:
            self._seconds += now - self._counted_from
            self._counted += count
        self._is_counted = True
        self._counted_from = now
        self._bar.rate = self._counted / self._seconds if self._seconds else 0.0
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count)
        if self._bar.disable and not self._quiet and now >= self._next_line:
            self._next_line = now + SECONDS_BETWEEN_LINES
            log_line(self._line(now - self._begun, note))

    def _line(self, elapsed: float, note: str) -> str:
        time_taken = tqdm.tqdm.format_interval(elapsed)
        rate = self._bar.rate
        speed = _speed(rate, self._unit) + (f", {note}" if note else "")
        if self._total is None:
            return f"{self._what}: {self._done} {self._unit} [{time_taken}{speed}]"
        left = tqdm.tqdm.format_interval((self._total - self._done) / rate) if rate else "?"
        share = 100 * self._done / max(self._total, 1)
        return (
            f"{self._what}: {share:3.0f}% {self._done}/{self._total} [{time_taken}<{left}{speed}]"
        )


def duration(seconds: float) -> str:
    """Return a duration such as `40 s`, `35 min` or `2 h 5 min`."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours:,} h {rest} min" if hours else f"{rest} min"


def _speed(rate: float, unit: str) -> str:
    """Return `, 2.50 steps/s` or `, 4.00 s/step`, or nothing while the rate is not known."""
    if not rate:
        return ""
    return f", {rate:.2f} {unit}/s" if rate >= 1 else f", {1 / rate:.2f} s/{unit.removesuffix('s')}"


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and reports of missing weights in the block."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def keep_compiled() -> None:
    """Keep compiled programs in the package's cache folder, so that later processes load them.

    This concerns all programs of this process. Nothing changes if the user has chosen a folder, or
    none, by $JAX_COMPILATION_CACHE_DIR or by JAX's setting `jax_compilation_cache_dir`, or if the
    package's cache folder cannot be written.
    """
    is_chosen = jax.config.values["jax_compilation_cache_dir"] is not None
    folder = cache_folder("compiled")
    if is_chosen or "JAX_COMPILATION_CACHE_DIR" in os.environ or not folder.is_absolute():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # An encoder's shape takes half a second. JAX would keep what takes a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_COMPILATION)


# Processes


def join() -> None:
    """Join the other processes of this job, if that has not been done.

    If they cannot be reached, raise a `ConfigError`. JAX finds the processes on TPU pods, GKE,
    Slurm and Open MPI. Elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name
    them.
    """
    if jax.distributed.is_initialized():
        return
    index, count = process_from_environment() or (None, None)

    def end_alone() -> None:
        address = os.environ.get("JAX_COORDINATOR_ADDRESS", "the address that the cluster gives")
        who = "this process" if index is None else f"process {index} of {count}"
        message = (
            f"error: after {INITIALIZATION_SECONDS} s {who} has not reached the others at "
            f"{address}. Check that all processes are running, can reach that port of process 0, "
            "and have the same JAX_COORDINATOR_ADDRESS."
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(ConfigError.exit_code)

    # JAX's call cannot be interrupted, and its own timeout prints a stack trace.
    timer = threading.Timer(INITIALIZATION_SECONDS, end_alone)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            num_processes=count,
            process_id=index,
            initialization_timeout=2 * INITIALIZATION_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the other processes were not found: {str(error).strip().splitlines()[0]} JAX knows "
            "them on TPU pods, GKE, Slurm and Open MPI; elsewhere set JAX_COORDINATOR_ADDRESS "
            "(host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
    finally:
        timer.cancel()
    if jax.process_count() > 1:
        _Watch(_started_witness())
        devices = counted(jax.device_count(), "device{s}")
        log_line(f"{jax.process_count()} processes take part, with {devices} in all")


def _distributed_state() -> Any:
    """Return JAX's state of the joined processes.

    Its `client` is a key-value store with barriers. The state is not public, and it is read here
    only. `multihost_utils.broadcast_one_to_all` cannot replace it: it is a collective, which fails
    on CPUs if one process comes 30 seconds later than the others. Decisions of the first process
    (reading data, scoring a model) often take longer.
    """
    from jax._src.distributed import global_state

    return global_state


def require_alone() -> None:
    """Raise an error if the environment describes several processes, but `distributed` is off."""
    _, count = process_from_environment() or (0, 1)
    if count > 1:
        raise ConfigError(
            f"JAX_NUM_PROCESSES={count}, but distributed=False: each of the {count} processes "
            "would train the whole run in the same workdir. Either set distributed=True, or unset "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )


def process_from_environment() -> tuple[int, int] | None:
    """Return JAX_PROCESS_ID and JAX_NUM_PROCESSES, or None if neither is set."""
    index, count = (os.environ.get(name, "") for name in ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"))
    if not index and not count:
        return None
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(
            f"JAX_PROCESS_ID={index} and JAX_NUM_PROCESSES={count}: expected an index from 0 and a "
            "larger number"
        )
    return int(index), int(count)


_decision_numbers = itertools.count()  # all processes make the same decisions in the same order


def decided_by_first(decide: Callable[[], Any]) -> Any:
    """Run a function on the first process only, and return its result on every process.

    The result is made of JSON values. All processes must call this. The others wait as long as the
    first process lives, however long the work takes. A `UserError` of the function is raised on
    every process, so that none waits for another one.
    """
    if jax.process_count() == 1:
        return decide()
    client = _distributed_state().client
    number = next(_decision_numbers)
    key = f"diffcse_jax/decisions/{number}"
    if jax.process_index() == 0:
        try:
            outcome = {"value": decide()}
        except UserError as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        client.key_value_set(key, json.dumps(outcome))
    client.wait_at_barrier(key, 1000 * DECISION_SECONDS)
    outcome = json.loads(client.blocking_key_value_get(key, 1000 * HEARTBEAT_SECONDS))
    if jax.process_index() == 0 and number:
        # All processes have read the previous decision.
        client.key_value_delete(f"diffcse_jax/decisions/{number - 1}")
    if "error" in outcome:
        raise getattr(errors, outcome["error"], UserError)(outcome["message"])
    return outcome["value"]


def _started_witness() -> Callable[[], None]:
    """Start a small process that prints a sentence if this one ends without running its code.

    If process 0 is killed, JAX ends the others from a thread in C++, which no Python code sees.

    Returns:
        Sends the witness away. Otherwise it speaks when this process has ended.
    """
    index, count = jax.process_index(), jax.process_count()
    sentence = (
        f"error: process {index} of {count} was ended. It was killed, or another process is lost "
        "and JAX ended it. Everything saved is intact; run the same command again to resume."
    )
    script = 'read -r word || printf "%s\\n" "$0" >&2'
    witness = subprocess.Popen(
        ["/bin/sh", "-c", script, sentence],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not end it
    )

    def send_away() -> None:
        witness.communicate(b"leave\n")

    atexit.register(send_away)
    return send_away


class _Watch:
    """Ends this process, with one sentence, when another process of the job is lost.

    JAX would end it later, and with pages of its own messages. There are two threads, because the
    store does not answer while the first process hangs.
    """

    FOLDER = "diffcse_jax/alive"  # in the key-value store, which the first process serves

    def __init__(self, send_away: Callable[[], None]) -> None:
        self._send_away = send_away  # the witness, before this process ends
        self._state = _distributed_state()
        # The last sign of life of each process (its host and a number), and when it came.
        count = self._state.num_processes
        self._signs = dict.fromkeys(range(count), ("unknown", time.monotonic()))
        self._patience = SILENCE_SECONDS
        self._stopped = threading.Event()
        atexit.register(self._stopped.set)  # runs before JAX closes the store
        for work in (self._speak, self._listen):
            threading.Thread(target=work, daemon=True).start()
        self._usual_hook = sys.excepthook
        sys.excepthook = self._on_error

    def _speak(self) -> None:
        client, process = self._state.client, self._state.process_id
        for number in itertools.count():
            # The first process may have ended, or may not answer in time.
            with contextlib.suppress(RuntimeError):
                sign = f"{socket.gethostname()} {number}"
                client.key_value_set(f"{self.FOLDER}/{process}", sign, allow_overwrite=True)
                for key, sign in client.key_value_dir_get(self.FOLDER):
                    other = int(key.rpartition("/")[2])
                    if sign != self._signs[other][0]:
                        self._signs[other] = sign, time.monotonic()
            if self._stopped.wait(SIGN_SECONDS):
                return

    def _listen(self) -> None:
        while not self._stopped.wait(1):
            # The first process comes first: without it, no other can be heard.
            for process, (sign, heard) in self._signs.items():
                silence = time.monotonic() - heard
                if process != self._state.process_id and silence > self._patience:
                    self._end(process, sign.partition(" ")[0], silence)

    def _end(self, process: int, host: str, silence: float) -> None:
        print(
            f"error: process {process} of {len(self._signs)}, on host {host}, is lost: it has been "
            f"silent for {silence:.0f} s. Everything saved is intact; run the same command again "
            "to resume.",
            file=sys.stderr,
            flush=True,
        )
        self._send_away()
        os._exit(1)  # without exit handlers, because JAX's waits for the lost process

    def _on_error(self, kind: type[BaseException], *error: Any) -> None:
        """Print an uncaught error, unless it comes from a lost process, which is named instead."""
        if issubclass(kind, Exception):
            self._patience = min(self._patience, 3 * SIGN_SECONDS)
            time.sleep(self._patience + 2)
        self._usual_hook(kind, *error)


# Stop signals


class StopRequest:
    """Whether work was asked to save and stop. Any thread may ask."""

    # This is not a threading.Event, because a signal handler that interrupts `set` would wait for
    # its lock forever.
    made = False

    def make(self) -> None:
        self.made = True

    def is_agreed(self, *, may_ask: bool) -> bool:
        """Return whether any process was asked to stop.

        Several processes ask one another, so that all stop together. All must call this with the
        same `may_ask`.
        """
        if jax.process_count() == 1:
            return self.made
        return may_ask and bool(multihost_utils.process_allgather(np.int32(self.made)).any())


@contextlib.contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """Yield a request that SIGINT or SIGTERM makes in the block. A second Ctrl-C stops at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.make()
        print("\nstopping after the steps already started; saving first", file=sys.stderr)

    with errors.handled([signal.SIGINT, signal.SIGTERM], on_signal):
        yield request


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGTERM in the block, as for Ctrl-C.

    Partial files are then removed.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with errors.handled([signal.SIGTERM], interrupt), errors.no_interruption_lost():
        yield
