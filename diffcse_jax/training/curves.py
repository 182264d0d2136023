"""A picture of a run: its losses, what its objectives add to them, and the dev scores over the steps.

Dashed lines are the dev scores of the start.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffcse_jax.config import Config
from diffcse_jax.training.metrics import read_metrics

DEV = "dev score"
UNIFORMITY = "dev/uniformity"  # below 0, while scores are up to 100

Rows = list[dict[str, float]]


def draw_curves(workdir: Path, config: Config) -> Path:
    """Draws `metrics.jsonl` of a workdir into `report/curves.png`, and returns that path.

    Args:
        workdir: the run's folder.
        config: its configuration; objectives may ask for panels of their own.
    """
    rows = read_metrics(workdir)
    dev_names = sorted({name for row in rows for name in row if name.startswith("dev/")})
    panels: dict[str, Sequence[str]] = {"loss": [f"loss_{name}" for name in config.objectives]}
    for objective in config.objectives.values():
        panels |= objective.panels
    panels[DEV] = [name for name in dev_names if name != UNIFORMITY]
    if UNIFORMITY in dev_names:
        panels["uniformity"] = [UNIFORMITY]
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        _draw_panel(axes, rows, title, names)
    path = workdir / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw_panel(axes: Axes, rows: Rows, title: str, names: Iterable[str]) -> None:
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if not points:  # of a task that no logged step was about
            continue
        marker = "." if len(points) < 50 else None
        (line,) = axes.plot(*zip(*points, strict=True), marker=marker, label=name.split("/")[-1])
        of_start = name.replace("dev/", "start/")
        for row in rows:
            if of_start in row and of_start != name:
                axes.axhline(row[of_start], color=line.get_color(), linestyle="--", linewidth=1)
    if title in (DEV, "uniformity"):
        axes.plot([], color="gray", linestyle="--", label="the start")
    axes.set(title=title, xlabel="step")
    if title == "loss":
        axes.set_yscale("symlog", linthresh=1e-3)
    if axes.lines:
        axes.legend(fontsize="small")
