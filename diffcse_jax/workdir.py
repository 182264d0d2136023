"""A run's folder: what it holds beside its checkpoints, and the encoder inside one of them.

`config.json` (the resolved configuration), `encoder/` (the base model's config.json, tokenizer and, where it has one,
pooler: everything but the trained weights), `checkpoints/STEP` (Orbax; written by `training/checkpoint.py`).
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models import parameters, pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pretrained import Pretrained
from diffcse_jax.models.transformer import TransformerConfig

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about what is as it should be

# Keys that may change between a run and its continuation, because results do not depend on them.
_FREE_ON_RESUME = {
    "train.log_every",
    "eval.data_dir",
    "eval.batch_size",
    "data.cache_dir",
    "mesh.data",
    "mesh.model",
    "mesh.fully_sharded",
    "distributed",
}


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


def workdir_of(path: Path) -> Path | None:
    """The training workdir that the path is, or that holds it as `checkpoints/STEP`; None if it is neither."""
    if _is_workdir(path):
        return path
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    return path.parent.parent if is_step and _is_workdir(path.parent.parent) else None


def _is_workdir(folder: Path) -> bool:
    """Whether its `config.json` is a run's: models of Hugging Face have a file of this name as well."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    model = config.get("model") if isinstance(config, dict) else None
    return isinstance(model, dict) and "name_or_path" in model


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
        item_handlers={"params": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()},
    ) as manager:
        steps = [str(step) for step in manager.all_steps()]
        name = path.name if path != workdir else str(manager.best_step() or manager.latest_step())
        if name not in steps:
            raise CheckpointError(f"no complete checkpoint {path}; there are: {', '.join(steps) or 'none'}")
        step, checkpoints = int(name), workdir / "checkpoints"
        with _damage_reported(manager, step, checkpoints):
            params = _on_one_device(manager.item_metadata(step)["params"].tree)
        restored = restore_items(
            manager,
            step,
            checkpoints,
            params=ocp.args.StandardRestore(params),
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


def restore_items(manager: ocp.CheckpointManager, step: int, folder: Path, **items: Any) -> Any:
    """Items of a checkpoint.

    Raises:
        CheckpointError: they cannot be read; the steps that there are are named.
    """
    with _damage_reported(manager, step, folder):
        return manager.restore(step, args=ocp.args.Composite(**items))


@contextmanager
def _damage_reported(manager: ocp.CheckpointManager, step: int, folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a damaged file raises depends on where the damage is
        raise CheckpointError(
            f"cannot read the checkpoint {folder / str(step)} ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"if it is damaged, delete it to go on from an earlier one: there are steps {manager.all_steps()}"
        ) from error


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
