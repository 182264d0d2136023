"""Records of what was evaluated in a run, and of the model that a finished run gives.

Beside the checkpoints, which have a `Record` each, a workdir holds `start_scores.json` (that of the start, the baseline
of the run), `selection.json` (the choice, once training is over) and, where that is no checkpoint, its weights in
`selected.safetensors`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

from diffcse_jax.models.parameters import Params
from diffcse_jax.storage.files import read_json, write_json, write_tensors, writing

_BASELINE = "start_scores.json"
SELECTION = "selection.json"
_WEIGHTS = "selected.safetensors"
_SAFE = "The checkpoints are whole."

Outcomes = list[list[float]]  # what a dev metric summarises: of each of its data sets, one value per query or pair


class Measured(NamedTuple):
    """A dev evaluation of an encoder."""

    scores: dict[str, float]
    outcomes: Outcomes


NOTHING = Measured({}, [])  # where nothing was evaluated


@dataclasses.dataclass(frozen=True)
class Record:
    """An encoder of a run: where it stands, how it pools, and its dev evaluation, if there was one."""

    step: int  # 0: the start
    pooler: str
    dev: dict[str, float]  # empty where nothing was evaluated
    dev_metric: str  # the dev score that chooses the best checkpoint
    text: str  # identifies the tokenised training text
    outcomes: Outcomes = dataclasses.field(default_factory=list)  # of `dev_metric`
    eligible: bool = True  # may be the best one
    bad_steps: int = 0  # that were not applied
    digests: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by item; empty in those of earlier versions

    @property
    def score(self) -> float | None:
        """The dev score that chooses the best checkpoint; None where there is none, or it may not be the best."""
        return self.dev[self.dev_metric] if self.dev and self.eligible else None

    def content(self) -> dict[str, Any]:
        """All but the digests."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "digests"}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The model that a finished run gives.

    Attributes:
        record: of the model; its step is that of the checkpoint which it was made from, or 0.
        share: of the trained weights: 1 for the checkpoint itself, 0 for the start, between them a weighted mean.
        verdict: how the run's best model compares with the start, and what is exported, in one line.
    """

    record: Record
    share: float
    verdict: str


def origin(share: float, step: int) -> str:
    """Where a model's weights are from, in words."""
    if share == 0:
        return "the start, unchanged"
    return f"step {step}" if share == 1 else f"{share:g} of the weights of step {step} and {1 - share:g} of the start's"


def write_baseline(workdir: Path, record: Record) -> None:
    """Keeps the record of the start."""
    with writing(workdir / _BASELINE, safe=_SAFE):
        write_json(workdir / _BASELINE, dataclasses.asdict(record))


def read_baseline(workdir: Path) -> Record | None:
    """The record of the start; None for runs of earlier versions, and before it is evaluated."""
    path = workdir / _BASELINE
    return Record(**read_json(path)) if path.is_file() else None


def write_selection(workdir: Path, selection: Selection, weights: Params) -> None:
    """Keeps the choice; `weights`, with a checkpoint's names, only where it is no checkpoint."""
    clear_selection(workdir)
    with writing(workdir / SELECTION, safe=_SAFE):
        if selection.share < 1:
            write_tensors(workdir / _WEIGHTS, weights)
        write_json(workdir / SELECTION, dataclasses.asdict(selection))  # last: its presence says that all is there


def clear_selection(workdir: Path) -> None:
    """Forgets an earlier choice."""
    for name in (SELECTION, _WEIGHTS):
        (workdir / name).unlink(missing_ok=True)


def read_selection(workdir: Path) -> Selection | None:
    """The choice; None while training goes on, and for runs of earlier versions."""
    path = workdir / SELECTION
    if not path.is_file():
        return None
    values = read_json(path)
    return Selection(**values | {"record": Record(**values["record"])})


def read_weights(workdir: Path) -> Params:
    """The weights of a choice that is no checkpoint, with a checkpoint's names."""
    return load_file(workdir / _WEIGHTS)
