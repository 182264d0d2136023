"""The results of a study: `study.json`, tables as text, Markdown and LaTeX, and pictures."""

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from diffcse_jax.apps.study.plan import NOT_STARTED, Plan, Run, differences
from diffcse_jax.config import Config, machine_keys
from diffcse_jax.errors import require_extra
from diffcse_jax.evaluation.results import SHORT_NAMES, Row, by_column, format_means, format_scores, sections, table
from diffcse_jax.io import disk_errors, lock, write_json, write_text

FILES = {"text": "study.txt", "markdown": "study.md", "latex": "study.tex"}
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
        pictures = draw_pictures(summary, workdir)
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
        done = []
        for run in runs:
            results, state = run.look()
            if results:
                done.append((run, results))
                notes += _notes(run, results)
            else:
                states[run.label] = state
        group = groups["finetunings" if runs[0].start else "encoders"]
        group.append(_summarize_row(runs[0], done, group, titles) | {"published": plan.study.published.get(row, {})})
    for name, group in (("trainings", groups["encoders"]), ("fine-tunings", groups["finetunings"])):
        settings = [row["settings"].items() for row in group] or [{}.items()]
        shared = [f"{key}={value}" for key, value in settings[0] if all((key, value) in each for each in settings)]
        if shared:
            notes.append(f"all {name} with {', '.join(shared)}")
    if plan.study.published:
        notes.append(f"published: {plan.study.source}, with its own checkpoints, text and number of steps")
    notes += [f"{label}: {state}" for label, state in states.items() if state != NOT_STARTED]
    waiting = [label for label, state in states.items() if state == NOT_STARTED]
    notes += [f"{NOT_STARTED}: {'; '.join(waiting)}"] * bool(waiting)
    about = {"study": plan.name, "source": plan.study.source, "dev_columns": [*titles.values()]}
    return {**about, **groups, "open": states, "notes": [*dict.fromkeys(notes)]}


def _summarize_row(
    first: Run,
    done: Sequence[tuple[Run, Mapping[str, Any]]],
    before: Sequence[Mapping[str, Any]],
    titles: dict[tuple[str, str], str],
) -> dict[str, Any]:
    """Return the scores and settings of a row, and its differences from the first trained row above it."""
    scores = {"-" if run.seed is None else str(run.seed): _columns(run, results, titles) for run, results in done}
    columns = by_column(list(scores.values()))
    compared: Seeds = next((row["scores"] for row in before if not row["is_start"]), {})
    found = {column: difference(compared, scores, column) for column in columns}
    config = Config.from_dict(done[0][1]["config"]) if done else first.config
    ignored = {"train.seed", *["model.name_or_path"] * bool(first.start), *machine_keys()}
    return {
        "row": first.row,
        "is_start": first.seed is None,
        "settings": {key: value for key, value in differences(first.base, config).items() if key not in ignored},
        "n": len(scores),
        "scores": scores,
        "mean": {column: statistics.mean(values) for column, values in columns.items()},
        "std": {column: statistics.stdev(values) for column, values in columns.items() if len(values) > 1},
        "difference": {column: each for column, each in found.items() if each},
    }


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


def _notes(run: Run, results: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know about the scores of a run."""
    notes = []
    if run.pooler:
        notes.append(f"{run.row}: {run.config.model.name_or_path} before training, pooler {results['pooler']}")
    if run.start:
        notes.append(f"{run.row}: fine-tuned from {run.start.row}; scores x 100 on dev rows of the tasks")
    if "origin" in results:
        notes.append(f"{run.label}: {results['origin']}")
    notes += [f"{task}: no score: {reason}" for task, reason in results["missing"].items()]
    return notes + [f"{task}: not the official data: {how}" for task, how in results["not_official"].items()]


def show(summary: Summary, style: str) -> str:
    """Return the tables and notes in a style of `results.table`. In LaTeX, text between tables is a comment."""
    remark = (lambda text: f"% {text}") if style == "latex" else str
    heading = f"{summary['study']} ({summary['source']})" if summary["source"] else summary["study"]
    parts = [f"# {heading}" if style == "markdown" else remark(heading)]
    for rows in filter(None, (summary["encoders"], summary["finetunings"])):
        columns = _sections(summary, rows)
        parts += [table(["n", *section], _score_rows(rows, section), style) for section in columns]
        compared = [row for row in rows if row["difference"]]
        shown = [column for column in itertools.chain(*columns) if any(column in row["difference"] for row in compared)]
        if compared:
            first = next(row["row"] for row in rows if not row["is_start"])
            parts.append(remark(f"difference to {first} over shared seeds; p: paired t-test, two-sided"))
            lines = []
            for row in compared:
                cells = {column: _format_difference(found) for column, found in row["difference"].items()}
                pairs = max(found["n"] for found in row["difference"].values())
                lines.append(Row(row["row"], {"pairs": str(pairs)} | cells))
            parts.append(table(["pairs", *shown], lines, style))
    separator = "\n\n" if style == "markdown" else "\n"  # Markdown joins lines that follow one another
    parts.append(separator.join(map(remark, summary["notes"])))
    return "\n\n".join(parts) + "\n"


def _format_difference(found: Mapping[str, Any]) -> str:
    significance = "" if found["p"] is None else f" (p {found['p']:.3f})" if found["p"] >= 0.001 else " (p < 0.001)"
    return f"{found['mean']:+.2f}{significance}"


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


def draw_pictures(summary: Summary, folder: Path) -> list[str]:
    """Draw the scores of encoders and fine-tunings, and alignment and uniformity if scored. Return the files' names."""
    figures = {}
    for name, rows in (("study.png", summary["encoders"]), ("finetuning.png", summary["finetunings"])):
        if rows:
            figures[name] = _draw_scores(summary, [row for row in rows if row["n"]])
    if geometry := [row for row in summary["encoders"] if "alignment" in row["mean"]]:
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
    for number, column in enumerate(columns, 1):
        axes = figure.add_subplot(down, across, number, title=SHORT_NAMES.get(column, column))
        for height, row in enumerate(rows):
            scores = [seed[column] for seed in row["scores"].values() if column in seed]
            if scores:
                (points,) = axes.plot(scores, [height] * len(scores), "o", alpha=0.6)
                axes.plot(statistics.mean(scores), height, "|", markersize=16, color=points.get_color())
            if column in row["published"]:
                axes.plot(row["published"][column], height, "D", color="black", fillstyle="none")
        axes.set_yticks(range(len(rows)), [row["row"] for row in rows] if number % across == 1 or across == 1 else [])
        axes.invert_yaxis()  # the first row on top
        axes.grid(axis="x", alpha=0.3)
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
