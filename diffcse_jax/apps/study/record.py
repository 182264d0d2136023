"""A record of a study's runs in one file, which outlives their folders and may be moved to other machines.

Each line is a JSON object with the scores of a run. A run that the record has is not done again.
"""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.errors import DataError
from diffcse_jax.io import append_line, disk_errors, json_digest, lock

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_ELSEWHERE = frozenset({"data.cache_dir", "eval.data_dir"})  # folders, whose content the scores identify


def digest_of(config: Config) -> str:
    """Return a hash of the settings that results depend on. Of paths, only the last part counts."""
    values = {}
    for key, value in flat(config.to_dict()).items():
        if key not in machine_keys() | _ELSEWHERE:
            is_path = isinstance(value, str) and os.sep in value and os.path.exists(value)
            values[key] = Path(value).name if is_path else value
    return json_digest(values)[:16]


class StudyRecord:
    """The lines of a record, by row, seed and settings.

    Raises:
        DataError: A line of the file is not an entry of a record.
    """

    def __init__(self, path: Path):
        self.path = path
        self._found: dict[tuple[str, int | None, str], dict[str, Any]] = {}
        if not path.is_file():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                entry = json.loads(line)
                self._found[entry["row"], entry["seed"], entry["settings"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number}: not an entry of a study's record. Remove the line") from error

    def find(self, row: str, seed: int | None, config: Config, tasks: tuple[str, ...]) -> dict[str, Any] | None:
        """Return the results of a run that was scored on these tasks, or None."""
        entry = self._found.get((row, seed, digest_of(config)))
        return entry["results"] if entry and entry["results"]["asked"] == list(tasks) else None

    def add(self, row: str, seed: int | None, config: Config, results: Mapping[str, Any]) -> None:
        """Append the results of a run. Several processes may share a record."""
        kept = {key: value for key, value in results.items() if key != "config"} | {"asked": list(results["asked"])}
        settings = digest_of(config)
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
        self._found[row, seed, settings] = entry
