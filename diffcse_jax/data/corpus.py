"""Text sources: rows of one to three sentences from a file, a data-set folder or a name, read as a stream.

One column is a sentence, two a sentence and its positive, three add a hard negative. Lines that cannot be used are
skipped and counted, or refused, as `data.on_bad_line` says.
"""

import collections
import csv
import dataclasses
import difflib
import enum
import functools
import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.config import DataConfig
from diffcse_jax.data.cache import hub_file
from diffcse_jax.errors import DataError, NoSentencesError

Row = tuple[str, ...]

WIKI1M_FILE = "wiki1m_for_simcse.txt"
MAX_COLUMNS = 3
COLUMN_NAMES = (("sentence", "positive", "hard_negative"), ("sent0", "sent1", "hard_neg"))  # ours, and SimCSE's


class Fault(enum.StrEnum):
    """Why a line gives no row."""

    EMPTY = "empty"
    NOT_UTF8 = "not UTF-8"
    NUL_BYTE = "NUL byte"
    WRONG_WIDTH = "wrong number of fields"
    INVALID_CSV = "invalid CSV"
    NOT_OBJECT = "not a JSON object"
    MISSING_KEY = "missing key"
    NOT_STRING = "value not a string"


Record = tuple[int, Row | Fault]  # line number from 1, and its row or why it has none


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows, all as wide as `columns`. Iterating reads it from its start and never holds it in memory.

    Attributes:
        name: what to call it in messages.
        columns: the names of its columns.
        records: starts a pass over the numbered lines.
        fingerprint: the SHA-256 of the content, as hexadecimal digits; reads all of it.
        on_bad_line: `skip` or `error`.
        skipped: lines left out by the latest pass, by kind.
    """

    name: str
    columns: tuple[str, ...]
    records: Callable[[], Iterable[Record]]
    fingerprint: Callable[[], str]
    on_bad_line: str = "skip"
    skipped: collections.Counter[Fault] = dataclasses.field(default_factory=collections.Counter)

    def __iter__(self) -> Iterator[Row]:
        """Yields the usable rows; what it raises is told at `numbered`."""
        return (row for _, row in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Row]]:
        """Yields the usable rows with their line numbers, without surrounding white space.

        Raises:
            DataError: a bad line where `on_bad_line` is `error`; a damaged archive.
            NoSentencesError: no usable line at all.
        """
        self.skipped.clear()
        found = False
        for line, record in self.records():
            row = record if isinstance(record, Fault) else _checked(record)
            if not isinstance(row, Fault):
                found = True
                yield line, row
            elif self.on_bad_line == "skip":
                self.skipped[row] += 1
            else:
                raise DataError(f"{self.name}, line {line}: {row}; correct it, or set data.on_bad_line=skip")
        if not found:
            skipped = f" ({self.skipped_summary()})" if self.skipped else ""
            raise NoSentencesError(f"{self.name}: no usable line{skipped}")

    def skipped_summary(self) -> str:
        """What the latest pass left out, such as `skipped 3 lines: 2 empty, 1 not UTF-8`; empty where nothing was."""
        if not self.skipped:
            return ""
        total = self.skipped.total()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.skipped.most_common())
        return f"skipped {total:,} line{'s' if total > 1 else ''}: {kinds}"


def open_corpus(data: DataConfig) -> Corpus:
    """The corpus that `data.train_file` names.

    Text is one sentence a line; csv and tsv have a header and the csv module's quoting; jsonl has one object a line.
    Each may be compressed (.gz, .xz). A folder is a prepared ArrayRecord data set.

    Raises:
        DataError: there is no such file, its extension or folder is of no known kind, it is empty, it lacks a
            column of `data.columns`, or that is empty and the columns could mean anything.
    """
    if data.train_file == "docstrings":
        return _docstring_corpus(data)
    if data.train_file == "wiki1m":
        path = hub_file(WIKI1M_FILE, f"fetch it and set data.train_file=/path/{WIKI1M_FILE}")
        return _file_corpus("wiki1m", path, data)
    path = Path(data.train_file).expanduser()
    if path.is_dir():
        return _array_record_corpus(path, data)
    if not path.is_file():
        raise DataError(f"data.train_file: no file {path}{_nearest_name(path)}; known names: wiki1m, docstrings")
    return _file_corpus(str(path), path, data)


def _checked(row: Row) -> Row | Fault:
    """The row without surrounding white space, or why it cannot be used. Undecodable bytes arrive as surrogates."""
    row = tuple(text.strip() for text in row)
    for text in row:
        if not text:
            return Fault.EMPTY
        if "\0" in text:
            return Fault.NUL_BYTE
        try:
            text.encode()
        except UnicodeEncodeError:
            return Fault.NOT_UTF8
    return row


def _file_corpus(name: str, path: Path, data: DataConfig) -> Corpus:
    extension = (path.with_suffix("") if path.suffix in (".gz", ".xz") else path).suffix
    match extension:
        case ".txt":
            columns, records = ("sentence",), functools.partial(_text_records, path)
            if data.columns:
                raise DataError(f"{name}: a text file has no columns; leave data.columns empty")
        case ".csv" | ".tsv":
            delimiter = "\t" if extension == ".tsv" else ","
            header = _table_header(path, delimiter)
            columns = _choose_columns(name, header, data.columns)
            wanted = [header.index(column) for column in columns]
            records = functools.partial(_table_records, path, delimiter, len(header), wanted)
        case ".jsonl":
            columns = _choose_columns(name, _first_keys(path), data.columns)
            records = functools.partial(_json_records, path, columns)
        case _:
            raise DataError(f"{name}: unknown extension; known: .txt, .csv, .tsv, .jsonl, each also .gz or .xz")
    return Corpus(name, columns, records, functools.partial(_sha256, [path]), data.on_bad_line)


def _choose_columns(name: str, available: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns to read: `wanted`; where none is, the only one or those whose names say what they are."""
    missing = [column for column in wanted if column not in available]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r} (data.columns); it has: {', '.join(available)}")
    chosen = tuple(wanted or _columns_by_name(available))
    if 1 <= len(chosen) <= MAX_COLUMNS:
        return chosen
    raise DataError(
        f"{name}: name 1 to {MAX_COLUMNS} of its {len(available)} columns in data.columns: {', '.join(available)}"
    )


def _columns_by_name(available: Sequence[str]) -> Sequence[str]:
    """All columns, in the order of their roles; none where the names do not tell the roles."""
    if len(available) == 1:
        return available
    return next((names[: len(available)] for names in COLUMN_NAMES if {*available} == {*names[: len(available)]}), ())


def _docstring_corpus(data: DataConfig) -> Corpus:
    from diffcse_jax.data.docstrings import docstring_sentences

    if data.columns:
        raise DataError("docstrings has no columns to choose; leave data.columns empty")
    return Corpus(
        "docstrings",
        ("sentence",),
        lambda: ((number, (sentence,)) for number, sentence in enumerate(docstring_sentences(), 1)),
        lambda: hashlib.sha256("\n".join(docstring_sentences()).encode()).hexdigest(),
        data.on_bad_line,
    )


def _array_record_corpus(folder: Path, data: DataConfig) -> Corpus:
    from diffcse_jax.data import array_record  # loads tensorflow_datasets, which other sources do not need

    prepared = array_record.open_prepared(folder)
    columns = _choose_columns(str(folder), prepared.columns, data.columns)
    return Corpus(
        str(folder),
        columns,
        functools.partial(prepared.records, columns),
        functools.partial(_sha256, prepared.files),
        data.on_bad_line,
    )


def _nearest_name(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def _sha256(paths: Sequence[Path]) -> str:
    """The SHA-256 of the files' bytes, one file after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[str]:
    """Lines that end in a line feed (other line separators of Unicode are text), without a leading byte-order mark."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error})") from error


def _text_records(path: Path) -> Iterator[Record]:
    return ((number, (line,)) for number, line in enumerate(_lines(path), 1))


def _table_header(path: Path, delimiter: str) -> list[str]:
    try:
        header = next(csv.reader(_lines(path), delimiter=delimiter), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    if not header:
        raise DataError(f"{path}: the first line is empty; it must hold the names of the columns")
    return [name.strip() for name in header]


def _table_records(path: Path, delimiter: str, width: int, wanted: Sequence[int]) -> Iterator[Record]:
    """Rows after the header, with the number of their first line: quoted fields may hold line feeds."""
    reader = csv.reader(_lines(path), delimiter=delimiter)
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


def _json_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    for number, line in enumerate(_lines(path), 1):
        entry = _json_object(line)
        if isinstance(entry, Fault):
            yield number, entry
        elif any(column not in entry for column in columns):
            yield number, Fault.MISSING_KEY
        else:
            row = tuple(entry[column] for column in columns)
            yield number, row if all(isinstance(value, str) for value in row) else Fault.NOT_STRING


def _json_object(line: str) -> dict[str, Any] | Fault:
    """The object on a line, or why there is none."""
    if not line.strip():
        return Fault.EMPTY
    try:
        entry = json.loads(line)
    except ValueError:
        return Fault.NOT_OBJECT
    return entry if isinstance(entry, dict) else Fault.NOT_OBJECT


def _first_keys(path: Path) -> list[str]:
    for line in _lines(path):
        entry = _json_object(line)
        if isinstance(entry, dict):
            return list(entry)
    raise NoSentencesError(f"{path}: no line holds a JSON object")
