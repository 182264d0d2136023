"""Studies: variants of a configuration, each trained with several seeds, in one table.

See docs/studies.md. From top to bottom: what a study file returns, the runs that follow from it,
the command that does them, and a summary.
"""

import contextlib
import dataclasses
import itertools
import re
import runpy
import statistics
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import jax

from diffcse_jax import api, evaluation
from diffcse_jax.apps.finetune import run_finetune
from diffcse_jax.apps.study import estimate, table
from diffcse_jax.apps.study.record import LAST_CHECKPOINT, Key, StudyRecord, key_of
from diffcse_jax.commands import StudyOptions
from diffcse_jax.config import (
    OWN_POOLER,
    SHIPPED,
    Config,
    configuration,
    flat,
    machine_keys,
    read_overrides,
)
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import CheckpointError, ConfigError, InUseError, UserError, counted
from diffcse_jax.evaluation import results, runner
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.export.card import portable
from diffcse_jax.hosts import log_line, terminated_like_interrupted
from diffcse_jax.io import (
    disk_errors,
    expand_path,
    json_digest,
    lock,
    read_sealed,
    write_sealed,
    write_text,
)
from diffcse_jax.losses.finetune import score_name
from diffcse_jax.run_folder.checkpoints import saved_steps
from diffcse_jax.run_folder.finding import CHECKPOINTS, CONFIG
from diffcse_jax.run_folder.records import origin, read_metrics, read_selection, read_starts
from diffcse_jax.training.networks import open_start
from diffcse_jax.training.sharding import make_mesh

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SHIPPED_STUDIES = SHIPPED / "studies"
FINETUNING = "finetune_multitask"  # the configuration that fine-tunings change
NOT_STARTED = "not started"
# Digests in `starts.jsonl` by what they are of.
INPUTS = {
    "model.name_or_path": "starting checkpoints",
    "generator.name_or_path": "generators",
    "text": "texts",
}
LAST_STEPS = 100  # over which what training logs is averaged
WORTH_TIMING = 4  # runs that are not started: fewer end soon
SAFE = "What the runs have saved is not affected."
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
        base: The configuration that all variants change: a name in `configs/`, or a ConfigDict.
        variants: What each variant changes in the base, by name. The table compares the others with
            the first.
        seeds: The seeds of each variant.
        seeds_of: The seeds of variants that need other ones.
        tasks: Tasks and groups of tasks, as `--tasks` of `diffcse evaluate` takes them. They are
            scored on their test splits. Without tasks, only the dev metric of training is reported.
        dev_tasks: Tasks that are scored on their dev splits besides, in columns `TASK dev`.
        scores_last: Whether each run's last checkpoint is scored, too, in columns `TASK (last)`.
        start: Poolers to score the starting checkpoint with. `own` is the pooler that the
            checkpoint records.
        finetunings: What each fine-tuning changes in `finetune_multitask`, by name. Each starts
            from the encoder of every row with the row's seeds, and is a row of its own, `ROW,
            NAME`.
        comparisons: Further pairs of rows to compare, `(A, B)`. The table shows B minus A.
        published: Published scores by row and column. Columns are `STS-B dev`, names of tasks,
            `average sts` and `average transfer`; for fine-tunings `TASK_accuracy`, `TASK_pearson`
            and `average`.
        source: Where the scores are published.
    """

    base: "str | ConfigDict"
    variants: Mapping[str, Settings]
    comparisons: Sequence[tuple[str, str]] = ()
    seeds: Sequence[int] = (1, 2, 3)
    seeds_of: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    tasks: Sequence[str] = ("sts",)
    dev_tasks: Sequence[str] = ()
    scores_last: bool = False
    start: Sequence[str] = ()
    finetunings: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    published: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    source: str = ""

    def with_seeds(self, count: int) -> "Study":
        """Return the study with the seeds 1 to `count`.

        Rows that need other seeds have at most as many of these.
        """
        if count < 1:
            raise ConfigError(f"--seeds: expected at least 1, got {count}")
        fewer = {row: tuple(seeds)[:count] for row, seeds in self.seeds_of.items()}
        return dataclasses.replace(self, seeds=tuple(range(1, count + 1)), seeds_of=fewer)


def settings_of(name: str) -> dict[str, Any]:
    """Return all values of `configs/NAME.py` by key.

    It is for a variant that takes nothing from the base.
    """
    settings = flat(configuration(name, {})[1].to_dict())
    return {key: value for key, value in settings.items() if key != "train.seed" and value != {}}


def read_study(file: str) -> tuple[str, Study]:
    """Return the name and the study of a file, or of a file in `configs/studies/` by its name."""
    shipped = SHIPPED_STUDIES / f"{file}.py"
    path = shipped if shipped.is_file() else expand_path(file)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in SHIPPED_STUDIES.glob("*.py")))
        raise ConfigError(
            f"--config: {file!r} is neither a file nor the name of a study. Known names: {names}"
        )
    try:
        study = runpy.run_path(str(path)).get("get_study", lambda: None)()
    except Exception as error:  # whatever the file's own code raises
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: {message}") from error
    if not isinstance(study, Study):
        raise ConfigError(
            f"{path}: define a function get_study() that returns a Study, got {study!r}"
        )
    return path.stem, study


# The runs


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """One training or fine-tuning with its scores, or the starting checkpoint's scores.

    Attributes:
        row: Its row of the table.
        seed: Its seed. None for the starting checkpoint.
        config: Its configuration, with the seed.
        folder: The folder that it owns.
        tasks: Tasks that score it. Empty for a fine-tuning, because its labelled tasks do that.
        dev_tasks: Tasks whose dev split scores it.
        scores_last: Whether the last checkpoint is scored as well.
        pooler: The pooler of the starting checkpoint.
        start: The run whose encoder a fine-tuning starts from.
        record: A record that may have its results.
    """

    row: str
    seed: int | None
    config: Config
    folder: Path
    tasks: tuple[str, ...] = ()
    dev_tasks: tuple[str, ...] = ()
    scores_last: bool = False
    pooler: str | None = None
    start: "StudyRun | None" = None
    record: StudyRecord | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The run's name in messages."""
        return self.row if self.seed is None else f"{self.row}, seed {self.seed}"

    @property
    def asked(self) -> tuple[str, ...]:
        """What is scored, as results record it."""
        dev = [f"{task} dev" for task in self.dev_tasks]
        return (*self.tasks, *dev, *([LAST_CHECKPOINT] if self.scores_last else []))

    @property
    def is_trained(self) -> bool:
        """Return whether the run's encoder is there. Training writes the export last."""
        return self.seed is None or (self.folder / "export").is_dir()

    def look(self) -> tuple[dict[str, Any] | None, str]:
        """Return a run's results, or None, and its state in words.

        Results count if the run is done with the study's tasks.
        """
        if self.record and (recorded := self.record.find(self.key)):
            return recorded, "done"
        return self.look_here()

    @property
    def key(self) -> Key:
        """What identifies the run in a record."""
        start = self.start.config if self.start else None
        return key_of(self.row, self.seed, self.config, start, self.asked)

    def look_here(self) -> tuple[dict[str, Any] | None, str]:
        """Return the same by the run's folder alone."""
        try:
            if (self.folder / RESULTS).is_file():
                found = self._read_results()
                if found["asked"] == list(self.asked):
                    return found, "done"
            if (self.folder / LOCK).is_file():
                lock(self.folder / LOCK).close()
        except InUseError as error:
            return None, f"in progress: {error}"
        except CheckpointError as error:
            return None, str(error)
        if (self.folder / FAILURE).is_file():
            failure = (self.folder / FAILURE).read_text(encoding="utf-8", errors="replace")
            reason = failure.strip().partition("\n")[0]
            return None, f"failed: {reason}"
        return None, "started" if (self.folder / CONFIG).is_file() else NOT_STARTED

    def require_same(self) -> None:
        """Refuse a folder with results of another configuration.

        If a run has no results yet, training itself refuses another configuration.
        """
        if not (self.folder / RESULTS).is_file():
            return
        then = flat(Config.from_dict(self._read_results()["config"]).to_dict())
        now = flat(self.config.to_dict())
        # The start is a folder, which may be moved.
        ignored = machine_keys() | ({"model.name_or_path"} if self.start else set())
        if changed := [key for key in now if then.get(key) != now[key] and key not in ignored]:
            values = "\n  ".join(
                f"{key}: {then.get(key)!r} then, {now[key]!r} now" for key in changed
            )
            raise ConfigError(
                f"{self.folder} holds {self.label} with another configuration. Give another "
                f"--workdir, or the same overrides:\n  {values}"
            )

    def _read_results(self) -> dict[str, Any]:
        return read_sealed(
            self.folder / RESULTS, "Run the study without --report to score the run again"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of a study, in the order of the table."""

    name: str
    study: Study
    runs: list[StudyRun]

    @property
    def rows(self) -> dict[str, list[StudyRun]]:
        """The runs of each row of the table."""
        rows: dict[str, list[StudyRun]] = {}
        for run in self.runs:
            rows.setdefault(run.row, []).append(run)
        return rows

    def with_record(self, record: StudyRecord) -> "Plan":
        """Return the plan, whose runs are done if the record has their results."""
        return dataclasses.replace(
            self, runs=[dataclasses.replace(run, record=record) for run in self.runs]
        )

    def selected(self, variants: Sequence[str]) -> list[StudyRun]:
        """Return the runs of these variants (without any: of all), in the order of seeds."""
        for value in variants:
            if value not in self.rows:
                known = ", ".join(self.rows)
                raise ConfigError(f"--variants: {self.name} has no {value!r}. It has: {known}")
        return [
            run
            for run in sorted(self.runs, key=lambda run: run.seed or 0)
            if not variants or run.row in variants
        ]


def make_plan(name: str, study: Study, overrides: Sequence[str], workdir: Path) -> Plan:
    """Build the configuration of every run.

    Every variant gets the overrides `--config.KEY=VALUE` last, and every fine-tuning the
    `--finetune.KEY=VALUE`.
    """
    if not study.variants:
        raise ConfigError(f"{name}: a study needs variants")
    of_tunings = [
        argument for argument in overrides if argument.lstrip("-").startswith("finetune.")
    ]
    if of_tunings and not study.finetunings:
        raise ConfigError(f"{of_tunings[0]}: {name} has no fine-tunings")
    values = read_overrides(argument for argument in overrides if argument not in of_tunings)
    encoders = [*_encoders(name, study, values, workdir)]
    tuned = [*_tuned(name, study, read_overrides(of_tunings, "finetune"), encoders, workdir)]
    runs = encoders + tuned
    for pair in study.comparisons:
        if isinstance(pair, str) or len(pair) != 2:
            raise ConfigError(
                f"{name}: comparisons: write each as a pair of rows, ('A', 'B'), not {pair!r}"
            )
    named = {
        "seeds_of": (study.seeds_of, encoders),
        "published": (study.published, runs),
        "comparisons": (itertools.chain(*study.comparisons), runs),
    }
    for field, (names, of) in named.items():
        rows = dict.fromkeys(run.row for run in of)
        if unknown := set(names) - rows.keys():
            raise ConfigError(
                f"{name}: {field} names {min(unknown)!r}. The study has: {', '.join(rows)}"
            )
    folders: dict[str, StudyRun] = {}
    for run in runs:
        if (other := folders.setdefault(str(run.folder).casefold(), run)) is not run:
            raise ConfigError(
                f"{name}: {other.label!r} and {run.label!r} would share a folder. Rename one"
            )
    return Plan(name, study, runs)


def _encoders(
    name: str, study: Study, values: Mapping[str, Any], workdir: Path
) -> Iterator[StudyRun]:
    """Yield the starting checkpoints, with each pooler, and the runs of all variants."""
    tasks, dev_tasks = tuple(study.tasks), tuple(study.dev_tasks)
    for pooler in study.start:
        row = "start" if pooler == OWN_POOLER else f"start ({pooler})"
        config = _changed(name, study.base, values)
        yield StudyRun(
            row,
            None,
            config,
            _folder_of(row, None, workdir),
            tasks=tasks,
            dev_tasks=dev_tasks,
            pooler=pooler,
        )
    for row, settings in study.variants.items():
        config = _changed(f"{name}: variant {row!r}", study.base, {**settings, **values})
        for seed in study.seeds_of.get(row, study.seeds):
            yield StudyRun(
                row,
                seed,
                _seeded(config, seed),
                _folder_of(row, seed, workdir),
                tasks=tasks,
                dev_tasks=dev_tasks,
                scores_last=study.scores_last,
            )


def _tuned(
    name: str, study: Study, values: Mapping[str, Any], encoders: Sequence[StudyRun], workdir: Path
) -> Iterator[StudyRun]:
    """Yield the fine-tunings of all encoders."""
    for encoder, (tuning, settings) in itertools.product(encoders, study.finetunings.items()):
        trained = str(encoder.folder.absolute())
        start = {
            "model.name_or_path": encoder.config.model.name_or_path if encoder.pooler else trained
        }
        if encoder.pooler and encoder.pooler != OWN_POOLER:
            start["model.pooler"] = encoder.pooler
        config = _changed(
            f"{name}: fine-tuning {tuning!r}", FINETUNING, {**settings, **values, **start}
        )
        row = f"{encoder.row}, {tuning}"
        for seed in (
            study.seeds_of.get(encoder.row, study.seeds) if encoder.seed is None else [encoder.seed]
        ):
            yield StudyRun(
                row, seed, _seeded(config, seed), _folder_of(row, seed, workdir), start=encoder
            )


def _folder_of(row: str, seed: int | None, workdir: Path) -> Path:
    folder = workdir / re.sub(r"[^\w.,=+-]+", "-", row).strip("-.")
    return folder if seed is None else folder / f"seed-{seed}"


def _seeded(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))


def _changed(where: str, base: "str | ConfigDict", settings: Settings) -> Config:
    """Return a configuration with changed values. Errors begin with the place."""
    try:
        if "train.seed" in settings:
            raise ConfigError(
                "train.seed: a study file sets `seeds` and `seeds_of`, and --seeds chooses among "
                "them"
            )
        config = configuration(base, settings)[1]
        if config.distributed:
            raise ConfigError(
                "distributed=True: a run of a study uses one host. Several hosts may share a study"
            )
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('--config: ')}") from error
    return config


# The command


def run_study(options: StudyOptions) -> int:
    """Do the runs of a study that are not done, write its tables and print one.

    Returns:
        The exit code: 0; 1 if a run failed; 3 if runs are not done for another reason; 130 if the
            study was stopped.
    """
    name, study = read_study(options.config)
    if options.tasks is not None:
        study = dataclasses.replace(study, tasks=tuple(filter(None, options.tasks.split(","))))
    if options.seeds is not None:
        study = study.with_seeds(options.seeds)
    folder = expand_path(options.workdir or Path("runs") / "studies" / name)
    plan = make_plan(name, study, options.overrides, folder)
    if options.record:
        plan = plan.with_record(StudyRecord(options.record))
    chosen = plan.selected(options.variants)
    was_stopped = False
    if not options.report:
        require_folders(name, chosen)
        for run in plan.runs:
            with contextlib.suppress(CheckpointError):  # a damaged record fails its run alone
                run.require_same()
        try:
            # Standard output is for the table.
            with terminated_like_interrupted(), contextlib.redirect_stdout(sys.stderr):
                for warning in recorded_otherwise(plan):
                    log_line(warning)
                say_what_it_takes(chosen, folder)
                do_runs(chosen)
        except KeyboardInterrupt as stopped:
            log_line(str(stopped) or "interrupted")
            was_stopped = True
    # Several hosts may finish at the same time. The last one to write has read everything.
    with disk_errors(folder, safe=SAFE), lock(folder / "table.lock", wait=True):
        summary = summarize(plan)
        table.write(summary, folder)
    print(table.show(summary, "text"), end="")
    states = [summary["open"][run.label] for run in chosen if run.label in summary["open"]]
    if was_stopped:
        return 130
    if any(state.startswith("failed: ") for state in states):
        return 1
    return 3 if states else 0


def require_folders(study: str, runs: Sequence[StudyRun]) -> None:
    """Refuse a study whose runs would all fail, because a folder that they start from is missing.

    Raises:
        ConfigError: The path of a starting checkpoint or of a generator does not exist.
    """
    for run in runs:
        if run.start or run.look()[0]:
            continue
        values = flat(run.config.to_dict())
        needed = ["model.name_or_path"]
        if run.seed is not None and run.config.needs("generator"):
            needed.append("generator.name_or_path")
        for key in needed:
            folder = Path(values[key])
            if folder.is_absolute() and not folder.exists():
                raise ConfigError(
                    f"{folder} does not exist. {run.row} needs it as {key}. Make it, or name "
                    f"another one with --config.{key}. The file of the study {study} may say how "
                    "to make it"
                )


def say_what_it_takes(runs: Sequence[StudyRun], folder: Path) -> None:
    """Log how long the runs that are not done will take, and how much disk they need.

    This is done only if it is worth timing.
    """
    rest = [
        run
        for run in runs
        if run.seed is not None and not run.start and run.look()[1] == NOT_STARTED
    ]
    if len(rest) < WORTH_TIMING:
        return
    folder.mkdir(parents=True, exist_ok=True)
    costs: dict[str, estimate.Cost | None] = {}
    for run in rest:
        if run.row not in costs:
            log_line(f"timing a few steps of {run.row}")
            costs[run.row] = _probe(run, folder)
    known = {row: cost for row, cost in costs.items() if cost}
    timed = [(run.row, run.config.eval.every) for run in rest if run.row in known]
    for line in estimate.describe(known, timed, disk_usage(folder).free) if known else ():
        log_line(line)


def _probe(run: StudyRun, folder: Path) -> estimate.Cost | None:
    """Time a few steps of a run.

    Return None for a run that is too short or fails. It will fail again when it is done.
    """
    try:
        cost = estimate.probe(run.config, folder)
    except Exception as error:  # whatever a run may raise
        log_line(f"notice: {run.row} was not timed: {error}")
        return None
    if cost is None:
        log_line(
            f"notice: {run.row} was not timed: its runs have fewer than {estimate.STEPS} steps"
        )
    return cost


def do_runs(runs: Sequence[StudyRun]) -> None:
    """Do all runs that are not done, in this order. A failed run does not stop the others.

    Runs that another process works on are left to it, and looked at once more at the end.
    """
    for run in runs:
        if run.record and not run.record.find(run.key) and (found := run.look_here()[0]):
            run.record.add(run.key, found)  # of an earlier command
    rest = [run for run in runs if not run.look()[0]]
    if len(rest) < len(runs):
        log_line(f"done already: {len(runs) - len(rest)} of {counted(len(runs), 'run{s}')}")
    for _ in range(2):
        held: list[StudyRun] = []  # by another process, and the fine-tunings that wait for it
        for run in rest:
            name = f"run {runs.index(run) + 1} of {len(runs)}: {run.label}"
            if run.start and not run.start.is_trained:
                log_line(f"{name}: skipped: {run.start.label} is not trained")
                if run.start in held:
                    held.append(run)
                continue
            try:
                with lock(run.folder / LOCK), disk_errors(run.folder, safe=SAFE):
                    if run.look()[0]:
                        log_line(f"{name}: done by another process")
                        continue
                    log_line(f"{name}: started in {run.folder}")
                    failure = _attempt(run)
                    log_line(f"{name}: {f'failed: {failure}' if failure else 'done'}")
            except InUseError as error:
                log_line(f"{name}: skipped: {error}")
                held.append(run)
        rest = held


def _attempt(run: StudyRun) -> str:
    """Do one run. Return why it failed, or an empty string."""
    (run.folder / FAILURE).unlink(missing_ok=True)
    try:
        results = train_and_score(run)
        write_sealed(run.folder / RESULTS, results)
    except Exception as error:
        reason = str(error)
        details = ""
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {error}"
            details = traceback.format_exc()
            print(details, end="", file=sys.stderr)
        write_text(run.folder / FAILURE, f"{reason}\n{details}")
        return reason
    finally:
        jax.clear_caches()  # the next run compiles programs of its own
    if run.record:
        run.record.add(run.key, results)
    return ""


def train_and_score(run: StudyRun) -> dict[str, Any]:
    """Train a run, score it and write its `evaluation.json`.

    Returns:
        What tables need: `asked` (the tasks), `config`, `metric` (the dev metric), `dev` (its
        score), `dev_text` (identifies the text of the dev metric), `scores` by column, and `notes`.
        Of a trained encoder also the steps of the `best` and the `last` checkpoint, its `curve`
        (dev score by step), `training` (`means_at_end`), and `inputs` (digests of the starting
        weights and of the text). The metric of a fine-tuning is the
        average over its labelled tasks, and the scores are those of the tasks.
    """
    if run.seed is None:
        return _score_start(run)
    # A run with results is trained, and its text may be gone. A fine-tuning writes predictions
    # after the export.
    if run.start or not (run.is_trained and (run.folder / RESULTS).is_file()):
        (run_finetune if run.start else api.run)(run.config, run.folder)
    selection = read_selection(run.folder)
    assert selection, "training ends with the selection"
    record = selection.record
    notes = []
    if run.start:
        about = f"fine-tuned from {run.start.row}; scores x 100 on dev rows of the tasks"
        notes.append(f"{run.row}: {about}")
    if selection.interpolation < 1:
        notes.append(f"{run.label}: {origin(selection.interpolation, record.step)}")
    metric = record.dev_metric
    tuned = itertools.starmap(score_name, run.config.finetune.tasks.items())
    found: dict[str, Any] = {
        "asked": run.asked,
        "config": run.config.to_dict(),
        "metric": metric,
        "dev": record.dev[metric],
        "dev_text": record.dev_text,
        "scores": {name: record.dev[name] for name in tuned},
        "notes": notes,
    }
    if run.start:
        return found
    rows = read_metrics(run.folder)
    checkpoints = run.folder / CHECKPOINTS
    last = max(saved_steps(checkpoints), default=record.step)
    dev_row = f"dev/{metric}"
    found |= {"best": record.step, "last": last, "training": means_at_end(rows)}
    found["inputs"] = digests_of_inputs(run.folder)
    found["curve"] = [[row["step"], row[dev_row]] for row in rows if dev_row in row]
    _add_scores(run, found, str(run.folder))
    if run.scores_last and last == record.step and selection.interpolation == 1:
        found["scores"] |= {f"{name} (last)": score for name, score in found["scores"].items()}
    elif run.scores_last:
        _add_scores(run, found, str(checkpoints / str(last)), " (last)")
    return found


def digests_of_inputs(folder: Path) -> dict[str, str]:
    """Return the digests of the weights that a run started from, and of its text."""
    first: dict[str, Any] = next(iter(read_starts(folder)), {})
    digests = first.get("digests", {})
    return {name: value for name, value in digests.items() if name in INPUTS}


def means_at_end(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of what training logged in its last `LAST_STEPS` steps, by name."""
    logged = [row for row in rows if "loss" in row and row["step"] > rows[-1]["step"] - LAST_STEPS]
    return {
        name: statistics.fmean(values)
        for name in (logged[-1] if logged else {})
        if name != "step" and all(name in row for row in logged)
        for values in [[row[name] for row in logged]]
    }


def _score_start(run: StudyRun) -> dict[str, Any]:
    """Return the results of the starting checkpoint, as `train_and_score`."""
    model = run.config.model.name_or_path
    name = portable(run.config)["model"]["name_or_path"]  # a record may be read elsewhere
    settings = _settings(run)
    if run.pooler == OWN_POOLER:
        # The one that the checkpoint records, or else the one of its training.
        config, start, _ = open_start(run.config, make_mesh(run.config))
        applied = start.checkpoint.sentence_head.applied(start.pooler(config))
        settings = dataclasses.replace(settings, pooler=applied)
    corpus = open_corpus(run.config.data)
    measured = build_dev_evaluation(run.config, corpus.first_texts)
    dev = measured.measure(load_encoder(model, settings)).scores
    found = {
        "asked": run.asked,
        "config": run.config.to_dict(),
        "metric": measured.metric,
        "dev": dev[measured.metric],
        "dev_text": measured.text,
        "scores": {},
        "notes": [f"{run.row}: {name} before training, pooler {settings.pooler}"],
    }
    _add_scores(run, found, model, pooler=settings.pooler)
    return found


def _settings(run: StudyRun) -> evaluation.EvaluationSettings:
    return evaluation.EvaluationSettings(
        tasks=",".join(run.tasks), data_dir=run.config.eval.data_dir, pooler=run.pooler
    )


def _add_scores(
    run: StudyRun,
    found: dict[str, Any],
    model: str,
    suffix: str = "",
    *,
    pooler: str | None = None,
) -> None:
    """Score a model on the tasks of a run, and add scores and notes to its results.

    Args:
        run: The run. Without a suffix, its `evaluation.json` gets the scores of test splits.
        found: The results.
        model: The run, one of its checkpoints, or the starting checkpoint.
        suffix: Added to the names of columns.
        pooler: The pooler; None for the recorded one.
    """
    settings = dataclasses.replace(_settings(run), pooler=pooler)
    dev = dataclasses.replace(settings, tasks=",".join(run.dev_tasks), mode="dev")
    for each in (settings, dev):
        if not each.tasks:
            continue
        scored = runner.evaluate_model(model, each)
        of_dev = " dev" if each is dev else ""
        if each is settings and not suffix:
            runner.write_results(scored, run.folder / EVALUATION)
        for column, score in results.scores_by_column(scored).items():
            found["scores"][f"{column}{of_dev}{suffix}"] = score
        for task, reason in scored["missing"].items():
            found["notes"].append(f"{task}{of_dev}: no score: {reason}")
        for task, how in scored["not_official"].items():
            found["notes"].append(f"{task}{of_dev}: not the official data: {how}")


def summarize(plan: Plan) -> table.Summary:
    """Return the content of `study.json`.

    It has the scores of all runs that are done, and the states of the others.
    """
    groups: dict[str, list[dict[str, Any]]] = {"encoders": [], "finetunings": []}
    states: dict[str, str] = {}  # of the runs that are not done
    notes = ["n: seeds; mean ± standard deviation (of a sample) over several seeds"]
    titles: dict[tuple[str, str], str] = {}  # the columns of dev metrics by metric and text
    for row, runs in plan.rows.items():
        scores: dict[str, dict[str, float]] = {}
        training: dict[str, dict[str, float]] = {}
        for run in runs:
            found, state = run.look()
            if found:
                seed = "-" if run.seed is None else str(run.seed)
                scores[seed] = _columns(run, found, titles)
                training[seed] = found.get("training", {})
                notes += found["notes"]
            else:
                states[run.label] = state
        group = groups["finetunings" if runs[0].start else "encoders"]
        first: table.Seeds = next((each["scores"] for each in group if not each["is_start"]), {})
        group.append(
            {
                "row": row,
                "is_start": runs[0].seed is None,
                "n": len(scores),
                "scores": scores,
                "training": training,
                "difference": table.differences(first, scores),
                "published": plan.study.published.get(row, {}),
            }
        )
    if plan.study.published:
        notes.append(
            f"published: {plan.study.source}, with its own checkpoints, text and number of steps"
        )
    notes += [f"{label}: {state}" for label, state in states.items() if state != NOT_STARTED]
    notes += recorded_otherwise(plan)
    notes += mixed_inputs(plan)
    for row, runs in plan.rows.items():
        waiting = [run for run in runs if states.get(run.label) == NOT_STARTED]
        seeds = [str(run.seed) for run in waiting if run.seed is not None]
        which = f", seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else ""
        if waiting:
            notes.append(f"{NOT_STARTED}: {row}{which}")
    about = {"study": plan.name, "source": plan.study.source, "dev_columns": [*titles.values()]}
    by_row = {row["row"]: row["scores"] for group in groups.values() for row in group}
    comparisons = [
        {"row": row, "against": against, "difference": table.differences(by_row[against], scores)}
        for against, row in plan.study.comparisons
        for scores in [by_row[row]]
    ]
    return {
        **about,
        **groups,
        "comparisons": comparisons,
        "open": states,
        "notes": [*dict.fromkeys(notes)],
    }


def recorded_otherwise(plan: Plan) -> Iterator[str]:
    """Yield warnings of runs that a record has more than once, or with other settings."""
    for record in {id(run.record): run.record for run in plan.runs if run.record}.values():
        if repeated := ", ".join(record.repeated()):
            yield (
                f"warning: {record.path} has several lines with different scores for {repeated}. "
                "The last one counts. Remove the others"
            )
    for row, runs in plan.rows.items():
        for run in runs:
            if run.record and not run.look()[0] and (how := run.record.difference(run.key)):
                yield f"warning: {run.record.path} has {row} with other settings: {how}"
                break


def mixed_inputs(plan: Plan) -> Iterator[str]:
    """Yield what differs between runs that should share it.

    A record knows folders by their names only, so runs of two machines may have started from
    different weights. Texts are compared between runs that read and tokenise them alike.
    """
    # The labels of runs, by kind, name and settings, and then by digest.
    digests: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for run in plan.runs:
        found, _ = run.look()
        values = flat(portable(run.config))
        reading = {
            key: value
            for key, value in values.items()
            if key.startswith("data.") and key not in machine_keys()
        }
        as_tokens = json_digest([reading, values["model.name_or_path"]])
        for kind, digest in (found or {}).get("inputs", {}).items():
            is_text = kind == "text"
            name = values["data.train_file" if is_text else kind]
            group = (kind, name, as_tokens if is_text else "")
            digests.setdefault(group, {}).setdefault(digest, []).append(run.label)
    for (kind, name, _), labels in digests.items():
        if len(labels) > 1:
            parts = " | ".join(", ".join(each) for each in labels.values())
            yield f"warning: {len(labels)} different {INPUTS[kind]} are called {name}: {parts}"


def _columns(
    run: StudyRun, found: Mapping[str, Any], titles: dict[tuple[str, str], str]
) -> dict[str, float]:
    """Return the scores by column: the dev metric first, but the average of a fine-tuning last.

    Rows that measure a dev metric on different text get different columns. New columns are added to
    `titles`.
    """
    metric, dev = found["metric"], found["dev"]
    if run.start:
        return found["scores"] | {metric: dev}
    title = "STS-B dev" if metric == "stsb_spearman" else f"dev {metric}"
    is_first = all(known != metric for known, _ in titles)
    column = titles.setdefault(
        (metric, found["dev_text"]), title if is_first else f"{title}, text of {run.row}"
    )
    return {column: dev} | found["scores"]
