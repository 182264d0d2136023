"""Files of sentences, opened as their extensions say."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.data import json_files, parquet_files, text_files
from diffcse_jax.data.corpus import Fault, Numbered
from diffcse_jax.data.delimiters import find_delimiter
from diffcse_jax.errors import DataError, NoSentencesError

USUAL_DELIMITERS = {".csv": ",", ".tsv": "\t"}
OBJECTS = (".jsonl", ".json", ".parquet")  # of which documents can be made, one each
EXTENSIONS = (".txt", *USUAL_DELIMITERS, *OBJECTS)
COMPRESSED = (".gz", ".xz")


@dataclasses.dataclass(frozen=True)
class SentenceFile:
    """A file that is opened.

    Attributes:
        path: where it is.
        columns: those that it has, of text.
        rows: starts a pass over the rows of some columns, numbered.
        unit: what the numbers count: lines, rows of a table that has none, items of a list.
        reading: how its bytes are read, where that is not what earlier versions did with such a file.
    """

    path: Path
    columns: Sequence[str]
    rows: Callable[[Sequence[str]], Iterable[Numbered]]
    unit: str = "line"
    reading: str = ""


def extension(path: Path) -> str:
    """The extension, in lower case, without the one of a compressed file."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def open_file(path: Path, wanted: Sequence[str], name: str = "") -> SentenceFile:
    """Opens a file of sentences.

    Args:
        path: the file.
        wanted: the columns that the user names.
        name: its name in messages, in place of the path.

    Raises:
        DataError: an unknown extension, or content that is not what the extension says.
        NoSentencesError: a file without a row that could tell its columns.
    """
    name = name or str(path)
    match kind := extension(path):
        case ".txt":
            if wanted:
                raise DataError(f"{name}: a text file has no columns; leave data.columns empty")
            return SentenceFile(path, ("sentence",), lambda _: text_files.text_records(path))
        case ".csv" | ".tsv":
            return _open_table(path, USUAL_DELIMITERS[kind], wanted)
        case ".jsonl":
            return SentenceFile(path, text_files.first_keys(path), functools.partial(text_files.json_records, path))
        case ".json":
            keys = _first_keys(path)
            rows = lambda columns: text_files.rows_of(json_files.entries(path), columns)  # noqa: E731
            return SentenceFile(path, keys, rows, "item" if json_files.is_list(path) else "line", kind)
        case ".parquet":
            columns = parquet_files.text_columns(path)
            return SentenceFile(path, columns, functools.partial(parquet_files.rows, path), "row", kind)
    raise DataError(f"{name}: unknown extension; known: {', '.join(EXTENSIONS)}, each but .parquet also .gz or .xz")


def objects_of(path: Path) -> Iterable[tuple[int, dict[str, Any] | Fault]]:
    """The objects of a file whose extension is among `OBJECTS`, numbered."""
    readers = {".jsonl": text_files.json_objects, ".json": json_files.entries, ".parquet": parquet_files.objects}
    return readers[extension(path)](path)


def _open_table(path: Path, usual: str, wanted: Sequence[str]) -> SentenceFile:
    delimiter = find_delimiter(path, usual, wanted)
    header = text_files.table_header(path, delimiter)

    def rows(columns: Sequence[str]) -> Iterable[Numbered]:
        positions = [header.index(column) for column in columns]
        return text_files.table_records(path, delimiter, len(header), positions)

    # A single column of a table must not be taken for the lines of the same bytes.
    is_told = delimiter != usual or len(header) == 1
    return SentenceFile(path, header, rows, reading=f"table {delimiter}" if is_told else "")


def _first_keys(path: Path) -> list[str]:
    entries = json_files.entries(path)
    keys = next((list(entry) for _, entry in entries if isinstance(entry, dict)), None)
    if keys is None:
        raise NoSentencesError(f"{path}: neither a list of strings or objects nor an object a line")
    return keys
