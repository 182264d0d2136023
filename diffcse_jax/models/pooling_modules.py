"""Pooling as a sentence-transformers folder records it: written by the export, read by the encoder.

`modules.json` lists the modules of a folder: the transformer, a weighted mean of its layers (for poolers over two
layers), pooling over tokens, and a dense + tanh head (for the pooler `cls`). `config_sentence_transformers.json` may
have `truncate_dim`, the size that embeddings are cut to. Releases 2 to 6 of sentence-transformers read this layout.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffcse_jax.errors import CheckpointError, ConfigError, warn_user
from diffcse_jax.io import read_json, read_json_object, write_json, write_tensors
from diffcse_jax.models.hf import FLOATS, Pretrained, read_safetensors
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import AVERAGED_LAYERS, CLS_POOLERS, OTHER_POOLERS, POOLERS
from diffcse_jax.models.prompts import NO_PROMPTS, SETTINGS, Prompts, read_prompts

_KNOWN_MODULES = {"Transformer", "WeightedLayerPooling", "Pooling", "Dense", "Normalize"}
# Poolers over one layer by the mode of a Pooling module: since release 5.2 `pooling_mode`, before a key of its own.
_MODES = {
    "cls": "cls_before_pooler",
    "mean": "avg",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
    "lasttoken": "lasttoken",
}
_KEYS = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}
_FIRST_MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens")  # of release 2.0
TEXT_SETTINGS = "sentence_bert_config.json"  # how the transformer module reads text
_TANH = "torch.nn.modules.activation.Tanh"

TWO_LAYER_POOLERS = tuple(pooler for pooler in AVERAGED_LAYERS if pooler != "avg")


class RecordedPooler(NamedTuple):
    """What a folder records: the pooler, the parameters of its dense + tanh head, and the size to cut embeddings to."""

    pooler: str
    head: Params | None
    truncate_dim: int | None = None
    pools_prompt: bool = True  # whether a prompt's tokens are pooled


def write(
    folder: Path,
    pooler: str,
    num_blocks: int,
    hidden_size: int,
    head: Params | None,
    truncate_dim: int | None = None,
    prompts: Prompts = NO_PROMPTS,
) -> None:
    """Write the settings, `modules.json` and the modules that follow the transformer into a Hugging Face folder.

    Poolers over two layers need `output_hidden_states` in its `config.json`. Only the pooler `cls` has a head.
    """
    cut = {} if truncate_dim is None else {"truncate_dim": truncate_dim}
    write_json(folder / SETTINGS, {"similarity_fn_name": "cosine"} | cut | prompts.settings())
    modules: list[tuple[str, dict, Params]] = [("Transformer", {}, {})]  # names, configurations, weights
    config: dict[str, Any]
    if pooler in TWO_LAYER_POOLERS:
        config = {"word_embedding_dimension": hidden_size, "layer_start": 0, "num_hidden_layers": num_blocks}
        modules.append(("WeightedLayerPooling", config, {"layer_weights": _layer_weights(pooler, num_blocks)}))
    mode = pooler if pooler in OTHER_POOLERS else "cls" if pooler in CLS_POOLERS else "mean"
    config = {f"pooling_mode_{_KEYS.get(each, each)}": each == mode for each in dict.fromkeys((*_FIRST_MODES, mode))}
    config |= {} if prompts.pooled else {"include_prompt": False}
    modules.append(("Pooling", {"word_embedding_dimension": hidden_size} | config, {}))
    if pooler == "cls":
        assert head is not None
        config = {"in_features": hidden_size, "out_features": hidden_size, "bias": True, "activation_function": _TANH}
        weights = {"linear.weight": np.asarray(head["dense.kernel"]).T, "linear.bias": np.asarray(head["dense.bias"])}
        modules.append(("Dense", config, weights))
    entries = []
    for index, (name, config, weights) in enumerate(modules):
        path = f"{index}_{name}" if index else ""  # the transformer's files are in the folder itself
        kind = f"sentence_transformers.models.{name}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": kind})
        if index:
            (folder / path).mkdir()
            write_json(folder / path / "config.json", config)
        if weights:
            write_tensors(folder / path / "model.safetensors", weights)
    write_json(folder / "modules.json", entries)


def recorded(checkpoint: Pretrained) -> RecordedPooler | None:
    """Return the pooler that a checkpoint's folder records, or else the one that its authors evaluate it with, or None.

    Raises CheckpointError as `read` does.
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
    head = None
    if dense := modules.get("Dense"):
        if read_json_object(dense / "config.json").get("activation_function") != _TANH:
            raise CheckpointError(f"{dense}: only a dense layer with tanh is supported")
        kernel, bias = _tensor(dense, "linear.weight", 2).T, _tensor(dense, "linear.bias", 1)
        head = {"dense.kernel": np.ascontiguousarray(kernel, np.float32), "dense.bias": bias.astype(np.float32)}
    path = folder / SETTINGS
    size = read_json_object(path).get("truncate_dim") if path.is_file() else None
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(f"{path}: truncate_dim: expected a whole number from 1, got {str(size)[:60]!r}")
    config, layers = read_json_object(modules["Pooling"] / "config.json"), modules.get("WeightedLayerPooling")
    mode = "+".join(each for each in _MODES if config.get(f"pooling_mode_{_KEYS.get(each, each)}"))
    mode = str(config.get("pooling_mode", mode))[:60]
    pools_prompt = config.get("include_prompt") is not False
    if mode == "cls" and head and layers is None:
        return RecordedPooler("cls", head, size, pools_prompt)
    if mode == "mean" and layers and head is None:
        return RecordedPooler(_layer_pooler(layers), None, size, pools_prompt)
    if mode in _MODES and layers is None and head is None:
        return RecordedPooler(_MODES[mode], None, size, pools_prompt)
    raise CheckpointError(
        f"{folder}/modules.json: {mode} pooling with the modules {', '.join(modules)} is not supported"
    )


def max_length_of(folder: Path, positions: int, trained: int = 0) -> int:
    """Return the number of tokens that texts are cut to.

    It is the one that the folder records, or that of the sentences in training (`trained`) if they are longer, and at
    most the number of positions.
    """
    path = folder / TEXT_SETTINGS
    recorded = read_json_object(path).get("max_seq_length") if path.is_file() else None
    if recorded is not None and (type(recorded) is not int or recorded < 3):
        raise CheckpointError(f"{path}: max_seq_length: expected a whole number from 3, got {str(recorded)[:60]!r}")
    return min(max(recorded or positions, trained), positions)


def prompts_of(folder: Path, recorded: RecordedPooler | None) -> Prompts:
    """Return the prompts of a folder, and whether its pooling reads them."""
    return read_prompts(folder, pooled=recorded is None or recorded.pools_prompt)


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


def _layer_pooler(module: Path) -> str:
    """Return the pooler that averages the layers of a WeightedLayerPooling module."""
    config, weights = read_json_object(module / "config.json"), _tensor(module, "layer_weights", 1)
    if config.get("layer_start") == 0 and config.get("num_hidden_layers") == len(weights) - 1:
        for pooler in TWO_LAYER_POOLERS:
            if len(weights) > 1 and np.array_equal(weights, _layer_weights(pooler, len(weights) - 1)):
                return pooler
    raise CheckpointError(f"{module}: these layer weights are not supported")


def _layer_weights(pooler: str, num_blocks: int) -> np.ndarray:
    """Return the weights of the embedding layer and of each block in the mean, shape (num_blocks + 1,)."""
    weights = np.zeros(num_blocks + 1, np.float32)
    weights[list(AVERAGED_LAYERS[pooler])] = 1
    return weights


def _tensor(module: Path, name: str, axes: int) -> np.ndarray:
    tensor = read_safetensors(module / "model.safetensors").get(name)
    if tensor is None or tensor.ndim != axes or tensor.dtype.name not in FLOATS:
        raise CheckpointError(f"{module}/model.safetensors has no floating-point tensor {name} with {axes} axes")
    return tensor


def choose_pooler(explicit: str | None, recorded: str | None, source: str) -> str:
    """Return the explicit pooler if there is one, otherwise the recorded one. If there is neither, raise an error."""
    pooler = explicit or recorded
    if pooler is None:
        raise CheckpointError(f"{source} does not record its pooler. Choose one of: {', '.join(POOLERS)}")
    if explicit and recorded and explicit != recorded:
        warn_user(
            f"{source} was trained with the pooler {recorded!r} and is used with {explicit!r}: scores can be far lower"
        )
    return pooler


def checked_truncation(truncate_dim: int | None, hidden_size: int) -> int | None:
    """Return the number of dimensions to keep (None: all), or raise ConfigError if the embedding has fewer."""
    if truncate_dim is not None and not 1 <= truncate_dim <= hidden_size:
        raise ConfigError(f"truncate_dim={truncate_dim}: the embedding size is {hidden_size}. Keep 1 to {hidden_size}")
    return truncate_dim
