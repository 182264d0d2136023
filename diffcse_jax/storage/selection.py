"""Records of what was evaluated in a run, and of the model that a finished run gives.

Beside the checkpoints, which have a `Record` each, a workdir holds `start_scores.json` (that of the start, the baseline
of the run), `selection.json` (the choice, once training is over) and, where that is no checkpoint, its weights in
`selected.safetensors`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors.numpy import load_file

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import disk_errors, file_digests, first_changed, read_json_object, write_json, write_tensors
from diffcse_jax.models.parameters import Params
from diffcse_jax.storage import digests

_BASELINE = "start_scores.json"
SELECTION = "selection.json"
_WEIGHTS = "selected.safetensors"
_SAFE = "The checkpoints are whole."
_SEAL = "sha256"
_LATER = ("metrics", "dev_text")
_CHOSEN_AGAIN = "the command that trained the run, started again, chooses the model once more"

Outcomes = list[list[float]]  # what a dev metric summarises: of each of its data sets, one value per query or pair
FEWEST = 20  # of these: with less the bootstrap's interval is too narrow, and with one it is a point


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
    dev_text: str = ""  # identifies the text that `dev_metric` is measured on
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `bytes` and `sha256` of metrics.jsonl
    digests: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by item; empty in those of earlier versions

    @property
    def score(self) -> float | None:
        """The dev score that chooses the best checkpoint; None where there is none, or it may not be the best."""
        return self.dev[self.dev_metric] if self.dev and self.eligible else None

    def content(self) -> dict[str, Any]:
        """All but the digests; without what records of earlier versions have not, where it is empty."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name != "digests" and (value or name not in _LATER)}


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


_Kept = TypeVar("_Kept", Record, Selection)


def origin(share: float, step: int) -> str:
    """Where a model's weights are from, in words."""
    if share == 0:
        return "the start, unchanged"
    return f"step {step}" if share == 1 else f"{share:g} of the weights of step {step} and {1 - share:g} of the start's"


def write_baseline(workdir: Path, record: Record) -> None:
    """Keeps the record of the start."""
    with disk_errors(workdir / _BASELINE, safe=_SAFE):
        _write_sealed(workdir / _BASELINE, record.content())


def read_baseline(workdir: Path) -> Record | None:
    """The record of the start; None for runs of earlier versions, and before it is evaluated.

    Raises:
        CheckpointError: it is damaged.
    """
    path = workdir / _BASELINE
    if not path.is_file():
        return None
    values = _read_sealed(path, "remove it, and training that goes on, or is over, measures the start again")
    return _built(Record, values, path)


def write_selection(workdir: Path, selection: Selection, weights: Params) -> None:
    """Keeps the choice; `weights`, with a checkpoint's names, only where it is no checkpoint."""
    clear_selection(workdir)
    with disk_errors(workdir / SELECTION, safe=_SAFE):
        files = {}
        if selection.share < 1:
            write_tensors(workdir / _WEIGHTS, weights)
            files = file_digests(workdir, [workdir / _WEIGHTS])
        content = dataclasses.asdict(selection) | {"files": files}
        _write_sealed(workdir / SELECTION, content)  # last: its presence says that all is there


def clear_selection(workdir: Path) -> None:
    """Forgets an earlier choice."""
    with disk_errors(workdir, safe=_SAFE):
        for name in (SELECTION, _WEIGHTS):
            (workdir / name).unlink(missing_ok=True)


def read_selection(workdir: Path) -> Selection | None:
    """The choice; None while training goes on, and for runs of earlier versions.

    Raises:
        CheckpointError: it, or the weights that belong to it, are damaged.
    """
    path = workdir / SELECTION
    if not path.is_file():
        return None
    values = _read_sealed(path, _CHOSEN_AGAIN)
    if name := first_changed(workdir, values.pop("files", {})):
        raise CheckpointError(f"{workdir / name} is not what was saved: {_CHOSEN_AGAIN}")
    return _built(Selection, values | {"record": _built(Record, values.get("record", {}), path)}, path)


def read_weights(workdir: Path) -> Params:
    """The weights of a choice that is no checkpoint, with a checkpoint's names."""
    return load_file(workdir / _WEIGHTS)


def _write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON object with its own SHA-256."""
    write_json(path, content | {_SEAL: digests.of_json(content)})


def _read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """The content of `_write_sealed`; what earlier versions wrote has no digest.

    Raises:
        CheckpointError: it is damaged, with the remedy.
    """
    try:
        content = read_json_object(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {remedy}") from error
    expected = content.pop(_SEAL, None)
    if expected is not None and expected != digests.of_json(content):
        raise CheckpointError(f"{path} is not what was saved: {remedy}")
    return content


def _built(kind: type[_Kept], values: dict[str, Any], path: Path) -> _Kept:
    try:
        return kind(**values)
    except TypeError as error:  # a key that there is not, or one that is missing
        raise CheckpointError(f"{path} is not what was saved: {error}") from error
