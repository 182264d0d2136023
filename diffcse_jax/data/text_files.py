"""Readers of text, csv, tsv and jsonl files, plain or compressed (.gz, .xz), line by line.

Bytes that are no UTF-8 arrive as surrogates, which a `Corpus` counts as a fault of their line. A line, or a row of a
table, that is longer than `LONGEST_LINE` is a fault, too, and is not held in memory.
"""

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.data.corpus import Fault, Numbered
from diffcse_jax.data.lines import LONGEST_LINE, byte_lines
from diffcse_jax.errors import DataError, NoSentencesError


def text_records(path: Path) -> Iterator[Numbered]:
    """Each line as a row of one sentence."""
    return ((number, line if isinstance(line, Fault) else (line,)) for number, line in enumerate(lines(path), 1))


def table_header(path: Path, delimiter: str) -> list[str]:
    """The names of a table's columns, from its first line.

    Raises:
        DataError: that line is empty, too long or no valid csv.
    """
    try:
        header = next(csv.reader(_TableLines(path), delimiter=delimiter), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    if not header:
        raise DataError(f"{path}: the first line is empty; it must hold the names of the columns")
    return [name.strip() for name in header]


def table_records(path: Path, delimiter: str, width: int, wanted: Sequence[int]) -> Iterator[Numbered]:
    """Rows after the header, with the number of their first line: quoted fields may hold line feeds.

    Args:
        path: the file.
        delimiter: the character between fields.
        width: fields of every line.
        wanted: positions, from 0, of the fields that make the row.
    """
    table = _TableLines(path)
    reader = csv.reader(table, delimiter=delimiter)
    next(reader)
    while True:
        line = table.start_row()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except _RowTooLong:
            yield line, Fault.TOO_LONG
            continue
        except csv.Error:
            yield line, Fault.INVALID_CSV
            continue
        if len(fields) == width:
            yield line, tuple(fields[index] for index in wanted)
        else:
            yield line, Fault.WRONG_WIDTH if fields else Fault.EMPTY


def json_records(path: Path, columns: Sequence[str]) -> Iterator[Numbered]:
    """The values of these keys, line by line."""
    return rows_of(json_objects(path), columns)


def rows_of(objects: Iterable[tuple[int, dict[str, Any] | Fault]], columns: Sequence[str]) -> Iterator[Numbered]:
    """The values of these keys, object by object."""
    for number, entry in objects:
        if isinstance(entry, Fault):
            yield number, entry
        elif any(column not in entry for column in columns):
            yield number, Fault.MISSING_KEY
        else:
            row = tuple(entry[column] for column in columns)
            yield number, row if all(isinstance(value, str) for value in row) else Fault.NOT_STRING


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """The objects line by line, or the faults in their places."""
    return ((number, _json_object(line)) for number, line in enumerate(lines(path), 1))


def first_keys(path: Path) -> list[str]:
    """The keys of a file's first JSON object.

    Raises:
        NoSentencesError: it holds none.
    """
    for _, entry in json_objects(path):
        if isinstance(entry, dict):
            return list(entry)
    raise NoSentencesError(f"{path}: no line holds a JSON object")


class _RowTooLong(csv.Error):
    """A row of more characters than a line may have."""


class _TableLines:
    """The lines of a table for the csv module, which would take any number of them for one row in quotes."""

    def __init__(self, path: Path):
        self._lines = lines(path)
        self._number = 0
        self._row_size = 0

    def start_row(self) -> int:
        """The number of the next line, which begins a row."""
        self._row_size = 0
        return self._number + 1

    def __iter__(self) -> "_TableLines":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._number += 1
        self._row_size += len(line)
        if isinstance(line, Fault) or self._row_size > LONGEST_LINE:
            raise _RowTooLong(Fault.TOO_LONG)
        return line


def lines(path: Path) -> Iterator[str | Fault]:
    """Lines that end in a line feed (other line separators of Unicode are text), without a leading byte-order mark.

    In place of one that is too long there is its fault, which is a string, too: ask for `isinstance(line, Fault)`.
    """
    for number, line in enumerate(byte_lines(path)):
        if line is None:
            yield Fault.TOO_LONG
            continue
        text = (line if number else line.removeprefix(codecs.BOM_UTF8)).decode(errors="surrogateescape")
        yield text if len(text) <= LONGEST_LINE else Fault.TOO_LONG


def _json_object(line: str | Fault) -> dict[str, Any] | Fault:
    """The object on a line, or the fault in its place."""
    if isinstance(line, Fault):
        return line
    if not line.strip():
        return Fault.EMPTY
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return Fault.NOT_OBJECT
    return entry if isinstance(entry, dict) else Fault.NOT_OBJECT
