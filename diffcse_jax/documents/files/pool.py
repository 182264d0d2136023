"""Read documents in processes of their own, as many as there are cores.

A library that reads a damaged file may take forever, need all memory or end its process. Each file
has a limit of time and of memory, and a file beyond it costs no more than itself. The processes
import neither JAX nor the user's script. They read many files, until this process ends.
"""

import atexit
import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.documents.files import MOST_BYTES, child, formats
from diffcse_jax.documents.files.formats import Parsed, Unreadable
from diffcse_jax.documents.text.lines import extension, open_bytes
from diffcse_jax.errors import DataError, UserError

SECONDS = 60  # of processor time for a file, so that none is left out because others work
MOST_SECONDS = 600  # by the clock, for one that waits; SECONDS where only the clock can be limited
MEMORY = 4 << 30  # bytes of addresses of a process
SECONDS_TO_END = 5  # for a process that has closed its answers
SMALL = 1 << 20  # bytes of plain text, decompressed, that take no time worth a limit
MOST_PROCESSES = 16
AHEAD = 4  # files for each process that are read before they are asked for
CRASHED = "damaged, or needs too much memory"
ENVIRONMENT = {  # libraries would start as many threads in each process as there are cores
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "1",
}


def parse_files(files: Sequence[Path], *, with_code: bool) -> Iterator[Parsed | Unreadable]:
    """Yield the texts of documents, in the order of the files.

    Few files are read ahead, so memory holds few documents. Small files of plain text need no
    limits. They are read in this process, which takes a quarter of the time.
    """
    crew = _Crew(min(len(files), MOST_PROCESSES, _cores()))
    answers: collections.deque[Future[Parsed | Unreadable]] = collections.deque()
    with contextlib.closing(crew):
        for file in files:
            task = _Task(file, with_code)
            answers.append(task.parsed_here() or crew.start(task))
            if len(answers) > AHEAD * crew.size:
                yield answers.popleft().result()
        while answers:
            yield answers.popleft().result()


class _Task(NamedTuple):
    """A file to read."""

    file: Path
    with_code: bool

    def parsed_here(self) -> "Future[Parsed | Unreadable] | None":
        """Read the file in this process if it is plain text and small; else return None."""
        kind = extension(self.file)
        if kind not in formats.PLAIN_TEXT:
            return None
        content = self._content(SMALL)
        answer: Future[Parsed | Unreadable] = Future()
        if isinstance(content, Unreadable):
            answer.set_result(content)
        elif len(content) > SMALL:
            return None
        else:
            answer.set_result(formats.parse(content, kind, with_code=self.with_code))
        return answer

    def parse(self, by: "_Process") -> Parsed | Unreadable:
        """Read the file in another process."""
        content = self._content(MOST_BYTES)
        if isinstance(content, Unreadable):
            return content
        if len(content) > MOST_BYTES:
            return Unreadable(formats.TOO_LARGE)
        return by.parse(content, extension(self.file), with_code=self.with_code)

    def _content(self, most: int) -> bytes | Unreadable:
        """Return the bytes of the file, decompressed. Of a larger file, return one byte more."""
        try:
            with open_bytes(self.file) as stream:
                return stream.read(most + 1)
        except DataError as error:
            at = f"{self.file}: "
            return Unreadable(str(error).removeprefix("cannot read ").removeprefix(at))


class _Crew:
    """Threads that each hand files to a process and wait for its answers.

    They are daemons, so a program that ends does not wait for them.
    """

    def __init__(self, size: int):
        self.size = size
        self._tasks: queue.SimpleQueue[tuple[_Task, Future[Any]] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        for _ in range(size):
            threading.Thread(target=self._work, daemon=True).start()

    def start(self, task: _Task) -> "Future[Any]":
        """Have a file read. The result is a `Parsed` or `Unreadable`."""
        answer: Future[Any] = Future()
        self._tasks.put((task, answer))
        return answer

    def close(self) -> None:
        """Have no more files read."""
        self._is_closed.set()
        for _ in range(self.size):
            self._tasks.put(None)

    def _work(self) -> None:
        while (work := self._tasks.get()) and not self._is_closed.is_set():
            task, answer = work
            try:
                process = _Process.take()
                result = task.parse(by=process)
                process.give_back()
                answer.set_result(result)
            except BaseException as error:  # raised where the answer is asked for
                answer.set_exception(error)


class _Process:
    """A process that reads one file at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", child.__name__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches this process, which then ends the others
        )
        self._parent = os.getpid()
        self.is_running = True
        _running.add(self)
        if self._answer() != child.READY:
            self.stop()
            advice = f"To see why, run: {' '.join(command)}"
            raise UserError(f"the process that reads documents ended at once. {advice}")

    @classmethod
    def take(cls) -> "_Process":
        """Return a process that is idle, or a new one."""
        while _idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                process = _idle.pop()
                if process._parent == os.getpid() and process._process.poll() is None:
                    return process
        return cls()

    def give_back(self) -> None:
        """Keep the process for later files, unless it had to be stopped."""
        if self.is_running:
            _idle.append(self)

    def parse(self, content: bytes, kind: str, *, with_code: bool) -> Parsed | Unreadable:
        """Read a file. If that takes too long, or the process ends, stop it and say so."""
        request = {
            "kind": kind,
            "with_code": with_code,
            "size": len(content),
            "seconds": SECONDS,
            "most_seconds": MOST_SECONDS,
            "memory": MEMORY,
        }
        start = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin
            self._process.stdin.write(json.dumps(request).encode() + b"\n" + content)
            self._process.stdin.flush()
        answer = self._answer()
        if not answer.endswith(b"\n"):
            return Unreadable(self._why_ended(time.monotonic() - start), is_limit=True)
        document = json.loads(answer)
        if "reason" in document:
            return Unreadable(**document)
        sections = tuple((title, lines) for title, lines in document["sections"])
        return Parsed(sections, document["left_out"], tuple(document["notes"]))

    def _why_ended(self, seconds: float) -> str:
        """Stop the process, which has answered nothing for so many seconds, and return why."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=SECONDS_TO_END)
        code = self._process.returncode
        self.stop()
        if code is not None and -code == getattr(signal, "SIGXCPU", None):
            return f"took longer than {SECONDS} seconds of processor time"
        most = MOST_SECONDS if hasattr(signal, "SIGXCPU") else SECONDS
        return f"took longer than {most} seconds" if seconds >= most else CRASHED

    def stop(self) -> None:
        """End the process."""
        self.is_running = False
        _running.discard(self)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe
                pipe.close()

    def _answer(self) -> bytes:
        assert self._process.stdout
        return self._process.stdout.readline()


_running: set[_Process] = set()
_idle: list[_Process] = []


@atexit.register
def _stop_all() -> None:
    """End the processes that this one has started, and not those of one that it was forked from."""
    for process in tuple(_running):
        if process._parent == os.getpid():
            process.stop()


def _environment() -> dict[str, str]:
    """Return the environment of a process that finds the same packages as this one."""
    package = Path(__file__).parents[3]
    paths = [str(package), *(os.path.abspath(path) for path in sys.path if path)]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
