"""Scores sentence encoders on SentEval's tasks.

python eval.py --model runs/diffcse_base --tasks sts,transfer --data_dir DIR
python eval.py --model runs/seed1 runs/seed2 --tasks sts --published --format markdown
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from diffcse_jax.errors import ConfigError, reported_to_user
from diffcse_jax.groups import POOLERS


def main() -> int:
    """Runs the tasks, writes `results.json` and prints tables.

    Returns:
        Exit code: 0, or 3 where data was missing; an error that the user can correct exits with 2.
    """
    options = parse_arguments()
    with reported_to_user():
        from diffcse_jax.evaluation import comparison, geometry, report, runner
        from diffcse_jax.hosts import keep_compiled

        keep_compiled()
        if options.published and options.mode == "dev":
            raise ConfigError("--published scores are those of test splits; leave out --mode dev")
        report.check_writable(options.output)
        fields = dataclasses.fields(runner.Settings)
        settings = runner.Settings(**{field.name: getattr(options, field.name) for field in fields})
        results = runner.evaluate(
            options.model, settings, keep=lambda done: report.write(comparison.document(done), options.output)
        )
        print(comparison.show(results, with_published=options.published, style=options.format))
        if pictures := geometry.draw(results, options.output.parent / "report"):
            print("pictures:", *pictures, file=sys.stderr)
    missing = any(result["missing"] for result in results)
    return 3 if missing and not options.allow_missing else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    models = "workdirs, checkpoints of them, Hugging Face or sentence-transformers folders, hub ids, `minilm`"
    add("--model", required=True, nargs="+", action="extend", help=models)
    tasks = (
        "sts, transfer, full, geometry, retrieval, STS12, MR, ..., and for tab-separated files of your own "
        "pairs_retrieval:FILE (two texts) and duplicates:FILE (two texts and 0 or 1), separated by commas"
    )
    add("--tasks", default="sts", help=tasks)
    data = "SentEval's `downstream` folder (default: $DIFFCSE_DATA_DIR/senteval, else the suite of the hub)"
    add("--data_dir", default="", help=data)
    modes = "dev: scores of the dev splits; fasttest: cheaper classifiers for the transfer tasks (default: test)"
    add("--mode", choices=("test", "fasttest", "dev"), default="test", help=modes)
    aggregation = "how the subsets of a task become one score (default: all)"
    add("--aggregation", choices=("all", "mean", "wmean"), default="all", help=aggregation)
    add("--similarity", choices=("cosine", "dot", "euclidean", "manhattan"), default="cosine", help="of STS pairs")
    regression = "also STSBenchmark-senteval and SICKRelatedness-senteval, supervised as in the original SentEval"
    add("--regression", action="store_true", help=regression)
    add("--pooler", choices=POOLERS, help="in place of the recorded pooler")
    add("--truncate_dim", type=int, help="cut vectors to their first so many numbers (default: as recorded)")
    add("--post", metavar="METHOD:FILE", help="transform vectors by `whitening` or `dcl`, fitted on the file's text")
    add("--post_dimension", type=int, help="target dimension of whitening (default: all)")
    add("--queries", type=Path, metavar="FILE", help="lines whose best hits among STS-B sentences `retrieval` tells")
    add("--top_k", type=int, default=3, help="hits for each of them (default: 3)")
    add("--backend", choices=("jax", "torch"), default="jax", help="torch: computed by transformers' own model")
    add("--published", action="store_true", help="put published scores above the models' own")
    add("--format", choices=("text", "markdown", "latex"), default="text", help="of the tables (default: text)")
    add("--allow_missing", action="store_true", help="exit with 0 even if the data of a task is missing")
    add("--output", type=Path, default=Path("results.json"), help="pictures go to report/ beside it")
    return parser.parse_args()
