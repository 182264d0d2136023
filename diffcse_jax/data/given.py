"""Text that is given to `train` in memory.

It is written to a file, from which a run trains and, after an interruption, resumes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from diffcse_jax.data.columns import column_names
from diffcse_jax.data.sources import GIVEN
from diffcse_jax.data.split import held_out_together
from diffcse_jax.documents.document import digest
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.memory import EXPECTED, Text, as_json, values_of
from diffcse_jax.documents.tables.values import text_of
from diffcse_jax.errors import DataError, counted, shown
from diffcse_jax.hosts import log_line
from diffcse_jax.io import cache_folder, disk_errors, write_text


def write_sentences(texts: Iterable[Text]) -> Path:
    """Write texts of one kind (see `as_texts`) to a jsonl file in the cache folder.

    The name of the file is a hash of the texts.
    """
    rows = enumerate(_columns(texts), 1)
    return _write((as_json(row, f"text {number}") for number, row in rows), ".jsonl")


def write_held_out(texts: Iterable[Text], share: float) -> tuple[Path, Path]:
    """Write pairs (or triples, ...) to two files: rows to train on, and pairs to score.

    A hash decides which rows are held out. Rows that share a text are held out together. Rows that
    cannot be used stay with the training rows, where they are counted.
    """
    rows = [tuple(text_of(value) or "" for value in row.values()) for row in _columns(texts)]
    ledger = Ledger("the given rows")
    is_usable = [
        usable(row, Place(row=number), ledger) is not None for number, row in enumerate(rows, 1)
    ]
    keys = [
        [digest(text) for text in row] if ok else []
        for row, ok in zip(rows, is_usable, strict=True)
    ]
    division = held_out_together([digest(row[0]) for row in rows], keys, share)
    is_held_out = division.chosen
    if note := division.describe(share, "row{s}"):
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
            "together. Give more rows or a larger data.held_out, such as 0.3. Or train on all rows "
            "with another eval.metric: 'stsb_spearman', or 'pairs_retrieval' of an eval.pairs_file"
        )
    pairs = dict.fromkeys("\t".join(" ".join(text.split()) for text in row[:2]) for row in held_out)
    return write_sentences(trained_on), _write(pairs, ".tsv")


def _write(lines: Iterable[str], suffix: str) -> Path:
    """Write lines to a file in the cache folder, whose name is a hash of them."""
    text = "".join(f"{line}\n" for line in lines)
    path = cache_folder(GIVEN) / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{suffix}"
    instead = "set XDG_CACHE_HOME to another folder"
    with disk_errors(path.parent, safe="Nothing was started.", instead=instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def _columns(texts: Iterable[Text]) -> Iterator[dict[str, object]]:
    """Yield the texts as dicts of their columns."""
    width = 0  # of the tuples
    number = 0
    for number, text in enumerate(texts, 1):
        if isinstance(text, str):
            row: dict[str, object] = {"text": text}
        elif isinstance(text, Mapping):
            row = values_of(text)
        elif (
            isinstance(text, Sequence)
            and len(text) > 1
            and all(isinstance(each, str) for each in text)
        ):
            row = dict(zip(column_names(len(text)), text, strict=True))
        else:
            raise DataError(f"text {number} is {shown(text)}. {EXPECTED}")
        width = width or len(row)
        if len(row) != width and not isinstance(text, Mapping):
            columns = f"{counted(len(row), 'column{s}')} ({', '.join(row)})"
            raise DataError(f"text {number} has {columns}, but the first text has {width}")
        yield row
    if not number:
        raise DataError("the list of texts to train on is empty")
