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
from diffcse_jax.apps.finetune.train import run_finetune
from diffcse_jax.apps.study import table
from diffcse_jax.apps.study.plan import (
    EVALUATION,
    FAILURE,
    LOCK,
    RESULTS,
    RUN,
    Run,
    make_plan,
    read_record,
    read_study,
)
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
    variants: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tasks: str | None = None,
    start: bool = False,
    report: bool = False,
    format: str = "text",
    overrides: Sequence[str] = (),
) -> int:
    """Do the runs of a study that are not done, write its tables and print one: the command, with its options.

    Returns:
        The exit code: 0; 1 if a run failed; 3 if runs are not done for another reason; 130 if the study was stopped.
    """
    name, study = read_study(config)
    if start and OWN_POOLER not in study.start:
        study = dataclasses.replace(study, start=(OWN_POOLER, *study.start))
    if tasks is not None:
        study = dataclasses.replace(study, tasks=tuple(filter(None, tasks.split(","))))
    folder = expand_path(workdir or Path("runs") / "studies" / name)
    tunings = [argument for argument in overrides if argument.lstrip("-").startswith("finetune.")]
    trainings = [argument for argument in overrides if argument not in tunings]
    plan = make_plan(name, study, trainings, folder, tunings)
    chosen = plan.selected(variants or [], seeds or [])
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
    print(table.show(summary, format), end="")
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
    rest = [(number, run) for number, run in enumerate(runs, 1) if not run.look()[0]]
    if len(rest) < len(runs):
        log_line(f"done already: {len(runs) - len(rest)} of {counted(len(runs), 'run{s}')}")
    keep_compiled()
    for _ in range(2):
        held: dict[str, tuple[int, Run]] = {}  # by another process, and the fine-tunings that wait for it
        for number, run in rest:
            name = f"run {number} of {len(runs)}: {run.label}"
            if run.start and not run.start.is_trained:
                log_line(f"{name}: skipped: {run.start.label} is not trained")
                if run.start.label in held:
                    held[run.label] = number, run
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
                held[run.label] = number, run
        rest = [*held.values()]


def _attempt(run: Run) -> str:
    """Do one run. Return why it failed, or an empty string."""
    (run.folder / FAILURE).unlink(missing_ok=True)
    try:
        if (run.folder / RUN).is_file():
            read_record(run.folder)  # raises an error if it is damaged
        write_sealed(run.folder / RUN, run.record)
        train_and_score(run)
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


def train_and_score(run: Run) -> None:
    """Train a run, and write its `evaluation.json` and, last, its `results.json`.

    That is `{"asked": tasks, "pooler", "metric": the dev metric, "dev": its score, "dev_text": identifies the text of
    the dev metric, "scores": {column: score}, "missing": {task: reason}}`, and `"origin"` if the run selected no
    checkpoint but the starting checkpoint, or weights between the two. The metric of a fine-tuning is the average over
    its labelled tasks, and the scores are those of the tasks.
    """
    settings = Settings(tasks=",".join(run.tasks), data_dir=run.config.eval.data_dir, pooler=run.pooler)
    found: dict[str, Any] = {"asked": run.tasks}
    if run.pooler:
        model = run.config.model.name_or_path
        if run.pooler == OWN_POOLER:  # the one that the checkpoint records, or else the one of its training
            config, start, _ = open_start(run.config, make_mesh(run.config))
            settings = dataclasses.replace(settings, pooler=start.pooler(config))
        corpus = open_corpus(run.config.data)
        evaluation = build_dev_evaluation(run.config, lambda: (row[0] for row in corpus))
        dev = evaluation.measure(load_encoder(model, settings)).scores
        found |= {"pooler": settings.pooler, "metric": evaluation.metric, "dev_text": evaluation.text}
    else:
        model = str(run.folder)
        if run.start or not run.is_trained:  # a fine-tuning writes predictions after the export
            (run_finetune if run.start else api.run)(run.config, run.folder)
        selection = read_selection(run.folder)
        assert selection, "training ends with the selection"
        selected, dev = selection.record, selection.record.dev
        found |= {"pooler": selected.pooler, "metric": selected.dev_metric, "dev_text": selected.dev_text}
        if selection.interpolation < 1:
            found["origin"] = origin(selection.interpolation, selected.step)
    scored: results.Results = {"tasks": {}, "averages": {}, "missing": {}, "not_official": {}}
    if run.tasks:
        scored = runner.evaluate_model(model, settings)
        print(results.details(scored))
    labelled = {name: dev[name] for name in itertools.starmap(score_name, run.config.finetune.tasks.items())}
    found |= {"scores": results.scores_by_column(scored) | labelled, "dev": dev[found["metric"]]}
    found |= {name: scored[name] for name in ("missing", "not_official")}
    if run.tasks:
        results.write_results(scored, run.folder / EVALUATION)
    write_sealed(run.folder / RESULTS, found)
