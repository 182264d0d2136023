"""Readers of json files: a list of strings or objects, or, as in a jsonl file, one object a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcse_jax.data import text_files
from diffcse_jax.data.corpus import Fault
from diffcse_jax.data.lines import byte_lines, whole
from diffcse_jax.errors import DataError

MOST_BYTES = 1 << 28  # of a list, which is held in memory as a whole
STRING = "sentence"  # the column of a list of strings


def is_list(path: Path) -> bool:
    """True if the first character that is no white space begins a list."""
    for line in byte_lines(path):
        if line is None:  # too long to be held, as a list on a single line is
            return True
        if text := line.removeprefix(b"\xef\xbb\xbf").strip():
            return text.startswith(b"[")
    return False


def entries(path: Path) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """The objects of a json file with their numbers, or the faults in their places; of a string an object is made.

    Raises:
        DataError: a list that is damaged or too large.
    """
    if not is_list(path):
        yield from text_files.json_objects(path)
        return
    content = whole(path, MOST_BYTES, instead="write one object a line and name the file .jsonl")
    try:
        found = json.loads(content.decode("utf-8-sig", errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, list):  # a line that is too long, of something else
        raise DataError(f"{path} holds neither a list nor an object a line")
    for number, entry in enumerate(found, 1):
        if isinstance(entry, str):
            yield number, {STRING: entry}
        else:
            yield number, entry if isinstance(entry, dict) else Fault.NOT_OBJECT
