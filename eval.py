"""Scores a sentence encoder on SentEval's tasks.

python eval.py --model runs/diffcse_base --tasks sts --data_dir DIR
"""

import argparse
import sys
from pathlib import Path

from diffcse_jax.config import POOLERS
from diffcse_jax.errors import reported_to_user


def main() -> int:
    """Runs the tasks, prints a table and writes `results.json`.

    Returns:
        Exit code: 0, or 3 where data was missing; what the user must correct exits with 2.
    """
    options = parse_arguments()
    with reported_to_user():
        from diffcse_jax.evaluation import report

        report.check_writable(options.output)
        results = evaluate(options)
        print(report.table(results))
        report.write(results, options.output)
        if geometry := results["tasks"].get("geometry"):
            from diffcse_jax.evaluation.geometry import draw

            print("pictures:", *draw(geometry, options.output.parent / "report"))
    return 3 if results["missing"] and not options.allow_missing else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        required=True,
        help="workdir, one checkpoint of it, Hugging Face or sentence-transformers folder, hub id, `minilm`",
    )
    parser.add_argument("--tasks", default="sts", help="names of tasks or groups, separated by commas (default: sts)")
    parser.add_argument(
        "--data_dir", default="", help="SentEval's `downstream` folder (default: $DIFFCSE_DATA_DIR/senteval)"
    )
    parser.add_argument(
        "--mode",
        choices=("test", "fasttest", "dev"),
        default="test",
        help="dev: scores of the dev splits; fasttest: cheaper classifiers for the transfer tasks (default: test)",
    )
    parser.add_argument(
        "--aggregation",
        choices=("all", "mean", "wmean"),
        default="all",
        help="how the subsets of a task become one score; the same for tasks without (default: all)",
    )
    parser.add_argument("--pooler", choices=POOLERS, help="in place of the recorded pooler")
    parser.add_argument(
        "--backend",
        choices=("jax", "torch"),
        default="jax",
        help="torch: computed by transformers' own model (default: jax)",
    )
    parser.add_argument(
        "--allow_missing", action="store_true", help="exit with 0 even if the data of a task is missing"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results.json"),
        help="default: results.json; pictures go to report/ beside it",
    )
    return parser.parse_args()


def evaluate(options: argparse.Namespace) -> dict:
    """The content of `results.json`."""
    from diffcse_jax.evaluation import TASKS, expand_groups, missing_files, report, senteval_folder
    from diffcse_jax.evaluation.backends import load_encoder

    names = expand_groups(options.tasks.split(","), options.mode)
    folder = senteval_folder(options.data_dir)
    missing = {name: missing_files(name, folder, options.mode) for name in names}
    encoder = load_encoder(options.model, backend=options.backend, pooler=options.pooler)
    tasks = {name: TASKS[name](folder).run(encoder, options.mode) for name in names if not missing[name]}
    tasks = report.with_aggregation(tasks, options.aggregation)
    return {
        "model": options.model,
        "pooler": encoder.pooler,
        "backend": options.backend,
        "mode": options.mode,
        "aggregation": options.aggregation,
        "tasks": tasks,
        "averages": report.averages(tasks, options.mode),
        "missing": {name: report.missing_reason(paths) for name, paths in missing.items() if paths},
    }


if __name__ == "__main__":
    sys.exit(main())
