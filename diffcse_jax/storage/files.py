"""Files that are there as a whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from diffcse_jax.data.lines import unreadable
from diffcse_jax.errors import CheckpointError

LONGEST_JSON = 1 << 24  # characters


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a file at once: a process or machine that stops in here leaves the earlier one, whole.

    Of two processes that write the same file at the same time one may fail.
    """
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the new name can be on disk before the content is
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of a JSON document."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON document.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    if problem := unreadable(path):
        raise CheckpointError(problem)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_JSON + 1)
        if len(text) > LONGEST_JSON:
            raise ValueError(f"longer than {LONGEST_JSON:,} characters")
        return json.loads(text)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # of the first: JSONDecodeError or UnicodeDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON document that is an object.

    Raises:
        CheckpointError: as `read_json`; it is something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: {str(content)[:60]}")
    return content
