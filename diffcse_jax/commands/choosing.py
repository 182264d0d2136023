"""Says how well dev metrics choose among the models of finished runs.

diffcse choosing runs/study --labelled stsb_spearman
diffcse choosing runs/a runs/b --labelled pairs_retrieval:test.tsv

Runs score several metrics at every evaluation where eval.beside names them.
Each is compared with the labelled one: rank correlation, and what is lost
where it chooses the model. A folder stands for all runs in it.
docs/adaptation.md
"""

import argparse
from pathlib import Path

from diffcse_jax.errors import reported_to_user


def main() -> None:
    """The command line."""
    options = parse_arguments()
    with reported_to_user():
        from diffcse_jax.study import choosing

        runs = choosing.read_models(options.run)
        print(choosing.show(runs, options.labelled, options.format), end="")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, nargs="+", metavar="RUN", help="a run's folder, or one with runs in it, such as a study's")
    add("--labelled", required=True, metavar="NAME", help="the dev metric that tells the truth, as the runs name it")
    add("--format", choices=("text", "markdown"), default="text", help="of the table (default: text)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
