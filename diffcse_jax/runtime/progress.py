"""How far a command is: a bar on a terminal, elsewhere a line now and then."""

import sys
import time

import tqdm

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """A context manager that counts and tells, on stderr.

    Args:
        what: is done, as `embedding`.
        unit: what is counted, in the plural.
        total: how many there are; None where that is not known.
    """

    def __init__(self, what: str, unit: str, total: int | None = None):
        self._what, self._unit, self._total = what, unit, total
        self._done = 0
        self._bar = tqdm.tqdm(desc=what, unit=f" {unit}", total=total, disable=None)
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
        if self._bar.disable and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            of = f" of {self._total:,}" if self._total else ""
            rate = self._done / (now - self._begun)
            print(f"{self._what}: {self._done:,}{of} {self._unit}, {rate:,.0f} a second", file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        """Writes a line, above the bar if there is one."""
        self._bar.write(message, file=sys.stderr)
