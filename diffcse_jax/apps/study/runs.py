"""The command `diffcse study`: do the runs of a study, one after the other, and write its tables."""

import contextlib
import dataclasses
import itertools
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from diffcse_jax import api
from diffcse_jax.apps.finetune import run_finetune
from diffcse_jax.apps.study import table
from diffcse_jax.apps.study.plan import EVALUATION, FAILURE, LOCK, RESULTS, Run, make_plan, read_study
from diffcse_jax.apps.study.table import SAFE
from diffcse_jax.config import OWN_POOLER
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import CheckpointError, InUseError, UserError, counted
from diffcse_jax.evaluation import Settings, results, runner
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.hosts import keep_compiled, log_line, terminated_like_interrupted
from diffcse_jax.io import disk_errors, expand_path, lock, write_sealed, write_text
from diffcse_jax.losses.finetune import score_name
from diffcse_jax.run_folder.records import origin, read_selection
from diffcse_jax.training.networks import open_start
from diffcse_jax.training.sharding import make_mesh


def run_study(
    config: str,
    workdir: str | None = None,
    *,
    variants: Sequence[str] = (),
    seeds: Sequence[int] = (),
    tasks: str | None = None,
    report: bool = False,
    overrides: Sequence[str] = (),
) -> int:
    """Do the runs of a study that are not done, write its tables and print one: the command, with its options.

    Returns:
        The exit code: 0; 1 if a run failed; 3 if runs are not done for another reason; 130 if the study was stopped.
    """
    name, study = read_study(config)
    if tasks is not None:
        study = dataclasses.replace(study, tasks=tuple(filter(None, tasks.split(","))))
    folder = expand_path(workdir or Path("runs") / "studies" / name)
    tunings = [argument for argument in overrides if argument.lstrip("-").startswith("finetune.")]
    trainings = [argument for argument in overrides if argument not in tunings]
    plan = make_plan(name, study, trainings, folder, tunings)
    chosen = plan.selected(variants, seeds)
    was_stopped = False
    if not report:
        for run in plan.runs:
            with contextlib.suppress(CheckpointError):  # a damaged record fails its run alone
                run.require_same()
        try:
            # Standard output is for the table.
            with terminated_like_interrupted(), contextlib.redirect_stdout(sys.stderr):
                do_runs(chosen)
        except KeyboardInterrupt as stopped:
            log_line(str(stopped) or "interrupted")
            was_stopped = True
    summary = table.write(plan, folder)
    print(table.show(summary, "text"), end="")
    states = [summary["open"][run.label] for run in chosen if run.label in summary["open"]]
    if was_stopped:
        return 130
    if any(state.startswith("failed: ") for state in states):
        return 1
    return 3 if states else 0


def do_runs(runs: Sequence[Run]) -> None:
    """Do all runs that are not done, in this order. A failed run does not stop the others.

    Runs that another process works on are left to it, and looked at once more at the end.
    """
    rest = [run for run in runs if not run.look()[0]]
    if len(rest) < len(runs):
        log_line(f"done already: {len(runs) - len(rest)} of {counted(len(runs), 'run{s}')}")
    keep_compiled()
    for _ in range(2):
        held: list[Run] = []  # by another process, and the fine-tunings that wait for it
        for run in rest:
            name = f"run {runs.index(run) + 1} of {len(runs)}: {run.label}"
            if run.start and not run.start.is_trained:
                log_line(f"{name}: skipped: {run.start.label} is not trained")
                held += [run] * (run.start in held)
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


def _attempt(run: Run) -> str:
    """Do one run. Return why it failed, or an empty string."""
    (run.folder / FAILURE).unlink(missing_ok=True)
    try:
        write_sealed(run.folder / RESULTS, train_and_score(run))
    except Exception as error:
        reason, details = str(error), ""
        if not isinstance(error, UserError):
            reason, details = f"{type(error).__name__}: {error}", traceback.format_exc()
            print(details, end="", file=sys.stderr)
        write_text(run.folder / FAILURE, f"{reason}\n{details}")
        return reason
    finally:
        jax.clear_caches()  # the next run compiles programs of its own
    return ""


def train_and_score(run: Run) -> dict[str, Any]:
    """Train a run, score it and write its `evaluation.json`.

    Returns:
        What tables need: `asked` (the tasks), `config`, `metric` (the dev metric), `dev` (its score), `dev_text`
        (identifies the text of the dev metric), `scores` by column, and `notes`. The metric of a fine-tuning is the
        average over its labelled tasks, and the scores are those of the tasks.
    """
    settings = Settings(tasks=",".join(run.tasks), data_dir=run.config.eval.data_dir, pooler=run.pooler)
    notes = []
    if run.pooler:
        model = run.config.model.name_or_path
        if run.pooler == OWN_POOLER:  # the one that the checkpoint records, or else the one of its training
            config, start, _ = open_start(run.config, make_mesh(run.config))
            settings = dataclasses.replace(settings, pooler=start.pooler(config))
        corpus = open_corpus(run.config.data)
        evaluation = build_dev_evaluation(run.config, lambda: (row[0] for row in corpus))
        dev = evaluation.measure(load_encoder(model, settings)).scores
        metric, dev_text = evaluation.metric, evaluation.text
        notes.append(f"{run.row}: {model} before training, pooler {settings.pooler}")
    else:
        model = str(run.folder)
        # A run with results is trained, and its text may be gone. A fine-tuning writes predictions after the export.
        if run.start or not (run.is_trained and (run.folder / RESULTS).is_file()):
            (run_finetune if run.start else api.run)(run.config, run.folder)
        selection = read_selection(run.folder)
        assert selection, "training ends with the selection"
        dev, metric, dev_text = selection.record.dev, selection.record.dev_metric, selection.record.dev_text
        if run.start:
            notes.append(f"{run.row}: fine-tuned from {run.start.row}; scores x 100 on dev rows of the tasks")
        if selection.interpolation < 1:
            notes.append(f"{run.label}: {origin(selection.interpolation, selection.record.step)}")
    scores = {name: dev[name] for name in itertools.starmap(score_name, run.config.finetune.tasks.items())}
    if run.tasks:
        scored = runner.evaluate_model(model, settings)
        runner.write_results(scored, run.folder / EVALUATION)
        scores |= results.scores_by_column(scored)
        notes += [f"{task}: no score: {reason}" for task, reason in scored["missing"].items()]
        notes += [f"{task}: not the official data: {how}" for task, how in scored["not_official"].items()]
    found = {"asked": run.tasks, "config": run.config.to_dict(), "metric": metric, "dev": dev[metric]}
    return found | {"dev_text": dev_text, "scores": scores, "notes": notes}
