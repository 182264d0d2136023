"""A corpus: numbered rows of one or more sentences, read as a stream.

One column is a sentence, two a sentence and its positive, further ones are its hard negatives. Lines that cannot
be used are skipped and counted, or refused, as `data.on_bad_line` says.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

from diffcse_jax.data.lines import LONGEST_LINE
from diffcse_jax.errors import DataError, NoSentencesError

Row = tuple[str, ...]
SHOWN = 60  # characters of a sentence
ROLES = ("sentence", "positive", "hard_negative")


class Fault(enum.StrEnum):
    """A reason for which a line gives no row."""

    EMPTY = "empty"
    NOT_UTF8 = "not UTF-8"
    NUL_BYTE = "NUL byte"
    TOO_LONG = f"longer than {LONGEST_LINE:,} characters"
    WRONG_WIDTH = "wrong number of fields"
    INVALID_CSV = "invalid CSV"
    NOT_OBJECT = "not a JSON object"
    MISSING_KEY = "missing key"
    NOT_STRING = "value not a string"


Place = int | str  # a line, from 1; of a folder, a file
Record = tuple[Place, Row | Fault]
Numbered = tuple[int, Row | Fault]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows, all as wide as `columns`. Iterating reads it from its start and never holds it in memory.

    Attributes:
        name: its name in messages.
        columns: the names of its columns.
        records: starts a pass over the places and their rows or faults.
        fingerprint: the SHA-256 of the content, as hexadecimal digits; reads all of it.
        on_bad_line: `skip` or `error`.
        reading: how rows were made of documents; empty where a row is a line. A fault then ends a document, and that
            nothing is left of a place is no fault.
        skipped: lines left out by the latest pass, by kind.
        counted: what `records` tells of the latest pass, such as documents that are held out.
        unit: what places count, where they are numbers.
        file_of: of a number that counts over several files, the file and the number in it, as messages have them.
    """

    name: str
    columns: tuple[str, ...]
    records: Callable[[], Iterable[Record]]
    fingerprint: Callable[[], str]
    on_bad_line: str = "skip"
    reading: tuple[str, ...] = ()
    skipped: collections.Counter[Fault] = dataclasses.field(default_factory=collections.Counter)
    counted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unit: str = "line"
    file_of: Callable[[int], tuple[str, int]] | None = None

    def __iter__(self) -> Iterator[Row]:
        """Yields the usable rows; raises like `numbered`."""
        return (row for _, row in self.numbered())

    def numbered(self) -> Iterator[tuple[Place, Row]]:
        """Yields the usable rows with their places, without surrounding white space.

        Raises:
            DataError: a bad line where `on_bad_line` is `error`; a damaged archive.
            NoSentencesError: no usable line at all.
        """
        return ((place, row) for place, _, row in self._usable())

    def in_documents(self) -> Iterator[tuple[int, Row]]:
        """Yields the usable rows with the numbers of their documents, which grow; raises like `numbered`."""
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
                raise DataError(f"{self._where(place)}: {row}; correct it, or set data.on_bad_line=skip")
            self.skipped[row] += 1
        if not found:
            summary = self.summary()
            raise NoSentencesError(f"{self.name}: no usable line{f' ({summary})' if summary else ''}")

    def _where(self, place: Place) -> str:
        if not isinstance(place, int):
            return f"{self.name}, {place}"
        file, number = self.file_of(place) if self.file_of else (self.name, place)
        return f"{file}, {self.unit} {number}"

    def first_row(self) -> str:
        """The first usable row, for a person who checks how the text is read; raises like `numbered`."""
        row = next(iter(self))
        shown = (text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..." for text in row)
        return ", ".join(f"{column} {text!r}" for column, text in zip(self.columns, shown, strict=True))

    def summary(self) -> str:
        """Counts of the latest pass, and of the lines that it skipped; empty if there are none."""
        counted = ", ".join(f"{count:,} {what}" for what, count in self.counted.items() if count)
        return "; ".join(filter(None, [counted, self.skipped_summary()]))

    def skipped_summary(self) -> str:
        """The latest pass's left-out lines by kind, as `skipped 3 lines: 2 empty, 1 not UTF-8`; empty if none was."""
        if not self.skipped:
            return ""
        total = self.skipped.total()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.skipped.most_common())
        return f"skipped {total:,} {self.unit}{'s' if total > 1 else ''}: {kinds}"


def column_names(count: int, roles: Sequence[str] = ROLES) -> tuple[str, ...]:
    """The names of so many columns after their roles; further hard negatives are numbered, `hard_negative_2` first."""
    return (*roles, *(f"{roles[-1]}_{number}" for number in range(2, count - 1)))[:count]


def listed(columns: Sequence[str]) -> str:
    """Names of columns, for messages, which stay short whatever the file has."""
    text = ", ".join(columns)
    return text if len(text) <= 500 else f"{text[:500]}..."


def checked(row: Row) -> Row | Fault:
    """The row without surrounding white space, or its fault. Undecodable bytes arrive as surrogates."""
    row = tuple(text.strip() for text in row)
    for text in row:
        if not text:
            return Fault.EMPTY
        if len(text) > LONGEST_LINE:
            return Fault.TOO_LONG
        if "\0" in text:
            return Fault.NUL_BYTE
        try:
            text.encode()
        except UnicodeEncodeError:
            return Fault.NOT_UTF8
    return row
