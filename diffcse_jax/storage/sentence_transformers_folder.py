"""The modules of a sentence-transformers folder that say how to pool: written by the export, read by the encoder.

A folder's `modules.json` lists its modules: the transformer, a weighted mean of its layers (for the poolers that take
two), pooling over tokens, and a dense + tanh head (for the pooler `cls`). The layout is the one that releases 2 to 6 of
sentence-transformers read.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from diffcse_jax.errors import CheckpointError
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import AVERAGED_LAYERS
from diffcse_jax.storage.files import read_json, write_json, write_tensors

_POOLING_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
_TANH = "torch.nn.modules.activation.Tanh"

TWO_LAYER_POOLERS = tuple(pooler for pooler, layers in AVERAGED_LAYERS.items() if len(layers) == 2)


@dataclasses.dataclass(frozen=True)
class RecordedPooler:
    """The pooler that a folder records, and the parameters of its dense + tanh head if it has one."""

    pooler: str
    head: Params | None


def write(folder: Path, pooler: str, *, num_blocks: int, hidden_size: int, head: Params | None) -> None:
    """Writes `modules.json` and the folders of the modules that follow the transformer.

    Args:
        folder: an existing Hugging Face folder; the poolers over two layers need `output_hidden_states` in its
            `config.json`.
        pooler: one of `diffcse_jax.config.POOLERS`.
        num_blocks: blocks of the transformer.
        hidden_size: length of its vectors.
        head: parameters of the dense + tanh head; needed for the pooler `cls`, ignored for others.
    """
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


def read(folder: Path) -> RecordedPooler | None:
    """The pooler of a sentence-transformers folder; None for a folder without `modules.json`.

    Raises:
        CheckpointError: modules that are no pooler of ours.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = {
        module["type"].rpartition(".")[2]: folder / module["path"] for module in read_json(folder / "modules.json")
    }
    unknown = set(modules) - {"Transformer", "WeightedLayerPooling", "Pooling", "Dense", "Normalize"}
    if unknown or "Pooling" not in modules:
        raise CheckpointError(f"{folder}/modules.json: cannot follow the modules {', '.join(modules)}")
    head = _read_head(modules["Dense"]) if "Dense" in modules else None
    mode = _pooling_mode(modules["Pooling"])
    if mode == "cls_token" and "WeightedLayerPooling" not in modules:
        return RecordedPooler("cls" if head else "cls_before_pooler", head)
    if mode == "mean_tokens" and head is None:
        return RecordedPooler(
            _layer_pooler(modules["WeightedLayerPooling"]) if "WeightedLayerPooling" in modules else "avg", None
        )
    raise CheckpointError(f"{folder}/modules.json: cannot follow {mode} pooling with the modules {', '.join(modules)}")


def _layer_weights(pooler: str, num_blocks: int) -> np.ndarray:
    """Weights of the embedding output and of each block's output in their mean, (num_blocks + 1,)."""
    weights = np.zeros(num_blocks + 1, np.float32)
    weights[list(AVERAGED_LAYERS[pooler])] = 1
    return weights


def _layer_pooler(module: Path) -> str:
    """The pooler that averages the layers of a WeightedLayerPooling module."""
    config = read_json(module / "config.json")
    if config["layer_start"] == 0:
        weights = load_file(module / "model.safetensors")["layer_weights"]
        for pooler in TWO_LAYER_POOLERS:
            if np.array_equal(weights, _layer_weights(pooler, config["num_hidden_layers"])):
                return pooler
    raise CheckpointError(f"{module}: layer weights that no pooler here has")


def _pooling_mode(module: Path) -> str:
    """The mode of a Pooling module, as `cls_token`; several are joined by `+`."""
    config = read_json(module / "config.json")
    modes = [name for name in _POOLING_MODES if config.get(f"pooling_mode_{name}")]
    if "pooling_mode" in config:  # releases from 5.2 write the mode itself
        modes = [f"{config['pooling_mode']}_token" + ("s" if config["pooling_mode"] == "mean" else "")]
    return "+".join(modes)


def _read_head(module: Path) -> Params:
    """The parameters of a Dense module, under our names and in our layout."""
    if read_json(module / "config.json")["activation_function"] != _TANH:
        raise CheckpointError(f"{module}: only a dense layer with tanh can be followed")
    tensors = load_file(module / "model.safetensors")
    return {"dense.kernel": np.ascontiguousarray(tensors["linear.weight"].T), "dense.bias": tensors["linear.bias"]}


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
