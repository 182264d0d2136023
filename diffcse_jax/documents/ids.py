"""Ids of documents: they stay the same while the text changes, so that an index can be updated.

- A row has the value of its column `_id` or `id`, or of the one that the user names, without white
  space around it. If an earlier file has the same id, the path precedes it: `b.csv#7`.
- Other documents of files have their path and row: `faq.csv:3`.
- Other texts in memory have their number or, if that is the id of another text, a later number.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diffcse_jax.documents.ledger import NOWHERE, Place
from diffcse_jax.documents.tables.names import ID_COLUMNS, named
from diffcse_jax.documents.tables.values import RoundedFloat, as_stored, text_of
from diffcse_jax.errors import DataError, counted

FIRST_INEXACT = 2.0**53  # from here on, floats of 64 bits leave out whole numbers
# How pandas and spreadsheets write such a number to a csv: 1.23457E+17, 9007199254740992.0.
INEXACT_TEXT = re.compile(r"[+-]?(\d(\.\d+)?[eE]\+\d{2,3}|\d{16,}\.0)", re.ASCII)


def place_id(place: Place) -> str:
    """Return the id of a document whose text has none: its file and row."""
    return f"{place.file}:{place.row}" if place.row else place.file


def id_among(columns: Collection[str]) -> str | None:
    """Return the column that identifies rows by its name, or None."""
    return next(filter(None, (named(each, columns) for each in ID_COLUMNS)), None)


def row_id(values: Mapping[str, Any], column: str | None, place: Place = NOWHERE) -> str:
    """Return the id that a row has in a column; empty if it has none."""
    value = None if column is None else values.get(column)
    return "" if value is None else as_id(value, place)


def as_id(value: Any, place: Place = NOWHERE) -> str:
    """Return an id as text, without white space around it.

    If one id of a column is missing, pandas makes the others 1.0, 2.0 and so on. Raises `DataError`
    for a float that may have lost digits of the id that it was made of, also as text.
    """
    if isinstance(value, np.floating):
        value = as_stored(float(value), value.dtype.name)
    if isinstance(value, float):
        _require_all_digits(value, value, place)
        return str(int(value)) if value.is_integer() else str(value)
    text = (value if isinstance(value, str) else text_of(value) or "").strip()
    if not text and isinstance(value, int):
        at = f"{place}: " if str(place) else ""
        raise DataError(f"{at}an id has thousands of digits. Give it as text")
    if INEXACT_TEXT.fullmatch(text):
        _require_all_digits(text, float(text), place)
    return text


def _require_all_digits(value: float | str, number: float, place: Place) -> None:
    if isinstance(number, RoundedFloat) or abs(number) >= FIRST_INEXACT:
        at = f"{place}: " if str(place) else ""
        raise DataError(
            f"{at}the id {value} is a float, which does not hold all digits of so large a number: "
            "two ids may have become one. Read the ids as text or as whole numbers (in pandas: "
            "dtype=str or dtype='Int64'), and write the file again"
        )


def numbered_ids(ids: Sequence[str], first: int, others: Collection[str]) -> Iterator[str]:
    """Yield ids in which numbers, from `first` on, stand for the empty ones.

    If there are ids, a number is neither one of these nor one of the others.
    """
    taken = {*ids, *others} if any(ids) else {""}
    free = (number for number in itertools.count(first + len(ids)) if str(number) not in taken)
    for number, key in enumerate(ids, first):
        yield key or (str(number) if str(number) not in taken else str(next(free)))


class IdsOfFiles:
    """Ids of the rows of several files, among which the first file with an id keeps it."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}  # the first file with each id
        self._shared: dict[tuple[str, str], set[str]] = {}  # ids of two files

    def of(self, key: str, file: str) -> str:
        """Return the id of a document among those of all files."""
        first = self._files.setdefault(key, file)
        if first == file:
            return key
        self._shared.setdefault((first, file), set()).add(key)
        return f"{file}#{key}"

    def note(self) -> str:
        """Return what was assumed about equal ids, for the user; empty if there were none."""
        if not self._shared:
            return ""
        (first, file), ids = next(iter(self._shared.items()))
        others = len(self._shared) - 1
        more = f", and {counted(others, 'more pair{s}')} of files share ids" if others else ""
        shared = counted(len(ids), "id{s}")
        return (
            f"{first} and {file} share {shared}{more}; each file's rows are documents of their own"
        )
