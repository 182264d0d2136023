"""Write text that is in memory to a file, from which a run trains and, after an interruption, resumes."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.data.pair_builders import digest, is_in_share
from diffcse_jax.data.readers import Fault, checked, column_names
from diffcse_jax.errors import DataError
from diffcse_jax.io import cache_folder, disk_errors

Text = str | Sequence[str] | Mapping[str, object]  # a sentence or document; a pair, triple, ...; columns by name
EXPECTED = "Give strings; tuples of strings (sentence, positive, hard negatives); or dicts, whose keys are columns"


def as_texts(given: Any) -> Iterable[Text]:
    """Return the texts of a list or another iterable, or the rows of a table (pandas, polars, pyarrow, datasets).

    Raises:
        DataError: It is a single string, a dict, or cannot be iterated.
    """
    kind = type(given).__name__
    if isinstance(given, Mapping):  # a DatasetDict, or columns
        keys = ", ".join(map(str, [*given][:5]))
        raise DataError(
            f"cannot train on a {kind} with the keys {keys}. Choose one split or column, or give a list of dicts"
        )
    if rows := getattr(given, "to_dicts", None) or getattr(given, "to_pylist", None):  # polars; pyarrow
        return rows()
    if hasattr(given, "columns") and hasattr(given, "to_dict"):  # pandas
        return given.to_dict("records")
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise DataError(f"cannot train on a {kind}. {EXPECTED}")
    return given


def write_sentences(texts: Iterable[Text]) -> Path:
    """Write texts of one kind (see `as_texts`) to a jsonl file in the cache folder, named after its content.

    Raises:
        DataError: A text is of another kind, or there are none.
        DiskError: The file cannot be written.
    """
    return _write((json.dumps(row, ensure_ascii=False, default=str) for row in _columns(texts)), ".jsonl")


def write_held_out(texts: Iterable[Text], share: float) -> tuple[Path, Path]:
    """Write pairs (or triples, ...) to two files: rows to train on, and pairs to evaluate with.

    A hash of the first text decides, so that all rows of an anchor stay together. Training rows that share a text with
    a held-out row are left out. Unusable rows stay with the training rows, where they are skipped and counted.

    Returns:
        A jsonl file as of `write_sentences`, and a tsv file of sentences and positives.

    Raises:
        DataError: As `write_sentences`, or one of the two files would be empty.
    """
    rows = [tuple(map(str, row.values())) for row in _columns(texts)]
    held_out = [row for row in rows if is_in_share(row[0], share) and not isinstance(checked(row), Fault)]
    kept_out = {digest(text) for row in held_out for text in row}
    trained_on = [row for row in rows if kept_out.isdisjoint(map(digest, row))]
    if not trained_on or len(held_out) < 2:
        raise DataError(
            f"data.held_out={share} leaves {len(trained_on)} of {len(rows)} rows for training and {len(held_out)} for "
            "evaluation, which needs at least 2. Give more rows, or change data.held_out"
        )
    pairs = dict.fromkeys("\t".join(" ".join(text.split()) for text in row[:2]) for row in held_out)
    return write_sentences(trained_on), _write(pairs, ".tsv")


def _columns(texts: Iterable[Text]) -> Iterator[dict[str, object]]:
    """Yield the texts as dicts of their columns."""
    first: dict[str, object] = {}
    for number, text in enumerate(as_texts(texts), 1):
        if isinstance(text, str):
            row: dict[str, object] = {"text": text}
        elif isinstance(text, Mapping):
            row = {str(name): value for name, value in text.items()}
        elif isinstance(text, Sequence) and len(text) > 1 and all(isinstance(each, str) for each in text):
            row = dict(zip(column_names(len(text)), text, strict=True))
        else:
            raise DataError(f"text {number} is {text!r:.60}. {EXPECTED}")
        first = first or row
        if len(row) != len(first):
            raise DataError(
                f"text {number} has {len(row)} columns ({', '.join(row)}), but the first text has {len(first)}"
            )
        yield row
    if not first:
        raise DataError("the list of texts to train on is empty")


def _write(lines: Iterable[str], extension: str) -> Path:
    """Write lines to a file that is named by their hash."""
    folder, hashed = cache_folder("text"), hashlib.sha256()
    with disk_errors(folder, safe="Nothing was started.", instead="set XDG_CACHE_HOME to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{uuid.uuid4().hex}.tmp"
        try:
            with partial.open("w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
                for line in lines:
                    file.write(f"{line}\n")
                    hashed.update(line.encode(errors="surrogatepass") + b"\n")
                file.flush()
                os.fsync(file.fileno())
            return partial.replace(folder / f"{hashed.hexdigest()[:24]}{extension}")
        finally:
            partial.unlink(missing_ok=True)
