"""Reads a run's records, whether it is finished or in progress, and says in words what came of it."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import expand_path, find_run, read_json
from diffcse_jax.run_folder.folder import read_config
from diffcse_jax.run_folder.records import (
    Record,
    Selection,
    origin,
    read_baseline,
    read_metrics,
    read_selection,
    read_starts,
)

EXPORT = "export"
RESULTS = ("evaluation.json", "results.json", "export/results.json")  # where a run's own test scores may be
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of a run's folder.

    Attributes:
        label: A short name that no other run of the report has.
        workdir: The folder.
        config: The resolved configuration.
        rows: The rows of `metrics.jsonl`; their values are finite.
        baseline: The record of the starting checkpoint; None before its evaluation.
        selection: The model that a finished run exports; None until then.
        starts: The lines of `starts.jsonl`.
        results: Test scores as in the `results.json` of `diffcse evaluate`.
    """

    label: str
    workdir: Path
    config: Config
    rows: Sequence[dict[str, float]]
    baseline: Record | None = None
    selection: Selection | None = None
    starts: Sequence[dict[str, Any]] = ()
    results: Sequence[dict[str, Any]] = ()

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a metric."""
        return [(row["step"], row[name]) for row in self.rows if name in row]

    @property
    def last_step(self) -> int:
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def metric(self) -> str:
        """The dev metric that chooses the checkpoint."""
        record = self.selection.record if self.selection else self.baseline
        return record.dev_metric if record else self.config.eval.metric

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(step, score) pairs of the dev metric, measured with the pooler that is trained."""
        return [(int(step), score) for step, score in self.points(f"dev/{self.metric}")]

    @property
    def before(self) -> float | None:
        """The dev metric of the starting checkpoint."""
        if self.baseline and self.metric in self.baseline.dev:
            return self.baseline.dev[self.metric]
        return dict(self.evaluations).get(0)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and score of the selected model, or of the best checkpoint so far."""
        if self.selection and self.metric in self.selection.record.dev:
            return self.selection.record.step, self.selection.record.dev[self.metric]
        later = [(step, score) for step, score in self.evaluations if step]
        return max(later, key=lambda each: (each[1], -each[0]), default=None)

    @property
    def choice(self) -> str:
        """The words next to the marked point of the curve."""
        if self.selection is None:
            return "best so far:"
        return "selected:" if self.selection.interpolation == 1 else "selected, interpolated:"

    @property
    def metric_name(self) -> str:
        return readable(self.metric)

    @property
    def shown_before(self) -> str:
        return short2(self.before)

    @property
    def shown_after(self) -> str:
        return short2(self.best[1] if self.best else None)

    @property
    def change(self) -> str:
        """The gain over the starting checkpoint with its sign; empty if it is unknown."""
        if self.before is None or self.best is None:
            return ""
        return ("+" if self.best[1] >= self.before else "") + short2(self.best[1] - self.before)

    @property
    def state(self) -> str:
        steps = f" of {self.config.train.steps:,}" if self.config.train.steps else ""
        if self.selection:
            return f"finished at step {self.last_step:,}{steps}"
        return f"in progress or stopped at step {self.last_step:,}{steps}" if self.rows else "started, nothing measured"

    @property
    def outcome(self) -> str:
        """The verdict of a finished run, or how far the run is."""
        if self.selection:
            return self.selection.verdict
        if self.best is None:
            return "No model is evaluated yet."
        step, score = self.best
        before = f" (before training: {short2(self.before)})" if self.before is not None else ""
        return (
            f"The best checkpoint so far is step {step:,}: {self.metric_name} {short2(score)}{before}. "
            "The exported model is chosen at the end."
        )

    @property
    def model(self) -> str:
        """The weights that the run exports, or would export now."""
        if self.selection:
            return origin(self.selection.interpolation, self.selection.record.step)
        return f"step {self.best[0]:,} so far" if self.best else "none yet"

    @property
    def duration(self) -> str:
        """The time of the training steps, without compilation and evaluations; empty if it is not recorded."""
        seconds = sum(
            (step - before) * self.config.train.batch_size / speed
            for (before, _), (step, speed) in itertools.pairwise(self.points("sentences_per_second"))
            if speed > 0
        )
        return str(timedelta(seconds=min(round(seconds), 10**9))) if seconds else ""

    @property
    def summary(self) -> str:
        """What was trained: model, data, steps and settings."""
        config = self.config
        data, train, optim = config.data, config.train, config.optim
        length = f"{train.steps:,} steps" if train.steps else f"{train.epochs} epochs"
        described = "; ".join(filter(None, (loss.data_description for loss in config.losses.values())))
        text = described or f"{data.train_file} (pairs: {data.pairs})"
        schedule = "linear decay" if optim.schedule == "linear" else "constant"
        return (
            f"Starts from {config.model.name_or_path} with the pooler {config.encoding_pooler}. Trains on {text} for "
            f"{length}, {train.batch_size} rows a step, at most {data.max_length} tokens. Learning rate "
            f"{optim.learning_rate:g} ({schedule}), seed {train.seed}, {config.precision}{self._devices}."
        )

    @property
    def facts(self) -> dict[str, str]:
        losses = (f"{loss.weight:g} {TIMES} {name.replace('_', ' ')}" for name, loss in self.config.losses.items())
        facts = {"state": self.state, "model": self.model, "losses": ", ".join(losses)}
        return facts | {"time of the steps": self.duration or "not recorded"}

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before trusting the numbers."""
        found = []
        if skipped := max((row.get("bad_steps", 0) for row in self.rows), default=0):
            found.append(
                f"{skipped:g} step{'s' * (skipped != 1)} skipped because the loss or gradient was NaN or infinite"
            )
        if any(row.get("grad_norm") == 0 for row in self.rows):
            found.append("the gradient was 0 at some steps, so nothing was learned there")
        environments = {str([start.get(name) for name in ("versions", "devices", "git")]) for start in self.starts}
        if len(environments) > 1:
            found.append("the run was resumed with other versions, devices or code than it started with")
        if any(isinstance(start.get("git"), dict) and start["git"].get("dirty") for start in self.starts):
            found.append("the code had uncommitted changes")
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Versions, devices and times of the run's last start."""
        if not self.starts:
            return {}
        last = self.starts[-1]
        devices, git, versions, digests = (_mapping(last.get(n)) for n in ("devices", "git", "versions", "digests"))
        found = {"started": ", ".join(f"{each.get('time')} (step {each.get('step')})" for each in self.starts)}
        found |= {"host": str(last.get("host", ""))}
        found |= {"devices": f"{devices.get('count')} {TIMES} {devices.get('kind')}, hosts: {devices.get('hosts')}"}
        if git:
            found["commit"] = f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"
        found |= {name: str(version) for name, version in versions.items()}
        return found | {f"digest of {name}": str(value)[:16] for name, value in digests.items()}

    @property
    def _devices(self) -> str:
        devices = _mapping(self.starts[-1].get("devices")) if self.starts else {}
        return f", on {devices.get('count')} {TIMES} {devices.get('kind')}" if devices else ""


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read the runs in these folders.

    Raises:
        ConfigError: A folder is named twice.
        CheckpointError: A folder is not a run's, or a record is damaged.
    """
    workdirs = [_run_folder(expand_path(path)) for path in paths]
    if repeated := [str(folder) for index, folder in enumerate(workdirs) if folder in workdirs[:index]]:
        raise ConfigError(f"{repeated[0]} is named twice. Name each run once")
    return [_read(workdir, label) for workdir, label in zip(workdirs, labels(workdirs), strict=True)]


def labels(workdirs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ; a seed's folder always with its parent."""
    parts = [folder.absolute().parts for folder in workdirs]
    length = 2 if any(each[-1].startswith("seed-") for each in parts) else 1
    while length < max(map(len, parts)) and len({each[-length:] for each in parts}) < len(parts):
        length += 1
    return [Path(*each[-length:]).as_posix() for each in parts]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of models in a file of `diffcse evaluate`; an empty list for another file.

    Raises:
        CheckpointError: The file is missing or not JSON.
    """
    content = read_json(path)
    models = content.get("models", [content]) if isinstance(content, dict) else []
    return [each for each in models if isinstance(each, dict) and _is_result(each)]


def readable(metric: str) -> str:
    """Return a metric's name for people."""
    return metric.removeprefix("dev/").replace("_", " ")


def short2(value: float | None) -> str:
    """Format a score with two decimals; a dash if it is unknown."""
    return "\N{EN DASH}" if value is None else f"{value:.2f}".replace("-", MINUS)


def _is_result(content: dict[str, Any]) -> bool:
    tasks = content.get("tasks")
    return (
        isinstance(tasks, dict)
        and bool(tasks)
        and all(isinstance(scores, dict) for scores in tasks.values())
        and isinstance(content.get("averages"), dict)
    )


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _run_folder(path: Path) -> Path:
    if found := find_run(path) or find_run(path.parent):  # the parent of an export is its run
        return found
    files = (*path.glob("*/config.json"), *path.glob("*/*/config.json"))
    runs = [str(folder) for folder in sorted({file.parent for file in files}) if find_run(folder)]
    advice = f". It contains runs; name some of them: {' '.join(runs[:3])}" if runs else ""
    raise CheckpointError(f"{path} is not the folder of a run (it has no config.json of a run){advice}")


def _read(workdir: Path, label: str) -> Run:
    config = read_config(workdir)
    rows = [
        {name: value for name, value in row.items() if math.isfinite(value)}
        for row in read_metrics(workdir)
        if math.isfinite(row.get("step", math.nan))
    ]
    results: list[dict[str, Any]] = []
    for name in RESULTS:
        if not results and (workdir / name).is_file():
            results = read_results(workdir / name)
    baseline, selection = read_baseline(workdir), read_selection(workdir)
    return Run(label, workdir, config, rows, baseline, selection, read_starts(workdir), results)
