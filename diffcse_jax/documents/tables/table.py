"""Tables: files and data sets whose rows have named columns.

`open_table` finds the reader for a file, and says which columns hold text for people.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.tables import arrow as columnar
from diffcse_jax.documents.tables.delimited import open_delimited
from diffcse_jax.documents.tables.json import open_json
from diffcse_jax.documents.tables.values import (
    CHOOSES,
    FileRows,
    NumberedRow,
    is_list,
    is_missing,
    listed,
    sample_of,
    text_columns,
)
from diffcse_jax.documents.text.lines import extension

_OPENERS: dict[str, Callable[[Path, str], FileRows]] = {
    ".csv": open_delimited,
    ".tsv": open_delimited,
    ".tab": open_delimited,
    ".jsonl": open_json,
    ".ndjson": open_json,
    ".json": open_json,
    ".parquet": columnar.open_parquet,
    ".arrow": columnar.open_arrow,
    ".feather": columnar.open_arrow,
}
KINDS = tuple(_OPENERS)  # extensions of tables


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that can be read several times. Each pass reads its files again."""

    name: str  # as the user named it
    columns: tuple[str, ...]  # in order; of JSON, those of the first rows
    text_columns: tuple[str, ...]  # those with text for people; see `values.text_columns`
    notes: tuple[str, ...]  # what was assumed; `rows` also puts them into the ledger
    reader: FileRows
    list_columns: tuple[str, ...] = ()  # those of which some of the first values are lists

    @property
    def is_open(self) -> bool:
        """Later rows may have other columns."""
        return self.reader.is_open

    def rows(
        self, columns: Sequence[str], ledger: Ledger, *, notes_late_text: bool = False
    ) -> Iterator[NumberedRow]:
        """Read some columns of all rows, with the number of the line or row, from 1.

        Values are those of the file: text, numbers, dates, lists and so on; see `values.as_text`
        and `values.is_missing`. JSON objects are given with all the keys that they have. With
        `notes_late_text`, the ledger notes which of these are text and not in `columns` of the
        table.

        What cannot be read as a row is entered in the ledger. Raises `DataError` if the file is
        damaged, or has no such column.
        """
        for note in self.notes:
            ledger.note(note)
        rows = self.reader.read(columns, ledger)
        yield from (
            self._noting_late_text(rows, ledger) if notes_late_text and self.is_open else rows
        )

    def _noting_late_text(
        self, rows: Iterator[NumberedRow], ledger: Ledger
    ) -> Iterator[NumberedRow]:
        """Yield rows, and note text under keys that the first rows do not have."""
        known = set(self.columns)
        late: dict[str, int] = {}  # the first rows with these keys
        for number, row in rows:
            if new := [key for key in row if key not in known and key not in late]:
                late |= dict.fromkeys(text_columns(new, [row]), number)
            yield number, row
        if late:
            found = listed(f"{key} (line {number:,})" for key, number in late.items())
            ledger.note(
                f"{self.name}: keys that only later rows have are not read as text: {found}. "
                f"{CHOOSES}"
            )

    def missing(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return which columns the table does not have.

        Objects of JSON may have a key only far from the start, so that the file is searched.
        """
        lacking = dict.fromkeys(column for column in columns if column not in self.columns)
        if lacking and self.is_open:
            for _, row in self.reader.read([*lacking], Ledger(self.name)):
                for column in row:
                    lacking.pop(column, None)
                if not lacking:
                    break
        return tuple(lacking)


def open_table(path: Path, name: str, wanted: Sequence[str] = ()) -> Table:
    """Open a file with one of the extensions in `KINDS`, or the folder of a data set.

    Args:
        path: The file, or the folder; see `columnar.data_set_folders`.
        name: How messages call it.
        wanted: Columns that the user named. Then the first line of a csv file holds names if it has
            these, whatever else it looks like.
    """
    if path.is_dir():
        found = columnar.open_data_set(path, name)
    elif _OPENERS[extension(path)] is open_delimited:
        found = open_delimited(path, name, wanted)
    else:
        found = _OPENERS[extension(path)](path, name)
    sample = sample_of(found.read(found.columns, Ledger(name)))
    texts = text_columns(found.columns, sample)
    notes = [*found.notes, *_nested(found.columns, sample, name)]
    lists = [column for column in found.columns if any(is_list(row.get(column)) for row in sample)]
    return Table(name, found.columns, texts, tuple(notes), found, tuple(lists))


def _nested(
    columns: Sequence[str], sample: Sequence[Mapping[str, Any]], name: str
) -> Iterator[str]:
    """Yield a note about columns that hold objects or lists of objects: their text is not read."""
    nested = []
    for column in columns:
        values = [row[column] for row in sample if not is_missing(row.get(column))]
        if values and all(map(_is_nested, values)):
            nested.append(column)
    if nested:
        yield f"{name}: text inside objects is not read ({listed(nested)})"


def _is_nested(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return bool(parts) and all(isinstance(part, dict) for part in parts)
