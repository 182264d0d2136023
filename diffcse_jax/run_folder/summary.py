"""Reads a run's records, whether it is finished or in progress, and describes the result in words."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, counted
from diffcse_jax.io import expand_path, find_run, read_json_object
from diffcse_jax.run_folder import records
from diffcse_jax.run_folder.folder import read_config, read_start

RESULTS = ("evaluation.json", "results.json", "export/results.json")  # where a run's own test scores may be


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of a run's folder."""

    workdir: Path
    config: Config
    rows: Sequence[dict[str, float]]  # with finite values only
    baseline: records.Record | None
    selection: records.Selection | None
    starts: Sequence[dict[str, Any]]
    results: Sequence[dict[str, Any]]  # test scores as in the `results.json` of `diffcse evaluate`

    @property
    def label(self) -> str:
        """The name of the folder, for a seed with that of its parent."""
        parts = self.workdir.absolute().parts
        return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a metric."""
        return [(row["step"], row[name]) for row in self.rows if name in row]

    @property
    def metric(self) -> str:
        """The dev metric that chooses the checkpoint."""
        record = self.selection.record if self.selection else self.baseline
        return record.dev_metric if record else self.config.eval.metric

    @property
    def before(self) -> float | None:
        """The dev metric of the starting checkpoint."""
        return self.baseline.dev.get(self.metric) if self.baseline else None

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and score of the selected model, or of the best checkpoint so far."""
        if self.selection:
            return self.selection.record.step, self.selection.record.dev[self.metric]
        later = [(int(step), score) for step, score in self.points(f"dev/{self.metric}") if step]
        return max(later, key=lambda each: (each[1], -each[0]), default=None)

    @property
    def state(self) -> str:
        """How far the run is."""
        step = f"{max((int(row['step']) for row in self.rows), default=0):,}"
        step += f" of {self.config.train.steps:,}" if self.config.train.steps else ""
        if self.selection:
            return f"finished at step {step}"
        return f"in progress or stopped at step {step}" if self.rows else "started, nothing measured"

    @property
    def outcome(self) -> str:
        """The verdict of a finished run, or the best score so far."""
        if self.selection:
            return self.selection.verdict
        if self.best is None:
            return "No model is evaluated yet."
        step, score = self.best
        before = f" (before training: {self.before:.2f})" if self.before is not None else ""
        return f"The best checkpoint so far is step {step:,}: {readable(self.metric)} {score:.2f}{before}."

    @property
    def model(self) -> str:
        """The weights that the run exports, or would export now."""
        if self.selection:
            return records.origin(self.selection.interpolation, self.selection.record.step)
        return f"step {self.best[0]:,} so far" if self.best else "none yet"

    @property
    def text(self) -> str:
        """What was trained on."""
        described = "; ".join(filter(None, (loss.data_description for loss in self.config.losses.values())))
        return described or f"{self.config.data.train_file} (pairs: {self.config.data.pairs})"

    @property
    def prompts(self) -> str:
        """The prompts of the trained model, or an empty string."""
        with contextlib.suppress(CheckpointError):
            _, prompts = read_start(self.workdir)
            by_name = prompts.by_name
            return ", ".join(f"{name} {prompt!r}" for name, prompt in by_name.items() if prompt)
        return ""

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before trusting the numbers."""
        skipped = max((row.get("bad_steps", 0) for row in self.rows), default=0)
        environments = {str([start.get(name) for name in ("versions", "devices", "git")]) for start in self.starts}
        found = {
            f"{counted(int(skipped), 'step{s}')} skipped because the loss or gradient was NaN or infinite": skipped,
            "the gradient was 0 at some steps, so nothing was learned there": any(
                norm == 0 for _, norm in self.points("grad_norm")
            ),
            "the run was resumed with other versions, devices or code than it started with": len(environments) > 1,
            "the code had uncommitted changes": any(
                isinstance(git := each.get("git"), dict) and git.get("dirty") for each in self.starts
            ),
        }
        return [warning for warning, applies in found.items() if applies]


def read_run(path: str | Path) -> Run:
    """Read the run in a folder, or the run that a checkpoint or export belongs to."""
    path = expand_path(path)
    workdir = find_run(path) or find_run(path.parent)
    if workdir is None:
        raise CheckpointError(f"{path} is not the folder of a run (it has no config.json of a run)")
    scored = (read_results(workdir / name) for name in RESULTS if (workdir / name).is_file())
    return Run(
        workdir,
        read_config(workdir),
        [{name: value for name, value in row.items() if math.isfinite(value)} for row in records.read_metrics(workdir)],
        records.read_baseline(workdir),
        records.read_selection(workdir),
        records.read_starts(workdir),
        results=next(filter(None, scored), []),
    )


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of models in a file of `diffcse evaluate`; an empty list for another file."""
    content = read_json_object(path)
    models = content.get("models", [content])
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise CheckpointError(f"{path}: `models` is not a list of results. Write the file again with diffcse evaluate")
    return [
        each
        for each in models
        if {"model", "pooler"} <= each.keys()
        and all(isinstance(each.get(name), dict) for name in ("tasks", "averages"))
    ]


def readable(metric: str) -> str:
    """Return a metric's name for people."""
    return metric.removeprefix("dev/").replace("_", " ")
