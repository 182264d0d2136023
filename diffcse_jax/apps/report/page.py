"""Collects what the report shows and renders the page."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax import __version__
from diffcse_jax.apps import render
from diffcse_jax.apps.report.searches import Comparison, compare, encoders_of, sample_of
from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.evaluation.results import compared, task_title
from diffcse_jax.export.card import command_of
from diffcse_jax.hosts import keep_compiled, log_line
from diffcse_jax.io import disk_errors, expand_path, write_text
from diffcse_jax.run_folder.summary import Run, read_results, read_runs, readable
from diffcse_jax.training.curves import curves

SECTIONS = {
    "outcome": "Outcome",
    "curves": "Training curves",
    "searches": "Searches before and after",
    "scores": "Test scores",
    "configuration": "Configuration",
    "environment": "Environment",
}


def write_report(
    models: Sequence[str], output: str = "", results: Sequence[str] = (), *, skip_models: bool = False
) -> Path:
    """Write the report of runs as one HTML page.

    Args:
        models: Folders of runs, finished or in progress.
        output: The page; empty for RUN/report/index.html, or report.html for several runs.
        results: Files of `diffcse evaluate` with test scores of other models.
        skip_models: Load no model, which leaves out searches.

    Returns:
        The path of the page.
    """
    runs = read_runs(models)
    others = [each for file in results for each in read_results(expand_path(file))]
    default = runs[0].workdir / "report" / "index.html" if len(runs) == 1 else Path("report.html")
    path = expand_path(output) if output else default
    with disk_errors(path, safe="The runs are unchanged.", instead="name another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        comparison = None
        if not skip_models:
            keep_compiled()
            log_line("searching a sample of text with each starting checkpoint and each run")
            comparison = compare(encoders_of(runs), sample_of(runs[0].config))
        write_text(path, render_report(runs, comparison, others))
    return path


def render_report(
    runs: Sequence[Run], comparison: Comparison | None = None, others: Sequence[dict[str, Any]] = (), now: str = ""
) -> str:
    """Return the page on runs, with searches by their encoders and the test scores of other models."""
    return render(
        "report.html.j2",
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        sections=SECTIONS,
        runs=runs,
        readable=readable,
        curves=curves(runs),
        comparison=comparison,
        scores=score_tables(runs, others),
        differences=_differences(runs),
        configurations=[(run.label, command_of(run.config), _settings(run.config)) for run in runs],
        environments=_side_by_side({run.label: run.environment for run in runs if run.environment}),
        now=now or datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
    )


def score_tables(runs: Sequence[Run], others: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Return the titles and rows of tables of test scores, one for each group of tasks."""
    models = [*others, *(run.results[0] | {"model": str(run.workdir)} for run in runs if run.results)]
    return [
        (
            ["model", *map(task_title, columns)],
            [[row.label, *(row.cells.get(column, "\N{EN DASH}") for column in columns)] for row in rows],
        )
        for columns, rows in compared(models, with_published=True)
    ]


def _settings(config: Config) -> dict[str, str]:
    return {key: str(value) for key, value in flat(config.to_dict()).items()}


def _side_by_side(columns: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Return a table with a column per mapping and a row per key: the titles, then the rows."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(column.get(name, "\N{EN DASH}") for column in columns.values())] for name in names]
    return [["", *columns], *rows]


def _differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table of the keys in which the runs' configurations differ."""
    titles, *rows = _side_by_side({run.label: _settings(run.config) for run in runs})
    return [titles, *(row for row in rows if row[0] not in machine_keys() and len(set(row[1:])) > 1)]
