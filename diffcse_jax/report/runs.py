"""A run as its workdir tells it, whether it is finished, in progress or of an earlier version."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import expand_path, find_run, read_json, read_json_object
from diffcse_jax.run_folder.records import STARTS, Record, Selection, read_baseline, read_metrics, read_selection

EXPORT = "export"
RESULTS = ("evaluation.json", "results.json", "export/results.json")  # where a run's own scores may be

Scores = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of a workdir.

    Attributes:
        label: a short name, different from that of every other run of the report.
        workdir: its folder.
        config: its resolved configuration.
        rows: of `metrics.jsonl`.
        baseline: the record of the start; None before it is evaluated, and in runs of earlier versions.
        selection: the model that a finished run gives; None until then, and in runs of earlier versions.
        starts: the lines of `starts.jsonl`.
        results: what `diffcse evaluate` has found, as in its `results.json`.
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
        """(step, value) of a metric."""
        return [(row["step"], row[name]) for row in self.rows if name in row]

    @property
    def last_step(self) -> int:
        """The last step with a row."""
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def is_finished(self) -> bool:
        """True once there is a model to use; runs of earlier versions recorded no choice."""
        return self.selection is not None or (self.workdir / EXPORT).is_dir()

    @property
    def metric(self) -> str:
        """The dev score that chooses: the recorded one, or what the configuration asks for."""
        record = self.selection.record if self.selection else self.baseline
        if record:
            return record.dev_metric
        asked = self.config.eval.metric
        measured = {name.removeprefix("dev/") for row in self.rows for name in row if name.startswith("dev/")}
        # Where STS data was missing, the halves of sentences stood in.
        return asked if asked in measured or not measured else min(measured, key=lambda name: (len(name), name))

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(step, dev score) of the vector that is trained."""
        return [(int(step), score) for step, score in self.points(f"dev/{self.metric}")]

    @property
    def before(self) -> float | None:
        """The dev score of the start."""
        if self.baseline and self.metric in self.baseline.dev:
            return self.baseline.dev[self.metric]
        return next((score for step, score in self.evaluations if step == 0), None)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and dev score of the model that was chosen, or of the best one so far; None where there is none."""
        if self.selection and self.selection.record.dev:
            return self.selection.record.step, self.selection.record.dev[self.metric]
        return max(
            ((step, score) for step, score in self.evaluations if step),
            key=lambda each: (each[1], -each[0]),
            default=None,
        )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders.

    Raises:
        ConfigError: a folder that is named twice.
        CheckpointError: a folder that is none of a run, or holds what cannot be read.
    """
    workdirs = [_workdir(expand_path(path)) for path in paths]
    if repeated := [str(folder) for index, folder in enumerate(workdirs) if folder in workdirs[:index]]:
        raise ConfigError(f"{repeated[0]} is named twice")
    return [_read(workdir, label) for workdir, label in zip(workdirs, labels(workdirs), strict=True)]


def labels(workdirs: Sequence[Path]) -> list[str]:
    """The shortest ends of their paths that tell all apart; a seed's with the folder that says of what."""
    parts = [folder.absolute().parts for folder in workdirs]
    length = 2 if any(each[-1].startswith("seed-") for each in parts) else 1
    while length < max(map(len, parts)) and len({each[-length:] for each in parts}) < len(parts):
        length += 1
    return [Path(*each[-length:]).as_posix() for each in parts]


def _workdir(path: Path) -> Path:
    found = find_run(path) or find_run(path.parent)  # an export lies in its workdir
    if found:
        return found
    within = sorted(
        {file.parent for file in path.glob("*/config.json")} | {f.parent for f in path.glob("*/*/config.json")}
    )
    runs = [str(folder) for folder in within if find_run(folder)]
    advice = (
        f"; it holds runs, name some of them: {' '.join(runs[:3])}{' ...' if len(runs) > 3 else ''}" if runs else ""
    )
    raise CheckpointError(f"{path} is no run's folder (it has no config.json of a run){advice}")


def _read(workdir: Path, label: str) -> Run:
    return Run(
        label,
        workdir,
        Config.from_dict(read_json_object(workdir / "config.json")),
        read_metrics(workdir),
        read_baseline(workdir),
        read_selection(workdir),
        _starts(workdir / STARTS),
        _results(workdir),
    )


def _starts(path: Path) -> list[dict[str, Any]]:
    """The lines that can be read: the last one may be half written."""
    starts = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            start = json.loads(line)
        except ValueError:
            continue
        if isinstance(start, dict):
            starts.append(start)
    return starts


def _results(workdir: Path) -> list[dict[str, Any]]:
    """The first results that lie with the run."""
    for name in RESULTS:
        if (workdir / name).is_file() and (found := results_in(workdir / name)):
            return found
    return []


def results_in(path: Path) -> list[dict[str, Any]]:
    """The results of models in a file of `diffcse evaluate`; none where it is another file.

    Raises:
        CheckpointError: no such file, or no JSON.
    """
    content = read_json(path)
    models = content.get("models", [content]) if isinstance(content, dict) else []
    return [
        each for each in models if isinstance(each, dict) and {"tasks", "averages"} <= each.keys() and each["tasks"]
    ]
