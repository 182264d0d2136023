"""Checks of a study: its rows, seeds, tasks and published scores."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from diffcse_jax.config import OWN_POOLER, Config
from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import results
from diffcse_jax.evaluation.tasks import expand_groups
from diffcse_jax.losses.finetune import AVERAGE, score_name
from diffcse_jax.models.pooling import POOLERS
from diffcse_jax.study import Study

START = "start"
DEV_TITLES = {"stsb_spearman": "STS-B dev"}


def start_rows(poolers: Iterable[str]) -> dict[str, str]:
    """The rows of the untrained start by label, with their poolers."""
    return {START if pooler == OWN_POOLER else f"{START} ({pooler})": pooler for pooler in poolers}


def check_forms(name: str, study: Study) -> None:
    """Refuses what is no mapping or no sequence where a study has one."""
    mappings = {what: getattr(study, what) for what in ("variants", "grid", "seeds_of", "published", "finetunings")}
    named = {what: mappings[what] for what in ("variants", "published", "finetunings")}
    mappings |= {
        f"{what}: {row!r}": value
        for what, rows in named.items()
        if isinstance(rows, Mapping)
        for row, value in rows.items()
    }
    for what, value in mappings.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: {what}: expected a dict, got {value!r}")
    sequences = {what: getattr(study, what) for what in ("seeds", "tasks", "start")}
    sequences |= {f"grid: {key}": values for key, values in study.grid.items()}
    sequences |= {f"seeds_of: {row!r}": seeds for row, seeds in study.seeds_of.items()}
    for what, value in sequences.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{name}: {what}: expected a tuple such as ({value!r},), got {value!r}")


def check_study(name: str, study: Study, trained: Sequence[str]) -> None:
    """Refuses seeds, poolers and tasks that cannot be used.

    Args:
        name: of the study.
        study: as its file gives it.
        trained: the rows that are trained.

    Raises:
        ConfigError: naming the first.
    """
    starts = [*start_rows(study.start)]
    for row in study.seeds_of:
        if row not in (*starts, *trained):
            raise ConfigError(f"{name}: seeds_of names {row!r}; the study has: {', '.join((*starts, *trained))}")
    for row in (*starts, *trained) if study.finetunings else trained:
        seeds = list(study.seeds_of.get(row, study.seeds))
        if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise ConfigError(f"{name}: variant {row!r}: seeds are different numbers from 0, at least one; got {seeds}")
    for pooler in study.start:
        if pooler not in (OWN_POOLER, *POOLERS):
            raise ConfigError(f"{name}: start: {pooler!r} is not one of {', '.join((OWN_POOLER, *POOLERS))}")
    try:
        expand_groups(study.tasks, "test")
    except ConfigError as error:
        raise ConfigError(f"{name}: tasks: {error}") from error


def check_rows(name: str, study: Study, rows: Sequence[str], finetunings: Iterable[Config]) -> None:
    """Refuses published scores that have no place, and rows that would share a folder.

    Args:
        name: of the study.
        study: as its file gives it.
        rows: all of them, in order.
        finetunings: the configurations of fine-tunings.

    Raises:
        ConfigError: naming the first.
    """
    columns = {*DEV_TITLES.values(), *expand_groups(["full"], "test"), "average sts", "average transfer"}
    columns |= {*expand_groups(study.tasks, "test"), *results.PROBES}
    for config in finetunings:
        columns |= {AVERAGE, *(score_name(task, options) for task, options in config.finetune.tasks.items())}
    for row, scores in study.published.items():
        if row not in rows:
            raise ConfigError(f"{name}: published names {row!r}; the study has: {', '.join(rows)}")
        if unknown := sorted(scores.keys() - columns):
            raise ConfigError(f"{name}: published: {row!r} has the unknown column {unknown[0]!r}")
    folders: dict[str, str] = {}
    for row in rows:
        other = folders.setdefault(folder_name(name, row).casefold(), row)
        if other != row or rows.count(row) > 1:
            raise ConfigError(f"{name}: variants {other!r} and {row!r} would share a folder; rename one")


def check_different(name: str, configs: Mapping[str, Config], hint: str = "") -> None:
    """Refuses two variants with the same configuration; the hint ends the message.

    Raises:
        ConfigError: naming the first two.
    """
    for (one, first), (other, second) in itertools.combinations(configs.items(), 2):
        if first == second:
            raise ConfigError(f"{name}: variants {one!r} and {other!r} have the same configuration{hint}")


def folder_name(name: str, row: str) -> str:
    """A row's folder in the study's.

    Raises:
        ConfigError: the row's name cannot be one.
    """
    folder = re.sub(r"[^\w.,=+-]+", "-", row).strip("-")
    if not re.fullmatch(r"[\w ,.+=()%/:-]+", row) or not folder or folder.startswith("."):
        raise ConfigError(
            f"{name}: {row!r} is no name for a variant: letters, digits, blanks and , . + - = ( ) % / : _"
        )
    return folder
