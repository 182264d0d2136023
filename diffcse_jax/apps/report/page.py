"""Collects what the report shows and renders the page."""

import datetime
from pathlib import Path

from diffcse_jax import __version__
from diffcse_jax.apps import render
from diffcse_jax.apps.report.searches import Comparison, compare, encoders_of, sample_of
from diffcse_jax.config import flat
from diffcse_jax.evaluation.results import compared, task_title
from diffcse_jax.export.card import command_of
from diffcse_jax.hosts import keep_compiled, log_line
from diffcse_jax.io import disk_errors, expand_path, write_text
from diffcse_jax.run_folder.summary import Run, curves, read_run, readable

SECTIONS = {
    "outcome": "Outcome",
    "curves": "Training curves",
    "searches": "Searches before and after",
    "scores": "Test scores",
    "configuration": "Configuration",
}


def write_report(model: str, output: str = "") -> Path:
    """Write the report of a run, finished or in progress, as one HTML page.

    Args:
        model: The run's folder.
        output: The page; empty for RUN/report/index.html.

    Returns:
        The path of the page.
    """
    run = read_run(model)
    path = expand_path(output) if output else run.workdir / "report" / "index.html"
    with disk_errors(path, safe="The run is unchanged.", instead="name another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_compiled()
        log_line("searching a sample of text with the starting checkpoint and the run")
        write_text(path, render_report(run, compare(encoders_of(run), sample_of(run.config))))
    return path


def render_report(run: Run, comparison: Comparison) -> str:
    """Return the page on a run, with searches by its encoders."""
    return render(
        "report.html.j2",
        sections=SECTIONS,
        run=run,
        readable=readable,
        curves=curves(run),
        comparison=comparison,
        scores=score_tables(run),
        command=command_of(run.config),
        settings=flat(run.config.to_dict()),
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
    )


def score_tables(run: Run) -> list[tuple[list[str], list[list[str]]]]:
    """Return the titles and rows of tables of test scores, one for each group of tasks."""
    models = [run.results[0] | {"model": str(run.workdir)}] if run.results else []
    return [
        (
            ["model", *map(task_title, columns)],
            [[row.label, *(row.cells.get(column, "\N{EN DASH}") for column in columns)] for row in rows],
        )
        for columns, rows in compared(models, with_published=True)
    ]
