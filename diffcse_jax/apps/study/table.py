"""The results of a study: `study.json`, tables as text, Markdown and LaTeX, and pictures."""

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from diffcse_jax.apps.study.plan import DEV_TITLES, NOT_STARTED, Plan, Run, differences, read_record
from diffcse_jax.config import machine_keys
from diffcse_jax.errors import require_extra
from diffcse_jax.evaluation.results import SHORT_NAMES, Row, by_column, format_means, format_scores, sections, table
from diffcse_jax.io import disk_errors, lock, write_json, write_text

FILES = {"text": "study.txt", "markdown": "study.md", "latex": "study.tex"}
SAFE = "What the runs have saved is not affected."

Summary = dict[str, Any]  # the content of study.json
Seeds = Mapping[str, Mapping[str, float]]  # the scores of a row by seed ("-" for the starting checkpoint) and column


def log_line(message: str) -> None:
    """Print a line for the user. It does not ask JAX for its devices, which belong to the runs."""
    print(message, file=sys.stderr, flush=True)


def write(plan: Plan, workdir: Path) -> Summary:
    """Write the tables and pictures of what is done into the study's folder."""
    # Several hosts may finish at the same time. The last one to write has read everything.
    with disk_errors(workdir, safe=SAFE), lock(workdir / "table.lock", wait=True):
        summary = summarize(plan)
        for style, name in FILES.items():
            write_text(workdir / name, show(summary, style))
        write_json(workdir / "study.json", summary)
        pictures = draw_pictures(summary, workdir)
    log_line(f"wrote {', '.join([*FILES.values(), 'study.json', *pictures])} in {workdir}")
    return summary


def summarize(plan: Plan) -> Summary:
    """Return the scores of all runs that are done, and the states of the others: the content of `study.json`."""
    about: dict[str, dict[str, Any]] = {name: {} for name in ("start", "origins", "open", "missing", "not_official")}
    about |= {"overrides": {}, "finetune_overrides": {}}
    scores: dict[str, dict[str, dict[str, float]]] = {row: {} for row in plan.rows}
    titles: dict[tuple[str, str], str] = {}  # the columns of dev metrics by metric and text
    for run in itertools.chain(*plan.rows.values()):
        results = run.results()
        recorded = run.overrides if results is None else read_record(run.folder)["overrides"]
        shown = {key: value for key, value in recorded.items() if key not in machine_keys()}
        about["finetune_overrides" if run.start else "overrides"] |= shown
        if results is None:
            about["open"][run.label] = run.state()
            continue
        scores[run.row]["-" if run.seed is None else str(run.seed)] = _columns(run, results, titles)
        about["missing"] |= results["missing"]
        about["not_official"] |= results["not_official"]
        if "origin" in results:
            about["origins"][run.label] = results["origin"]
        if run.seed is None:
            about["start"][run.row] = f"{run.config.model.name_or_path} before training, pooler {results['pooler']}"
    rows = []
    for is_tuned in (False, True):
        group = {row: runs[0] for row, runs in plan.rows.items() if bool(runs[0].start) == is_tuned}
        first = next((row for row, run in group.items() if run.seed is not None), "")
        for row, run in group.items():
            seeds, columns = scores[row], by_column(list(scores[row].values()))
            compared = {column: difference(scores[first], seeds, column) for column in columns if row != first}
            settings = differences(run.base, run.config)
            rows.append(
                {
                    "row": row,
                    "compared_with": first,
                    "settings": {key: value for key, value in settings.items() if key != "train.seed"},
                    "n": len(seeds),
                    "scores": seeds,
                    "mean": {column: statistics.mean(values) for column, values in columns.items()},
                    "std": {column: statistics.stdev(values) for column, values in columns.items() if len(values) > 1},
                    "published": dict(plan.study.published.get(row, {})),
                    "difference": {column: each for column, each in compared.items() if each},
                }
            )
    names = {"study": plan.name, "source": plan.study.source, "finetunings": list(plan.study.finetunings)}
    return {**names, "rows": rows, "dev_columns": [*titles.values()], **about}


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


def _format_difference(found: Mapping[str, Any]) -> str:
    significance = "" if found["p"] is None else f" (p {found['p']:.3f})" if found["p"] >= 0.001 else " (p < 0.001)"
    return f"{found['mean']:+.2f}{significance}"


def show(summary: Summary, style: str) -> str:
    """Return the tables and notes in a style of `results.table`. In LaTeX, text between tables is a comment."""
    remark = (lambda text: f"% {text}") if style == "latex" else str
    heading = f"{summary['study']} ({summary['source']})" if summary["source"] else summary["study"]
    parts = [f"# {heading}" if style == "markdown" else remark(heading)]
    for rows in _groups(summary):
        columns = _sections(summary, rows)
        parts += [table(["n", *section], _score_rows(rows, section), style) for section in columns]
        compared = [row for row in rows if row["difference"]]
        shown = [column for column in itertools.chain(*columns) if any(column in row["difference"] for row in compared)]
        if compared:
            first = rows[0]["compared_with"]
            parts.append(remark(f"difference to {first} over shared seeds; p: paired t-test, two-sided"))
            lines = []
            for row in compared:
                cells = {column: _format_difference(found) for column, found in row["difference"].items()}
                pairs = max(found["n"] for found in row["difference"].values())
                lines.append(Row(row["row"], {"pairs": str(pairs)} | cells))
            parts.append(table(["pairs", *shown], lines, style))
    separator = "\n\n" if style == "markdown" else "\n"  # Markdown joins lines that follow one another
    parts.append(separator.join(map(remark, _notes(summary))))
    return "\n\n".join(parts).rstrip() + "\n"


def _groups(summary: Summary) -> list[list[dict[str, Any]]]:
    """Return the rows that are compared with one another: encoders, then fine-tunings."""
    return [list(rows) for _, rows in itertools.groupby(summary["rows"], lambda row: row["compared_with"])]


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
        seeds = list(row["scores"].values())
        lines.append(Row(row["row"], {"n": str(row["n"])} | (format_means(seeds) if seeds else {})))
        if not row["published"].keys().isdisjoint(columns):
            lines.append(Row(f"{row['row']} (published)", format_scores(row["published"])))
    return lines


def _notes(summary: Summary) -> list[str]:
    """Return what a reader of the tables must know."""
    is_scored = any(row["n"] for row in summary["rows"])
    notes = ["n: seeds; mean ± standard deviation (of a sample) over several seeds"] * is_scored
    notes += [f"{row}: {about}" for row, about in summary["start"].items()]
    tuned = summary["finetunings"]
    if tuned:
        notes.append(f"{' and '.join(tuned)}: fine-tuned from the row's encoder; scores x 100 on dev rows of the tasks")
    kinds = {"trainings" if tuned else "runs": "overrides", "fine-tunings": "finetune_overrides"}
    for kind, name in kinds.items():
        if summary[name]:
            notes.append(f"all {kind} with {', '.join(f'{key}={value}' for key, value in summary[name].items())}")
    if any(row["published"] for row in summary["rows"]):
        notes.append(f"published: {summary['source']}, with its own checkpoints, text and number of steps")
    for name, text in (("origins", ""), ("missing", "no score: "), ("not_official", "not the official data: ")):
        notes += [f"{what}: {text}{about}" for what, about in summary[name].items()]
    notes += [f"{label}: {state}" for label, state in summary["open"].items() if state != NOT_STARTED]
    waiting = [label for label, state in summary["open"].items() if state == NOT_STARTED]
    return notes + [f"{NOT_STARTED}: {'; '.join(waiting)}"] * bool(waiting)


def draw_pictures(summary: Summary, folder: Path) -> list[str]:
    """Draw the scores of encoders and fine-tunings, and alignment and uniformity if scored. Return the files' names."""
    figures = {}
    for name, rows in zip(("study.png", "finetuning.png"), _groups(summary), strict=False):
        figures[name] = _draw_scores(summary, [row for row in rows if row["n"]])
    if geometry := [row for row in summary["rows"] if "alignment" in row["mean"]]:
        figures["alignment_uniformity.png"] = _draw_geometry(geometry)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
    return list(figures)


def _new_figure(width: float, height: float) -> Any:
    return require_extra("matplotlib.figure", "report").Figure(figsize=(width, height), layout="constrained")


def _draw_scores(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a panel per column: a point per seed, a line at the mean, a diamond at the published score."""
    columns = list(itertools.chain(*_sections(summary, rows)))
    averages = [column for column in columns if column.startswith("average ")]
    columns = [c for c in columns if c in (*summary["dev_columns"], *averages)] if averages else columns
    across = min(max(len(columns), 1), 4)
    down = max(math.ceil(len(columns) / across), 1)
    figure = _new_figure(2 + 3.2 * across, down * (1.2 + 0.32 * max(len(rows), 1)))
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for axes in panels[len(columns) :]:
        axes.set_axis_off()
    for axes, column in zip(panels, columns, strict=False):
        for height, row in enumerate(rows):
            scores = [seed[column] for seed in row["scores"].values() if column in seed]
            if scores:
                (points,) = axes.plot(scores, [height] * len(scores), "o", alpha=0.6)
                axes.plot(statistics.mean(scores), height, "|", markersize=16, color=points.get_color())
            if column in row["published"]:
                axes.plot(row["published"][column], height, "D", color="black", fillstyle="none")
        axes.set(title=SHORT_NAMES.get(column, column))
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(rows)), [row["row"] for row in rows])
    panels[0].invert_yaxis()  # the first row on top
    return figure


def _draw_geometry(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw mean alignment over mean uniformity."""
    figure = _new_figure(7.5, max(4.0, 0.8 + 0.21 * len(rows)))
    axes = figure.subplots()
    for number, row in enumerate(rows):
        color, marker = f"C{number % 10}", "osD^v<>P*X"[number // 10 % 10]
        axes.plot(row["mean"]["uniformity"], row["mean"]["alignment"], marker, color=color, label=row["row"])
    axes.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)", title="STS-B")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
