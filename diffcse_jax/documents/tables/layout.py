"""Which columns of a table hold the id, the title and the text, and documents made of its rows."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from diffcse_jax.documents import ledger as reasons
from diffcse_jax.documents.document import Document, Section, id_of
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.tables.names import ID_COLUMNS, TEXT_COLUMNS, TITLE_COLUMN
from diffcse_jax.documents.tables.values import CHOOSES, as_text, is_missing, listed
from diffcse_jax.errors import DataError


class Layout(NamedTuple):
    """What the columns of a table hold.

    Attributes:
        texts: The columns of text.
        title: The column of the title, if there is one. The name of a column may be empty.
        id: The column that identifies rows, if there is one.
        are_separate: Each column of text is a text of its own. Otherwise they are one text.
        is_whole: The rows are single texts, which search does not divide unless the model reads
            less.
        note: What was assumed, for the user; empty if nothing was.
        is_found: The columns of text were found by their values, because none has a known name.
    """

    texts: tuple[str, ...]
    title: str | None = None
    id: str | None = None
    are_separate: bool = False
    is_whole: bool = False
    note: str = ""
    is_found: bool = False


def id_among(columns: Container[str]) -> str | None:
    """Return the column that identifies rows by its name, or None."""
    return next((each for each in ID_COLUMNS if each in columns), None)


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
    known = next((each for each in TEXT_COLUMNS if each in columns), None)
    if known:
        title = TITLE_COLUMN if is_open or TITLE_COLUMN in columns else None
        return Layout((known,), title, column, is_whole=len(columns) == 1)
    texts = tuple(each for each in text_columns if each != column)
    if not texts:
        return None
    note = ""
    if len(columns) > 1:
        note = f"{name}: read the columns of text, {', '.join(texts)}. {CHOOSES}"
    return Layout(texts, None, column, is_whole=len(columns) == 1, note=note, is_found=True)


def require_columns(name: str, columns: Sequence[str], missing: Sequence[str]) -> None:
    """Raise `DataError` if a column that the user named is missing."""
    if missing:
        raise DataError(
            f"{name}: no column {missing[0]!r}. It has: {listed(columns)}. Name the columns of "
            "title and text, or of the text alone (data.columns or --columns)"
        )


def document_of(
    values: Mapping[str, Any], layout: Layout, place: Place, ledger: Ledger
) -> Document | None:
    """Return the document of a row; None, with an entry in the ledger, if it has no text."""
    sections = _sections(values, layout, place, ledger)
    if not sections:
        return None
    read = {*layout.texts, layout.title, layout.id}  # but objects, for example, are not text
    others = {
        name: value
        for name, value in values.items()
        if not is_missing(value) and (name not in read or as_text(value) is None)
    }
    ledger.keep()
    is_whole = layout.is_whole or layout.are_separate
    return Document(own_id(values, layout) or id_of(place), sections, place, others, is_whole)


def own_id(values: Mapping[str, Any], layout: Layout) -> str:
    """Return the id that a row has; empty if it has none."""
    value = None if layout.id is None else values.get(layout.id)
    return "" if is_missing(value) else as_id(value)


def as_id(value: Any) -> str:
    """Return an id as text, without white space around it.

    If one id of a column is missing, pandas makes the others 1.0, 2.0 and so on.
    """
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return (as_text(value) or "").strip()


def _sections(
    values: Mapping[str, Any], layout: Layout, place: Place, ledger: Ledger
) -> tuple[Section, ...]:
    title = " ".join((text_in(values, layout.title) or "").split())
    if any(map(str.isalnum, title)) and all(_is_blank(values.get(name)) for name in layout.texts):
        return _title_alone(title, values, layout, place, ledger)
    found: list[tuple[str, str]] = []  # columns and their texts
    absent = []
    for column in layout.texts:
        text = text_in(values, column)
        if text is None:
            absent.append(_why_absent(values, column))
        elif own := usable((text,), place, ledger):
            found.append((column, own[0]))
    if not found:
        if len(absent) == len(layout.texts):  # otherwise `usable` has entered the reason
            ledger.leave_out(absent[0], place)
        return ()
    if layout.are_separate:
        return tuple(Section("", text.split("\n"), column=column) for column, text in found)
    lines = [line for _, text in found for line in text.split("\n")]
    return (Section(title, lines),)


def is_emptied(values: Mapping[str, Any], layout: Layout) -> bool:
    """Return whether a row has columns of text, and these are empty."""
    there = [values[column] for column in layout.texts if column in values]
    return bool(there) and all(map(_is_blank, there))


def _is_blank(value: Any) -> bool:
    """Return whether a value is missing, or only white space."""
    text = "" if is_missing(value) else as_text(value)
    return text is not None and (not text or text.isspace())


def _title_alone(
    title: str, values: Mapping[str, Any], layout: Layout, place: Place, ledger: Ledger
) -> tuple[Section, ...]:
    """Return the section of a row whose only text is its title."""
    if usable((title,), place, ledger) is None:
        return ()
    if not any(column in values for column in layout.texts):  # another column may hold its text
        ledger.change("row{s} without the column of text", "kept with the title alone", place)
    return (Section(title, ()),)


def texts_of_row(
    values: Mapping[str, Any], columns: Sequence[str], place: Place, ledger: Ledger
) -> tuple[str, ...] | None:
    """Return the text of each column; None, with an entry in the ledger, if one is missing."""
    texts = [text_in(values, column) for column in columns]
    for column, text in zip(columns, texts, strict=True):
        if text is None:
            ledger.leave_out(_why_absent(values, column), place)
            return None
    return tuple(text for text in texts if text is not None)


def _why_absent(values: Mapping[str, Any], column: str) -> str:
    if column not in values:
        return reasons.MISSING_KEY
    return reasons.EMPTY if is_missing(values[column]) else reasons.NOT_STRING


def text_in(values: Mapping[str, Any], column: str | None) -> str | None:
    """Return a value as text.

    If there is no such column, or the value is missing or not text, it is None.
    """
    if column is None:
        return None
    value = values.get(column)
    return None if is_missing(value) else as_text(value)
