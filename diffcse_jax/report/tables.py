"""Tables of a report: scores beside published ones, settings that differ, environments."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffcse_jax.config import SHIPPED, Config, flat, shipped_config
from diffcse_jax.evaluation import results
from diffcse_jax.evaluation.results import PUBLISHED, SHORT_NAMES, Results
from diffcse_jax.pages.markup import Markup, table
from diffcse_jax.report.runs import Run

PLACES = frozenset({"data.cache_dir", "eval.data_dir"})  # keys that say where files are, and change no result
OWN = PLACES | {"data.train_file", "train.seed", "distributed"}  # keys that make no run another recipe
DECIDED = ("auto", "own")  # values that a run replaces by what they mean for it


def of_scores(runs: Sequence[Run], others: Sequence[Results]) -> list[Markup]:
    """The scores of tasks beside the published ones, a table for each group of tasks.

    Args:
        runs: those that were evaluated have a row each, and seeds of one configuration their mean.
        others: results of other models, such as the start.
    """
    evaluated = [run for run in runs if run.results]
    measured = [(results.model_label(each), results.scores_by_column(each)) for each in others]
    own = [results.scores_by_column(run.results[0]) for run in evaluated]
    measured += [(run.label, scores) for run, scores in zip(evaluated, own, strict=True)]
    rows = [results.Row(label, results.format_scores(scores)) for label, scores in measured]
    for group in results.seed_groups([str(run.workdir) for run in evaluated]):
        label = f"mean of the seeds of {', '.join(evaluated[index].label for index in group)}"
        rows.append(results.Row(label, results.format_means([own[index] for index in group])))
    tables = []
    for columns in results.sections([scores for _, scores in measured]):
        above = [
            results.Row(f"{label} (published)", results.format_scores(published))
            for label, published in PUBLISHED
            if not published.keys().isdisjoint(columns)
        ]
        titles = ["model", *(SHORT_NAMES.get(column, column) for column in columns)]
        cells = [[row.label, *(row.cells.get(column, "\N{EN DASH}") for column in columns)] for row in (*above, *rows)]
        tables.append(table(titles, cells, numbers=True, own=[row.label for row in rows]))
    return tables


def of_differences(runs: Sequence[Run]) -> tuple[Markup | None, int]:
    """The keys in which the runs' configurations differ, and how many these are."""
    values = [flat(run.config.to_dict()) for run in runs]
    keys = [key for key in values[0] if key not in PLACES and len({repr(each[key]) for each in values}) > 1]
    rows = [[key, *(shown(each[key]) for each in values)] for key in keys]
    return (table(["key", *(run.label for run in runs)], rows) if rows else None), len(keys)


def of_shipped(config: Config) -> tuple[str, list[tuple[str, str, str]]]:
    """The shipped configuration that is nearest, and the keys that differ: (key, shipped value, the run's)."""
    names = sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in _shipped_files())
    differences = {name: _differences(flat(shipped(name).to_dict()), flat(config.to_dict())) for name in names}
    name = min(names, key=lambda name: sum(key not in OWN for key, _, _ in differences[name]))
    return name, differences[name]


@functools.cache
def shipped(name: str) -> Config:
    """A configuration of `configs/`."""
    return Config.from_dict(shipped_config(name).to_dict())


def of_configuration(config: Config) -> Markup:
    """All keys."""
    return table(["key", "value"], [[key, shown(value)] for key, value in flat(config.to_dict()).items()])


def of_environments(runs: Sequence[Run]) -> Markup | None:
    """Versions, devices and times of each run's last start; None where none is recorded."""
    columns = {run.label: _environment(run) for run in runs if run.starts}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[name, *(column.get(name, "\N{EN DASH}") for column in columns.values())] for name in names]
    return table(["", *columns], rows) if rows else None


def shown(value: Any) -> str:
    """A value of the configuration, as it is written on the command line."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return f"{value:g}" if isinstance(value, float) else repr(value) if value == "" else str(value)


def _shipped_files() -> Iterable[Any]:
    return [path for path in (*SHIPPED.glob("*.py"), *SHIPPED.glob("base/*.py")) if not path.name.startswith("_")]


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys with other values, but for those which a run decides by itself."""
    return [
        (key, shown(then[key]), shown(value))
        for key, value in now.items()
        if key not in PLACES and key in then and then[key] != value and then[key] not in DECIDED
    ]


def _environment(run: Run) -> dict[str, str]:
    last = run.starts[-1]
    git = last.get("git") or {}
    found = {"started": ", ".join(f"{each.get('time', '?')} (step {each.get('step', '?')})" for each in run.starts)}
    found |= {"host": str(last.get("host", ""))}
    devices = last.get("devices") or {}
    count, kind, hosts = (devices.get(name, "?") for name in ("count", "kind", "hosts"))
    found |= {"devices": f"{count} \N{MULTIPLICATION SIGN} {kind}, hosts: {hosts}"}
    if git:
        found["commit"] = f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"
    found |= {name: str(version) for name, version in (last.get("versions") or {}).items()}
    return found | {f"digest of {name}": str(value)[:16] for name, value in (last.get("digests") or {}).items()}
