"""What a run's records say: the result in words, and the charts of its metrics.

The run may be finished or in progress.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.config import Config
from diffcse_jax.data.sources import shown_name
from diffcse_jax.errors import CheckpointError, counted, require_extra
from diffcse_jax.io import expand_path, read_json_object, replace_file
from diffcse_jax.run_folder import records
from diffcse_jax.run_folder.finding import find_run
from diffcse_jax.run_folder.start import read_config, read_start

# Where a run's own test scores may be.
RESULTS = ("evaluation.json", "results.json", "export/results.json")


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The records of a run's folder."""

    workdir: Path
    config: Config
    rows: Sequence[dict[str, float]]  # with finite values only
    baseline: records.Record | None
    selection: records.Selection | None
    starts: Sequence[dict[str, Any]]
    results: Sequence[dict[str, Any]]  # test scores as in the `results.json` of `diffcse evaluate`

    @property
    def label(self) -> str:
        """The name of the folder, for a seed with that of its parent."""
        parts = self.workdir.absolute().parts
        return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a metric."""
        return [(row["step"], row[name]) for row in self.rows if name in row]

    @property
    def metric(self) -> str:
        """The dev metric that chooses the checkpoint."""
        record = self.selection.record if self.selection else self.baseline
        return record.dev_metric if record else self.config.eval.metric

    @property
    def before(self) -> float | None:
        """The dev metric of the starting checkpoint, after selection as the verdict has it."""
        if self.selection and self.selection.judged:
            return self.selection.judged[0]
        return self.baseline.dev.get(self.metric) if self.baseline else None

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and score of the selected model, or of the best checkpoint so far."""
        if self.selection:
            judged = self.selection.judged
            score = judged[1] if judged else self.selection.record.dev[self.metric]
            return self.selection.record.step, score
        later = [(int(step), score) for step, score in self.points(f"dev/{self.metric}") if step]
        return max(later, key=lambda each: (each[1], -each[0]), default=None)

    @property
    def keeps_start(self) -> bool:
        """Whether the run has ended and exports the starting checkpoint unchanged."""
        return self.selection is not None and self.selection.interpolation == 0

    @property
    def state(self) -> str:
        """How far the run is."""
        step = f"{max((int(row['step']) for row in self.rows), default=0):,}"
        step += f" of {self.config.train.steps:,}" if self.config.train.steps else ""
        if self.selection:
            return f"finished at step {step}"
        return (
            f"in progress or stopped at step {step}" if self.rows else "started, nothing measured"
        )

    @property
    def outcome(self) -> list[str]:
        """The lines of the verdict of a finished run, or the best score so far."""
        if self.selection:
            return [line.strip() for line in self.selection.verdict.splitlines()]
        if self.best is None:
            return ["No model is evaluated yet."]
        step, score = self.best
        before = f" (before training: {self.before:.2f})" if self.before is not None else ""
        metric = readable(self.metric)
        return [f"The best checkpoint so far is step {step:,}: {metric} {score:.2f}{before}."]

    @property
    def model(self) -> str:
        """The weights that the run exports, or would export now."""
        if self.selection:
            return records.origin(self.selection.interpolation, self.selection.record.step)
        return f"step {self.best[0]:,} so far" if self.best else "none yet"

    @property
    def text(self) -> str:
        """What was trained on."""
        described = "; ".join(
            filter(None, (loss.data_description for loss in self.config.losses.values()))
        )
        data = self.config.data
        return described or f"{shown_name(data.train_file)} (pairs: {data.pairs})"

    def applied(self, pooler: str) -> str:
        """Return the name of a pooler and of the modules that the start has after it."""
        with contextlib.suppress(CheckpointError):
            start, _ = read_start(self.workdir)
            return start.sentence_head.applied(pooler)
        return pooler

    @property
    def prompts(self) -> str:
        """The prompts of the trained model, or an empty string."""
        with contextlib.suppress(CheckpointError):
            _, prompts = read_start(self.workdir)
            return ", ".join(
                f"{name} {prompt!r}" for name, prompt in prompts.by_name.items() if prompt
            )
        return ""

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before trusting the numbers."""
        skipped = max((row.get("bad_steps", 0) for row in self.rows), default=0)
        skipped_steps = counted(int(skipped), "step{s}")
        stalled = any(norm == 0 for _, norm in self.points("grad_norm"))
        dirty = any(
            isinstance(start.get("git"), dict) and start["git"].get("dirty")
            for start in self.starts
        )
        environments = {
            str([start.get(name) for name in ("versions", "devices", "git")])
            for start in self.starts
        }
        mixed = len(environments) > 1
        unknown = self.baseline.unknown if self.baseline else 0.0
        reasons = {
            f"{unknown:.2%} of the training sentences consist largely of words that the starting "
            "checkpoint does not know": unknown,
            f"{skipped_steps} skipped because the loss or gradient was NaN or infinite": skipped,
            "the gradient was 0 at some steps, so nothing was learned there": stalled,
            "the run was resumed with other versions, devices or code than it started with": mixed,
            "the code had uncommitted changes": dirty,
        }
        return [warning for warning, applies in reasons.items() if applies]


def read_summary(path: str | Path) -> RunSummary:
    """Read the run in a folder, or the run that a checkpoint or export belongs to."""
    path = expand_path(path)
    workdir = find_run(path) or find_run(path.parent)
    if workdir is None:
        raise CheckpointError(f"{path} is not the folder of a run (it has no config.json of a run)")
    scored = (read_results(workdir / name) for name in RESULTS if (workdir / name).is_file())
    return RunSummary(
        workdir,
        read_config(workdir),
        [
            {name: value for name, value in row.items() if math.isfinite(value)}
            for row in records.read_metrics(workdir)
        ],
        records.read_baseline(workdir),
        records.read_selection(workdir),
        records.read_starts(workdir),
        results=next(filter(None, scored), []),
    )


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results of models in a file of `diffcse evaluate`.

    For another file, the list is empty.
    """
    content = read_json_object(path)
    models = content.get("models", [content])
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise CheckpointError(
            f"{path}: `models` is not a list of results. Write the file again with diffcse evaluate"
        )
    return [
        each
        for each in models
        if {"model", "pooler"} <= each.keys()
        and all(isinstance(each.get(name), dict) for name in ("tasks", "averages"))
    ]


def readable(metric: str) -> str:
    """Return a metric's name for people."""
    return metric.removeprefix("dev/").replace("_", " ")


# Charts, in colours for any page

BASELINE = "#7d868f"  # the colour of starting checkpoints
# They are readable on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#00805c", "#a24a85", "#8a6100", "#3c57c4")
MARKERS = "osv^Dp"
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
SIMILARITY_CURVES = ("similarity_positive", "similarity_negative")


@dataclasses.dataclass(frozen=True)
class Chart:
    """One or more metrics of a run over its steps."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]  # (step, value) pairs by metric
    levels: Mapping[str, float]  # values of the starting checkpoint, which are dashed lines
    log: bool  # a logarithmic vertical axis
    several: bool  # of several metrics, which a legend names, even if only one has values yet

    @property
    def svg(self) -> Any:
        """The chart as markup that takes the page's text colour.

        It names itself for screen readers.
        """
        from markupsafe import Markup, escape

        content = io.StringIO()
        _draw([self], content, (5, 3.6), format="svg", transparent=True, metadata={"Date": None})
        svg = content.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        # Charts share a page, so the names of their parts must differ.
        prefix = f"c{zlib.crc32(self.title.encode())}-"
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}", svg.replace(INK, "currentColor"))
        return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1))

    def draw(self, axes: Any) -> None:
        """Draw the chart, without its title, into axes of matplotlib."""
        labels = {name: readable(name) if self.several else "" for name in self.lines}
        colours = dict(zip(self.lines, itertools.cycle(COLOURS), strict=False))
        for (name, points), marker in zip(
            self.lines.items(), itertools.cycle(MARKERS), strict=False
        ):
            xs, ys = zip(*points, strict=True)
            every = 1 if len(xs) <= MOST_MARKERS else [len(xs) - 1]
            axes.plot(
                xs,
                ys,
                marker=marker,
                markevery=every,
                color=colours[name],
                label=labels[name] or None,
            )
        # Levels come after the lines, so that the legend has a column of each.
        for name, level in self.levels.items():
            colour = colours[name] if self.several else BASELINE
            label = f"{labels[name]} before training".strip()
            axes.axhline(level, linestyle="--", linewidth=1.4, color=colour, label=label)
        if self.log:
            axes.set_yscale("log")
        axes.set(xlabel="step", ylabel=self.title)
        ticker = require_extra("matplotlib.ticker", "report")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        if self.several or self.levels:
            axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def draw_curves(workdir: Path) -> Path:
    """Draw a run's dev metrics and losses into `WORKDIR/report/curves.png`, and return its path."""
    charts = curves(read_summary(workdir))
    path = workdir / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    with replace_file(path) as file:
        _draw([*charts["dev"], *charts["losses"]], file, (4.6, 4.2), dpi=120)
    return path


def _draw(charts: Sequence[Chart], file: Any, size: tuple[float, float], **options: Any) -> None:
    """Draw charts into a file, next to one another and each of this size in inches.

    Several charts have titles.
    """
    matplotlib, figures = (
        require_extra(name, "report") for name in ("matplotlib", "matplotlib.figure")
    )
    across = min(max(len(charts), 1), MOST_ACROSS)
    down = max(math.ceil(len(charts) / across), 1)
    salt = charts[0].title if charts else ""  # makes equal charts equal files
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure = figures.Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
        for number, chart in enumerate(charts, 1):
            axes = figure.add_subplot(down, across, number, title=chart.title if charts[1:] else "")
            chart.draw(axes)
        figure.savefig(file, **options)


def curves(run: RunSummary) -> dict[str, list[Chart]]:
    """Return the charts of a run's metrics by section: `dev`, `losses` and `others`."""
    names = list(dict.fromkeys(name for row in run.rows for name in row))
    of_losses = {name: loss.panels for name, loss in run.config.losses.items()}
    panels = shared_panels(of_losses, names)
    chosen = f"dev/{run.metric}"
    recalls = [
        name for name in names if name.startswith("dev/") and "recall@" in name and name != chosen
    ]
    # A masked LM has two guesses beside it.
    guesses = [name for name in (f"{chosen}_unigram", f"{chosen}_bigram") if name in names]
    dev = {f"dev metric {readable(chosen)}": [chosen, *guesses], "recall, %": recalls}
    together = {chosen, *guesses, *recalls}
    dev |= {
        readable(name): [name] for name in names if name.startswith("dev/") and name not in together
    }

    terms = [name for name in names if name.startswith("loss_")]
    losses: dict[str, Sequence[str]] = {
        f"{readable(name.removeprefix('loss_'))} loss": [name] for name in terms
    }
    if len(losses) != 1:
        losses["loss (weighted sum)"] = ["loss"]
    losses |= panels | {"similarity of pairs and of others": SIMILARITY_CURVES}

    shown = {
        "step",
        "loss",
        "bad_steps",
        *SIMILARITY_CURVES,
        *(name for metrics in panels.values() for name in metrics),
    }
    elsewhere = ("loss_", "dev/", "start/")
    rest = [name for name in names if name not in shown and not name.startswith(elsewhere)]
    others = {
        f"{readable(name)} (training)" if f"dev/{name}" in names else readable(name): [name]
        for name in rest
    }
    return {
        "dev": _charts(dev, run),
        "losses": _charts(losses, run, may_be_log=True),
        "others": _charts(others, run),
    }


def shared_panels(
    of_losses: Mapping[str, Mapping[str, Sequence[str]]], known: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the panels of all losses. Losses that name a panel alike share it.

    Args:
        of_losses: The panels of each loss by its name.
        known: The metrics of the run. If two losses have a metric, each has its own name in front.
    """
    panels: dict[str, tuple[str, ...]] = {}
    for loss, own in of_losses.items():
        for title, metrics in own.items():
            names = (metric if metric in known else f"{loss}.{metric}" for metric in metrics)
            panels[title] = (*panels.get(title, ()), *names)
    return panels


def _charts(
    panels: Mapping[str, Sequence[str]], run: RunSummary, *, may_be_log: bool = False
) -> list[Chart]:
    """Return a chart for each title and its metrics, if there are values."""
    charts = []
    for title, names in panels.items():
        if lines := {name: points for name in names if (points := run.points(name))}:
            starts = {name: run.points(f"start/{name.removeprefix('dev/')}") for name in lines}
            ys = [y for points in lines.values() for _, y in points]
            log = may_be_log and min(ys) > 0 and max(ys) / min(ys) > WIDEST_LINEAR
            levels = {name: points[0][1] for name, points in starts.items() if points}
            charts.append(Chart(title, lines, levels, log, len(names) > 1))
    return charts
