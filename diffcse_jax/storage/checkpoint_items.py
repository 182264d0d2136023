"""The items of one checkpoint, read and compared with the digests in its record; and which checkpoints there are.

A checkpoint is `checkpoints/STEP` with separate items, so that parameters can be read alone: `params`, `opt_state`,
`data` (the state of the batches' iterator) and `record` (`Record` as JSON: the dev scores, and digests of all items,
with which they are compared when they are read).
"""

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from diffcse_jax.errors import CheckpointError, UserError
from diffcse_jax.storage import digests
from diffcse_jax.storage.selection import Record

# Orbax warns about what is as it should be, and prints every error that it raises as well, several times.
logging.getLogger("absl").setLevel(logging.CRITICAL)

ARRAYS = ("params", "opt_state")
UNKNOWN = math.inf  # the score in a record that cannot be read


def steps_in(checkpoints: Path) -> list[int]:
    """The steps of complete checkpoints: they get their names when they are whole."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def listed(steps: Sequence[int]) -> str:
    """For messages."""
    return ", ".join(map(str, steps)) or "none"


def scores_in(checkpoints: Path) -> dict[int, float | None]:
    """The scores by step; `UNKNOWN` of those whose record is damaged."""
    scores = {}
    for step in steps_in(checkpoints):
        try:
            scores[step] = read_record(checkpoints / str(step)).score
        except CheckpointError:
            scores[step] = UNKNOWN
    return scores


def best_step(scores: Mapping[int, float | None]) -> int | None:
    """The step with the highest score, of equal ones the earliest (as in the papers' code); None without any score.

    Orbax's own `best_step` and `BestN` take the latest of equal ones. A score that is no number is worse than any.
    """
    known = {step: score for step, score in scores.items() if score is not None and score != UNKNOWN}
    numbers = {step: -math.inf if math.isnan(score) else score for step, score in known.items()}
    return max(numbers, key=lambda step: (numbers[step], -step), default=None)


def read_record(checkpoint: Path) -> Record:
    """The record of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    with damage_reported(checkpoint):
        record = Record(**_read_json(checkpoint, "record"))
        _require(record.digests.get("record"), digests.of_json(record.content()), "record")
        return record


def read_data(checkpoint: Path, record: Record) -> dict[str, Any]:
    """The state of the batches' iterator; raises like `read_record`."""
    with damage_reported(checkpoint):
        data = _read_json(checkpoint, "data")
        _require(record.digests.get("data"), digests.of_json(data), "data")
        return data


def check_descriptions(checkpoint: Path) -> None:
    """Raises like `read_record` where what Orbax notes on arrays, and reads for devices alone, is no JSON."""
    with damage_reported(checkpoint):
        for item in ARRAYS:
            for path in (checkpoint / item / "array_metadatas").glob("*"):
                json.loads(path.read_bytes())


def read_arrays(checkpoint: Path, items: Sequence[str]) -> tuple[Record, dict[str, Any]]:
    """The record and the named items of a checkpoint, as NumPy arrays: whatever devices saved them.

    Raises:
        CheckpointError: it is damaged.
    """
    record = read_record(checkpoint)
    with (
        damage_reported(checkpoint),
        late_answers_silenced(),
        ocp.CheckpointManager(
            checkpoint.parent.absolute(),
            options=ocp.CheckpointManagerOptions(create=False, multiprocessing_options=_this_process_alone()),
            item_handlers={item: ocp.StandardCheckpointHandler() for item in items},
        ) as manager,
    ):
        step = int(checkpoint.name)
        saved = manager.item_metadata(step)
        like = {item: jax.tree.map(_placeholder, saved[item].tree) for item in items}
        restored = manager.restore(
            step,
            args=ocp.args.Composite(**{item: ocp.args.StandardRestore(like[item]) for item in items}),
        )
        for item in items:
            now = digests.of_arrays(restored[item])
            for name, digest in record.digests.get(item, {}).items():
                _require(digest, now.get(name, "missing"), f"{item}/{name}")
    return record, {item: restored[item] for item in items}


def _read_json(checkpoint: Path, item: str) -> dict[str, Any]:
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=_this_process_alone())
    return handler.restore(checkpoint.absolute() / item)


def _placeholder(array: Any) -> np.ndarray:
    """An array of this shape and type that takes no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _require(expected: str | None, found: str, what: str) -> None:
    """Refuses what has changed; `expected` is None in checkpoints of earlier versions, which had no digests."""
    if expected is not None and found != expected:
        raise ValueError(f"{what} is not what was saved")


@contextmanager
def damage_reported(checkpoint: Path) -> Iterator[None]:
    """Turns whatever reading a checkpoint raises into a `CheckpointError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # what a damaged file raises depends on where the damage is
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"cannot read the checkpoint {checkpoint} ({type(error).__name__}: {reason})") from error


@contextmanager
def late_answers_silenced() -> Iterator[None]:
    """Keeps reads and writes that end after another one has failed from printing a traceback each.

    Orbax closes its event loop at the first failure, and they have nowhere to report to. They may end after the block.
    """
    hook = sys.unraisablehook

    def without_late_answers(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    sys.unraisablehook = without_late_answers
    yield
    if sys.unraisablehook is without_late_answers:  # else a block in this one has failed
        sys.unraisablehook = hook  # not after a failure


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """Reading concerns one process: without this, Orbax waits for all of them."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )
