"""The tasks by name, and SentEval's data: a folder on disk, or the archive that SimCSE put on the Hugging Face hub."""

import difflib
import os
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import Task
from diffcse_jax.evaluation.geometry import PROBES
from diffcse_jax.evaluation.retrieval import OWN_TASKS, OwnTask
from diffcse_jax.evaluation.search_collections import KIND as SEARCH
from diffcse_jax.evaluation.search_collections import SearchTask
from diffcse_jax.evaluation.senteval import FINETUNE_TASKS, OTHER_TASKS, REGRESSION_TASKS, TRANSFER_TASKS
from diffcse_jax.evaluation.sts import SICKR, STSB, YEARS
from diffcse_jax.io import atomic_dir, cache_folder, expand_path, hub_file

STS_TASKS: tuple[Task, ...] = (*YEARS, STSB, SICKR)
_TRAINED = (*TRANSFER_TASKS, *REGRESSION_TASKS, *FINETUNE_TASKS, *OTHER_TASKS)
TASKS: dict[str, Task] = {task.name: task for task in (*STS_TASKS, *_TRAINED, *PROBES)}
GROUPS = {"sts": tuple(task.name for task in STS_TASKS), "transfer": tuple(task.name for task in TRANSFER_TASKS)}
GROUPS["full"] = GROUPS["sts"] + GROUPS["transfer"]
ALIASES = {  # without case and punctuation
    "stsb": "STSBenchmark",
    "stsbench": "STSBenchmark",
    "sickr": "SICKRelatedness",
    "sicke": "SICKEntailment",
    "all": "full",
}
DATA_SETS = ("STS", "SICK", "MR", "CR", "SUBJ", "MPQA", "SST", "TREC", "MRPC")  # folders of SentEval's data
PLACES = ("senteval", "downstream", "senteval/downstream", "data/downstream", "SentEval/data/downstream")


def own_task(name: str) -> Task | None:
    """Return the task that a name like `pairs_retrieval:FILE` stands for, or None for other names."""
    kind, _, file = name.partition(":")
    own: dict[str, type[OwnTask]] = {SEARCH: SearchTask, **OWN_TASKS}
    return own[kind](name, {}) if file and kind in own else None


def find_task(name: str) -> Task:
    """Return the task with this exact name, or for `KIND:FILE` the task on that file."""
    return own_task(name) or TASKS[name]


def expand_groups(names: Iterable[str], mode: str) -> list[str]:
    """Return task names, each once, with groups replaced by those of their tasks that have data for the mode.

    Args:
        names: Tasks, groups, or `KIND:FILE` for the user's own files. Case and punctuation do not matter.
        mode: `test`, `fasttest` or `dev`.
    """
    tasks: list[str] = []
    for name in map(_full_name, names):
        if name in GROUPS:
            tasks += [task for task in GROUPS[name] if mode in TASKS[task].modes]
        elif mode in find_task(name).modes:
            tasks.append(name)
        else:
            raise ConfigError(f"{name} has no {mode} split")
    return list(dict.fromkeys(tasks))


def _full_name(name: str) -> str:
    if own_task(name):
        return name
    known = {_plain(each): each for each in (*GROUPS, *TASKS)} | ALIASES
    if found := known.get(_plain(name)):
        return found
    near = difflib.get_close_matches(_plain(name), known, n=1)
    hint = f"Did you mean {known[near[0]]}? " if near else ""
    names = ", ".join([*GROUPS, *TASKS, *(f"{kind}:FILE" for kind in OWN_TASKS), f"{SEARCH}:FOLDER"])
    raise ConfigError(f"unknown task {name!r}. {hint}Known tasks: {names}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def missing_files(task: Task, folder: Path, mode: str) -> list[Path]:
    """Return the files that a task would read and that do not exist."""
    return [path for path in task.files(folder, mode) if not path.is_file()]


# SentEval's data


def is_local(data_dir: str) -> bool:
    """Return whether SentEval's data is looked for on this machine, not on the hub."""
    return bool(data_dir) or "DIFFCSE_DATA_DIR" in os.environ


def senteval_folder(data_dir: str) -> Path:
    """Find SentEval's `downstream` folder: the named one, `$DIFFCSE_DATA_DIR/senteval`, or the hub's.

    If the named folder contains it in one of `PLACES`, that one is returned.
    """
    if not is_local(data_dir):
        return _hub_folder()
    folder = expand_path(data_dir) if data_dir else Path(os.environ["DIFFCSE_DATA_DIR"]) / "senteval"
    if not folder.is_dir():
        raise DataError(f"no evaluation data: there is no folder {folder}")
    candidates = (folder, *(folder / place for place in PLACES))
    return next((c for c in candidates if any((c / name).is_dir() for name in DATA_SETS)), folder)


def _hub_folder() -> Path:
    archive = hub_file(
        "senteval.tar",
        "Extract that file and name the folder that contains STS, SICK, MR, ... with --data_dir (for training: "
        "eval.data_dir). Or name a folder that contains it as `senteval` in DIFFCSE_DATA_DIR",
    )
    folder = cache_folder(f"senteval-{archive.parent.name[:12]}")
    extract(archive, folder)
    found = sorted(path.parent for path in folder.rglob("STS") if path.is_dir())
    if not found:
        raise DataError(f"{folder} does not contain a folder STS. Delete it to download SentEval's data again")
    return found[0]


def extract(archive: Path, folder: Path) -> None:
    """Extract an archive, unless the folder exists."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_dir(folder) as new, tarfile.open(archive) as tar:
            tar.extractall(str(new), filter="data")
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise DataError(f"cannot extract {archive} to {folder}: {error}") from error
