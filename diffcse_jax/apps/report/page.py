"""Collects what the report shows and renders the page."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from diffcse_jax import __version__
from diffcse_jax.apps import render
from diffcse_jax.apps.report.searches import Comparison, compare, encoders_of, sample_of
from diffcse_jax.config import Config, flat, machine_keys
from diffcse_jax.evaluation.results import compared, task_title
from diffcse_jax.export.card import command_of
from diffcse_jax.hosts import keep_compiled, log_line
from diffcse_jax.io import disk_errors, expand_path, write_text
from diffcse_jax.run_folder.summary import Run, read_runs, readable
from diffcse_jax.training.curves import curves

SECTIONS = {
    "outcome": "Outcome",
    "curves": "Training curves",
    "searches": "Searches before and after",
    "scores": "Test scores",
    "configuration": "Configuration",
}
MISSING = "\N{EN DASH}"

Table = tuple[list[str], list[list[str]]]  # titles and rows


def write_report(models: Sequence[str], output: str = "") -> Path:
    """Write the report of runs, finished or in progress, as one HTML page.

    Args:
        models: Folders of runs.
        output: The page; empty for RUN/report/index.html, or report.html for several runs.

    Returns:
        The path of the page.
    """
    runs = read_runs(models)
    default = runs[0].workdir / "report" / "index.html" if len(runs) == 1 else Path("report.html")
    path = expand_path(output) if output else default
    with disk_errors(path, safe="The runs are unchanged.", instead="name another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_compiled()
        log_line("searching a sample of text with each starting checkpoint and each run")
        comparison = compare(encoders_of(runs), sample_of(runs[0].config))
        write_text(path, render_report(runs, comparison))
    return path


def render_report(runs: Sequence[Run], comparison: Comparison) -> str:
    """Return the page on runs, with searches by their encoders."""
    return render(
        "report.html.j2",
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        sections=SECTIONS,
        runs=runs,
        readable=readable,
        curves=curves(runs),
        comparison=comparison,
        scores=score_tables(runs),
        differences=_differences(runs),
        configurations=[(run.label, command_of(run.config), _settings(run.config)) for run in runs],
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
    )


def score_tables(runs: Sequence[Run]) -> list[Table]:
    """Return tables of test scores, one for each group of tasks."""
    models = [run.results[0] | {"model": str(run.workdir)} for run in runs if run.results]
    return [
        (
            ["model", *map(task_title, columns)],
            [[row.label, *(row.cells.get(column, MISSING) for column in columns)] for row in rows],
        )
        for columns, rows in compared(models, with_published=True)
    ]


def _settings(config: Config) -> dict[str, str]:
    return {key: str(value) for key, value in flat(config.to_dict()).items()}


def _differences(runs: Sequence[Run]) -> Table:
    """Return a table of the keys in which the runs' configurations differ."""
    settings = [_settings(run.config) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each if key not in machine_keys())
    rows = [[key, *(each.get(key, MISSING) for each in settings)] for key in keys]
    return ["", *(run.label for run in runs)], [row for row in rows if len({*row[1:]}) > 1]
