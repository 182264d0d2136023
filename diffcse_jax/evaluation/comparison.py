"""Several models in one table: a row a model, a column a task; seeds of one configuration as mean and deviation."""

import dataclasses
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.evaluation import GROUPS, own_pairs, published, report
from diffcse_jax.evaluation.report import Results
from diffcse_jax.io import expand_path, find_run, read_json

FORMATS = ("text", "markdown", "latex")
# A task's column shows the first of these that it has.
SCORES = ("spearman", "acc", "devacc", "mrr", "average_precision")
POOLER = "pooler"  # a column where the models of a table have several
PROBES = {
    "alignment": ("geometry", "alignment"),
    "uniformity": ("geometry", "uniformity"),
    "recall@1": ("retrieval", "recall@1"),
    "recall@5": ("retrieval", "recall@5"),
    "recall@10": ("retrieval", "recall@10"),
}
SHORT_NAMES = {
    "STSBenchmark": "STS-B",
    "SICKRelatedness": "SICK-R",
    "average sts": "average",
    "average transfer": "average",
    "STSBenchmark-senteval": "STS-B regression",
    "SICKRelatedness-senteval": "SICK-R regression",
    "STSBenchmark-finetune": "STS-B finetune",
    "SICKRelatedness-finetune": "SICK-R finetune",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table: its label, and the text of each column that has a value."""

    label: str
    cells: dict[str, str]


def show(models: Sequence[Results], *, with_published: bool, style: str) -> str:
    """The output of eval.py: as text, each model in detail; and a comparison, where there is something to compare."""
    parts = [report.table(results) for results in models] if style == "text" else []
    if len(models) > 1 or with_published or style != "text":
        parts.append(compare(models, with_published=with_published, style=style))
    return "\n\n".join(parts)


def compare(models: Sequence[Results], *, with_published: bool, style: str) -> str:
    """The tables of the groups, and of other tasks, that these results hold.

    Args:
        models: results of models for the same tasks.
        with_published: put the published rows of a group first.
        style: one of `FORMATS`.
    """
    scores = [scores_by_column(results) for results in models]
    measured = [Row(_label(results), formatted(columns)) for results, columns in zip(models, scores, strict=True)]
    poolers = [[results["pooler"]] for results in models]
    for group in seed_groups([results["model"] for results in models]):
        label = f"mean of {len(group)} seeds: {_in_braces([models[index]['model'] for index in group])}"
        measured.append(Row(label, summarised([scores[index] for index in group])))
        poolers.append([models[index]["pooler"] for index in group])
    told = [POOLER] if len({pooler for row in poolers for pooler in row}) > 1 else []
    for row, names in zip(measured, poolers, strict=True):
        row.cells[POOLER] = ", ".join(dict.fromkeys(names))
    tables = []
    for columns in ([*told, *section] for section in sections(scores)):
        rows = [
            Row(f"{row.label} (published)", formatted(row.scores))
            for row in published.ROWS
            if with_published and not row.scores.keys().isdisjoint(columns)
        ]
        tables.append(table(columns, rows + measured, style))
    return "\n\n".join(tables)


def _label(results: Results) -> str:
    """The model, and of which tasks its scores are not to be compared with published ones."""
    tasks = ", ".join(_title(name) for name in results.get("not_official", {}))
    return report.label(results) + (f" (not the official data: {tasks})" if tasks else "")


def _title(column: str) -> str:
    return SHORT_NAMES.get(column, own_pairs.title(column))


def document(models: Sequence[Results]) -> dict[str, Any]:
    """The content of `results.json`: the results of one model, or those of several under `models`."""
    return dict(models[0]) if len(models) == 1 else {"models": list(models), "seeds": seeds_of(models)}


def seeds_of(models: Sequence[Results]) -> list[dict[str, Any]]:
    """Mean and standard deviation of each column for the models that differ in their seed alone."""
    scores = [scores_by_column(results) for results in models]
    return [
        {
            "models": [models[index]["model"] for index in group],
            "mean": {column: statistics.mean(values) for column, values in columns.items()},
            "std": {column: statistics.stdev(values) for column, values in columns.items()},
        }
        for group in seed_groups([results["model"] for results in models])
        for columns in [by_column([scores[index] for index in group])]
    ]


def seed_groups(models: Sequence[str]) -> list[list[int]]:
    """Positions of models whose runs have the same configuration but for `train.seed`.

    Models are workdirs, checkpoints or exports in them. Of several that have the same seed, such as a workdir and its
    export, the first is taken.
    """
    groups: dict[str, dict[str, int]] = {}
    for index, model in enumerate(models):
        if run := _configuration_and_seed(expand_path(model)):
            configuration, seed = run
            groups.setdefault(configuration, {}).setdefault(seed, index)
    return [list(seeds.values()) for seeds in groups.values() if len(seeds) > 1]


def scores_by_column(results: Results) -> dict[str, float]:
    """The scores that have a column."""
    tasks = results["tasks"]
    columns = {
        name: next(scores[key] for key in SCORES if key in scores)
        for name, scores in tasks.items()
        if any(key in scores for key in SCORES)
    }
    columns |= {f"average {group}": mean for group, mean in results["averages"].items() if mean is not None}
    return columns | {column: tasks[task][key] for column, (task, key) in PROBES.items() if task in tasks}


def table(columns: Sequence[str], rows: Iterable[Row], style: str, labels: str = "model") -> str:
    """The rows, with one line of titles, that of their labels first, as text, Markdown or LaTeX (package booktabs)."""
    titles = [labels, *(_title(column) for column in columns)]
    body = [[row.label, *(row.cells.get(column, "-") for column in columns)] for row in rows]
    if style == "latex":
        return _latex(titles, body)
    widths = [max(map(len, column)) for column in zip(titles, *body, strict=True)]
    lines = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in (titles, *body)
    ]
    if style == "text":
        return "\n".join("  ".join(line).rstrip() for line in lines)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _latex(titles: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        escaped = (re.sub(r"[_%&{}]", r"\\\g<0>", cell) for cell in cells)
        return " & ".join(cell.replace("±", r"$\pm$").replace("<", "$<$") for cell in escaped) + r" \\"

    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(titles) - 1)}}}",
            r"\toprule",
            line(titles),
            r"\midrule",
            *map(line, body),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def sections(scores: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """The columns of each table: a group's tasks that were scored, with their average, and the tasks of no group."""
    present = dict.fromkeys(column for columns in scores for column in columns)
    groups = [[*GROUPS[group], f"average {group}"] for group in ("sts", "transfer")]
    others = [column for column in present if not any(column in group for group in groups)]
    tables = [[column for column in group if column in present] for group in groups]
    return [columns for columns in (*tables, others) if columns]


def formatted(scores: Mapping[str, float]) -> dict[str, str]:
    """The scores as text, with the decimals of their columns."""
    return {column: f"{score:.{_decimals(column)}f}" for column, score in scores.items()}


def summarised(seeds: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Mean ± standard deviation of the columns that all seeds have; of one seed its scores."""
    if len(seeds) == 1:
        return formatted(seeds[0])
    return {
        column: f"{statistics.mean(values):.{_decimals(column)}f} ± {statistics.stdev(values):.{_decimals(column)}f}"
        for column, values in by_column(seeds).items()
    }


def by_column(seeds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of those columns that all seeds have."""
    columns = seeds[0] if seeds else {}
    return {column: [seed[column] for seed in seeds] for column in columns if all(column in seed for seed in seeds)}


def _decimals(column: str) -> int:
    return 3 if column in ("alignment", "uniformity") else 2


def _configuration_and_seed(path: Path) -> tuple[str, str] | None:
    """The configuration and the seed of the run that the path belongs to, as text; None if it belongs to none."""
    workdir = find_run(path) or find_run(path.parent)
    if workdir is None:
        return None
    config = read_json(workdir / "config.json")
    seed = config["train"].pop("seed", None) if isinstance(config.get("train"), dict) else None
    return json.dumps(config, sort_keys=True), json.dumps(seed)


def _in_braces(names: Sequence[str]) -> str:
    """Names as a shell writes them together: `runs/base_{1,2,3}/export`."""
    start = _shared(names)
    rest = [name[len(start) :] for name in names]
    end = _shared([name[::-1] for name in rest])[::-1]
    return f"{start}{{{','.join(name.removesuffix(end) for name in rest)}}}{end}"


def _shared(names: Sequence[str]) -> str:
    """The beginning that all names have, up to a separator."""
    pieces = zip(*(re.split(r"(?<=[/_.-])", name) for name in names), strict=False)
    return "".join(each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, pieces))
