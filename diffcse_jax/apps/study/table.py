"""The results of a study: `study.json`, tables as text, Markdown and LaTeX, and pictures."""

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from diffcse_jax.apps.study.plan import NOT_STARTED, Plan, Run
from diffcse_jax.errors import require_extra
from diffcse_jax.evaluation.results import SHORT_NAMES, Row, by_column, format_means, format_scores, sections, table
from diffcse_jax.io import disk_errors, lock, write_json, write_text

FILES = {"text": "study.txt", "markdown": "study.md", "latex": "study.tex"}
PICTURES = {"encoders": "study.png", "finetunings": "finetuning.png"}  # of both groups of rows
SAFE = "What the runs have saved is not affected."
DEV_TITLES = {"stsb_spearman": "STS-B dev"}

Summary = dict[str, Any]  # the content of study.json
Seeds = Mapping[str, Mapping[str, float]]  # the scores of a row by seed ("-" for the starting checkpoint) and column


def write(plan: Plan, workdir: Path) -> Summary:
    """Write the tables and pictures of what is done into the study's folder."""
    # Several hosts may finish at the same time. The last one to write has read everything.
    with disk_errors(workdir, safe=SAFE), lock(workdir / "table.lock", wait=True):
        summary = summarize(plan)
        for style, name in FILES.items():
            write_text(workdir / name, show(summary, style))
        write_json(workdir / "study.json", summary)
        scored = {name: [row for row in summary[group] if row["n"]] for group, name in PICTURES.items()}
        pictures = {name: _draw_scores(summary, rows) for name, rows in scored.items() if rows}
        for name, figure in pictures.items():
            figure.savefig(workdir / name, dpi=120)
    # `log_line` would ask JAX for its devices, which may belong to another process.
    print(f"wrote {', '.join([*FILES.values(), 'study.json', *pictures])} in {workdir}", file=sys.stderr)
    return summary


def summarize(plan: Plan) -> Summary:
    """Return the scores of all runs that are done, and the states of the others: the content of `study.json`."""
    groups: dict[str, list[dict[str, Any]]] = {"encoders": [], "finetunings": []}
    states: dict[str, str] = {}  # of the runs that are not done
    notes = ["n: seeds; mean ± standard deviation (of a sample) over several seeds"]
    titles: dict[tuple[str, str], str] = {}  # the columns of dev metrics by metric and text
    for row, runs in plan.rows.items():
        scores: dict[str, dict[str, float]] = {}
        for run in runs:
            results, state = run.look()
            if results:
                scores["-" if run.seed is None else str(run.seed)] = _columns(run, results, titles)
                notes += results["notes"]
            else:
                states[run.label] = state
        group = groups["finetunings" if runs[0].start else "encoders"]
        compared: Seeds = next((each["scores"] for each in group if not each["is_start"]), {})
        columns = by_column(list(scores.values()))
        found = {column: difference(compared, scores, column) for column in columns}
        group.append(
            {
                "row": row,
                "is_start": runs[0].seed is None,
                "n": len(scores),
                "scores": scores,
                "mean": {column: statistics.mean(values) for column, values in columns.items()},
                "std": {column: statistics.stdev(values) for column, values in columns.items() if len(values) > 1},
                "difference": {column: each for column, each in found.items() if each},  # from the first trained row
                "published": plan.study.published.get(row, {}),
            }
        )
    if plan.study.published:
        notes.append(f"published: {plan.study.source}, with its own checkpoints, text and number of steps")
    notes += [f"{label}: {state}" for label, state in states.items() if state != NOT_STARTED]
    if waiting := [label for label, state in states.items() if state == NOT_STARTED]:
        notes.append(f"{NOT_STARTED}: {'; '.join(waiting)}")
    about = {"study": plan.name, "source": plan.study.source, "dev_columns": [*titles.values()]}
    return {**about, **groups, "open": states, "notes": [*dict.fromkeys(notes)]}


def _columns(run: Run, results: Mapping[str, Any], titles: dict[tuple[str, str], str]) -> dict[str, float]:
    """Return the scores by column: the dev metric first, but the average of a fine-tuning last.

    Rows that measure a dev metric on different text get different columns. New columns are added to `titles`.
    """
    metric, dev = results["metric"], results["dev"]
    if run.start:
        return results["scores"] | {metric: dev}
    title = DEV_TITLES.get(metric, f"dev {metric}")
    is_first = all(known != metric for known, _ in titles)
    column = titles.setdefault((metric, results["dev_text"]), title if is_first else f"{title}, text of {run.row}")
    return {column: dev} | results["scores"]


def difference(first: Seeds, other: Seeds, column: str) -> dict[str, Any] | None:
    """Return the mean difference `other - first` in a column, or None if the rows share no seed.

    Returns:
        `mean`, the number `n` of shared seeds, and the p-value `p` of a two-sided paired t-test. `p` is None for a
        single seed, or if all seeds differ by the same amount.
    """
    shared = [seed for seed in other if column in other[seed] and column in first.get(seed, {})]
    if not shared:
        return None
    before, after = ([row[seed][column] for seed in shared] for row in (first, other))
    each = [b - a for a, b in zip(before, after, strict=True)]
    is_constant = math.isclose(min(each), max(each), abs_tol=1e-9)
    p = None if is_constant else float(scipy.stats.ttest_rel(after, before).pvalue)
    return {"mean": statistics.mean(each), "n": len(each), "p": p}


def show(summary: Summary, style: str) -> str:
    """Return the tables and notes in a style of `results.table`. In LaTeX, text between tables is a comment."""
    remark = (lambda text: f"% {text}") if style == "latex" else str
    heading = f"{summary['study']} ({summary['source']})" if summary["source"] else summary["study"]
    parts = [f"# {heading}" if style == "markdown" else remark(heading)]
    for rows in filter(None, (summary[group] for group in PICTURES)):
        columns = _sections(summary, rows)
        parts += [table(["n", *section], _score_rows(rows, section), style) for section in columns]
        if compared := [row for row in rows if row["difference"]]:
            first = next(row["row"] for row in rows if not row["is_start"])
            parts.append(remark(f"difference to {first} over shared seeds; p: paired t-test, two-sided"))
            shown = [name for name in itertools.chain(*columns) if any(name in row["difference"] for row in compared)]
            parts.append(table(["pairs", *shown], map(_difference_row, compared), style))
    separator = "\n\n" if style == "markdown" else "\n"  # Markdown joins lines that follow one another
    parts.append(separator.join(map(remark, summary["notes"])))
    return "\n\n".join(parts) + "\n"


def _sections(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the columns of each table. Dev scores come first."""
    scored = [scores for row in rows for scores in row["scores"].values()]
    dev = [column for column in summary["dev_columns"] if any(column in scores for scores in scored)]
    tests = [{column: score for column, score in scores.items() if column not in dev} for scores in scored]
    first, *others = sections(tests) or [[]]
    return [[*dev, *first], *others]


def _score_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[Row]:
    lines = []
    for row in rows:
        lines.append(Row(row["row"], {"n": str(row["n"])} | format_means([*row["scores"].values()])))
        if not row["published"].keys().isdisjoint(columns):
            lines.append(Row(f"{row['row']} (published)", format_scores(row["published"])))
    return lines


def _difference_row(row: Mapping[str, Any]) -> Row:
    def text(found: Mapping[str, Any]) -> str:
        significance = "" if found["p"] is None else f" (p {found['p']:.3f})" if found["p"] >= 0.001 else " (p < 0.001)"
        return f"{found['mean']:+.2f}{significance}"

    pairs = max(found["n"] for found in row["difference"].values())
    return Row(row["row"], {"pairs": str(pairs)} | {name: text(found) for name, found in row["difference"].items()})


def _draw_scores(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a panel per column: a point per seed, a line at the mean, a diamond at the published score."""
    columns = list(itertools.chain(*_sections(summary, rows)))
    averages = [column for column in columns if column.startswith("average ")]
    columns = [c for c in columns if c in (*summary["dev_columns"], *averages)] if averages else columns
    across = min(len(columns), 4)
    down = math.ceil(len(columns) / across)
    size = (2 + 3.2 * across, down * (1.2 + 0.32 * len(rows)))
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    for number, column in enumerate(columns):
        axes = figure.add_subplot(down, across, number + 1, title=SHORT_NAMES.get(column, column))
        for height, row in enumerate(rows):
            scores = [seed[column] for seed in row["scores"].values() if column in seed]
            if scores:
                (points,) = axes.plot(scores, [height] * len(scores), "o", alpha=0.6)
                axes.plot(statistics.mean(scores), height, "|", markersize=16, color=points.get_color())
            if column in row["published"]:
                axes.plot(row["published"][column], height, "D", color="black", fillstyle="none")
        axes.set_yticks(range(len(rows)), [row["row"] for row in rows] if number % across == 0 else [])
        axes.invert_yaxis()  # the first row on top
        axes.grid(axis="x", alpha=0.3)
    return figure
