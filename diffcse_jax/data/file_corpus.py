"""The rows of files of sentences: one file, or several of one kind, read one after the other."""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from diffcse_jax.data import text_files
from diffcse_jax.data.corpus import ROLES, Corpus, Fault, Record, column_names, listed
from diffcse_jax.data.file_sets import FileSet
from diffcse_jax.data.formats import SentenceFile, extension, objects_of, open_file
from diffcse_jax.errors import DataError, NoSentencesError
from diffcse_jax.io import sha256

KNOWN_ROLES = (ROLES, ("sent0", "sent1", "hard_neg"))  # ours, and SimCSE's


def corpus_of_files(files: FileSet, columns: Sequence[str], on_bad_line: str, id_column: str = "") -> Corpus:
    """The rows, numbered over all files.

    Args:
        files: of one kind.
        columns: of the tables, to read; none: those that their names tell.
        on_bad_line: as in `Corpus`.
        id_column: the column whose values may be whole numbers in jsonl and json; empty: none.

    Raises:
        DataError: a file that is not what its extension says, or lacks a column.
    """
    opened = open_all(files, columns)
    first = opened[0]
    chosen = choose_columns(files.name if files.is_file else str(first.path), first.columns, columns)
    for file in opened:
        missing = [column for column in chosen if column not in file.columns]
        if missing:
            raise DataError(
                f"{file.path}: no column {missing[0]!r}, which {first.path.name} has; it has: {listed(file.columns)}"
            )
    opened = [_with_ids(file, id_column) for file in opened]
    rows = _Rows(opened, chosen)
    corpus = Corpus(files.name, chosen, rows.records, fingerprint_of(opened), on_bad_line, unit=first.unit)
    return corpus if files.is_file else dataclasses.replace(corpus, file_of=rows.file_of)


def open_all(files: FileSet, wanted: Sequence[str]) -> list[SentenceFile]:
    """The files, without those of several that hold nothing.

    Raises:
        DataError: as `open_file`.
    """
    if files.is_file:
        return [open_file(files.files[0], wanted, files.name)]
    opened = []
    for file in files.files:
        with contextlib.suppress(NoSentencesError):
            opened.append(open_file(file, wanted))
    if not opened:
        raise NoSentencesError(f"{files.name}: none of them holds a row")
    return opened


def objects_of_all(files: Sequence[SentenceFile]) -> Iterator[tuple[int | str, dict[str, Any] | Fault]]:
    """The objects of files whose extension is among `OBJECTS`, with their places."""
    for file in files:
        for number, entry in objects_of(file.path):
            yield number if len(files) == 1 else f"{file.path.name}, {file.unit} {number}", entry


def fingerprint_of(files: Sequence[SentenceFile]) -> functools.partial[str]:
    """Gives the SHA-256 of what determines the rows: the bytes and, but for one file read as ever, how each is read."""
    if len(files) == 1 and not files[0].reading:
        return functools.partial(sha256, [files[0].path])
    return functools.partial(_sha256_of_readings, files)


def choose_columns(name: str, available: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns to read: `wanted`; where none is, the only one or those whose names tell their roles.

    Raises:
        DataError: a column that is not there, or names that could mean anything.
    """
    if not available:
        raise DataError(f"{name}: its first row names no column")
    missing = [column for column in wanted if column not in available]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r} (data.columns); it has: {listed(available)}")
    chosen = tuple(wanted or _columns_by_name(available))
    if chosen:
        return chosen
    raise DataError(
        f"{name}: name one or more of its {len(available)} columns in data.columns: {listed(available)} (as in "
        f"--config.data.columns=\"('{available[-1]:.100}',)\")"
    )


def _with_ids(file: SentenceFile, column: str) -> SentenceFile:
    """The file; of JSON objects one in which whole numbers of the column are strings."""
    if not column or extension(file.path) not in (".jsonl", ".json"):
        return file

    def objects() -> Iterator[tuple[int, dict[str, Any] | Fault]]:
        for number, entry in objects_of(file.path):
            if isinstance(entry, dict) and type(entry.get(column)) is int:
                entry = entry | {column: str(entry[column])}
            yield number, entry

    return dataclasses.replace(file, rows=lambda columns: text_files.rows_of(objects(), columns))


class _Rows:
    """The rows of files, numbered over all of them."""

    def __init__(self, files: Sequence[SentenceFile], columns: Sequence[str]):
        self._files, self._columns = files, columns
        self._starts: list[int] = []

    def records(self) -> Iterator[Record]:
        """Starts a pass."""
        self._starts = []
        last = 0
        for file in self._files:
            start = last
            self._starts.append(start)
            for number, record in file.rows(self._columns):
                last = start + number
                yield last, record

    def file_of(self, place: int) -> tuple[str, int]:
        """The file of a number of the latest pass, and the number in it."""
        index = bisect.bisect_left(self._starts, place) - 1
        return str(self._files[index].path), place - self._starts[index]


def _sha256_of_readings(files: Sequence[SentenceFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{extension(file.path)} {file.reading}\n{sha256([file.path])}\n".encode())
    return digest.hexdigest()


def _columns_by_name(available: Sequence[str]) -> Sequence[str]:
    """All columns, in the order of their roles; none where the names do not tell the roles."""
    if len(available) == 1:
        return available
    known = (column_names(len(available), roles) for roles in KNOWN_ROLES)
    return next((names for names in known if {*available} == {*names}), ())
