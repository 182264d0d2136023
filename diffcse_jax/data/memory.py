"""Text in memory: strings, tuples, dicts and tables of other libraries.

Training writes it to a file, from which a run trains and, after an interruption, resumes. Search
reads it as documents.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcse_jax.data.columns import column_names
from diffcse_jax.data.corpus import usable
from diffcse_jax.data.documents import Document, Documents, Section, digest
from diffcse_jax.data.layout import (
    Layout,
    document_of,
    is_emptied,
    layout_of,
    own_id,
    require_columns,
)
from diffcse_jax.data.ledger import Ledger, Place
from diffcse_jax.data.split import held_out_together
from diffcse_jax.data.values import SAMPLE_ROWS, is_missing, text_columns
from diffcse_jax.errors import DataError, counted
from diffcse_jax.hosts import log_line
from diffcse_jax.io import cache_folder, disk_errors, write_text

EXPECTED = (
    "Give strings; tuples of strings (sentence, positive, hard negatives); or dicts, whose keys "
    "are columns"
)

# A sentence, a pair, a triple or more, or columns by name.
Text = str | Sequence[str] | Mapping[str, object]


def as_texts(given: Any) -> Iterable[Any]:
    """Return the texts of an iterable, or the rows of a table.

    Tables of pandas, polars, pyarrow and datasets are known.
    """
    # polars has the first method, and pyarrow the second.
    if rows := getattr(given, "to_dicts", None) or getattr(given, "to_pylist", None):
        return rows()
    if hasattr(given, "columns") and hasattr(given, "to_dict"):  # pandas
        return given.to_dict("records")
    is_text = isinstance(given, str | bytes | Mapping)  # a mapping has columns, or splits
    if is_text or not isinstance(given, Iterable):
        kind = type(given).__name__
        if isinstance(given, Mapping):
            kind += f" with the keys {', '.join(map(str, [*given][:5]))}"
        raise DataError(f"cannot read texts from a {kind}. {EXPECTED}")
    return given


# For search


def documents_in_memory(
    given: Any, *, id_column: str = "", first: int = 0, taken: Collection[str] = ()
) -> Documents:
    """Return texts in memory as documents.

    Args:
        given: Strings, dicts, or a table; see `as_texts`. A dict has a `sentence` or `text`, and
            perhaps a `title`; its other keys are columns, which hits repeat.
        id_column: The key that identifies dicts. By default it is `_id` or `id`, if there is one.
            Other texts are identified by their number. If that is the id of a dict, they get a
            number after those of all texts.
        first: The number of the first text.
        taken: Ids that texts without one do not get, if some of the texts have ids.
    """
    texts = list(as_texts(given))

    def read(ledger: Ledger) -> Iterator[Document]:
        layout = _layout_of(texts, id_column)
        keys = _keys(texts, layout, first, taken)
        for number, (text, key) in enumerate(zip(texts, keys, strict=True), first):
            if document := _document(text, number, layout, ledger):
                yield dataclasses.replace(document, id=key)
            elif ledger.emptied is not None and _is_empty(text, layout):
                ledger.emptied.add(key)

    def fingerprint() -> str:
        return hashlib.sha256(_json(texts).encode()).hexdigest()

    return Documents("the given texts", read, fingerprint)


def _layout_of(texts: Sequence[Any], id_column: str) -> Layout:
    """Return the layout of the dicts among the texts.

    Columns are judged by the first dicts, and by each later one with a key that had no value.
    """
    keys: dict[str, None] = {}
    seen: set[str] = set()  # keys with a value
    sample: list[dict[str, Any]] = []
    for row in (_values(text) for text in texts if isinstance(text, Mapping)):
        keys.update(dict.fromkeys(row))
        new = {key for key in row.keys() - seen if not is_missing(row[key])}
        if new or len(sample) < SAMPLE_ROWS:
            sample.append(row)
            seen |= new
    if id_column and keys:
        require_columns("the given dicts", [*keys], [id_column] if id_column not in keys else [])
    strings = [key for key in keys if any(isinstance(row.get(key), str) for row in sample)]
    texts = text_columns([*keys], sample) or strings
    return layout_of("the given dicts", [*keys], texts, id_column) or Layout(("sentence",))


def _keys(
    texts: Sequence[Any], layout: Layout, first: int, others: Collection[str]
) -> Iterator[str]:
    """Yield the id of each text: its own, or a number that is no text's own."""
    own = [own_id(_values(text), layout) if isinstance(text, Mapping) else "" for text in texts]
    taken = {*own, *others} if any(own) else {""}
    free = (number for number in itertools.count(first + len(texts)) if str(number) not in taken)
    for number, key in enumerate(own, first):
        yield key or (str(number) if str(number) not in taken else str(next(free)))


def _values(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of a dict. pandas gives the lists of a Parquet file as arrays."""
    return {
        str(key): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in row.items()
    }


def _is_empty(text: Any, layout: Layout) -> bool:
    if isinstance(text, Mapping):
        return is_emptied(_values(text), layout)
    return not text.strip()


def _document(text: Any, number: int, layout: Layout, ledger: Ledger) -> Document | None:
    place = Place(row=number + 1)
    if isinstance(text, Mapping):
        return document_of(_values(text), layout, place, ledger)
    if not isinstance(text, str):
        raise DataError(f"text {number} is {text!r:.60}, not a string or a dict. {EXPECTED}")
    own = usable((text,), place, ledger)
    if own is None:
        return None
    ledger.keep()
    return Document("", (Section("", own),), place, whole=True)


# For training


def write_sentences(texts: Iterable[Text]) -> Path:
    """Write texts of one kind (see `as_texts`) to a jsonl file in the cache folder.

    The name of the file is a hash of the texts.
    """
    return _write(map(_json, _columns(texts)), ".jsonl")


def write_held_out(texts: Iterable[Text], share: float) -> tuple[Path, Path]:
    """Write pairs (or triples, ...) to two files: rows to train on, and pairs to score.

    A hash decides which rows are held out. Rows that share a text are held out together. Rows that
    cannot be used stay with the training rows, where they are counted.
    """
    rows = [tuple(map(str, row.values())) for row in _columns(texts)]
    ledger = Ledger("the given rows")
    is_usable = [
        usable(row, Place(row=number), ledger) is not None for number, row in enumerate(rows, 1)
    ]
    keys = [
        [digest(text) for text in row] if ok else []
        for row, ok in zip(rows, is_usable, strict=True)
    ]
    found = held_out_together([digest(row[0]) for row in rows], keys, share)
    is_held_out = found.chosen
    if note := found.describe(share, "row{s}"):
        log_line(f"notice: {note}")
    held_out = [
        row for row, out, ok in zip(rows, is_held_out, is_usable, strict=True) if out and ok
    ]
    trained_on = [
        row for row, out, ok in zip(rows, is_held_out, is_usable, strict=True) if not (out and ok)
    ]
    if not trained_on or len(held_out) < 2:
        raise DataError(
            f"data.held_out={share} leaves {len(trained_on)} of {len(rows)} rows for training and "
            f"{len(held_out)} for evaluation, which needs at least 2. Rows that share a text stay "
            "together. Give more rows, change data.held_out, or set eval.metric"
        )
    pairs = dict.fromkeys("\t".join(" ".join(text.split()) for text in row[:2]) for row in held_out)
    return write_sentences(trained_on), _write(pairs, ".tsv")


def _json(value: Any) -> str:
    """Return JSON. What it has no form for is text as Python writes it, but arrays are lists."""
    return json.dumps(
        value, default=lambda each: each.tolist() if isinstance(each, np.ndarray) else str(each)
    )


def _write(lines: Iterable[str], suffix: str) -> Path:
    """Write lines to a file in the cache folder, whose name is a hash of them."""
    text = "".join(f"{line}\n" for line in lines)
    path = cache_folder("text") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{suffix}"
    # Several processes may write the same text.
    partial = path.with_name(f"{os.getpid()}-{path.name}")
    instead = "set XDG_CACHE_HOME to another folder"
    with disk_errors(path.parent, safe="Nothing was started.", instead=instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(partial, text)
        return partial.replace(path)


def _columns(texts: Iterable[Text]) -> Iterator[dict[str, object]]:
    """Yield the texts as dicts of their columns."""
    width = 0  # of the tuples
    number = 0
    for number, text in enumerate(texts, 1):
        if isinstance(text, str):
            row: dict[str, object] = {"text": text}
        elif isinstance(text, Mapping):
            row = _values(text)
        elif (
            isinstance(text, Sequence)
            and len(text) > 1
            and all(isinstance(each, str) for each in text)
        ):
            row = dict(zip(column_names(len(text)), text, strict=True))
        else:
            raise DataError(f"text {number} is {text!r:.60}. {EXPECTED}")
        width = width or len(row)
        if len(row) != width and not isinstance(text, Mapping):
            found = f"{counted(len(row), 'column{s}')} ({', '.join(row)})"
            raise DataError(f"text {number} has {found}, but the first text has {width}")
        yield row
    if not number:
        raise DataError("the list of texts to train on is empty")
