"""The checkpoint that a run starts from, as a model card names it: `WORKDIR/encoder/base_model.json`.

It is written when a run begins, since the folder of the checkpoint may be gone when the run is exported.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import expand_path, read_json_object, write_json

LICENSE_KEYS = ("license", "license_name", "license_link")
PACKAGED = {"minilm": "sentence-transformers/all-MiniLM-L6-v2"}

_FILE = "base_model.json"
_LONGEST_CARD = 1 << 20  # bytes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_OF_A_TRAINER = re.compile(r"(^|/)checkpoint-\d+$")  # a folder that transformers' Trainer writes
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")  # in the hub's cache


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """A checkpoint as others know it.

    Attributes:
        name: its hub id; of a checkpoint that is in a folder alone, the folder's last name.
        hub_id: its hub id, or that of the model which it records to come from; empty where neither is known.
        license: as its card or configuration tells, by the keys of a card's metadata.
        language: the codes that its card tells.
    """

    name: str
    hub_id: str = ""
    license: Mapping[str, str] = dataclasses.field(default_factory=dict)
    language: tuple[str, ...] = ()


def is_local(name_or_path: str) -> bool:
    """True for a path of this machine, false for a hub id or `minilm`."""
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1 or "\\" in name_or_path
    return name_or_path not in PACKAGED and (looks_like_path or os.path.isdir(expand_path(name_or_path)))


def describe(name_or_path: str, folder: Path, hf_config: Mapping[str, Any]) -> BaseModel:
    """The checkpoint that the name or path stands for.

    Args:
        name_or_path: as the configuration has it.
        folder: where its files are, or some of them.
        hf_config: its `config.json`.
    """
    card = _metadata(folder)
    told = {key: value for key in LICENSE_KEYS if isinstance(value := card.get(key, hf_config.get(key)), str)}
    language = card.get("language", ())
    codes = tuple(str(code) for code in ([language] if isinstance(language, str) else language or ()))
    return BaseModel(*_names(name_or_path, card, hf_config), told if "license" in told else {}, codes)


def write(folder: Path, base: BaseModel) -> None:
    """Keeps the description in a workdir's folder of the encoder."""
    write_json(folder / _FILE, dataclasses.asdict(base))


def read(folder: Path, name_or_path: str, hf_config: Mapping[str, Any]) -> BaseModel:
    """The description that was kept there; of runs of earlier versions, what can still be known."""
    path = folder / _FILE
    if not path.is_file():
        return describe(name_or_path, expand_path(name_or_path) if is_local(name_or_path) else folder, hf_config)
    values = read_json_object(path)
    try:
        return BaseModel(**values | {"language": tuple(values["language"])})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not describe a checkpoint: {error}") from error


def _names(name_or_path: str, card: Mapping[str, Any], hf_config: Mapping[str, Any]) -> tuple[str, str]:
    """The attributes `name` and `hub_id`."""
    if not is_local(name_or_path):
        name = PACKAGED.get(name_or_path, name_or_path)
        return name, name
    path = Path(os.path.realpath(expand_path(name_or_path)))
    if cached := _SNAPSHOT.search(path.as_posix()):
        name = cached[1].replace("--", "/", 1)
        return name, name
    for recorded in (card.get("base_model"), hf_config.get("_name_or_path")):
        recorded = recorded[0] if isinstance(recorded, list) and len(recorded) == 1 else recorded
        if isinstance(recorded, str) and is_hub_id(recorded):
            return path.name, recorded
    return path.name, ""


def is_hub_id(recorded: str) -> bool:
    """True if what a checkpoint records as its origin can be a hub id, and is no folder."""
    return bool(_HUB_ID.fullmatch(recorded)) and not is_local(recorded) and not _OF_A_TRAINER.search(recorded)


def _metadata(folder: Path) -> Mapping[str, Any]:
    """The metadata of the card in a folder; empty where there is none that can be read."""
    path = folder / "README.md"
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST_CARD:
            return {}
        return metadata_load(path) or {}
    except Exception:  # of the YAML parser, for one; a card that nobody can read tells nothing
        return {}
