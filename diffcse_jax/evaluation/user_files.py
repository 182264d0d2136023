"""Lines of a user's own files, and an account of those that cannot be used.

One odd line does not refuse a file. It is counted, and a warning says how many there are, where the
first one is, and what became of them.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from diffcse_jax.errors import DataError, counted, warn_user
from diffcse_jax.io import why_unreadable

_BROKEN = re.compile("[\ud800-\udfff]")  # bytes that are not UTF-8, and halves of pairs in JSON


@dataclasses.dataclass
class _Kind:
    count: int
    line: int  # of the first one


class Tally:
    """Counts what is odd in files: by file, kind, and what became of it."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Path, str, str], _Kind] = {}

    def add(self, path: Path, line: int, what: str, outcome: str) -> None:
        """Count one more of a kind.

        Args:
            path: The file.
            line: The line in the file, from 1.
            what: The kind as `counted` takes it, such as `line{s} without an id`.
            outcome: What became of it, such as `left out`.
        """
        self._kinds.setdefault((path, what, outcome), _Kind(0, line)).count += 1

    def describe(self) -> str:
        """Return all counts in one line; an empty string if there are none."""
        files: dict[Path, list[str]] = {}
        for (path, what, outcome), kind in self._kinds.items():
            place = f"{'the first in ' if kind.count > 1 else ''}line {kind.line}"
            files.setdefault(path, []).append(f"{counted(kind.count, what)} ({place}; {outcome})")
        return "; ".join(f"{path}: {', '.join(kinds)}" for path, kinds in files.items())

    def warn(self) -> None:
        """Warn of all counts at once, if there are any."""
        if text := self.describe():
            warn_user(text)


def text_lines(path: Path, tally: Tally) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers, without a byte-order mark.

    Bytes that are not UTF-8 become U+FFFD, and their lines are counted.
    """
    if problem := why_unreadable(path):
        raise DataError(problem)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                text = encodable(line)
                if text != line:
                    what = "line{s} with bytes that are not UTF-8"
                    tally.add(path, number, what, "read with U+FFFD in their place")
                yield number, text.removesuffix("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def encodable(text: str) -> str:
    """Return a text with U+FFFD in place of characters that no encoding has."""
    return text if text.isascii() else _BROKEN.sub("\ufffd", text)
