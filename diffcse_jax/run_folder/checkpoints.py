"""A run's checkpoints, `WORKDIR/checkpoints/STEP`, written and read by Orbax.

A checkpoint has three items, so that the parameters can be read alone: `params`, `opt_state` and
`record` (`Record` as JSON: dev scores, the position in the data, and digests). Every item is
compared with its digest when it is read. Training resumes from the newest intact checkpoint.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Shaped, UInt32
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN
from safetensors.numpy import load_file

from diffcse_jax import hosts
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError, UserError
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, json_digest
from diffcse_jax.models import layers
from diffcse_jax.models.heads import NO_HEAD, QUERY_PROJECTION, RecordedHead
from diffcse_jax.models.hf import Encoders, Pretrained
from diffcse_jax.models.layers import Params
from diffcse_jax.models.sentence_folder import NO_PROMPTS, Prompts, RecordedPooler
from diffcse_jax.run_folder.finding import CHECKPOINTS, CONFIG, find_run
from diffcse_jax.run_folder.records import (
    METRICS,
    SELECTED_WEIGHTS,
    Measured,
    Record,
    Selection,
    read_baseline,
    read_selection,
)
from diffcse_jax.run_folder.start import damaged_path, read_config, read_start
from diffcse_jax.run_folder.state import TrainState

_ARRAYS = ("params", "opt_state")
_UNKNOWN = math.inf  # the score of a checkpoint whose record is damaged
_DISCARDED = "discarded"  # a folder inside checkpoints/


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of a run.

    The last two and the best one are kept. Saving continues in the background. As a context
    manager, it waits for the last save and closes. The record holds what all its checkpoints share:
    the pooler, the dev metric, and what identifies the texts.
    """

    def __init__(self, workdir: Path, record: Record):
        self._workdir = workdir
        self._folder = workdir / CHECKPOINTS
        self._record = record
        self._scores: dict[int, float | None] = {}
        for step in saved_steps(self._folder):
            try:
                self._scores[step] = read_record(self._folder / str(step)).score
            except CheckpointError:
                self._scores[step] = _UNKNOWN
        self._remove_discarded()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(2), _Best(self._scores)]),
            cleanup_tmp_directories=True,
            todelete_subdir=_DISCARDED,
        )
        self._hidden_messages: contextlib.AbstractContextManager[None] = _hidden_messages()
        self._hidden_messages.__enter__()
        with self._disk_errors():
            self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            with self._disk_errors():
                self._manager.close()
            self._remove_discarded()
            if kind is None:
                self._hidden_messages.__exit__(None, None, None)
        except UserError:
            if kind is None:  # otherwise a consequence of the error that is reported already
                raise

    def save(
        self,
        state: TrainState,
        data_state: Mapping[str, Any],
        measured: Measured,
        *,
        eligible: bool = True,
    ) -> None:
        """Start to save and return as soon as the arrays are copied.

        `measured` is empty if there was no dev evaluation, and `eligible` says whether this may be
        the best checkpoint.
        """
        step = int(state.step)
        record = dataclasses.replace(
            self._record,
            step=step,
            dev=measured.scores,
            outcomes=measured.outcomes,
            eligible=eligible,
            bad_steps=int(state.bad_steps),
            data=data_state,
            metrics=self._metrics_digest(),
        )
        arrays = {item: getattr(state, item) for item in _ARRAYS}
        digests: dict[str, Any] = {item: array_digests(tree) for item, tree in arrays.items()}
        digests["record"] = json_digest(record.content())
        content = ocp.args.JsonSave(record.content() | {"digests": digests})
        saved = {item: ocp.args.StandardSave(tree) for item, tree in arrays.items()}
        self._scores[step] = record.score
        self.wait()
        with self._disk_errors():
            self._manager.save(step, args=ocp.args.Composite(**saved, record=content))

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return the newest intact checkpoint and its position in the data.

        Move newer, damaged checkpoints to `damaged/`. The arrays get the containers and shardings
        of the state `like`. If there is no checkpoint, that state is returned, with an empty
        position.

        Raises:
            CheckpointError: All checkpoints are damaged, or an array of `like` is missing or has
                another shape.
            ConfigError: The training text, the dev metric or its data has changed.
        """
        if self._manager.latest_step() is None:
            return like, {}
        step = hosts.decided_by_first(self._newest_intact)
        self._manager.reload()
        checkpoint = self._folder / str(step)
        record = read_record(checkpoint)
        self._check_same_run(record)
        with _damage_named(checkpoint):
            state = like._replace(
                step=_placed(np.asarray(step), like.step),
                bad_steps=_placed(np.asarray(record.bad_steps), like.bad_steps),
            )
            for item in _ARRAYS:  # one after the other, so that the host never holds all of them
                _, arrays = read_arrays(checkpoint, item)
                state = state._replace(
                    **{item: _placed(arrays, getattr(like, item), moments=item == "opt_state")}
                )
                del arrays
        return state, dict(record.data)

    def wait(self) -> None:
        """Wait until everything is on disk."""
        with self._disk_errors():
            self._manager.wait_until_finished()
        self._remove_discarded()

    def _newest_intact(self) -> int:
        """Return the step of the newest intact checkpoint.

        Damaged newer ones are moved out of the way first.
        """
        damaged: dict[int, CheckpointError] = {}
        for step in reversed(saved_steps(self._folder)):
            try:
                for item in _ARRAYS:
                    read_arrays(self._folder / str(step), item)
            except CheckpointError as error:
                damaged[step] = error
                # Errors of this reading may still come when the run is over.
                self._hidden_messages = contextlib.nullcontext()
                continue
            for other, problem in damaged.items():
                with disk_errors(self._workdir, safe="Its checkpoints are unchanged."):
                    free = damaged_path(self._workdir, str(other))
                    moved = (self._folder / str(other)).rename(free)
                log_line(
                    f"warning: {problem}. Moved it to {moved}. Training resumes from step {step}"
                )
            return step
        raise CheckpointError(
            f"training cannot resume: no checkpoint of {self._workdir} is readable. Nothing was "
            "changed. Restore a checkpoint from a copy, or give another --workdir to begin a new "
            "run:\n  " + "\n  ".join(map(str, damaged.values()))
        )

    def _check_same_run(self, record: Record) -> None:
        """Refuse other data than the checkpoint's, and warn of changed rows of `metrics.jsonl`."""
        metric = record.dev_metric
        metric_now = self._record.dev_metric
        for name, what in {
            "text": "the text of data.train_file or finetune.tasks, or its tokenizer,",
            "dev_metric": (
                f"the metric that chooses the best checkpoint (now {metric_now}, was {metric})"
            ),
            "dev_text": f"the data that {metric} is measured on (eval.pairs_file, eval.data_dir)",
        }.items():
            if getattr(record, name) != getattr(self._record, name):
                raise ConfigError(
                    f"{what} has changed since the run in {self._workdir} began. Restore it to "
                    "resume, or give another --workdir to begin a new run"
                )
        before = record.metrics
        if jax.process_index() == 0 and before and self._metrics_digest(before["bytes"]) != before:
            log_line(
                f"warning: {self._workdir / METRICS} is damaged: rows up to step {record.step} "
                "have changed. Training does not need them. Restore the file before you use its "
                "numbers"
            )

    def _metrics_digest(self, size: int | None = None) -> dict[str, Any]:
        """Return size and SHA-256 of the beginning of `metrics.jsonl`, on the first process."""
        path = self._workdir / METRICS
        if jax.process_index() or not path.is_file():
            return {}
        content = path.read_bytes()[:size]
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def _remove_discarded(self) -> None:
        """Delete old checkpoints. Orbax has renamed them, so that none is ever half deleted."""
        if jax.process_index() == 0:
            shutil.rmtree(self._folder / _DISCARDED, ignore_errors=True)

    def _disk_errors(self) -> contextlib.AbstractContextManager[None]:
        """Turn any error of writing, here or in the background, into a `DiskError`."""
        safe = "It has no checkpoint yet."
        if steps := ", ".join(map(str, saved_steps(self._folder))):
            safe = f"Its checkpoints of steps {steps} are complete."
        return disk_errors(self._folder, safe=safe, any_error=True)


class _Best(NamedTuple):
    """The Orbax policy that keeps the best checkpoint and those that may be the best."""

    scores: Mapping[int, float | None]  # also of the steps that are saved later

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        present = {checkpoint.step: self.scores.get(checkpoint.step) for checkpoint in checkpoints}
        best = best_step(present)
        return [step == best or score == _UNKNOWN for step, score in present.items()]


# Reading


def saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the complete checkpoints.

    A checkpoint gets its name when it is complete.
    """
    return sorted(int(folder.name) for folder in checkpoints.glob("*") if folder.name.isdecimal())


def best_step(scores: Mapping[int, float | None]) -> int | None:
    """Return the step with the highest score, or None.

    Of equal scores, the earliest step is best, as in the papers' code. Orbax's own `best_step`
    takes the latest of equal ones. NaN is lower than any score.
    """
    numbers: dict[int, float] = {}
    for step, score in scores.items():
        if score is not None and score != _UNKNOWN:
            numbers[step] = -math.inf if math.isnan(score) else score
    return max(numbers, key=lambda step: (numbers[step], -step), default=None)


def read_record(checkpoint: Path) -> Record:
    """Read the record of a checkpoint."""
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=_this_process_alone())
    with _damage_named(checkpoint):
        record = Record(**handler.restore(checkpoint.absolute() / "record"))
        if record.digests["record"] != json_digest(record.content()):
            raise ValueError("the record differs from its digest")
        return record


def read_arrays(checkpoint: Path, item: str) -> tuple[Record, Any]:
    """Read the record of a checkpoint, and an item as a tree of NumPy arrays.

    It does not matter which devices saved the item.
    """
    record = read_record(checkpoint)
    folder = checkpoint.absolute() / item
    with _damage_named(checkpoint), _hidden_messages():
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=_this_process_alone())
        metadata = handler.metadata(folder).tree
        # Broadcast zeros take no memory.
        like = jax.tree.map(
            lambda array: np.broadcast_to(np.zeros((), array.dtype), array.shape), metadata
        )
        arrays = handler.restore(folder, args=ocp.args.StandardRestore(like))
        digests = array_digests(arrays)
        for name, digest in record.digests[item].items():
            if digests.get(name) != digest:
                raise ValueError(f"{item}/{name} differs from its digest")
    return record, arrays


def _placed(arrays: Any, like: Any, *, moments: bool = False) -> Any:
    """Return the arrays with the containers, types and shardings of the tree `like`.

    Tables of moments have rows of zeros at their end, as many as the run's devices need
    (`sharding.padded`). The checkpoint may be of a run on other devices.
    """
    by_path = _by_path(arrays)

    def placed(path: Any, array: jax.Array) -> jax.Array:
        name = _name_of(path)
        saved = by_path[name].astype(array.dtype)
        if moments and saved.ndim and saved.shape != array.shape:
            saved = _with_rows(saved, len(array))
        if saved.shape != array.shape:
            raise ValueError(f"{name} has shape {saved.shape}, not {array.shape}")
        return jax.make_array_from_callback(array.shape, array.sharding, saved.__getitem__)

    return jax.tree_util.tree_map_with_path(placed, like)


def _with_rows(saved: np.ndarray, rows: int) -> np.ndarray:
    """Return an array with more or fewer rows of zeros at its end."""
    if saved[rows:].any():
        return saved
    missing = max(rows - len(saved), 0)
    return np.pad(saved[:rows], ((0, missing), *[(0, 0)] * (saved.ndim - 1)))


@contextlib.contextmanager
def _damage_named(checkpoint: Path) -> Iterator[None]:
    """Turn any error of reading a checkpoint into a `CheckpointError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the type depends on where the damage is
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"cannot read the checkpoint {checkpoint} ({type(error).__name__}: {reason})"
        ) from error


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """Return the options that keep Orbax from waiting for other processes."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


@contextlib.contextmanager
def _hidden_messages() -> Iterator[None]:
    """Hide messages of Orbax, which warns about normal things and logs each error several times.

    At the first failure it closes its event loop, so that later ones raise an error that nobody can
    catch. These may come after the block, so they stay hidden if it fails. Other messages and
    errors of the process are shown.
    """
    absl = logging.getLogger("absl")
    usual = sys.unraisablehook
    has_filter = _is_not_of_orbax in absl.filters
    # Others may have put back their own, so both are looked at.
    has_hook = isinstance(usual, _WithoutLateErrors)
    hook = usual if has_hook else _WithoutLateErrors(usual)
    if not has_filter:
        absl.addFilter(_is_not_of_orbax)
    sys.unraisablehook = hook
    yield
    if not has_filter:
        absl.removeFilter(_is_not_of_orbax)
    if not has_hook and sys.unraisablehook is hook:  # otherwise someone else's hook calls ours
        sys.unraisablehook = usual


class _WithoutLateErrors:
    """A hook for errors that nobody can catch, which hides those of a closed event loop."""

    def __init__(self, usual: Callable[[Any], Any]):
        self._usual = usual

    def __call__(self, unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            self._usual(unraisable)


def array_digests(tree: Any) -> dict[str, str]:
    """Return the digest of each array of a tree, 8 hexadecimal digits, by its path.

    A path is, for example, `1/mu/encoder.embeddings.word`. A digest is a sum over the elements of a
    mix of their bits and their position. It is computed where the array lives and does not depend
    on how devices share the array. A change of one element always changes it; other damage goes
    unnoticed once in 2^32.
    """
    # One after the other: on several CPU devices, more than 32 running programs may deadlock.
    return {name: f"{int(_checksum(array)):08x}" for name, array in _by_path(tree).items()}


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name_of(path): array for path, array in jax.tree_util.tree_leaves_with_path(tree)}


def _name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.jit
def _checksum(array: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Return the digest of an array whose type has at most 32 bits."""
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        along_axis = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        position = position * jnp.uint32(size) + along_axis
    if array.dtype != jnp.bool_:
        array = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    mixed = array.astype(jnp.uint32) ^ (position * jnp.uint32(0x9E3779B1))
    # MurmurHash3's finalizer, which is one to one.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> jnp.uint32(16)), dtype=jnp.uint32)


# The encoder of a run or checkpoint, which evaluation, encoding and export read


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedEncoder(Record):
    """The encoder of a checkpoint, or the one that a run has selected: what encoding needs."""

    config: Config
    # The starting checkpoint's folder, the trained weights and, as pooler, the kept projector.
    checkpoint: Pretrained
    selection: Selection  # without a verdict before training is finished
    # Of a run that trains queries alone: the document encoder. Then `checkpoint` is of queries.
    documents: Pretrained | None = None
    prompts: Prompts = NO_PROMPTS
    baseline: Record | None = None  # the starting checkpoint's
    start_head: RecordedHead = NO_HEAD  # what the starting checkpoint has after its pooler

    @property
    def applied(self) -> str:
        """The pooler and the modules after it, as tables name them."""
        return self.checkpoint.sentence_head.applied(self.pooler)

    @property
    def applied_before(self) -> str:
        """The pooler of the starting checkpoint and the modules after it."""
        return self.start_head.applied(self.baseline.pooler) if self.baseline else ""

    def record_of(self, checkpoint: Pretrained) -> RecordedPooler:
        """Return what the folder of one of `checkpoints` would record."""
        head = checkpoint.pooler if self.pooler == "cls" else None
        return RecordedPooler(self.pooler, head, None, checkpoint.sentence_head, self.prompts)

    @property
    def checkpoints(self) -> Encoders:
        """The checkpoint, or those of both encoders."""
        if self.documents is None:
            return Encoders(self.checkpoint)
        return Encoders(self.documents, self.checkpoint)


def read_encoder(path: Path) -> SavedEncoder:
    """Read the encoder of a checkpoint, `WORKDIR/checkpoints/STEP`, or of a run's folder.

    Of a finished run, this is the selected encoder; before that, the best one so far or, if none
    is, the newest.
    """
    workdir = find_run(path) or path
    if not (workdir / CHECKPOINTS).is_dir() or not (workdir / CONFIG).is_file():
        raise CheckpointError(
            f"{workdir} is not the folder of a run: it needs {CONFIG} and {CHECKPOINTS}/"
        )
    config = read_config(workdir)
    selection = read_selection(workdir) if path == workdir else None
    if selection and selection.interpolation < 1:
        params = load_file(workdir / SELECTED_WEIGHTS)
        record = selection.record
    else:
        selected = workdir / CHECKPOINTS / str(selection.record.step) if selection else path
        params, record = read_parameters(selected)
    start, prompts = read_start(workdir)
    exports_start = selection is not None and selection.interpolation == 0
    if config.trains_queries:
        checkpoint = start if exports_start else _with_projection(start, params, record.pooler)
    else:
        checkpoint = dataclasses.replace(
            start,
            transformer=layers.subset(params, "encoder"),
            pooler=layers.subset(params, "projector") if record.pooler == "cls" else start.pooler,
            mlm_head=layers.subset(params, "mlm_head") if config.keeps_mlm_head else None,
            sentence_head=start.sentence_head.of(record.pooler, params),
        )
    return SavedEncoder(
        **vars(record),
        config=config,
        checkpoint=checkpoint,
        selection=selection or Selection(record, interpolation=1.0, verdict=""),
        documents=start if config.trains_queries and not exports_start else None,
        prompts=prompts,
        baseline=read_baseline(workdir),
        start_head=start.sentence_head,
    )


def _with_projection(start: Pretrained, trained: Params, pooler: str) -> Pretrained:
    """Return the query encoder, which is the starting checkpoint with a trained projection."""
    kernel = layers.subset(trained, QUERY_PROJECTION)["kernel"]
    head = start.sentence_head.with_projection(pooler, kernel)
    return dataclasses.replace(start, sentence_head=head)


def read_parameters(path: Path) -> tuple[Params, Record]:
    """Read the parameters and the record of a checkpoint.

    If the path is a run's folder, it is the best checkpoint.
    """
    checkpoints = (find_run(path) or path) / CHECKPOINTS
    steps = saved_steps(checkpoints)
    step = int(path.name) if path.parent == checkpoints else default_step(checkpoints)
    if step not in steps:
        raise CheckpointError(
            f"no complete checkpoint {path}. There are: {', '.join(map(str, steps)) or 'none'}"
        )
    record, params = read_arrays(checkpoints / str(step), "params")
    return params, record


def default_step(checkpoints: Path) -> int | None:
    """Return the step of the best checkpoint, or of the newest if none may be the best.

    If there is no checkpoint, return None.
    """
    steps = saved_steps(checkpoints)
    try:
        scores = {step: read_record(checkpoints / str(step)).score for step in steps}
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. It may be the best one. Name the checkpoint to use, as {checkpoints}/STEP, "
            "or move this one away"
        ) from error
    best = best_step(scores)
    return max(scores, default=None) if best is None else best
