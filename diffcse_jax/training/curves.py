"""Draw a run's curves: its losses and dev scores over the steps, with the starting checkpoint for comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diffcse_jax.config import Config
from diffcse_jax.errors import require_extra
from diffcse_jax.run_folder.records import read_baseline, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIFORMITY = "dev/uniformity"  # negative, while the other scores go up to 100
LOG_SCALE_FROM = 20  # a loss that shrinks by this factor is drawn on a logarithmic axis
SMOOTH_FROM = 20  # with at least this many points, a running mean is drawn over them

Rows = list[dict[str, float]]


def draw_curves(workdir: Path, config: Config) -> Path:
    """Draw `metrics.jsonl` of a run folder into `report/curves.png`.

    Args:
        workdir: The run folder.
        config: Its configuration. Losses may ask for panels of their own.

    Returns:
        The path of the picture.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure = curves(workdir, config)
    path = workdir / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def curves(workdir: Path, config: Config) -> "Figure":
    """Return the figure that `draw_curves` saves: panels for losses, the metric that chooses and other scores."""
    rows = read_metrics(workdir)
    baseline = read_baseline(workdir)
    chooses = f"dev/{baseline.dev_metric if baseline else config.eval.metric}"
    others = sorted({name for row in rows for name in row if name.startswith("dev/")} - {chooses, UNIFORMITY})
    panels: dict[str, Sequence[str]] = {"loss": [f"loss_{name}" for name in config.losses]}
    for objective in config.losses.values():
        panels |= objective.panels
    panels[f"{chooses.removeprefix('dev/')} (chooses the checkpoint)"] = [chooses]
    panels |= {"other dev scores": others, "uniformity of the embeddings": [UNIFORMITY]}
    drawn = {title: _points(rows, names) for title, names in panels.items()}
    drawn = {title: lines for title, lines in drawn.items() if lines} or {"loss": {}}
    figure = require_extra("matplotlib.figure", "report").Figure(figsize=(4.6 * len(drawn), 4.2), layout="constrained")
    for axes, (title, lines) in zip(np.ravel(figure.subplots(1, len(drawn))), drawn.items(), strict=True):
        _draw_panel(axes, rows, title, lines)
    return figure


def _points(rows: Rows, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the points (step, value) of each metric that was logged, shape (points, 2)."""
    found = {name: np.array([(row["step"], row[name]) for row in rows if name in row], float) for name in names}
    return {name: points for name, points in found.items() if len(points)}


def _draw_panel(axes: "Axes", rows: Rows, title: str, lines: dict[str, np.ndarray]) -> None:
    for name, points in lines.items():
        steps, values = points.T
        label = name.removeprefix("dev/")
        if len(points) >= SMOOTH_FROM and not name.startswith("dev/"):
            (line,) = axes.plot(steps, _running_mean(values), label=f"{label} (running mean)")
            axes.plot(steps, values, ".", color=line.get_color(), alpha=0.35, markersize=4)
        else:
            (line,) = axes.plot(steps, values, marker="." if len(points) < 50 else None, label=label)
        start = [row[f"start/{label}"] for row in rows if f"start/{label}" in row and name.startswith("dev/")]
        if start:
            before = "starting checkpoint" if len(lines) == 1 else f"{label}, starting checkpoint"
            axes.axhline(start[-1], color=line.get_color(), linestyle="--", linewidth=1, label=before)
    scores = "score" in title or "chooses" in title
    axes.set(title=title, xlabel="step", ylabel="score, up to 100" if scores else title.partition(" ")[0])
    axes.xaxis.set_major_locator(
        require_extra("matplotlib.ticker", "report").MaxNLocator(integer=True, nbins=6, min_n_ticks=1)
    )
    values = np.concatenate([points[:, 1] for points in lines.values()]) if lines else np.zeros(0)
    if title == "loss" and len(values) and values.min() > 0 and values.max() > LOG_SCALE_FROM * values.min():
        axes.set_yscale("log")
    if lines:
        axes.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Average each value with the values around it; at the ends over the values that there are."""
    width = max(3, len(values) // 10) | 1
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
