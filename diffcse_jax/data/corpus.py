"""Rows of text, and the faults for which a line is skipped.

A row has one or more columns. One column is a sentence, a second one its positive, further ones are hard negatives.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from diffcse_jax.errors import DataError, NoSentencesError

LONGEST_TEXT = 1 << 17  # characters of a text in a row
ROLES = ("sentence", "positive", "hard_negative")
UTF8_ADVICE = (
    "Text must be UTF-8. To convert a file, run: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW_FILE (or -f UTF-16, if most "
    "lines contain NUL bytes)"
)

Row = tuple[str, ...]
Place = int | str  # a line number from 1, or the file of a folder


class Fault(enum.StrEnum):
    """Why a line gives no row."""

    EMPTY = "empty"
    NOT_UTF8 = "not UTF-8"
    NUL_BYTE = "NUL byte"
    TOO_LONG = f"longer than {LONGEST_TEXT:,} characters"
    WRONG_WIDTH = "wrong number of fields"
    INVALID_CSV = "invalid CSV"
    NOT_OBJECT = "not a JSON object"
    MISSING_KEY = "missing key"
    NOT_STRING = "value not a string"
    UNREADABLE = "unreadable"


class OptionNames(NamedTuple):
    """Say in errors which options named the source."""

    file: str = "data.train_file"
    columns: str = "data.columns"
    bad_line: str = "set data.on_bad_line=skip"  # empty: there is no such option


TRAINING_OPTIONS = OptionNames()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows. Each pass reads the source again; memory holds a part of it.

    Attributes:
        name: Name in messages.
        columns: Names of the columns.
        records: Starts a pass over places and their rows or faults.
        fingerprint: Returns the SHA-256 of the content in hexadecimal.
        on_bad_line: `skip` or `error`.
        reading: How documents became rows. Empty if a row is a line. Otherwise a fault ends a document, and an empty
            place is not counted.
        unit: What places count.
        where: Turns a place into the words of an error. None: the name and the place.
        note: What was left out before reading, for example files of other kinds.
        names: The options that named the source, for errors.
        skipped: Lines that the latest pass skipped, by fault.
        counted: What the latest pass counted, such as documents.
    """

    name: str
    columns: tuple[str, ...]
    records: Callable[[], Iterable[tuple[Place, Row | Fault]]]
    fingerprint: Callable[[], str]
    on_bad_line: str = "skip"
    reading: tuple[str, ...] = ()
    unit: str = "line"
    where: Callable[[int], str] | None = None
    note: str = ""
    names: OptionNames = TRAINING_OPTIONS
    skipped: collections.Counter[Fault] = dataclasses.field(default_factory=collections.Counter)
    counted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __iter__(self) -> Iterator[Row]:
        """Yield the usable rows; see `numbered`."""
        return (row for _, _, row in self._usable())

    def numbered(self) -> Iterator[tuple[Place, Row]]:
        """Yield places and usable rows, without surrounding white space.

        Raises:
            DataError: A line is bad and `on_bad_line` is `error`, or the source cannot be read.
            NoSentencesError: No line is usable.
        """
        return ((place, row) for place, _, row in self._usable())

    def in_documents(self) -> Iterator[tuple[int, Row]]:
        """Yield increasing numbers of documents and their usable rows; see `numbered`."""
        return ((document, row) for _, document, row in self._usable())

    def _usable(self) -> Iterator[tuple[Place, int, Row]]:
        self.skipped.clear()
        self.counted.clear()
        found, document = False, 0
        for place, record in self.records():
            row = record if isinstance(record, Fault) else checked(record)
            if not isinstance(row, Fault):
                found = True
                yield place, document, row
                continue
            document += 1
            if row is Fault.EMPTY and self.reading:
                continue
            if self.on_bad_line == "error":
                advice = f" {UTF8_ADVICE}." if row is Fault.NOT_UTF8 else ""
                alternative = f", or {self.names.bad_line}" if self.names.bad_line else ""
                raise DataError(f"{self._where(place)}: {row}.{advice} Correct it{alternative}")
            self.skipped[row] += 1
        if not found:
            details = f" ({summary})" if (summary := self.summary()) else ""
            advice = f". {advice}" if (advice := self.advice()) else ""
            raise NoSentencesError(f"{self.name}: no usable {self.unit}{details}{advice}")

    def _where(self, place: Place) -> str:
        if not isinstance(place, int):
            return f"{self.name}, {place}"
        return self.where(place) if self.where else f"{self.name}, {self.unit} {place}"

    def first_row(self) -> str:
        """Return the first usable row in short form, so that a person can check how the text is read."""
        shown = (text if len(text) <= 60 else f"{text[:57]}..." for text in next(iter(self)))
        return ", ".join(f"{column} {text!r}" for column, text in zip(self.columns, shown, strict=True))

    def summary(self) -> str:
        """Return what the latest pass counted and skipped, or an empty string."""
        counted = ", ".join(f"{count:,} {what}" for what, count in self.counted.items() if count)
        return "; ".join(filter(None, [counted, self.skipped_summary(), self.note]))

    def skipped_summary(self) -> str:
        """Return the skipped lines by fault, as `skipped 3 lines: 2 empty, 1 not UTF-8`, or an empty string."""
        if not self.skipped:
            return ""
        total = self.skipped.total()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.skipped.most_common())
        return f"skipped {total:,} {self.unit}{'s' if total > 1 else ''}: {kinds}"

    def advice(self) -> str:
        """Say how to convert text that the latest pass could not decode; empty if it decoded all of it."""
        return UTF8_ADVICE if self.skipped[Fault.NOT_UTF8] else ""


def column_names(count: int, roles: Sequence[str] = ROLES) -> tuple[str, ...]:
    """Return names for columns: the roles, then `hard_negative_2`, `hard_negative_3`, ..."""
    return (*roles, *(f"{roles[-1]}_{number}" for number in range(2, count - 1)))[:count]


def listed(names: Sequence[str]) -> str:
    """Join names for a message, and cut a long list."""
    text = ", ".join(names)
    return text if len(text) <= 500 else f"{text[:500]}..."


def checked(row: Row) -> Row | Fault:
    """Return the row without surrounding white space, or its fault. Undecodable bytes arrive as surrogates."""
    row = tuple(text.strip() for text in row)
    for text in row:
        if not text:
            return Fault.EMPTY
        if len(text) > LONGEST_TEXT:
            return Fault.TOO_LONG
        if "\0" in text:
            return Fault.NUL_BYTE
        try:
            text.encode()
        except UnicodeEncodeError:
            return Fault.NOT_UTF8
    return row
