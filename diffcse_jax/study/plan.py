"""From a study file to the runs that it asks for. Every mistake in it is found here, before anything runs."""

import copy
import dataclasses
import functools
import itertools
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from diffcse_jax.config import (
    SHIPPED,
    Config,
    check_override_names,
    flat,
    known_keys,
    nested,
    shipped_config,
    unknown_key_message,
)
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.evaluation import comparison, expand_groups
from diffcse_jax.groups import OWN_POOLER, POOLERS
from diffcse_jax.options import build_options
from diffcse_jax.study import Settings, Study

SHIPPED_STUDIES = SHIPPED / "studies"
DEFAULTS = "diffcse_base"  # the file in configs/ that changes nothing
START = "start"
DEV_TITLES = {"stsb_spearman": "STS-B dev"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training with its scores, or the scores of the start: what one folder of a study holds.

    Attributes:
        row: the row of the table that it belongs to.
        seed: of training; None for the start, which is not trained.
        config: the whole configuration, seed included.
        folder: where it lives; it is the workdir of its training.
        tasks: as in the study.
        pooler: of the start.
    """

    row: str
    seed: int | None
    config: Config
    folder: Path
    tasks: tuple[str, ...]
    pooler: str | None = None

    @property
    def label(self) -> str:
        """For messages."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"

    @property
    def record(self) -> dict[str, Any]:
        """What tells whether a folder holds this run: `run.json`."""
        return {"row": self.row, "seed": self.seed, "pooler": self.pooler, "config": self.config.to_dict()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A study with its command line: what there is to do.

    Attributes:
        name: of the study: its file's.
        study: as the file gives it.
        overrides: values from the command line, of all variants.
        base: the configuration that variants start from, overrides included.
        runs: all of them, those of each row's first seed first.
    """

    name: str
    study: Study
    overrides: dict[str, Any]
    base: Config
    runs: tuple[Run, ...]

    @functools.cached_property
    def rows(self) -> dict[str, tuple[Run, ...]]:
        """The runs of each row of the table, in its order."""
        rows = dict.fromkeys(run.row for run in self.runs)
        return {row: tuple(run for run in self.runs if run.row == row) for row in rows}

    def selected(self, variants: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """The runs of these variants and seeds; empty: of all.

        Raises:
            ConfigError: one that the study does not have.
        """
        known_seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        for option, wanted, known in (("--variants", variants, list(self.rows)), ("--seeds", seeds, known_seeds)):
            for value in wanted:
                if value not in known:
                    raise ConfigError(f"{option}: {self.name} has no {value!r}; it has: {', '.join(map(str, known))}")
        return [
            run
            for run in self.runs
            if (not variants or run.row in variants) and (not seeds or run.seed is None or run.seed in seeds)
        ]

    def command_settings(self, run: Run) -> list[str]:
        """The options of `diffcse train` that give the run's configuration."""
        name = self.study.base if isinstance(self.study.base, str) else DEFAULTS
        changes = differences(Config.from_dict(shipped_config(name).to_dict()), run.config)
        return ["--config", name, *(f"--config.{key}={_as_text(value)}" for key, value in changes.items())]


def read_study(file: str) -> tuple[str, Study]:
    """The study of a file, or of one in `configs/studies/` by its name, with that name.

    Raises:
        ConfigError: there is no such file, it cannot be run, or its `get_study` gives no study.
    """
    shipped = SHIPPED_STUDIES / f"{file}.py"
    path = shipped if shipped.is_file() else Path(file)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED_STUDIES.glob("*.py")))
        raise ConfigError(f"no study file {file}; known by name: {names}")
    try:
        study = runpy.run_path(str(path))["get_study"]()
    except KeyError as error:
        missing = "it has no function get_study" if error.args == ("get_study",) else f"KeyError: {error}"
        raise ConfigError(f"{path}: {missing}") from error
    except Exception as error:  # whatever the file's own code raises
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: {message}") from error
    if not isinstance(study, Study):
        raise ConfigError(f"{path}: get_study gives no Study, but {type(study).__name__}")
    return path.stem, study


def make_plan(name: str, study: Study, overrides: Sequence[str], workdir: Path) -> Plan:
    """Builds the configuration of every run.

    Args:
        name: of the study, for messages.
        study: the study.
        overrides: arguments `--config.KEY=VALUE`; they come last, in every variant.
        workdir: where the study lives.

    Raises:
        ConfigError: a name, key, value or combination that cannot be used, with the variant that has it.
    """
    _check_forms(name, study)
    base = _base(name, study)
    values = parse_overrides(base, overrides)
    configs = {
        row: _config(f"{name}: variant {row!r}", base, settings, values) for row, settings in _points(name, study)
    }
    _check_study(name, study, list(configs))
    _check_different(name, configs)
    tasks = tuple(study.tasks)
    start = _config(f"{name}: base", base, {}, values)
    runs = [
        Run(row, None, start, workdir / _folder_name(name, row), tasks, pooler)
        for row, pooler in start_rows(study.start).items()
    ]
    trained = [
        (place, row, int(seed)) for row in configs for place, seed in enumerate(study.seeds_of.get(row, study.seeds))
    ]
    for _, row, seed in sorted(trained, key=lambda each: each[0]):  # stable: within a place the order of rows
        config = configs[row]
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        runs.append(Run(row, seed, config, workdir / _folder_name(name, row) / f"seed-{seed}", tasks))
    return Plan(name, study, values, start, tuple(runs))


def start_rows(poolers: Iterable[str]) -> dict[str, str]:
    """The rows of the untrained start by label, with their poolers."""
    return {START if pooler == OWN_POOLER else f"{START} ({pooler})": pooler for pooler in poolers}


def parse_overrides(base: ConfigDict, arguments: Sequence[str]) -> dict[str, Any]:
    """Values by dotted key, typed like those of the base.

    Raises:
        ConfigError: an unknown key, or a value of another type.
    """
    check_override_names(list(arguments))
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"{argument}: overrides are written --config.KEY=VALUE")
    keys = [argument.partition("=")[0].partition("config.")[2] for argument in arguments]
    if "train.seed" in keys:
        raise ConfigError("train.seed: seeds are those of the study; choose among them with --seeds")
    values = flags.FlagValues()
    argv = ["study", *arguments]
    config = config_flags.DEFINE_config_dict("config", ConfigDict(base.to_dict()), flag_values=values, sys_argv=argv)
    try:
        values(argv)
        changed = flat(config.value.to_dict())
    except (flags.Error, ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return {key: changed[key] for key in keys}


def differences(before: Config, after: Config) -> dict[str, Any]:
    """The values of `after`, by dotted key, that are others in `before`."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    return {key: value for key, value in new.items() if key not in old or value != old[key]}


def _check_forms(name: str, study: Study) -> None:
    """Refuses what is no mapping or no sequence where a study has one."""
    mappings = {what: getattr(study, what) for what in ("variants", "grid", "seeds_of", "published")}
    for what, value in mappings.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: {what}: expected a dict, got {value!r}")
    sequences = {what: getattr(study, what) for what in ("seeds", "tasks", "start")}
    sequences |= {f"grid: {key}": values for key, values in study.grid.items()}
    sequences |= {f"seeds_of: {row!r}": seeds for row, seeds in study.seeds_of.items()}
    for what, value in sequences.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{name}: {what}: expected a tuple such as ({value!r},), got {value!r}")


def _base(name: str, study: Study) -> ConfigDict:
    """The whole base, completed by the defaults."""
    if isinstance(study.base, ConfigDict):
        try:
            return ConfigDict(build_options(Config, nested(study.base.to_dict()), unknown_key_message).to_dict())
        except ConfigError as error:
            raise ConfigError(f"{name}: base: {error}") from error
    if not (SHIPPED / f"{study.base}.py").is_file():
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py")))
        raise ConfigError(f"{name}: base {study.base!r} is no file in configs/; known: {known}")
    return shipped_config(study.base)


def _points(name: str, study: Study) -> list[tuple[str, Settings]]:
    """The rows that are trained: every variant at every point of the grid, with what it changes."""
    if not study.variants and not study.grid:
        raise ConfigError(f"{name}: a study needs variants or a grid")
    rows: list[tuple[str, Settings]] = []
    for variant, settings in (study.variants or {"": {}}).items():
        for key in study.grid:
            if key in settings:
                raise ConfigError(f"{name}: variant {variant!r}: sets {key}, which the grid varies")
        for values in itertools.product(*study.grid.values()):
            point = dict(zip(study.grid, values, strict=True))
            parts = [variant] * bool(variant) + [f"{key}={_as_text(value)}" for key, value in point.items()]
            rows.append((", ".join(parts), {**settings, **point}))
    names = [row for row, _ in rows]
    if twice := next((row for row in names if names.count(row) > 1), None):
        raise ConfigError(f"{name}: variant {twice!r} is there twice")
    return rows


def _config(where: str, base: ConfigDict, *settings: Settings) -> Config:
    """The base with settings, the last ones winning."""
    values = copy.deepcopy(base.to_dict())
    for key, value in itertools.chain.from_iterable(each.items() for each in settings):
        if key not in known_keys():
            raise ConfigError(f"{where}: {unknown_key_message(key)}")
        if key == "train.seed":
            raise ConfigError(f"{where}: train.seed: seeds belong to `seeds` and `seeds_of`")
        group, _, leaf = key.rpartition(".")
        (values[group] if group else values)[leaf] = value
    try:
        config = Config.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if config.distributed:
        raise ConfigError(f"{where}: distributed=True: a study gives each run to one host; hosts may share a study")
    return config


def _check_study(name: str, study: Study, trained: Sequence[str]) -> None:
    """Refuses seeds, tasks, poolers and published scores that cannot be used."""
    rows = [*start_rows(study.start), *trained]
    for what, named in (("seeds_of", study.seeds_of), ("published", study.published)):
        for row in named:
            if row not in rows:
                raise ConfigError(f"{name}: {what} names {row!r}; the study has: {', '.join(rows)}")
    for row in trained:
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
    columns = {*DEV_TITLES.values(), *expand_groups(["full"], "test"), "average sts", "average transfer"}
    columns |= {*expand_groups(study.tasks, "test"), *comparison.PROBES}
    for row, scores in study.published.items():
        if unknown := sorted(scores.keys() - columns):
            raise ConfigError(f"{name}: published: {row!r} has the unknown column {unknown[0]!r}")
    folders: dict[str, str] = {}
    for row in rows:
        other = folders.setdefault(_folder_name(name, row).casefold(), row)
        if other != row or rows.count(row) > 1:
            raise ConfigError(f"{name}: variants {other!r} and {row!r} would share a folder; rename one")


def _check_different(name: str, configs: Mapping[str, Config]) -> None:
    for (one, first), (other, second) in itertools.combinations(configs.items(), 2):
        if first == second:
            raise ConfigError(f"{name}: variants {one!r} and {other!r} have the same configuration")


def _folder_name(name: str, row: str) -> str:
    """A row's folder in the study's."""
    folder = re.sub(r"[^\w.,=+-]+", "-", row).strip("-")
    if not re.fullmatch(r"[\w ,.+=()%/:-]+", row) or not folder or folder.startswith("."):
        raise ConfigError(
            f"{name}: {row!r} is no name for a variant: letters, digits, blanks and , . + - = ( ) % / : _"
        )
    return folder


def _as_text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else repr(value)
