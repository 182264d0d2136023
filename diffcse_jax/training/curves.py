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


def draw_curves(workdir: Path, config: Config) -> Path:
    """Draw `metrics.jsonl` of a run folder into `report/curves.png`, and return its path.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure = curves(workdir, config)
    path = workdir / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def curves(workdir: Path, config: Config) -> "Figure":
    """Return the figure: panels for losses, panels that losses ask for, the metric that chooses and other scores."""
    rows, baseline = read_metrics(workdir), read_baseline(workdir)
    chooses = f"dev/{baseline.dev_metric if baseline else config.eval.metric}"
    others = sorted({name for row in rows for name in row if name.startswith("dev/")} - {chooses, UNIFORMITY})
    panels: dict[str, Sequence[str]] = {"loss": [f"loss_{name}" for name in config.losses]}
    for objective in config.losses.values():
        panels |= objective.panels
    panels[f"{chooses.removeprefix('dev/')} (chooses the checkpoint)"] = [chooses]
    panels |= {"other dev scores": others, "uniformity of the embeddings": [UNIFORMITY]}
    drawn: dict[str, dict[str, np.ndarray]] = {}  # the points (step, value) of each metric that was logged
    for title, names in panels.items():
        points = {name: np.array([(row["step"], row[name]) for row in rows if name in row], float) for name in names}
        if lines := {name: values for name, values in points.items() if len(values)}:
            drawn[title] = lines
    figure = require_extra("matplotlib.figure", "report").Figure(
        figsize=(4.6 * max(len(drawn), 1), 4.2), layout="constrained"
    )
    for number, (title, lines) in enumerate(drawn.items(), 1):
        _draw_panel(figure.add_subplot(1, len(drawn), number), rows, title, lines)
    return figure


def _draw_panel(axes: "Axes", rows: list[dict[str, float]], title: str, lines: dict[str, np.ndarray]) -> None:
    for name, points in lines.items():
        steps, values = points.T
        label, is_score = name.removeprefix("dev/"), name.startswith("dev/")
        if len(points) >= SMOOTH_FROM and not is_score:
            width = max(3, len(values) // 10) | 1
            sums, counts = (np.convolve(each, np.ones(width), "same") for each in (values, np.ones(len(values))))
            (line,) = axes.plot(steps, sums / counts, label=f"{label} (running mean)")
            axes.plot(steps, values, ".", color=line.get_color(), alpha=0.35, markersize=4)
        else:
            (line,) = axes.plot(steps, values, marker="." if len(points) < 50 else None, label=label)
        start = [row[f"start/{label}"] for row in rows if is_score and f"start/{label}" in row]
        if start:
            before = "starting checkpoint" if len(lines) == 1 else f"{label}, starting checkpoint"
            axes.axhline(start[-1], color=line.get_color(), linestyle="--", linewidth=1, label=before)
    scores = "score" in title or "chooses" in title
    axes.set(title=title, xlabel="step", ylabel="score, up to 100" if scores else title.partition(" ")[0])
    ticker = require_extra("matplotlib.ticker", "report")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    values = np.concatenate([points[:, 1] for points in lines.values()])
    if title == "loss" and values.min() > 0 and values.max() > LOG_SCALE_FROM * values.min():
        axes.set_yscale("log")
    axes.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18))
