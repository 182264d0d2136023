"""Which columns of a table hold the id, the title and the text, and documents made of its rows."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffcse_jax.documents.document import Document, Section
from diffcse_jax.documents.ids import id_among, place_id, row_id
from diffcse_jax.documents.ledger import (
    EMPTY,
    LONGEST_TEXT,
    MISSING_KEY,
    NOT_STRING,
    Ledger,
    Place,
    usable,
)
from diffcse_jax.documents.tables.names import TEXT_COLUMNS, TITLE_COLUMN, named
from diffcse_jax.documents.tables.values import CHOOSES, listed, text_of
from diffcse_jax.documents.text.encodings import readable
from diffcse_jax.errors import DataError

TOO_LONG = f"row{{s}} whose other columns have more than {LONGEST_TEXT:,} characters as JSON"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the columns of a table hold.

    Attributes:
        texts: The columns of text.
        title: The column of the title, if there is one. The name of a column may be empty.
        id: The column that identifies rows, if there is one.
        are_separate: Each column of text is a text of its own. Otherwise they are one text.
        is_whole: The rows are single texts, which search does not divide unless the model reads
            less.
        note: What was assumed, for the user; empty if nothing was.
        is_guessed: The columns of text were chosen by their values, because none has a known name.
    """

    texts: tuple[str, ...]
    title: str | None = None
    id: str | None = None
    are_separate: bool = False
    is_whole: bool = False
    note: str = ""
    is_guessed: bool = False

    @functools.cached_property
    def places(self) -> Mapping[str, Sequence[int]]:
        """The places of each column of text. A user may name one twice."""
        places: dict[str, list[int]] = {}
        for place, column in enumerate(self.texts):
            places.setdefault(column, []).append(place)
        return places

    def texts_in(self, values: Mapping[str, Any]) -> list[str]:
        """Return the columns of text that a row has, in time that grows with the row alone."""
        if len(self.texts) <= len(values):
            return [column for column in self.texts if column in values]
        places = sorted(place for column in values for place in self.places.get(column, ()))
        return [self.texts[place] for place in places]

    def id_in(self, values: Mapping[str, Any]) -> str | None:
        """Return the column that identifies a row: `id`, or another one with a usual name."""
        if self.id is None or values.get(self.id) is not None:
            return self.id
        present = [name for name, value in values.items() if value is not None]
        return id_among(present) or self.id

    def reads(self, column: str) -> bool:
        """Return whether a column holds a text, the title or the id."""
        return column in self.places or column in (self.title, self.id)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: of the texts, the title and the id."""
        others = (self.title, self.id)
        return (*self.texts, *(column for column in others if column is not None))


def layout_of(
    name: str,
    columns: Sequence[str],
    text_columns: Sequence[str],
    id_column: str = "",
    *,
    is_open: bool = False,
) -> Layout | None:
    """Return the layout of a table by the names of its columns, or None if it has no text.

    Args:
        name: The table, for messages.
        columns: All columns.
        text_columns: Those whose values are text for people.
        id_column: The column that identifies rows, if the user named one.
        is_open: Later rows may have other columns, such as a title.
    """
    column = id_column or id_among(columns)
    known = next(filter(None, (named(each, columns) for each in TEXT_COLUMNS)), None)
    if known:
        title = named(TITLE_COLUMN, columns) or (TITLE_COLUMN if is_open else None)
        return Layout((known,), title, column, is_whole=len(columns) == 1)
    texts = tuple(each for each in text_columns if each != column)
    if not texts:
        return None
    note = ""
    if len(columns) > 1:
        note = f"{name}: read the columns of text, {', '.join(texts)}. {CHOOSES}"
    return Layout(texts, None, column, is_whole=len(columns) == 1, note=note, is_guessed=True)


def document_of(
    values: Mapping[str, Any],
    layout: Layout,
    place: Place,
    ledger: Ledger,
    *,
    with_columns: bool = True,
) -> Document | None:
    """Return the document of a row; None, with an entry in the ledger, if it has no text."""
    sections = _sections(values, layout, place, ledger)
    if not sections:
        return None
    ledger.keep()
    id_column = layout.id_in(values)
    return Document(
        row_id(values, id_column, place) or place_id(place),
        sections,
        place,
        _others(values, layout, id_column, place, ledger) if with_columns else "",
        layout.is_whole or layout.are_separate,
    )


def _others(
    values: Mapping[str, Any], layout: Layout, id_column: str | None, place: Place, ledger: Ledger
) -> str:
    """Return the columns that are not read as text or id, as JSON."""
    others = {
        name: value
        for name, value in values.items()
        if value is not None and not ((layout.reads(name) or name == id_column) and _is_text(value))
    }
    return columns_text(others, place, ledger)


def _sections(
    values: Mapping[str, Any], layout: Layout, place: Place, ledger: Ledger
) -> tuple[Section, ...]:
    title = " ".join((_text_in(values, layout.title) or "").split())
    columns = layout.texts_in(values)
    if title and all(_is_blank(values[column]) for column in columns):
        return _title_alone(title, values, layout, place, ledger)
    texts: list[tuple[str, str]] = []  # columns and their texts
    are_absent = True
    for column in columns:
        text = _text(values[column])
        if text is None:
            continue
        are_absent = False
        if stripped := usable((text,), place, ledger):
            texts.append((column, stripped[0]))
    if not texts:
        if are_absent:  # otherwise `usable` has entered the reason
            ledger.leave_out(_why_absent(values, layout.texts[0]), place)
        return ()
    if layout.are_separate:
        return tuple(Section("", text.split("\n"), column=column) for column, text in texts)
    lines = [line for _, text in texts for line in text.split("\n")]
    return (Section(title, lines),)


def is_emptied(values: Mapping[str, Any], layout: Layout) -> bool:
    """Return whether a row has columns of text, and these are empty."""
    columns = layout.texts_in(values)
    return bool(columns) and all(_is_blank(values[column]) for column in columns)


def _is_blank(value: Any) -> bool:
    """Return whether a value is missing, or only white space."""
    text = "" if value is None else _text(value)
    return text is not None and (not text or text.isspace())


def _title_alone(
    title: str, values: Mapping[str, Any], layout: Layout, place: Place, ledger: Ledger
) -> tuple[Section, ...]:
    """Return the section of a row whose only text is its title."""
    if usable((title,), place, ledger) is None:
        return ()
    if not layout.texts_in(values):  # another column may hold its text
        ledger.change("row{s} without the column of text", "kept with the title alone", place)
    return (Section(title, ()),)


def texts_of_row(
    values: Mapping[str, Any], columns: Sequence[str], place: Place, ledger: Ledger
) -> tuple[str, ...] | None:
    """Return the text of each column; None, with an entry in the ledger, if one is not usable."""
    texts = []
    for column in columns:
        text = _text_in(values, column)
        if text is None:
            ledger.leave_out(_why_absent(values, column), place)
            return None
        texts.append(text)
    return usable(texts, place, ledger)


def _text_in(values: Mapping[str, Any], column: str | None) -> str | None:
    """Return the text of a column; None if it is missing, or is not text."""
    return None if column is None else _text(values.get(column))


def _text(value: Any) -> str | None:
    """Return a value as text. Most values are: the readers of csv files give nothing else."""
    return value if value is None or isinstance(value, str) else text_of(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or text_of(value) is not None


def _why_absent(values: Mapping[str, Any], column: str) -> str:
    if column not in values:
        return MISSING_KEY
    return EMPTY if values[column] is None else NOT_STRING


# The other columns. As text they take memory in proportion to the file. As objects, a nested value
# may take fifty times as much.


def columns_text(columns: Mapping[str, Any], place: Place, ledger: Ledger) -> str:
    """Return the other columns of a row as JSON. Missing values are left out; dates become text.

    Columns that are too long are left out, with an entry in the ledger: each passage of the row
    repeats them. Raises `DataError` for a value that JSON cannot hold.
    """
    present = {name: value for name, value in columns.items() if not _is_missing(value)}
    if not present:
        return ""
    try:
        text = readable(_as_json(present), mark=r"\\u")  # JSON writes a backslash twice
    except (RecursionError, ValueError) as error:
        names = listed(present)
        deep = isinstance(error, RecursionError)
        why = "is nested too deeply" if deep else f"cannot be stored as JSON ({error})"
        raise DataError(f"{place}: one of the columns {names} {why}. Leave it out") from error
    if len(text) <= LONGEST_TEXT:
        return text
    ledger.change(TOO_LONG, "kept without these columns", place)
    return ""


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, or pandas' NaT or NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _as_json(values: Mapping[str, Any]) -> str:
    """Return JSON, in which numbers that it does not have, such as infinity, are text."""
    try:
        text = ENCODER.encode(values)
    except TypeError:  # about keys, which the encoder does not convert
        text = ENCODER.encode(_with_text_keys(values))
    if "NaN" in text or "Infinity" in text:
        text = ENCODER.encode(json.loads(text, parse_constant=_spelled))
    return text


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(each) for each in value]
    return value


def _spelled(constant: str) -> str:
    return str(float(constant))


def _of_known_type(value: Any) -> Any:
    """Return a value of another type as a list, dict, number or text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return [*value] if isinstance(value, set | frozenset) else str(value)


ENCODER = json.JSONEncoder(ensure_ascii=False, default=_of_known_type)
