"""Compare training with the authors' procedure in PyTorch: dev curves, and differences of means.

    python -m benchmarks.against_authors --ours STUDY.jsonl --torch SIMCSE.jsonl DIFFCSE.jsonl \
        --output FOLDER

STUDY.jsonl is the record of `diffcse study`, and the others are records of
`benchmarks.torch_training`, from the same start and text. A record of PyTorch belongs to the row
that its `--rows` names, in the same order. FOLDER gets `against_authors.json` and
`against_authors.svg`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import scipy.stats

STYLES = {"ours": "C0", "torch": "C1"}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ours_of(record: Sequence[Mapping[str, Any]], row: str) -> dict[str, list[Any]]:
    """Return the curves and scores of a row of a study's record, in the order of seeds."""
    entries = [entry for entry in record if entry["row"] == row]
    by_seed = {entry["seed"]: entry["results"] for entry in entries}
    if len(by_seed) < len(entries):
        sys.exit(f"the study's record has a seed of {row!r} twice. Keep the line of one setting")
    results = [by_seed[seed] for seed in sorted(by_seed)]
    return {
        "curves": [each["curve"] for each in results],
        "dev": [each["dev"] for each in results],
        "test": [each["scores"]["STSBenchmark"] for each in results],
        "test, last": [each["scores"]["STSBenchmark (last)"] for each in results],
    }


def torch_of(record: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the same of a record of `benchmarks.torch_training`."""
    return {
        "curves": [each["dev"] for each in record],
        "dev": [each["best"]["dev"] for each in record],
        "test": [each["best"]["test"]["STSBenchmark"] for each in record],
        "test, last": [each["last"]["test"]["STSBenchmark"] for each in record],
    }


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the difference of means with its 95% interval, by Welch's t-test."""
    interval = scipy.stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    return {"mean": mean, "low": float(interval.low), "high": float(interval.high)}


def draw(rows: Mapping[str, Mapping[str, Mapping[str, list[Any]]]]) -> matplotlib.figure.Figure:
    """Draw the dev curves of each row, a thin line for each seed and a thick one for their mean."""
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(rows), 3.2), layout="constrained")
    for number, (row, sides) in enumerate(rows.items()):
        axes = figure.add_subplot(1, len(rows), number + 1, title=row, xlabel="step")
        axes.set_ylabel("STS-B dev, Spearman x 100")
        for side, found in sides.items():
            label = {"ours": "diffcse_jax", "torch": "PyTorch, the authors' procedure"}[side]
            for curve in found["curves"]:
                axes.plot(*zip(*curve, strict=True), color=STYLES[side], alpha=0.25, linewidth=0.8)
            shared = sorted(set.intersection(*({step for step, _ in c} for c in found["curves"])))
            means = [
                np.mean([dict(map(tuple, curve))[step] for curve in found["curves"]])
                for step in shared
            ]
            axes.plot(shared, means, color=STYLES[side], linewidth=2, label=label)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def main() -> None:
    """Compare the records, print a table and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", type=Path, required=True, help="record of the study")
    parser.add_argument("--torch", type=Path, nargs="+", required=True, help="records of PyTorch")
    parser.add_argument("--rows", nargs="+", default=["SimCSE", "DiffCSE"], help="rows of --torch")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    options = parser.parse_args()
    if len(options.rows) != len(options.torch):
        sys.exit(f"--rows: expected {len(options.torch)} rows, one for each record of --torch")
    record = read(options.ours)
    rows = {
        row: {"ours": ours_of(record, row), "torch": torch_of(read(path))}
        for row, path in zip(options.rows, options.torch, strict=True)
    }
    for (row, sides), path in zip(rows.items(), options.torch, strict=True):
        for side, record_path in (("ours", options.ours), ("torch", path)):
            if (count := len(sides[side]["dev"])) < 2:
                sys.exit(f"{record_path}: {count} runs of {row!r}. A comparison needs two seeds")
    results: dict[str, Any] = {"command": sys.argv[1:]}
    for row, sides in rows.items():
        results[row] = {side: found | {"curves": None} for side, found in sides.items()}
        for score in ("dev", "test", "test, last"):
            ours, theirs = (sides[side][score] for side in STYLES)
            found = difference(ours, theirs)
            results[row][f"difference, {score}"] = found
            print(
                f"{row:10} {score:10}  ours {statistics.fmean(ours):.2f} ± "
                f"{statistics.stdev(ours):.2f} ({len(ours)})  PyTorch "
                f"{statistics.fmean(theirs):.2f} ± {statistics.stdev(theirs):.2f} ({len(theirs)})  "
                f"difference {found['mean']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"
            )
    options.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1)
    (options.output / "against_authors.json").write_text(text, encoding="utf-8")
    draw(rows).savefig(options.output / "against_authors.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
