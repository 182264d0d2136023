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
BLOCK_RECORDS = 10_000  # of ArrayRecord; single records are read a hundred times slower
UTF8_ADVICE = (
    "Text must be UTF-8. To convert a file, run: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW_FILE (or -f UTF-16, if most "
    "lines contain NUL bytes)"
)

Row = tuple[str, ...]
Place = int | str  # a line number from 1 or, if there are several files, the file and the line


class Fault(enum.StrEnum):
    """The reason why a line is not a row."""

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


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows. Each pass reads the source again; memory holds a part of it."""

    name: str  # in messages
    columns: tuple[str, ...]
    records: Callable[[], Iterable[tuple[Place, Row | Fault]]]  # starts a pass
    fingerprint: Callable[[], str]  # returns the SHA-256 of the content in hexadecimal
    on_bad_line: str = "skip"  # or `error`
    # How documents became rows. Empty if a row is a line. Otherwise a fault ends a document, and an empty place is not
    # counted.
    reading: tuple[str, ...] = ()
    unit: str = "line"  # what a place is the number of
    note: str = ""  # what was left out before reading, for example files of other kinds
    skipped: collections.Counter[Fault] = dataclasses.field(default_factory=collections.Counter)  # by the latest pass
    counted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # such as `document{s}`

    def __iter__(self) -> Iterator[Row]:
        """Yield the usable rows; see `in_documents`."""
        return (row for _, _, row in self.in_documents())

    def numbered(self) -> Iterator[tuple[Place, Row]]:
        """Yield places and usable rows; see `in_documents`."""
        return ((place, row) for place, _, row in self.in_documents())

    def in_documents(self) -> Iterator[tuple[Place, int, Row]]:
        """Yield the place, the document's increasing number and the row without surrounding white space.

        Raises:
            NoSentencesError: No row is usable.
            DataError: A row is not usable, and `on_bad_line` is `error`.
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
                at = f"{self.unit} {place}" if isinstance(place, int) else place
                advice = f"{UTF8_ADVICE}. " if row is Fault.NOT_UTF8 else ""
                raise DataError(f"{self.name}, {at}: {row}. {advice}Correct or remove it")
            self.skipped[row] += 1
        if not found:
            details = f" ({summary})" if (summary := self.summary()) else ""
            advice = f". {advice}" if (advice := self.advice()) else ""
            raise NoSentencesError(f"{self.name}: no usable {self.unit}{details}{advice}")

    def summary(self) -> str:
        """Return what the latest pass counted and skipped, or an empty string."""
        found = ", ".join(counted(count, what) for what, count in self.counted.items() if count)
        return "; ".join(filter(None, [found, self.skipped_summary(), self.note]))

    def skipped_summary(self) -> str:
        """Return the skipped lines by fault, as `skipped 3 lines: 2 empty, 1 not UTF-8`, or an empty string."""
        total = self.skipped.total()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.skipped.most_common())
        return f"skipped {counted(total, self.unit + '{s}')}: {kinds}" if total else ""

    def advice(self) -> str:
        """Say how to convert text that the latest pass could not decode; empty if it decoded all of it."""
        return UTF8_ADVICE if self.skipped[Fault.NOT_UTF8] else ""


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


class RowFile(NamedTuple):
    """An open file of rows. An empty file may have no columns."""

    path: Path
    columns: tuple[str, ...]
    entries: Callable[[Sequence[str]], Iterator[tuple[int, Entry]]]  # starts a pass over numbered rows of some columns
    unit: str = "line"  # what the numbers count


def open_file(path: Path, wanted: Sequence[str] = ()) -> RowFile:
    """Open a file with one of the `EXTENSIONS`. `wanted` are the columns that the user named.

    Raises:
        DataError: The content does not fit the extension.
    """
    return _OPENERS[extension(path)](path, wanted)


def single_column(path: Path, sentences: Callable[[], Iterable[str]]) -> RowFile:
    """Return rows of one column. Each pass calls `sentences`."""
    return RowFile(path, ("sentence",), lambda _: enumerate(({"sentence": text} for text in sentences()), 1))


def _open_table(path: Path, wanted: Sequence[str]) -> RowFile:
    """Open a table. Tabs separate fields in a tsv file, and in a csv file if its header has tabs and no commas."""
    first = next(lines(path), "")
    delimiter = "\t" if extension(path) == ".tsv" or ("\t" in first and "," not in first) else ","
    try:
        header = tuple(name.strip() for name in next(csv.reader(lines(path), delimiter=delimiter), []))
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    if not header:
        raise DataError(f"{path}: the first line is empty. It must contain the names of the columns")
    if len(header) == 1 and header[0] not in wanted and re.search(r"[;\t|,]|[.?!]$|(\S+\s+){5}\S", header[0]):
        raise DataError(
            f"{path}: the first line must contain the names of the columns, separated by commas (csv) or tabs (tsv), "
            f"but it is {header[0][:200]!r}. Save the table with that separator, or add a first line. "
            "A file with one sentence per line needs the extension .txt"
        )

    def entries(_: Sequence[str]) -> Iterator[tuple[int, Entry]]:
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


def _open_json(path: Path, _: Sequence[str]) -> RowFile:
    is_list = extension(path) == ".json" and next(filter(None, map(str.strip, lines(path))), "").startswith("[")

    def items() -> Iterator[Any]:
        try:
            yield from json.loads("".join(lines(path)))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid JSON: {error}") from error

    def values() -> Iterator[Any]:
        for line in lines(path):
            try:
                yield json.loads(line) if line.strip() else Fault.EMPTY
            except (ValueError, RecursionError):
                yield Fault.NOT_OBJECT

    def entries(_: Sequence[str]) -> Iterator[tuple[int, Entry]]:
        for number, value in enumerate(items() if is_list else values(), 1):
            entry = {"sentence": value} if is_list and isinstance(value, str) else value
            yield number, entry if isinstance(entry, dict | Fault) else Fault.NOT_OBJECT

    first = next((entry for _, entry in entries(()) if isinstance(entry, dict) and entry), {})
    return RowFile(path, tuple(first), entries, "item" if is_list else "line")


def _open_parquet(path: Path, _: Sequence[str]) -> RowFile:
    def is_text(kind: pa.DataType) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return kind in (pa.string(), pa.large_string(), pa.string_view())

    with _parquet_errors(path):
        schema = pq.read_schema(path)
        columns = tuple(field.name for field in schema if is_text(field.type))
    if not columns:
        raise DataError(f"{path}: no column of strings. It has: {listed(schema.names)}")

    def entries(needed: Sequence[str]) -> Iterator[tuple[int, Entry]]:
        with _parquet_errors(path), pq.ParquetFile(path) as file:
            batches = file.iter_batches(1000, columns=[column for column in needed if column in columns])
            yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1)

    return RowFile(path, columns, entries, "row")


@contextlib.contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def open_prepared(folder: Path) -> tuple[RowFile, list[Path]]:
    """Open the train split of the one data set in or below a folder, and return its shards, too.

    tensorflow-datasets has prepared it as ArrayRecord; TensorFlow is not needed.
    """
    tfds = require_extra("tensorflow_datasets", "tfds")
    found = sorted(file.parent for file in folder.rglob("dataset_info.json"))
    if len(found) != 1:
        raise DataError(f"{folder}: {len(found)} data sets (dataset_info.json). Name the folder of one data set")
    try:
        builder = tfds.builder_from_directory(found[0])
        source, features = builder.as_data_source("train"), builder.info.features
        shards = [Path(file) for file in builder.info.splits["train"].filepaths]
    except Exception as error:  # the library raises many types
        raise DataError(f"{found[0]}: cannot read the split 'train' as ArrayRecord: {error}") from error
    texts = tuple(sorted(name for name, each in features.items() if isinstance(each, tfds.features.Text)))
    if not texts:
        raise DataError(f"{found[0]}: no column of text. It has: {listed(sorted(features))}")

    def entries(needed: Sequence[str]) -> Iterator[tuple[int, Entry]]:
        for start in range(0, len(source), BLOCK_RECORDS):
            try:
                block = source.__getitems__(range(start, min(start + BLOCK_RECORDS, len(source))))
            except Exception as error:
                raise DataError(f"{found[0]}: a record after number {start} is damaged: {error}") from error
            for number, example in enumerate(block, start + 1):
                yield number, {name: example[name].decode(errors="surrogateescape") for name in needed}

    return RowFile(folder, texts, entries), shards


_OPENERS: dict[str, Callable[[Path, Sequence[str]], RowFile]] = {
    ".txt": lambda path, _: single_column(path, lambda: lines(path)),
    ".csv": _open_table,
    ".tsv": _open_table,
    ".jsonl": _open_json,
    ".json": _open_json,
    ".parquet": _open_parquet,
}
EXTENSIONS = tuple(_OPENERS)
TABLES = EXTENSIONS[1:]  # files whose rows have named columns
