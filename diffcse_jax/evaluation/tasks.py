"""The tasks by name."""

import difflib
import re
from collections.abc import Iterable

from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import Task
from diffcse_jax.evaluation.geometry import PROBES
from diffcse_jax.evaluation.retrieval import OWN_TASKS, OwnTask
from diffcse_jax.evaluation.search_collections import KIND as SEARCH
from diffcse_jax.evaluation.search_collections import SearchTask
from diffcse_jax.evaluation.senteval import FINETUNE_TASKS, OTHER_TASKS, REGRESSION_TASKS, TRANSFER_TASKS
from diffcse_jax.evaluation.sts import SICKR, STSB, YEARS
from diffcse_jax.evaluation.systems import OwnDocuments

STS_TASKS: tuple[Task, ...] = (*YEARS, STSB, SICKR)
_TRAINED = (*TRANSFER_TASKS, *REGRESSION_TASKS, *FINETUNE_TASKS, *OTHER_TASKS)
TASKS: dict[str, Task] = {task.name: task for task in (*STS_TASKS, *_TRAINED, *PROBES)}
OWN: dict[str, type[OwnTask]] = {SEARCH: SearchTask, "documents": OwnDocuments, **OWN_TASKS}  # named KIND:FILE
GROUPS = {"sts": tuple(task.name for task in STS_TASKS), "transfer": tuple(task.name for task in TRANSFER_TASKS)}
GROUPS["full"] = GROUPS["sts"] + GROUPS["transfer"]
ALIASES = {  # without case and punctuation
    "stsb": "STSBenchmark",
    "stsbench": "STSBenchmark",
    "sickr": "SICKRelatedness",
    "sicke": "SICKEntailment",
    "all": "full",
}


def own_task(name: str) -> Task | None:
    """Return the task that a name like `pairs_retrieval:FILE` stands for, or None for other names."""
    kind, _, file = name.partition(":")
    return OWN[kind](name, {}) if file and kind in OWN else None


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
    names = ", ".join([*GROUPS, *TASKS, *(f"{kind}:FILE" for kind in OWN)])
    raise ConfigError(f"unknown task {name!r}. {hint}Known tasks: {names}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())
