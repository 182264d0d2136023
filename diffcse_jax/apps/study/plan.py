"""From a study file to its runs. Mistakes in the file and on the command line are found before anything runs.

The folder of a run holds its state:

run.json      row, seed, configuration       evaluation.json  the scores in detail
failure.txt   why the last attempt failed    results.json     the scores by column: the run is done
study.lock    held while a study works on the run
"""

import contextlib
import dataclasses
import itertools
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffcse_jax.config import OWN_POOLER, SHIPPED, Config, configuration, flat, machine_keys, read_overrides
from diffcse_jax.errors import CheckpointError, ConfigError, InUseError, UserError
from diffcse_jax.io import CHECKPOINTS, expand_path, lock, read_sealed
from diffcse_jax.run_folder.folder import HEADS

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SHIPPED_STUDIES = SHIPPED / "studies"
RUN, RESULTS, EVALUATION = "run.json", "results.json", "evaluation.json"
FAILURE, LOCK = "failure.txt", "study.lock"
NOT_STARTED = "not started"

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
    settings = flat(configuration(name, {})[1].to_dict())
    return {key: value for key, value in settings.items() if key != "train.seed" and value != {}}


def read_study(file: str) -> tuple[str, Study]:
    """Return the name and the study of a file, or of a file in `configs/studies/` by its name."""
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


@dataclasses.dataclass(frozen=True)
class Run:
    """One training or fine-tuning with its scores, or the scores of the starting checkpoint. It owns one folder."""

    row: str  # of the table
    seed: int | None  # None for the starting checkpoint
    config: Config  # with the seed
    base: Config  # what the row changes
    folder: Path
    tasks: tuple[str, ...] = ()  # empty for a fine-tuning, because its labelled tasks give its scores
    pooler: str | None = None  # of the starting checkpoint
    start: "Run | None" = None  # whose encoder a fine-tuning starts from

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
            "config": self.config.to_dict(),
        }

    @property
    def is_trained(self) -> bool:
        """Return whether the run's encoder is there. Training ends with the export."""
        return self.seed is None or (self.folder / "export").is_dir()

    def look(self) -> tuple[dict[str, Any] | None, str]:
        """Return the records of a run that is done with the study's tasks, or None, and the run's state in words."""
        record = None
        try:
            if (self.folder / RUN).is_file():
                record = read_record(self.folder)
            if record and (self.folder / RESULTS).is_file():
                results = read_results(self.folder)
                if results["asked"] == list(self.tasks):
                    return record | results, "done"
            if (self.folder / LOCK).is_file():
                lock(self.folder / LOCK).close()
        except InUseError as error:
            return None, f"in progress: {error}"
        except CheckpointError as error:
            return None, str(error)
        if (self.folder / FAILURE).is_file():
            reason = (self.folder / FAILURE).read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
            return None, f"failed: {reason}"
        return None, "started" if record else NOT_STARTED

    def require_same(self) -> None:
        """Refuse a folder with checkpoints or results of another configuration."""
        kept = (RESULTS, f"{CHECKPOINTS}/[0-9]*", f"{HEADS}/{CHECKPOINTS}/[0-9]*")
        if not (self.folder / RUN).is_file() or not any(any(self.folder.glob(pattern)) for pattern in kept):
            return
        then, now = _identity(read_record(self.folder)), _identity(self.record)
        if changed := [f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]:
            raise ConfigError(
                f"{self.folder} holds {self.label} with another configuration. Give another --workdir, or the same "
                "overrides:\n  " + "\n  ".join(changed)
            )


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the results of a run depend on."""
    values = flat(Config.from_dict(record["config"]).to_dict()) | {key: record[key] for key in ("pooler", "start")}
    ignored = {*machine_keys(), *["model.name_or_path"] * bool(record["start"])}  # a folder, which may be moved
    return {key: value for key, value in values.items() if key not in ignored}


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `run.json`."""
    return read_sealed(folder / RUN, f"Restore it, or delete {folder} to train the run again")


def read_results(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `results.json`."""
    return read_sealed(folder / RESULTS, "Run the study without --report to score the run again")


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of a study, in the order of the table."""

    name: str
    study: Study
    runs: list[Run]

    @property
    def rows(self) -> dict[str, list[Run]]:
        """The runs of each row of the table."""
        rows: dict[str, list[Run]] = {}
        for run in self.runs:
            rows.setdefault(run.row, []).append(run)
        return rows

    def selected(self, variants: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """Return the runs of these variants and seeds (without any: of all), the first seed of every row first."""
        known_seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        for option, wanted, known in (("--variants", variants, list(self.rows)), ("--seeds", seeds, known_seeds)):
            for value in wanted:
                if value not in known:
                    raise ConfigError(f"{option}: {self.name} has no {value!r}. It has: {', '.join(map(str, known))}")
        by_seed = itertools.chain(*itertools.zip_longest(*self.rows.values()))
        return [
            run
            for run in by_seed
            if run and (not variants or run.row in variants) and (not seeds or run.seed is None or run.seed in seeds)
        ]


def make_plan(
    name: str,
    study: Study,
    overrides: Sequence[str],
    workdir: Path,
    finetune_overrides: Sequence[str] = (),
) -> Plan:
    """Build the configuration of every run.

    Every variant gets the overrides `--config.KEY=VALUE` last, and every fine-tuning the `--finetune.KEY=VALUE`.
    """
    values, tuning_values = read_overrides(overrides), read_overrides(finetune_overrides, "finetune")
    if tuning_values and not study.finetunings:
        raise ConfigError(f"{finetune_overrides[0]}: {name} has no fine-tunings")
    runs: list[Run] = []

    def add(row: str, seed: int | None, config: Config, base: Config, **others: Any) -> None:
        folder = workdir / re.sub(r"[^\w.,=+-]+", "-", row).strip("-.")
        if seed is not None:
            folder /= f"seed-{seed}"
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        runs.append(Run(row, seed, config, base, folder, **others))

    with _named(name):
        base, tasks = configuration(study.base, {})[1], tuple(study.tasks)
        for pooler in study.start:
            row = "start" if pooler == OWN_POOLER else f"start ({pooler})"
            add(row, None, _changed(base, values), base, tasks=tasks, pooler=pooler)
        for row, point in _points(study).items():
            with _named(f"variant {row!r}"):
                config = _changed(base, point | values)
            for seed in study.seeds_of.get(row, study.seeds):
                add(row, seed, config, base, tasks=tasks)
        encoders = [*runs]
        if study.finetunings:
            base = configuration(study.finetune_base, {})[1]
        for encoder, (tuning, settings) in itertools.product(encoders, study.finetunings.items()):
            with _named(f"fine-tuning {tuning!r}"):
                config = _changed(base, {**settings, **tuning_values})
            start, pooler = str(encoder.folder.absolute()), config.model.pooler
            if encoder.pooler:
                start = encoder.config.model.name_or_path
                pooler = pooler if encoder.pooler == OWN_POOLER else encoder.pooler
            model = dataclasses.replace(config.model, name_or_path=start, pooler=pooler)
            config = dataclasses.replace(config, model=model)
            for seed in study.seeds_of.get(encoder.row, study.seeds) if encoder.seed is None else [encoder.seed]:
                add(f"{encoder.row}, {tuning}", seed, config, base, start=encoder)

        rows = dict.fromkeys(run.row for run in runs)
        for field, known in (("seeds_of", dict.fromkeys(run.row for run in encoders)), ("published", rows)):
            if unknown := getattr(study, field).keys() - known:
                raise ConfigError(f"{field} names {min(unknown)!r}. The study has: {', '.join(known)}")
        folders: dict[str, Run] = {}
        for run in runs:
            if (other := folders.setdefault(str(run.folder).casefold(), run)) is not run:
                raise ConfigError(f"{other.label!r} and {run.label!r} would share a folder. Rename one")
    return Plan(name, study, runs)


def differences(before: Config, after: Config) -> dict[str, Any]:
    """Return the values of `after`, by key, that differ from `before`."""
    old, new = flat(before.to_dict()), flat(after.to_dict())
    return {key: value for key, value in new.items() if key not in old or value != old[key]}


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Put a place before the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('--config: ')}") from error


def _points(study: Study) -> dict[str, dict[str, Any]]:
    """Return what each row of a variant changes: the variants at all points of the grid."""
    if not study.variants and not study.grid:
        raise ConfigError("a study needs variants or a grid")
    points: dict[str, dict[str, Any]] = {}
    for variant, settings in (study.variants or {"": {}}).items():
        if twice := next((key for key in study.grid if key in settings), None):
            raise ConfigError(f"variant {variant!r}: sets {twice}, which the grid varies")
        for values in itertools.product(*study.grid.values()):
            point = dict(zip(study.grid, values, strict=True))
            row = ", ".join([variant] * bool(variant) + [f"{key}={value}" for key, value in point.items()])
            points[row] = {**settings, **point}
    return points


def _changed(base: Config, settings: Settings) -> Config:
    if "train.seed" in settings:
        raise ConfigError("train.seed: a study file sets `seeds` and `seeds_of`, and --seeds chooses among them")
    config = Config.from_dict({**flat(base.to_dict()), **settings})
    if config.distributed:
        raise ConfigError("distributed=True: a run of a study uses one host. Several hosts may share a study")
    return config
