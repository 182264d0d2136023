"""Pictures of a study: the scores of its rows, and where rows lie between alignment and uniformity.

A point for each seed; their mean is a line, or a larger point; published scores are diamonds.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffcse_jax.evaluation.results import SHORT_NAMES

PANELS_ACROSS = 4
MARKERS = "osD^v<>P*X"  # with ten colours: rows that are told apart

Seeds = Mapping[int | None, Mapping[str, float]]  # scores by seed and column


def draw(
    columns: Sequence[str], rows: Mapping[str, Seeds], published: Mapping[str, Mapping[str, float]], path: Path
) -> None:
    """Draws one panel for each column, with a line for each row.

    Args:
        columns: what is drawn.
        rows: scores by row.
        published: published scores by row and column.
        path: a png file.
    """
    across = min(max(len(columns), 1), PANELS_ACROSS)
    down = max(math.ceil(len(columns) / across), 1)
    figure = Figure(figsize=(2 + 3.2 * across, down * (1.2 + 0.32 * max(len(rows), 1))), layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for axes, column in zip(panels, columns, strict=False):
        _draw_panel(axes, column, rows, published)
    for axes in panels[len(columns) :]:
        axes.set_axis_off()
    panels[0].set_yticks(range(len(rows)), list(rows))
    panels[0].set_ylim(max(len(rows), 1) - 0.5, -0.5)  # the first row on top
    figure.savefig(path, dpi=120)


def _draw_panel(
    axes: Axes, column: str, rows: Mapping[str, Seeds], published: Mapping[str, Mapping[str, float]]
) -> None:
    for height, (row, seeds) in enumerate(rows.items()):
        scores = [seed[column] for seed in seeds.values() if column in seed]
        if scores:
            (points,) = axes.plot(scores, [height] * len(scores), "o", alpha=0.6)
            axes.plot([statistics.mean(scores)] * 2, [height - 0.3, height + 0.3], color=points.get_color())
        if column in published.get(row, {}):
            axes.plot(published[row][column], height, "D", color="black", fillstyle="none")
    axes.set(title=SHORT_NAMES.get(column, column))
    axes.grid(axis="x", alpha=0.3)


def draw_geometry(rows: Mapping[str, Seeds], path: Path) -> bool:
    """Draws the alignment of each row over its uniformity (the lower both, the better), where both were scored.

    Args:
        rows: scores by row.
        path: a png file.

    Returns:
        Whether any row had both.
    """
    scored = {
        row: [(seed["uniformity"], seed["alignment"]) for seed in seeds.values() if "alignment" in seed]
        for row, seeds in rows.items()
    }
    scored = {row: points for row, points in scored.items() if points}
    if not scored:
        return False
    figure = Figure(figsize=(7.5, max(4.0, 0.8 + 0.21 * len(scored))), layout="constrained")
    axes = figure.subplots()
    for number, (row, points) in enumerate(scored.items()):
        color, marker = f"C{number % 10}", MARKERS[number // 10 % len(MARKERS)]
        mean = [statistics.mean(values) for values in zip(*points, strict=True)]
        axes.plot(*mean, marker, color=color, markersize=9, label=row)
        if len(points) > 1:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=4, alpha=0.5)
    axes.set(xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)", title="STS-B")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    return True
