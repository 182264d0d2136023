"""Tables: files and data sets whose rows have named columns.

The readers of each format make a `Table` with `table_of`, which judges by a sample of the rows
which columns hold text for people.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.tables.values import (
    CHOOSES,
    NumberedRow,
    Sample,
    Scale,
    by_column,
    listed,
    scale_columns,
    text_columns,
)
from diffcse_jax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that can be read several times. Each pass reads its files again.

    Attributes:
        name: The file or folder, as the user named it.
        columns: In order. Of JSON, they are the keys of the first rows.
        read: Starts a pass over some columns. If `is_open`, rows have all their keys.
        notes: What was assumed. `rows` also enters this in the ledger.
        is_open: Later rows may have other columns.
        text_columns: The columns with text for people; see `values.text_columns`.
        list_columns: The columns of which some of the first values are lists.
        scale_columns: The columns of few numbers or truth values, which may grade the rows; see
            `values.Scale`.
        undecided: The columns that may be so after all, such as one with the same number in all of
            the first rows.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Sequence[str], Ledger], Iterator[NumberedRow]]
    notes: tuple[str, ...]
    is_open: bool
    text_columns: tuple[str, ...]
    list_columns: tuple[str, ...]
    scale_columns: tuple[str, ...]
    undecided: tuple[str, ...]

    def rows(
        self, columns: Sequence[str], ledger: Ledger, *, notes_late_text: bool = False
    ) -> Iterator[NumberedRow]:
        """Read some columns of all rows, with the number of the line or row, from 1.

        Values are those of the file: text, numbers, dates, lists and so on (`values.text_of` gives
        their text), or None if they are missing. JSON objects are given with all the keys that
        they have. With `notes_late_text`, the ledger notes which of these are text and not in
        `columns` of the table.

        What cannot be read as a row is entered in the ledger. Raises `DataError` if the file is
        damaged, or has no such column.
        """
        for note in self.notes:
            ledger.note(note)
        rows = self.read(columns, ledger)
        return self._noting_late_text(rows, ledger) if notes_late_text and self.is_open else rows

    def _noting_late_text(
        self, rows: Iterator[NumberedRow], ledger: Ledger
    ) -> Iterator[NumberedRow]:
        """Yield rows, and note text under keys that the first rows do not have."""
        known = set(self.columns)
        late: dict[str, int] = {}  # the first rows with these keys
        for number, row in rows:
            if new := [key for key in row if key not in known and key not in late]:
                late |= dict.fromkeys(text_columns(new, by_column([row])), number)
            yield number, row
        if late:
            keys = listed(f"{key} (line {number:,})" for key, number in late.items())
            ledger.note(
                f"{self.name}: keys that only later rows have are not read as text: {keys}. "
                f"{CHOOSES}"
            )

    def late_scales(self, columns: Collection[str]) -> Iterator[str]:
        """Yield those of the columns that only later rows show to be of few numbers.

        If there are undecided ones among them, the whole table is read.
        """
        scales = {column: Scale(column) for column in self.undecided if column in columns}
        rows = self.read([*scales], Ledger(self.name)) if scales else iter(())
        for _, row in rows:
            for column, scale in scales.items():
                if (value := row.get(column)) is not None:
                    scale.add(value)
            if not any(scale.is_possible for scale in scales.values()):
                break
        yield from (column for column, scale in scales.items() if scale.is_one)

    def require(self, columns: Sequence[str], option: str) -> None:
        """Raise `DataError` if the table lacks a column that the user named with an option.

        Objects of JSON may have a key only far from the start, so that the file is searched.
        """
        if missing := self._missing(columns):
            raise DataError(
                f"{self.name}: no column {missing[0]!r}. It has: {listed(self.columns)}. Name one "
                f"of these with {option}"
            )

    def _missing(self, columns: Sequence[str]) -> tuple[str, ...]:
        lacking = dict.fromkeys(column for column in columns if column not in self.columns)
        if lacking and self.is_open:
            for _, row in self.read([*lacking], Ledger(self.name)):
                for column in row:
                    lacking.pop(column, None)
                if not lacking:
                    break
        return tuple(lacking)


def table_of(
    name: str,
    columns: tuple[str, ...],
    read: Callable[[Sequence[str], Ledger], Iterator[NumberedRow]],
    sample: Sample,
    notes: Sequence[str] = (),
    *,
    is_open: bool = False,
) -> Table:
    """Return a table whose columns are judged by a sample of its rows; see `values.sample_of`."""
    scales, undecided = scale_columns(columns, sample)
    return Table(
        name=name,
        columns=columns,
        read=read,
        notes=(*notes, *_nested(columns, sample, name)),
        is_open=is_open,
        text_columns=text_columns(columns, sample),
        list_columns=tuple(
            column
            for column in columns
            if any(isinstance(value, list | tuple) for value in sample.get(column, ()))
        ),
        scale_columns=scales,
        undecided=undecided,
    )


def _nested(columns: Sequence[str], sample: Sample, name: str) -> Iterator[str]:
    """Yield a note about columns that hold objects or lists of objects: their text is not read."""
    nested = [
        column
        for column in columns
        if (values := sample.get(column)) and all(map(_is_nested, values))
    ]
    if nested:
        yield f"{name}: text inside objects is not read ({listed(nested)})"


def _is_nested(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return bool(parts) and all(isinstance(part, dict) for part in parts)
