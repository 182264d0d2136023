"""What a run begins with, who may write to it, and what a resume may change.

A run begins with its configuration and a starting checkpoint.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from diffcse_jax import hosts, io
from diffcse_jax.config import Config, flat, resume_keys
from diffcse_jax.errors import (
    CheckpointError,
    ConfigError,
    InUseError,
    UserError,
    printable_message,
)
from diffcse_jax.models import hf
from diffcse_jax.models.foreign_text import read_card, stated_languages
from diffcse_jax.models.heads import SENTENCE_HEAD, HeadLayer, RecordedHead
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import prefixed, subset
from diffcse_jax.models.sentence_folder import (
    NO_PROMPTS,
    SETTINGS,
    Prompts,
    read_prompts,
)
from diffcse_jax.models.text_settings import max_length_of, text_settings
from diffcse_jax.run_folder.finding import CHECKPOINTS, CONFIG, SELECTION

START = "start.json"
HEADS = "heads"  # in the folder of a fine-tuning: the heads that were trained alone
PASSAGES = "passages"  # an index, in the folder of a run that trains queries alone

_FILES = "files"  # in start.json: digests of the files in encoder/
_ENCODER = "encoder"
_POOLER = "pooler.safetensors"
_HEAD = "head.json"
_WEIGHTS = "documents.safetensors"  # of a run that trains queries alone
_BASE_MODEL = "base_model.json"
_PACKAGED = {"minilm": "sentence-transformers/all-MiniLM-L6-v2"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TRAINER_FOLDER = re.compile(r"(^|/)checkpoint-\d+$")  # written by transformers' Trainer
# What a run writes before its first checkpoint.
_BEFORE_CHECKPOINTS = ("generator", HEADS, PASSAGES, "report", "tensorboard")


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Keep every other run out of the folder during the block.

    The folder is created if it is missing. The first process locks `WORKDIR/lock`. The system frees
    the lock when that process ends, however it ends. On a file system without locks, no run is kept
    out. If another run uses the folder, every process raises an `InUseError`.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            try:
                stack.enter_context(io.lock(workdir / "lock"))
            except InUseError as error:
                raise InUseError(
                    f"{error}. Wait until it ends, stop it, or give another --workdir"
                ) from error

        hosts.decided_by_first(lock)
        yield


def open_run(
    workdir: Path,
    config: Config,
    encoder: Pretrained,
    tokenizer: PreTrainedTokenizerFast,
    generator: Pretrained | None,
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    prompts: Prompts = NO_PROMPTS,
) -> None:
    """Write what identifies a new run, or check that the run in the folder is the same.

    A run without a checkpoint has nothing to resume, so a different run may replace it. `generator`
    is the masked LM of `generator.name_or_path`, and `others` are digests of other files that
    training reads, by the key of the file.
    """

    @io.disk_errors(
        workdir, safe="Complete files there are unchanged.", instead="give another --workdir"
    )
    def begin_or_check() -> None:
        digests = {
            "model.name_or_path": io.json_digest([encoder.digest(), dict(encoder.hf_config)]),
            **others,
        }
        if generator is not None:
            digests["generator.name_or_path"] = generator.digest()
        write_encoder = partial(_write_encoder, workdir, config, encoder, tokenizer, prompts)
        # Checkpoints show that there is a run, even if config.json is lost.
        if any(path.name.isdecimal() for path in (workdir / CHECKPOINTS).glob("*")):
            _check_same(workdir, config, digests)
            _mend_encoder(workdir, write_encoder)
        else:
            _refuse_other_files(workdir)
            _remove_other_run(workdir, config, digests)
            write_encoder()
            files = io.file_digests(workdir, (workdir / _ENCODER).iterdir())
            identity = {**digests, CONFIG: io.json_digest(config.to_dict()), _FILES: files}
            io.write_json(workdir / START, identity)
            # This file is the last one, so it shows that the others are complete.
            io.write_json(workdir / CONFIG, config.to_dict())

    hosts.decided_by_first(begin_or_check)
    if jax.process_count() > 1:
        has_config = multihost_utils.process_allgather(np.int32((workdir / CONFIG).is_file()))
        if not has_config.all():
            raise CheckpointError(
                f"{workdir} is not the same folder on all processes. Give a --workdir on a file "
                "system that they share"
            )


def _mend_encoder(workdir: Path, write_encoder: Callable[[], None]) -> None:
    """Write the files of the starting checkpoint again if one is damaged."""
    if not (damaged := _damaged_file(workdir)):
        return
    write_encoder()
    if _damaged_file(workdir):
        raise ConfigError(
            f"the tokenizer of model.name_or_path has changed since the run in {workdir} began. "
            "Restore it, or give another --workdir to begin a new run"
        )
    message = f"warning: {workdir / damaged} was damaged. It has been rewritten"
    print(printable_message(message), file=sys.stderr)


def _refuse_other_files(workdir: Path) -> None:
    """Raise `ConfigError` if files that no run has written have the names that a run needs."""
    if (workdir / START).is_file():
        return
    encoder = workdir / _ENCODER
    is_other = encoder.exists() and not (encoder / _HEAD).is_file()
    if is_other or (workdir / CONFIG).is_file():
        path = encoder if is_other else workdir / CONFIG
        raise ConfigError(f"{path} is not of a run. Give another --workdir")


def _remove_other_run(workdir: Path, config: Config, digests: Mapping[str, str]) -> None:
    """Remove what a different run without a checkpoint has left in the folder."""
    if (workdir / CONFIG).is_file():
        try:
            _check_same(workdir, config, digests)
        except UserError:
            (workdir / CONFIG).unlink()  # first: without it the folder is not a run's
            for name in _BEFORE_CHECKPOINTS:
                shutil.rmtree(workdir / name, ignore_errors=True)
    (workdir / SELECTION).unlink(missing_ok=True)  # of a run whose checkpoints were removed


def damaged_path(workdir: Path, name: str) -> Path:
    """Return a free path in `WORKDIR/damaged`, to which a damaged file or folder can be moved."""
    folder = workdir / "damaged"
    folder.mkdir(exist_ok=True)
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(path for each in names if not (path := folder / each).exists())


def read_config(workdir: Path) -> Config:
    """Return the resolved configuration of a run."""
    path = workdir / CONFIG
    try:
        content = io.read_json_object(path)
        if io.read_json_object(workdir / START).get(CONFIG) != io.json_digest(content):
            raise CheckpointError(f"{path} differs from its checksum in {START}")
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Restore it from a copy, or from starts.jsonl in that folder, where each "
            f"line has {path.name} under `configuration` and {START} under `digests`. Or begin a "
            "new run in another --workdir"
        ) from error
    return Config.from_dict(content, for_reading=True)


def _check_same(workdir: Path, config: Config, digests: Mapping[str, str]) -> None:
    """Check that the run in the folder has this configuration, and began from these files."""
    earlier = flat(read_config(workdir).to_dict())
    now = flat(config.to_dict())
    free = resume_keys(config)
    if config.needs("labels"):
        # This is often the folder of a run, which may be moved. Its weights are compared instead.
        free = free | {"model.name_or_path"}
    changed = [key for key in now | earlier if earlier.get(key) != now.get(key) and key not in free]
    if changed:
        lines = [f"{key}: was {earlier.get(key)!r}, now {now.get(key)!r}" for key in changed]
        raise ConfigError(
            f"{workdir} holds a run with another configuration. To resume it, give the same values "
            "(the learning rate schedule depends on the number of steps as well). To begin a new "
            "run, give another --workdir:\n  " + "\n  ".join(lines)
        )
    began = io.read_json_object(workdir / START)
    others = [key for key, digest in digests.items() if began.get(key) != digest]
    if others:
        named = " and ".join(f"{key}={now[key]!r}" for key in others)
        raise ConfigError(
            f"the files of {named} have changed since the run in {workdir} began. "
            "Restore the earlier files, or give another --workdir to begin a new run"
        )


# The starting checkpoint


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A starting checkpoint."""

    name: str  # its hub id, or the last part of its path if it is only a local folder
    # Its hub id, or the one that it records as its origin. Empty if neither is known.
    hub_id: str = ""
    # Its license, by the keys of a card's metadata.
    license: Mapping[str, str] = dataclasses.field(default_factory=dict)
    language: tuple[str, ...] = ()  # codes that its card states


def is_local(name_or_path: str) -> bool:
    """Return True for a path on this machine, False for a hub id or the packaged `minilm`."""
    begins_like_path = name_or_path.startswith((".", "/", "~"))
    if begins_like_path or name_or_path.count("/") > 1 or "\\" in name_or_path:
        return True
    return os.path.isdir(io.expand_path(name_or_path))


def is_hub_id(name: Any) -> bool:
    """Return True if the recorded origin of a checkpoint can be a hub id and is not a folder."""
    if not isinstance(name, str):
        return False
    return bool(_HUB_ID.fullmatch(name)) and not is_local(name) and not _TRAINER_FOLDER.search(name)


def describe_base_model(name_or_path: str, folder: Path, hf_config: Mapping[str, Any]) -> BaseModel:
    """Return what a checkpoint's name in the configuration, folder and config.json say about it."""
    card = read_card(folder)
    keys = ("license", "license_name", "license_link")
    known = {key: card.get(key, hf_config.get(key)) for key in keys}
    license = {key: value for key, value in known.items() if isinstance(value, str)}
    # The name without a revision.
    name = hub_id = _PACKAGED.get(name_or_path, name_or_path.partition("@")[0])
    if is_local(name_or_path):
        name = os.path.basename(os.path.realpath(io.expand_path(name_or_path)))
        base = card.get("base_model")
        origins = [*(base if isinstance(base, list) else [base]), hf_config.get("_name_or_path")]
        hub_id = next(filter(is_hub_id, origins), "")
    return BaseModel(name, hub_id, license if "license" in license else {}, stated_languages(card))


def read_base_model(folder: Path) -> BaseModel:
    """Read the recorded starting checkpoint."""
    values = io.read_json_object(folder / _BASE_MODEL)
    return BaseModel(**values | {"language": tuple(values["language"])})


# The folder encoder/


def read_start(workdir: Path) -> tuple[Pretrained, Prompts]:
    """Return the starting checkpoint of a run, and the run's prompts.

    It has the weights that training changes only if documents are encoded with them.
    """
    if name := _damaged_file(workdir):
        raise CheckpointError(
            f"{workdir / name} differs from its checksum in {START}. The command that trained the "
            "run rewrites it"
        )
    folder = workdir / _ENCODER
    hf_config = hf.read_hf_config(folder)
    head = io.read_json_object(folder / _HEAD)
    layers = tuple(HeadLayer(**layer) for layer in head["layers"])
    weights = load_file(folder / _WEIGHTS) if (folder / _WEIGHTS).is_file() else {}
    start = Pretrained(
        folder,
        hf_config,
        hf.transformer_config(hf_config, source=str(folder)),
        subset(weights, _ENCODER),
        pooler=load_file(folder / _POOLER) if (folder / _POOLER).is_file() else None,
        sentence_head=RecordedHead(
            head["pooler"], layers, subset(weights, SENTENCE_HEAD), head["similarity"]
        ),
        languages=read_base_model(folder).language,
    )
    return start, read_prompts(folder)


def _damaged_file(workdir: Path) -> str:
    """Return the first file in encoder/ that is missing or has changed, or an empty string."""
    return io.first_changed(workdir, io.read_json_object(workdir / START).get(_FILES, {}))


def _write_encoder(
    workdir: Path,
    config: Config,
    encoder: Pretrained,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Prompts,
) -> None:
    with io.replace_dir(workdir / _ENCODER) as folder:
        io.write_json(folder / "config.json", dict(encoder.hf_config))
        tokenizer.save_pretrained(folder)
        base = describe_base_model(config.model.name_or_path, encoder.root, encoder.hf_config)
        io.write_json(folder / _BASE_MODEL, dataclasses.asdict(base))
        # A document encoder stays as it is.
        trained_length = 0 if config.trains_queries else config.data.max_length
        length = max_length_of(encoder.folder, encoder.config.max_length, trained_length)
        text_settings(encoder.folder)._replace(max_length=length).write(folder)
        io.write_json(folder / SETTINGS, prompts.settings())
        if encoder.pooler:
            io.write_tensors(folder / _POOLER, encoder.pooler)
        head = encoder.sentence_head
        if config.trains_queries:
            weights = prefixed(encoder.transformer, _ENCODER)
            io.write_tensors(folder / _WEIGHTS, weights | prefixed(head.params, SENTENCE_HEAD))
        layers = [layer._asdict() for layer in head.layers]
        io.write_json(
            folder / _HEAD, {"pooler": head.pooler, "similarity": head.similarity, "layers": layers}
        )
