"""Score sentence encoders on SentEval's tasks and on your own files.

python eval.py --model runs/diffcse_base --tasks sts,transfer --data_dir DIR
python eval.py --model runs/seed1 runs/seed2 --tasks sts --published --format markdown
"""

import argparse
import dataclasses
from pathlib import Path

from diffcse_jax.errors import reported_to_user
from diffcse_jax.models.pooling import POOLERS


def main() -> int:
    """Run the command; exit with 0, with 3 if data is missing, or with 2 after an error that the user can fix."""
    options = parse_arguments()
    with reported_to_user():
        from diffcse_jax.evaluation import runner
        from diffcse_jax.hosts import keep_compiled

        keep_compiled()
        settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(runner.Settings)}
        return runner.run(
            options.model,
            runner.Settings(**settings),
            output=options.output,
            with_published=options.published,
            style=options.format,
            allow_missing=options.allow_missing,
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    models = "run folders, checkpoints, Hugging Face or sentence-transformers folders, hub ids, or `minilm`"
    add("--model", required=True, nargs="+", action="extend", help=models)
    tasks = (
        "comma-separated: sts, transfer, full, geometry, retrieval, STS12, MR, ...; for your own tab-separated files "
        "pairs_retrieval:FILE (two texts) and duplicates:FILE (two texts and 0 or 1)"
    )
    add("--tasks", default="sts", help=tasks)
    data = "SentEval's `downstream` folder (default: $DIFFCSE_DATA_DIR/senteval, or the hub's copy if it is not set)"
    add("--data_dir", default="", help=data)
    modes = "dev: score dev splits; fasttest: train cheaper classifiers for transfer tasks (default: test)"
    add("--mode", choices=("test", "fasttest", "dev"), default="test", help=modes)
    aggregation = "how a task's subsets become one score (default: all)"
    add("--aggregation", choices=("all", "mean", "wmean"), default="all", help=aggregation)
    similarity = "similarity of STS pairs (default: cosine)"
    add("--similarity", choices=("cosine", "dot", "euclidean", "manhattan"), default="cosine", help=similarity)
    regression = "also run STSBenchmark-senteval and SICKRelatedness-senteval, supervised as in the original SentEval"
    add("--regression", action="store_true", help=regression)
    add("--pooler", choices=POOLERS, help="replaces the recorded pooler")
    add("--truncate_dim", type=int, help="cut embeddings to this size (default: as recorded)")
    add("--post", metavar="METHOD:FILE", help="transform embeddings by `whitening` or `dcl`, fitted on the file's text")
    add("--post_dimension", type=int, help="target size of whitening (default: the embedding size)")
    add("--queries", type=Path, metavar="FILE", help="lines whose nearest STS-B sentences `retrieval` lists")
    add("--top_k", type=int, default=3, help="sentences that it lists for each query (default: 3)")
    backend = "jax, or torch to compute embeddings with transformers (default: jax)"
    add("--backend", choices=("jax", "torch"), default="jax", help=backend)
    add("--published", action="store_true", help="print published scores above the models' own")
    add("--format", choices=("text", "markdown", "latex"), default="text", help="format of the tables (default: text)")
    add("--allow_missing", action="store_true", help="exit with 0 even if data of a task is missing")
    output = "results file; pictures go to report/ next to it (default: results.json)"
    add("--output", type=Path, default=Path("results.json"), help=output)
    return parser.parse_args()
