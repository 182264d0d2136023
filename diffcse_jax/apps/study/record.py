"""A record of a study's runs in one file.

It outlives their folders and may be moved to other machines. Each line is a JSON object with the
scores of a run. A run that the record has is not done again.
"""

import codecs
import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import runner
from diffcse_jax.export.card import portable
from diffcse_jax.io import append_line, disk_errors, lock

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_DEV = " dev"  # ends the names of tasks whose dev split is scored
LAST_CHECKPOINT = "last checkpoint"  # stands beside the tasks if it is scored as well
_START = "start"  # in the settings of a fine-tuning: those of the encoder that it starts from


class Key(NamedTuple):
    """What identifies a run in a record.

    Attributes:
        row: Its row of the study's table.
        seed: Its seed. None for the starting checkpoint.
        settings: `changed_settings` as JSON.
        tasks: What is scored: full names in alphabetical order, however the user named the tasks.
    """

    row: str
    seed: int | None
    settings: str
    tasks: tuple[str, ...]


def key_of(
    row: str, seed: int | None, config: Config, start: Config | None, asked: Iterable[str]
) -> Key:
    """Return the key of a run. For `config` and `start`, see `changed_settings`."""
    return Key(row, seed, _as_json(changed_settings(config, start)), _full_names(asked))


def changed_settings(config: Config, start: Config | None = None) -> dict[str, Any]:
    """Return the settings that results depend on, by key, where they differ from the defaults.

    So a run is still recognised after the package has got a new key. Of local paths, only the last
    part counts.

    Args:
        config: The configuration of a run.
        start: That of the encoder that a fine-tuning starts from, whose folder is named differently
            everywhere.
    """
    free = machine_keys() | ({"model.name_or_path"} if start else set())
    defaults = flat(portable(Config()))
    changed = {
        key: value
        for key, value in flat(portable(config)).items()
        if key not in free and not (key in defaults and defaults[key] == value)
    }
    return changed | ({_START: changed_settings(start)} if start else {})


def _as_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


class StudyRecord:
    """The lines of a record, by row, seed, settings and tasks.

    Raises:
        DataError: A line of the file is not an entry of a record.
    """

    def __init__(self, path: Path):
        self.path = path
        self._entries: dict[Key, dict[str, Any]] = {}
        self._repeated: set[Key] = set()
        self._size = -1  # of the file when it was read
        self._read()

    def find(self, key: Key) -> dict[str, Any] | None:
        """Return the results of a run, or None. What other processes have added is read first."""
        self._read()
        entry = self._entries.get(key)
        return entry["results"] if entry else None

    def difference(self, key: Key) -> str:
        """Return in words how the settings differ from those of the recorded run of this name.

        It is empty if the record has no run of this row and seed, or one with these settings and
        tasks.
        """
        same_name = [each for each in self._entries if each[:2] == key[:2]]
        if not same_name or key in self._entries:
            return ""
        if same := [each for each in same_name if each.settings == key.settings]:
            recorded, wanted = (", ".join(each.tasks) or "none" for each in (same[-1], key))
            return f"the tasks are {recorded} there and {wanted} here"
        there, here = (flat(json.loads(each.settings)) for each in (same_name[-1], key))
        return ", ".join(
            f"{name} is {_value(there, name)} there and {_value(here, name)} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        )

    def repeated(self) -> Iterator[str]:
        """Yield the runs that have several lines with different scores."""
        for key in sorted(self._repeated, key=str):
            seed = "" if key.seed is None else f", seed {key.seed}"
            yield f"{key.row}{seed}"

    def add(self, key: Key, results: Mapping[str, Any]) -> None:
        """Append the results of a run. Several processes may share a record."""
        kept = {name: value for name, value in results.items() if name != "config"} | {
            "asked": list(key.tasks)
        }
        entry = {
            "row": key.row,
            "seed": key.seed,
            "settings": json.loads(key.settings),
            "results": kept,
            "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "python": platform.python_version(),
            "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        }
        with disk_errors(self.path, safe="The run itself is complete."):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with lock(self.path.with_name(f"{self.path.name}.lock"), wait=True):
                append_line(self.path.resolve(), json.dumps(entry))

    def _read(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size == self._size:
            return
        self._size = size
        content = self.path.read_bytes() if size else b""
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{self.path} is UTF-16. Save it as UTF-8")
        for number, line in enumerate(content.splitlines(), 1):
            try:
                entry = json.loads(line.decode("utf-8-sig"))
                key = _key_of_entry(entry)
                known = self._entries.get(key, entry)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}, line {number}: not an entry of a study's record. Remove the line"
                ) from error
            if any(known["results"][name] != entry["results"][name] for name in ("dev", "scores")):
                self._repeated.add(key)
            self._entries[key] = entry


def _key_of_entry(entry: Mapping[str, Any]) -> Key:
    """Return the key of an entry.

    Raises `KeyError`, `TypeError` or `ValueError` if it is not a valid entry.
    """
    results = entry["results"]
    if not {"metric", "notes"} <= results.keys():
        raise KeyError("metric, notes")
    numbers = [results["dev"], *results["scores"].values()]
    if not all(math.isfinite(each) for each in numbers if each is not None):
        raise ValueError("a score is not finite")
    settings = _as_json(dict(entry["settings"]))
    return Key(entry["row"], entry["seed"], settings, _full_names(results["asked"]))


def _full_names(asked: Iterable[str]) -> tuple[str, ...]:
    """Return what is scored with the full names of tasks, in alphabetical order."""
    names: set[str] = set()
    for name in asked:
        suffix = _DEV if name.endswith(_DEV) else ""
        mode = "dev" if suffix else "test"
        try:
            tasks = runner.expand_groups([name.removesuffix(suffix)], mode)
        except ConfigError:  # the last checkpoint, or a task of another version
            names.add(name)
        else:
            names.update(f"{task}{suffix}" for task in tasks)
    return tuple(sorted(names))


def _value(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "the default"
