"""The table of a study: mean and standard deviation of each row, published scores, differences to the first variant."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from diffcse_jax.config import Config
from diffcse_jax.evaluation import comparison
from diffcse_jax.storage.files import read_json, write_json, write_text
from diffcse_jax.storage.workdir import FREE_ON_RESUME, lock
from diffcse_jax.study.picture import draw
from diffcse_jax.study.plan import DEV_TITLES, Plan, Run, differences
from diffcse_jax.study.runs import NOT_BEGUN, RUN, report, results_of, state_of

FILES = {"text": "study.txt", "markdown": "study.md", "latex": "study.tex"}

Scores = Mapping[str, float]  # of one run, by column


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two rows in one column, over the seeds that both have."""

    mean: float
    n: int
    p: float | None  # of a two-sided paired t-test; None for fewer than two seeds, or where all differ by the same

    def __str__(self) -> str:
        significance = "" if self.p is None else f" (p {self.p:.3f})" if self.p >= 0.001 else " (p < 0.001)"
        return f"{self.mean:+.2f}{significance}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is done of a study.

    Attributes:
        plan: the study.
        scores: of every row that has a run that is done: by seed (None for the start), then column.
        dev_columns: those of dev metrics.
        poolers: of the rows of the start.
        open_runs: the state of runs that are not done, by label.
        missing: reasons why tasks have no score, by task.
        not_official: what is wrong with data of another than the official size, by task.
        overrides: the values from the command line, now or recorded by runs, that change results.
    """

    plan: Plan
    scores: dict[str, dict[int | None, Scores]]
    dev_columns: tuple[str, ...]
    poolers: dict[str, str]
    open_runs: dict[str, str]
    missing: dict[str, str]
    not_official: dict[str, str]
    overrides: dict[str, Any]


def read_outcome(plan: Plan) -> Outcome:
    """What the folders of the runs hold."""
    scores: dict[str, dict[int | None, Scores]] = {}
    dev_columns: list[str] = []
    poolers: dict[str, str] = {}
    open_runs: dict[str, str] = {}
    missing: dict[str, str] = {}
    not_official: dict[str, str] = {}
    overrides = dict(plan.overrides)
    for row, runs in plan.rows.items():
        for run in runs:
            results = results_of(run)
            if results is None:
                open_runs[run.label] = state_of(run)
                continue
            dev = DEV_TITLES.get(results["metric"], f"dev {results['metric']}")
            dev_columns.append(dev)
            scores.setdefault(row, {})[run.seed] = {dev: results["dev"]} | results["scores"]
            missing |= results["missing"]
            not_official |= results.get("not_official", {})  # runs scored by earlier versions have none
            if run.seed is None:
                poolers[row] = results["pooler"]
            overrides |= read_json(run.folder / RUN)["overrides"]
    changed = {key: value for key, value in overrides.items() if key not in FREE_ON_RESUME}
    return Outcome(plan, scores, tuple(dict.fromkeys(dev_columns)), poolers, open_runs, missing, not_official, changed)


def difference(
    first: Mapping[int | None, Scores], other: Mapping[int | None, Scores], column: str
) -> Difference | None:
    """The difference of two rows, `other - first`; None where they share no seed."""
    shared = [seed for seed in other if column in other[seed] and column in first.get(seed, {})]
    if not shared:
        return None
    before, after = ([row[seed][column] for seed in shared] for row in (first, other))
    each = [b - a for a, b in zip(before, after, strict=True)]
    vary = not math.isclose(min(each), max(each), abs_tol=1e-9)  # never true of a single one
    p = float(scipy.stats.ttest_rel(after, before).pvalue) if vary else None
    return Difference(statistics.mean(each), len(each), p)


def show(outcome: Outcome, style: str) -> str:
    """The tables and notes.

    Args:
        outcome: the study.
        style: one of `comparison.FORMATS`.
    """
    plan = outcome.plan
    heading = f"{plan.name} ({plan.study.source})" if plan.study.source else plan.name
    tables = [comparison.table(["n", *columns], _rows(outcome, columns), style) for columns in _sections(outcome)]
    if rows := _difference_rows(outcome):
        columns = list(dict.fromkeys(column for row in rows for column in row.cells))
        ordered = [column for column in ("pairs", *_columns(outcome)) if column in columns]
        tables.append(_remark(f"difference to {_first(outcome)} over shared seeds; p: paired t-test, two-sided", style))
        tables.append(comparison.table(ordered, rows, style))
    notes = [_remark(note, style) for note in _notes(outcome)]
    title = f"# {heading}" if style == "markdown" else _remark(heading, style)
    separator = "\n\n" if style == "markdown" else "\n"  # Markdown joins lines that follow one another
    return "\n\n".join([title, *tables, separator.join(notes)]).rstrip() + "\n"


def document(outcome: Outcome) -> dict[str, Any]:
    """The content of `study.json`."""
    plan = outcome.plan
    first = outcome.scores.get(_first(outcome), {})
    rows = []
    for row, runs in plan.rows.items():
        seeds = outcome.scores.get(row, {})
        columns = comparison.by_column(list(seeds.values()))
        compared = {column: difference(first, seeds, column) for column in columns if row != _first(outcome)}
        rows.append(
            {
                "row": row,
                "settings": differences(plan.base, _recorded(runs)),
                "n": len(seeds),
                "scores": {"-" if seed is None else str(seed): dict(scores) for seed, scores in seeds.items()},
                "mean": {column: statistics.mean(values) for column, values in columns.items()},
                "std": {column: statistics.stdev(values) for column, values in columns.items() if len(values) > 1},
                "published": dict(plan.study.published.get(row, {})),
                "difference": {column: dataclasses.asdict(each) for column, each in compared.items() if each},
            }
        )
    return {
        "study": plan.name,
        "source": plan.study.source,
        "overrides": outcome.overrides,
        "rows": rows,
        "open": outcome.open_runs,
        "missing": outcome.missing,
        "not_official": outcome.not_official,
    }


def write(plan: Plan, workdir: Path) -> Outcome:
    """Writes the tables and the picture of what is done into the study's folder."""
    with lock(workdir / "table.lock", wait=True):  # hosts that end at the same time; the last one has read everything
        outcome = read_outcome(plan)
        for style, name in FILES.items():
            write_text(workdir / name, show(outcome, style))
        write_json(workdir / "study.json", document(outcome))
        draw(_drawn_columns(outcome), outcome.scores, plan.study.published, workdir / "study.png")
    report(f"written: {', '.join([*FILES.values(), 'study.json', 'study.png'])} in {workdir}")
    return outcome


def _recorded(runs: Sequence[Run]) -> Config:
    """The configuration of the first run of a row that was begun, or else the planned one, without its seed."""
    begun = [run.folder / RUN for run in runs if (run.folder / RUN).is_file()]
    config = Config.from_dict(read_json(begun[0])["config"]) if begun else runs[0].config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=Config().train.seed))


def _first(outcome: Outcome) -> str:
    """The row that others are compared with: the first one that is trained."""
    return next(run.row for run in outcome.plan.runs if run.seed is not None)


def _sections(outcome: Outcome) -> list[list[str]]:
    """The columns of each table; dev scores are in front in the first."""
    tests = [
        {column: score for column, score in scores.items() if column not in outcome.dev_columns}
        for seeds in outcome.scores.values()
        for scores in seeds.values()
    ]
    first, *others = comparison.sections(tests) or [[]]
    return [[*outcome.dev_columns, *first], *others]


def _columns(outcome: Outcome) -> list[str]:
    return [column for section in _sections(outcome) for column in section]


def _drawn_columns(outcome: Outcome) -> list[str]:
    """Dev scores and averages; where there is no average, all."""
    columns = _columns(outcome)
    averages = [column for column in columns if column.startswith("average")]
    return [*outcome.dev_columns, *averages] if averages else columns


def _rows(outcome: Outcome, columns: Sequence[str]) -> list[comparison.Row]:
    """A row for what was measured of each variant, and one for what is published of it in these columns."""
    rows = []
    for row in outcome.plan.rows:
        seeds = list(outcome.scores.get(row, {}).values())
        rows.append(comparison.Row(row, {"n": str(len(seeds))} | (comparison.summarised(seeds) if seeds else {})))
        published = outcome.plan.study.published.get(row, {})
        if not published.keys().isdisjoint(columns):
            rows.append(comparison.Row(f"{row} (published)", comparison.formatted(published)))
    return rows


def _difference_rows(outcome: Outcome) -> list[comparison.Row]:
    first = outcome.scores.get(_first(outcome), {})
    rows = []
    for row, seeds in outcome.scores.items():
        columns = comparison.by_column(list(seeds.values())) if row != _first(outcome) else {}
        found = {column: difference(first, seeds, column) for column in columns}
        cells = {column: each for column, each in found.items() if each}
        if cells:
            pairs = str(max(each.n for each in cells.values()))
            rows.append(comparison.Row(row, {"pairs": pairs} | {column: str(each) for column, each in cells.items()}))
    return rows


def _notes(outcome: Outcome) -> list[str]:
    """What a reader of the table must know."""
    notes = []
    if outcome.scores:
        notes.append("n: seeds; mean ± standard deviation (of a sample) where there are several")
    model = outcome.plan.base.model.name_or_path
    notes += [f"{row}: {model} before training, pooler {pooler}" for row, pooler in outcome.poolers.items()]
    if outcome.overrides:
        changed = ", ".join(f"{key}={value}" for key, value in outcome.overrides.items())
        notes.append(f"all runs with {changed}")
    if outcome.plan.study.published:
        notes.append(f"published: {outcome.plan.study.source}, with its own checkpoints, text and number of steps")
    notes += [f"{task}: no score: {reason}" for task, reason in outcome.missing.items()]
    notes += [f"{task}: not the official data: {reason}" for task, reason in outcome.not_official.items()]
    notes += [f"{label}: {state}" for label, state in outcome.open_runs.items() if state != NOT_BEGUN]
    waiting = [label for label, state in outcome.open_runs.items() if state == NOT_BEGUN]
    return notes + [f"{NOT_BEGUN}: {'; '.join(waiting)}"] * bool(waiting)


def _remark(text: str, style: str) -> str:
    """A line of text between tables; a comment in LaTeX."""
    return f"% {text}" if style == "latex" else text
