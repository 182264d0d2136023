"""Dev metrics compared with a labelled metric: the model of a run that each chooses, and how good that one is.

Both are read of `metrics.jsonl`. The models of a run are its checkpoints and, where it is recorded, its start.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.stats

from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation import comparison
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.storage.workdir import METRICS
from diffcse_jax.training.metrics import read_metrics

LOWER_IS_BETTER = ("uniformity",)
START, DEV = "start/", "dev/"

Scores = Mapping[str, float]  # of a model
Models = Sequence[Scores]  # of a run, the start first


@dataclasses.dataclass(frozen=True)
class Choosing:
    """A dev metric beside the labelled one, over the models that have both.

    Attributes:
        runs: those with two such models or more.
        models: of all runs; equal ones, such as a start that runs share, count once.
        correlation: Spearman's, over all of them; None where one of the metrics is constant.
        within: the mean over runs of Spearman's over a run's own models, of those runs in which neither is constant.
        losses: of each run, the labelled metric of its best model less that of the model that the dev metric chooses.
        loss_of_all: the same, chosen among the models of all runs.
    """

    runs: int
    models: int
    correlation: float | None
    within: float | None
    losses: Sequence[float]
    loss_of_all: float


def read_models(paths: Iterable[Path]) -> dict[Path, Models]:
    """The dev scores of every run in these folders, at any depth.

    Raises:
        ConfigError: a folder that holds no run.
    """
    found: dict[Path, Models] = {}
    for path in map(expand_path, paths):
        files = sorted(file for file in path.rglob(METRICS) if file.parent == path or _is_of_run(file))
        if not files:
            raise ConfigError(f"{path}: no run's folder, and none in it: there is no {METRICS}")
        found |= {file.parent: models_of(read_metrics(file.parent)) for file in files}
    return found


def _is_of_run(metrics: Path) -> bool:
    """True unless it lies in a run's folder: set aside as damaged, or of the heads' stage of a fine-tuning."""
    return find_run(metrics.resolve().parent.parent) is None


def models_of(rows: Iterable[Scores]) -> Models:
    """The start, where it was scored, and the checkpoints, from the rows of a run."""
    rows = [row for row in rows if any(name.startswith(DEV) for name in row)]
    models = [_named(row, DEV) for row in rows if row["step"] > 0]
    starts = [_named(row, START) or _named(row, DEV) for row in rows if row["step"] == 0]
    return [*starts[:1], *models]


def compared(runs: Iterable[Models], labelled: str, metric: str) -> Choosing | None:
    """The comparison of a metric with the labelled one; None where no run has two models with both scores.

    Of models with equal scores the first is chosen, as training does, which is the nearest to the start.
    """
    pairs = [[_pair(model, metric, labelled) for model in run if {metric, labelled} <= model.keys()] for run in runs]
    pairs = [run for run in pairs if len(run) > 1]
    if not pairs:
        return None
    every = list(dict.fromkeys(pair for run in pairs for pair in run))
    within = [correlation for run in pairs if (correlation := _spearman(run)) is not None]
    return Choosing(
        len(pairs),
        len(every),
        _spearman(every),
        statistics.mean(within) if within else None,
        [_loss(run) for run in pairs],
        _loss(every),
    )


def metrics_beside(runs: Iterable[Models], labelled: str) -> list[str]:
    """The dev metrics that stand beside the labelled one: all but recalls, which go with a rank of their own.

    Raises:
        ConfigError: no model has the labelled one.
    """
    names = list(dict.fromkeys(name for run in runs for model in run for name in model))
    if labelled not in names:
        raise ConfigError(f"--labelled: no run has the dev score {labelled!r}; there are: {', '.join(names)}")
    return [name for name in names if name != labelled and "_recall@" not in name]


def show(runs: Mapping[Path, Models], labelled: str, style: str) -> str:
    """The table of all metrics, best first, with what it is about.

    Raises:
        ConfigError: no model has the labelled metric, or none has another one.
    """
    found = {metric: compared(runs.values(), labelled, metric) for metric in metrics_beside(runs.values(), labelled)}
    judged = {metric: choosing for metric, choosing in found.items() if choosing}
    if not judged:
        raise ConfigError(f"no run has two models with {labelled} and another dev metric (eval.beside)")
    columns = ["runs", "models", "correlation", "in a run", "loss", "worst", "of all"]
    rows = [
        comparison.Row(metric, dict(zip(columns, _cells(choosing), strict=True)))
        for metric, choosing in sorted(judged.items(), key=lambda entry: statistics.mean(entry[1].losses))
    ]
    about = [
        f"labelled: {labelled}",
        "correlation: Spearman's, over all models; in a run: the mean of that of each run",
        "loss: points of the labelled metric by which the model chosen is below the best",
        "one, in a run (mean and worst) and of all models; the start is one of them",
    ]
    return "\n".join([comparison.table(columns, rows, style, "metric"), "", *about]) + "\n"


def _cells(choosing: Choosing) -> list[str]:
    correlations = [choosing.correlation, choosing.within]
    losses = [statistics.mean(choosing.losses), max(choosing.losses), choosing.loss_of_all]
    return [
        str(choosing.runs),
        str(choosing.models),
        *("-" if value is None else f"{value:.2f}" for value in correlations),
        *(f"{value:.2f}" for value in losses),
    ]


def _named(row: Scores, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def _pair(model: Scores, metric: str, labelled: str) -> tuple[float, float]:
    """The score by which the metric chooses, higher is better, and the labelled one."""
    return (-1 if metric in LOWER_IS_BETTER else 1) * model[metric], model[labelled]


def _spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    scores, labelled = np.array(pairs).T
    if np.ptp(scores) == 0 or np.ptp(labelled) == 0:
        return None
    return float(scipy.stats.spearmanr(scores, labelled).statistic)


def _loss(pairs: Sequence[tuple[float, float]]) -> float:
    chosen = max(pairs, key=lambda pair: pair[0])
    return max(labelled for _, labelled in pairs) - chosen[1]
