"""Rows of JSON files: an object on each line, a list, or an object that holds lists.

A row may also be a string, or a list of values that are called `column 1`, `column 2` and so on. An
object may also take several lines, and a line several objects. Lists are read item by item, so
that memory holds a part of them.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.documents.ledger import EMPTY, NOT_OBJECT, Ledger, Place
from diffcse_jax.documents.tables.table import Table, table_of
from diffcse_jax.documents.tables.values import (
    LONGEST_ROW,
    MOST_VALUES,
    WORDS_OF_A_PHRASE,
    NumberedRow,
    chosen_split,
    is_words,
    listed,
    sample_of,
    unique_names,
    without_missing,
)
from diffcse_jax.documents.text.encodings import encodable
from diffcse_jax.documents.text.lines import extension, read_lines, read_text
from diffcse_jax.errors import DataError, counted

LONGEST_OBJECT = 1 << 28  # characters of a file with one object, which is read as a whole
MOST_VALUES_OF_OBJECT = 1 << 22
STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?')
ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
SPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()
EXPECTED = (
    "A json file holds a list of objects or strings, one object with such a list, or an object on "
    "each line"
)


class Value(NamedTuple):
    """A value, and the line or the place in a list where it stands, from 1."""

    number: int
    value: Any
    may_have_halves: bool = True  # of characters: escapes that stand without the other half


Values = Iterator[Value]


def open_json(path: Path, name: str) -> Table:
    """Open a file. What it holds says how it is read, and not only its extension."""
    values, notes = _reader(path, name)

    def read(_: Sequence[str], ledger: Ledger) -> Iterator[NumberedRow]:
        return _rows(values(ledger), name, ledger)

    sample = sample_of(read((), Ledger(name)))
    return table_of(name, tuple(sample), read, sample, notes, is_open=True)


def _reader(path: Path, name: str) -> tuple[Callable[[Ledger], Values], tuple[str, ...]]:
    """Return how the values are read, and notes."""
    lines = functools.partial(_lines, path, name)
    start = _start(read_text(path, name, Ledger(name)))
    if not start.startswith(("[", "{")) or _has_values_on_lines(start):
        return lines, ()
    if start.startswith("["):
        return functools.partial(_items, _list, path, name), ()
    end = _end_of_value(start)
    sequence = functools.partial(_items, _sequence, path, name)
    if extension(path) == ".json":
        if end and start[end:].strip():
            return sequence, ()
    else:
        first, _, rest = start.partition("\n")
        is_on_lines = "\n" in start[:end] or (first.strip() == "{" and rest)
        rows = sequence if is_on_lines else lines
        if not _is_one_table(rows(Ledger(name))):  # one object is one row
            return rows, ()
    _, notes = _of_object(_object(path, name, Ledger(name)), name)

    def values(ledger: Ledger) -> Values:
        rows, _ = _of_object(_object(path, name, ledger), name)
        return (Value(number, row) for number, row in enumerate(rows, 1))

    return values, notes


def _start(blocks: Iterator[str]) -> str:
    """Return the first block that is not blank."""
    return next((block.lstrip() for block in blocks if block.strip()), "")


def _end_of_value(start: str) -> int:
    """Return where the first value ends; 0 if it is not complete."""
    try:
        return DECODER.raw_decode(start)[1]
    except (ValueError, RecursionError):
        return 0


def _has_values_on_lines(start: str) -> bool:
    """Return whether the first line is a value and others follow."""
    first, _, rest = start.partition("\n")
    try:
        json.loads(first)
    except RecursionError:
        return bool(rest.strip())
    except ValueError:
        return False
    return bool(rest.strip())


def _is_one_table(values: Values) -> bool:
    """Return whether there is one object, which has a list of objects and no text of its own."""
    objects = [each.value for each in itertools.islice(values, 2)]
    if len(objects) != 1 or not isinstance(objects[0], dict):
        return False
    fields = objects[0].values()
    has_text = any(isinstance(value, str) and is_words(value) for value in fields)
    return not has_text and any(isinstance(each, list) and _are_rows(each, dict) for each in fields)


def _rows(values: Values, name: str, ledger: Ledger) -> Iterator[NumberedRow]:
    """Yield values that are objects, strings or lists with strings, as rows.

    Others are entered in the ledger.
    """
    mended_rows = 0
    for number, value, may_have_halves in values:
        row = _row(value)
        try:
            mended = _mended(row) if may_have_halves else row
        except RecursionError:
            mended = None
        if isinstance(mended, dict):
            mended_rows += mended != row
            yield number, {key: without_missing(each) for key, each in mended.items()}
        else:
            ledger.leave_out(NOT_OBJECT, Place(name, number))
    if mended_rows:
        rows = counted(mended_rows, "row{s}")
        ledger.note(f"{name}: broken characters (halves of escapes) in {rows} became U+FFFD")


def _row(value: Any) -> Any:
    """Return a string, or a list with strings, by names of columns; other values as they are."""
    if isinstance(value, str):
        return {"sentence": value}
    if not isinstance(value, list) or not any(isinstance(each, str) for each in value):
        return value
    if any(isinstance(each, list | dict) for each in value):
        return value
    return {f"column {number}": each for number, each in enumerate(value, 1)}


def _mended(value: Any) -> Any:
    """Return a value in which strings have no half of a character, which no file can hold."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_mended(each) for each in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(each) for key, each in value.items()}
    return value


# Lines


def _lines(path: Path, name: str, ledger: Ledger) -> Values:
    """Yield the value of each line. Lines that are blank or not JSON are entered in the ledger."""
    for number, line in read_lines(path, name, ledger, longest=LONGEST_ROW):
        if not line.strip():
            ledger.leave_out(EMPTY, Place(name, number))
            continue
        try:
            _check_values(line, MOST_VALUES)
            value = json.loads(line)
        except (ValueError, RecursionError):
            ledger.leave_out(NOT_OBJECT, Place(name, number))
        else:
            yield Value(number, value, bool(ESCAPED_HALF.search(line)))


# A list, or values in a row


def _items(
    read: Callable[["_Window"], Iterator[tuple[Any, str]]], path: Path, name: str, ledger: Ledger
) -> Values:
    """Yield values that `read` finds in a file, numbered."""
    number = 0
    try:
        for number, (value, text) in enumerate(read(_Window(read_text(path, name, ledger))), 1):
            yield Value(number, value, bool(ESCAPED_HALF.search(text)))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or error
        raise DataError(
            f"{name}, item {number + 1} is not valid JSON: {reason}. {EXPECTED}"
        ) from error


def _list(window: "_Window") -> Iterator[tuple[Any, str]]:
    window.expect("[")
    while window.next() != "]":
        yield window.value()
        if window.next() != "]":
            window.expect(",")
    window.expect("]")
    window.expect("")


def _sequence(window: "_Window") -> Iterator[tuple[Any, str]]:
    """Yield values on several lines each, as `jq` writes them, or several on a line."""
    while window.next():
        yield window.value()


class _Window:
    """The part of a text that is being read."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self.blocks = blocks
        self.text = ""
        self.place = 0

    def next(self) -> str:
        """Return the next character that is not space, or nothing at the end."""
        while True:
            space = SPACE.match(self.text, self.place)
            self.place = space.end() if space else self.place
            if self.place < len(self.text) or not self._read_on():
                return self.text[self.place : self.place + 1]

    def expect(self, mark: str) -> None:
        """Read a mark, or the end."""
        character = self.next()
        if character != mark:
            expected = f"{mark!r}" if mark else "the end"
            raise ValueError(f"{character!r} stands where {expected} should be")
        self.place += len(mark)

    def value(self) -> tuple[Any, str]:
        """Read a value, and return it with its text. A number at the end may go on."""
        self.next()
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.place)
            except json.JSONDecodeError:
                if len(self.text) - self.place > LONGEST_ROW:
                    raise ValueError(f"longer than {LONGEST_ROW:,} characters") from None
                if not self._read_on():
                    raise
                _check_values(self.text, MOST_VALUES)
                continue
            if end < len(self.text) or not self._read_on():
                text = self.text[self.place : end]
                self.place = end
                return value, text

    def _read_on(self) -> bool:
        """Read at least as much as is here, so that reading a long value takes linear time."""
        parts = [self.text[self.place :]]
        wanted = max(1, 2 * len(parts[0]))
        while wanted > 0 and (block := next(self.blocks, "")):
            parts.append(block)
            wanted -= len(block)
        has_read = any(parts[1:])
        if has_read:
            self.text = "".join(parts)
            self.place = 0
        return has_read


# An object


def _object(path: Path, name: str, ledger: Ledger) -> dict[str, Any]:
    """Return the object that a file holds."""
    parts: list[str] = []
    size = 0
    for block in read_text(path, name, ledger):
        parts.append(block)
        size += len(block)
        if size > LONGEST_OBJECT:
            limit = f"{LONGEST_OBJECT:,} characters"
            raise DataError(
                f"{name}: one object is longer than {limit}, the limit for reading it as a whole. "
                "Write an object on each line, with the extension .jsonl"
            )
    text = "".join(parts)
    try:
        _check_values(text, MOST_VALUES_OF_OBJECT)
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {error}. {EXPECTED}") from error


def _check_values(text: str, most: int) -> None:
    """Raise `ValueError` if a text may hold more values than these, before they take memory."""
    if len(text) > most and _marks(text) > most and _marks(STRING.sub("", text)) > most:
        raise ValueError(f"more than {most:,} values")


def _marks(text: str) -> int:
    """Return the number of characters that precede a value."""
    return sum(map(text.count, "[{,:"))


def _of_object(fields: Mapping[str, Any], name: str) -> tuple[list[Any], tuple[str, ...]]:
    """Return the rows of an object, and notes.

    The rows are its list of objects; the lists of `data`, below the names in `columns`, as pandas
    writes them; its lists, if these are columns of the same length; its only list, if this holds
    strings and no text stands beside it; its texts, if their keys are titles or ids; or the object
    itself. In lists of objects or strings, null is a row that is left out.
    """
    lists = {key: value for key, value in fields.items() if isinstance(value, list) and value}
    names = lists.get("columns", [])
    values = lists.get("data", [])
    if _are_rows(names, str) and _are_rows(values, list):
        columns, repeated = unique_names([each or "" for each in names], name)
        # A row of another length is left out.
        rows = [
            dict(zip(columns, row, strict=True)) if row and len(row) == len(columns) else None
            for row in values
        ]
        note = f"{name}: the rows are those of 'data', below the names in 'columns'"
        return rows, (note, *repeated)
    tables = {key: value for key, value in lists.items() if _are_rows(value, dict)}
    if tables:
        key, note = chosen_split([*tables], name)
        return tables[key], (note or f"{name}: the rows are those of {key!r}",)
    lengths = {len(value) for value in lists.values()}
    if len(lists) == len(fields) > 1 and len(lengths) == 1:
        by_column = zip(*lists.values(), strict=True)
        note = f"{name}: the lists {listed(map(repr, lists))} are read as columns"
        return [dict(zip(lists, row, strict=True)) for row in by_column], (note,)
    # A title beside a list of strings has these as its paragraphs.
    has_text = any(isinstance(value, str) and is_words(value) for value in fields.values())
    if len(lists) == 1 and not has_text:
        ((key, strings),) = lists.items()
        if _are_rows(strings, str):
            return strings, (f"{name}: the rows are those of {key!r}",)
    if column := _column_of_keys(fields):
        note = f"{name}: each key is the {column} of a row, and its value is the text"
        return [{column: key, "text": value} for key, value in fields.items()], (note,)
    return [fields], ()


def _column_of_keys(fields: Mapping[str, Any]) -> str:
    """Return what the keys of texts are, `title` or `id`, or nothing if they name columns.

    Titles are questions, or have four words or more. Ids have digits, unlike most names.
    """
    if len(fields) < 2 or not all(isinstance(value, str) for value in fields.values()):
        return ""
    if 2 * sum(map(is_words, fields.values())) <= len(fields):
        return ""
    if 2 * sum(map(_is_title, fields)) > len(fields):
        return "title"
    return "id" if all(map(_has_digit, fields)) else ""


def _is_title(key: str) -> bool:
    return key.strip().endswith(("?", "\uff1f")) or len(key.split()) >= WORDS_OF_A_PHRASE


def _has_digit(key: str) -> bool:
    return any(map(str.isdigit, key))


def _are_rows(values: list[Any], kind: type) -> bool:
    """Return whether values are of a kind. Some may be null: these become rows left out."""
    present = [value for value in values if value is not None]
    return bool(present) and all(isinstance(value, kind) for value in present)
