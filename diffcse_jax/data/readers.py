"""Read rows of text from files: txt, csv, tsv, jsonl, json and Parquet, and from ArrayRecord data sets.

A row has one or more columns. One column is a sentence, a second one its positive, further ones are hard negatives.
Every kind of file except Parquet may be compressed (.gz, .xz).
"""

import collections
import contextlib
import csv
import dataclasses
import enum
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from diffcse_jax.errors import DataError, NoSentencesError, counted, require_extra
from diffcse_jax.io import why_unreadable

LONGEST_TEXT = 1 << 17  # characters of a text in a row
PREPARED = "dataset_info.json"  # a folder that contains it is a prepared ArrayRecord data set
BLOCK_RECORDS = 10_000  # of ArrayRecord; single records are read a hundred times slower

Row = tuple[str, ...]
Place = int | str  # a line number from 1 or, if there are several files, the file and the line


class Fault(enum.StrEnum):
    """The reason why a line is not a row."""

    EMPTY = "empty"
    NOT_UTF8 = "not UTF-8 (to convert a file, run: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW_FILE)"
    NUL_BYTE = "NUL byte, as in UTF-16"
    TOO_LONG = f"longer than {LONGEST_TEXT:,} characters"
    WRONG_WIDTH = "wrong number of fields"
    INVALID_CSV = "invalid CSV"
    NOT_OBJECT = "not a JSON object"
    MISSING_KEY = "missing key"
    NOT_STRING = "value not a string"
    UNREADABLE = "unreadable"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows. Each pass reads the source again; memory holds a part of it."""

    name: str  # in messages
    columns: tuple[str, ...]
    records: Callable[[], Iterable[tuple[Place, Row | Fault]]]  # starts a pass
    fingerprint: Callable[[], str]  # returns the SHA-256 of the content in hexadecimal
    on_bad_line: str = "skip"  # or `error`
    # How documents became rows; empty if a row is a line. In documents, a fault ends a document, and `EMPTY` only that.
    reading: tuple[str, ...] = ()
    note: str = ""  # what was left out before reading, for example files of other kinds
    skipped: collections.Counter[Fault] = dataclasses.field(default_factory=collections.Counter)  # by the latest pass
    counted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # such as `document{s}`

    def __iter__(self) -> Iterator[Row]:
        """Yield the usable rows; see `in_documents`."""
        return (row for _, _, row in self.in_documents())

    def in_documents(self) -> Iterator[tuple[Place, int, Row]]:
        """Yield the place, the document's increasing number and the row without surrounding white space.

        Raises `NoSentencesError` if no row is usable, and `DataError` for an unusable row if `on_bad_line` is `error`.
        """
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
                at = f"line {place}" if isinstance(place, int) else place
                raise DataError(f"{self.name}, {at}: {row}. Correct or remove it")
            self.skipped[row] += 1
        if not found:
            details = f" ({summary})" if (summary := self.summary()) else ""
            raise NoSentencesError(f"{self.name}: no usable line{details}")

    def summary(self) -> str:
        """Return what the latest pass counted, skipped and left out, or an empty string."""
        found = ", ".join(counted(count, what) for what, count in self.counted.items() if count)
        return "; ".join(filter(None, [found, self.skipped_summary(), self.note]))

    def skipped_summary(self) -> str:
        """Return the skipped lines by fault, as `skipped 3 lines: 2 empty, 1 invalid CSV`, or an empty string."""
        total = self.skipped.total()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.skipped.most_common())
        return f"skipped {counted(total, 'line{s}')}: {kinds}" if total else ""


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


def listed(names: Sequence[str]) -> str:
    """Join names for a message, and cut a long list."""
    text = ", ".join(names)
    return text if len(text) <= 500 else f"{text[:500]}..."


# Bytes and lines


def extension(path: Path) -> str:
    """Return the extension in lower case, without that of a compressed file."""
    return (path.with_suffix("") if path.suffix.lower() in (".gz", ".xz") else path).suffix.lower()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed; raise `DataError` if it cannot be read or is damaged."""
    if problem := why_unreadable(path):
        raise DataError(problem)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def lines(path: Path) -> Iterator[str]:
    """Yield lines without a byte-order mark; see `opened`. Only a line feed ends a line."""
    with opened(path) as file:
        for number, line in enumerate(file):
            yield line.decode("utf-8" if number else "utf-8-sig", errors="surrogateescape")


# Kinds of files

Entry = dict[str, Any] | Fault  # the values of a row by column
Entries = Iterator[tuple[int, Entry]]  # with the number of the line, or of the row or item, from 1


class RowFile(NamedTuple):
    """A file of rows. An empty file may have no columns."""

    path: Path
    columns: tuple[str, ...]
    entries: Callable[[Sequence[str]], Entries]  # starts a pass over some columns


def open_file(path: Path, wanted: Sequence[str] = ()) -> RowFile:
    """Open a file with one of the `EXTENSIONS`; raise `DataError` if the content does not fit the extension.

    If no columns are `wanted`, a table whose only column has a name like a sentence is refused.
    """
    file = _OPENERS[extension(path)](path)
    has_sentence = len(file.columns) == 1 and re.search(r"[;\t|,]|[.?!]$|(\S+\s+){5}\S", file.columns[0])
    if extension(path) in (".csv", ".tsv") and (not file.columns or (has_sentence and not wanted)):
        raise DataError(
            f"{path}: the first line must contain the names of the columns, separated by commas (csv) or tabs (tsv), "
            f"but it is {next(lines(path), '').strip()[:200]!r}. Sentences, one on each line, need the extension .txt"
        )
    return file


def placed_entries(
    files: Sequence[RowFile], columns: Sequence[str], root: Path | None
) -> Iterator[tuple[Place, Entry]]:
    """Yield the rows of files with their places. With `root`, a place names the file, relative to that folder."""
    for file in files:
        at = f"{file.path.relative_to(root).as_posix()}, line " if root else ""
        for number, entry in file.entries(columns):
            yield f"{at}{number}" if at else number, entry


def row_of(entry: Entry, columns: Sequence[str], optional: Sequence[str] = ()) -> Row | Fault:
    """Return the values of some columns. Numbers, such as ids, become text. NaN is empty; optional values may be."""
    if isinstance(entry, Fault):
        return entry
    if any(column not in entry for column in columns if column not in optional):
        return Fault.MISSING_KEY
    values = [None if isinstance(value, float) and value != value else value for value in map(entry.get, columns)]
    if any(value is None and column not in optional for column, value in zip(columns, values, strict=True)):
        return Fault.EMPTY
    is_text = all(value is None or isinstance(value, str | int | float) for value in values)
    return tuple("" if value is None else str(value) for value in values) if is_text else Fault.NOT_STRING


def single_column(path: Path, sentences: Callable[[], Iterable[str]]) -> RowFile:
    """Return rows of one column. Each pass calls `sentences`."""
    return RowFile(path, ("sentence",), lambda _: enumerate(({"sentence": text} for text in sentences()), 1))


def _open_table(path: Path) -> RowFile:
    """Open a table. Tabs separate fields in a tsv file, and in a csv file if its header has tabs and no commas."""
    first = next(lines(path), "")
    delimiter = "\t" if extension(path) == ".tsv" or ("\t" in first and "," not in first) else ","
    header: tuple[str, ...] = ()
    with contextlib.suppress(StopIteration, csv.Error):
        header = tuple(name.strip() for name in next(csv.reader(lines(path), delimiter=delimiter)))

    def entries(_: Sequence[str]) -> Entries:
        reader = csv.reader(lines(path), delimiter=delimiter)
        next(reader)
        while True:
            line = reader.line_num + 1  # quoted fields may contain line feeds
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, Fault.TOO_LONG if "field limit" in str(error) else Fault.INVALID_CSV
                continue
            if len(fields) == len(header):
                yield line, dict(zip(header, fields, strict=True))
            else:
                yield line, Fault.WRONG_WIDTH if fields else Fault.EMPTY

    return RowFile(path, header, entries)


def _open_json(path: Path) -> RowFile:
    """Open a file with an object on each line, or a json file with a list of objects or strings."""
    is_list = extension(path) == ".json" and next(filter(None, map(str.strip, lines(path))), "").startswith("[")

    def values() -> Iterator[Any]:
        if is_list:
            try:
                yield from json.loads("".join(lines(path)))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} is not valid JSON: {error}") from error
            return
        for line in lines(path):
            try:
                yield json.loads(line) if line.strip() else Fault.EMPTY
            except (ValueError, RecursionError):
                yield Fault.NOT_OBJECT

    def entries(_: Sequence[str]) -> Entries:
        for number, value in enumerate(values(), 1):
            entry = {"sentence": value} if is_list and isinstance(value, str) else value
            yield number, entry if isinstance(entry, dict | Fault) else Fault.NOT_OBJECT

    first = next((entry for _, entry in entries(()) if isinstance(entry, dict) and entry), {})
    return RowFile(path, tuple(first), entries)


def _open_parquet(path: Path) -> RowFile:
    def rows(needed: Sequence[str]) -> Iterator[Any]:
        try:
            with pq.ParquetFile(path) as file:
                yield file.schema_arrow.names
                for batch in file.iter_batches(1000, columns=[*needed]):
                    yield from batch.to_pylist()
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error

    return RowFile(path, tuple(next(rows(()))), lambda needed: enumerate(itertools.islice(rows(needed), 1, None), 1))


def open_prepared(folder: Path) -> RowFile:
    """Open the train split of the one data set in or below a folder, whose path the result has.

    tensorflow-datasets has prepared it as ArrayRecord; TensorFlow is not needed.
    """
    tfds = require_extra("tensorflow_datasets", "tfds")
    found = sorted(file.parent for file in folder.rglob(PREPARED))
    if len(found) != 1:
        raise DataError(f"{folder}: {len(found)} data sets ({PREPARED}). Name the folder of one data set")
    try:
        builder = tfds.builder_from_directory(found[0])
        source, columns = builder.as_data_source("train"), tuple(sorted(builder.info.features))
    except Exception as error:  # the library raises many types
        raise DataError(f"{found[0]}: cannot read the split 'train' as ArrayRecord: {error}") from error

    def entries(needed: Sequence[str]) -> Entries:
        for start in range(0, len(source), BLOCK_RECORDS):
            try:
                block = source.__getitems__(range(start, min(start + BLOCK_RECORDS, len(source))))
            except Exception as error:
                raise DataError(f"{found[0]}: a record after number {start} is damaged: {error}") from error
            for number, example in enumerate(block, start + 1):
                yield number, {name: _decoded(example[name]) for name in needed}

    return RowFile(found[0], columns, entries)


def _decoded(value: Any) -> Any:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


_OPENERS: dict[str, Callable[[Path], RowFile]] = {
    ".txt": lambda path: single_column(path, lambda: lines(path)),
    ".csv": _open_table,
    ".tsv": _open_table,
    ".jsonl": _open_json,
    ".json": _open_json,
    ".parquet": _open_parquet,
}
EXTENSIONS = tuple(_OPENERS)
TABLES = EXTENSIONS[1:]  # files whose rows have named columns
