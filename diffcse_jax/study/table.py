"""The table of a study: mean and standard deviation of each row, published scores, differences to the first variant."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from diffcse_jax.config import Config, machine_keys
from diffcse_jax.evaluation import results
from diffcse_jax.io import disk_errors, lock, read_json, write_json, write_text
from diffcse_jax.study.checks import DEV_TITLES
from diffcse_jax.study.picture import draw, draw_geometry
from diffcse_jax.study.plan import Plan, Run, differences, of_any_seed
from diffcse_jax.study.runs import NOT_BEGUN, RUN, SAFE, report, results_of, state_of

GEOMETRY = "alignment_uniformity.png"
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
        origins: the models of runs that are no checkpoints, but the start or weights between the two, by label.
        open_runs: the state of runs that are not done, by label.
        missing: reasons why tasks have no score, by task.
        not_official: what is wrong with data of another than the official size, by task.
        overrides: the values from the command line, now or recorded by runs, that change results of trainings.
        finetune_overrides: those that change results of fine-tunings.
    """

    plan: Plan
    scores: dict[str, dict[int | None, Scores]]
    dev_columns: tuple[str, ...]
    poolers: dict[str, str]
    origins: dict[str, str]
    open_runs: dict[str, str]
    missing: dict[str, str]
    not_official: dict[str, str]
    overrides: dict[str, Any]
    finetune_overrides: dict[str, Any]


def read_outcome(plan: Plan) -> Outcome:
    """What the folders of the runs hold."""
    scores: dict[str, dict[int | None, Scores]] = {}
    dev_columns: list[str] = []
    dev_titles: dict[tuple[str, str], str] = {}
    poolers: dict[str, str] = {}
    origins: dict[str, str] = {}
    open_runs: dict[str, str] = {}
    missing: dict[str, str] = {}
    not_official: dict[str, str] = {}
    overrides, finetune_overrides = dict(plan.overrides), dict(plan.finetune_overrides)
    for row, runs in plan.rows.items():
        for run in runs:
            results = results_of(run)
            if results is None:
                open_runs[run.label] = state_of(run)
                continue
            scores.setdefault(row, {})[run.seed] = by_column = _columns_of(run, results, dev_titles)
            dev_columns += [] if run.start else [next(iter(by_column))]
            missing |= results["missing"]
            not_official |= results.get("not_official", {})  # runs scored by earlier versions have none
            if run.seed is None:
                poolers[row] = results["pooler"]
            if "origin" in results:
                origins[run.label] = results["origin"]
            recorded = read_json(run.folder / RUN)["overrides"]
            (finetune_overrides if run.start else overrides).update(recorded)
    changed, changed_tunings = (
        {key: value for key, value in values.items() if key not in machine_keys()}
        for values in (overrides, finetune_overrides)
    )
    columns = tuple(dict.fromkeys(dev_columns))
    return Outcome(plan, scores, columns, poolers, origins, open_runs, missing, not_official, changed, changed_tunings)


def _columns_of(run: Run, results: Mapping[str, Any], titles: dict[tuple[str, str], str]) -> dict[str, float]:
    """Its scores by column: first the dev metric; of a fine-tuning last, since it is the average of the others.

    Scores of a metric on different text, such as that which a row trains on, are in columns of their own.

    Args:
        run: the run.
        results: the content of its `results.json`.
        titles: of the columns of dev metrics so far, by metric and what identifies the text; takes further ones.
    """
    metric, scores = results["metric"], results["scores"]
    if run.start:
        return scores | {metric: results["dev"]}
    title = DEV_TITLES.get(metric, f"dev {metric}")
    text = results.get("dev_text", "")
    known = {text: column for (of, text), column in titles.items() if of == metric}
    if known and ("" in known or not text):  # earlier versions did not record it: taken for the text of the others
        column = next(iter(known.values()))
    else:
        column = titles.setdefault((metric, text), f"{title}, text of {run.row}" if known else title)
    return {column: results["dev"]} | scores


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
        style: one of `results.FORMATS`.
    """
    plan = outcome.plan
    heading = f"{plan.name} ({plan.study.source})" if plan.study.source else plan.name
    tables = [table for rows in plan.groups for table in _tables(outcome, list(rows), style)]
    notes = [_remark(note, style) for note in _notes(outcome)]
    title = f"# {heading}" if style == "markdown" else _remark(heading, style)
    separator = "\n\n" if style == "markdown" else "\n"  # Markdown joins lines that follow one another
    return "\n\n".join([title, *tables, separator.join(notes)]).rstrip() + "\n"


def _tables(outcome: Outcome, rows: Sequence[str], style: str) -> list[str]:
    """The tables of rows that are compared with one another: their scores, and the differences to the first one."""
    sections = _sections(outcome, rows)
    tables = [results.table(["n", *columns], _rows(outcome, rows, columns), style) for columns in sections]
    if differ := _difference_rows(outcome, rows):
        shown = {column for row in differ for column in row.cells}
        ordered = [column for column in ("pairs", *itertools.chain(*sections)) if column in shown]
        about = f"difference to {_first(outcome, rows)} over shared seeds; p: paired t-test, two-sided"
        tables += [_remark(about, style), results.table(ordered, differ, style)]
    return tables


def document(outcome: Outcome) -> dict[str, Any]:
    """The content of `study.json`."""
    plan = outcome.plan
    rows = []
    for row, runs in plan.rows.items():
        seeds = outcome.scores.get(row, {})
        columns = results.by_column(list(seeds.values()))
        first = _first(outcome, next(list(group) for group in plan.groups if row in group))
        before = outcome.scores.get(first, {})
        compared = {column: difference(before, seeds, column) for column in columns if row != first}
        rows.append(
            {
                "row": row,
                "settings": differences(plan.base_of(runs[0]), _recorded(runs)),
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
        "finetune_overrides": outcome.finetune_overrides,
        "rows": rows,
        "origins": outcome.origins,
        "open": outcome.open_runs,
        "missing": outcome.missing,
        "not_official": outcome.not_official,
    }


def write(plan: Plan, workdir: Path) -> Outcome:
    """Writes the tables and the picture of what is done into the study's folder."""
    # Hosts that end at the same time: the last one has read everything.
    with disk_errors(workdir, safe=SAFE), lock(workdir / "table.lock", wait=True):
        outcome = read_outcome(plan)
        for style, name in FILES.items():
            write_text(workdir / name, show(outcome, style))
        write_json(workdir / "study.json", document(outcome))
        pictures = draw_pictures(outcome, workdir)
    report(f"written: {', '.join([*FILES.values(), 'study.json', *pictures])} in {workdir}")
    return outcome


def draw_pictures(outcome: Outcome, folder: Path) -> list[str]:
    """Draws the scores of encoders and of fine-tunings, and alignment and uniformity where they were scored.

    Returns:
        The names of the files.
    """
    names = []
    for rows, name in zip(outcome.plan.groups, ("study.png", "finetuning.png"), strict=False):
        scores = {row: outcome.scores[row] for row in rows if row in outcome.scores}
        draw(_drawn_columns(outcome, list(rows)), scores, outcome.plan.study.published, folder / name)
        names.append(name)
    if draw_geometry(outcome.scores, folder / GEOMETRY):
        names.append(GEOMETRY)
    return names


def _recorded(runs: Sequence[Run]) -> Config:
    """The configuration of the first run of a row that was begun, or else the planned one, without its seed."""
    begun = [run.folder / RUN for run in runs if (run.folder / RUN).is_file()]
    config = Config.from_dict(read_json(begun[0])["config"]) if begun else runs[0].config
    return of_any_seed(config)


def _first(outcome: Outcome, rows: Sequence[str]) -> str:
    """The row that these are compared with: the first one that is trained."""
    return next(row for row in rows if outcome.plan.rows[row][0].seed is not None)


def _sections(outcome: Outcome, rows: Sequence[str]) -> list[list[str]]:
    """The columns of each table; dev scores are in front in the first."""
    scored = [scores for row in rows for scores in outcome.scores.get(row, {}).values()]
    dev = [column for column in outcome.dev_columns if any(column in scores for scores in scored)]
    tests = [{column: score for column, score in scores.items() if column not in dev} for scores in scored]
    first, *others = results.sections(tests) or [[]]
    return [[*dev, *first], *others]


def _drawn_columns(outcome: Outcome, rows: Sequence[str]) -> list[str]:
    """Dev scores and averages over groups of tasks; where there is no such average, all."""
    columns = [column for section in _sections(outcome, rows) for column in section]
    averages = [column for column in columns if column.startswith("average ")]
    return [column for column in columns if column in (*outcome.dev_columns, *averages)] if averages else columns


def _rows(outcome: Outcome, names: Sequence[str], columns: Sequence[str]) -> list[results.Row]:
    """A row for what was measured of each variant, and one for what is published of it in these columns."""
    rows = []
    for row in names:
        seeds = list(outcome.scores.get(row, {}).values())
        rows.append(results.Row(row, {"n": str(len(seeds))} | (results.format_means(seeds) if seeds else {})))
        published = outcome.plan.study.published.get(row, {})
        if not published.keys().isdisjoint(columns):
            rows.append(results.Row(f"{row} (published)", results.format_scores(published)))
    return rows


def _difference_rows(outcome: Outcome, names: Sequence[str]) -> list[results.Row]:
    first = outcome.scores.get(_first(outcome, names), {})
    rows = []
    for row in names:
        seeds = outcome.scores.get(row, {})
        columns = results.by_column(list(seeds.values())) if row != _first(outcome, names) else {}
        found = {column: difference(first, seeds, column) for column in columns}
        cells = {column: each for column, each in found.items() if each}
        if cells:
            pairs = str(max(each.n for each in cells.values()))
            rows.append(results.Row(row, {"pairs": pairs} | {column: str(each) for column, each in cells.items()}))
    return rows


def _notes(outcome: Outcome) -> list[str]:
    """What a reader of the table must know."""
    notes = []
    if outcome.scores:
        notes.append("n: seeds; mean ± standard deviation (of a sample) where there are several")
    plan = outcome.plan
    model = plan.base.model.name_or_path
    notes += [f"{row}: {model} before training, pooler {pooler}" for row, pooler in outcome.poolers.items()]
    if len(plan.groups) > 1:
        tuned = " and ".join(plan.study.finetunings)
        notes.append(f"{tuned}: fine-tuned from the row's encoder; scores x 100 on dev rows of the tasks")
    kinds = {"trainings": outcome.overrides, "fine-tunings": outcome.finetune_overrides}
    for kind, overrides in kinds.items() if len(plan.groups) > 1 else [("runs", outcome.overrides)]:
        if overrides:
            changed = ", ".join(f"{key}={value}" for key, value in overrides.items())
            notes.append(f"all {kind} with {changed}")
    if plan.study.published:
        notes.append(f"published: {plan.study.source}, with its own checkpoints, text and number of steps")
    notes += [f"{label}: {origin}" for label, origin in outcome.origins.items()]
    notes += [f"{task}: no score: {reason}" for task, reason in outcome.missing.items()]
    notes += [f"{task}: not the official data: {reason}" for task, reason in outcome.not_official.items()]
    notes += [f"{label}: {state}" for label, state in outcome.open_runs.items() if state != NOT_BEGUN]
    waiting = [label for label, state in outcome.open_runs.items() if state == NOT_BEGUN]
    return notes + [f"{NOT_BEGUN}: {'; '.join(waiting)}"] * bool(waiting)


def _remark(text: str, style: str) -> str:
    """A line of text between tables; a comment in LaTeX."""
    return f"% {text}" if style == "latex" else text
