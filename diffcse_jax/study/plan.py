"""From a study file to the runs that it asks for. Every mistake in it is found here, before anything runs."""

import dataclasses
import functools
import itertools
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from diffcse_jax.config import (
    OWN_POOLER,
    SHIPPED,
    Config,
    configuration,
    flat,
    known_keys,
    nested,
    read_overrides,
    shipped_config,
    unknown_key_message,
)
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.io import expand_path
from diffcse_jax.options import build_options
from diffcse_jax.study import Settings, Study
from diffcse_jax.study.checks import check_different, check_forms, check_rows, check_study, folder_name, start_rows

SHIPPED_STUDIES = SHIPPED / "studies"
CONFIG, FINETUNE = "config", "finetune"  # what overrides of trainings and of fine-tunings begin with
DEFAULTS = "diffcse_base"  # the file in configs/ that changes nothing


@dataclasses.dataclass(frozen=True)
class Run:
    """One training or fine-tuning with its scores, or the scores of the start: what one folder of a study holds.

    Attributes:
        row: the row of the table that it belongs to.
        seed: of training; None for the start, which is not trained.
        config: the whole configuration, seed included.
        folder: where it lives.
        tasks: as in the study; none of a fine-tuning, whose scores are those of its labelled tasks.
        overrides: values from the command line in its configuration.
        workdir: that of its training: the folder, or that of an earlier study's run.
        pooler: of the start.
        start: of a fine-tuning the run whose encoder it begins with.
    """

    row: str
    seed: int | None
    config: Config
    folder: Path
    tasks: tuple[str, ...]
    overrides: Mapping[str, Any]
    workdir: Path
    pooler: str | None = None
    start: "Run | None" = None

    @property
    def label(self) -> str:
        """For messages."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"

    @property
    def record(self) -> dict[str, Any]:
        """What tells whether a folder holds this run: `run.json`."""
        return {
            "row": self.row,
            "seed": self.seed,
            "pooler": self.pooler,
            "start": self.start and self.start.label,
            "workdir": str(self.workdir.absolute()),
            "config": self.config.to_dict(),
            "overrides": dict(self.overrides),
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """A study with its command line: what there is to do.

    Attributes:
        name: of the study: its file's.
        study: as the file gives it.
        overrides: values from the command line, of all variants.
        base: the configuration that variants start from, overrides included.
        finetune_overrides: values from the command line, of all fine-tunings.
        runs: all of them, those of each row's first seed first.
    """

    name: str
    study: Study
    overrides: dict[str, Any]
    base: Config
    finetune_overrides: dict[str, Any]
    runs: tuple[Run, ...]

    @functools.cached_property
    def rows(self) -> dict[str, tuple[Run, ...]]:
        """The runs of each row of the table, in its order."""
        rows = dict.fromkeys(run.row for run in self.runs)
        return {row: tuple(run for run in self.runs if run.row == row) for row in rows}

    @property
    def groups(self) -> list[dict[str, tuple[Run, ...]]]:
        """The rows that are compared with one another: those of encoders, and those of fine-tunings where there are."""
        tuned = {row: runs for row, runs in self.rows.items() if runs[0].start}
        encoders = {row: runs for row, runs in self.rows.items() if row not in tuned}
        return [encoders, tuned] if tuned else [encoders]

    def base_of(self, run: Run) -> Config:
        """The configuration that the settings of the run's row change, overrides included."""
        return configuration(self.study.finetune_base, self.finetune_overrides)[1] if run.start else self.base

    def selected(self, variants: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """The runs of these variants and seeds; empty: of all.

        Raises:
            ConfigError: one that the study does not have; overrides that make two of the variants equal.
        """
        known_seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        for option, wanted, known in (("--variants", variants, list(self.rows)), ("--seeds", seeds, known_seeds)):
            for value in wanted:
                if value not in known:
                    raise ConfigError(f"{option}: {self.name} has no {value!r}; it has: {', '.join(map(str, known))}")
        chosen = [
            run
            for run in self.runs
            if (not variants or run.row in variants) and (not seeds or run.seed is None or run.seed in seeds)
        ]
        trained = {run.row: of_any_seed(run.config) for run in chosen if run.seed is not None}
        check_different(self.name, trained, "; by the overrides: choose one of them with --variants")
        return chosen

    def command_settings(self, run: Run) -> list[str]:
        """The options of `diffcse train`, or `diffcse finetune`, that give the run's configuration."""
        name = self.study.base if isinstance(self.study.base, str) else DEFAULTS
        name = self.study.finetune_base if run.start else name
        _, base = configuration(name, {})
        changes = differences(base, run.config)
        return ["--config", name, *(f"--config.{key}={_as_text(value)}" for key, value in changes.items())]


def of_any_seed(config: Config) -> Config:
    """The configuration with the default seed."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=Config().train.seed))


def read_study(file: str) -> tuple[str, Study]:
    """The study of a file, or of one in `configs/studies/` by its name, with that name.

    Raises:
        ConfigError: there is no such file, it cannot be run, or its `get_study` gives no study.
    """
    shipped = SHIPPED_STUDIES / f"{file}.py"
    path = shipped if shipped.is_file() else expand_path(file)
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


def make_plan(
    name: str,
    study: Study,
    overrides: Sequence[str],
    workdir: Path,
    finetune_overrides: Sequence[str] = (),
    earlier: Path | None = None,
) -> Plan:
    """Builds the configuration of every run.

    Args:
        name: of the study, for messages.
        study: the study.
        overrides: arguments `--config.KEY=VALUE`; they come last, in every variant.
        workdir: where the study lives.
        finetune_overrides: arguments `--finetune.KEY=VALUE`; they come last, in every fine-tuning.
        earlier: the folder of a study that has trained the variants; None: this one trains them.

    Raises:
        ConfigError: a name, key, value or combination that cannot be used, with the variant that has it.
    """
    check_forms(name, study)
    base = _base(name, study)
    values = parse_overrides(base, overrides)
    configs = {
        row: _config(f"{name}: variant {row!r}", base, settings, values) for row, settings in _points(name, study)
    }
    check_study(name, study, list(configs))
    values_of_tunings, tunings = _tunings(name, study, finetune_overrides)
    rows = [*start_rows(study.start), *configs]
    rows += [f"{row}, {tuning}" for row in rows for tuning in tunings]
    check_rows(name, study, rows, tunings.values())
    check_different(name, {row: _config(name, base, settings, {}) for row, settings in _points(name, study)})

    start, tasks = _config(f"{name}: base", base, {}, values), tuple(study.tasks)
    encoders: list[tuple[int, Run]] = []  # with the place of a seed among those of its row
    for row, pooler in start_rows(study.start).items():
        folder = workdir / folder_name(name, row)
        encoders.append((-1, Run(row, None, start, folder, tasks, values, folder, pooler)))
    for row, config in configs.items():
        for place, seed in enumerate(study.seeds_of.get(row, study.seeds)):
            path = f"{folder_name(name, row)}/seed-{seed}"
            trained = (earlier or workdir) / path
            encoders.append((place, Run(row, seed, _seeded(config, seed), workdir / path, tasks, values, trained)))
    tuned = _tuned_runs(name, study, encoders, tunings, values_of_tunings, workdir)
    runs = sorted([*encoders, *tuned], key=lambda each: each[0])  # stable: within a place the order of rows
    return Plan(name, study, values, start, values_of_tunings, tuple(run for _, run in runs))


def _tunings(name: str, study: Study, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Config]]:
    """The values of overrides, and the configurations of fine-tunings by name, but for their starts and seeds."""
    if not study.finetunings:
        if overrides:
            raise ConfigError(f"{overrides[0]}: {name} has no fine-tunings")
        return {}, {}
    try:
        _, base = configuration(study.finetune_base, {})
    except ConfigError as error:
        raise ConfigError(f"{name}: finetune_base: {error}") from error
    values = parse_overrides(ConfigDict(base.to_dict()), overrides, FINETUNE)
    configs = {}
    for tuning, settings in study.finetunings.items():
        where = f"{name}: fine-tuning {tuning!r}"
        config = configs[tuning] = _config(where, base, settings, values)
        if "finetune" not in config.losses:
            raise ConfigError(f"{where}: no labelled tasks: finetune_base={study.finetune_base!r} has none")
    check_different(name, configs)
    return values, configs


def _tuned_runs(
    name: str,
    study: Study,
    encoders: Sequence[tuple[int, Run]],
    tunings: Mapping[str, Config],
    values: Settings,
    workdir: Path,
) -> list[tuple[int, Run]]:
    """Every fine-tuning from every encoder, with the place of its seed: from the start with each seed of the row."""
    tuned = []
    for (own_place, start), (tuning, config) in itertools.product(encoders, tunings.items()):
        row = f"{start.row}, {tuning}"
        of_start = enumerate(study.seeds_of.get(start.row, study.seeds))
        for place, seed in of_start if start.seed is None else [(own_place, start.seed)]:
            folder = workdir / folder_name(name, row) / f"seed-{seed}"
            begun = _begun_with(start, _seeded(config, seed))
            tuned.append((place, Run(row, seed, begun, folder, (), values, folder, start=start)))
    return tuned


def _begun_with(start: Run, config: Config) -> Config:
    """The configuration of a fine-tuning that begins with the encoder of a run."""
    if start.seed is not None:
        name, pooler = str(start.workdir.absolute()), config.model.pooler
    else:
        of_row = start.pooler if start.pooler != OWN_POOLER else None
        name, pooler = start.config.model.name_or_path, of_row or config.model.pooler
    return dataclasses.replace(config, model=dataclasses.replace(config.model, name_or_path=name, pooler=pooler))


def _seeded(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))


def parse_overrides(base: ConfigDict, arguments: Sequence[str], flag: str = CONFIG) -> dict[str, Any]:
    """Return values by dotted key.

    Args:
        base: The configuration that they change.
        arguments: `--FLAG.KEY=VALUE`.
        flag: The name that they begin with.

    Raises:
        ConfigError: If a key is unknown, or if a value has the wrong type.
    """
    del base
    values = read_overrides(arguments, flag)
    if "train.seed" in values:
        raise ConfigError("train.seed: seeds are those of the study; choose among them with --seeds")
    return values


def differences(before: Config, after: Config) -> dict[str, Any]:
    """The values of `after`, by dotted key, that are others in `before`."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    return {key: value for key, value in new.items() if key not in old or value != old[key]}


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


def _config(where: str, base: ConfigDict | Config, *settings: Settings) -> Config:
    """The base with settings, the last ones winning."""
    values = flat(base.to_dict())
    for key, value in itertools.chain.from_iterable(each.items() for each in settings):
        if key not in known_keys() and key not in values:
            raise ConfigError(f"{where}: {unknown_key_message(key)}")
        if key == "train.seed":
            raise ConfigError(f"{where}: train.seed: seeds belong to `seeds` and `seeds_of`")
        values[key] = value
    try:
        config = Config.from_dict(nested(values))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if config.distributed:
        raise ConfigError(f"{where}: distributed=True: a study gives each run to one host; hosts may share a study")
    return config


def _as_text(value: Any) -> str:
    """A value as it is written on the command line."""
    return value if isinstance(value, str) else repr(value)
