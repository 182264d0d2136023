"""What a sentence-transformers folder records: prompts, pooling, and the modules after it.

`modules.json` lists the modules of a folder: the transformer, a weighted mean of its layers (for
poolers over two layers), pooling over tokens, and any number of dense layers, layer norms, dropouts
and normalisations. A single dense + tanh layer after position 0 is the head of the pooler `cls`.
`config_sentence_transformers.json` names prompts, texts that some encoders expect in front of each
text, such as "query: ". It may have `truncate_dim`, the size that embeddings are cut to. Releases 2
to 6 of sentence-transformers read this layout.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffcse_jax.errors import CheckpointError, ConfigError, warn_user
from diffcse_jax.io import read_json_object, write_json, write_tensors
from diffcse_jax.models.files import (
    FLOATS,
    MODULES,
    expect,
    is_count,
    read_modules,
    read_tensors,
)
from diffcse_jax.models.heads import (
    HEAD_SETTINGS,
    NO_HEAD,
    TORCH_ACTIVATIONS,
    HeadLayer,
    RecordedHead,
    SentenceHead,
)
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Params, prefixed, shapes, subset
from diffcse_jax.models.poolers import AVERAGED_LAYERS, POOLERS, check_pooler, our_name
from diffcse_jax.models.pooling import SIMILARITIES
from diffcse_jax.models.routes import DOCUMENT, QUERY

SETTINGS = "config_sentence_transformers.json"
_MODEL_TYPE = "SentenceTransformer"
_TANH = "torch.nn.modules.activation.Tanh"
# Modules under which PyTorch has its activations (`Identity` is in `linear`).
TORCH_MODULES = ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")
# Poolers over one layer by the mode of a Pooling module, in the order in which
# sentence-transformers concatenates them. Since release 5.2 the module records `pooling_mode`,
# before that a key of its own for each mode.
_MODES = {
    "cls": "cls_before_pooler",
    "max": "max",
    "mean": "avg",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
    "lasttoken": "lasttoken",
}
_KEYS = {
    "cls": "cls_token",
    "mean": "mean_tokens",
    "max": "max_tokens",
    "weightedmean": "weightedmean_tokens",
}
_FIRST_MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens")  # of release 2.0
TWO_LAYER_POOLERS = tuple(pooler for pooler in AVERAGED_LAYERS if pooler != "avg")
DOCUMENT_NAMES = (DOCUMENT, "passage", "corpus")  # the first with a recorded text is used
# How model cards write the prompts of the families of e5, nomic, and bge, arctic and mxbai.
_IN_README = re.compile(
    r"[\"'`]((?:query|passage|search_query|search_document): "
    r"|Represent this sentence for searching relevant passages: )"
)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of an encoder."""

    by_name: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as recorded
    default_name: str | None = None  # of texts for which none is chosen; None: no prompt
    in_readme: tuple[str, ...] = ()  # prompts that the folder's README names, if none is recorded

    @property
    def default(self) -> str:
        """The prompt of texts for which none is chosen."""
        return self.by_name[self.default_name] if self.default_name else ""

    @property
    def query(self) -> str:
        return self.by_name.get(QUERY, "")

    @property
    def document(self) -> str:
        """The prompt of the texts that queries look for."""
        return next((self.by_name[name] for name in DOCUMENT_NAMES if self.by_name.get(name)), "")

    @property
    def symmetric(self) -> str:
        """The prompt of pairs whose texts are of one kind.

        It is the default prompt, or else that of queries.
        """
        return self.default or self.query

    @property
    def are_unused(self) -> bool:
        """Whether texts have no prompt by default, neither as queries nor as documents."""
        return not (self.default or self.query or self.document)

    def choose(
        self, prompt: str | None = None, prompt_name: str | None = None, default: str | None = None
    ) -> str:
        """Return the prompt if it is given, that of a name, or the default.

        Raise ConfigError if there is none, or if the given prompt is not text.
        """
        if prompt is not None and not isinstance(prompt, str):
            raise ConfigError(f"prompt={prompt!r}: expected text, such as 'query: '")
        if prompt is not None:
            return prompt
        if prompt_name is None:
            return self.default if default is None else default
        if prompt_name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise ConfigError(
                f"prompt_name={prompt_name!r}: the model has no such prompt. It has: {known}"
            )
        return self.by_name[prompt_name]

    def replaced(self, by_name: Mapping[str, str], default_name: str | None) -> "Prompts":
        """Return the prompts with others in the place of those of the same names.

        Raise ConfigError if they are not prompts by name, or if the default name is unknown.
        """
        if not (isinstance(by_name, Mapping) and all(isinstance(p, str) for p in by_name.values())):
            raise ConfigError(
                f"prompts={by_name!r}: expected prompts by name, such as {{'query': 'query: '}}"
            )
        prompts = Prompts({**self.by_name, **by_name}, default_name or self.default_name)
        prompts.choose(prompt_name=prompts.default_name)
        return prompts

    def or_warned(self, prompt: str) -> str | None:
        """Return a default prompt as `encode` takes it.

        If it is empty because the model's prompts are for other texts, it is None: `encode` warns
        of that.
        """
        return None if not prompt and self.are_unused else prompt

    def warning(self, name: str) -> str:
        """Return a warning for texts that are encoded without a prompt.

        If the model needs none, it is empty.
        """
        if listed := ", ".join(
            f"{key} ({value!r})" for key, value in self.by_name.items() if value
        ):
            return (
                f"{name} was trained with prompts, and none is used here. It has: {listed}. Give a "
                "prompt_name, or use encode_query and encode_document"
            )
        if self.in_readme:
            listed = ", ".join(map(repr, self.in_readme))
            return (
                f"the README of {name} names prompts ({listed}), but its configuration does not. "
                "None is used here. "
                f'Give prompt=..., or record them in {SETTINGS}: {{"prompts": {{"query": "...", '
                '"document": "..."}}'
            )
        return ""

    def settings(self) -> dict[str, object]:
        """Return the entries of `config_sentence_transformers.json`; empty without prompts."""
        named = dict(self.by_name)
        if self.document:  # sentence-transformers looks for it under the first name only
            named[DOCUMENT_NAMES[0]] = self.document
        if not any(named.values()):
            return {}
        return {"prompts": named, "default_prompt_name": self.default_name}


NO_PROMPTS = Prompts()


def read_prompts(folder: Path) -> Prompts:
    """Read the prompts of a folder, or those that its README names if none is recorded.

    Raise CheckpointError if they cannot be read.
    """
    path = folder / SETTINGS
    recorded = read_json_object(path) if path.is_file() else {}
    by_name = recorded.get("prompts") or {}
    default = recorded.get("default_prompt_name")
    if not isinstance(by_name, dict) or not all(isinstance(each, str) for each in by_name.values()):
        raise CheckpointError(f"{path}: `prompts` is not an object of texts")
    if default is not None and default not in by_name:
        raise CheckpointError(
            f"{path}: default_prompt_name {str(default)[:60]!r} is not one of the prompts"
        )
    in_readme: list[str] = []
    if not any(by_name.values()) and os.path.isfile(folder / "README.md"):
        in_readme = _IN_README.findall(
            (folder / "README.md").read_text(encoding="utf-8", errors="replace")
        )
    return Prompts(by_name, default, tuple(dict.fromkeys(in_readme)))


def for_columns(
    prompts: Prompts, asked: Sequence[str], columns: int
) -> tuple[tuple[str, ...], Prompts]:
    """Return the prompt of each column of a training text, and the trained model's prompts.

    Args:
        prompts: The prompts of the starting checkpoint.
        asked: `data.prompts`: for all columns or for each, the name of a recorded prompt, a prompt
            itself (which contains a space or a colon) or `none`. Empty: the prompt of queries for
            the first column and that of documents for the others. A single column gets one prompt
            for both views.
        columns: The number of columns.

    Raises:
        ConfigError: The number of prompts is neither 1 nor that of the columns, or a prompt is
            unknown.
    """
    if not asked and columns == 1:
        return (prompts.symmetric,), prompts
    if not asked:
        return (prompts.query, *[prompts.document] * (columns - 1)), prompts
    if len(asked) not in (1, columns):
        raise ConfigError(
            f"data.prompts has {len(asked)} prompts, and the text {columns} columns. Give 1 or "
            f"{columns}"
        )
    known = {**prompts.by_name, "none": ""}
    for each in asked:
        if each not in known and not re.search(r"[\s:]", each):
            raise ConfigError(
                f"data.prompts: the starting checkpoint has no prompt {each!r}. Known: "
                f"{', '.join(known)}. A prompt itself has a space or a colon, such as 'query: '"
            )
    texts = tuple(known.get(each, each) for each in asked) * (columns // len(asked))
    by_name = {**prompts.by_name, QUERY: texts[0], DOCUMENT_NAMES[0]: texts[-1]}
    # Other names of documents' prompts.
    by_name |= {name: texts[-1] for name in DOCUMENT_NAMES if name in by_name}
    return texts, dataclasses.replace(prompts, by_name=by_name)


class RecordedPooler(NamedTuple):
    """What a folder records."""

    pooler: str = ""  # empty: none
    head: Params | None = None  # dense + tanh, of the pooler `cls`
    truncate_dim: int | None = None  # the size that embeddings are cut to
    sentence_head: RecordedHead = NO_HEAD  # of other poolers
    prompts: Prompts = NO_PROMPTS


def write(folder: Path, record: RecordedPooler, num_blocks: int, hidden_size: int) -> None:
    """Write the settings, `modules.json` and the modules after the transformer into a folder.

    It is a Hugging Face folder. Poolers over two layers need `output_hidden_states` in its
    `config.json`. The pooler `cls` needs its head.
    """
    pooler, prompts = record.pooler, record.prompts
    settings = {"similarity_fn_name": record.sentence_head.similarity} | prompts.settings()
    cut = {} if record.truncate_dim is None else {"truncate_dim": record.truncate_dim}
    write_json(folder / SETTINGS, settings | cut)
    size = {"word_embedding_dimension": hidden_size}
    # The kind, the configuration and the weights of each.
    modules: list[tuple[str, dict[str, Any], Params]] = [("Transformer", {}, {})]
    if pooler in TWO_LAYER_POOLERS:
        weights = {"layer_weights": _layer_weights(pooler, num_blocks)}
        modules.append(
            (
                "WeightedLayerPooling",
                size | {"layer_start": 0, "num_hidden_layers": num_blocks},
                weights,
            )
        )
    modules.append(("Pooling", size | _pooling_config(pooler), {}))
    layers, params = record.sentence_head.layers, record.sentence_head.params
    if pooler == "cls":
        assert record.head is not None
        layers = (_tanh_layer(hidden_size),)
        params = prefixed(subset(record.head, "dense"), "layers.0.linear")
    for index, layer in enumerate(layers):
        config = {key: getattr(layer, key) for key in HEAD_SETTINGS[layer.kind]}
        arrays = subset(params, f"layers.{index}")
        modules.append(
            (layer.kind, config, {_theirs(name): np.asarray(arrays[name]).T for name in arrays})
        )
    entries = []
    for index, (kind, config, weights) in enumerate(modules):
        # The transformer's files are in the folder itself.
        path = f"{index}_{kind}" if index else ""
        entries.append(
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
        if index:
            (folder / path).mkdir()
            write_json(folder / path / "config.json", config)
        if weights:
            write_tensors(folder / path / "model.safetensors", weights)
    write_json(folder / MODULES, entries)


def _pooling_config(pooler: str) -> dict[str, Any]:
    of_pooler = {pooler: mode for mode, pooler in _MODES.items()} | {"cls": "cls"}
    modes = [of_pooler.get(each, "mean") for each in pooler.split("+")]
    if modes != [mode for mode in _MODES if mode in modes]:
        return {"pooling_mode": modes}
    return {
        f"pooling_mode_{_KEYS.get(each, each)}": each in modes for each in (*_FIRST_MODES, *modes)
    }


def _tanh_layer(size: int) -> HeadLayer:
    return HeadLayer("Dense", size, size, activation_function=_TANH)


def _theirs(ours: str) -> str:
    """Return the name of a tensor in PyTorch."""
    return ours.replace("kernel", "weight").replace("scale", "weight")


def _layer_weights(pooler: str, num_blocks: int) -> np.ndarray:
    """Return the weights of the embedding layer and of each block in the mean.

    Their shape is (num_blocks + 1,).
    """
    weights = np.zeros(num_blocks + 1, np.float32)
    weights[list(AVERAGED_LAYERS[pooler])] = 1
    return weights


def recorded(checkpoint: Pretrained) -> RecordedPooler:
    """Return what a checkpoint's folder records, or the pooler of its authors.

    If the folder records none, it is the pooler that the authors evaluate the checkpoint with.
    Raise CheckpointError as `read` does, or if the sizes of modules do not fit.
    """
    record = read(checkpoint.root)
    if not record.pooler and (pooler := checkpoint.evaluated_with):
        return record._replace(pooler=pooler, head=checkpoint.pooler if pooler == "cls" else None)
    if record.pooler in TWO_LAYER_POOLERS and not checkpoint.hf_config.get("output_hidden_states"):
        raise CheckpointError(
            f"{checkpoint.folder}: config.json: output_hidden_states is not true, so that "
            "sentence-transformers leaves out the module WeightedLayerPooling. Set it to true, or "
            "remove the module"
        )
    size = checkpoint.config.hidden_size * len(record.pooler.split("+"))
    for layer in record.sentence_head.layers:
        expected = layer.in_features or layer.dimension or size
        if expected != size:
            where = checkpoint.root / MODULES
            raise CheckpointError(
                f"{where}: a module {layer.kind} reads {expected} features, and gets {size}"
            )
        size = layer.out_features or size
    return record


def read(folder: Path) -> RecordedPooler:
    """Read what a folder records, only prompts if it has no Pooling module.

    Raises:
        CheckpointError: The record is malformed or not supported.
    """
    modules = read_modules(folder) if os.path.isfile(folder / MODULES) else []
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        return RecordedPooler(prompts=read_prompts(folder))
    place = kinds.index("Pooling")
    path = folder / SETTINGS
    settings = read_json_object(path) if path.is_file() else {}
    size = settings.get("truncate_dim")
    similarity = settings.get("similarity_fn_name") or "cosine"
    expect(size is None or is_count(size), path, "truncate_dim", size, "a whole number from 1")
    kind = settings.get("model_type") or _MODEL_TYPE
    expect(kind == _MODEL_TYPE, path, "model_type", kind, f"only {_MODEL_TYPE}")
    expect(
        similarity in [*SIMILARITIES],
        path,
        "similarity_fn_name",
        similarity,
        f"one of {', '.join(SIMILARITIES)}",
    )
    config = read_json_object(modules[place][1] / "config.json")
    prompts = read_prompts(folder)
    pooler = _pooler_of(config, modules[place][1])
    if place == 2:
        if pooler != "avg":
            raise CheckpointError(
                f"{folder / MODULES}: WeightedLayerPooling with {pooler} pooling is not supported"
            )
        pooler = _layer_pooler(modules[1][1])
    layers, params = _read_head(modules[place + 1 :])
    if pooler == "cls_before_pooler" and layers and layers == (_tanh_layer(layers[0].in_features),):
        head = prefixed(subset(params, "layers.0.linear"), "dense")
        return RecordedPooler(
            "cls", head, size, RecordedHead("cls", similarity=similarity), prompts
        )
    return RecordedPooler(
        pooler, None, size, RecordedHead(pooler, layers, params, similarity), prompts
    )


def _pooler_of(config: dict[str, Any], module: Path) -> str:
    """Return the pooler that the configuration of a Pooling module describes."""
    by_keys = [mode for mode in _MODES if config.get(f"pooling_mode_{_KEYS.get(mode, mode)}")]
    recorded_modes = config.get("pooling_mode", by_keys)
    modes = recorded_modes if isinstance(recorded_modes, list) else [recorded_modes]
    is_known = bool(modes) and all(mode in [*_MODES] for mode in modes)
    path = module / "config.json"
    expect(
        is_known, path, "the pooling mode", recorded_modes, f"one or more of {', '.join(_MODES)}"
    )
    if not config.get("include_prompt", True):
        raise CheckpointError(
            f"{path}: include_prompt is false: the model leaves prompts out of the pooling, which "
            "is not supported. Use sentence-transformers for this model. If you never use a "
            "prompt, set include_prompt to true: the embeddings are the same"
        )
    return "+".join(_MODES[mode] for mode in modes)


def _layer_pooler(module: Path) -> str:
    """Return the pooler that averages the layers of a WeightedLayerPooling module."""
    config = read_json_object(module / "config.json")
    blocks: Any = config.get("num_hidden_layers")
    if config.get("layer_start") == 0 and is_count(blocks):
        weights = _tensor(module, "layer_weights", (blocks + 1,))
        for pooler in TWO_LAYER_POOLERS:
            if np.array_equal(weights, _layer_weights(pooler, blocks)):
                return pooler
    raise CheckpointError(f"{module}: these layer weights are not supported")


def _read_head(modules: list[tuple[str, Path]]) -> tuple[tuple[HeadLayer, ...], Params]:
    """Read the modules after the pooling, and their parameters."""
    layers = tuple(_read_layer(*module) for module in modules)
    params = Params()
    for name, shape in shapes(partial(SentenceHead, layers)).items():
        _, index, ours = name.split(".", 2)
        tensor = _tensor(modules[int(index)][1], _theirs(ours), shape.shape[::-1])
        params[name] = np.ascontiguousarray(tensor.T, np.float32)
    return layers, params


def _read_layer(kind: str, module: Path) -> HeadLayer:
    """Read the configuration of a module after the pooling; a Normalize may have none."""
    path = module / "config.json"
    config = {} if kind == "Normalize" and not path.is_file() else read_json_object(path)
    layer = HeadLayer(kind, **{key: config[key] for key in HEAD_SETTINGS[kind] if key in config})
    if kind == "Dropout":  # not applied, so its rate does not matter
        return layer
    if kind == "Dense" and not layer.activation_function:
        layer = layer._replace(activation_function=_TANH)
    for key in HEAD_SETTINGS[kind]:
        value = getattr(layer, key)
        kind_of_value = type(HeadLayer._field_defaults[key])
        if kind_of_value is int:
            expect(is_count(value), path, key, value, "a whole number from 1")
        else:
            expect(
                isinstance(value, kind_of_value), path, key, value, f"a {kind_of_value.__name__}"
            )
    for key in ("module_input_name", "module_output_name"):
        expect(
            config.get(key) in (None, "sentence_embedding"),
            path,
            key,
            config.get(key),
            "only sentence_embedding",
        )
    expect(
        not config.get("use_residual"),
        path,
        "use_residual",
        config.get("use_residual"),
        "only False",
    )
    if kind == "Dense":
        library, _, activation = layer.activation_function.rpartition(".")
        is_known = library in TORCH_MODULES and activation in TORCH_ACTIVATIONS
        known = f"one of torch.nn: {', '.join(TORCH_ACTIVATIONS)}"
        expect(is_known, path, "activation_function", layer.activation_function, known)
    return layer


def _tensor(module: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = read_tensors(module).get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype.name not in FLOATS:
        raise CheckpointError(
            f"{module}: its weights have no floating-point tensor {name} of shape {shape}"
        )
    if not np.isfinite(tensor).all():
        raise CheckpointError(f"{module}: its tensor {name} holds values that are NaN or infinite")
    return np.array(tensor)


def with_pooler(record: RecordedPooler, explicit: str | None, source: str) -> RecordedPooler:
    """Return what a folder records, or an explicit pooler alone, without the modules after it.

    Args:
        record: What the folder records.
        explicit: A pooler, or what `RecordedHead.applied` returns for the folder, which stands for
            the whole folder. None or empty: the whole folder.
        source: The folder's name, for messages.

    Raises:
        CheckpointError: There is no pooler.
        ConfigError: The pooler is unknown, or its name has modules that the folder does not have.
    """
    head = record.sentence_head
    explicit = our_name(explicit)
    whole = head.applied(record.pooler) if record.pooler else ""
    if whole and explicit in (None, "", whole):
        return record
    if not explicit:
        raise CheckpointError(
            f"{source} does not record its pooler. Choose one of: {', '.join(POOLERS)}. Name it "
            "with --pooler (in Python: pooler='avg'). The authors of DiffCSE and of unsupervised "
            "SimCSE evaluate with cls_before_pooler, those of supervised SimCSE with cls"
        )
    if isinstance(explicit, str) and " + " in explicit:
        has = whole or "no recorded pooler"
        raise ConfigError(f"{source} does not apply {explicit!r}, but {has}")
    pooler = check_pooler(explicit)
    if record.pooler not in ("", pooler):
        warn_user(
            f"{source} was trained with the pooler {record.pooler!r} and is used with "
            f"{explicit!r}: scores can be far lower"
        )
    elif head.has_weights:
        warn_user(
            f"{source} was trained with {whole!r} and is used with {explicit!r} alone: scores can "
            "be far lower. Leave the pooler out to apply the whole folder"
        )
    return record._replace(pooler=pooler, sentence_head=NO_HEAD)


def checked_truncation(truncate_dim: int | None, size: int) -> int | None:
    """Return the number of dimensions to keep (None: all).

    Raise a ConfigError if the embedding has fewer.
    """
    if truncate_dim is not None and not (
        isinstance(truncate_dim, int | np.integer) and 1 <= truncate_dim <= size
    ):
        raise ConfigError(
            f"truncate_dim={truncate_dim!r}: the embedding size is {size}. Keep 1 to {size}"
        )
    return truncate_dim
