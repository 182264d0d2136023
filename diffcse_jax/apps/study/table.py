"""The tables of a study as text, Markdown and LaTeX, and its pictures."""

import itertools
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from diffcse_jax.errors import MissingPackageError, require_extra
from diffcse_jax.evaluation.results import (
    TableRow,
    by_column,
    decimals,
    format_means,
    format_scores,
    sections,
    table,
    task_title,
)
from diffcse_jax.io import replace_file, write_json, write_text

FILES = {"text": "study.txt", "markdown": "study.md", "latex": "study.tex"}
PICTURES = {"encoders": "study.png", "finetunings": "finetuning.png"}  # of both groups of rows

LAST = " (last)"  # ends the columns of last checkpoints
ACCURACY = re.compile("accuracy|share")  # in the names of what training logs
POWER = 0.8  # the share of studies that see a true difference
MOST_SEEDS = 1000
FEWEST_PAIRS = 5  # seeds of both rows: fewer tell too little about how much differences vary

Summary = dict[str, Any]  # the content of study.json
# The scores of a row by seed ("-" for the starting checkpoint) and column.
Seeds = Mapping[str, Mapping[str, float]]


def write(summary: Summary, workdir: Path) -> None:
    """Write `study.json`, the tables and the pictures into the study's folder."""
    for style, name in FILES.items():
        write_text(workdir / name, show(summary, style))
    write_json(workdir / "study.json", summary)
    # A starting checkpoint has no seeds, and is often so far off that these would become one point.
    scored = {
        name: [row for row in summary[group] if row["n"] and not row["is_start"]]
        for group, name in PICTURES.items()
    }
    pictures = {}
    try:
        pictures = {name: _draw_scores(summary, rows) for name, rows in scored.items() if rows}
    except MissingPackageError as error:  # the tables are there
        print(f"notice: no pictures: {error}", file=sys.stderr)
    for name, figure in pictures.items():
        with replace_file(workdir / name) as file:
            figure.savefig(file, dpi=120)
    # `log_line` would ask JAX for its devices, which may belong to another process.
    print(
        f"wrote {', '.join([*FILES.values(), 'study.json', *pictures])} in {workdir}",
        file=sys.stderr,
    )


def show(summary: Summary, style: str) -> str:
    """Return the tables and notes in a style of `results.table`.

    In LaTeX, text between tables is a comment.
    """
    remark = (lambda text: f"% {text}") if style == "latex" else str
    heading = f"{summary['study']} ({summary['source']})" if summary["source"] else summary["study"]
    parts = [f"# {heading}" if style == "markdown" else remark(heading)]
    for rows in filter(None, (summary[group] for group in PICTURES)):
        columns = _sections(summary, rows)
        parts += [table(["n", *section], _score_rows(rows, section), style) for section in columns]
        if compared := _compared(summary, rows):
            first = next(row["row"] for row in rows if not row["is_start"])
            parts.append(
                remark(
                    f"mean difference to {first}, or to the row that is named, over shared seeds, "
                    "with its 95% interval (paired t-test); needed, from "
                    f"{FEWEST_PAIRS} shared seeds on: the number of seeds with which 80% of "
                    "studies would find the difference in the last column significant"
                )
            )
            parts += _difference_tables(compared, columns, style)
        if training := _training(rows, style):
            parts.append(remark("accuracies in training x 100, mean over the last steps"))
            parts.append(training)
    # Markdown joins lines that follow one another.
    separator = "\n\n" if style == "markdown" else "\n"
    parts.append(separator.join(map(remark, summary["notes"])))
    return "\n\n".join(parts) + "\n"


def differences(first: Seeds, other: Seeds) -> dict[str, dict[str, Any]]:
    """Return the `difference` between two rows in each column that they share seeds of."""
    by_name = {column: difference(first, other, column) for column in by_column([*other.values()])}
    return {column: each for column, each in by_name.items() if each}


def difference(first: Seeds, other: Seeds, column: str) -> dict[str, Any] | None:
    """Return the mean difference `other - first` in a column, or None if the rows share no seed.

    Returns:
        `mean` and the number `n` of shared seeds. If there are several seeds, and their differences
        are not all the same, also the bounds `low` and `high` of the 95% interval and the p-value
        `p`, both by the paired t-test (two-sided). With at least `FEWEST_PAIRS` seeds, also
        `needed`, the number of seeds that a difference of this size needs (`seeds_needed`).
    """
    shared = [seed for seed in other if column in other[seed] and column in first.get(seed, {})]
    if not shared:
        return None
    before, after = ([row[seed][column] for seed in shared] for row in (first, other))
    each = [b - a for a, b in zip(before, after, strict=True)]
    result: dict[str, Any] = {"mean": statistics.mean(each), "n": len(each)}
    if math.isclose(min(each), max(each), abs_tol=1e-9):
        return result
    test = scipy.stats.ttest_rel(after, before)
    interval = test.confidence_interval(0.95)
    result |= {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}
    if len(each) >= FEWEST_PAIRS:
        result["needed"] = seeds_needed(result["mean"], statistics.stdev(each))
    return result


def seeds_needed(mean: float, deviation: float) -> int | None:
    """Return the number of seeds with which four of five studies see a difference.

    The test is a paired t-test, two-sided, at 5%.

    Args:
        mean: The true mean of the differences between rows with the same seed.
        deviation: Their standard deviation.

    Returns:
        The number; None if it is above `MOST_SEEDS`.
    """
    effect = abs(mean) / deviation
    for count in range(2, MOST_SEEDS + 1):
        critical = scipy.stats.t.ppf(0.975, count - 1)
        seen = scipy.stats.nct.sf(critical, count - 1, effect * math.sqrt(count))
        if seen >= POWER:
            return count
    return None


def _sections(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the columns of each table. Dev scores come first."""
    scored = [scores for row in rows for scores in row["scores"].values()]
    dev = [
        column for column in summary["dev_columns"] if any(column in scores for scores in scored)
    ]
    tests = [
        {column: score for column, score in scores.items() if column not in dev}
        for scores in scored
    ]
    first, *others = sections(tests) or [[]]
    last = [column for column in itertools.chain(*others) if column.endswith(LAST)]
    others = [[column for column in each if column not in last] for each in others]
    return [[*dev, *first], *filter(None, (*others, last))]


def _training(rows: Sequence[Mapping[str, Any]], style: str) -> str:
    """Return a table of the accuracies that training logged, x 100, or an empty string."""
    means = {}
    for row in rows:
        seeds = row["training"].values()
        means[row["row"]] = [
            {name: 100 * value for name, value in seed.items() if ACCURACY.search(name)}
            for seed in seeds
        ]
    lines = [TableRow(row, format_means(seeds)) for row, seeds in means.items() if any(seeds)]
    names = dict.fromkeys(name for line in lines for name in line.cells)
    return table([*names], lines, style) if names else ""


def _score_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[TableRow]:
    lines = []
    for row in rows:
        lines.append(
            TableRow(row["row"], {"n": str(row["n"])} | format_means([*row["scores"].values()]))
        )
        if not row["published"].keys().isdisjoint(columns):
            lines.append(TableRow(f"{row['row']} (published)", format_scores(row["published"])))
    return lines


def _compared(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the rows with a difference to the first one, and then the study's own comparisons."""
    names = {row["row"] for row in rows}
    others = [
        pair | {"row": f"{pair['row']}, against {pair['against']}"}
        for pair in summary["comparisons"]
        if pair["row"] in names
    ]
    return [row for row in [*rows, *others] if row["difference"]]


def _difference_tables(
    compared: Sequence[Mapping[str, Any]], columns: Sequence[Sequence[str]], style: str
) -> list[str]:
    """Return tables of the columns that have a difference.

    The first has the seeds that are `needed` to see the difference in its last column. That is the
    average of the tasks, if there is one.
    """
    known = {column for row in compared for column in row["difference"]}
    shown = [[column for column in section if column in known] for section in columns]
    first, *others = filter(None, shown)
    lines = [_difference_row(row, first[-1]) for row in compared]
    headers = [["pairs", "needed", *first], *(["pairs", *section] for section in others)]
    return [table(header, lines, style) for header in headers]


def _difference_row(row: Mapping[str, Any], decisive: str) -> TableRow:
    differences = row["difference"]
    cells = {"pairs": str(max(each["n"] for each in differences.values()))}
    if "needed" in (last := differences.get(decisive, {})):
        cells["needed"] = str(last["needed"] or f"> {MOST_SEEDS}")
    for column, values in differences.items():
        mean, *bounds = (
            _signed(values[name], decimals(column))
            for name in ("mean", "low", "high")
            if name in values
        )
        cells[column] = f"{mean} ({' to '.join(bounds)})" if bounds else mean
    return TableRow(row["row"], cells)


def _signed(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0 turns -0.0 into 0.0


def _draw_scores(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a panel per column, except for those of last checkpoints.

    It has a point per seed, a line at the mean and a diamond at the published score.
    """
    columns = [
        column for column in itertools.chain(*_sections(summary, rows)) if not column.endswith(LAST)
    ]
    averages = [column for column in columns if column.startswith("average ")]
    if averages:
        columns = [column for column in columns if column in (*summary["dev_columns"], *averages)]
    across = min(len(columns), 4)
    down = math.ceil(len(columns) / across)
    size = (2 + 3.2 * across, down * (1.2 + 0.32 * len(rows)))
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    for number, column in enumerate(columns):
        axes = figure.add_subplot(down, across, number + 1, title=task_title(column))
        for height, row in enumerate(rows):
            scores = [seed[column] for seed in row["scores"].values() if column in seed]
            if scores:
                (points,) = axes.plot(scores, [height] * len(scores), "o", alpha=0.6)
                axes.plot(
                    statistics.mean(scores), height, "|", markersize=16, color=points.get_color()
                )
            if column in row["published"]:
                axes.plot(row["published"][column], height, "D", color="black", fillstyle="none")
        axes.set_yticks(
            range(len(rows)), [row["row"] for row in rows] if number % across == 0 else []
        )
        axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
        axes.grid(axis="x", alpha=0.3)
    return figure
