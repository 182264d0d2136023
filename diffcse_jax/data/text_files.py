"""Readers of text, csv, tsv and jsonl files, plain or compressed (.gz, .xz), line by line.

Bytes that are no UTF-8 arrive as surrogates, which a `Corpus` counts as a fault of their line.
"""

import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from diffcse_jax.data.corpus import Fault, Record
from diffcse_jax.errors import DataError, NoSentencesError


def text_records(path: Path) -> Iterator[Record]:
    """Each line as a row of one sentence."""
    return ((number, (line,)) for number, line in enumerate(lines(path), 1))


def table_header(path: Path, delimiter: str) -> list[str]:
    """The names of a table's columns, from its first line.

    Raises:
        DataError: that line is empty or no valid csv.
    """
    try:
        header = next(csv.reader(lines(path), delimiter=delimiter), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    if not header:
        raise DataError(f"{path}: the first line is empty; it must hold the names of the columns")
    return [name.strip() for name in header]


def table_records(path: Path, delimiter: str, width: int, wanted: Sequence[int]) -> Iterator[Record]:
    """Rows after the header, with the number of their first line: quoted fields may hold line feeds.

    Args:
        path: the file.
        delimiter: the character between fields.
        width: fields of every line.
        wanted: positions, from 0, of the fields that make the row.
    """
    reader = csv.reader(lines(path), delimiter=delimiter)
    next(reader)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield line, Fault.INVALID_CSV
            continue
        if len(fields) == width:
            yield line, tuple(fields[index] for index in wanted)
        else:
            yield line, Fault.WRONG_WIDTH if fields else Fault.EMPTY


def json_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The values of these keys, line by line."""
    for number, entry in json_objects(path):
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


def lines(path: Path) -> Iterator[str]:
    """Lines that end in a line feed (other line separators of Unicode are text), without a leading byte-order mark."""
    openers: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _json_object(line: str) -> dict[str, Any] | Fault:
    """The object on a line, or the fault in its place."""
    if not line.strip():
        return Fault.EMPTY
    try:
        entry = json.loads(line)
    except ValueError:
        return Fault.NOT_OBJECT
    return entry if isinstance(entry, dict) else Fault.NOT_OBJECT
