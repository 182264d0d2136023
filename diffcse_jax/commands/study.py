"""Train the variants of a study with several seeds, score them, and compare them in a table.

diffcse study --config minilm --workdir runs/minilm --config.data.train_file=sentences.txt
diffcse study --config minilm --workdir runs/minilm --report

The same command continues a study that was stopped, also from several hosts at the same time. `--config.KEY=VALUE`
overrides a key of all variants, and `--finetune.KEY=VALUE` a key of all fine-tunings. See docs/studies.md.
"""

import argparse
import sys

from diffcse_jax.errors import reported_to_user


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", required=True, metavar="STUDY", help="a study file, or the name of one in configs/studies/")
    add("--workdir", metavar="DIR", help="the folder of the study (default: runs/studies/NAME)")
    add("--encoders", metavar="DIR", help="take trained encoders from the folder of an earlier study")
    add("--workers", type=int, default=1, metavar="N", help="runs at a time; workers share the GPUs (default: 1)")
    add("--variants", nargs="+", action="extend", metavar="NAME", help="only these variants, named as in the table")
    add("--seeds", nargs="+", action="extend", type=int, metavar="SEED", help="only these seeds")
    add("--tasks", help="score these tasks, separated by commas, instead of the study's")
    add("--start", action="store_true", help="also score the starting checkpoint, with the pooler that it records")
    add("--report", action="store_true", help="run nothing; write and print the table of what is done")
    add("--format", choices=("text", "markdown", "latex"), default="text", help="format of the printed table")
    options, overrides = parser.parse_known_args()
    with reported_to_user():
        from diffcse_jax.apps.study.command import run_study

        return run_study(**vars(options), overrides=overrides)


if __name__ == "__main__":
    sys.exit(main())
