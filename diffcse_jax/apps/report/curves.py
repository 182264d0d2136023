"""Chooses the charts of a run's metrics over its steps."""

import dataclasses
from collections.abc import Mapping, Sequence

from diffcse_jax.apps.report.charts import BASELINE, Chart, Level, Line, Mark, colour_of
from diffcse_jax.apps.report.runs import Run, readable, short2

SPEED = "sentences_per_second"
SIMILARITIES = ("similarity_positive", "similarity_negative")
PATH = ("uniformity", "alignment")
COUNTS = ("step", "bad_steps")
MOST_PLACES = 12  # of the path: single batches jump about, so neighbours are averaged


def dev_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the chart of the metric that chooses the checkpoint, then those of the other dev metrics."""
    charts = [_selection_chart(metric, runs) for metric in dict.fromkeys(run.metric for run in runs)]
    chosen = {f"dev/{run.metric}" for run in runs}
    others = [name for name in _names(runs) if name.startswith("dev/") and name not in chosen]
    recalls = [name for name in others if "recall@" in name]
    panels: dict[str, Sequence[str]] = {"recall, %": recalls} if recalls else {}
    panels |= {readable(name): [name] for name in others if name not in recalls}
    return [chart for chart in (*charts, *_panels(panels, runs)) if chart.lines]


def loss_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each loss, one for their sum if there are several, and those of the losses' own metrics."""
    names = [name for name in _names(runs) if name.startswith("loss_")]
    panels: dict[str, Sequence[str]] = {f"{readable(name.removeprefix('loss_'))} loss": [name] for name in names}
    if len(names) != 1:
        panels["loss (weighted sum)"] = ["loss"]
    return _panels(panels | _own_panels(runs) | {"similarity of pairs and of others": SIMILARITIES}, runs)


def optimisation_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of throughput, gradient norm and learning rate."""
    speed = [
        dataclasses.replace(chart, note="Without the first reading, which includes compilation.")
        for chart in _panels({"sentences per second": [SPEED]}, runs, skip=1)
    ]
    rate = [dataclasses.replace(chart, log=False) for chart in _panels({"learning rate": ["learning_rate"]}, runs)]
    return [*speed, *_panels({"gradient norm before clipping": ["grad_norm"]}, runs), *rate]


def other_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return charts of the metrics that no other chart shows."""
    shown = {*PATH, *COUNTS, *SIMILARITIES, "grad_norm", "learning_rate", SPEED, "loss"}
    shown |= {name for names in _own_panels(runs).values() for name in names}
    names = [name for name in _names(runs) if name not in shown and not name.startswith(("loss_", "dev/", "start/"))]
    return _panels({readable(name): [name] for name in names}, runs)


def path_chart(runs: Sequence[Run]) -> Chart:
    """Return the path of alignment and uniformity of training batches, from the first step to the last."""
    lines = []
    for index, run in enumerate(runs):
        points = [(row[PATH[0]], row[PATH[1]]) for row in run.rows if all(name in row for name in PATH)]
        size = -(-len(points) // MOST_PLACES)
        groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
        means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
        if means:
            lines.append(Line(run.label if len(runs) > 1 else "", means, colour_of(index)))
    note = (
        "The ring is the first step. Measured on training batches, with dropout and after the projector. Alignment is "
        "the distance between the two views of a sentence; uniformity tells how evenly embeddings spread. Lower is "
        "better for both."
    )
    return Chart("alignment and uniformity during training", PATH[0], lines, PATH[1], note=note, is_path=True)


def _selection_chart(metric: str, runs: Sequence[Run]) -> Chart:
    several = len(runs) > 1
    group = [(run, colour_of(index)) for index, run in enumerate(runs) if run.metric == metric and run.evaluations]
    levels = [
        Level(f"{run.label} before training", run.before, colour) if several else Level("before training", run.before)
        for run, colour in group
        if run.before is not None
    ]
    if len({round(level.y, 6) for level in levels}) == 1:
        levels = [Level("before training", levels[0].y, BASELINE)]
    marks = [
        Mark("" if several else f"{run.choice} {short2(run.best[1])}", *run.best, colour)
        for run, colour in group
        if run.best and run.best[0]
    ]
    lines = [Line(run.label if several else "", run.evaluations, colour) for run, colour in group]
    notes = (_note_on_pooler(run) for run, _ in group)
    note = next(filter(None, notes), "")
    return Chart(f"dev metric {readable(metric)}", "step", lines, readable(metric), levels, marks, note)


def _note_on_pooler(run: Run) -> str:
    """Explain why the curve does not begin at the dashed line, if it does not."""
    at_zero = dict(run.evaluations).get(0)
    if run.baseline is None or run.before is None or at_zero is None or abs(at_zero - run.before) < 1e-6:
        return ""
    return (
        f"The starting checkpoint is measured with its own pooler ({run.baseline.pooler}). The curve begins with the "
        f"pooler that is trained ({run.config.encoding_pooler})."
    )


def _panels(panels: Mapping[str, Sequence[str]], runs: Sequence[Run], *, skip: int = 0) -> list[Chart]:
    """Return a chart per panel. With several runs, each metric gets a chart of its own.

    Args:
        panels: Names of metrics by the title of their chart.
        runs: The runs; each has a line per metric.
        skip: Number of first rows to leave out.
    """
    if len(runs) > 1:
        panels = {
            title if len(names) == 1 else readable(name): [name] for title, names in panels.items() for name in names
        }
    charts = [_panel(title, names, runs, skip) for title, names in panels.items()]
    return [chart for chart in charts if chart.lines]


def _panel(title: str, names: Sequence[str], runs: Sequence[Run], skip: int) -> Chart:
    lines, levels = [], []
    for index, (run, name) in enumerate((run, name) for run in runs for name in names):
        label = run.label if len(runs) > 1 else readable(name) if len(names) > 1 else ""
        if points := run.points(name)[skip:]:
            lines.append(Line(label, points, colour_of(index)))
        if name.startswith("dev/"):
            before = run.points(name.replace("dev/", "start/"))[:1]
            levels += [Level(f"{label} before training".strip(), y, colour_of(index)) for _, y in before]
    return Chart(title, "step", lines, title, levels)


def _own_panels(runs: Sequence[Run]) -> dict[str, Sequence[str]]:
    return {title: names for run in runs for loss in run.config.losses.values() for title, names in loss.panels.items()}


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that any run has, in the order in which they were written."""
    return list(dict.fromkeys(name for run in runs for row in run.rows for name in row))
