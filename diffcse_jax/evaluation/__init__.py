"""Evaluation tasks."""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import regression, sts, transfer
from diffcse_jax.evaluation.geometry import Geometry, Retrieval
from diffcse_jax.evaluation.own_pairs import KINDS, own_task
from diffcse_jax.evaluation.protocols import Task

STS_TASKS = (sts.STS12, sts.STS13, sts.STS14, sts.STS15, sts.STS16, sts.STSBenchmark, sts.SICKRelatedness)
TRANSFER_TASKS = (
    transfer.MR,
    transfer.CR,
    transfer.SUBJ,
    transfer.MPQA,
    transfer.SST2,
    transfer.TREC,
    transfer.MRPC,
)
REGRESSION_TASKS = (regression.STSBenchmarkSentEval, regression.SICKRelatednessSentEval)
SINGLE_TASKS = (  # in no group of the published tables
    regression.STSBenchmarkFinetune,
    regression.SICKRelatednessFinetune,
    transfer.SST5,
    transfer.SICKEntailment,
    Geometry,
    Retrieval,
)
TASKS = {task.name: task for task in (*STS_TASKS, *TRANSFER_TASKS, *REGRESSION_TASKS, *SINGLE_TASKS)}
GROUPS = {
    "sts": tuple(task.name for task in STS_TASKS),
    "transfer": tuple(task.name for task in TRANSFER_TASKS),
    "full": tuple(task.name for task in (*STS_TASKS, *TRANSFER_TASKS)),
}
ALIASES = {  # other names in use, without case and punctuation
    "stsb": "STSBenchmark",
    "stsbench": "STSBenchmark",
    "sickr": "SICKRelatedness",
    "sicke": "SICKEntailment",
    "all": "full",
}


def task_name(name: str) -> str:
    """The task or group of this name, or of one that differs in case or punctuation, such as `STS-B` and `sst-2`.

    `KIND:FILE`, a task on a file of one's own, is its own name.

    Raises:
        ConfigError: there is none; the message has the nearest one.
    """
    if own_task(name):
        return name
    known = {_plain(each): each for each in (*GROUPS, *TASKS)} | ALIASES
    if found := known.get(_plain(name)):
        return found
    near = difflib.get_close_matches(_plain(name), known, n=1)
    hint = f"did you mean {known[near[0]]}? " if near else ""
    all_names = [*GROUPS, *TASKS, *(f"{kind}:FILE" for kind in KINDS)]
    raise ConfigError(f"unknown task {name!r}; {hint}known: {', '.join(all_names)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def expand_groups(names: Iterable[str], mode: str) -> list[str]:
    """Task names, each once, with groups replaced by their tasks that have a split for the mode.

    Args:
        names: of tasks, groups, or `KIND:FILE` for a file of one's own.
        mode: `test`, `fasttest` or `dev`.

    Raises:
        ConfigError: a name that is neither task nor group, or a task without such a split.
    """
    tasks = []
    for name in map(task_name, names):
        if own_task(name):
            tasks.append(name)
            continue
        if name in TASKS and mode not in TASKS[name].modes:
            raise ConfigError(f"{name} has no {mode} split")
        tasks += [task for task in GROUPS.get(name, (name,)) if mode in TASKS[task].modes]
    return list(dict.fromkeys(tasks))


def build_task(name: str, folder: Path, **options: Any) -> Task:
    """The task on its data.

    Args:
        name: one of `TASKS`, or `KIND:FILE`.
        folder: SentEval's `downstream` folder.
        options: fields of tasks, such as `similarity`; a task takes those that it has.
    """
    if own := own_task(name):
        return own
    task = TASKS[name]
    fields = {field.name for field in dataclasses.fields(task)}
    return task(folder, **{option: value for option, value in options.items() if option in fields})


def needs_folder(names: Iterable[str]) -> bool:
    """True if a task reads SentEval's folder."""
    return not all(map(own_task, names))


def missing_files(task: Task, mode: str) -> list[Path]:
    """The files that a task would read and that are not there."""
    return [path for path in task.files(mode) if not os.path.isfile(path)]
