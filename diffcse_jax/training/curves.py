"""A picture of a run: its losses, what its objectives add to them, and the dev scores over the steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffcse_jax.config import Config
from diffcse_jax.training.metrics import read_metrics

Rows = list[dict[str, float]]

UNIFORMITY = "dev/uniformity"  # below 0, while scores are up to 100


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
    panels["dev score"] = [name for name in dev_names if name != UNIFORMITY]
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
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None, label=name.split("/")[-1])
    axes.set(title=title, xlabel="step")
    if title == "loss":
        axes.set_yscale("symlog", linthresh=1e-3)
    axes.legend(fontsize="small")
