"""Values of Arrow as Python objects, one row at a time, with limits of memory.

Arrow stores a repeated value once, so that a file of 1 kB may hold gigabytes of text, or lists of
millions of parts.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from diffcse_jax.documents.tables.values import (
    LONGEST_ROW,
    MOST_VALUES,
    as_stored,
    without_missing,
)
from diffcse_jax.documents.text.encodings import decode
from diffcse_jax.errors import counted

# What pyarrow raises for values that Python cannot hold.
NOT_IN_PYTHON = (ArithmeticError, ValueError, TypeError, pa.ArrowException)
TOO_LARGE = f"row{{s}} with lists of more than {MOST_VALUES:,} values or {LONGEST_ROW:,} characters"
# What all values of a table may take, in characters: files that are compressed well take less.
MOST_REPEATED = 1000  # times the size of its files
MOST_OF_SMALL = 1 << 26  # and these
COST_OF_A_ROW = 100  # of which a million may be stored as one


class TooRepetitive(Exception):
    """The values of a table have far more characters than its files."""


class _TooLarge(Exception):
    """The lists of a row have too many values."""


class Values:
    """The values of a table, and what could not become one.

    Args:
        size: The bytes of the table's files.
    """

    def __init__(self, size: int) -> None:
        self.not_utf8 = 0
        self.unreadable = 0
        self._left = MOST_OF_SMALL + MOST_REPEATED * size  # characters of the table
        self._parts = MOST_VALUES  # that lists of the row may still have
        self._characters = LONGEST_ROW  # and their strings
        self._is_too_large = False

    def of(self, column: pa.Array) -> Iterable[Any]:
        """Return the values of a column of a batch."""
        if not _may_repeat(column.type):
            with contextlib.suppress(*NOT_IN_PYTHON):
                values = column.to_pylist()
                self._left -= column.nbytes
                if pa.types.is_floating(column.type):
                    values = [as_stored(value, str(column.type)) for value in values]
                return map(without_missing, values)
        read = self._with_parts if _has_parts(column.type) else self._simple
        return map(without_missing, map(read, column))

    def end_row(self) -> bool:
        """Return whether lists of the row were too large. Raises `TooRepetitive`."""
        self._left -= COST_OF_A_ROW
        if self._left < 0:
            raise TooRepetitive(
                f"its values repeat so often that they have more than {MOST_REPEATED:,} times the "
                "characters of the file. Remove what is repeated, or write it as jsonl"
            )
        self._parts, self._characters = MOST_VALUES, LONGEST_ROW
        was_too_large, self._is_too_large = self._is_too_large, False
        return was_too_large

    def _simple(self, scalar: pa.Scalar) -> Any:
        try:
            value = scalar.as_py()
            self._left -= len(value) if isinstance(value, str | bytes) else 1
            return value
        except UnicodeDecodeError:
            if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
                scalar = scalar.value
            self.not_utf8 += 1
            return decode(scalar.as_buffer().to_pybytes()).text
        except NOT_IN_PYTHON:
            self.unreadable += 1
            return None

    def _with_parts(self, scalar: pa.Scalar) -> Any:
        """Return a list or object; None if it is too large."""
        try:
            return self._inside(scalar)
        except _TooLarge:
            self._is_too_large = True
            return None

    def _inside(self, scalar: pa.Scalar) -> Any:
        if not scalar.is_valid:
            return None
        if isinstance(scalar, pa.ListScalar):
            return self._list(scalar)
        if isinstance(scalar, pa.StructScalar):
            self._take(len(scalar))
            return {key: self._inside(scalar[key]) for key in scalar}
        if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar | pa.RunEndEncodedScalar):
            return self._inside(scalar.value)
        if isinstance(scalar, pa.UnionScalar):
            return self._inside(scalar.value)
        value = self._simple(scalar)
        if isinstance(value, str | bytes):
            self._take(0, len(value))
        return value

    def _list(self, scalar: pa.ListScalar) -> list[Any]:
        values = scalar.values
        self._take(len(values))
        if isinstance(scalar, pa.MapScalar):
            pairs = values.flatten()
            return [*zip(*(map(self._inside, each) for each in pairs), strict=True)]
        if pa.types.is_primitive(values.type):
            with contextlib.suppress(*NOT_IN_PYTHON):  # in a tenth of the time
                return values.to_pylist()
        return [*map(self._inside, values)]

    def _take(self, parts: int, characters: int = 0) -> None:
        self._left -= parts + characters
        self._parts -= parts
        self._characters -= characters
        if min(self._parts, self._characters) < 0:
            raise _TooLarge

    def notes(self) -> Iterator[str]:
        """Yield what was found, for people."""
        if self.not_utf8:
            values = counted(self.not_utf8, "value{s}")
            yield f"not UTF-8 in {values}; read there in the encoding that fits best"
        if self.unreadable:
            values = counted(self.unreadable, "value{s}")
            yield f"left out {values} that Python cannot hold, such as dates after the year 9999"


def _may_repeat(kind: pa.DataType) -> bool:
    """Return whether values may take more memory than the batch does."""
    is_view = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    is_encoded = isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType | pa.BaseExtensionType)
    return is_view or is_encoded or pa.types.is_nested(kind)


def _has_parts(kind: pa.DataType) -> bool:
    """Return whether values of a type are lists or objects."""
    while isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        return _has_parts(kind.storage_type)
    return pa.types.is_nested(kind)
