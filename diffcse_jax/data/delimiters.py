"""The delimiter of a table, as its first lines tell it, and tables that are none."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.data import text_files
from diffcse_jax.data.corpus import Fault
from diffcse_jax.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
SAMPLE_LINES = 100
SAMPLE_CHARACTERS = 1 << 20
MOST_WORDS = 5  # of the name of a column
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


class Reading(NamedTuple):
    """The first lines of a table, as a delimiter splits them."""

    delimiter: str
    header: list[str]
    rows: list[list[str]]

    @property
    def misfits(self) -> list[list[str]]:
        """The rows that have not the fields of the header."""
        return [row for row in self.rows if len(row) != len(self.header)]

    @property
    def fit(self) -> float:
        """The share of the rows that have the fields of the header."""
        return 1 - len(self.misfits) / max(1, len(self.rows))


def find_delimiter(path: Path, usual: str, wanted: Sequence[str]) -> str:
    """The delimiter with which the first line names the columns and the next lines have as many fields.

    Args:
        path: the table.
        usual: the delimiter that its extension stands for; taken where nothing speaks for another one.
        wanted: the columns that the user names; a delimiter that gives these is the one.

    Raises:
        DataError: most lines do not fit to the first one, or that looks like text and not like a column's name.
    """
    lines, is_whole = _first_lines(path)
    readings = [_read(lines, is_whole, delimiter) for delimiter in dict.fromkeys([usual, *DELIMITERS])]
    named = [reading for reading in readings if wanted and {*wanted} <= {*reading.header}]
    split = [reading for reading in readings if len(reading.header) > 1 and reading.fit >= 0.5]
    best = max(named or split or readings[:1], key=lambda reading: reading.fit)  # the usual one among equals
    if best.fit < 0.5:
        what = NAMES[best.delimiter]
        count = f"{len(best.header)} field{'s' * (len(best.header) > 1)}"
        raise DataError(
            f"{path}: separated by {what}, the first line has {count} ({', '.join(best.header):.200}), and most others "
            f"have more or fewer, such as {best.misfits[0]!r:.200}. Text that holds {what} must be in quotes; a file "
            "of one sentence a line needs the extension .txt"
        )
    if not named and len(best.header) == 1 and _looks_like_text(best.header[0]):
        raise DataError(
            f"{path}: the first line must hold the names of the columns, and {best.header[0][:200]!r} looks like text. "
            "Add such a line, `sentence` for example, or name this column in data.columns; a file of one sentence a "
            "line needs the extension .txt"
        )
    return best.delimiter


def _first_lines(path: Path) -> tuple[list[str], bool]:
    """The first lines, and whether these are all."""
    found: list[str] = []
    for line in text_files.lines(path):
        if isinstance(line, Fault) or len(found) == SAMPLE_LINES or sum(map(len, found)) > SAMPLE_CHARACTERS:
            return found, False
        found.append(line)
    return found, True


def _read(lines: Sequence[str], is_whole: bool, delimiter: str) -> Reading:
    rows = []
    try:
        for row in csv.reader(lines, delimiter=delimiter):
            rows.append(row)
    except csv.Error:  # told of where all rows are read
        pass
    if not is_whole:
        rows = rows[:1] + rows[1:-1]  # the last one may go on
    header, *others = rows or [[]]
    return Reading(delimiter, [name.strip() for name in header], list(filter(None, others)))


def _looks_like_text(name: str) -> bool:
    is_sentence = " " in name and name.endswith((".", "?", "!"))
    return is_sentence or len(name.split()) > MOST_WORDS or bool(re.search("[,;\t|]", name))
