"""How long the runs of a study will take on this machine, and how much disk they need.

A few steps of each row are timed.
"""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from diffcse_jax import api
from diffcse_jax.config import Config, flat
from diffcse_jax.errors import counted
from diffcse_jax.training.callbacks import Callback, Training

STEPS = 12  # that are timed, with a dev evaluation after each half
FIRST = 3  # steps, during which programs compile
KEPT_CHECKPOINTS = 3  # that a run keeps: the last two and the best one


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run needs."""

    steps: int
    step_seconds: float
    evaluation_seconds: float  # of one dev evaluation
    other_seconds: float  # before the first steps: reading the text, scoring the start, compiling
    checkpoint_bytes: int

    def seconds(self, every: int) -> float:
        """Return the duration of a run with a dev evaluation after `every` steps.

        With 0, there is one only at the end.
        """
        evaluations = -(-self.steps // every) if every else 1  # the last one is at the end
        return (
            self.steps * self.step_seconds
            + evaluations * self.evaluation_seconds
            + self.other_seconds
        )

    @property
    def bytes(self) -> int:
        """The size of a run's folder.

        It has the checkpoints, each with two moments of Adam, and the export.
        """
        return KEPT_CHECKPOINTS * self.checkpoint_bytes + self.checkpoint_bytes // 3


class _Measured(Exception):
    """Ends training, because everything is measured."""


class _Stopwatch(Callback):
    """Times steps and a dev evaluation, then ends training."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.steps: dict[int, float] = {}
        self.evaluation = 0.0
        self.bytes = 0
        self.training: Training | None = None

    def on_start(self, training: Training) -> None:
        self.training = training

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = time.perf_counter()

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        if step:
            self.evaluation = time.perf_counter() - self.steps[step]

    def on_save(self, step: int, checkpoint: Path) -> None:
        self.bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        if step >= STEPS or STEPS in self.steps:
            raise _Measured


def probe(config: Config, folder: Path) -> Cost | None:
    """Run a few steps in a temporary folder inside `folder`.

    Return None for a run that is over before they are.
    """
    values = flat(config.to_dict()) | {"eval.every": STEPS // 2, "train.log_every": 1}
    watch = _Stopwatch()
    with tempfile.TemporaryDirectory(dir=folder) as temporary, contextlib.suppress(_Measured):
        api.run(Config.from_dict(values), Path(temporary) / "probe", [watch])
        return None
    assert watch.training is not None, "it has begun"
    between = [
        watch.steps[step] - watch.steps[step - 1]
        for step in range(FIRST + 1, STEPS + 1)
        if step != STEPS // 2 + 1  # follows the evaluation
    ]
    seconds = statistics.median(between)
    return Cost(
        steps=watch.training.total_steps,
        step_seconds=seconds,
        evaluation_seconds=watch.evaluation,
        other_seconds=watch.steps[FIRST] - watch.began - FIRST * seconds,
        checkpoint_bytes=watch.bytes,
    )


def describe(
    costs: Mapping[str, Cost], runs: Sequence[tuple[str, int]], free: int
) -> Iterable[str]:
    """Yield what runs will need, in words.

    Args:
        costs: The cost of a run by row.
        runs: The row of each run, and the steps between its dev evaluations.
        free: The free bytes of the disk.
    """
    seconds: dict[str, float] = {}
    for row, every in runs:
        seconds[row] = seconds.get(row, 0.0) + costs[row].seconds(every)
    for row, total in seconds.items():
        cost = costs[row]
        number = sum(row == other for other, _ in runs)
        yield (
            f"{row}: {counted(number, 'run{s}')} of {cost.steps:,} steps, {cost.step_seconds:.3g} "
            f"s a step and {cost.evaluation_seconds:.3g} s a dev evaluation: {duration(total)}"
        )
    size = sum(costs[row].bytes for row, _ in runs)
    together = f"{duration(sum(seconds.values()))} and {size / 1e9:,.1f} GB"
    yield f"together {together}, without the scoring of tasks and fine-tunings"
    if size > free:
        yield (
            f"warning: {free / 1e9:,.1f} GB are free. Name a --workdir with more room, or remove "
            "folders of done runs"
        )


def duration(seconds: float) -> str:
    """Return a duration such as `35 min` or `2 h 5 min`."""
    minutes = max(1, round(seconds / 60))
    hours, rest = divmod(minutes, 60)
    return f"{hours:,} h {rest} min" if hours else f"{rest} min"
