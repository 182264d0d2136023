"""Readers of files with one text, row or object per line: txt, csv, tsv, jsonl, json and Parquet.

Any of them except Parquet may be compressed (.gz, .xz). Undecodable bytes arrive as surrogates, which `checked` finds.
"""

import codecs
import contextlib
import csv
import dataclasses
import gzip
import hashlib
import itertools
import json
import lzma
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffcse_jax.data.corpus import TRAINING_OPTIONS, Fault, OptionNames, Row, listed
from diffcse_jax.errors import DataError, NoSentencesError
from diffcse_jax.io import cache_folder, sha256, why_unreadable, write_json

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")  # files whose rows have named columns
EXTENSIONS = (".txt", *TABLES)
LONGEST_LINE = 1 << 26  # bytes; the rest of a longer line is not read
PARQUET_ERRORS = (OSError, pa.ArrowException, UnicodeDecodeError, KeyError)  # of damaged files
LARGE_FILE = 1 << 24  # bytes from which hashes are kept

Entry = dict[str, Any] | Fault


@dataclasses.dataclass(frozen=True)
class RowFile:
    """An open file of rows.

    Attributes:
        path: The file.
        columns: Names of its columns.
        entries: Starts a pass over the numbered rows as dicts. The argument lists the columns that are needed.
        unit: What the numbers count.
    """

    path: Path
    columns: tuple[str, ...]
    entries: Callable[[Sequence[str]], Iterator[tuple[int, Entry]]]
    unit: str = "line"

    def rows(self, columns: Sequence[str], id_column: str = "") -> Iterator[tuple[int, Row | Fault]]:
        """Yield numbers and the values of some columns. An `id_column` may also contain whole numbers."""
        for number, entry in self.entries(columns):
            if isinstance(entry, Fault):
                yield number, entry
            elif any(column not in entry for column in columns):
                yield number, Fault.MISSING_KEY
            else:
                if id_column and type(entry[id_column]) is int:
                    entry = entry | {id_column: str(entry[id_column])}
                row = tuple(entry[column] for column in columns)
                fault = Fault.EMPTY if None in row else Fault.NOT_STRING
                yield number, row if all(isinstance(value, str) for value in row) else fault


def extension(path: Path) -> str:
    """Return the extension in lower case, without that of a compressed file."""
    return (path.with_suffix("") if path.suffix.lower() in (".gz", ".xz") else path).suffix.lower()


def open_file(path: Path, wanted: Sequence[str] = (), names: OptionNames = TRAINING_OPTIONS) -> RowFile:
    """Open a file of rows.

    Args:
        path: The file.
        wanted: Columns that the user named.
        names: Options for messages.

    Raises:
        DataError: The extension is unknown, or the content does not fit it.
        NoSentencesError: The file is empty, so that its columns are unknown.
    """
    kind = extension(path)
    if kind == ".txt":
        if wanted:
            raise DataError(f"{path}: a txt file does not have columns. Leave {names.columns} empty")
        return RowFile(path, ("sentence",), lambda _: (
            (number, {"sentence": line}) for number, line in enumerate(lines(path), 1)
        ))  # fmt: skip
    if kind in (".csv", ".tsv"):
        header = _header(path, wanted, names)
        return RowFile(path, header, lambda _: _table_entries(path, header))
    if kind == ".parquet":
        return RowFile(path, _parquet_columns(path), lambda columns: _parquet_entries(path, columns), "row")
    if kind not in TABLES:
        raise DataError(
            f"{path}: unknown extension. Known: {', '.join(EXTENSIONS)}; each except .parquet also .gz, .xz"
        )
    is_list = kind == ".json" and _is_list(path)
    entries = _list_entries if is_list else _object_entries
    first = next((entry for _, entry in entries(path) if isinstance(entry, dict)), None)
    if first is None:
        expected = "a list of strings or objects, or one object per line" if kind == ".json" else "one object per line"
        raise NoSentencesError(f"{path}: no JSON object found. Expected {expected}")
    return RowFile(path, tuple(first), lambda _: entries(path), "item" if is_list else "line")


# Lines


def lines(path: Path) -> Iterator[str]:
    """Yield lines without a byte-order mark. Only a line feed ends a line.

    Raises:
        DataError: The file cannot be read, or the archive is damaged.
    """
    with _opened(path) as file:
        for number, line in enumerate(lines_of(file)):
            yield (line if number else line.removeprefix(codecs.BOM_UTF8)).decode(errors="surrogateescape")


def lines_of(file: Any) -> Iterator[bytes]:
    """Yield lines of a binary file. A line that is too long is cut and ends in NUL, which makes it unusable."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            line += b"\0"
        yield line


def text_lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines of a text file; line ends may be those of any platform.

    Raises:
        DataError: The file cannot be read, is not in this encoding, or contains NUL.
    """
    if problem := why_unreadable(path):
        raise DataError(problem)
    try:
        with path.open(encoding=encoding) as file:
            for number, line in enumerate(file, 1):
                if "\0" in line:
                    raise DataError(f"{path}, line {number}: contains NUL. Check that this is a text file")
                yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed.

    Raises:
        DataError: The file cannot be read, or the archive is damaged.
    """
    with _opened(path) as file:
        return file.read()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
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


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file.

    The hash of a large file is kept in the cache folder, and is used again while the file's size, times and inode stay
    the same.
    """
    status = path.stat()
    if status.st_size < LARGE_FILE:
        return sha256([path])
    identity = [
        str(path.resolve()),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]
    record = cache_folder("hashes") / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(record.read_text())
        if found["file"] == identity:
            return str(found["sha256"])
    digest = sha256([path])
    if time.time() - status.st_mtime > 2 and path.stat().st_ctime_ns == status.st_ctime_ns:  # not written meanwhile
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json(record, {"file": identity, "sha256": digest})
    return digest


# Tables


def _delimiter(path: Path) -> str:
    """Return the separator of a table: tabs in a tsv file, and in a csv file if the header has tabs and no commas."""
    header = next(lines(path), "")
    return "\t" if extension(path) == ".tsv" or ("\t" in header and "," not in header) else ","


def _header(path: Path, wanted: Sequence[str], names: OptionNames) -> tuple[str, ...]:
    """Return the names of a table's columns.

    Raises:
        DataError: The first line does not look like names of columns.
    """
    try:
        header = next(csv.reader(lines(path), delimiter=_delimiter(path)), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    if not header:
        raise DataError(f"{path}: the first line is empty. It must contain the names of the columns")
    columns = tuple(name.strip() for name in header)
    if len(columns) == 1 and columns[0] not in wanted and re.search(r"[;\t|,]|[.?!]$|(\S+\s+){5}\S", columns[0]):
        raise DataError(
            f"{path}: the first line must contain the names of the columns, separated by commas (csv) or tabs (tsv), "
            f"but it is {columns[0][:200]!r}. Save the table with that separator, add a first line such as `sentence`, "
            f"or give the column's name in {names.columns}. A file with one sentence per line needs the extension .txt"
        )
    return columns


def _table_entries(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Entry]]:
    """Yield the rows after the header, with the number of their first line: quoted fields may contain line feeds."""
    reader = csv.reader(lines(path), delimiter=_delimiter(path))
    next(reader)
    while True:
        line = reader.line_num + 1
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


# JSON


def _object_entries(path: Path) -> Iterator[tuple[int, Entry]]:
    for number, line in enumerate(lines(path), 1):
        try:
            entry = json.loads(line) if line.strip() else Fault.EMPTY
        except (ValueError, RecursionError):
            entry = Fault.NOT_OBJECT
        yield number, entry if isinstance(entry, dict | Fault) else Fault.NOT_OBJECT


def _is_list(path: Path) -> bool:
    texts = (line.removeprefix("\ufeff").strip() for line in lines(path))
    return next(filter(None, texts), "").startswith("[")


def _list_entries(path: Path) -> Iterator[tuple[int, Entry]]:
    try:
        found = json.loads(read_bytes(path).decode("utf-8-sig", errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    for number, entry in enumerate(found, 1):
        entry = {"sentence": entry} if isinstance(entry, str) else entry
        yield number, entry if isinstance(entry, dict) else Fault.NOT_OBJECT


# Parquet


@contextlib.contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except PARQUET_ERRORS as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _parquet_columns(path: Path) -> tuple[str, ...]:
    """Return the names of the columns that contain strings."""
    with _parquet_errors(path):
        schema = pq.read_schema(path)
        available = list(schema.names)
    names = tuple(field.name for field in schema if _is_text(field.type) and available.count(field.name) == 1)
    if not names:
        raise DataError(f"{path}: no column of strings. It has: {listed(available)}")
    return names


def _parquet_entries(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Entry]]:
    numbers = itertools.count(1)
    available = _parquet_columns(path)
    names = [column for column in columns if column in available]
    with _parquet_errors(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(1000, columns=names):
            for row in zip(*(_texts(batch.column(name)) for name in names), strict=True):
                yield next(numbers), dict(zip(names, row, strict=True))


def _texts(column: pa.Array) -> list[str | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return [None if value is None else value.decode(errors="surrogateescape") for value in values]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
