"""From a study file to its runs. Mistakes in the file and on the command line are found before anything runs."""

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
from diffcse_jax.io import CONFIG, expand_path, lock, read_sealed

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SHIPPED_STUDIES = SHIPPED / "studies"
FINETUNING = "finetune_multitask"  # the configuration that fine-tunings change
NOT_STARTED = "not started"
# In the folder of a run:
RESULTS = "results.json"  # the configuration and the scores by column; the run is done
EVALUATION = "evaluation.json"  # the scores in detail
FAILURE = "failure.txt"  # why the last attempt failed
LOCK = "study.lock"  # held while a study works on the run

Settings = Mapping[str, Any]  # values by dotted key, such as {"optim.learning_rate": 3e-5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What to train and score. A study file returns it from `get_study()`.

    Attributes:
        base: The configuration that all variants change: a name in `configs/`, or a ConfigDict of values that differ
            from the defaults.
        variants: What each variant changes in the base, by name. The table compares the others with the first.
        seeds: The seeds of each variant.
        seeds_of: The seeds of variants that need other ones.
        tasks: Tasks and groups of tasks, as `--tasks` of `diffcse evaluate` takes them. They are scored on their test
            splits. Without tasks, only the dev metric of training is reported.
        start: Poolers to score the starting checkpoint with. `own` is the pooler that the checkpoint records.
        finetunings: What each fine-tuning changes in `finetune_multitask`, by name. Each starts from the encoder of
            every row with the row's seeds, and is a row of its own, `ROW, NAME`.
        published: Published scores by row and column. Columns are `STS-B dev`, names of tasks, `average sts` and
            `average transfer`; for fine-tunings `TASK_accuracy`, `TASK_pearson` and `average`.
        source: Where the scores are published.
    """

    base: "str | ConfigDict"
    variants: Mapping[str, Settings]
    seeds: Sequence[int] = (1, 2, 3)
    seeds_of: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    tasks: Sequence[str] = ("sts",)
    start: Sequence[str] = ()
    finetunings: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
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
    folder: Path
    tasks: tuple[str, ...] = ()  # empty for a fine-tuning, because its labelled tasks give its scores
    pooler: str | None = None  # of the starting checkpoint
    start: "Run | None" = None  # whose encoder a fine-tuning starts from

    @property
    def label(self) -> str:
        """The run's name in messages."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"

    @property
    def is_trained(self) -> bool:
        """Return whether the run's encoder is there. Training ends with the export."""
        return self.seed is None or (self.folder / "export").is_dir()

    def look(self) -> tuple[dict[str, Any] | None, str]:
        """Return the results of a run that is done with the study's tasks, or None, and the run's state in words."""
        try:
            if (self.folder / RESULTS).is_file():
                results = self._read_results()
                if results["asked"] == list(self.tasks):
                    return results, "done"
            if (self.folder / LOCK).is_file():
                lock(self.folder / LOCK).close()
        except InUseError as error:
            return None, f"in progress: {error}"
        except CheckpointError as error:
            return None, str(error)
        if (self.folder / FAILURE).is_file():
            reason = (self.folder / FAILURE).read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
            return None, f"failed: {reason}"
        return None, "started" if (self.folder / CONFIG).is_file() else NOT_STARTED

    def require_same(self) -> None:
        """Refuse a folder with results of another configuration. A run without results does not resume with another."""
        if not (self.folder / RESULTS).is_file():
            return
        then = flat(Config.from_dict(self._read_results()["config"]).to_dict())
        now = flat(self.config.to_dict())
        ignored = {*machine_keys(), *["model.name_or_path"] * bool(self.start)}  # a folder, which may be moved
        changed = [key for key in now if then.get(key) != now[key] and key not in ignored]
        if changed:
            values = "\n  ".join(f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in changed)
            raise ConfigError(
                f"{self.folder} holds {self.label} with another configuration. Give another --workdir, or the same "
                f"overrides:\n  {values}"
            )

    def _read_results(self) -> dict[str, Any]:
        return read_sealed(self.folder / RESULTS, "Run the study without --report to score the run again")


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
        """Return the runs of these variants and seeds (without any: of all), in the order of seeds."""
        known_seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        for option, wanted, known in (("--variants", variants, list(self.rows)), ("--seeds", seeds, known_seeds)):
            for value in wanted:
                if value not in known:
                    raise ConfigError(f"{option}: {self.name} has no {value!r}. It has: {', '.join(map(str, known))}")
        return [
            run
            for run in sorted(self.runs, key=lambda run: run.seed or 0)
            if (not variants or run.row in variants) and (not seeds or run.seed is None or run.seed in seeds)
        ]


def make_plan(
    name: str, study: Study, overrides: Sequence[str], workdir: Path, finetune_overrides: Sequence[str] = ()
) -> Plan:
    """Build the configuration of every run.

    Every variant gets the overrides `--config.KEY=VALUE` last, and every fine-tuning the `--finetune.KEY=VALUE`.
    """
    values, tuning_values = read_overrides(overrides), read_overrides(finetune_overrides, "finetune")
    if tuning_values and not study.finetunings:
        raise ConfigError(f"{finetune_overrides[0]}: {name} has no fine-tunings")
    runs: list[Run] = []

    def add(row: str, seed: int | None, config: Config, **others: Any) -> None:
        folder = workdir / re.sub(r"[^\w.,=+-]+", "-", row).strip("-.")
        if seed is not None:
            folder /= f"seed-{seed}"
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        runs.append(Run(row, seed, config, folder, **others))

    with _named(name):
        if not study.variants:
            raise ConfigError("a study needs variants")
        tasks = tuple(study.tasks)
        for pooler in study.start:
            row = "start" if pooler == OWN_POOLER else f"start ({pooler})"
            add(row, None, _changed(study.base, values), tasks=tasks, pooler=pooler)
        for row, settings in study.variants.items():
            with _named(f"variant {row!r}"):
                config = _changed(study.base, {**settings, **values})
            for seed in study.seeds_of.get(row, study.seeds):
                add(row, seed, config, tasks=tasks)
        encoders = [*runs]
        for encoder, (tuning, settings) in itertools.product(encoders, study.finetunings.items()):
            start: dict[str, Any] = {"model.name_or_path": str(encoder.folder.absolute())}
            if encoder.pooler:
                start["model.name_or_path"] = encoder.config.model.name_or_path
                start |= {} if encoder.pooler == OWN_POOLER else {"model.pooler": encoder.pooler}
            with _named(f"fine-tuning {tuning!r}"):
                config = _changed(FINETUNING, {**settings, **tuning_values, **start})
            for seed in study.seeds_of.get(encoder.row, study.seeds) if encoder.seed is None else [encoder.seed]:
                add(f"{encoder.row}, {tuning}", seed, config, start=encoder)

        rows = dict.fromkeys(run.row for run in runs)
        for field, known in (("seeds_of", dict.fromkeys(run.row for run in encoders)), ("published", rows)):
            if unknown := getattr(study, field).keys() - known:
                raise ConfigError(f"{field} names {min(unknown)!r}. The study has: {', '.join(known)}")
        folders: dict[str, Run] = {}
        for run in runs:
            if (other := folders.setdefault(str(run.folder).casefold(), run)) is not run:
                raise ConfigError(f"{other.label!r} and {run.label!r} would share a folder. Rename one")
    return Plan(name, study, runs)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Put a place before the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('--config: ')}") from error


def _changed(base: "str | ConfigDict", settings: Settings) -> Config:
    if "train.seed" in settings:
        raise ConfigError("train.seed: a study file sets `seeds` and `seeds_of`, and --seeds chooses among them")
    config = configuration(base, settings)[1]
    if config.distributed:
        raise ConfigError("distributed=True: a run of a study uses one host. Several hosts may share a study")
    return config
