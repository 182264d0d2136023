"""Pooling as a sentence-transformers folder records it: written by the export, read by the encoder.

`modules.json` lists the modules of a folder: the transformer, a weighted mean of its layers (for poolers over two
layers), pooling over tokens, and a dense + tanh head (for the pooler `cls`). `config_sentence_transformers.json` may
have `truncate_dim`, the size that embeddings are cut to. Releases 2 to 6 of sentence-transformers read this layout.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from diffcse_jax.errors import CheckpointError, ConfigError, warn_user
from diffcse_jax.io import read_json, read_json_object, why_unreadable, write_json, write_tensors
from diffcse_jax.models.hf import FLOATS, Pretrained
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import AVERAGED_LAYERS, POOLERS

_KNOWN_MODULES = {"Transformer", "WeightedLayerPooling", "Pooling", "Dense", "Normalize"}
_POOLING_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
_SETTINGS = "config_sentence_transformers.json"
_TANH = "torch.nn.modules.activation.Tanh"

TWO_LAYER_POOLERS = tuple(pooler for pooler, layers in AVERAGED_LAYERS.items() if len(layers) == 2)


@dataclasses.dataclass(frozen=True)
class RecordedPooler:
    """What a folder records: the pooler, the parameters of its dense + tanh head, and the size to cut embeddings to."""

    pooler: str
    head: Params | None
    truncate_dim: int | None = None


def write(
    folder: Path,
    pooler: str,
    *,
    num_blocks: int,
    hidden_size: int,
    head: Params | None,
    truncate_dim: int | None = None,
) -> None:
    """Write the settings, `modules.json` and the modules that follow the transformer.

    Args:
        folder: A Hugging Face folder. Poolers over two layers need `output_hidden_states` in its `config.json`.
        pooler: One of the poolers in `AVERAGED_LAYERS`, `cls` or `cls_before_pooler`.
        num_blocks: Number of blocks of the transformer.
        hidden_size: Embedding size of the transformer.
        head: Parameters of the dense + tanh head. The pooler `cls` needs them; other poolers ignore them.
        truncate_dim: The size that embeddings are cut to; None for whole embeddings.
    """
    cut = {} if truncate_dim is None else {"truncate_dim": truncate_dim}
    write_json(folder / _SETTINGS, {"similarity_fn_name": "cosine"} | cut)
    modules = ["Transformer"]
    if pooler in TWO_LAYER_POOLERS:
        config = {"word_embedding_dimension": hidden_size, "layer_start": 0, "num_hidden_layers": num_blocks}
        weights = {"layer_weights": _layer_weights(pooler, num_blocks)}
        _write_module(folder, modules, "WeightedLayerPooling", config, weights)
    mode = "cls_token" if pooler in ("cls", "cls_before_pooler") else "mean_tokens"
    config = {f"pooling_mode_{name}": name == mode for name in _POOLING_MODES}
    _write_module(folder, modules, "Pooling", {"word_embedding_dimension": hidden_size} | config)
    if pooler == "cls":
        assert head is not None
        sizes = {"in_features": hidden_size, "out_features": hidden_size}
        weights = {"linear.weight": np.asarray(head["dense.kernel"]).T, "linear.bias": np.asarray(head["dense.bias"])}
        _write_module(folder, modules, "Dense", sizes | {"bias": True, "activation_function": _TANH}, weights)
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]
    write_json(folder / "modules.json", entries)


def recorded(checkpoint: Pretrained) -> RecordedPooler | None:
    """Return the pooler that a checkpoint's folder records, or else the one that its authors evaluate it with, or None.

    Raises:
        CheckpointError: As `read`.
    """
    if record := read(checkpoint.folder):
        return record
    pooler = checkpoint.evaluated_with
    return RecordedPooler(pooler, checkpoint.pooler if pooler == "cls" else None) if pooler else None


def read(folder: Path) -> RecordedPooler | None:
    """Return the pooler of a sentence-transformers folder, or None for a folder without `modules.json`.

    Raises:
        CheckpointError: The modules are not a supported pooler, or their files are invalid.
    """
    if not os.path.isfile(folder / "modules.json"):
        return None
    modules = _read_modules(folder)
    if set(modules) - _KNOWN_MODULES or "Pooling" not in modules:
        raise CheckpointError(f"{folder}/modules.json: the modules {', '.join(modules)[:200]} are not supported")
    head = _read_head(modules["Dense"]) if "Dense" in modules else None
    truncate_dim = _read_truncate_dim(folder)
    mode = _pooling_mode(modules["Pooling"])
    if mode == "cls_token" and "WeightedLayerPooling" not in modules:
        return RecordedPooler("cls" if head else "cls_before_pooler", head, truncate_dim)
    if mode == "mean_tokens" and head is None:
        pooler = _layer_pooler(modules["WeightedLayerPooling"]) if "WeightedLayerPooling" in modules else "avg"
        return RecordedPooler(pooler, None, truncate_dim)
    raise CheckpointError(
        f"{folder}/modules.json: {mode} pooling with the modules {', '.join(modules)} is not supported"
    )


def _read_modules(folder: Path) -> dict[str, Path]:
    """Return the folders of the modules by type. All of them are inside the folder."""
    path = folder / "modules.json"
    listed, modules = read_json(path), {}
    for module in listed if isinstance(listed, list) else [None]:
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise CheckpointError(f"{path} is not a list of modules with `type` and `path`")
        place = Path(module["path"])
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{path}: {module['path'][:60]!r} is not a folder inside {folder}")
        kind = module["type"].rpartition(".")[2]
        if kind in modules:
            raise CheckpointError(f"{path}: two modules {kind[:60]} are not supported")
        modules[kind] = folder / place
    return modules


def _read_truncate_dim(folder: Path) -> int | None:
    path = folder / _SETTINGS
    size = read_json_object(path).get("truncate_dim") if path.is_file() else None
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(f"{path}: truncate_dim: expected a whole number from 1, got {str(size)[:60]!r}")
    return size


def _read_tensors(module: Path, axes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the tensors of a module and check the number of axes of the named ones."""
    path = module / "model.safetensors"
    if problem := why_unreadable(path):
        raise CheckpointError(problem)
    try:
        tensors = load_file(path)
    except Exception as error:  # the library raises its own SafetensorError, OSError or TypeError
        raise CheckpointError(f"cannot read {path}: {error}") from error
    for name, count in axes.items():
        if name not in tensors or tensors[name].ndim != count or tensors[name].dtype.name not in FLOATS:
            raise CheckpointError(f"{path} has no floating-point tensor {name} with {count} axes")
    return tensors


def _layer_weights(pooler: str, num_blocks: int) -> np.ndarray:
    """Return the weights of the embedding layer and of each block in the mean, shape (num_blocks + 1,)."""
    weights = np.zeros(num_blocks + 1, np.float32)
    weights[list(AVERAGED_LAYERS[pooler])] = 1
    return weights


def _layer_pooler(module: Path) -> str:
    """Return the pooler that averages the layers of a WeightedLayerPooling module."""
    config = read_json_object(module / "config.json")
    weights = _read_tensors(module, {"layer_weights": 1})["layer_weights"]
    if config.get("layer_start") == 0 and config.get("num_hidden_layers") == len(weights) - 1:
        for pooler in TWO_LAYER_POOLERS:
            layers = AVERAGED_LAYERS[pooler]
            if len(weights) >= len(layers) and np.array_equal(weights, _layer_weights(pooler, len(weights) - 1)):
                return pooler
    raise CheckpointError(f"{module}: these layer weights are not supported")


def _pooling_mode(module: Path) -> str:
    """Return the mode of a Pooling module, such as `cls_token`; several modes are joined by `+`."""
    config = read_json_object(module / "config.json")
    if "pooling_mode" in config:  # since release 5.2
        mode = str(config["pooling_mode"])[:60]
        return f"{mode}_tokens" if mode == "mean" else f"{mode}_token"
    return "+".join(name for name in _POOLING_MODES if config.get(f"pooling_mode_{name}"))


def _read_head(module: Path) -> Params:
    """Return the parameters of a Dense module under our names and in our layout."""
    if read_json_object(module / "config.json").get("activation_function") != _TANH:
        raise CheckpointError(f"{module}: only a dense layer with tanh is supported")
    tensors = _read_tensors(module, {"linear.weight": 2, "linear.bias": 1})
    return {
        "dense.kernel": np.ascontiguousarray(tensors["linear.weight"].T, dtype=np.float32),
        "dense.bias": tensors["linear.bias"].astype(np.float32),
    }


def _write_module(
    folder: Path, modules: list[str], name: str, config: dict[str, Any], weights: Params | None = None
) -> None:
    """Write a module and append its name to the list of modules."""
    module = folder / f"{len(modules)}_{name}"
    module.mkdir()
    modules.append(name)
    write_json(module / "config.json", config)
    if weights:
        write_tensors(module / "model.safetensors", weights)


def choose_pooler(explicit: str | None, recorded: str | None, source: str) -> str:
    """Return the explicit pooler if there is one, otherwise the recorded one.

    Raises:
        CheckpointError: There is neither.
    """
    pooler = explicit or recorded
    if pooler is None:
        raise CheckpointError(f"{source} does not record its pooler. Choose one of: {', '.join(POOLERS)}")
    if explicit and recorded and explicit != recorded:
        warn_user(
            f"{source} was trained with the pooler {recorded!r} and is used with {explicit!r}: scores can be far lower"
        )
    return pooler


def checked_truncation(truncate_dim: int | None, hidden_size: int) -> int | None:
    """Return the number of dimensions to keep as it was given; None keeps all.

    Raises:
        ConfigError: It is below 1 or larger than the embedding size.
    """
    if truncate_dim is not None and not 1 <= truncate_dim <= hidden_size:
        raise ConfigError(f"truncate_dim={truncate_dim}: the embedding size is {hidden_size}. Keep 1 to {hidden_size}")
    return truncate_dim
