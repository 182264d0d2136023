"""Trains the variants of a study with several seeds, scores them, and compares them in a table.

python -m diffcse_jax.study configs/studies/minilm.py --workdir runs/minilm --config.data.train_file=sentences.txt
python -m diffcse_jax.study minilm --workdir runs/minilm --report

Started again with the same workdir it does what is not done yet, also from several hosts at a time.
`--config.KEY=VALUE` overrides a key of all variants, `--finetune.KEY=VALUE` one of all fine-tunings that follow them.
See docs/studies.md.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from diffcse_jax.errors import ConfigError, reported_to_user


def main() -> int:
    """Does the runs, writes the tables and prints one.

    Returns:
        Exit code: 0; 1 where a run failed; 3 where runs are not done for another reason; 130 where the study was
        stopped. An error that the user can correct exits with 2.
    """
    options, overrides, finetune_overrides = parse_arguments()
    with reported_to_user():
        from diffcse_jax.config import OWN_POOLER
        from diffcse_jax.io import expand_path
        from diffcse_jax.study import devices, runs, table
        from diffcse_jax.study.plan import make_plan, read_study

        name, study = read_study(options.study)
        if options.start and OWN_POOLER not in study.start:
            study = dataclasses.replace(study, start=(OWN_POOLER, *study.start))
        if options.tasks is not None:
            study = dataclasses.replace(study, tasks=tuple(filter(None, options.tasks.split(","))))
        workdir = expand_path(options.workdir or Path("runs") / "studies" / name)
        if "{" in str(workdir):
            raise ConfigError(f"--workdir={workdir}: braces stand for a run's values, and a study has several runs")
        encoders = options.encoders and expand_path(options.encoders)
        plan = make_plan(name, study, overrides, workdir, finetune_overrides, encoders)
        chosen = plan.selected(options.variants or [], options.seeds or [])
        commands = runs.Commands()
        if not options.report:
            environments = devices.environments(options.workers)
            runs.check_same(plan.runs)
            runs.check_earlier(chosen)
            work = runs.train_and_score(plan, commands)
            with commands.stopped_by_signals():
                runs.work_through(chosen, environments, work, lambda: commands.stopped)
        outcome = table.write(plan, workdir)
        print(table.show(outcome, options.format), end="")
        if commands.stopped:
            return 130
        if any(runs.has_failed(run) for run in chosen):
            return 1
        return 3 if any(run.label in outcome.open_runs for run in chosen) else 0


def parse_arguments() -> tuple[argparse.Namespace, list[str], list[str]]:
    """The command line, and the overrides of trainings and of fine-tunings in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("study", help="a study file, or the name of one in configs/studies/")
    add("--workdir", type=Path, metavar="DIR", help="where the study lives (default: runs/studies/NAME)")
    add(
        "--encoders",
        type=Path,
        metavar="DIR",
        help="the folder of an earlier study that has trained these variants: they are taken from there",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, each with its share of the GPUs (default: 1)",
    )
    add("--variants", nargs="+", action="extend", metavar="NAME", help="only these variants, as the table names them")
    add("--seeds", nargs="+", action="extend", type=int, metavar="SEED", help="only these seeds")
    add("--tasks", help="in place of the study's: tasks as `eval.py --tasks` takes them, separated by commas")
    add("--start", action="store_true", help="score the untrained start, too, with the pooler that it records")
    add("--report", action="store_true", help="run nothing: write and print the table of what is done")
    add("--format", choices=("text", "markdown", "latex"), default="text", help="of the printed table (default: text)")
    options, rest = parser.parse_known_args()
    trainings = [argument for argument in rest if argument.startswith(("--config.", "-config."))]
    finetunings = [argument for argument in rest if argument.startswith(("--finetune.", "-finetune."))]
    if others := [argument for argument in rest if argument not in trainings + finetunings]:
        parser.error(f"unknown argument {others[0]!r}; overrides are written --config.KEY=VALUE")
    return options, trainings, finetunings


if __name__ == "__main__":
    sys.exit(main())
