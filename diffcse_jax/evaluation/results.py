"""Results of an evaluation as tables in text, Markdown or LaTeX, next to published scores."""

import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.evaluation import DEFAULTS
from diffcse_jax.evaluation.retrieval import CHOOSES, CUTOFFS
from diffcse_jax.evaluation.search_collections import COLLECTION
from diffcse_jax.evaluation.senteval import TRANSFER_TASKS
from diffcse_jax.evaluation.sts import STS_TASKS
from diffcse_jax.evaluation.systems import BM25, HYBRID

Results = dict[str, Any]
RECORDED = ("backend", "mode", "aggregation", "post")  # settings kept with results
GROUPS = {
    "sts": tuple(task.name for task in STS_TASKS),
    "transfer": tuple(task.name for task in TRANSFER_TASKS),
}

# A task's column shows the first of these scores that the task has.
SCORES = ("spearman", "acc", "devacc", CHOOSES, "mrr")
PROBES = {
    "geometry": ("alignment", "uniformity"),
    "retrieval": tuple(f"recall@{k}" for k in CUTOFFS),
}
SHORT_NAMES = {"STSBenchmark": "STS-B", "SICKRelatedness": "SICK-R"} | {
    f"average {group}": "average" for group in GROUPS
}
_DECIMALS = {"alignment": 3, "uniformity": 3, "n": 0, "ntrain": 0, "ndev": 0, "ntest": 0}


class TableRow(NamedTuple):
    """A row of a table: its label, and the text of each column that has a value."""

    label: str
    cells: dict[str, str]


def _published() -> dict[str, dict[str, float]]:
    by_label: dict[str, dict[str, float]] = {}
    published = Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    for group, rows in tomllib.loads(published).items():
        for row in rows:
            scores = row["scores"]
            if group in GROUPS:
                scores = dict(zip((*GROUPS[group], f"average {group}"), scores, strict=True))
            by_label.setdefault(row["label"], {}).update(scores)
    return by_label


PUBLISHED = _published()  # by the name of a model: its scores by column


def scores_by_column(results: Results) -> dict[str, float]:
    """Return the scores that have a column in tables."""
    tasks = results["tasks"]
    columns = {}
    for name, scores in tasks.items():
        if shown := [scores[key] for key in SCORES if key in scores]:
            columns[name] = shown[0]
    columns |= {
        f"average {group}": mean for group, mean in results["averages"].items() if mean is not None
    }
    for name, scores in tasks.items():
        if HYBRID in scores:
            columns |= {f"{name} + {BM25}": scores[HYBRID], f"{name} {BM25}": scores[BM25]}
    return columns | {
        key: tasks[task][key] for task, keys in PROBES.items() if task in tasks for key in keys
    }


def sections(scores: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Return the columns of each table.

    First come each group's scored tasks and average, then all other tasks.
    """
    present = dict.fromkeys(column for columns in scores for column in columns)
    groups = [[*names, f"average {group}"] for group, names in GROUPS.items()]
    others = [column for column in present if not any(column in group for group in groups)]
    tables = [[column for column in group if column in present] for group in groups]
    return [columns for columns in (*tables, others) if columns]


def by_column(seeds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of the columns that all seeds have."""
    columns = seeds[0] if seeds else {}
    return {
        column: [seed[column] for seed in seeds]
        for column in columns
        if all(column in seed for seed in seeds)
    }


def decimals(column: str) -> int:
    """Return how many decimals tables show of a score."""
    score, *_ = column.split(" ")  # such as `uniformity (last)`
    return _DECIMALS.get(score, 2)


def format_scores(scores: Mapping[str, float]) -> dict[str, str]:
    """Return the scores as text, with the decimals of their columns."""
    return {column: f"{score:.{decimals(column)}f}" for column, score in scores.items()}


def format_means(seeds: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return mean ± standard deviation of the columns that all seeds have.

    For a single seed, they are its scores.
    """
    columns = by_column(seeds)
    means = format_scores({column: statistics.mean(values) for column, values in columns.items()})
    if len(seeds) == 1:
        return means
    deviations = format_scores(
        {column: statistics.stdev(values) for column, values in columns.items()}
    )
    return {column: f"{means[column]} ± {deviations[column]}" for column in columns}


def task_title(name: str) -> str:
    """Return a task's short name; for a task on the user's own file its kind, folder and file."""
    kind, _, file = name.partition(":")
    if file:
        end = next((end for end in (" + BM25", " BM25") if file.endswith(end)), "")
        path = Path(file.removesuffix(end))
        title = "/".join(path.parts[-2:] or Path.cwd().parts[-1:])
        if kind != COLLECTION:  # which is a folder, whose name may have a point
            title = title.removesuffix(path.suffix)
        return f"{kind} {title}{end}"
    for task, short in SHORT_NAMES.items():
        if name == task or name.startswith(f"{task} "):
            return short + name.removeprefix(task)
    return name


def table(
    columns: Sequence[str], rows: Iterable[TableRow], style: str = "text", labels: str = "model"
) -> str:
    """Return rows below a line of titles, as `text`, `markdown` or `latex`.

    LaTeX needs the package booktabs.
    """
    titles = [labels, *map(task_title, columns)]
    lines = [
        titles,
        *([row.label, *(row.cells.get(column, "-") for column in columns)] for row in rows),
    ]
    if style == "latex":
        escapes = {character: f"\\{character}" for character in "_%&#${}"}
        escaped = str.maketrans(escapes | {"±": r"$\pm$", "<": "$<$", "~": r"\textasciitilde{}"})
        cells = [[cell.translate(escaped) for cell in line] for line in lines]
        head, *body = (" & ".join(line) + r" \\" for line in cells)
        begin = rf"\begin{{tabular}}{{l{'r' * len(columns)}}}"
        return "\n".join(
            [begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
        )
    least = 0
    if style == "markdown":
        lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
        least = 2  # of "-:", because a Markdown column needs a dash
    first, *widths = (max(least, *map(len, column)) for column in zip(*lines, strict=True))
    padded = [[line[0].ljust(first), *map(str.rjust, line[1:], widths)] for line in lines]
    if style == "text":
        return "\n".join("  ".join(line).rstrip() for line in padded)
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def compared(
    models: Sequence[Results], *, with_published: bool
) -> list[tuple[list[str], list[TableRow]]]:
    """Return the columns and rows of tables: poolers and tasks, published scores and each model."""
    scores = [scores_by_column(results) for results in models]
    measured = [
        TableRow(_label(results), format_scores(row) | {"pooler": results["pooler"]})
        for results, row in zip(models, scores, strict=True)
    ]
    tables = []
    for columns in sections(scores):
        published = [
            TableRow(f"{label} (published)", format_scores(row))
            for label, row in PUBLISHED.items()
            if with_published and not row.keys().isdisjoint(columns)
        ]
        tables.append((["pooler", *columns], published + measured))
    return tables


def compare(models: Sequence[Results], *, with_published: bool, style: str) -> str:
    """Return the tables of `compared` in a style of `table`."""
    return "\n\n".join(
        table(*each, style) for each in compared(models, with_published=with_published)
    )


def details(results: Results) -> str:
    """Return all scores of a model, and what a reader must know about them, one line for each."""
    head = f"{_label(results)}, pooler {results['pooler']}"
    for name in RECORDED:
        if name in results and results[name] != getattr(DEFAULTS, name):
            head += f", {name} {results[name]}"
    lines = [head]
    for name, scores in results["tasks"].items():
        title = task_title(name)
        numbers = {key: value for key, value in scores.items() if isinstance(value, int | float)}
        numbers |= {"dev spearman": scores["dev"]["spearman"]} if "dev" in scores else {}
        shown = [f"{key} {score}" for key, score in format_scores(numbers).items()]
        lines.append(f"{title}: {', '.join(shown)}")
        if other := scores.get("against"):
            difference = f"{other['difference']:+.2f} against {other['run']} ({other[CHOOSES]:.2f})"
            interval = f"95% interval {other['low']:+.2f} to {other['high']:+.2f}"
            lines.append(
                f"{title}: {CHOOSES} {difference}, {interval}, p = {other['p']:.4f} (randomisation "
                "test)"
            )
        for example in scores.get("examples", ()):
            lines += [
                f"  {example['query']}",
                *(f"    {score:.2f} {text}" for text, score in example["hits"]),
            ]
    lines += [
        f"{task_title(name)}: not the official data: {why}"
        for name, why in results["not_official"].items()
    ]
    by_reason: dict[str, list[str]] = {}
    for name, why in results["missing"].items():
        by_reason.setdefault(why, []).append(task_title(name))
    lines += [f"{', '.join(names)}: missing: {why}" for why, names in by_reason.items()]
    return "\n".join(lines)


def _label(results: Results) -> str:
    label = results["model"]
    if size := results.get("truncate_dim"):
        label += f", {size} dimensions"
    if not_official := results.get("not_official"):
        label += f" (not the official data: {', '.join(map(task_title, not_official))})"
    return label
