"""The command `diffcse study`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from diffcse_jax.apps.study import runs, table
from diffcse_jax.apps.study.plan import make_plan, read_study
from diffcse_jax.config import OWN_POOLER
from diffcse_jax.errors import ConfigError
from diffcse_jax.io import expand_path


def run_study(
    config: str,
    workdir: str | None = None,
    *,
    encoders: str | None = None,
    workers: int = 1,
    variants: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tasks: str | None = None,
    start: bool = False,
    report: bool = False,
    format: str = "text",
    overrides: Sequence[str] = (),
) -> int:
    """Do the runs of a study that are not done, write its tables and print one.

    Args:
        config: A study file, or the name of one in `configs/studies/`.
        workdir: The folder of the study. None: `runs/studies/NAME`.
        encoders: The folder of an earlier study that has trained these variants.
        workers: The number of runs at a time.
        variants: Only these variants.
        seeds: Only these seeds.
        tasks: Tasks to score instead of the study's, separated by commas.
        start: Also score the starting checkpoint.
        report: Run nothing.
        format: The format of the printed table.
        overrides: Arguments `--config.KEY=VALUE` and `--finetune.KEY=VALUE`.

    Returns:
        The exit code: 0; 1 if a run failed; 3 if runs are not done for another reason; 130 if the study was stopped.

    Raises:
        UserError: The study, an argument or a folder cannot be used.
    """
    name, study = read_study(config)
    if start and OWN_POOLER not in study.start:
        study = dataclasses.replace(study, start=(OWN_POOLER, *study.start))
    if tasks is not None:
        study = dataclasses.replace(study, tasks=tuple(filter(None, tasks.split(","))))
    folder = expand_path(workdir or Path("runs") / "studies" / name)
    if "{" in str(folder):
        raise ConfigError(f"--workdir={folder}: braces stand for the values of one run, but a study has several runs")
    tunings = [argument for argument in overrides if argument.lstrip("-").startswith("finetune.")]
    trainings = [argument for argument in overrides if argument not in tunings]
    plan = make_plan(name, study, trainings, folder, tunings, expand_path(encoders) if encoders else None)
    chosen = plan.selected(variants or [], seeds or [])
    commands = runs.Commands()
    if not report:
        environments = runs.environments(workers)
        runs.check_same(plan.runs)
        runs.check_earlier(chosen)
        with commands.stopped_by_signals():
            runs.work_through(chosen, environments, runs.train_and_score(plan, commands), lambda: commands.stopped)
    summary = table.write(plan, folder)
    print(table.show(summary, format), end="")
    if commands.stopped:
        return 130
    if any(runs.has_failed(run) for run in chosen):
        return 1
    return 3 if any(run.label in summary["open"] for run in chosen) else 0
