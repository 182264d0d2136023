"""Text in memory as a file: training reads a file, and goes on with the same one after an interruption."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from diffcse_jax.data.corpus import Fault, checked, column_names
from diffcse_jax.data.held_out import DIGESTS, digest
from diffcse_jax.errors import DataError
from diffcse_jax.io import cache_folder, disk_errors

Text = str | Sequence[str] | Mapping[str, object]  # a sentence or document; a pair, triple, ...; columns by name


def write_sentences(texts: Iterable[Text]) -> Path:
    """Writes text into a jsonl file of the package's cache folder, under a name that follows from its content.

    Args:
        texts: of one kind: strings, which are sentences or documents; sequences of sentence, positive and hard
            negatives; or mappings, whose keys are the names of columns.

    Raises:
        DataError: one is of no such kind, or of another than the first; there is none.
        DiskError: the file cannot be written.
    """
    return _write((json.dumps(row, ensure_ascii=False, default=str) for row in _columns(texts)), ".jsonl")


def write_held_out(texts: Iterable[Text], share: float) -> tuple[Path, Path]:
    """Writes pairs, triples, ... into two files: those to train on, and pairs to evaluate with.

    A hash of a row's first text decides, so that all rows of an anchor stay together. Rows to train on that have a
    text of the others, whatever its white space and case, are left out. Unusable rows, such as those with a blank text,
    are never evaluated with: they are left to training, which skips and counts them.

    Returns:
        A jsonl file as of `write_sentences`, and tab-separated pairs of sentence and positive.

    Raises:
        DataError: as `write_sentences`; nothing is left for one of the two.
    """
    rows = [tuple(map(str, row.values())) for row in _columns(texts)]
    held_out = [row for row in rows if digest(row[0]) < share * DIGESTS and not isinstance(checked(row), Fault)]
    kept_out = {digest(text) for row in held_out for text in row}
    trained_on = [row for row in rows if kept_out.isdisjoint(map(digest, row))]
    if not trained_on or len(held_out) < 2:
        raise DataError(
            f"data.held_out={share} leaves {len(trained_on)} of {len(rows)} rows to train on and {len(held_out)} to "
            "evaluate with, which must be two at least: give more rows, or another share"
        )
    pairs = dict.fromkeys("\t".join(" ".join(text.split()) for text in row[:2]) for row in held_out)
    return write_sentences(trained_on), _write(pairs, ".tsv")


def _columns(texts: Iterable[Text]) -> Iterator[dict[str, object]]:
    """The texts by the names of their columns."""
    first: tuple[str, ...] | None = None
    for number, text in enumerate(texts, 1):
        row = _named(text, number)
        first = first or tuple(row)
        if len(row) != len(first):
            raise DataError(f"text {number} has {len(row)} columns ({', '.join(row)}), the first one {len(first)}")
        yield row
    if first is None:
        raise DataError("there is no text to train on: the list is empty")


def _named(text: object, number: int) -> dict[str, object]:
    if isinstance(text, str):
        return {"text": text}
    if isinstance(text, Mapping):
        return {str(name): value for name, value in text.items()}
    if isinstance(text, Sequence) and len(text) > 1 and all(isinstance(each, str) for each in text):
        return dict(zip(column_names(len(text)), text, strict=True))
    raise DataError(
        f"text {number} is {text!r:.60}: give strings; or tuples of strings, which are sentence, positive and hard "
        "negatives; or dicts, whose keys are columns"
    )


def _write(lines: Iterable[str], extension: str) -> Path:
    """Writes lines into a file that is named by their hash."""
    folder, hashed = cache_folder("text"), hashlib.sha256()
    with disk_errors(folder, safe="Nothing was begun.", instead="set XDG_CACHE_HOME to another folder"):
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
