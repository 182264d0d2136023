"""A run's metrics over its steps as charts."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from diffcse_jax.report.charts import Chart, Level, Line, Mark, colour_of
from diffcse_jax.report.runs import Run
from diffcse_jax.report.words import named, short2

THROUGHPUT = "sentences_per_second"
SIMILARITIES = ("similarity_positive", "similarity_negative")
OPTIMISATION = ("grad_norm", "learning_rate")
TRAJECTORY = ("alignment", "uniformity")
COUNTS = ("step", "bad_steps")  # no measurements
TITLES = {
    THROUGHPUT: "sentences per second",
    "grad_norm": "norm of the gradient, before clipping",
    "loss": "loss, the weighted sum",
}


def of_dev(runs: Sequence[Run]) -> list[Chart]:
    """The score that chooses, with the start as a dashed line and the choice marked; then the other dev scores."""
    charts = [_chooser(metric, runs) for metric in dict.fromkeys(run.metric for run in runs)]
    chosen_by = {f"dev/{run.metric}" for run in runs}
    others = [name for name in _names(runs) if name.startswith("dev/") and name not in chosen_by]
    recalls = [name for name in others if "recall@" in name]
    panels: dict[str, Sequence[str]] = {"found among the first 1, 5 and 10, %": recalls} if recalls else {}
    panels |= {named(name): [name] for name in others if name not in recalls}
    charts += _panels(panels, runs)
    return [chart for chart in charts if chart.lines]


def of_losses(runs: Sequence[Run]) -> list[Chart]:
    """The loss of each objective, and their sum where there are several."""
    names = [name for name in _names(runs) if name.startswith("loss_")]
    titles = {f"loss of {name.removeprefix('loss_').replace('_', ' ')}{_weight(name, runs)}": [name] for name in names}
    return _panels(titles | ({TITLES["loss"]: ["loss"]} if len(names) != 1 else {}), runs)


def of_objectives(runs: Sequence[Run]) -> list[Chart]:
    """Metrics of the objectives beside their losses: of discriminators their accuracy."""
    return _panels(_own_panels(runs) | {"similarity of pairs and of others": SIMILARITIES}, runs)


def of_optimisation(runs: Sequence[Run]) -> list[Chart]:
    """Throughput, gradient, learning rate."""
    charts = _panels({TITLES[THROUGHPUT]: [THROUGHPUT]}, runs, skipped=1)  # without the one with the compilation
    charts = [
        dataclasses.replace(chart, note="Without the first reading, which has the compilation in it.")
        for chart in charts
    ]
    charts += _panels({TITLES["grad_norm"]: ["grad_norm"]}, runs)
    return charts + [
        dataclasses.replace(chart, log=False) for chart in _panels({"learning rate": ["learning_rate"]}, runs)
    ]


def of_others(runs: Sequence[Run]) -> list[Chart]:
    """Metrics that no other chart shows."""
    told = {*TRAJECTORY, *COUNTS, *SIMILARITIES, *OPTIMISATION, THROUGHPUT, "loss"}
    told |= {name for names in _own_panels(runs).values() for name in names}
    names = [name for name in _names(runs) if name not in told and not name.startswith(("loss_", "dev/", "start/"))]
    return _panels({named(name): [name] for name in names}, runs)


def trajectory(runs: Sequence[Run]) -> Chart:
    """Alignment and uniformity of the training batches, as a way from the first step to the last."""
    lines = []
    for index, run in enumerate(runs):
        points = [(row["uniformity"], row["alignment"]) for row in run.rows if all(name in row for name in TRAJECTORY)]
        if points:
            lines.append(Line(run.label if len(runs) > 1 else "", points, colour_of(index)))
    about = (
        "From the ring to the filled sign, in means of neighbouring rows. Of training batches: with dropout, after the "
        "projector. Alignment is the distance of a sentence's two views, uniformity how evenly all are spread; of both "
        "less is better."
    )
    return Chart("alignment and uniformity on the way", "uniformity", lines, "alignment", note=about, is_path=True)


def _chooser(metric: str, runs: Sequence[Run]) -> Chart:
    """The score that chooses among the checkpoints of those runs that have it."""
    several = len(runs) > 1
    those = [(run, colour_of(index)) for index, run in enumerate(runs) if run.metric == metric and run.evaluations]
    starts = [
        Level(f"start of {run.label}", run.before, colour) if several else Level("the start", run.before, "c0")
        for run, colour in those
        if run.before is not None
    ]
    marks = [
        Mark("" if several else f"{_choice(run)} {short2(run.best[1])}", *run.best, colour)
        for run, colour in those
        if run.best and run.best[0]
    ]
    return Chart(
        f"dev score: {named(metric)}",
        "step",
        [Line(run.label if several else "", run.evaluations, colour) for run, colour in those],
        levels=_merged(starts),
        marks=marks,
        note=_about_start(runs),
    )


def _choice(run: Run) -> str:
    """The words beside the ring; weights between the start and a checkpoint are not on the curve."""
    if run.selection is None:
        return "best:" if run.is_finished else "best so far:"
    return "chosen:" if run.selection.interpolation == 1 else "chosen, nearer to the start:"


def _about_start(runs: Sequence[Run]) -> str:
    """The reason for which a curve begins elsewhere than at the dashed line; empty where it does not."""
    for run in runs:
        at_zero = next((score for step, score in run.evaluations if step == 0), None)
        if run.baseline and run.before is not None and at_zero is not None and abs(at_zero - run.before) > 1e-6:
            return (
                f"The start is measured as it is used, with the pooler {run.baseline.pooler}; the curve begins with "
                f"the vector that is trained, {run.config.encoding_pooler}, before the first step."
            )
    return ""


def _merged(levels: Iterable[Level]) -> list[Level]:
    """One line for starts that have the same score."""
    by_score: dict[float, list[Level]] = {}
    for level in levels:
        by_score.setdefault(round(level.y, 6), []).append(level)
    return [
        group[0] if len(group) == 1 else Level(f"the start of {len(group)} runs", group[0].y, "c0")
        for group in by_score.values()
    ]


def _panels(panels: Mapping[str, Sequence[str]], runs: Sequence[Run], *, skipped: int = 0) -> list[Chart]:
    """Charts of metrics over steps. Of one run a panel shows its metrics together; of several it is one per metric.

    Args:
        panels: titles to names of metrics.
        runs: their lines.
        skipped: first rows that are left out.
    """
    if len(runs) > 1:
        panels = {
            title if len(names) == 1 else named(name): [name] for title, names in panels.items() for name in names
        }
    charts = [_panel(title, names, runs, skipped) for title, names in panels.items()]
    return [chart for chart in charts if chart.lines]


def _panel(title: str, names: Sequence[str], runs: Sequence[Run], skipped: int) -> Chart:
    """A line for each run, or for each metric of one run; dashed the start's dev scores."""
    lines, levels = [], []
    for index, (run, name) in enumerate(itertools.product(runs, names)):
        label = run.label if len(runs) > 1 else ""
        if len(names) > 1:
            label = named(name).removeprefix(f"{named(run.metric)} ")
        if points := run.points(name)[skipped:]:
            lines.append(Line(label, points, colour_of(index)))
        if name.startswith("dev/"):
            of_start = run.points(name.replace("dev/", "start/"))[:1]
            levels += [Level(f"the start, {label}" if label else "the start", y, colour_of(index)) for _, y in of_start]
    return Chart(title, "step", lines, levels=_merged(levels))


def _own_panels(runs: Sequence[Run]) -> dict[str, Sequence[str]]:
    return {
        title: names
        for run in runs
        for objective in run.config.losses.values()
        for title, names in objective.panels.items()
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """The metrics that any run has, in the order in which they are written."""
    return list(dict.fromkeys(name for run in runs for row in run.rows for name in row))


def _weight(name: str, runs: Sequence[Run]) -> str:
    """The weight of an objective in the sum, where it is the same for all runs and not 1."""
    key = name.removeprefix("loss_")
    weights = {run.config.losses[key].weight for run in runs if key in run.config.losses}
    return f", weight {weights.pop():g}" if len(weights) == 1 and weights != {1.0} else ""
