"""Writes what was run and what came of it as one HTML page that needs no network.

diffcse report runs/quickstart
diffcse report runs/seed-1 runs/seed-2 --output seeds.html
diffcse report runs/mine --results results.json --skip_models

A run in progress has a report, too. Test scores that `diffcse evaluate` wrote
to RUN/results.json (--output) are shown beside published ones. docs/report.md
"""

import argparse
import sys
from pathlib import Path

from diffcse_jax.errors import reported_to_user


def main() -> None:
    """The command line."""
    options = parse_arguments()
    with reported_to_user():
        from diffcse_jax.hosts import keep_compiled
        from diffcse_jax.io import disk_errors, expand_path, write_text
        from diffcse_jax.report import page, runs, sample, vectors

        found = runs.read_runs(options.run)
        others = [each for file in options.results for each in runs.results_in(expand_path(file))]
        output = expand_path(options.output) if options.output else default_output(found[0].workdir, len(found))
        with disk_errors(output, safe="The runs are as they were.", instead="name another --output"):
            output.parent.mkdir(parents=True, exist_ok=True)
        compared = None
        if not options.skip_models:
            keep_compiled()
            text = sample.sample_of(found[0].config)
            print(f"encoding {len(text.texts)} texts with the start and each run ...", file=sys.stderr)
            compared = page.Compared(text, *vectors.placed(vectors.loaders(found), text))
        with disk_errors(output, safe="The runs are as they were.", instead="name another --output"):
            write_text(output, page.report(found, compared, others))
    print(output)


def default_output(workdir: Path, count: int) -> Path:
    """The page of one run in its workdir, that of several in the present folder."""
    return workdir / "report" / "index.html" if count == 1 else Path("report.html")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, nargs="+", metavar="RUN", help="a run's folder, finished or in progress")
    output = "the page (default: RUN/report/index.html, of several runs report.html)"
    add("--output", type=Path, metavar="FILE.html", help=output)
    results = "results.json of `diffcse evaluate` for other models, to stand beside those of the runs"
    add("--results", type=Path, nargs="+", default=[], metavar="FILE", help=results)
    add("--skip_models", action="store_true", help="load no model: no similarities, singular values and searches")
    return parser.parse_args()


if __name__ == "__main__":
    main()
