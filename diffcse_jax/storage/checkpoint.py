"""A run's checkpoints: `WORKDIR/checkpoints/STEP`, written and read with Orbax.

A checkpoint holds separate items, so that parameters can be read alone: `params`, `opt_state`, `batch_stats`, `data`
(the state of the batches' iterator) and `record` (`Record` as JSON: the dev scores, and digests of all items, with
which they are compared when they are read). Training goes on from the newest checkpoint that is intact; damaged ones
newer than that are moved to `WORKDIR/damaged`.
"""

import dataclasses
import errno
import hashlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError, UserError
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.runtime import hosts
from diffcse_jax.storage import digests
from diffcse_jax.storage.files import disk_error, system_error, writing
from diffcse_jax.storage.run_folder import CHECKPOINTS, workdir_of
from diffcse_jax.storage.selection import Measured, Outcomes, Record, read_baseline, read_selection, read_weights
from diffcse_jax.storage.workdir import METRICS, encoder_folder, read_config, read_pooler, set_aside

# Orbax warns about what is as it should be, and prints every error that it raises as well, several times.
logging.getLogger("absl").setLevel(logging.CRITICAL)

_ARRAYS = ("params", "opt_state", "batch_stats")
_DISCARDED = "discarded"  # a folder beside the checkpoints
_UNKNOWN = math.inf  # the score in a record that cannot be read


class TrainState(NamedTuple):
    """The state of a run after a step. Randomness is a function of (seed, step), so there is no state of it."""

    step: jax.Array
    params: Params
    batch_stats: Params
    opt_state: optax.OptState
    bad_steps: jax.Array  # steps that were not applied, their loss or gradient being no finite number


@dataclasses.dataclass(frozen=True)
class SavedEncoder:
    """The encoder of a checkpoint, or the one that was selected, with what encoding and exporting need."""

    config: Config
    hf_config: Mapping[str, Any]
    folder: Path  # config.json and tokenizer of the base model
    transformer_config: TransformerConfig
    transformer: Params
    pooler_head: Params | None  # dense + tanh: the trained projector where it survives, else the base model's pooler
    pooler: str
    step: int
    dev: dict[str, float]
    dev_metric: str
    outcomes: Outcomes = dataclasses.field(default_factory=list)
    share: float = 1.0  # of the trained weights: 0 for the start itself, less than 1 between the start and the step
    verdict: str = ""  # how it compares with the start, once the run is finished
    start: Record | None = None  # the start's


class Checkpoints:
    """The checkpoints of a workdir: the last two and the best one are kept; saving goes on in the background.

    Used as a context manager it waits for the last save and closes.
    """

    def __init__(self, workdir: Path, config: Config, *, dev_metric: str, text: str):
        """Opens the checkpoints of a workdir.

        Args:
            workdir: where they are.
            config: the run's configuration.
            dev_metric: the dev score that chooses the best one.
            text: what identifies the tokenised training text.
        """
        self._pooler = config.encoding_pooler
        self._dev_metric = dev_metric
        self._text = text
        self._workdir = workdir
        self._folder = workdir / CHECKPOINTS
        self._scores = _scores(self._folder)
        self._silence = ExitStack()
        self._silence.enter_context(_late_answers_silenced())
        self._discard()
        with self._saving():
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=AnyPreservationPolicy([LatestN(2), _Best(self._scores)]),
                    cleanup_tmp_directories=True,
                    todelete_subdir=_DISCARDED,
                ),
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(UserError):  # the consequence of an error that is reported already
            self._finish()

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(
        self, state: TrainState, data_state: Mapping[str, Any], measured: Measured, *, eligible: bool = True
    ) -> None:
        """Starts saving; returns as soon as the arrays are copied. A step that is saved already is left as it is.

        Args:
            state: the train state after the step.
            data_state: the state of the batches' iterator.
            measured: the dev evaluation; empty where there was none.
            eligible: it may be the best one.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        items = {"params": state.params, "opt_state": state.opt_state, "batch_stats": _never_empty(state.batch_stats)}
        data = json.loads(json.dumps(data_state))
        record = Record(
            step,
            self._pooler,
            measured.scores,
            self._dev_metric,
            self._text,
            outcomes=measured.outcomes,
            eligible=eligible,
            bad_steps=int(state.bad_steps),
            metrics=self._described_metrics(),
        )
        own = {"data": digests.of_json(data), "record": digests.of_json(record.content())}
        record = dataclasses.replace(record, digests=own | {item: digests.of_arrays(items[item]) for item in items})
        self._scores[step] = record.score
        with self._saving():
            self._manager.wait_until_finished()
            self._discard()
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{item: ocp.args.StandardSave(arrays) for item, arrays in items.items()},
                    data=ocp.args.JsonSave(data),
                    record=ocp.args.JsonSave(dataclasses.asdict(record)),
                ),
            )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads the newest checkpoint that is intact; newer ones are named and moved to `WORKDIR/damaged`.

        Args:
            like: a state with the shapes, types and shardings that the saved arrays get.

        Returns:
            The saved state, and that of the batches' iterator.

        Raises:
            CheckpointError: all checkpoints are damaged, or those that are cannot be moved.
            ConfigError: the text or the dev metric is no longer what it was.
        """
        step = hosts.decided_by_first(self._newest_intact)
        self._manager.reload()
        params, opt_state, batch_stats = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (like.params, like.opt_state, like.batch_stats),
        )
        with _damage_reported(self._folder / str(step)):
            record = _read_record(self._folder / str(step))
            data = _read_data(self._folder / str(step), record)
            self._check_same_run(record)
            self._check_metrics(record)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(params),
                    opt_state=ocp.args.StandardRestore(opt_state),
                    batch_stats=ocp.args.StandardRestore(_never_empty(batch_stats)),
                ),
            )
        state = TrainState(
            step=jax.device_put(np.int32(step), like.step.sharding),
            params=restored.params,
            opt_state=restored.opt_state,
            batch_stats={name: value for name, value in restored.batch_stats.items() if name},
            bad_steps=jax.device_put(np.int32(record.bad_steps), like.bad_steps.sharding),
        )
        return state, data

    def _newest_intact(self) -> int:
        """The newest checkpoint that is as it was saved, once those after it are out of its way."""
        steps, damaged = sorted(_steps(self._folder), reverse=True), {}
        for step in steps:
            try:
                record, _ = _read_arrays(self._folder / str(step), _ARRAYS)
                _read_data(self._folder / str(step), record)
                _read_descriptions(self._folder / str(step))
            except CheckpointError as error:
                damaged[step] = error
                continue
            with writing(self._workdir, safe="Its checkpoints are as they were."):
                moved = {other: set_aside(self._workdir, self._folder / str(other)) for other in damaged}
            for other, problem in damaged.items():
                onward = f"it is now {moved[other]}, and training goes on from step {step}"
                print(f"warning: {problem}; {onward}", file=sys.stderr)
            return step
        raise CheckpointError(
            f"no checkpoint of {self._workdir} can be read, so that training cannot go on; nothing was changed. "
            "Restore one from a copy, or give another --workdir to begin anew:\n  "
            + "\n  ".join(map(str, damaged.values()))
        )

    def _check_same_run(self, record: Record) -> None:
        if record.text != self._text:
            raise ConfigError(
                f"the text of data.train_file or finetune.tasks is not the one that the run in {self._workdir} began "
                "with (or its tokenizer has changed); restore it, or give another --workdir"
            )
        if record.dev_metric != self._dev_metric:
            raise ConfigError(
                f"the run in {self._workdir} chose its best checkpoint by {record.dev_metric}, now it would "
                f"be {self._dev_metric}; give the same evaluation data (eval.data_dir), or another --workdir"
            )

    def _described_metrics(self, size: int | None = None) -> dict[str, Any]:
        """Size and SHA-256 of the first so many bytes of `metrics.jsonl`, or of all; it is the first process's."""
        path = self._workdir / METRICS
        if jax.process_index() or not path.is_file():
            return {}
        with path.open("rb") as file:
            content = file.read(size)
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def _check_metrics(self, record: Record) -> None:
        """Tells where rows of `metrics.jsonl` have changed since the checkpoint was saved."""
        expected = record.metrics
        if jax.process_index() == 0 and expected and self._described_metrics(expected["bytes"]) != expected:
            print(
                f"warning: {self._workdir / METRICS} is damaged: its rows up to step {record.step} are not those that "
                "were written. Training goes on without them; restore the file before its numbers are used",
                file=sys.stderr,
            )

    def wait(self) -> None:
        """Blocks until everything is on disk."""
        with self._saving():
            self._manager.wait_until_finished()
        self._discard()

    def close(self) -> None:
        """Waits, then releases the manager."""
        self._finish()
        self._silence.close()  # not after a failure

    def _finish(self) -> None:
        with self._saving():
            self._manager.close()
        self._discard()

    def _discard(self) -> None:
        """Removes old checkpoints for good; Orbax has renamed them, so that none is ever half a one under its name."""
        if jax.process_index() == 0:
            shutil.rmtree(self._folder / _DISCARDED, ignore_errors=True)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns whatever writing raises, here or in the background, into a `DiskError`."""
        try:
            yield
        except Exception as error:  # Orbax passes on what its libraries raise: OSError, ValueError, RuntimeError
            saved = sorted(_steps(self._folder))
            safe = f"Its checkpoints of steps {_listed(saved)} are whole." if saved else "It has no checkpoint yet."
            reason = system_error(error) or OSError(errno.EIO, str(error).partition("\n")[0])
            raise disk_error(self._folder, reason, safe=safe) from error


def read_encoder(path: Path) -> SavedEncoder:
    """The encoder that a finished run has selected, a run's best checkpoint so far, or one checkpoint.

    The best checkpoint is the newest where none is eligible.

    Args:
        path: a workdir, or `WORKDIR/checkpoints/STEP`.

    Raises:
        CheckpointError: nothing there to read.
    """
    workdir = workdir_of(path) or path
    config = read_config(workdir)
    selection = read_selection(workdir) if path == workdir else None
    if selection and selection.share < 1:
        params, record = read_weights(workdir), selection.record
    else:
        params, record = read_parameters(workdir, None if path == workdir else int(path.name))
    folder = encoder_folder(workdir)
    hf_config = pretrained.read_hf_config(folder)
    return SavedEncoder(
        config=config,
        hf_config=hf_config,
        folder=folder,
        transformer_config=pretrained.transformer_config(hf_config, source=str(folder)),
        transformer=parameters.subset(params, "encoder"),
        pooler_head=parameters.subset(params, "projector") if record.pooler == "cls" else read_pooler(workdir),
        pooler=record.pooler,
        step=record.step,
        dev=record.dev,
        dev_metric=record.dev_metric,
        outcomes=record.outcomes,
        share=selection.share if selection else 1.0,
        verdict=selection.verdict if selection else "",
        start=read_baseline(workdir),
    )


def read_parameters(workdir: Path, step: int | None) -> tuple[Params, Record]:
    """The parameters and the record of a checkpoint; of the best one where no step is given."""
    checkpoints = workdir / CHECKPOINTS
    asked = workdir if step is None else checkpoints / str(step)
    step, steps = _default_step(checkpoints) if step is None else step, _steps(checkpoints)
    if step not in steps:
        raise CheckpointError(f"no complete checkpoint {asked}; there are: {_listed(steps)}")
    record, items = _read_arrays(checkpoints / str(step), ("params",))
    return items["params"], record


def _default_step(checkpoints: Path) -> int | None:
    """The best checkpoint; the newest, where none was evaluated; None where there is none.

    Raises:
        CheckpointError: a damaged one, which may have been the best.
    """
    scores = {}
    for step in _steps(checkpoints):
        try:
            scores[step] = _read_record(checkpoints / str(step)).score
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; it may be the best one. Name the one to use, as {checkpoints}/STEP, or move it away"
            ) from error
    best = _best_step(scores)
    return max(scores, default=None) if best is None else best


def _scores(checkpoints: Path) -> dict[int, float | None]:
    """The scores by step."""
    scores = {}
    for step in _steps(checkpoints):
        try:
            scores[step] = _read_record(checkpoints / str(step)).score
        except CheckpointError:
            scores[step] = _UNKNOWN
    return scores


def _best_step(scores: Mapping[int, float | None]) -> int | None:
    """The step with the highest score, of equal ones the earliest (as in the papers' code); None without any score.

    Orbax's own `best_step` and `BestN` take the latest of equal ones. A score that is no number is worse than any.
    """
    known = {step: score for step, score in scores.items() if score is not None and score != _UNKNOWN}
    numbers = {step: -math.inf if math.isnan(score) else score for step, score in known.items()}
    return max(numbers, key=lambda step: (numbers[step], -step), default=None)


@dataclasses.dataclass(frozen=True)
class _Best:
    """The policy that the best checkpoint is preserved, and what may be it (an Orbax `PreservationPolicy`)."""

    scores: Mapping[int, float | None]  # of all steps, and later of those that are saved meanwhile

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        present = {checkpoint.step: self.scores.get(checkpoint.step) for checkpoint in checkpoints}
        best = _best_step(present)
        return [step == best or score == _UNKNOWN for step, score in present.items()]


def _never_empty(batch_stats: Params) -> dict[str, Any]:
    """With one entry of nothing: Orbax refuses to save a dict without entries."""
    return {"": {}} | batch_stats


def _steps(checkpoints: Path) -> list[int]:
    """The steps of complete checkpoints: they get their names when they are whole."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def _read_record(checkpoint: Path) -> Record:
    """The record of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    with _damage_reported(checkpoint):
        record = Record(**_read_json(checkpoint, "record"))
        _require(record.digests.get("record"), digests.of_json(record.content()), "record")
        return record


def _read_data(checkpoint: Path, record: Record) -> dict[str, Any]:
    """The state of the batches' iterator; raises like `_read_record`."""
    with _damage_reported(checkpoint):
        data = _read_json(checkpoint, "data")
        _require(record.digests.get("data"), digests.of_json(data), "data")
        return data


def _read_descriptions(checkpoint: Path) -> None:
    """Raises like `_read_record` where what Orbax notes on arrays, and reads for devices alone, is no JSON."""
    with _damage_reported(checkpoint):
        for item in _ARRAYS:
            for path in (checkpoint / item / "array_metadatas").glob("*"):
                json.loads(path.read_bytes())


def _read_json(checkpoint: Path, item: str) -> dict[str, Any]:
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=_this_process_alone())
    return handler.restore(checkpoint.absolute() / item)


def _read_arrays(checkpoint: Path, items: Sequence[str]) -> tuple[Record, dict[str, Any]]:
    """The record and the named items of a checkpoint, as NumPy arrays: whatever devices saved them.

    Raises:
        CheckpointError: it is damaged.
    """
    record = _read_record(checkpoint)
    with (
        _damage_reported(checkpoint),
        _late_answers_silenced(),
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


def _placeholder(array: Any) -> np.ndarray:
    """An array of this shape and type that takes no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _require(expected: str | None, found: str, what: str) -> None:
    """Refuses what has changed; `expected` is None in checkpoints of earlier versions, which had no digests."""
    if expected is not None and found != expected:
        raise ValueError(f"{what} is not what was saved")


@contextmanager
def _damage_reported(checkpoint: Path) -> Iterator[None]:
    """Turns whatever reading a checkpoint raises into a `CheckpointError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # what a damaged file raises depends on where the damage is
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(f"cannot read the checkpoint {checkpoint} ({type(error).__name__}: {reason})") from error


@contextmanager
def _late_answers_silenced() -> Iterator[None]:
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


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """Reading concerns one process: without this, Orbax waits for all of them."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )
