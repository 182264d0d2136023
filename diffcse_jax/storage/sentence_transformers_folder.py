"""Pooling as a sentence-transformers folder records it: written by the export, read by the encoder.

A folder's `modules.json` lists its modules: the transformer, a weighted mean of its layers (for the poolers that take
two), pooling over tokens, and a dense + tanh head (for the pooler `cls`). `config_sentence_transformers.json` may have
`truncate_dim`, the length that vectors are cut to. The layout is the one that releases 2 to 6 of sentence-transformers
read; `truncate_dim` was tried with 6.2.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import read_json, read_json_object, why_unreadable, write_json, write_tensors
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import AVERAGED_LAYERS
from diffcse_jax.models.pretrained import FLOATS, Pretrained

_POOLING_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
_SETTINGS = "config_sentence_transformers.json"
_TANH = "torch.nn.modules.activation.Tanh"

TWO_LAYER_POOLERS = tuple(pooler for pooler, layers in AVERAGED_LAYERS.items() if len(layers) == 2)


@dataclasses.dataclass(frozen=True)
class RecordedPooler:
    """The pooler that a folder records, the parameters of its dense + tanh head if it has one, and a cut if it asks."""

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
    """Writes the settings, `modules.json` and the folders of the modules that follow the transformer.

    Args:
        folder: an existing Hugging Face folder; the poolers over two layers need `output_hidden_states` in its
            `config.json`.
        pooler: one of `diffcse_jax.groups.POOLERS`.
        num_blocks: blocks of the transformer.
        hidden_size: length of its vectors.
        head: parameters of the dense + tanh head; needed for the pooler `cls`, ignored for others.
        truncate_dim: the length that vectors are cut to; None: whole vectors.
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
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)


def recorded(checkpoint: Pretrained) -> RecordedPooler | None:
    """The pooler that a checkpoint's folder records or else that its authors evaluate it with; None: neither is known.

    Raises:
        CheckpointError: as `read`.
    """
    if record := read(checkpoint.folder):
        return record
    pooler = checkpoint.evaluated_with
    if pooler is None:
        return None
    return RecordedPooler(pooler, checkpoint.pooler if pooler == "cls" else None)


def read(folder: Path) -> RecordedPooler | None:
    """The pooler of a sentence-transformers folder; None for a folder without `modules.json`.

    Raises:
        CheckpointError: modules that are no pooler of ours, or files of theirs that cannot be read.
    """
    if not os.path.isfile(folder / "modules.json"):
        return None
    modules = _listed_modules(folder)
    unknown = set(modules) - {"Transformer", "WeightedLayerPooling", "Pooling", "Dense", "Normalize"}
    if unknown or "Pooling" not in modules:
        raise CheckpointError(f"{folder}/modules.json: cannot follow the modules {', '.join(modules)[:200]}")
    head = _read_head(modules["Dense"]) if "Dense" in modules else None
    truncate_dim = _recorded_cut(folder)
    mode = _pooling_mode(modules["Pooling"])
    if mode == "cls_token" and "WeightedLayerPooling" not in modules:
        return RecordedPooler("cls" if head else "cls_before_pooler", head, truncate_dim)
    if mode == "mean_tokens" and head is None:
        pooler = _layer_pooler(modules["WeightedLayerPooling"]) if "WeightedLayerPooling" in modules else "avg"
        return RecordedPooler(pooler, None, truncate_dim)
    raise CheckpointError(f"{folder}/modules.json: cannot follow {mode} pooling with the modules {', '.join(modules)}")


def _listed_modules(folder: Path) -> dict[str, Path]:
    """The folders of the modules by their types, all of them inside the folder."""
    path = folder / "modules.json"
    listed = read_json(path)
    modules = {}
    for module in listed if isinstance(listed, list) else [None]:
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise CheckpointError(f"{path} is no list of modules with their `type` and `path`")
        place = Path(module["path"])
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{path} names {module['path'][:60]!r}, which is no folder inside {folder}")
        kind = module["type"].rpartition(".")[2]
        if kind in modules:
            raise CheckpointError(f"{path} lists two modules {kind[:60]}: cannot follow both")
        modules[kind] = folder / place
    return modules


def _recorded_cut(folder: Path) -> int | None:
    """The length that the folder's vectors are cut to; None: they are not."""
    path = folder / _SETTINGS
    cut = read_json_object(path).get("truncate_dim") if path.is_file() else None
    if cut is not None and (type(cut) is not int or cut < 1):
        raise CheckpointError(f"{path}: truncate_dim: expected a whole number from 1, got {str(cut)[:60]!r}")
    return cut


def _tensors_of(module: Path, shapes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The named tensors of a module, each with so many axes."""
    path = module / "model.safetensors"
    if problem := why_unreadable(path):
        raise CheckpointError(problem)
    try:
        tensors = load_file(path)
    except Exception as error:  # the library raises its own SafetensorError, OSError or TypeError
        raise CheckpointError(f"cannot read {path}: {error}") from error
    for name, axes in shapes.items():
        if name not in tensors or tensors[name].ndim != axes or tensors[name].dtype.name not in FLOATS:
            raise CheckpointError(f"{path} has no tensor {name} of {axes} axes in floating point")
    return tensors


def _layer_weights(pooler: str, num_blocks: int) -> np.ndarray:
    """Weights of the embedding output and of each block's output in their mean, (num_blocks + 1,)."""
    weights = np.zeros(num_blocks + 1, np.float32)
    weights[list(AVERAGED_LAYERS[pooler])] = 1
    return weights


def _layer_pooler(module: Path) -> str:
    """The pooler that averages the layers of a WeightedLayerPooling module."""
    config = read_json_object(module / "config.json")
    weights = _tensors_of(module, {"layer_weights": 1})["layer_weights"]
    if config.get("layer_start") == 0 and config.get("num_hidden_layers") == len(weights) - 1:
        for pooler in TWO_LAYER_POOLERS:
            averaged = AVERAGED_LAYERS[pooler]
            if len(weights) >= len(averaged) and np.array_equal(weights, _layer_weights(pooler, len(weights) - 1)):
                return pooler
    raise CheckpointError(f"{module}: layer weights that no pooler here has")


def _pooling_mode(module: Path) -> str:
    """The mode of a Pooling module, as `cls_token`; several are joined by `+`."""
    config = read_json_object(module / "config.json")
    modes = [name for name in _POOLING_MODES if config.get(f"pooling_mode_{name}")]
    if "pooling_mode" in config:  # releases from 5.2 write the mode itself
        mode = str(config["pooling_mode"])[:60]
        modes = [f"{mode}_token" + ("s" if mode == "mean" else "")]
    return "+".join(modes)


def _read_head(module: Path) -> Params:
    """The parameters of a Dense module, under our names and in our layout."""
    if read_json_object(module / "config.json").get("activation_function") != _TANH:
        raise CheckpointError(f"{module}: only a dense layer with tanh can be followed")
    tensors = _tensors_of(module, {"linear.weight": 2, "linear.bias": 1})
    return {
        "dense.kernel": np.ascontiguousarray(tensors["linear.weight"].T, dtype=np.float32),
        "dense.bias": tensors["linear.bias"].astype(np.float32),
    }


def _write_module(
    folder: Path, modules: list[str], name: str, config: dict[str, Any], weights: Params | None = None
) -> None:
    """Adds a module's folder, and its name to the list of `modules`."""
    module = folder / f"{len(modules)}_{name}"
    module.mkdir()
    modules.append(name)
    write_json(module / "config.json", config)
    if weights:
        write_tensors(module / "model.safetensors", weights)
