"""A run's folder and who may write to it.

It holds `config.json` (the resolved configuration), `encoder/` (config.json, tokenizer and, where there is one, pooler
of the checkpoint that training starts from: everything but the weights that are trained), `start.json` (digests of the
weights that the run began from, and of all these files, compared when they are read), `lock` (who trains here, or was
the last to do so), `metrics.jsonl`, `checkpoints/STEP` (`storage/checkpoint.py`), what was evaluated and selected
(`storage/selection.py`) and, where something was damaged, `damaged/`, where it was moved out of the way.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from diffcse_jax import hosts
from diffcse_jax.config import Config, flat
from diffcse_jax.errors import CheckpointError, ConfigError, InUseError, UserError
from diffcse_jax.io import (
    CHECKPOINTS,
    CONFIG,
    disk_errors,
    file_digests,
    first_changed,
    lock,
    read_json_object,
    write_json,
    write_tensors,
)
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pretrained import Pretrained
from diffcse_jax.storage import base_model
from diffcse_jax.storage.digests import of_json

START = "start.json"
METRICS = "metrics.jsonl"

_ENCODER = "encoder"
_POOLER = "pooler.safetensors"
_FILES = "files"  # of `start.json`: digests of `config.json` and of the files in `encoder/`
_LOCK = "lock"
_DAMAGED = "damaged"
_SAFE = "What is complete there stays as it is."
_INSTEAD = "give another --workdir"
_RESTORE = (
    "restore it from a copy, or from starts.jsonl in that folder, whose lines hold its content as `configuration`; or "
    "begin a new run in another --workdir"
)
_BEFORE_CHECKPOINTS = ("generator", "vectors", "report", "tensorboard")  # folders of a run that may have none yet

# Keys that may change between a run and its continuation: training does not depend on them.
FREE_ON_RESUME = {
    "train.log_every",
    "train.max_bad_steps",
    "train.packing",
    "train.recompute",
    "eval.every",
    "eval.data_dir",
    "eval.batch_size",
    "eval.keep_start",
    "eval.interpolate",
    "eval.hold",
    "finetune.data_dir",
    "finetune.predictions",
    "data.cache_dir",
    "mesh.data",
    "mesh.model",
    "mesh.fully_sharded",
    "distributed",
}


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Keeps every other run out of the workdir until the block ends. The folder is made if there is none.

    Process 0 holds a lock on `WORKDIR/lock`, which the system frees when that process ends, however it ends. Where the
    platform or the file system knows no locks, nobody is kept out.

    Raises:
        CheckpointError: another run holds the workdir, or it cannot be written; raised on every process.
    """
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            try:
                stack.enter_context(lock(workdir / _LOCK))
            except InUseError as error:
                raise InUseError(f"{error}; wait for its end, or end it, or give another --workdir") from error

        hosts.decided_by_first(hold)
        yield


def start_workdir(
    workdir: Path,
    config: Config,
    encoder: Pretrained,
    tokenizer: PreTrainedTokenizerFast,
    generator: Pretrained | None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes what identifies a new run, or checks that the run in the workdir is the same.

    A run without a checkpoint has nothing to go on from: one with another configuration or start takes its place.

    Args:
        workdir: the folder, on a file system that all processes see.
        config: the resolved configuration.
        encoder: the checkpoint that training starts from.
        tokenizer: the encoder's.
        generator: the frozen masked LM of `generator.name_or_path`; None where the run names none.
        others: digests of what else training reads, by the key of the configuration that names it: frozen networks,
            tables.

    Raises:
        ConfigError: the workdir holds a run with another configuration (every differing key is named), or one that
            began from other weights.
        CheckpointError: the configuration of its checkpoints is damaged or missing, it cannot be written, or the
            processes see different folders. As all errors here, it is raised on every process.
    """

    def start() -> None:
        with disk_errors(workdir, safe=_SAFE, instead=_INSTEAD):
            digests = _digests(encoder, generator) | dict(others)
            if _has_checkpoint(workdir):
                _check_same_config(workdir, config)
                _check_same_files(workdir, config, digests)
                _mend_encoder(workdir, config, encoder, tokenizer)
                return
            if (workdir / CONFIG).is_file():
                _clear_unlike(workdir, config, digests)
            _write_run(workdir, config, encoder, tokenizer, digests)

    hosts.decided_by_first(start)
    if jax.process_count() > 1:
        seen = multihost_utils.process_allgather(np.int32((workdir / CONFIG).is_file()))
        if not seen.all():
            raise CheckpointError(
                f"{workdir} is not the same folder for all processes: give a --workdir on a file system that they share"
            )


def check_workdir(workdir: Path, config: Config) -> None:
    """Refuses a workdir with checkpoints of another configuration, as `start_workdir` does, before anything else.

    Raises:
        ConfigError: every differing key is named.
        CheckpointError: the configuration of these checkpoints is damaged or missing.
    """

    def check() -> None:
        if _has_checkpoint(workdir):
            _check_same_config(workdir, config)

    hosts.decided_by_first(check)


def read_config(workdir: Path) -> Config:
    """The resolved configuration of a workdir.

    Raises:
        CheckpointError: no workdir of ours, or it is damaged.
    """
    path = workdir / CONFIG
    if not (workdir / CHECKPOINTS).is_dir() or not path.is_file():
        raise CheckpointError(f"{workdir} is no training workdir: it needs {CONFIG} and {CHECKPOINTS}/")
    return _read_config(workdir)


def _read_config(workdir: Path) -> Config:
    path = workdir / CONFIG
    try:
        content = read_json_object(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_RESTORE}") from error
    if _recorded_files(workdir, CONFIG).get(CONFIG, of_json(content)) != of_json(content):
        raise CheckpointError(f"{path} is not what {START} beside it says was written: {_RESTORE}")
    return Config.from_dict(content)


def set_aside(workdir: Path, path: Path) -> Path:
    """Moves what is damaged out of the way, into `WORKDIR/damaged`, and returns its new path."""
    return path.rename(place_for_damaged(workdir, path.name))


def place_for_damaged(workdir: Path, name: str) -> Path:
    """A path in `WORKDIR/damaged` that is not taken."""
    folder = workdir / _DAMAGED
    folder.mkdir(exist_ok=True)
    taken = {each.name for each in folder.iterdir()}
    names = (name, *(f"{name}.{number}" for number in range(2, len(taken) + 3)))
    return folder / next(each for each in names if each not in taken)


def encoder_folder(workdir: Path) -> Path:
    """The folder with config.json and tokenizer of the checkpoint that training started from.

    Raises:
        CheckpointError: it is damaged.
    """
    if name := first_changed(workdir, _recorded_files(workdir, _ENCODER)):
        raise CheckpointError(
            f"{workdir / name} is not what {START} says was written: the command that trained the run, started again, "
            "writes it anew"
        )
    return workdir / _ENCODER


def read_pooler(workdir: Path) -> Params | None:
    """The dense + tanh pooler of the checkpoint that training started from; None where it has none."""
    path = workdir / _ENCODER / _POOLER
    return load_file(path) if path.is_file() else None


def _write_run(
    workdir: Path,
    config: Config,
    encoder: Pretrained,
    tokenizer: PreTrainedTokenizerFast,
    digests: Mapping[str, str],
) -> None:
    _write_encoder(workdir, config.model.name_or_path, encoder, tokenizer)
    write_json(workdir / START, {**digests, _FILES: _digests_of_files(workdir, config.to_dict())})
    write_json(workdir / CONFIG, config.to_dict())  # last: its presence says that the others are whole


def _write_encoder(workdir: Path, name: str, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = workdir / _ENCODER
    folder.mkdir(exist_ok=True, parents=True)
    write_json(folder / "config.json", dict(encoder.hf_config))
    tokenizer.save_pretrained(folder)
    base_model.write(folder, base_model.describe(name, encoder.folder, encoder.hf_config))
    if encoder.pooler:
        write_tensors(folder / _POOLER, encoder.pooler)


def _has_checkpoint(workdir: Path) -> bool:
    """True if there is a run with something to go on from, even if its configuration is lost."""
    return any(each.name.isdecimal() for each in (workdir / CHECKPOINTS).glob("*"))


def _clear_unlike(workdir: Path, config: Config, digests: dict[str, str]) -> None:
    """Removes what a run without a checkpoint has written, if it is another one."""
    try:
        _check_same_config(workdir, config)
        _check_same_files(workdir, config, digests)
    except UserError:
        (workdir / CONFIG).unlink()  # first: what is left without it is no run
        for name in _BEFORE_CHECKPOINTS:
            shutil.rmtree(workdir / name, ignore_errors=True)


def _digests_of_files(workdir: Path, config: dict[str, Any]) -> dict[str, str]:
    encoder = (path for path in (workdir / _ENCODER).iterdir() if path.is_file())
    return file_digests(workdir, encoder) | {CONFIG: of_json(config)}


def _recorded_files(workdir: Path, part: str) -> dict[str, str]:
    """The recorded digests of `config.json` or of the files in `encoder/`; none for runs of earlier versions."""
    path = workdir / START
    recorded = read_json_object(path).get(_FILES, {}) if path.is_file() else {}
    if not isinstance(recorded, dict):
        raise CheckpointError(f"{path}: `{_FILES}` is no object: restore the file from a copy")
    return {name: digest for name, digest in recorded.items() if name.split("/")[0] == part}


def _mend_encoder(workdir: Path, config: Config, encoder: Pretrained, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes `encoder/` anew where it is damaged: what it holds is the start's.

    Raises:
        ConfigError: the start is no longer what it was.
    """
    recorded = _recorded_files(workdir, _ENCODER)
    damaged = first_changed(workdir, recorded)
    if damaged:
        _write_encoder(workdir, config.model.name_or_path, encoder, tokenizer)
    then = read_json_object(workdir / _ENCODER / "config.json")
    if (damaged and first_changed(workdir, recorded)) or then != json.loads(json.dumps(dict(encoder.hf_config))):
        raise ConfigError(
            f"config.json or the tokenizer of model.name_or_path={config.model.name_or_path!r} has changed since the "
            f"run in {workdir} began; restore the earlier files there, or give another --workdir to begin a new run"
        )
    if damaged:
        print(f"warning: {workdir / damaged} was damaged and is written anew", file=sys.stderr)


def _digests(encoder: Pretrained, generator: Pretrained | None) -> dict[str, str]:
    """A digest of the weights that each key of the configuration names."""
    digests = {"model.name_or_path": encoder.digest()}
    return digests if generator is None else digests | {"generator.name_or_path": generator.digest()}


def _check_same_files(workdir: Path, config: Config, now: Mapping[str, str]) -> None:
    path = workdir / START
    then = read_json_object(path) if path.is_file() else {}  # runs of earlier versions did not record it
    values = flat(config.to_dict())
    changed = [f"{key}={values[key]!r}" for key in now if then.get(key, now[key]) != now[key]]
    if changed:
        raise ConfigError(
            f"the files of {' and '.join(changed)} have changed since the run in {workdir} began; "
            "restore the earlier files there, or give another --workdir to begin a new run"
        )
    if now.keys() - then.keys():
        files = then.get(_FILES) or _digests_of_files(workdir, read_json_object(workdir / CONFIG))
        write_json(path, {**then, **now, _FILES: files})


def _check_same_config(workdir: Path, config: Config) -> None:
    then, now = flat(_read_config(workdir).to_dict()), flat(config.to_dict())
    free = FREE_ON_RESUME
    if then["precision"] == "auto":  # as earlier versions stored it; what it meant was not recorded
        free = free | {"precision"}
    if config.needs("labels"):
        free = free | {"model.name_or_path"}  # often a run's folder, which may be moved; its weights are compared
    changed = [key for key in now | then if then.get(key) != now.get(key) and key not in free]
    if changed:
        lines = [f"{key}: {then.get(key)!r} then, {now.get(key)!r} now{_advice(key, then.get(key))}" for key in changed]
        raise ConfigError(
            f"{workdir} holds a run with another configuration (the learning rate's schedule depends on the number "
            "of steps, too). Give the same values to go on with it, or for a new run another --workdir, such as "
            f"{_other_name(workdir, {key: now[key] for key in changed})}:\n  " + "\n  ".join(lines)
        )


def _other_name(workdir: Path, changed: Mapping[str, Any]) -> str:
    """An example of a name that tells runs apart, by a key that differs where it is short."""
    keys = ["seed"] if "train.seed" in changed else [key for key, value in changed.items() if len(str(value)) < 20]
    return f"'{workdir}_{{{keys[0]}}}' ({{{keys[0]}}} becomes its value)" if keys else f"'{workdir}_2'"


def _advice(key: str, then: Any) -> str:
    """The reason why a value differs that the user may not have given."""
    if key != "precision":
        return ""
    return f" (`auto` depends on the machine; --config.precision={then} goes on with the run's own)"
