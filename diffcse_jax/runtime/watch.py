"""Names the process that hangs, before JAX ends the others for its silence (which JAX tells in numbers alone)."""

import atexit
import itertools
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from jax._src.distributed import global_state  # it has no public name; Orbax reads it, too

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
