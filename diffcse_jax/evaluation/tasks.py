"""The tasks by name."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import Encoder, Settings, Task, retrieval, search_collections, systems
from diffcse_jax.evaluation.geometry import PROBES
from diffcse_jax.evaluation.senteval import TRANSFER_TASKS
from diffcse_jax.evaluation.sts import SICKR, STSB, YEARS

STS_TASKS: tuple[Task, ...] = (*YEARS, STSB, SICKR)
TASKS: dict[str, Task] = {task.name: task for task in (*STS_TASKS, *TRANSFER_TASKS, *PROBES)}
# The tasks on the user's own files, which are named KIND:FILE.
OWN: dict[str, Callable[[Encoder, str, Settings], dict[str, Any]]] = {
    search_collections.KIND: search_collections.score_collection,
    "documents": systems.score_documents,
    "pairs_retrieval": retrieval.score_pairs,
}
GROUPS = {"sts": tuple(task.name for task in STS_TASKS), "transfer": tuple(task.name for task in TRANSFER_TASKS)}
GROUPS["full"] = GROUPS["sts"] + GROUPS["transfer"]
ALIASES = {  # without case and punctuation
    "stsb": "STSBenchmark",
    "stsbench": "STSBenchmark",
    "sickr": "SICKRelatedness",
    "all": "full",
}


def own_kind(name: str) -> str:
    """Return `KIND` of a name like `KIND:FILE`, or an empty string for other names."""
    kind, _, file = name.partition(":")
    return kind if file and kind in OWN else ""


def find_task(name: str) -> Task:
    """Return the task with this exact name, or for `KIND:FILE` the task on that file."""
    kind, _, file = name.partition(":")
    if not file:
        return TASKS[name]
    # Its function reads the file, so there are no splits to read.
    return Task(name, {}, read=tuple, score=lambda encoder, _, settings: OWN[kind](encoder, file, settings))


def expand_groups(names: Iterable[str], mode: str) -> list[str]:
    """Return task names, each once, with groups replaced by those of their tasks that have data for the mode.

    Case and punctuation of names do not matter.
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
    if own_kind(name):
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
