"""Doing the runs of a study, one after the other. Several processes may share them."""

import sys
import traceback
from collections.abc import Sequence

import jax

from diffcse_jax.apps.study.run import FAILURE, LOCK, RESULTS, StudyRun
from diffcse_jax.apps.study.score import train_and_score
from diffcse_jax.errors import InUseError, UserError, counted
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, lock, write_sealed, write_text

SAFE = "What the runs have saved is not affected."


def do_runs(runs: Sequence[StudyRun]) -> None:
    """Do all runs that are not done, in this order. A failed run does not stop the others.

    Runs that another process works on are left to it, and looked at once more at the end.
    """
    for run in runs:
        if run.record and not run.record.find(run.key) and (results := run.look_here()[0]):
            run.record.add(run.key, results)  # of an earlier command
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
