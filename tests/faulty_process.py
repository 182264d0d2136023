"""Commands of the package in processes to which a fault happens: a signal, a disk that is full or read-only.

A worker is a process that runs commands one after the other, so that what is compiled once serves all of them. It is
forked from this one, which has imported everything and never computes, and takes the place of one that was killed. A
library that is loaded before libc (faulty_files.c) counts its operations on files and lets one of them fail.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LONGEST = 900  # seconds after which a command hangs
SOURCE = Path(__file__).with_name("faulty_files.c")
LIBRARY = "DIFFCSE_FAULTY_FILES"  # the variable that names the loaded library


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a command: a signal or, from then on, errors; at a file operation or after some computing."""

    signal: int = 0
    error: int = 0
    operation: int = 0  # number of the operation below the folder, from 1
    seconds: float = 0.0  # or so much computing


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # negative if a signal ended the process; None if it hung
    output: str
    operations: list[tuple[int, str, str]]  # number, name and path of those that were recorded
    seconds: float  # of computing


def load_library(folder: Path) -> None:
    """Compiles the library and starts this program again with it, unless that is done."""
    if os.environ.get(LIBRARY):
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("faults are injected by a library in C, and there is no compiler `cc`")
    library = folder / "faulty_files.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lrt"]
    subprocess.run(command, check=True)
    os.environ |= {LIBRARY: str(library), "LD_PRELOAD": str(library)}
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Worker:
    """Runs commands, one at a time, in a process that is forked anew after one that died.

    Args:
        commands: functions by their names; each returns an exit code.
        prepare: called first in a new process.
    """

    def __init__(self, commands: Mapping[str, Callable[..., int]], prepare: Callable[[], None]):
        self._commands, self._prepare = commands, prepare
        self.process, self._connection = 0, None

    def run(
        self, command: str, *arguments: Any, folder: Path, fault: Fault | None = None, every: bool = False
    ) -> Ended:
        """Runs a command, and counts operations below the folder. With `every`, records all of them."""
        if self._connection is None:
            self._start()
        log, record = folder.parent / "log", folder.parent / "record"
        log.write_bytes(b"")
        record.write_bytes(b"")
        self._connection.send((command, arguments, folder, fault, every, log, record))
        code, seconds = None, 0.0
        if self._connection.poll(LONGEST):
            with contextlib.suppress(EOFError, ConnectionResetError):
                code, seconds = self._connection.recv()
        if code is None:
            code = self._end()
        lines = [line.split("\t") for line in record.read_text(errors="replace").splitlines()]
        operations = [(int(number), name, path) for number, name, path in lines]
        return Ended(code, log.read_text(errors="replace"), operations, seconds)

    def renew(self) -> None:
        """Lets the next command run in a new process, which has compiled nothing."""
        if self._connection is not None:
            self._end()

    def _start(self) -> None:
        here, there = Pipe()
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            here.close()
            try:
                self._prepare()
                _serve(there, self._commands)
            finally:
                os._exit(0)
        there.close()
        self._connection = here

    def _end(self) -> int | None:
        """Ends the process; the exit code of one that had ended by itself."""
        self._connection.close()
        self._connection = None
        for _ in range(100):
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        return None


def _serve(connection: Connection, commands: Mapping[str, Callable[..., int]]) -> None:
    """The life of a worker."""
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.fault_after.argtypes = [ctypes.c_double, ctypes.c_int]
    while True:
        try:
            command, arguments, folder, fault, every, log, record = connection.recv()
        except EOFError:
            return
        fault = fault or Fault()
        records = os.open(record, os.O_WRONLY | os.O_APPEND)
        with _printing_to(log):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            begun = time.process_time()
            if fault.seconds:
                library.fault_after(fault.seconds, fault.signal)
            number = ctypes.c_long(fault.operation)
            library.fault_arm(str(folder).encode(), number, fault.signal, fault.error, records, int(every))
            code = _code(functools.partial(commands[command], *arguments))
            library.fault_disarm()
        os.close(records)
        connection.send((code, time.process_time() - begun))


def _code(command: Callable[[], int]) -> int:
    """The exit code that a process of the command alone would have."""
    try:
        return command()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:  # as an interpreter reports it
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """File descriptors 1 and 2, as C and threads use them, and Python's streams."""
    kept, file = [os.dup(1), os.dup(2)], os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, earlier in zip((1, 2), kept, strict=True):
            os.dup2(earlier, number)
            os.close(earlier)
        os.close(file)


class Compiled:
    """A jitted train step whose programs are kept for all runs of a process, by the shapes of their arguments."""

    def __init__(self, step: Any):
        self._step, self._programs = step, {}

    def lower(self, *arguments: Any) -> "Compiled":
        self._key = str(arguments)
        if self._key not in self._programs:
            self._programs[self._key] = self._step.lower(*arguments).compile()
        return self

    def compile(self) -> Any:
        return self._programs[self._key]


def kept(function: Callable[..., Any], wrap: Callable[[Any], Any] = lambda value: value) -> Callable[..., Any]:
    """A function that is called once; later calls get its first value."""
    values: list[Any] = []

    @functools.wraps(function)
    def first(*arguments: Any, **options: Any) -> Any:
        if not values:
            values.append(wrap(function(*arguments, **options)))
        return values[0]

    return first
