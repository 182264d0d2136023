"""The figures of these pages.

Building the pages draws most figures as SVG files (`draw_for_pages`, which `conf.py` calls). A page
names such a figure in a comment, `<!-- figure NAME: what it shows -->`. Code hosts also show the
few figures of `SHOWN_BY_CODE_HOSTS`, which `python docs/figures.py` draws again as small PNG files.

Figures have a white background, so that they look the same on light and dark pages.
"""

import runpy
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/figures"
COMPARISON = runpy.run_path(str(ROOT / "benchmarks/against_authors.py"))
MASKS = runpy.run_path(str(ROOT / "configs/studies/dropout_masks.py"))["MASKS"]
COLORS = 32  # of a PNG file, which text with smooth edges needs
INK, FAINT, PAPER = "#1f2328", "#8c959f", "#ffffff"
BLUE, ORANGE, GREEN, RED, GREY = "#bcd6f5", "#f8d3a5", "#b4dfc0", "#f4c1bd", "#e4e8ec"
SETTINGS = {
    "svg.hashsalt": "diffcse_jax",  # the same file in every run
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
}


def draw_for_pages() -> None:
    """Draw the figures that only built pages show, as SVG files."""
    FOLDER.mkdir(exist_ok=True)
    with mpl.rc_context(SETTINGS):
        for draw in BUILT:
            figure = draw()
            path = FOLDER / f"{draw.__name__}.svg"
            figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def main() -> None:
    """Draw the figures that code hosts also show, as PNG files with few colours."""
    FOLDER.mkdir(exist_ok=True)
    with mpl.rc_context(SETTINGS):
        for draw in SHOWN_BY_CODE_HOSTS:
            figure = draw()
            path = FOLDER / f"{draw.__name__}.png"
            figure.savefig(path, dpi=144, bbox_inches="tight")
            plt.close(figure)
            with Image.open(path) as picture:
                small = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
            small.save(path, optimize=True)


def contrast() -> Figure:
    """Draw two views of each sentence, and the positives and negatives of three contrasts."""
    figure, axes = canvas(9.6, 2.9)
    box(axes, 0.0, 1.35, 1.15, 0.6, "sentence $i$", GREY)
    for y, view in ((2.0, 1), (0.7, 2)):
        arrow(axes, (1.15, 1.65), (1.55, y + 0.3))
        box(axes, 1.55, y, 1.35, 0.6, f"encoder,\ndropout mask {view}", BLUE)
        arrow(axes, (2.9, y + 0.3), (3.2, y + 0.3))
        axes.text(3.25, y + 0.3, f"$z^{view}_i$", va="center", fontsize=12)
    size, cell = 4, 0.33
    pairs(
        axes,
        3.95,
        0.85,
        cell,
        [[("+", GREEN) if i == j else ("", RED) for j in range(size)] for i in range(size)],
    )
    axes.text(3.95 + size * cell / 2, 2.55, "SimCSE", ha="center", weight="bold")
    axes.text(3.95 + size * cell / 2, 2.27, "$z^1_i \\cdot z^2_j$", ha="center")
    off = [[("+", GREEN) if i == j else ("", ORANGE) for j in range(size)] for i in range(size)]
    pairs(axes, 5.6, 0.85, cell, off)
    axes.text(5.6 + size * cell / 2, 2.55, "SimCSE++", ha="center", weight="bold")
    axes.text(5.6 + size * cell / 2, 2.27, "negatives: no dropout", ha="center", fontsize=9)
    hard = [
        [("+", GREEN) if i == j else ("", RED) for j in range(size)]
        + [(r"$\alpha$" if i == j else "", RED) for j in range(size)]
        for i in range(size)
    ]
    pairs(axes, 7.25, 0.85, cell * 0.88, hard)
    axes.text(7.25 + size * cell * 0.88, 2.55, "supervised SimCSE", ha="center", weight="bold")
    axes.text(
        7.25 + size * cell * 0.88, 2.27, "positives | hard negatives", ha="center", fontsize=9
    )
    axes.text(
        6.9,
        0.35,
        "each row is a softmax: the positive (+) against the rest of the row",
        ha="center",
        fontsize=9,
    )
    return figure


def difference() -> Figure:
    """Draw DiffCSE.

    The discriminator reads the sentence embedding and predicts which tokens were replaced.
    """
    figure, axes = canvas(10.3, 4.1)
    original = ["[CLS]", "the", "river", "flows", "past", "the", "old", "town", "[SEP]"]
    masked = [*original[:2], "[MASK]", *original[3:6], "[MASK]", *original[7:]]
    edited = [*original[:2], "road", *original[3:]]
    labels = [str(int(a != b)) for a, b in zip(original, edited, strict=True)]
    left, width = 3.1, 0.78
    rows = (
        (3.35, original, "sentence"),
        (2.5, masked, "some tokens masked"),
        (1.65, edited, "filled by a generator"),
    )
    for y, tokens, name in rows:
        axes.text(left - 0.15, y + 0.2, name, ha="right", va="center")
        for column, token in enumerate(tokens):
            changed = {"[MASK]": ORANGE, "road": RED}.get(token, GREY)
            box(axes, left + column * width, y, width - 0.08, 0.4, token, changed)
    box(axes, left, 0.8, width - 0.08, 0.4, "h", GREEN)
    box(
        axes,
        left + width,
        0.8,
        8 * width - 0.08,
        0.4,
        "discriminator: was this token replaced?",
        BLUE,
    )
    axes.text(left - 0.15, 1.0, "embedding at position 0", ha="right", va="center")
    axes.text(left - 0.15, 0.4, "label", ha="right", va="center")
    for column, label in enumerate(labels):
        axes.text(
            left + (column + 0.45) * width, 0.4, label, ha="center", va="center", weight="bold"
        )
        arrow(axes, (left + (column + 0.45) * width, 1.65), (left + (column + 0.45) * width, 1.22))
    arrow(axes, (left + 4.5 * width, 3.35), (left + 4.5 * width, 2.93))
    arrow(axes, (left + 4.5 * width, 2.5), (left + 4.5 * width, 2.08))
    axes.text(
        left + 4.7 * width, 2.27, "masked LM, frozen", va="center", fontsize=10, color="#57606a"
    )
    box(axes, 0.0, 2.3, 0.85, 0.6, "encoder", BLUE)
    bent(axes, [(left + 0.35, 3.77), (left + 0.35, 3.92), (0.42, 3.92), (0.42, 2.93)])
    bent(axes, [(0.42, 2.3), (0.42, 0.62), (left + 0.35, 0.62), (left + 0.35, 0.78)])
    return figure


def edits() -> Figure:
    """Draw edits of a sentence, and the label of each token."""
    figure, axes = canvas(9.4, 2.9)
    left, width = 1.1, 0.9
    rows = (
        (
            "replace",
            ["the", "road", "flows", "past", "the", "old", "town"],
            (1,),
            "a token of the generator: label 1",
        ),
        (
            "insert",
            ["the", "wide", "river", "flows", "past", "the", "old", "town"],
            (1,),
            "a new token: label 1",
        ),
        (
            "delete",
            ["the", "river", "past", "the", "old", "town"],
            (2,),
            "the token after the dropped one: label 1",
        ),
    )
    for number, (name, tokens, changed, text) in enumerate(rows):
        y = 2.2 - 0.95 * number
        axes.text(left - 0.15, y + 0.2, name, ha="right", va="center", weight="bold")
        for column, token in enumerate(tokens):
            one = column in changed
            box(axes, left + column * width, y, width - 0.08, 0.4, token, RED if one else GREY)
            axes.text(
                left + (column + 0.45) * width,
                y - 0.17,
                "1" if one else "0",
                ha="center",
                va="center",
            )
        axes.text(
            left + 8 * width + 0.02, y + 0.2, text.replace(": ", ":\n"), va="center", fontsize=10
        )
    return figure


def dimensions() -> Figure:
    """Draw the contrast of rows and of columns, and the correlations of columns."""
    generator = np.random.default_rng(0)
    rows, size = 200, 10
    mixed = generator.normal(size=(rows, size)) @ (
        np.eye(size) + 0.32 * generator.normal(size=(size, size))
    )
    views = [mixed + 0.5 * generator.normal(size=mixed.shape) for _ in range(2)]
    z1, z2 = ((view - view.mean(0)) / view.std(0) for view in views)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 2.8), width_ratios=(0.9, 1, 1))
    left.imshow(z1[:14], cmap="Greys", aspect="auto", alpha=0.6)
    for corner, width, height, color in (
        ((-0.5, 3.5), size, 1, "#b35900"),
        ((5.5, -0.5), 1, 14, "#0969da"),
    ):
        left.add_patch(
            Rectangle(
                corner, width, height, fill=False, edgecolor=color, linewidth=2.5, clip_on=False
            )
        )
    left.text(-0.9, 4.0, "contrast", color="#b35900", ha="right", va="center", weight="bold")
    left.text(
        6.0, 14.3, "dcl, barlow_twins", color="#0969da", ha="center", va="center", weight="bold"
    )
    left.set(title="the embeddings of a batch,\none sentence per row", xticks=[], yticks=[])
    for axes, matrix, title in (
        (middle, z1.T @ z2 / rows, "correlations of columns:\nview 1 with view 2"),
        (right, np.eye(size), "target: each column correlates\nonly with itself"),
    ):
        image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    for axes in (left, middle, right):
        axes.title.set_fontsize(10)
    bar = figure.colorbar(image, ax=(middle, right), shrink=0.8, ticks=(-1, 0, 1))
    bar.outline.set_visible(False)
    return figure


def ranking() -> Figure:
    """Draw similarities to the other sentences, by a teacher and by both views."""
    names = ["a", "b", "c", "d", "e"]
    lists = {
        "teacher, frozen": ([0.82, 0.35, 0.61, 0.12, 0.48], ORANGE),
        "view 1": ([0.74, 0.52, 0.47, 0.20, 0.31], BLUE),
        "view 2": ([0.70, 0.44, 0.58, 0.16, 0.36], GREEN),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9.4, 2.8), sharey=True)
    for panel, (title, (values, color)) in zip(axes, lists.items(), strict=True):
        panel.bar(names, values, color=color, edgecolor=FAINT)
        order = np.argsort(-np.array(values))
        for rank, column in enumerate(order):
            panel.text(column, values[column] + 0.02, f"{rank + 1}.", ha="center", fontsize=10)
        panel.set(title=title, ylim=(0, 1))
        panel.title.set_fontsize(11)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("similarity to sentence $i$")
    note = (
        "distillation: views should match the frozen teacher. consistency: views should match each "
        "other"
    )
    figure.supxlabel("other sentences of the batch\n" + note, fontsize=10)
    figure.tight_layout()
    return figure


def reconstruction() -> Figure:
    """Draw two masked LMs: in the encoder, and on frozen states and the sentence embedding."""
    figure, axes = canvas(9.4, 3.0)
    axes.text(0.0, 2.75, "mlm (SimCSE): the encoder also predicts masked words", weight="bold")
    chain(
        axes,
        2.0,
        [
            ("masked\nsentence", GREY),
            ("encoder", BLUE),
            ("masked-LM\nhead", BLUE),
            ("masked\ntokens", RED),
        ],
    )
    axes.text(
        0.0,
        1.45,
        "reconstruction (InfoCSE): the sentence embedding helps to predict them",
        weight="bold",
    )
    chain(
        axes,
        0.1,
        [
            ("masked\nsentence", GREY),
            ("generator's lower\nblocks, frozen", ORANGE),
            ("two blocks,\ntrained", BLUE),
            ("masked-LM\nhead", BLUE),
            ("masked\ntokens", RED),
        ],
    )
    box(axes, 3.3, 0.87, 1.6, 0.36, "embedding h", GREEN)
    bent(axes, [(4.1, 0.87), (4.1, 0.68)])
    axes.text(5.0, 1.05, "at position 0", fontsize=10, va="center")
    return figure


def dropout_schedules() -> Figure:
    """Draw the twelve masks of the report on adjusting dropout."""
    rates = np.array([*MASKS.values()])
    figure, axes = plt.subplots(figsize=(6.6, 3.6))
    axes.imshow(rates, cmap="Blues", vmin=0.0, vmax=0.7)
    for (row, column), rate in np.ndenumerate(rates):
        axes.text(column, row, f"{rate:.1f}", ha="center", va="center", fontsize=8)
    axes.set(xlabel="block", xticks=range(rates.shape[1]), yticks=range(len(MASKS)), aspect="auto")
    axes.set_xticklabels(range(1, rates.shape[1] + 1))
    axes.set_yticklabels(MASKS)
    return figure


def against_authors() -> Figure:
    """Draw the dev curves of both sides from the second start of the study."""
    read, records = COMPARISON["read"], ROOT / "benchmarks/results"
    study = read(records / "does_difference_help_again.jsonl")
    rows = {}
    for row in ("SimCSE", "DiffCSE"):
        torch = read(records / f"does_difference_help_again_torch_{row.lower()}.jsonl")
        rows[row] = {
            "ours": COMPARISON["ours_of"](study, row),
            "torch": COMPARISON["torch_of"](torch),
        }
    return COMPARISON["draw"](rows)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure with coordinates in inches."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.1, width + 0.1), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draw a box with rounded corners and a text."""
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.07",
        facecolor=color,
        edgecolor=FAINT,
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2 - 0.01, text, ha="center", va="center", fontsize=10.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a straight arrow."""
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "->", "color": "#57606a", "shrinkA": 0, "shrinkB": 0},
    )


def bent(axes: Axes, points: list[tuple[float, float]]) -> None:
    """Draw a line through points that ends in an arrow."""
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color="#57606a", linewidth=1)
    arrow(axes, points[-2], points[-1])


def pairs(axes: Axes, x: float, y: float, cell: float, rows: list[list[tuple[str, str]]]) -> None:
    """Draw a matrix of signs and colours, with the first row on top."""
    for number, row in enumerate(rows):
        for column, (sign, color) in enumerate(row):
            corner = (x + column * cell, y + (len(rows) - 1 - number) * cell)
            axes.add_patch(
                Rectangle(corner, cell, cell, facecolor=color, edgecolor=PAPER, linewidth=1.5)
            )
            axes.text(
                corner[0] + cell / 2,
                corner[1] + cell / 2,
                sign,
                ha="center",
                va="center",
                fontsize=11,
            )


def chain(axes: Axes, y: float, boxes: list[tuple[str, str]]) -> None:
    """Draw boxes from left to right with arrows between them."""
    for number, (text, color) in enumerate(boxes):
        box(axes, 1.85 * number, y, 1.45, 0.56, text, color)
        if number:
            arrow(axes, (1.85 * number - 0.4, y + 0.28), (1.85 * number, y + 0.28))


SHOWN_BY_CODE_HOSTS: tuple[Callable[[], Figure], ...] = (contrast, difference, edits)
BUILT: tuple[Callable[[], Figure], ...] = (
    dimensions,
    ranking,
    reconstruction,
    dropout_schedules,
    against_authors,
)

if __name__ == "__main__":
    main()
