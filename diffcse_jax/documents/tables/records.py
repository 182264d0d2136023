"""Rows of csv and tsv files, parsed by rules that are known: a `Dialect`.

A csv file follows Python's rules: fields with quotes may contain separators and ends of lines. A
quote that nobody closed would take the rest of the file into one field, so that lines are read on
their own where the rules do not fit. In a tsv file, quotes are text and a field never spans lines,
unless all quotes of the first lines are those that a program such as pandas or R writes.
"""

import collections
import contextlib
import csv
import dataclasses
import re
import statistics
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.documents.ledger import (
    EMPTY,
    INVALID_CSV,
    LONGEST_TEXT,
    REPEATED_NAMES,
    WRONG_WIDTH,
    Ledger,
    Place,
)
from diffcse_jax.documents.tables.values import LONGEST_ROW, NumberedRow, listed
from diffcse_jax.documents.text.lines import read_lines
from diffcse_jax.errors import DataError

MOST = 0.6  # of some lines
COST_OF_A_LINE = 64  # bytes of memory beside its characters
ESCAPED = "\ufdd0"  # no character: stands for an escaped quote until the fields are known
# A quote after an odd number of backslashes, as Spark, MySQL and R write it inside a field.
ESCAPED_QUOTE = re.compile(r'(?<!\\)((?:\\\\)*)\\"')

Line = tuple[int, str]  # its number, and the text with its end


class Dialect(NamedTuple):
    """How rows are written."""

    separator: str
    has_quotes: bool = True  # of Python's rules
    spans_lines: bool = True  # fields in quotes may contain ends of lines
    skips_spaces: bool = False  # before a quote: `1, "a, b"`
    has_escapes: bool = False  # a quote inside a field stands after a backslash, and not twice
    width: int = 0  # fields of a row; 0: not known yet
    shortest: int = 0  # fewer fields that a row may have, if its last ones are missing

    @property
    def is_lenient(self) -> bool:
        """Return whether a line that breaks the rules is read as Python does if it is not strict.

        Tabs separate text that often has quotes of its own, so that these stay.
        """
        return self.separator != "\t"


class ParsedRow(NamedTuple):
    """A row, or what could not be read as one."""

    first: int  # its first line
    last: int  # its last line
    fields: list[str]
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Body:
    """The rows of a file, below the names of its columns.

    Attributes:
        path: The file.
        name: The file as the user named it.
        columns: The names of all columns.
        above: The last line above the rows.
        dialect: How the rows are written.
    """

    path: Path
    name: str
    columns: tuple[str, ...]
    above: int
    dialect: Dialect

    def read(self, wanted: Sequence[str], ledger: Ledger) -> Iterator[NumberedRow]:
        """Start a pass over some columns; raise `DataError` if there is no such column."""
        known = set(self.columns)
        if missing := [column for column in wanted if column not in known]:
            has = listed(self.columns)
            raise DataError(f"{self.name}: no column {missing[0]!r}. It has: {has}")
        lines = read_lines(self.path, self.name, ledger, longest=LONGEST_ROW, keep_ends=True)
        return self.rows(lines, wanted, ledger)

    def rows(
        self, lines: Iterable[Line], wanted: Sequence[str], ledger: Ledger
    ) -> Iterator[NumberedRow]:
        """Yield some columns of the rows. What is not a row is entered in the ledger."""
        place_of = {column: place for place, column in enumerate(self.columns)}
        places = {column: place_of[column] for column in wanted}
        below = (line for line in lines if line[0] > self.above)
        for first, _, fields, fault in records(below, self.dialect):
            if not any(map(str.strip, fields)):
                ledger.leave_out(EMPTY, Place(self.name, first))
            elif fault:
                ledger.leave_out(fault, Place(self.name, first))
            elif len(fields) > 1 and _repeats(fields, self.columns):
                ledger.leave_out(REPEATED_NAMES, Place(self.name, first))
            else:
                yield first, {column: fields[place] or None for column, place in places.items()}


def _repeats(fields: Sequence[str], columns: Sequence[str]) -> bool:
    """Return whether a row has the names of the columns, as in files that were joined."""
    if fields[0].strip().removeprefix("\ufeff") != columns[0]:
        return False
    return [field.strip() for field in fields[1:]] == [*columns[1:]]


# Records


class _Feed:
    """Lines, some of which may be put back."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = iter(lines)
        self.waiting: collections.deque[Line] = collections.deque()
        self.alone_until = 0  # the last line that was read in vain as a part of a field

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        return self.waiting.popleft() if self.waiting else next(self.lines)

    def put_back(self, lines: Sequence[Line]) -> None:
        """Return lines. All but the last are read on their own then, so that time stays linear."""
        self.waiting.extendleft(reversed(lines))
        if len(lines) > 1:
            self.alone_until = lines[-2][0]


def records(lines: Iterable[Line], dialect: Dialect) -> Iterator[ParsedRow]:
    """Yield the records of some lines. If the width is known, those of another one have a fault."""
    if not dialect.has_escapes:
        yield from _records(lines, dialect)
        return
    without = ((number, without_escapes(line)) for number, line in lines)
    for record in _records(without, dialect):
        yield record._replace(fields=[field.replace(ESCAPED, '"') for field in record.fields])


def all_records(lines: Iterable[Line], dialect: Dialect) -> list[ParsedRow]:
    """Return the records of a few lines, which show what the rest of a file is like."""
    return [*records(lines, dialect)]


def without_escapes(text: str) -> str:
    """Return text with `ESCAPED` in place of quotes that stand after a backslash."""
    return ESCAPED_QUOTE.sub(rf"\1{ESCAPED}", text)


def _records(lines: Iterable[Line], dialect: Dialect) -> Iterator[ParsedRow]:
    feed = _Feed(lines)
    for number, line in feed:
        if not dialect.has_quotes or '"' not in line:
            fields = _bare(line).split(dialect.separator)
        else:
            fields = parsed([line], dialect) if len(line) <= csv.field_size_limit() else []
        if fields:
            yield _checked(ParsedRow(number, number, fields), line, dialect)
        elif dialect.spans_lines and number > feed.alone_until:
            yield _spanning((number, line), feed, dialect)
        else:
            yield _alone((number, line), dialect)


def _checked(record: ParsedRow, text: str, dialect: Dialect) -> ParsedRow:
    """Return a record with the right width, if nothing is lost by that, or with a fault.

    Empty fields at the end are dropped. In the only column of a table, separators are text.
    """
    fields = record.fields
    if not dialect.width or len(fields) == dialect.width:
        return record
    if dialect.width == 1:
        return record._replace(fields=[_bare(text)])
    if dialect.shortest <= len(fields) < dialect.width:
        return record._replace(fields=[*fields, *[""] * (dialect.width - len(fields))])
    if len(fields) > dialect.width and not any(map(str.strip, fields[dialect.width :])):
        return record._replace(fields=fields[: dialect.width])
    return record._replace(fault=WRONG_WIDTH)


def _spanning(first: Line, feed: _Feed, dialect: Dialect) -> ParsedRow:
    """Read a record whose fields may span lines."""
    taken = [first]
    with _long_fields():
        fields = parsed(_taking(taken, feed), dialect)
    text = "".join(line for _, line in taken)
    record = _checked(ParsedRow(first[0], taken[-1][0], fields), text, dialect)
    is_short = max(map(len, fields), default=LONGEST_ROW) <= LONGEST_TEXT
    if is_short and not record.fault:
        return record
    # Either a row of several lines that breaks a rule, or rows with one quote too many.
    rows = _share_of_rows(taken, dialect)
    if fields and rows < (1 if is_short else MOST):
        return record
    if not fields and rows < MOST and dialect.is_lenient:
        record = _loosely(taken, dialect)
        if not record.fault:
            return record
    feed.put_back(taken[1:])
    return _alone(first, dialect)


def _taking(taken: list[Line], feed: _Feed) -> Iterator[str]:
    """Yield the text of lines that are taken, up to the size of a row."""
    yield taken[0][1]
    size = 0
    for line in feed:
        taken.append(line)
        yield line[1]
        size += len(line[1]) + COST_OF_A_LINE
        if size > LONGEST_ROW:
            return


def _share_of_rows(taken: list[Line], dialect: Dialect) -> float:
    """Return how many lines are rows if each is read on its own."""
    if not dialect.width:
        return 1
    free = dialect._replace(width=0)
    return statistics.fmean(
        # A line with fewer separators is not a row: this is known in a tenth of the time.
        line[1].count(dialect.separator) >= dialect.width - 1
        and len(_alone(line, free).fields) == dialect.width
        for line in taken
    )


def _alone(line: Line, dialect: Dialect) -> ParsedRow:
    """Read a line that breaks the rules, or with its quotes as they stand."""
    number, text = line
    if dialect.is_lenient:
        loose = _loosely([line], dialect)
        if loose.fault != INVALID_CSV:
            return loose
    fields = [] if dialect.is_lenient else parsed([text], dialect)
    plain = ParsedRow(number, number, fields or _bare(text).split(dialect.separator))
    record = _checked(plain, text, dialect)
    return record._replace(fault=INVALID_CSV) if record.fault and dialect.spans_lines else record


def parsed(texts: Iterable[str], dialect: Dialect) -> list[str]:
    """Return the fields of one record, or nothing if it does not follow the rules."""
    try:
        return next(_reader(texts, dialect, strict=True))
    except csv.Error:
        return []


def parses(lines: Iterable[str], dialect: Dialect) -> bool:
    """Return whether all lines follow the rules."""
    try:
        collections.deque(_reader(lines, dialect, strict=True), maxlen=0)
    except csv.Error:
        return False
    return True


def _loosely(lines: Sequence[Line], dialect: Dialect) -> ParsedRow:
    """Read lines as one record, as Python does if it is not strict."""
    text = "".join(line for _, line in lines)
    record = ParsedRow(lines[0][0], lines[-1][0], [])
    reader = _reader([*(line for _, line in lines), ""], dialect, strict=False)
    with _long_fields():
        try:
            record = record._replace(fields=next(reader))
        except csv.Error:
            return record._replace(fault=INVALID_CSV)
    if reader.line_num != len(lines):  # it asked for more, because a quote is open
        return record._replace(fault=INVALID_CSV)
    return _checked(record, text, dialect)


def _reader(texts: Iterable[str], dialect: Dialect, *, strict: bool) -> Any:
    return csv.reader(
        texts,
        delimiter=dialect.separator,
        skipinitialspace=dialect.skips_spaces,
        strict=strict,
    )


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Read fields of any length for a moment. The limit of Python's csv is that of the process."""
    with _LIMIT:
        before = csv.field_size_limit(2 * LONGEST_ROW)
        try:
            yield
        finally:
            csv.field_size_limit(before)


_LIMIT = threading.Lock()


def _bare(line: str) -> str:
    """Return a line without its end."""
    return line.removesuffix("\n").removesuffix("\r")
