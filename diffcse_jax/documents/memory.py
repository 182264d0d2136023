"""Text in memory: strings, dicts and tables of other libraries, read as documents."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from diffcse_jax.documents.document import Document, Documents, Section
from diffcse_jax.documents.ids import as_id, numbered_ids
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.tables.layout import (
    Layout,
    document_of,
    is_emptied,
    layout_of,
)
from diffcse_jax.documents.tables.values import (
    SAMPLE_ROWS,
    as_stored,
    by_column,
    first_inexact,
    listed,
    text_columns,
    without_missing,
)
from diffcse_jax.errors import DataError, shown

EXPECTED = (
    "Give a list of strings; of tuples of strings (sentence, positive, hard negatives); or of "
    "dicts, whose keys are columns"
)

# A sentence, a pair, a triple or more, or columns by name.
Text = str | Sequence[str] | Mapping[str, object]


def as_texts(texts: Any) -> Iterable[Any]:
    """Return the texts of an iterable, or the rows of a table.

    Tables of pandas, polars, pyarrow and datasets are known.
    """
    if isinstance(texts, set | frozenset):
        raise DataError("a set has another order in each process. Give a list")
    # polars has the first method, and pyarrow the second.
    if rows := getattr(texts, "to_dicts", None) or getattr(texts, "to_pylist", None):
        return _as_stored(rows(), texts)
    if hasattr(texts, "columns") and hasattr(texts, "to_dict"):  # pandas
        if repeated := [*texts.columns[texts.columns.duplicated()]]:
            raise DataError(f"two columns are called {repeated[0]!r}. Rename one of them")
        return _as_stored(texts.to_dict("records"), texts)
    is_text = isinstance(texts, str | bytes | Mapping)  # a mapping has columns, or splits
    if is_text or not isinstance(texts, Iterable):
        kind = type(texts).__name__
        if isinstance(texts, Mapping):
            kind += f", with the keys {', '.join(map(str, [*texts][:5]))}"
        raise DataError(f"cannot read texts from an object of type {kind}. {EXPECTED}")
    return _as_stored(texts, texts)


def _as_stored(rows: Iterable[Any], table: Any) -> Iterable[Any]:
    """Return the rows of a table, in which floats say if their column has rounded them."""
    short = {name: kind for name, kind in _types(table) if first_inexact(kind)}
    if not short:
        return rows
    return [
        {name: as_stored(value, short.get(str(name), "")) for name, value in row.items()}
        for row in rows
    ]


def _types(table: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and types of the columns of a table. A column by itself has none."""
    features = getattr(table, "features", None)
    if isinstance(features, Mapping):  # datasets
        names, types = [*features], [getattr(each, "dtype", "") for each in features.values()]
    elif hasattr(table, "dtypes") and hasattr(table, "columns"):  # pandas and polars
        names, types = [*table.columns], [*table.dtypes]
    elif schema := getattr(table, "schema", None):  # pyarrow
        names, types = schema.names, schema.types
    else:
        return
    yield from zip(map(str, names), map(str, types), strict=True)


def documents_in_memory(
    texts: Any, *, id_column: str = "", first: int = 0, taken: Collection[str] = ()
) -> Documents:
    """Return texts in memory as documents.

    Args:
        texts: Strings, dicts, or a table; see `as_texts`. A dict has a `sentence` or `text`, and
            perhaps a `title`; its other keys are columns, which hits repeat.
        id_column: The key that identifies dicts. By default it is `_id` or `id`, if there is one.
            Other texts are identified by their number. If that is the id of a dict, they get a
            number after those of all texts.
        first: The number of the first text.
        taken: Ids that texts without one do not get, if some of the texts have ids.
    """
    texts = list(as_texts(texts))

    def read(ledger: Ledger) -> Iterator[Document]:
        layout = _layout_of(texts, id_column)
        rows = [values_of(each) if isinstance(each, Mapping) else {} for each in texts]
        given = [row.get(str(layout.id_in(row))) for row in rows]
        ids = [
            "" if each is None else as_id(each, Place(row=row))
            for row, each in enumerate(given, first + 1)
        ]
        _require_different_ids(ids, given)
        keys = numbered_ids(ids, first, taken)
        for number, (text, key) in enumerate(zip(texts, keys, strict=True), first):
            if document := _document(text, number, layout, ledger):
                yield dataclasses.replace(document, id=key)
            elif _is_empty(text, layout):
                ledger.emptied.add(key)

    def fingerprint() -> str:
        return hashlib.sha256(as_json(texts, "the given texts").encode()).hexdigest()

    return Documents("the given texts", read, fingerprint)


def _require_different_ids(ids: Sequence[str], given: Sequence[Any]) -> None:
    """Raise `DataError` if two ids that are not equal would become one document, as 1 and "1".

    Args:
        ids: The ids as text, empty for texts without one.
        given: The ids as they were given.
    """
    first: dict[str, Any] = {}
    for key, value in zip(ids, given, strict=True):
        other = first.setdefault(key, value) if key else value
        if isinstance(other, str) != isinstance(value, str) or other != value:
            raise DataError(
                f"the ids {other!r} and {value!r} would be one document. Write equal ids alike"
            )


def _layout_of(texts: Sequence[Any], id_column: str) -> Layout:
    """Return the layout of the dicts among the texts.

    Columns are judged by the first dicts, and by each later one with a key that had no value.
    """
    keys: dict[str, None] = {}
    seen: set[str] = set()  # keys with a value
    rows: list[dict[str, Any]] = []
    for row in (values_of(text) for text in texts if isinstance(text, Mapping)):
        keys.update(dict.fromkeys(row))
        new = {key for key in row.keys() - seen if row[key] is not None}
        if new or len(rows) < SAMPLE_ROWS:
            rows.append(row)
            seen |= new
    if id_column and keys and id_column not in keys:
        raise DataError(
            f"the given dicts: no column {id_column!r}. It has: {listed(keys)}. Name one of "
            "these with id_column"
        )
    sample = by_column(rows)
    strings = [
        key for key, values in sample.items() if any(isinstance(each, str) for each in values)
    ]
    texts = text_columns([*keys], sample) or strings
    return layout_of("the given dicts", [*keys], texts, id_column) or Layout(("sentence",))


def values_of(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of a dict, with None for missing ones, and arrays as lists or numbers."""
    return {
        str(key): value.tolist() if _is_array(value) else without_missing(value)
        for key, value in row.items()
    }


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, PyTorch or JAX; their scalars may be one."""
    return hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, np.generic)


def _is_empty(text: Any, layout: Layout) -> bool:
    if isinstance(text, Mapping):
        return is_emptied(values_of(text), layout)
    return not text.strip()


def _document(text: Any, number: int, layout: Layout, ledger: Ledger) -> Document | None:
    place = Place(row=number + 1)
    if isinstance(text, Mapping):
        return document_of(values_of(text), layout, place, ledger)
    if not isinstance(text, str):
        raise DataError(
            f"text {place.row} is {shown(text)}. Give a list of strings, or of dicts, whose keys "
            "are columns"
        )
    stripped = usable((text,), place, ledger)
    if stripped is None:
        return None
    ledger.keep()
    return Document("", (Section("", stripped),), place, whole=True)


def as_json(value: Any, name: str) -> str:
    """Return JSON. What it has no form for is text as Python writes it, but arrays are lists.

    Raises `DataError`, which calls the value `name`, if it cannot be written.
    """
    try:
        return json.dumps(
            value, default=lambda each: each.tolist() if isinstance(each, np.ndarray) else str(each)
        )
    except (RecursionError, ValueError) as error:
        raise DataError(
            f"{name}: a value cannot be written as JSON ({error}). Leave it out, or give it as text"
        ) from error
