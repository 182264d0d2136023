"""Readers of Parquet files: their columns of strings."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffcse_jax.data.corpus import Fault, Numbered, listed
from diffcse_jax.errors import DataError

BLOCK_ROWS = 1000
# What reading a damaged file may raise; the last where the name of a column is not UTF-8.
UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)


def text_columns(path: Path) -> list[str]:
    """The names of the columns that hold strings.

    Raises:
        DataError: there is none, or the file cannot be read.
    """
    try:
        schema = pq.read_schema(path)
        available = list(schema.names)
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    names = [field.name for field in schema if _is_text(field.type) and available.count(field.name) == 1]
    if not names:
        raise DataError(f"{path}: no column of strings; it has: {listed(available)}")
    return names


def rows(path: Path, columns: Sequence[str]) -> Iterator[Numbered]:
    """The values of these columns of strings, row by row.

    Raises:
        DataError: the file is damaged.
    """
    for number, row in enumerate(_rows(path, columns), 1):
        texts = tuple(text for text in row if text is not None)
        yield number, texts if len(texts) == len(row) else Fault.EMPTY


def objects(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    """The rows as objects of their columns of strings.

    Raises:
        DataError: as `rows`.
    """
    columns = text_columns(path)
    for number, row in enumerate(_rows(path, columns), 1):
        yield number, dict(zip(columns, row, strict=True))


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str | None, ...]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BLOCK_ROWS, columns=list(columns)):
                yield from zip(*(_texts(batch.column(name)) for name in columns), strict=True)
    except (*UNREADABLE, KeyError) as error:
        raise _unreadable(path, error) from error


def _texts(column: pa.Array) -> list[str | None]:
    """The strings, whose bytes need not be UTF-8: what is none arrives as surrogates, as from other files."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return [None if value is None else value.decode(errors="surrogateescape") for value in values]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as Parquet: {error}")
