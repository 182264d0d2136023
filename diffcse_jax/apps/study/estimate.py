"""How long the runs of a study will take on this machine, and how much disk they need.

A few steps of each row are timed.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import disk_usage

from diffcse_jax import api
from diffcse_jax.apps.study.run import NOT_STARTED, StudyRun
from diffcse_jax.config import Config, flat
from diffcse_jax.errors import counted
from diffcse_jax.hosts import duration, log_line
from diffcse_jax.io import read_sealed, replace_dir
from diffcse_jax.training import generator
from diffcse_jax.training.callbacks import Callback, Training

STEPS = 12  # that are timed, with a dev evaluation after each half
FIRST = 3  # steps, during which programs compile
WORTH_TIMING = 4  # runs that are not started: fewer end soon
KEPT_CHECKPOINTS = 3  # that a run keeps: the last two and the best one


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run needs."""

    steps: int
    step_seconds: float
    evaluation_seconds: float  # of one dev evaluation
    other_seconds: float  # before the first steps: reading the text, scoring the start, compiling
    checkpoint_bytes: int
    head_seconds: float = 0.0  # training the generator's masked-LM head, if the run has its own

    def seconds(self, every: int) -> float:
        """Return the duration of a run with a dev evaluation after `every` steps.

        With 0, there is one only at the end.
        """
        evaluations = -(-self.steps // every) if every else 1  # the last one is at the end
        return (
            self.steps * self.step_seconds
            + evaluations * self.evaluation_seconds
            + self.other_seconds
            + self.head_seconds
        )

    @property
    def bytes(self) -> int:
        """The size of a run's folder.

        It has the checkpoints, each with two moments of Adam, and the export.
        """
        return KEPT_CHECKPOINTS * self.checkpoint_bytes + self.checkpoint_bytes // 3


def log_needs(runs: Sequence[StudyRun], folder: Path) -> None:
    """Log how long the runs that are not done will take, and how much disk they need.

    This is done only if it is worth timing.
    """
    rest = [
        run
        for run in runs
        if run.seed is not None and not run.start and run.look()[1] == NOT_STARTED
    ]
    if len(rest) < WORTH_TIMING:
        return
    folder.mkdir(parents=True, exist_ok=True)
    costs: dict[str, Cost | None] = {}
    for run in rest:
        if run.row not in costs:
            costs[run.row] = _probe(run, folder)
    known = {row: cost for row, cost in costs.items() if cost}
    timed = [(run.row, run.config.eval.every) for run in rest if run.row in known]
    for line in describe(known, timed, disk_usage(folder).free) if known else ():
        log_line(line)


def _probe(run: StudyRun, folder: Path) -> Cost | None:
    """Time a few steps of a run.

    Return None for a run that is too short or fails. It will fail again when it is done.
    """
    try:
        if not _is_too_short(run.config):
            log_line(f"timing a few steps of {run.row}")
        cost = probe(run.config, folder)
    except Exception as error:  # whatever a run may raise
        log_line(f"notice: {run.row} was not timed: {error}")
        return None
    if cost is None:
        log_line(f"{run.row} is not timed: its runs have fewer than {STEPS} steps")
    return cost


def _is_too_short(config: Config) -> bool:
    """Return whether a run has too few steps to time. Of epochs, only the run knows the steps."""
    return 0 < config.train.steps < STEPS


class _Ended(Exception):
    """Ends a run, because everything is measured or nothing can be."""


class _Stopwatch(Callback):
    """Times steps and a dev evaluation, then ends training."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.steps: dict[int, float] = {}
        self.evaluation = 0.0
        self.bytes = 0
        self.head_seconds = 0.0  # of a step of the generator's masked-LM head
        self.training: Training | None = None

    def on_start(self, training: Training) -> None:
        if training.total_steps < STEPS:
            raise _Ended
        self.training = training
        report = training.workdir / generator.FOLDER / generator.REPORT
        if report.is_file():
            self.head_seconds = read_sealed(report, "Start the study again")["step_seconds"]

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = time.perf_counter()

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        if step:
            self.evaluation = time.perf_counter() - self.steps[step]

    def on_save(self, step: int, checkpoint: Path) -> None:
        self.bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        if step >= STEPS or STEPS in self.steps:
            raise _Ended


def probe(config: Config, folder: Path) -> Cost | None:
    """Run a few steps in a temporary folder inside `folder`, and export nothing.

    Return None for a run that has fewer steps. It trains none of them.
    """
    if _is_too_short(config):
        return None
    values = flat(config.to_dict()) | {"eval.every": STEPS // 2, "train.log_every": 1}
    # Nothing may end the run before everything is measured, but a guard is scored as usual.
    values |= {"eval.patience": 0, "eval.max_drop": 0.0}
    values |= {"eval.guard": config.eval.guard or config.eval.max_drop > 0}
    # A head is trained no longer than its steps need to be timed.
    head_steps = min(config.generator.head_steps, generator.WORTH_TIMING)
    values["generator.head_steps"] = head_steps
    watch = _Stopwatch()
    # The next one removes what a killed process leaves.
    with contextlib.suppress(_Ended), replace_dir(folder / "timing") as temporary:
        api.run(Config.from_dict(values), temporary / "probe", [watch])
        raise _Ended  # so that the folder is not kept
    if watch.training is None:
        return None
    between = [
        watch.steps[step] - watch.steps[step - 1]
        for step in range(FIRST + 1, STEPS + 1)
        if step != STEPS // 2 + 1  # follows the evaluation
    ]
    seconds = statistics.median(between)
    fitting = generator.with_fitting_head(config, watch.training.total_steps)
    return Cost(
        steps=watch.training.total_steps,
        step_seconds=seconds,
        evaluation_seconds=watch.evaluation,
        other_seconds=watch.steps[FIRST] - watch.began - FIRST * seconds,
        checkpoint_bytes=watch.bytes,
        head_seconds=watch.head_seconds * (fitting.generator.head_steps - head_steps),
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
        head = (
            f", {duration(cost.head_seconds)} for a generator's head" if cost.head_seconds else ""
        )
        yield (
            f"{row}: {counted(number, 'run{s}')} of {cost.steps:,} steps, {cost.step_seconds:.3g} "
            f"s a step{head} and {cost.evaluation_seconds:.3g} s a dev evaluation: "
            f"{duration(total)}"
        )
    size = sum(costs[row].bytes for row, _ in runs)
    together = f"{duration(sum(seconds.values()))} and {size / 1e9:,.1f} GB"
    yield f"together {together}, without the scoring of tasks and fine-tunings"
    if size > free:
        yield (
            f"warning: {free / 1e9:,.1f} GB are free. Name a --workdir with more room, or remove "
            "folders of done runs"
        )
