"""Orbax checkpoints of a run, and the encoder inside one of them.

Workdir: `config.json` (the resolved configuration), `encoder/` (the base model's config.json, tokenizer and, where it
has one, pooler: everything but the trained weights), `checkpoints/STEP`. A checkpoint holds separate items, so that
parameters can be read alone: `params`, `opt_state`, `batch_stats`, `data` (the iterator's state) and `record` (step,
pooler, dev scores).
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from diffcse_jax.config import Config
from diffcse_jax.encoder import workdir_of
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pretrained import Pretrained
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.training.step import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about what is as it should be

# Keys that may change between a run and its continuation, because results do not depend on them.
_FREE_ON_RESUME = {"train.log_every", "eval.data_dir", "eval.batch_size", "data.cache_dir", "mesh.data", "distributed"}


@dataclasses.dataclass(frozen=True)
class SavedEncoder:
    """The encoder of a checkpoint with what encoding and exporting need."""

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


class Checkpoints:
    """The checkpoints of a workdir: the last two and the best one are kept; saving goes on in the background."""

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
        self._folder = workdir / "checkpoints"
        score = lambda metrics: metrics["score"]  # noqa: E731
        # `best_fn` alone may delete the newest step; the policy keeps both, `best_fn` makes scores survive a restart.
        self._manager = ocp.CheckpointManager(
            self._folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=score,
                preservation_policy=AnyPreservationPolicy(
                    [LatestN(2), BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)]
                ),
                cleanup_tmp_directories=True,
            ),
        )

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data_state: Mapping[str, Any], dev: Mapping[str, float]) -> None:
        """Starts saving; returns as soon as the arrays are copied. `dev` is empty where nothing was evaluated.

        A step that is saved already is left as it is.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        record = {
            "step": step,
            "pooler": self._pooler,
            "dev": dict(dev),
            "dev_metric": self._dev_metric,
            "text": self._text,
        }
        items = {"params": state.params, "opt_state": state.opt_state, "batch_stats": {"": {}} | state.batch_stats}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(item) for name, item in items.items()},
                data=ocp.args.JsonSave(dict(data_state)),
                record=ocp.args.JsonSave(record),
            ),
            metrics={"score": dev[self._dev_metric]} if dev else None,
        )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest state, placed as `like` is, and the data iterator's state.

        Raises:
            CheckpointError: a damaged checkpoint.
            ConfigError: the text or the dev metric is no longer what it was.
        """
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        step = self._manager.latest_step()
        restored = _restore(
            self._manager,
            step,
            self._folder,
            params=ocp.args.StandardRestore(abstract.params),
            opt_state=ocp.args.StandardRestore(abstract.opt_state),
            batch_stats=ocp.args.StandardRestore({"": {}} | abstract.batch_stats),
            data=ocp.args.JsonRestore(),
            record=ocp.args.JsonRestore(),
        )
        self._check_same_run(restored.record)
        batch_stats = {name: value for name, value in restored.batch_stats.items() if name}
        step_array = jax.device_put(np.int32(step), like.step.sharding)
        return TrainState(step_array, restored.params, batch_stats, restored.opt_state), restored.data

    def _check_same_run(self, record: Mapping[str, Any]) -> None:
        if record["text"] != self._text:
            raise ConfigError(
                f"the text of data.train_file is not the one that the run in {self._folder.parent} began with (or its "
                "tokenizer has changed); restore it, or give another --workdir"
            )
        if record["dev_metric"] != self._dev_metric:
            raise ConfigError(
                f"the run in {self._folder.parent} chose its best checkpoint by {record['dev_metric']}, now it would "
                f"be {self._dev_metric}; give the same evaluation data (eval.data_dir), or another --workdir"
            )

    def wait(self) -> None:
        """Blocks until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the manager."""
        self._manager.close()


def start_workdir(workdir: Path, config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes `config.json` and `encoder/`, or checks that they belong to the same run.

    Raises:
        ConfigError: the workdir holds a run with another configuration; every differing key is named.
    """
    path = workdir / "config.json"
    if jax.process_index() == 0 and not path.is_file():
        try:
            _write_base(workdir / "encoder", encoder, tokenizer)
            partial = path.with_suffix(".tmp")
            partial.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
            partial.replace(path)  # last and at once: its presence says that encoder/ is whole
        except OSError as error:
            raise CheckpointError(f"cannot write the workdir {workdir}: {error.strerror}") from error
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("workdir")
    _check_same_config(path, config)


def read_config(workdir: Path) -> Config:
    """The resolved configuration of a workdir.

    Raises:
        CheckpointError: no workdir of ours.
    """
    path = workdir / "config.json"
    if not (workdir / "checkpoints").is_dir() or not path.is_file():
        raise CheckpointError(f"{workdir} is no training workdir: it needs config.json and checkpoints/")
    return _config_of(path)


def read_encoder(path: Path) -> SavedEncoder:
    """The encoder of a workdir's best checkpoint (the newest, where none was evaluated), or of one checkpoint.

    Args:
        path: a workdir, or `WORKDIR/checkpoints/STEP`.

    Raises:
        CheckpointError: nothing there to read.
    """
    workdir = workdir_of(path) or path
    config = read_config(workdir)
    with ocp.CheckpointManager(
        (workdir / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics["score"], create=False, multiprocessing_options=_this_process_alone()
        ),
    ) as manager:
        steps = [str(step) for step in manager.all_steps()]
        name = path.name if path != workdir else str(manager.best_step() or manager.latest_step())
        if name not in steps:
            raise CheckpointError(f"no complete checkpoint {path}; there are: {', '.join(steps) or 'none'}")
        restored = _restore(
            manager,
            int(name),
            workdir / "checkpoints",
            params=ocp.args.StandardRestore(),
            record=ocp.args.JsonRestore(),
        )
    params = {name: np.asarray(value) for name, value in restored.params.items()}
    record = restored.record
    folder = workdir / "encoder"
    hf_config = pretrained.read_hf_config(folder)
    return SavedEncoder(
        config=config,
        hf_config=hf_config,
        folder=folder,
        transformer_config=pretrained.transformer_config(hf_config, source=str(folder)),
        transformer=parameters.subset(params, "encoder"),
        pooler_head=_pooler_head(config, params, folder),
        pooler=record["pooler"],
        step=record["step"],
        dev=record["dev"],
        dev_metric=record["dev_metric"],
    )


def _pooler_head(config: Config, params: Params, folder: Path) -> Params | None:
    if config.encoding_pooler == "cls":
        return parameters.subset(params, "projector")
    path = folder / "pooler.safetensors"
    return load_file(path) if path.is_file() else None


def _restore(manager: ocp.CheckpointManager, step: int, folder: Path, **items: Any) -> Any:
    try:
        return manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # what a damaged file raises depends on where the damage is
        raise CheckpointError(
            f"cannot read the checkpoint {folder / str(step)} ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"if it is damaged, delete it to go on from an earlier one: there are steps {manager.all_steps()}"
        ) from error


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """Reading concerns one process: without this, Orbax waits for all of them."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"reader_{index}"
    )


def _write_base(folder: Path, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(encoder.hf_config), indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    if encoder.pooler:
        pooler = {name: np.ascontiguousarray(array) for name, array in encoder.pooler.items()}
        save_file(pooler, folder / "pooler.safetensors")


def _config_of(path: Path) -> Config:
    try:
        return Config.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _check_same_config(path: Path, config: Config) -> None:
    def flat(values: Mapping[str, Any]) -> dict[str, Any]:
        leaves = {}
        for name, value in values.items():
            leaves |= (
                {f"{name}.{key}": leaf for key, leaf in value.items()} if isinstance(value, dict) else {name: value}
            )
        return leaves

    then, now = flat(_config_of(path).to_dict()), flat(config.to_dict())
    changed = [
        f"{key}: {then[key]!r} then, {now[key]!r} now"
        for key in now
        if then[key] != now[key] and key not in _FREE_ON_RESUME
    ]
    if changed:
        raise ConfigError(
            f"{path.parent} holds a run with another configuration (the learning rate's schedule depends on the number "
            "of steps, too); give another --workdir, or the same values:\n  " + "\n  ".join(changed)
        )
