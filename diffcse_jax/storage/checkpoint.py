"""A run's checkpoints: `WORKDIR/checkpoints/STEP`, written and read with Orbax.

Training goes on from the newest checkpoint that is intact; damaged ones newer than that are moved to `WORKDIR/damaged`.
The items that a checkpoint holds: `checkpoint_items.py`.
"""

import dataclasses
import errno
import hashlib
import json
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

from diffcse_jax import hosts
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError, UserError
from diffcse_jax.io import CHECKPOINTS, disk_error, disk_errors, system_error
from diffcse_jax.models.parameters import Params
from diffcse_jax.storage import digests
from diffcse_jax.storage.checkpoint_items import (
    ARRAYS,
    UNKNOWN,
    best_step,
    check_descriptions,
    damage_reported,
    late_answers_silenced,
    listed,
    read_arrays,
    read_data,
    read_record,
    scores_in,
    steps_in,
)
from diffcse_jax.storage.selection import Measured, Record
from diffcse_jax.storage.workdir import METRICS, set_aside

_DISCARDED = "discarded"  # a folder beside the checkpoints


class TrainState(NamedTuple):
    """The state of a run after a step. Randomness is a function of (seed, step), so there is no state of it."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    bad_steps: jax.Array  # steps that were not applied, their loss or gradient being no finite number


class Checkpoints:
    """The checkpoints of a workdir: the last two and the best one are kept; saving goes on in the background.

    Used as a context manager it waits for the last save and closes.
    """

    def __init__(self, workdir: Path, config: Config, *, dev_metric: str, dev_text: str, text: str):
        """Opens the checkpoints of a workdir.

        Args:
            workdir: where they are.
            config: the run's configuration.
            dev_metric: the dev score that chooses the best one.
            dev_text: what identifies the text that it is measured on.
            text: what identifies the tokenised training text.
        """
        self._pooler = config.encoding_pooler
        self._dev_metric, self._dev_text = dev_metric, dev_text
        self._text = text
        self._workdir = workdir
        self._folder = workdir / CHECKPOINTS
        self._scores = scores_in(self._folder)
        self._silence = ExitStack()
        self._silence.enter_context(late_answers_silenced())
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
        items = {"params": state.params, "opt_state": state.opt_state}
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
            dev_text=self._dev_text,
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
        params, opt_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (like.params, like.opt_state),
        )
        with damage_reported(self._folder / str(step)):
            record = read_record(self._folder / str(step))
            data = read_data(self._folder / str(step), record)
            self._check_same_run(record)
            self._check_metrics(record)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(params),
                    opt_state=ocp.args.StandardRestore(opt_state),
                ),
            )
        state = TrainState(
            step=jax.device_put(np.int32(step), like.step.sharding),
            params=restored.params,
            opt_state=restored.opt_state,
            bad_steps=jax.device_put(np.int32(record.bad_steps), like.bad_steps.sharding),
        )
        return state, data

    def _newest_intact(self) -> int:
        """The newest checkpoint that is as it was saved, once those after it are out of its way."""
        steps, damaged = sorted(steps_in(self._folder), reverse=True), {}
        for step in steps:
            try:
                record, _ = read_arrays(self._folder / str(step), ARRAYS)
                read_data(self._folder / str(step), record)
                check_descriptions(self._folder / str(step))
            except CheckpointError as error:
                damaged[step] = error
                continue
            with disk_errors(self._workdir, safe="Its checkpoints are as they were."):
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
        if record.dev_text not in ("", self._dev_text):  # earlier versions did not record it
            raise ConfigError(
                f"the data that {record.dev_metric} is measured on are not those that the run in {self._workdir} began "
                "with, so that its scores could not be compared; restore them (eval.pairs_file, eval.data_dir), or "
                "give another --workdir"
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
            saved = sorted(steps_in(self._folder))
            safe = f"Its checkpoints of steps {listed(saved)} are whole." if saved else "It has no checkpoint yet."
            reason = system_error(error) or OSError(errno.EIO, str(error).partition("\n")[0])
            raise disk_error(self._folder, reason, safe=safe) from error


@dataclasses.dataclass(frozen=True)
class _Best:
    """The policy that the best checkpoint is preserved, and what may be it (an Orbax `PreservationPolicy`)."""

    scores: Mapping[int, float | None]  # of all steps, and later of those that are saved meanwhile

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        present = {checkpoint.step: self.scores.get(checkpoint.step) for checkpoint in checkpoints}
        best = best_step(present)
        return [step == best or score == UNKNOWN for step, score in present.items()]
