"""Collects what the report shows and renders the page."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax import __version__
from diffcse_jax.apps import render
from diffcse_jax.apps.report import curves, embeddings
from diffcse_jax.apps.report.embeddings import Comparison
from diffcse_jax.apps.report.runs import MINUS, Run, read_results, read_runs, short2
from diffcse_jax.config import SHIPPED, Config, flat, machine_keys, shipped_config
from diffcse_jax.evaluation import results as evaluation_results
from diffcse_jax.hosts import keep_compiled, log_line
from diffcse_jax.io import disk_errors, expand_path, write_text

SECTIONS = {
    "outcome": "Outcome",
    "curves": "Training curves",
    "embeddings": "Embeddings",
    "searches": "Searches before and after",
    "scores": "Test scores",
    "configuration": "Configuration",
    "environment": "Environment",
}
NOT_A_RECIPE = ("data.train_file", "train.seed")  # keys that do not make a run another recipe
DECIDED = ("auto", "own")  # values that a run replaces by what they mean


def write_report(
    models: Sequence[str], output: str = "", results: Sequence[str] = (), *, skip_models: bool = False
) -> Path:
    """Write the report of runs as one HTML page.

    Args:
        models: Folders of runs, finished or in progress.
        output: The page; empty for RUN/report/index.html, or report.html for several runs.
        results: Files of `diffcse evaluate` with test scores of other models.
        skip_models: Load no model, which leaves out similarities, singular values and searches.

    Returns:
        The path of the page.

    Raises:
        UserError: A run or file cannot be read, or the page cannot be written.
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
        log_line("encoding a sample of text with each starting checkpoint and each run")
        comparison = embeddings.compare(runs)
    page = render_report(runs, comparison, others)
    with disk_errors(path, safe="The runs are unchanged.", instead="name another --output"):
        write_text(path, page)
    return path


def render_report(
    runs: Sequence[Run], comparison: Comparison | None = None, others: Sequence[dict[str, Any]] = (), now: str = ""
) -> str:
    """Return the whole page.

    Args:
        runs: At least one run.
        comparison: Their encoders on a sample of text; None if no model was loaded.
        others: Test scores of models that are not among the runs.
        now: The time of the report; empty for the present time.
    """
    path = curves.path_chart(runs)
    charts = [path] if path.lines else []
    charts += embeddings.embedding_charts(comparison) if comparison else []
    unscored = [run for run in runs if not run.results]
    return render(
        "report.html.j2",
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        sections=SECTIONS,
        runs=runs,
        summary=_summary(runs),
        curves={
            "dev": curves.dev_charts(runs),
            "losses": curves.loss_charts(runs),
            "optimisation": curves.optimisation_charts(runs),
            "others": curves.other_charts(runs),
        },
        comparison=comparison,
        measures=_measures(comparison) if comparison and comparison.models else None,
        embedding_charts=charts,
        searches=_searches(comparison) if comparison and comparison.models else [],
        unscored=_unscored(unscored) if unscored else None,
        scores=score_tables(runs, others),
        differences=_differences(runs),
        configurations=[_configuration(run) for run in runs],
        environments=_environments(runs),
        now=now or datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
    )


def score_tables(runs: Sequence[Run], others: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Return a table of test scores per group of tasks: titles and rows, with published rows first.

    Runs that differ only in their seed also get a row with their mean.
    """
    scored = [run for run in runs if run.results]
    own = [evaluation_results.scores_by_column(run.results[0]) for run in scored]
    measured = [(str(each.get("model")), evaluation_results.scores_by_column(each)) for each in others]
    measured += [(run.label, scores) for run, scores in zip(scored, own, strict=True)]
    rows = [(label, evaluation_results.format_scores(scores)) for label, scores in measured]
    for group in evaluation_results.seed_groups([str(run.workdir) for run in scored]):
        label = f"mean of the seeds of {', '.join(scored[index].label for index in group)}"
        rows.append((label, evaluation_results.format_means([own[index] for index in group])))
    tables = []
    for columns in evaluation_results.sections([scores for _, scores in measured]):
        published = [
            (f"{label} (published)", evaluation_results.format_scores(scores))
            for label, scores in evaluation_results.PUBLISHED
            if not scores.keys().isdisjoint(columns)
        ]
        titles = ["model", *(evaluation_results.SHORT_NAMES.get(column, column) for column in columns)]
        cells = [[label, *(each.get(column, "\N{EN DASH}") for column in columns)] for label, each in published + rows]
        tables.append((titles, cells))
    return tables


def nearest_config(config: Config) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the nearest shipped configuration, and the keys that differ with its value and the run's."""
    files = (*SHIPPED.glob("*.py"), *SHIPPED.glob("base/*.py"))
    names = sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in files if path.name[0] != "_")
    now = flat(config.to_dict())
    changes = {name: _changes(flat(Config.from_dict(shipped_config(name).to_dict()).to_dict()), now) for name in names}
    name = min(names, key=lambda name: sum(key not in NOT_A_RECIPE for key, _, _ in changes[name]))
    return name, changes[name]


def shown(value: Any) -> str:
    """Return a configuration value as it is written on the command line."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)


def _summary(runs: Sequence[Run]) -> list[list[str]]:
    titles = ["run", "state", "dev metric", "before", "after", "change", "model", "time of the steps"]
    rows = [
        [run.label, run.state, run.metric_name, run.shown_before, run.shown_after, run.change, run.model, run.duration]
        for run in runs
    ]
    return [titles, *rows]


def _measures(comparison: Comparison) -> list[list[str]]:
    found = {model.label: embeddings.measures(model, comparison.sample) for model in comparison.models}
    names = list(dict.fromkeys(name for measured in found.values() for name in measured))
    decimals = {"alignment": 3, "uniformity": 3}
    rows = [
        [label, *(f"{measured[name]:.{decimals.get(name, 2)}f}".replace("-", MINUS) for name in names)]
        for label, measured in found.items()
    ]
    return [["model", *names], *rows]


def _searches(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "query": search.query,
            "wanted": search.wanted,
            "hits": {label: [(text, short2(score)) for text, score in hits] for label, hits in search.hits.items()},
        }
        for search in embeddings.searches(comparison)
    ]


def _unscored(runs: Sequence[Run]) -> dict[str, str]:
    workdir = runs[0].workdir
    command = f"diffcse evaluate --model {workdir} --tasks sts --output {workdir}/results.json"
    return {"names": ", ".join(run.label for run in runs), "command": command}


def _differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return the keys in which the runs' configurations differ."""
    values = [flat(run.config.to_dict()) for run in runs]
    keys = [key for key in values[0] if key not in machine_keys() and len({repr(each.get(key)) for each in values}) > 1]
    return [["key", *(run.label for run in runs)], *([key, *(shown(each.get(key)) for each in values)] for key in keys)]


def _configuration(run: Run) -> dict[str, Any]:
    nearest, changes = nearest_config(run.config)
    settings = [[key, shown(value)] for key, value in flat(run.config.to_dict()).items()]
    return {"label": run.label, "nearest": nearest, "changes": changes, "settings": settings}


def _changes(shipped: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (key, shown(shipped[key]), shown(value))
        for key, value in now.items()
        if key not in machine_keys() and key in shipped and shipped[key] not in (value, *DECIDED)
    ]


def _environments(runs: Sequence[Run]) -> list[list[str]]:
    columns = {run.label: run.environment for run in runs if run.environment}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[name, *(column.get(name, "\N{EN DASH}") for column in columns.values())] for name in names]
    return [["", *columns], *rows]
