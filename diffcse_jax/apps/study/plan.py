"""From a study file to its runs. Mistakes in the file and on the command line are found here, before anything runs."""

import dataclasses
import functools
import itertools
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcse_jax.config import (
    OWN_POOLER,
    SHIPPED,
    Config,
    configuration,
    flat,
    read_overrides,
    shipped_config,
)
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.evaluation import results
from diffcse_jax.evaluation.tasks import expand_groups
from diffcse_jax.io import expand_path
from diffcse_jax.losses.finetune import AVERAGE, score_name
from diffcse_jax.models.pooling import POOLERS

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SHIPPED_STUDIES = SHIPPED / "studies"
DEV_TITLES = {"stsb_spearman": "STS-B dev"}
_DEFAULTS = "diffcse_base"  # the file in configs/ that changes no default

Settings = Mapping[str, Any]  # values by dotted key, such as {"optim.learning_rate": 3e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What to train and score. A study file returns it from `get_study()`.

    Attributes:
        base: The configuration that all variants change: a name in `configs/`, or a ConfigDict of values that differ
            from the defaults.
        variants: What each variant changes in the base, by name. The table compares the others with the first.
        grid: Keys with several values each. Every variant runs at every point of the grid.
        seeds: The seeds of each variant.
        seeds_of: The seeds of variants that need other ones.
        tasks: Tasks and groups of tasks, as `--tasks` of `diffcse evaluate` takes them. They are scored on their test
            splits. Without tasks, only the dev metric of training is reported.
        start: Poolers to score the starting checkpoint with. `own` is the pooler that the checkpoint records.
        finetunings: What each fine-tuning changes in `finetune_base`, by name. Each starts from the encoder of every
            row with the row's seeds, and is a row of its own, `ROW, NAME`.
        finetune_base: A configuration of `diffcse finetune`: a name in `configs/`, or the path of a file.
        published: Published scores by row and column. Columns are `STS-B dev`, names of tasks, `average sts` and
            `average transfer`; for fine-tunings `TASK_accuracy`, `TASK_pearson` and `average`.
        source: Where the scores are published.
    """

    base: "str | ConfigDict"
    variants: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    seeds: Sequence[int] = (1, 2, 3)
    seeds_of: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    tasks: Sequence[str] = ("sts",)
    start: Sequence[str] = ()
    finetunings: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    finetune_base: str = "finetune_multitask"
    published: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    source: str = ""


def settings_of(name: str) -> dict[str, Any]:
    """Return all values of `configs/NAME.py` by key, for a variant that takes nothing from the base."""
    settings = flat(shipped_config(name).to_dict())
    return {key: value for key, value in settings.items() if key != "train.seed" and value != {}}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training or fine-tuning with its scores, or the scores of the starting checkpoint. It owns one folder.

    Attributes:
        row: The row of the table that the run belongs to.
        seed: The training seed, or None for the starting checkpoint.
        config: The whole configuration, including the seed.
        folder: The run's folder in the study.
        tasks: The study's tasks. A fine-tuning has none, because its labelled tasks give its scores.
        overrides: The values from the command line.
        workdir: The folder of the training: `folder`, or that of an earlier study.
        pooler: The pooler of the starting checkpoint.
        start: The run whose encoder a fine-tuning starts from.
    """

    row: str
    seed: int | None
    config: Config
    folder: Path
    tasks: tuple[str, ...]
    overrides: Settings
    workdir: Path
    pooler: str | None = None
    start: "Run | None" = None

    @property
    def label(self) -> str:
        """The run's name in messages."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"

    @property
    def record(self) -> dict[str, Any]:
        """The content of `run.json`, which identifies the run of a folder."""
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
    """All runs of a study.

    Attributes:
        name: The name of the study file.
        study: The study.
        overrides: Values from the command line for all variants.
        base: The configuration that variants change, including overrides.
        finetune_overrides: Values from the command line for all fine-tunings.
        runs: The runs in the order to start them: the first seed of every row comes first.
    """

    name: str
    study: Study
    overrides: Settings
    base: Config
    finetune_overrides: Settings
    runs: tuple[Run, ...]

    @functools.cached_property
    def rows(self) -> dict[str, tuple[Run, ...]]:
        """The runs of each row, in the order of the table."""
        return {
            row: tuple(run for run in self.runs if run.row == row) for row in dict.fromkeys(r.row for r in self.runs)
        }

    @property
    def groups(self) -> list[list[str]]:
        """The rows to compare with one another: encoders and, if there are any, fine-tunings."""
        tuned = [row for row, runs in self.rows.items() if runs[0].start]
        encoders = [row for row in self.rows if row not in tuned]
        return [encoders, tuned] if tuned else [encoders]

    def base_of(self, run: Run) -> Config:
        """Return the configuration that the run's row changes."""
        return configuration(self.study.finetune_base, self.finetune_overrides)[1] if run.start else self.base

    def selected(self, variants: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """Return the runs of these variants and seeds; without variants or seeds, all of them.

        Raises:
            ConfigError: The study has no such variant or seed, or overrides make two chosen variants equal.
        """
        known_seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        for option, wanted, known in (("--variants", variants, list(self.rows)), ("--seeds", seeds, known_seeds)):
            for value in wanted:
                if value not in known:
                    raise ConfigError(f"{option}: {self.name} has no {value!r}. It has: {', '.join(map(str, known))}")
        chosen = [
            run
            for run in self.runs
            if (not variants or run.row in variants) and (not seeds or run.seed is None or run.seed in seeds)
        ]
        trained = {run.row: without_seed(run.config) for run in chosen if run.seed is not None}
        _check_different(self.name, trained, " with these overrides. Choose one of them with --variants")
        return chosen

    def command_settings(self, run: Run) -> list[str]:
        """Return the options of `diffcse train` or `diffcse finetune` that give the run's configuration."""
        name = self.study.base if isinstance(self.study.base, str) else _DEFAULTS
        name = self.study.finetune_base if run.start else name
        changes = differences(configuration(name, {})[1], run.config)
        return ["--config", name, *(f"--config.{key}={_as_text(value)}" for key, value in changes.items())]


def read_study(file: str) -> tuple[str, Study]:
    """Return the name and the study of a file, or of a file in `configs/studies/` by its name.

    Raises:
        ConfigError: There is no such file, it fails, or its `get_study` does not return a Study.
    """
    shipped = SHIPPED_STUDIES / f"{file}.py"
    path = shipped if shipped.is_file() else expand_path(file)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED_STUDIES.glob("*.py")))
        raise ConfigError(f"--config: {file!r} is neither a file nor the name of a study. Known names: {names}")
    try:
        study = runpy.run_path(str(path)).get("get_study", lambda: None)()
    except Exception as error:  # whatever the file's own code raises
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: {message}") from error
    if not isinstance(study, Study):
        raise ConfigError(f"{path}: define a function get_study() that returns a Study, got {study!r}")
    return path.stem, study


def make_plan(
    name: str,
    study: Study,
    overrides: Sequence[str],
    workdir: Path,
    finetune_overrides: Sequence[str] = (),
    earlier: Path | None = None,
) -> Plan:
    """Build the configuration of every run.

    Args:
        name: The name of the study, for messages.
        study: The study.
        overrides: Arguments `--config.KEY=VALUE`, which every variant gets last.
        workdir: The folder of the study.
        finetune_overrides: Arguments `--finetune.KEY=VALUE`, which every fine-tuning gets last.
        earlier: The folder of an earlier study that has trained the variants, if there is one.

    Raises:
        ConfigError: A name, key, value or combination cannot be used. The message names the variant.
    """
    _check_types(name, study)
    values = _overrides(overrides, "config")
    base = _base(f"{name}: base", study.base)
    points = _points(name, study)
    configs = {row: _config(f"{name}: variant {row!r}", base, settings, values) for row, settings in points.items()}
    tuning_values, tunings = _finetunings(name, study, finetune_overrides)
    starts = {"start" if pooler == OWN_POOLER else f"start ({pooler})": pooler for pooler in study.start}
    rows = [*starts, *configs]
    rows += [f"{row}, {tuning}" for row in rows for tuning in tunings]
    _check_study(name, study, [*starts], [*configs])
    _check_rows(name, study, rows, tunings.values())
    _check_different(name, {row: _config(name, base, settings) for row, settings in points.items()})

    start, tasks = _config(f"{name}: base", base, values), tuple(study.tasks)
    encoders: list[tuple[int, Run]] = []  # with the position of the seed among the row's seeds
    for row, pooler in starts.items():
        folder = workdir / folder_name(name, row)
        encoders.append((-1, Run(row, None, start, folder, tasks, values, folder, pooler)))
    for row, config in configs.items():
        for position, seed in enumerate(study.seeds_of.get(row, study.seeds)):
            path = f"{folder_name(name, row)}/seed-{seed}"
            trained = (earlier or workdir) / path
            run = Run(row, seed, _with_seed(config, seed), workdir / path, tasks, values, trained)
            encoders.append((position, run))
    tuned: list[tuple[int, Run]] = []
    for (position, encoder), (tuning, config) in itertools.product(encoders, tunings.items()):
        row = f"{encoder.row}, {tuning}"
        of_start = enumerate(study.seeds_of.get(encoder.row, study.seeds))
        for place, seed in of_start if encoder.seed is None else [(position, encoder.seed)]:
            folder = workdir / folder_name(name, row) / f"seed-{seed}"
            begun = _starting_from(encoder, _with_seed(config, seed))
            tuned.append((place, Run(row, seed, begun, folder, (), tuning_values, folder, start=encoder)))
    runs = sorted([*encoders, *tuned], key=lambda each: each[0])  # stable: rows keep their order
    return Plan(name, study, values, start, tuning_values, tuple(run for _, run in runs))


def differences(before: Config, after: Config) -> dict[str, Any]:
    """Return the values of `after`, by key, that differ from `before`."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    return {key: value for key, value in new.items() if key not in old or value != old[key]}


def without_seed(config: Config) -> Config:
    """Return the configuration with the default seed."""
    return _with_seed(config, Config().train.seed)


def folder_name(name: str, row: str) -> str:
    """Return the name of a row's folder."""
    folder = re.sub(r"[^\w.,=+-]+", "-", row).strip("-")
    if not re.fullmatch(r"[\w ,.+=()%/:-]+", row) or not folder or folder.startswith("."):
        raise ConfigError(
            f"{name}: {row!r} is not a valid name for a variant. Use letters, digits, spaces and , . + - = ( ) % / : _"
        )
    return folder


def _with_seed(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))


def _starting_from(run: Run, config: Config) -> Config:
    if run.seed is not None:
        name, pooler = str(run.workdir.absolute()), config.model.pooler
    else:
        own = run.pooler in (None, OWN_POOLER)
        name, pooler = run.config.model.name_or_path, config.model.pooler if own else str(run.pooler)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, name_or_path=name, pooler=pooler))


def _overrides(arguments: Sequence[str], flag: str) -> dict[str, Any]:
    values = read_overrides(arguments, flag)
    if "train.seed" in values:
        raise ConfigError("train.seed: the study sets the seeds. Choose among them with --seeds")
    return values


def _base(where: str, given: Any) -> Config:
    try:
        return configuration(given, {})[1]
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('--config: ')}") from error


def _points(name: str, study: Study) -> dict[str, Settings]:
    if not study.variants and not study.grid:
        raise ConfigError(f"{name}: a study needs variants or a grid")
    points: dict[str, Settings] = {}
    for variant, settings in (study.variants or {"": {}}).items():
        if twice := next((key for key in study.grid if key in settings), None):
            raise ConfigError(f"{name}: variant {variant!r}: sets {twice}, which the grid varies")
        for values in itertools.product(*study.grid.values()):
            point = dict(zip(study.grid, values, strict=True))
            row = ", ".join([variant] * bool(variant) + [f"{key}={_as_text(value)}" for key, value in point.items()])
            if row in points:
                raise ConfigError(f"{name}: variant {row!r} exists twice")
            points[row] = {**settings, **point}
    return points


def _finetunings(name: str, study: Study, overrides: Sequence[str]) -> tuple[Settings, dict[str, Config]]:
    if not study.finetunings:
        if overrides:
            raise ConfigError(f"{overrides[0]}: {name} has no fine-tunings")
        return {}, {}
    base, values = _base(f"{name}: finetune_base", study.finetune_base), _overrides(overrides, "finetune")
    configs = {}
    for tuning, settings in study.finetunings.items():
        where = f"{name}: fine-tuning {tuning!r}"
        configs[tuning] = _config(where, base, settings, values)
        if "finetune" not in configs[tuning].losses:
            raise ConfigError(f"{where}: finetune_base={study.finetune_base!r} has no labelled tasks")
    _check_different(name, configs)
    return values, configs


def _config(where: str, base: Config, *settings: Settings) -> Config:
    """Return the base with settings. Later settings win."""
    changes = {key: value for each in settings for key, value in each.items()}
    if "train.seed" in changes:
        raise ConfigError(f"{where}: train.seed: set seeds with `seeds` and `seeds_of`")
    try:
        config = Config.from_dict(flat(base.to_dict()) | changes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if config.distributed:
        raise ConfigError(f"{where}: distributed=True: a run of a study uses one host. Several hosts may share a study")
    return config


def _check_types(name: str, study: Study) -> None:
    """Refuse fields that are not mappings or sequences where the study needs them."""
    named = [(field, getattr(study, field)) for field in ("variants", "grid", "seeds_of", "published", "finetunings")]
    for field in ("variants", "published", "finetunings"):
        rows = getattr(study, field)
        named += [(f"{field}: {row!r}", value) for row, value in (rows.items() if isinstance(rows, Mapping) else ())]
    for what, value in named:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: {what}: expected a dict, got {value!r}")
    listed = [(field, getattr(study, field)) for field in ("seeds", "tasks", "start")]
    listed += [(f"grid: {key}", values) for key, values in study.grid.items()]
    listed += [(f"seeds_of: {row!r}", seeds) for row, seeds in study.seeds_of.items()]
    for what, value in listed:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{name}: {what}: expected a tuple such as ({value!r},), got {value!r}")


def _check_study(name: str, study: Study, starts: Sequence[str], trained: Sequence[str]) -> None:
    if unknown := next((row for row in study.seeds_of if row not in (*starts, *trained)), None):
        raise ConfigError(f"{name}: seeds_of names {unknown!r}. The study has: {', '.join((*starts, *trained))}")
    for row in (*starts, *trained) if study.finetunings else trained:
        seeds = list(study.seeds_of.get(row, study.seeds))
        if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise ConfigError(f"{name}: variant {row!r}: give one or more different seeds from 0 on, got {seeds}")
    for pooler in study.start:
        if pooler not in (OWN_POOLER, *POOLERS):
            raise ConfigError(f"{name}: start: {pooler!r} is not one of {', '.join((OWN_POOLER, *POOLERS))}")
    try:
        expand_groups(study.tasks, "test")
    except ConfigError as error:
        raise ConfigError(f"{name}: tasks: {error}") from error


def _check_rows(name: str, study: Study, rows: Sequence[str], finetunings: Iterable[Config]) -> None:
    """Refuse published scores without a place in the table, and rows that would share a folder."""
    columns = {*DEV_TITLES.values(), *expand_groups(["full"], "test"), "average sts", "average transfer"}
    columns |= {*expand_groups(study.tasks, "test"), *results.PROBES}
    for config in finetunings:
        columns |= {AVERAGE, *(score_name(task, options) for task, options in config.finetune.tasks.items())}
    for row, scores in study.published.items():
        if row not in rows:
            raise ConfigError(f"{name}: published names {row!r}. The study has: {', '.join(rows)}")
        if unknown := sorted(scores.keys() - columns):
            raise ConfigError(f"{name}: published: {row!r} has the unknown column {unknown[0]!r}")
    folders: dict[str, str] = {}
    for row in rows:
        other = folders.setdefault(folder_name(name, row).casefold(), row)
        if other != row or rows.count(row) > 1:
            raise ConfigError(f"{name}: variants {other!r} and {row!r} would share a folder. Rename one")


def _check_different(name: str, configs: Mapping[str, Config], hint: str = "") -> None:
    for (one, first), (other, second) in itertools.combinations(configs.items(), 2):
        if first == second:
            raise ConfigError(f"{name}: variants {one!r} and {other!r} have the same configuration{hint}")


def _as_text(value: Any) -> str:
    """Return a value as the command line takes it."""
    return value if isinstance(value, str) else repr(value)
