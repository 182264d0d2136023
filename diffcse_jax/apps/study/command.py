"""The command `diffcse study`: plan the runs, do those that are not done, and write the tables."""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from diffcse_jax.apps.study import estimate, table
from diffcse_jax.apps.study.definition import read_study
from diffcse_jax.apps.study.plan import make_plan
from diffcse_jax.apps.study.record import StudyRecord
from diffcse_jax.apps.study.run import StudyRun
from diffcse_jax.apps.study.summary import recorded_otherwise, summarize
from diffcse_jax.apps.study.work import SAFE, do_runs
from diffcse_jax.commands import StudyOptions
from diffcse_jax.config import flat
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation.runner import require_own_files
from diffcse_jax.hosts import log_line, terminated_like_interrupted
from diffcse_jax.io import disk_errors, expand_path, lock
from diffcse_jax.options import names_in


def run_study(options: StudyOptions) -> int:
    """Do the runs of a study that are not done, write its tables and print one.

    Returns:
        The exit code: 0; 1 if a run failed; 3 if runs are not done for another reason; 130 if the
            study was stopped.
    """
    name, study = read_study(options.config)
    if options.tasks is not None:
        study = dataclasses.replace(study, tasks=tuple(names_in(options.tasks)))
    if options.seeds is not None:
        study = study.with_seeds(options.seeds)
    folder = expand_path(options.workdir or Path("runs") / "studies" / name)
    strict = ["--finetune.data.on_bad_line=error"] if options.strict and study.finetunings else []
    plan = make_plan(name, study, [*options.overrides, *strict], folder)
    if options.record:
        plan = plan.with_record(StudyRecord(options.record))
    chosen = plan.selected(options.variants)
    was_stopped = False
    for run in plan.runs:
        with contextlib.suppress(CheckpointError):  # a damaged record fails its run alone
            run.require_same()
    if not options.report:
        require_inputs(name, chosen)
        try:
            # Standard output is for the table.
            with terminated_like_interrupted(), contextlib.redirect_stdout(sys.stderr):
                for warning in recorded_otherwise(plan):
                    log_line(warning)
                estimate.log_needs(chosen, folder)
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


def require_inputs(study: str, runs: Sequence[StudyRun]) -> None:
    """Refuse a study whose runs would fail, because an input is missing.

    Raises:
        ConfigError: The path of a starting checkpoint or of a generator does not exist.
        DataError: A file that scores the runs does not exist.
    """
    for run in runs:
        if run.start or run.look()[0]:
            continue
        require_own_files((*run.tasks, *run.dev_tasks))
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
