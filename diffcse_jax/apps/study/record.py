"""A record of a study's runs in one file.

It outlives their folders and may be moved to other machines. Each line is a JSON object with the
scores of a run. A run that the record has is not done again.
"""

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.errors import DataError
from diffcse_jax.export.card import portable
from diffcse_jax.io import append_line, disk_errors, json_digest, lock

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

Key = tuple[str, int | None, str, tuple[str, ...]]  # row, seed, settings and tasks


def digest_of(config: Config, start: Config | None = None) -> str:
    """Return a hash of the settings that results depend on.

    Of local paths, only the last part counts.

    Args:
        config: The configuration of a run.
        start: That of the encoder that a fine-tuning starts from, whose folder is named differently
            everywhere.
    """
    free = machine_keys() | ({"model.name_or_path"} if start else set())
    values = {key: value for key, value in flat(portable(config)).items() if key not in free}
    return json_digest([values, digest_of(start) if start else ""])[:16]


class StudyRecord:
    """The lines of a record, by row, seed, settings and tasks.

    Raises:
        DataError: A line of the file is not an entry of a record.
    """

    def __init__(self, path: Path):
        self.path = path
        self._found: dict[Key, dict[str, Any]] = {}
        self._size = -1  # of the file when it was read
        self._read()

    def find(self, key: Key) -> dict[str, Any] | None:
        """Return the results of a run, or None. What other processes have added is read first."""
        self._read()
        entry = self._found.get(key)
        return entry["results"] if entry else None

    def add(self, key: Key, results: Mapping[str, Any]) -> None:
        """Append the results of a run. Several processes may share a record."""
        row, seed, settings, tasks = key
        kept = {name: value for name, value in results.items() if name != "config"} | {
            "asked": list(tasks)
        }
        entry = {
            "row": row,
            "seed": seed,
            "settings": settings,
            "results": kept,
            "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "python": platform.python_version(),
            "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        }
        with disk_errors(self.path, safe="The run itself is complete."):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with lock(self.path.with_name(f"{self.path.name}.lock"), wait=True):
                append_line(self.path, json.dumps(entry))

    def _read(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size == self._size:
            return
        self._size = size
        lines = self.path.read_text(encoding="utf-8").splitlines() if size else []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                key = (
                    entry["row"],
                    entry["seed"],
                    entry["settings"],
                    tuple(entry["results"]["asked"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}, line {number}: not an entry of a study's record. Remove the line"
                ) from error
            self._found[key] = entry
