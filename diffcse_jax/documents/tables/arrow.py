"""Rows of binary tables: Parquet, Arrow, folders that `datasets` saved, and ArrayRecord data sets.

Neither `datasets` nor TensorFlow is needed. Memory holds a part of a file.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.tables import parquet
from diffcse_jax.documents.tables.arrow_values import TOO_LARGE, TooRepetitive, Values
from diffcse_jax.documents.tables.table import Table, table_of
from diffcse_jax.documents.tables.values import (
    NumberedRow,
    as_stored,
    chosen_split,
    listed,
    sample_of,
    unique_names,
    without_missing,
)
from diffcse_jax.documents.text.encodings import decode
from diffcse_jax.documents.text.lines import COMPRESSED
from diffcse_jax.errors import DataError, require_extra
from diffcse_jax.io import why_unreadable

BLOCK_RECORDS = 10_000  # of ArrayRecord; single records are read a hundred times slower
ARROW_FILE = b"ARROW1"  # how a file of Arrow begins, in contrast to a stream

SAVED = "state.json"  # in a folder that `datasets.save_to_disk` wrote: names the files
SAVED_SPLITS = "dataset_dict.json"  # in a folder of such folders
DESCRIBED = "dataset_info.json"  # written by `datasets` and by tensorflow-datasets
FEATURES = "features.json"  # only by tensorflow-datasets
DATA_SETS = ({SAVED_SPLITS}, {SAVED, DESCRIBED}, {DESCRIBED, FEATURES})  # what a folder has
OLD_KEYS = ("_indices_files", "_indices_data_files")

# What pyarrow raises for damaged files.
DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, MemoryError, pa.ArrowException)

# Files


def open_parquet(path: Path, name: str) -> Table:
    """Open a Parquet file, of which a batch of rows is read at once."""
    _check(path, name)
    names = functools.partial(parquet.column_names, path)
    batches = functools.partial(parquet.batches, path)
    return _Stored(name, "Parquet", (path,), names, batches).table()


def open_arrow(path: Path, name: str) -> Table:
    """Open a file or stream of Arrow, such as `datasets` and Feather write."""
    _check(path, name)
    return _arrow_files((path,), name)


def _arrow_files(paths: tuple[Path, ...], name: str) -> Table:
    def batches(_: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for path in paths:
            for batch in _arrow_batches(path):
                batch.validate(full=True)  # reading a damaged one would end the process
                for start in range(0, len(batch), parquet.BATCH_ROWS):
                    yield batch.slice(start, parquet.BATCH_ROWS)

    def names() -> tuple[list[str], str]:
        with pa.memory_map(str(paths[0])) as source:
            return _arrow_reader(source).schema.names, ""

    return _Stored(name, "Arrow", paths, names, batches).table()


def _arrow_reader(source: Any) -> Any:
    is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
    source.seek(0)
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        reader = _arrow_reader(source)
        if isinstance(reader, pa.RecordBatchFileReader):
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


def _check(path: Path, name: str) -> None:
    """Raise `DataError` if a file cannot be opened, or is compressed: it is read in any order."""
    if problem := why_unreadable(path):
        raise DataError(problem)
    if path.suffix.lower() in COMPRESSED:
        raise DataError(f"{name}: a file of this kind cannot be read compressed. Decompress it")


class _Stored(NamedTuple):
    """A table that is stored by columns."""

    name: str
    kind: str
    files: Sequence[Path]
    names: Callable[[], tuple[list[str], str]]  # and a note
    batches: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]  # with the named columns

    def table(self) -> Table:
        """Open the table. Columns of the same name are told apart."""
        try:
            stored, note = self.names()
        except DAMAGED as error:
            raise DataError(f"{self.name} cannot be read as {self.kind}: {error}") from error
        columns, notes = unique_names(stored, self.name)
        if note:
            notes = (*notes, f"{self.name}: {note}")
        if note and not columns:
            raise DataError(notes[-1])
        places = {column: place for place, column in enumerate(columns)}

        def read(wanted: Sequence[str], ledger: Ledger) -> Iterator[NumberedRow]:
            if missing := [column for column in wanted if column not in places]:
                has = listed(columns)
                raise DataError(f"{self.name}: no column {missing[0]!r}. It has: {has}")
            return self._read(stored, {column: places[column] for column in wanted}, ledger)

        sample = sample_of(read(columns, Ledger(self.name)))
        return table_of(self.name, columns, read, sample, notes)

    def _read(
        self, stored: list[str], places: dict[str, int], ledger: Ledger
    ) -> Iterator[NumberedRow]:
        values = Values(sum(file.stat().st_size for file in self.files))
        number = 0
        copies = _copies(stored)
        try:
            for batch in self.batches([stored[place] for place in places.values()]):
                same = collections.defaultdict(list)
                for place, column in enumerate(batch.schema.names):
                    same[column].append(place)
                wanted = [same[stored[place]][copies[place]] for place in places.values()]
                columns = [values.of(batch.column(place)) for place in wanted]
                # Without columns there is nothing to count rows by.
                for row in zip(*columns, strict=True) if columns else [()] * len(batch):
                    number += 1
                    yield number, dict(zip(places, row, strict=True))
                    if values.end_row():
                        ledger.change(TOO_LARGE, "read without them", Place(self.name, number))
        except TooRepetitive as error:
            raise DataError(f"{self.name}{_after(number)}: {error}") from error
        except DAMAGED as error:
            kind = f"{self.kind}{_after(number)}"
            raise DataError(f"{self.name} cannot be read as {kind}: {error}") from error
        for note in values.notes():
            ledger.note(f"{self.name}: {note}")


def _after(number: int) -> str:
    return f" after row {number:,}" if number else ""


def _copies(names: Sequence[str]) -> list[int]:
    """Return for each name how often it stands before."""
    counts: collections.Counter[str] = collections.Counter()
    copies = []
    for name in names:
        copies.append(counts[name])
        counts[name] += 1
    return copies


# Folders


def data_set_folders(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return the folders of data sets among some files: those that `open_data_set` opens.

    Other folders with `dataset_info.json`, such as those of the cache of `datasets`, hold files
    like any folder.
    """
    known = (SAVED, SAVED_SPLITS, DESCRIBED, FEATURES)
    by_folder = collections.defaultdict(set)
    for file in files:
        if file.name in known and file.is_file():  # in contrast to a pipe
            by_folder[file.parent].add(file.name)
    folders = [each for each, names in by_folder.items() if any(map(names.issuperset, DATA_SETS))]
    splits = [folder for folder in folders if SAVED_SPLITS in by_folder.get(folder.parent, ())]
    return tuple(sorted(set(folders) - set(splits)))


def is_of_data_set(file: Path) -> bool:
    """Return whether a file in the folder of a data set belongs to it, by its name."""
    if file.name in (SAVED, SAVED_SPLITS, DESCRIBED, FEATURES):
        return True
    return file.name.endswith((".arrow", ".labels.txt")) or ".array_record" in file.name


def open_data_set(folder: Path, name: str) -> Table:
    """Open a folder that `datasets.save_to_disk` or tensorflow-datasets wrote."""
    splits = folder / SAVED_SPLITS
    if splits.is_file():
        split, note = chosen_split(_strings(_json(splits, name).get("splits"), splits), name)
        table = _open_saved(folder / split, f"{name}/{split}")
        return dataclasses.replace(table, name=name, notes=(*filter(None, [note]), *table.notes))
    return _open_saved(folder, name) if (folder / SAVED).is_file() else _open_prepared(folder, name)


def _open_saved(folder: Path, name: str) -> Table:
    """Open one split that `datasets.save_to_disk` wrote: files of Arrow that `state.json` names."""
    path = folder / SAVED
    state = _json(path, name)
    if any(state.get(key) for key in OLD_KEYS):
        raise DataError(f"{name}: an old version of datasets saved it with indices. Save it again")
    listed_files = state.get("_data_files")
    if not isinstance(listed_files, list):
        raise DataError(f"{path}: it has no list _data_files, so that it is not from datasets")
    names = [each.get("filename") if isinstance(each, dict) else None for each in listed_files]
    files = tuple(folder / each for each in _strings(names, path))
    for file in files:
        _check(file, name)
    return _arrow_files(files, name) if files else table_of(name, (), lambda *_: iter(()), {})


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{name}: cannot read {path.name}: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{name}: {path.name} does not hold an object")
    return content


def _strings(names: Any, path: Path) -> list[str]:
    """Return names of files or folders beside a path, or raise `DataError`."""
    if not isinstance(names, list):
        raise DataError(f"{path}: names are missing")
    for each in names:
        if not isinstance(each, str) or Path(each).name != each:
            raise DataError(f"{path}: {each!r} does not name a file or folder beside it")
    return names


def _open_prepared(folder: Path, name: str) -> Table:
    """Open the train split of the one data set in or below a folder.

    tensorflow-datasets has prepared it as ArrayRecord; TensorFlow is not needed.
    """
    tfds = require_extra("tensorflow_datasets", "tfds")
    folders = sorted({file.parent for file in folder.rglob(DESCRIBED)})
    if len(folders) != 1:
        raise DataError(f"{name}: {len(folders)} data sets ({DESCRIBED}). Name the folder of one")
    try:
        builder = tfds.builder_from_directory(folders[0])
        source = builder.as_data_source("train")
        columns = tuple(sorted(builder.info.features))
    except Exception as error:  # the library raises many types
        problem = "cannot read the split 'train' as ArrayRecord"
        raise DataError(f"{name}: {problem}: {error}") from error

    def read(wanted: Sequence[str], ledger: Ledger) -> Iterator[NumberedRow]:
        if missing := [column for column in wanted if column not in columns]:
            raise DataError(f"{name}: no column {missing[0]!r}. It has: {listed(columns)}")
        for start in range(0, len(source), BLOCK_RECORDS):
            try:
                block = source.__getitems__(range(start, min(start + BLOCK_RECORDS, len(source))))
            except Exception as error:
                problem = f"a record after number {start:,} is damaged"
                raise DataError(f"{name}: {problem}: {error}") from error
            for number, example in enumerate(block, start + 1):
                values = {column: _plain(example[column]) for column in wanted}
                yield number, {name: without_missing(value) for name, value in values.items()}

    return table_of(name, columns, read, sample_of(read(columns, Ledger(name))))


def _plain(value: Any) -> Any:
    """Return a value of NumPy as one of Python, with bytes as text."""
    if isinstance(value, bytes):
        return decode(value).text
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.floating):
        return as_stored(value.tolist(), value.dtype.name)
    return _plain(value.tolist()) if isinstance(value, np.ndarray | np.generic) else value
