"""The charts of runs: what `WORKDIR/report/curves.png` and the report draw, as SVG in colours for any page."""

import dataclasses
import functools
import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.errors import require_extra
from diffcse_jax.run_folder.summary import Run, read_runs, readable

BASELINE = "#7d868f"  # the colour of starting checkpoints
COLOURS = ("#0072b2", "#d55e00", "#00805c", "#a24a85", "#8a6100", "#3c57c4")  # readable on white and on black
INK = "#010203"  # stands for the colour of the page's text
STYLE = {
    "svg.fonttype": "none",  # text stays text, so that it can be read aloud and searched
    "font.family": "sans-serif",
    "axes.facecolor": "none",
    "axes.edgecolor": BASELINE,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.ymargin": 0.12,
    "grid.color": BASELINE,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
MOST_ACROSS = 4  # charts next to one another in a picture
WIDEST_LINEAR = 30.0  # a positive line over a wider range gets a logarithmic axis
MOST_MARKERS = 40  # points of a line that each get a marker
SIMILARITIES = ("similarity_positive", "similarity_negative")
SHOWN = {*SIMILARITIES, "sentences_per_second", "step", "bad_steps", "grad_norm", "learning_rate", "loss"}


class Line(NamedTuple):
    """A line through points (x, y). Its label is empty if the chart has one line."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[0]


class Level(NamedTuple):
    """A dashed horizontal line, such as the score of the starting checkpoint."""

    label: str
    y: float
    colour: str = BASELINE


class Mark(NamedTuple):
    """A ring around a point with a label next to it."""

    label: str
    x: float
    y: float
    colour: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """The content of a chart."""

    title: str
    x_label: str
    lines: Sequence[Line]
    y_label: str
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    note: str = ""  # a sentence below the chart
    log: bool | None = None  # a logarithmic vertical axis; None: the range of the values decides

    @property
    def is_log(self) -> bool:
        """Return whether the vertical axis is logarithmic."""
        if self.log is not None:
            return self.log
        ys = [y for line in self.lines for _, y in line.points]
        return min([*ys, *(level.y for level in self.levels)]) > 0 and max(ys) / min(ys) > WIDEST_LINEAR

    @functools.cached_property
    def svg(self) -> Any:
        """The chart as markup that takes the page's text colour and names itself for screen readers."""
        from markupsafe import Markup, escape

        content = io.StringIO()
        _draw([self], content, (5, 3.6), format="svg", transparent=True, metadata={"Date": None})
        svg = content.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        prefix = f"c{zlib.crc32(self.title.encode())}-"  # charts share a page: the names of their parts must differ
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}", svg.replace(INK, "currentColor"))
        return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1))

    def draw(self, axes: Any) -> None:
        """Draw the chart, without its title, into axes of matplotlib."""
        for index, line in enumerate(self.lines):
            xs, ys = zip(*line.points, strict=True)
            every = 1 if len(xs) <= MOST_MARKERS else [len(xs) - 1]
            marker = "osv^Dp"[index % 6]
            axes.plot(xs, ys, marker=marker, markevery=every, color=line.colour, label=line.label or None)
        for level in self.levels:
            axes.axhline(level.y, linestyle="--", linewidth=1.4, color=level.colour, label=level.label)
        for mark in self.marks:
            axes.plot(mark.x, mark.y, "o", markersize=11, color=mark.colour, fillstyle="none")
            axes.annotate(mark.label, (mark.x, mark.y), xytext=(0, 10), textcoords="offset points", ha="center")
        if self.is_log:
            axes.set_yscale("log")
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        if self.x_label == "step":
            ticker = require_extra("matplotlib.ticker", "report")
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        if any(line.label for line in self.lines) or self.levels:
            axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def draw_curves(workdir: Path) -> Path:
    """Draw a run's dev metrics and losses into `WORKDIR/report/curves.png`, and return its path."""
    found = curves(read_runs([workdir]))
    path = workdir / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    _draw([*found["dev"], *found["losses"]], path, (4.6, 4.2), dpi=120)
    return path


def _draw(charts: Sequence[Chart], file: Any, size: tuple[float, float], **options: Any) -> None:
    """Draw charts into a file, next to one another and each of this size in inches. Several charts have titles."""
    matplotlib, figures = (require_extra(name, "report") for name in ("matplotlib", "matplotlib.figure"))
    across = min(max(len(charts), 1), MOST_ACROSS)
    down = max(math.ceil(len(charts) / across), 1)
    salt = charts[0].title if charts else ""  # makes equal charts equal files
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure = figures.Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(down, across, number, title=chart.title if charts[1:] else "")
            chart.draw(axes)
        figure.savefig(file, **options)


def colour_of(run: int) -> str:
    """Return the colour of the run at this position."""
    return COLOURS[run % len(COLOURS)]


def curves(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Return the charts of the runs' metrics by section: `dev`, `losses`, `optimisation` and `others`."""
    names = list(dict.fromkeys(name for run in runs for row in run.rows for name in row))
    own = {title: names for run in runs for loss in run.config.losses.values() for title, names in loss.panels.items()}

    metrics = list(dict.fromkeys(run.metric for run in runs))
    dev = [name for name in names if name.startswith("dev/") and name.removeprefix("dev/") not in metrics]
    recalls = [name for name in dev if "recall@" in name]
    dev_panels: dict[str, Sequence[str]] = {"recall, %": recalls} if recalls else {}
    dev_panels |= {readable(name): [name] for name in dev if name not in recalls}
    chosen = [_selection_chart(metric, runs) for metric in metrics]

    losses = [name for name in names if name.startswith("loss_")]
    panels: dict[str, Sequence[str]] = {f"{readable(name.removeprefix('loss_'))} loss": [name] for name in losses}
    if len(losses) != 1:
        panels["loss (weighted sum)"] = ["loss"]
    panels |= own | {"similarity of pairs and of others": SIMILARITIES}

    note = "Without the first reading, which includes compilation."
    optimisation = [
        *_panels({"sentences per second": ["sentences_per_second"]}, runs, skip=1, note=note),
        *_panels({"gradient norm before clipping": ["grad_norm"]}, runs),
        *_panels({"learning rate": ["learning_rate"]}, runs, log=False),
    ]
    shown = SHOWN.union(*own.values())
    others = [name for name in names if name not in shown and not name.startswith(("loss_", "dev/", "start/"))]
    return {
        "dev": [*(chart for chart in chosen if chart.lines), *_panels(dev_panels, runs)],
        "losses": _panels(panels, runs),
        "optimisation": optimisation,
        # A dev metric may have the same name, such as `uniformity`.
        "others": _panels({f"{readable(name)} (training batches)": [name] for name in others}, runs),
    }


def _selection_chart(metric: str, runs: Sequence[Run]) -> Chart:
    several = len(runs) > 1
    lines, levels, marks, note = [], [], [], ""
    for index, run in enumerate(runs):
        if run.metric != metric or not run.evaluations:
            continue
        label, colour = run.label if several else "", colour_of(index)
        lines.append(Line(label, run.evaluations, colour))
        if run.before is not None:
            levels.append(Level(f"{label} before training".strip(), run.before, colour if several else BASELINE))
        if run.best and run.best[0]:
            marks.append(Mark("" if several else f"{run.choice} {run.best[1]:.2f}", *run.best, colour))
        note = note or run.note_on_pooler
    if len({round(level.y, 6) for level in levels}) == 1:
        levels = [Level("before training", levels[0].y)]
    return Chart(f"dev metric {readable(metric)}", "step", lines, readable(metric), levels, marks, note)


def _panels(panels: Mapping[str, Sequence[str]], runs: Sequence[Run], *, skip: int = 0, **options: Any) -> list[Chart]:
    """Return a chart for each title and its metrics. With several runs, each metric gets a chart of its own."""
    several, charts = len(runs) > 1, []
    if several:
        panels = {
            title if len(names) == 1 else readable(name): [name] for title, names in panels.items() for name in names
        }
    for title, names in panels.items():
        lines, levels = [], []
        for index, (run, name) in enumerate((run, name) for run in runs for name in names):
            label = run.label if several else readable(name) if len(names) > 1 else ""
            if points := run.points(name)[skip:]:
                lines.append(Line(label, points, colour_of(index)))
            if name.startswith("dev/"):
                before = run.points(name.replace("dev/", "start/"))[:1]
                levels += [Level(f"{label} before training".strip(), y, colour_of(index)) for _, y in before]
        if lines:
            charts.append(Chart(title, "step", lines, title, levels, **options))
    return charts
