"""A run's checkpoints: `WORKDIR/checkpoints/STEP`, written and read with Orbax.

A checkpoint holds separate items, so that parameters can be read alone: `params`, `opt_state`, `batch_stats`, `data`
(the state of the batches' iterator) and `record` (`Record` as JSON). Where the encoder was evaluated, Orbax keeps its
dev score beside them.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.storage.selection import Measured, Outcomes, Record, read_baseline, read_selection, read_weights
from diffcse_jax.storage.workdir import CHECKPOINTS, encoder_folder, read_config, read_pooler, workdir_of

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about what is as it should be


class TrainState(NamedTuple):
    """The state of a run after a step. Randomness is a function of (seed, step), so there is no state of it."""

    step: jax.Array
    params: Params
    batch_stats: Params
    opt_state: optax.OptState


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
        self._manager = ocp.CheckpointManager(
            (workdir / CHECKPOINTS).absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=_score,  # without it Orbax writes no scores, and a resumed run would not know the best
                preservation_policy=AnyPreservationPolicy([LatestN(2), _Best()]),
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        record = Record(step, self._pooler, measured.scores, self._dev_metric, self._text, measured.outcomes)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(state.opt_state),
                batch_stats=ocp.args.StandardSave(_never_empty(state.batch_stats)),
                data=ocp.args.JsonSave(dict(data_state)),
                record=ocp.args.JsonSave(dataclasses.asdict(record)),
            ),
            metrics={"score": measured.scores[self._dev_metric]} if measured.scores and eligible else None,
        )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads the newest checkpoint.

        Args:
            like: a state with the shapes, types and shardings that the saved arrays get.

        Returns:
            The saved state, and that of the batches' iterator.

        Raises:
            CheckpointError: a damaged checkpoint.
            ConfigError: the text or the dev metric is no longer what it was.
        """
        params, opt_state, batch_stats = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (like.params, like.opt_state, like.batch_stats),
        )
        step = self._manager.latest_step()
        with _damage_reported(self._manager, step, self._workdir):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(params),
                    opt_state=ocp.args.StandardRestore(opt_state),
                    batch_stats=ocp.args.StandardRestore(_never_empty(batch_stats)),
                    data=ocp.args.JsonRestore(),
                    record=ocp.args.JsonRestore(),
                ),
            )
            record = Record(**restored.record)
        self._check_same_run(record)
        state = TrainState(
            step=jax.device_put(np.int32(step), like.step.sharding),
            params=restored.params,
            opt_state=restored.opt_state,
            batch_stats={name: value for name, value in restored.batch_stats.items() if name},
        )
        return state, restored.data

    def _check_same_run(self, record: Record) -> None:
        if record.text != self._text:
            raise ConfigError(
                f"the text of data.train_file is not the one that the run in {self._workdir} began with (or its "
                "tokenizer has changed); restore it, or give another --workdir"
            )
        if record.dev_metric != self._dev_metric:
            raise ConfigError(
                f"the run in {self._workdir} chose its best checkpoint by {record.dev_metric}, now it would "
                f"be {self._dev_metric}; give the same evaluation data (eval.data_dir), or another --workdir"
            )

    def wait(self) -> None:
        """Blocks until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the manager."""
        self._manager.close()


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
        params, record = _read_checkpoint(workdir, None if path == workdir else int(path.name))
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


def _read_checkpoint(workdir: Path, step: int | None) -> tuple[Params, Record]:
    """The parameters and the record of a checkpoint; of the best one where no step is given."""
    with ocp.CheckpointManager(
        (workdir / CHECKPOINTS).absolute(),
        options=ocp.CheckpointManagerOptions(create=False, multiprocessing_options=_this_process_alone()),
        item_handlers={"params": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()},
    ) as manager:
        asked = workdir if step is None else workdir / CHECKPOINTS / str(step)
        step = _default_step(manager) if step is None else step
        if step is None or step not in manager.all_steps():
            raise CheckpointError(f"no complete checkpoint {asked}; there are: {_listed(manager.all_steps())}")
        with _damage_reported(manager, step, workdir):
            like = _on_one_device(manager.item_metadata(step)["params"].tree)
            restored = manager.restore(
                step,
                args=ocp.args.Composite(params=ocp.args.StandardRestore(like), record=ocp.args.JsonRestore()),
            )
            record = Record(**restored.record)
    return {name: np.asarray(value) for name, value in restored.params.items()}, record


def _default_step(manager: ocp.CheckpointManager) -> int | None:
    """The best checkpoint; the newest, where none was evaluated; None where there is none."""
    best = _best_step({step: manager.metrics(step) for step in manager.all_steps()})
    return manager.latest_step() if best is None else best


def _best_step(metrics: Mapping[int, Mapping[str, float] | None]) -> int | None:
    """The step with the highest score, of equal ones the earliest (as in the papers' code); None without any score.

    Orbax's own `best_step` and `BestN` take the latest of equal ones.
    """
    scores = {step: _score(values) for step, values in metrics.items() if values is not None}
    return max(scores, key=lambda step: (scores[step], -step), default=None)


def _score(metrics: Mapping[str, float]) -> float:
    """The dev score that chooses the best checkpoint; one that is no number is worse than any."""
    return -math.inf if math.isnan(metrics["score"]) else metrics["score"]


class _Best:
    """The policy that the best checkpoint is preserved (an Orbax `PreservationPolicy`)."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = _best_step({checkpoint.step: checkpoint.metrics for checkpoint in checkpoints})
        return [checkpoint.step == best for checkpoint in checkpoints]


def _never_empty(batch_stats: Params) -> dict[str, Any]:
    """With one entry of nothing: Orbax refuses to save a dict without entries."""
    return {"": {}} | batch_stats


@contextmanager
def _damage_reported(manager: ocp.CheckpointManager, step: int, workdir: Path) -> Iterator[None]:
    """Turns whatever reading a checkpoint raises into a `CheckpointError` that names it and the others there are."""
    try:
        yield
    except Exception as error:  # what a damaged file raises depends on where the damage is
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"cannot read the checkpoint {workdir / CHECKPOINTS / str(step)} ({type(error).__name__}: {reason}); "
            f"if it is damaged, delete it to go on from an earlier one: there are steps {_listed(manager.all_steps())}"
        ) from error


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _on_one_device(metadata: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Where to restore arrays to: whatever devices and processes saved them, and though these may be gone."""
    here = SingleDeviceSharding(jax.local_devices()[0])
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here) for name, array in metadata.items()}


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """Reading concerns one process: without this, Orbax waits for all of them."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )
