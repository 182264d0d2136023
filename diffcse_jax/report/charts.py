"""Line charts as SVG: coloured by the page's style, so that they follow light and dark, and small enough for a phone.

A line is told from others by its colour and by the shape at its end. Beside each picture stand its numbers as a table,
for those who cannot see it, and from it the page's script reads what is under the pointer.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from diffcse_jax.pages.markup import Markup, element, joined, table

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 24, 36
COLOURS = 6  # of runs; 0 is the start's
MOST_POINTS = 400  # of a line
MOST_PLACES = 12  # of a path, each the mean of its neighbours: single batches jump about
ROOM_FOR_WORDS = 0.16  # of the height, above marks
DECADES = 1.5  # a line over more of them is drawn on a logarithmic axis
SHAPES = ("diamond", "circle", "square", "triangle", "tip")  # by the number of the colour


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: its name.
        points: (x, y), in the order in which they are joined.
        colour: a class of the page's style: `c0` for starts, `c1`, `c2`, ... for runs, `g0` ... `g4` for degrees.
    """

    label: str
    points: Points
    colour: str = "c1"


@dataclasses.dataclass(frozen=True)
class Level:
    """A dashed horizontal line."""

    label: str
    y: float
    colour: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """A ring around a point, with words beside it."""

    label: str
    x: float
    y: float
    colour: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """The content of a chart.

    Attributes:
        title: of the chart.
        x_label: of the horizontal axis.
        lines: at least one, with at least one point each.
        y_label: of the vertical axis; empty: the title says it.
        note: a sentence below.
        log: the vertical axis is logarithmic; None: where values, all above 0, spread over more than `DECADES`.
        y_range: bounds of the vertical axis; None: those of the values.
        is_path: points are places on the way of something that moves, not values of a function; a ring is around the
            first.
        signs_on_top: the shape of a line is at its highest point, not at its last.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    y_label: str = ""
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    log: bool | None = None
    y_range: tuple[float, float] | None = None
    is_path: bool = False
    signs_on_top: bool = False


@dataclasses.dataclass(frozen=True)
class Axis:
    """From values to pixels, linearly or by their logarithms."""

    low: float
    high: float
    start: float  # the pixel of `low`
    end: float
    log: bool = False

    def pixel(self, value: float) -> float:
        low, high, value = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the bounds."""
        return [each for each in self._candidates() if self.low * (1 - 1e-9) <= each <= self.high * (1 + 1e-9)] or [
            self.low,
            self.high,
        ]

    def _candidates(self) -> list[float]:
        if not self.log:
            step = _round_step((self.high - self.low) / 4)
            first = math.ceil(self.low / step - 1e-9)
            return [round(index * step, 12) for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, math.ceil((last - first) / 6))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        return [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]


def draw(chart: Chart) -> Markup:
    """The chart as a figure: title, legend, picture, its numbers."""
    lines = [dataclasses.replace(line, points=thinned(line.points, chart)) for line in chart.lines]
    shown = dataclasses.replace(chart, lines=lines)
    x_axis, y_axis = _axes(shown)
    picture = element(
        "svg",
        *_grid(shown, x_axis, y_axis),
        *(_level(level, x_axis, y_axis) for level in chart.levels),
        *(_line(shown, line, x_axis, y_axis) for line in lines),
        *(_mark(mark, x_axis, y_axis) for mark in chart.marks),
        element("line", class_="cursor", x1=LEFT, x2=LEFT, y1=TOP, y2=HEIGHT - BOTTOM),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=described(shown),
    )
    parts = [element("figcaption", chart.title), _legend(shown), picture]
    parts += [element("p", chart.note, class_="note")] if chart.note else []
    parts.append(element("details", element("summary", "numbers"), _numbers(shown)))
    bounds = f"{x_axis.low} {x_axis.high} {x_axis.start} {x_axis.end}"
    return element("figure", *parts, class_="chart", data_axis=None if chart.is_path else bounds)


def thinned(points: Points, chart: Chart) -> Points:
    """At most `MOST_POINTS`, or of a path `MOST_PLACES`: means of as many neighbours each."""
    every = math.ceil(len(points) / (MOST_PLACES if chart.is_path else MOST_POINTS))
    if every <= 1:
        return points
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    return [(statistics.mean(x for x, _ in group), statistics.mean(y for _, y in group)) for group in groups]


def described(chart: Chart) -> str:
    """The chart in words."""
    said = [
        f"{chart.title}. Horizontal axis: {chart.x_label}."
        + (f" Vertical axis: {chart.y_label}." if chart.y_label else "")
    ]
    for line in chart.lines:
        (first_x, first), (last_x, last) = line.points[0], line.points[-1]
        at = (f"at ({short(first_x)}, {short(first)})", f"at ({short(last_x)}, {short(last)})")
        if not chart.is_path:
            at = (f"{short(first)} at {short(first_x)}", f"{short(last)} at {short(last_x)}")
        said.append(f"{line.label or chart.title}: {at[0]}" + (f", {at[1]}." if len(line.points) > 1 else "."))
    said += [f"Dashed, {level.label}: {short(level.y)}." for level in chart.levels]
    said += [f"Marked: {mark.label}." for mark in chart.marks]
    return " ".join(said)


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
    """The colour class of the run at this position, from 0."""
    return f"c{run % COLOURS + 1}"


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _axes(chart: Chart) -> tuple[Axis, Axis]:
    """The axes; dashed lines and marks are within them."""
    xs = [x for line in chart.lines for x, _ in line.points]
    values = [y for line in chart.lines for _, y in line.points]
    ys = [*values, *(level.y for level in chart.levels), *(mark.y for mark in chart.marks)]
    log = min(ys) > 0 and max(values) / min(values) > 10**DECADES if chart.log is None else chart.log
    low, high = chart.y_range or _padded(ys, log=log)
    if any(mark.label for mark in chart.marks):
        high += ROOM_FOR_WORDS * (high - low)
    x_low, x_high = _padded(xs, log=False) if chart.is_path or min(xs) == max(xs) else (min(xs), max(xs))
    return Axis(x_low, x_high, LEFT, WIDTH - RIGHT), Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def _padded(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """Bounds a little wider than the values."""
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** 0.06 if high > low else 2.0
        return low / room, high * room
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _grid(chart: Chart, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    """Lines and labels of the axes."""
    parts = []
    for value in y_axis.ticks():
        y = _number(y_axis.pixel(value))
        parts += [
            element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y),
            element("text", short(value), x=LEFT - 6, y=y, dy="0.35em", text_anchor="end"),
        ]
    for value in x_axis.ticks():
        x = _number(x_axis.pixel(value))
        parts += [
            element("line", class_="tick", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4),
            element("text", short(value), x=x, y=HEIGHT - BOTTOM + 16, text_anchor="middle"),
        ]
    base = HEIGHT - BOTTOM
    parts.append(element("line", class_="tick", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base))
    parts.append(element("text", chart.x_label, class_="axis", x=WIDTH - RIGHT, y=HEIGHT - 4, text_anchor="end"))
    words = ", ".join(filter(None, (chart.y_label, "logarithmic" if y_axis.log else "")))
    return [*parts, element("text", words, class_="axis", x=2, y=11)] if words else parts


def _line(chart: Chart, line: Line, x_axis: Axis, y_axis: Axis) -> Markup:
    """A line of the chart within the picture, and its shape; of a path a ring around the first point."""
    pixels = [(x_axis.pixel(x), y_axis.pixel(min(max(y, y_axis.low), y_axis.high))) for x, y in line.points]
    sign = min(pixels, key=lambda pixel: pixel[1]) if chart.signs_on_top else pixels[-1]
    ring = _ring(*pixels[0]) if chart.is_path else ""
    path = "M" + "L".join(f"{_number(x)},{_number(y)}" for x, y in pixels)
    return element("g", element("path", d=path, class_="line"), _shape(line.colour, *sign), ring, class_=line.colour)


def _shape(colour: str, x: float, y: float, size: float = 3.6) -> Markup:
    """The sign of a line, which goes with its colour."""
    x, y = round(x, 1), round(y, 1)
    corners: list[tuple[float, float]]
    match SHAPES[int(colour[1:]) % len(SHAPES)]:
        case "circle":
            return element("circle", class_="end", cx=x, cy=y, r=size)
        case "square":
            corners = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
        case "triangle":
            corners = [(0, -1.25), (1.2, 0.95), (-1.2, 0.95)]
        case "tip":
            corners = [(0, 1.25), (1.2, -0.95), (-1.2, -0.95)]
        case _:
            corners = [(0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)]
    points = " ".join(f"{_number(x + dx * size)},{_number(y + dy * size)}" for dx, dy in corners)
    return element("polygon", class_="end", points=points)


def _level(level: Level, x_axis: Axis, y_axis: Axis) -> Markup:
    y = _number(y_axis.pixel(level.y))
    dashed = element("line", class_="level", x1=x_axis.start, x2=x_axis.end, y1=y, y2=y)
    return element("g", dashed, class_=level.colour)


def _mark(mark: Mark, x_axis: Axis, y_axis: Axis) -> Markup:
    """The ring, with its words above, on the side that has room."""
    x, y = x_axis.pixel(mark.x), y_axis.pixel(mark.y)
    is_right = x > (x_axis.start + x_axis.end) / 2
    words = element(
        "text",
        mark.label,
        class_="words",
        x=_number(min(x + 8, WIDTH - RIGHT) if is_right else max(x - 8, LEFT + 2)),
        y=_number(y - 10),
        text_anchor="end" if is_right else "start",
    )
    return element("g", _ring(x, y), words, class_=mark.colour)


def _ring(x: float, y: float) -> Markup:
    return element("circle", class_="ring", cx=_number(x), cy=_number(y), r=6.5)


def _legend(chart: Chart) -> Markup:
    """The lines' names, and room for their values under the pointer."""
    named = [
        element("li", _sample(_shape(line.colour, 11, 5.5)), line.label, element("output"), class_=line.colour)
        for line in chart.lines
        if line.label
    ]
    dashes = element("line", class_="level", x1=1, x2=21, y1=5.5, y2=5.5)
    levels = [
        element("li", _sample(dashes, line=False), f"{level.label} ", element("b", short(level.y)), class_=level.colour)
        for level in chart.levels
    ]
    alone = [element("li", element("output"), class_=line.colour) for line in chart.lines if not line.label]
    entries = [*named, *levels, *alone]
    return element("ul", *entries, class_="legend")


def _sample(sign: Markup, *, line: bool = True) -> Markup:
    stroke = [element("path", d="M1,5.5L21,5.5", class_="line")] if line else []
    return element("svg", *stroke, sign, viewBox="0 0 22 11", width=22, height=11, aria_hidden="true")


def _numbers(chart: Chart) -> Markup:
    """A row for each x, a column for each line; of a path a row for each point."""
    if chart.is_path:
        rows = [[line.label, short(x), short(y)] for line in chart.lines for x, y in line.points]
        return table(["run", chart.x_label, chart.y_label], rows, numbers=True)
    columns = [dict(line.points) for line in chart.lines]
    xs = sorted({x for column in columns for x in column})
    rows = [[short(x), *(short(column[x]) if x in column else "" for column in columns)] for x in xs]
    return table([chart.x_label, *(line.label or chart.title for line in chart.lines)], rows, numbers=True)


def _number(value: float) -> str:
    """A pixel, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def gallery(charts: Iterable[Chart]) -> Markup:
    """Charts side by side, as many as the page has room for."""
    return element("div", joined(draw(chart) for chart in charts), class_="gallery")
