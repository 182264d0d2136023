"""Draws line charts as SVG, in colours that suit light and dark pages."""

import dataclasses
import functools
import io
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

from diffcse_jax.errors import require_extra

Points = Sequence[tuple[float, float]]

BASELINE = "#7d868f"  # the colour of starting checkpoints
COLOURS = ("#0072b2", "#d55e00", "#00805c", "#a24a85", "#8a6100", "#3c57c4")  # readable on white and on black
MARKERS = "osv^Dp"
INK = "#010203"  # stands for the colour of the page's text
WIDEST_LINEAR = 30.0  # a positive line over a wider range gets a logarithmic axis
MOST_MARKERS = 40  # points of a line that each get a marker
MOST_ROWS = 400  # of the table of numbers


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: Its name in the legend; empty if the chart has one line.
        points: (x, y) pairs in the order in which they are joined.
        colour: A colour of matplotlib.
    """

    label: str
    points: Points
    colour: str = COLOURS[0]


@dataclasses.dataclass(frozen=True)
class Level:
    """A dashed horizontal line with its name."""

    label: str
    y: float
    colour: str = BASELINE


@dataclasses.dataclass(frozen=True)
class Mark:
    """A ring around a point with a label next to it."""

    label: str
    x: float
    y: float
    colour: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """The content of a chart.

    Attributes:
        title: The title.
        x_label: The label of the horizontal axis.
        lines: The lines.
        y_label: The label of the vertical axis.
        levels: Horizontal lines, for example the score of the starting checkpoint.
        marks: Points to highlight.
        note: A sentence below the chart.
        log: True for a logarithmic vertical axis; None chooses it by the range of the values.
        is_path: True if the points are places that something passes, rather than values over steps.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    y_label: str
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    log: bool | None = None
    is_path: bool = False

    @property
    def numbers(self) -> list[list[str]]:
        """Return the points as a table: the column titles, then a row for each x (or each point of a path)."""
        if self.is_path:
            rows = [[line.label, short(x), short(y)] for line in self.lines for x, y in line.points]
            return [["run", self.x_label, self.y_label], *rows[:MOST_ROWS]]
        columns = [dict(line.points) for line in self.lines]
        xs = sorted({x for column in columns for x in column})
        xs = xs[:: math.ceil(len(xs) / MOST_ROWS)] if xs else []
        titles = [self.x_label, *(line.label or self.title for line in self.lines)]
        return [titles, *([short(x), *(short(c[x]) if x in c else "" for c in columns)] for x in xs)]

    @functools.cached_property
    def svg(self) -> Any:
        """Draw the chart and return it as markup.

        Raises:
            UserError: matplotlib or Jinja is not installed.
        """
        require_extra("matplotlib", "report")
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for index, line in enumerate(self.lines):
            xs, ys = zip(*line.points, strict=True)
            style: dict[str, Any] = {
                "marker": MARKERS[index % len(MARKERS)],
                "markersize": 4,
                "linewidth": 1.8,
                "color": line.colour,
            }
            if len(xs) > MOST_MARKERS:
                style["markevery"] = [len(xs) - 1]
            axes.plot(xs, ys, label=line.label or None, **style)
            if self.is_path:
                axes.plot(xs[:1], ys[:1], "o", markersize=9, markerfacecolor="none", color=line.colour)
        for level in self.levels:
            axes.axhline(level.y, linestyle="--", linewidth=1.4, color=level.colour, label=level.label)
        for mark in self.marks:
            axes.plot(mark.x, mark.y, "o", markersize=11, markerfacecolor="none", color=mark.colour)
            axes.annotate(
                mark.label, (mark.x, mark.y), xytext=(0, 10), textcoords="offset points", ha="center", color=INK
            )
        if self.is_log:
            axes.set_yscale("log")
        if self.x_label == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.margins(y=0.12)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        if any(line.label for line in self.lines) or self.levels:
            figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small", labelcolor=INK)
        return _as_markup(figure, self.title)

    @property
    def is_log(self) -> bool:
        """Tell whether the vertical axis is logarithmic."""
        ys = [y for line in self.lines for _, y in line.points]
        if self.log is not None:
            return self.log
        return (
            min(ys) > 0
            and min(level.y for level in (*self.levels, Level("", 1.0))) > 0
            and (max(ys) / min(ys) > WIDEST_LINEAR)
        )


def short(value: float) -> str:
    """Format a number with up to four digits, without an exponent where it can be read without."""
    if not math.isfinite(value):
        return str(value)
    text = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if value and not 1e-4 <= abs(value) < 1e6:
        text = f"{value:.3g}"
    mantissa, exponent, power = text.partition("e")  # float32's 1e-4 is below 1e-4 and rounds to 0.0001
    return (f"{mantissa}e{int(power)}" if exponent else text).replace("-", "\N{MINUS SIGN}")


def colour_of(run: int) -> str:
    """Return the colour of the run at this position."""
    return COLOURS[run % len(COLOURS)]


def _as_markup(figure: Any, title: str) -> Any:
    """Return the figure as an SVG element that takes the page's text colour and names itself for screen readers."""
    import matplotlib
    from markupsafe import Markup, escape

    for axes in figure.axes:
        axes.set_facecolor("none")
        axes.grid(color=BASELINE, alpha=0.25, linewidth=0.6)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(BASELINE)
        axes.tick_params(colors=INK, which="both")
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    content = io.StringIO()
    # Text stays text, so that it can be read aloud and searched. The salt makes equal charts equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    svg = content.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace(
        INK, "currentColor"
    )
    # Charts share a page: the names of their parts must differ.
    prefix = f"c{zlib.crc32(title.encode())}-"
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))
