"""Hugging Face checkpoints: read and write them. One table of names serves both directions.

A family's module in `families/` lists the checkpoint's name of every module and ours. Reading
follows the table from left to right, writing from right to left. Dense kernels are transposed on
the way, because PyTorch stores (out, in). One error names all missing, unknown and misshapen
tensors of a checkpoint, and those with NaN. Code in a checkpoint never runs.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from diffcse_jax.errors import CheckpointError
from diffcse_jax.hosts import log_line, quiet_transformers
from diffcse_jax.io import read_sealed
from diffcse_jax.models import files, layers, routes
from diffcse_jax.models.families import (
    Family,
    Modules,
    Stated,
    bert,
    distilbert,
    electra,
    gte,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
)
from diffcse_jax.models.files import FLOATS
from diffcse_jax.models.foreign_text import read_card, stated_languages
from diffcse_jax.models.heads import (
    NO_HEAD,
    SENTENCE_HEAD,
    MaskedLMHead,
    MlpProjector,
    RecordedHead,
    ReplacedTokenHead,
)
from diffcse_jax.models.layers import ACTIVATIONS, Params
from diffcse_jax.models.transformer import Transformer, TransformerConfig

FAMILIES: dict[str, Family] = {  # by the `model_type` in a checkpoint's `config.json`
    "bert": bert.BERT,
    "camembert": roberta.ROBERTA,
    "distilbert": distilbert.DISTILBERT,
    "electra": electra.ELECTRA,
    "gte": gte.GTE,
    "modernbert": modernbert.MODERNBERT,
    "mpnet": mpnet.MPNET,
    "nomic_bert": nomic_bert.NOMIC_BERT,
    "roberta": roberta.ROBERTA,
    "xlm-roberta": roberta.ROBERTA,
}
# What turns a configuration of other code into that of transformers, by its `model_type`.
CONVERTED = {"gte": gte.as_gte, "new": gte.as_gte, "nomic_bert": nomic_bert.as_nomic_bert}
# What transformers turns into `rope_parameters`.
_OTHER_ROTARY_KEYS = re.compile("^(?!rope_parameters$).*(rope|rotary)")
MOST_BLOCKS = 256
LARGEST_SIZE = 10**7
MOST_PROBLEMS = 50  # the largest number that an error lists

_PARTS = {
    "transformer": Transformer,
    "pooler": MlpProjector,
    "mlm_head": MaskedLMHead,
    "discriminator_head": ReplacedTokenHead,
}
# The parameter that shows that a part is there, if other heads share the names of the others.
_TELLING_TENSOR = {"mlm_head": "bias"}
_ADAPTERS = (".lora_A.", ".base_layer.")  # in names of tensors that peft has not merged
Tensors = Mapping[str, np.ndarray]  # by the names in a checkpoint
_TRAINING_PARTS = ("mlp", "lm_head", "aux_bert", "electra_head", "generator")  # besides the encoder
_BATCHNORM_PROJECTOR = "mlp.net."  # DiffCSE's
_DENSE_PROJECTOR = "mlp.dense."  # SimCSE's
# The last part of a published checkpoint's name, and the pooler that its authors evaluate it with.
_EVALUATED_WITH = {
    r"unsup-simcse-(bert|roberta)-(base|large)(-uncased)?": "cls_before_pooler",
    r"sup-simcse-(bert|roberta)-(base|large)(-uncased)?": "cls",
    r"diffcse-(bert|roberta)-base(-uncased)?-(sts|trans)": "cls_before_pooler",
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint in memory: NumPy arrays under our flat parameter names."""

    folder: Path  # of the transformer: its configuration, weights and tokenizer
    hf_config: Mapping[str, Any]
    config: TransformerConfig
    transformer: Params
    pooler: Params | None = None
    mlm_head: Params | None = None
    discriminator_head: Params | None = None
    # The pooler that the authors of a published checkpoint evaluate it with.
    evaluated_with: str = ""
    sentence_head: RecordedHead = NO_HEAD  # what the folder records to follow its pooler
    inside: Path | None = None  # the folder with `modules.json`, if `folder` is inside it
    languages: tuple[str, ...] = ()  # codes that its card states

    @property
    def root(self) -> Path:
        """The folder that the user has named, with `modules.json` and README, if there are any."""
        return self.inside or self.folder

    def embedding_size(self, pooler: str) -> int:
        """Return the size of the embeddings by a pooler.

        If the pooler is the recorded one, the recorded head decides.
        """
        return self.sentence_head.embedding_size(pooler, self.config.hidden_size)

    def on(self, device: jax.Device, devices: int = 1) -> "Pretrained":
        """Return the same checkpoint, computed in the best way for a kind of device."""
        return dataclasses.replace(self, config=self.config.on(device, devices))

    def like(self, other: "Pretrained") -> "Pretrained":
        """Return the same checkpoint, computed on the devices of another one."""
        same = {name: getattr(other.config, name) for name in ("lanes", "devices", "fused")}
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **same))

    def digest(self) -> str:
        """Return the SHA-256 of all arrays: names, shapes, types and bytes."""
        digest = hashlib.sha256()
        parts = {part: getattr(self, part) for part in _PARTS} | {
            SENTENCE_HEAD: self.sentence_head.params
        }
        for part, params in parts.items():
            for name, array in sorted((params or {}).items()):
                digest.update(f"{part}.{name} {array.shape} {array.dtype}\n".encode())
                digest.update(np.asarray(array).tobytes())
        return digest.hexdigest()


class Encoders(NamedTuple):
    """The encoder of a model, or its two encoders."""

    documents: Pretrained
    queries: Pretrained | None = None  # None: the same


def read(name_or_path: str, *, needs_mlm_head: bool = False) -> Pretrained:
    """Read a checkpoint from a local folder or the hub, as `files.find_folder` finds it.

    A note names the heads of other tasks that the checkpoint has and that nothing reads.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or not supported, its tensors do not
            fit, or it has two encoders.
    """
    root = files.find_folder(name_or_path)
    routes.require_single(root)
    return _read(root, name_or_path, needs_mlm_head=needs_mlm_head)


def read_encoders(name_or_path: str) -> Encoders:
    """Read a checkpoint that may have two encoders. All else is as in `read`."""
    root = files.find_folder(name_or_path)
    folders = routes.find_routes(root)
    if folders is None:
        return Encoders(_read(root, name_or_path))
    _check_export(root)
    by_task = {task: _read(folder, str(folder)) for task, folder in folders.items()}
    return Encoders(by_task[routes.DOCUMENT], by_task[routes.QUERY])


def _check_export(root: Path) -> None:
    """Compare the files of an exported folder with their checksums."""
    if (check := root / files.EXPORT_CHECK).is_file():
        read_sealed(
            check,
            "Export the folder again. If you changed the file on purpose, remove "
            f"{files.EXPORT_CHECK}",
        )


def _read(root: Path, name_or_path: str, *, needs_mlm_head: bool = False) -> Pretrained:
    """Read the checkpoint of a folder, which messages call by its name."""
    _check_export(root)
    folder = files.transformer_folder(root)
    hf_config = read_hf_config(folder)
    config = transformer_config(hf_config, source=str(folder))
    family = FAMILIES[config.family]
    stored = _unwrapped(files.read_tensors(folder), family, name_or_path)
    evaluated_with = published_pooler(name_or_path, stored)
    if any(
        name.startswith((_BATCHNORM_PROJECTOR, _DENSE_PROJECTOR, "aux_bert.")) for name in stored
    ):
        stored = _encoding_part(stored, family, name_or_path)
    tensors = {_normalised(name, family): tensor for name, tensor in stored.items()}
    # Of two tied tensors, some programs keep the decoder's name.
    if family.decoder in tensors:
        (words,) = (theirs for theirs, ours in family.modules.items() if ours == "embeddings.word")
        tensors.setdefault(f"{words}.weight", tensors[family.decoder])
    parts, problems, unknown = _read_parts(tensors, config)
    problem = _problem_of_head(parts, tensors, family)
    if problem and needs_mlm_head:
        problems.append(problem)
    elif problem and parts.pop("mlm_head", None):
        log_line(f"notice: the masked-LM head of {name_or_path} is not used. {problem}")
    inside = {_normalised(name, family) for name in stored if _is_of_encoder(name, family)}
    if problems or unknown & inside:
        problems += [f"unknown: {name}" for name in sorted(unknown)]
        more = (
            [f"and {len(problems) - MOST_PROBLEMS:,} more"] if len(problems) > MOST_PROBLEMS else []
        )
        listed = "\n  ".join(problems[:MOST_PROBLEMS] + more)
        raise CheckpointError(
            f"{name_or_path} does not hold a {config.family} encoder as expected:\n  {listed}"
        )
    if unknown:
        heads = sorted({name.partition(".")[0] for name in unknown})
        names = hf_config.get("architectures")
        saved_as = names[0] if isinstance(names, list) and names else "a model with a head"
        log_line(
            f"notice: {name_or_path} was saved as {saved_as}. Reading its encoder; its head is not "
            f"used: {', '.join(heads)}"
        )
    languages = stated_languages(read_card(root))
    checkpoint = Pretrained(
        folder, hf_config, config, evaluated_with=evaluated_with, languages=languages, **parts
    )
    return checkpoint if folder == root else dataclasses.replace(checkpoint, inside=root)


def _read_parts(
    tensors: Tensors, config: TransformerConfig
) -> tuple[dict[str, Any], list[str], set[str]]:
    """Return our parameters of each part, problems of tensors, and the names of other tensors."""
    family = FAMILIES[config.family]
    parts: dict[str, Any] = {}
    problems: list[str] = []
    unknown = {name for name in tensors if not re.fullmatch(family.ignored, name)}
    for part in _PARTS:
        if part != "transformer" and not _may_hold(tensors, getattr(family, part)):
            continue
        expected = _tensors_of(part, config)
        telling = _TELLING_TENSOR.get(part)
        shown = {
            name for name, ours in expected.items() if telling is None or ours.names == (telling,)
        }
        if part != "transformer" and tensors.keys().isdisjoint(shown):
            continue
        unknown -= expected.keys()
        parts[part] = {}
        for hf_name, ours in expected.items():
            array = tensors.get(hf_name)
            if problem := _problem(hf_name, array, ours.shape):
                problems.append(problem)
                continue
            assert array is not None
            for name, each in zip(ours.names, np.split(array, len(ours.names)), strict=True):
                parts[part][name] = np.array(
                    each.T if ours.transposed else each, np.float32, order="C"
                )
    return parts, problems, unknown


def _may_hold(tensors: Tensors, modules: Modules) -> bool:
    """Return whether a tensor has the name of a module. Only then its network is sketched."""
    begins = tuple(f"{theirs}." for theirs in modules)
    return any(name.startswith(begins) for name in tensors)


def _problem(name: str, array: np.ndarray | None, shape: tuple[int, ...]) -> str:
    """Return what is wrong with a tensor; empty if nothing is."""
    if array is None:
        return f"missing: {name}"
    if array.shape != shape:
        return f"wrong shape: {name} is {array.shape}, config.json says {shape}"
    if array.dtype.name not in FLOATS:
        return f"unsupported: {name} holds {array.dtype}. Quantised weights cannot be read"
    if not np.isfinite(array).all():
        return f"not finite: {name} holds values that are NaN or infinite"
    return ""


def _problem_of_head(parts: Mapping[str, Any], tensors: Tensors, family: Family) -> str:
    """Return why a checkpoint cannot fill masks: no head, or a decoder that is not tied."""
    if "mlm_head" not in parts:
        return "missing: the masked-LM head (leave generator.name_or_path empty to train one)"
    words = parts["transformer"].get("embeddings.word.embedding")
    decoder = tensors.get(family.decoder)
    both = words is not None and decoder is not None
    if both and not np.array_equal(np.asarray(decoder, np.float32), words):
        return f"unsupported: {family.decoder} is not the word-embedding table"
    return ""


def to_hf(params: Mapping[str, Any], part: str, config: TransformerConfig) -> dict[str, np.ndarray]:
    """Return the parameters of a part (a name in `_PARTS`) as a checkpoint stores them."""
    tensors = {}
    for hf_name, ours in _tensors_of(part, config).items():
        arrays = [np.asarray(params[name]) for name in ours.names]
        theirs = [array.T if ours.transposed else array for array in arrays]
        tensors[hf_name] = np.ascontiguousarray(
            theirs[0] if len(theirs) == 1 else np.concatenate(theirs)
        )
    return tensors


def architecture(config: TransformerConfig, *, has_mlm_head: bool) -> str:
    """Return transformers' class name for an encoder, with or without a masked-LM head."""
    import transformers

    kind = "ForMaskedLM" if has_mlm_head else "Model"
    return transformers.CONFIG_MAPPING[config.family].__name__.replace("Config", kind)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read the folder's `config.json` as transformers writes it, or raise CheckpointError."""
    config = files.read_model_config(folder)
    try:
        return CONVERTED.get(str(config.get("model_type")), dict)(config)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: config.json is invalid: {error!r}") from error


def transformer_config(hf_config: Mapping[str, Any], *, source: str) -> TransformerConfig:
    """Return the sizes and dropout rates in a checkpoint's `config.json`.

    If they are not supported, raise a CheckpointError that names `source`.
    """
    if "model_type" not in hf_config:
        known = ", ".join(sorted(FAMILIES))
        missing = f"{source}: config.json has no `model_type`"
        raise CheckpointError(f"{missing}. Add the encoder's, one of: {known}")
    model_type = hf_config["model_type"]
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"{source}: architecture {model_type!r} is not supported; supported: {supported}"
        )
    family = FAMILIES[model_type]
    try:
        for key, required in family.supported.items():
            _expect(hf_config.get(key) in (required, None), key, repr(required), hf_config.get(key))
        for key in ("num_hidden_layers", "n_layers"):  # transformers makes a list of them
            value = hf_config.get(key, 1)
            is_count = type(value) is int and 1 <= value <= MOST_BLOCKS
            _expect(is_count, key, f"a whole number from 1 to {MOST_BLOCKS}", value)
        return _stated_sizes(hf_config, family) or _checked_sizes(_completed(hf_config), family)
    except Exception as error:  # transformers raises errors of many types
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{source}: config.json: {reason}") from error


def _stated_sizes(hf_config: Mapping[str, Any], family: Family) -> TransformerConfig | None:
    """Return the sizes if `config.json` states all of them as transformers writes them.

    Otherwise return None: transformers has the defaults, and names what is wrong. It takes seconds
    to import.
    """
    if any(_OTHER_ROTARY_KEYS.search(key) for key in hf_config):
        return None
    with contextlib.suppress(Exception):
        return _checked_sizes(SimpleNamespace(**hf_config), family)
    return None


def _completed(hf_config: Mapping[str, Any]) -> Stated:
    """Return the configuration as transformers reads it."""
    import transformers

    model_type = hf_config["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} does not know the model_type "
            f"{model_type!r}. Install a release that does. If none does, convert config.json "
            "to a model_type that transformers knows: add a function to CONVERTED in "
            "diffcse_jax/models/hf.py (docs/extending.md)"
        )
    with quiet_transformers():
        return transformers.CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(hf_config)))


def _checked_sizes(stated: Stated, family: Family) -> TransformerConfig:
    """Return the sizes, or raise an error that names what is not supported."""
    pad_token_id = stated.pad_token_id
    _expect(type(pad_token_id) is int, "pad_token_id", "a whole number", pad_token_id)
    config = family.sizes(stated)
    _check(config)
    return config


def _check(config: TransformerConfig) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "num_heads",
        "intermediate_size",
        "max_positions",
        "word_size",
    ):
        value = getattr(config, name)
        is_size = type(value) is int and 1 <= value <= LARGEST_SIZE
        _expect(is_size, name, f"from 1 to {LARGEST_SIZE:,}", value)
    _expect(config.type_vocab_size >= 0, "type_vocab_size", "at least 0", config.type_vocab_size)
    _expect(config.norm_epsilon > 0, "layer_norm_eps or norm_eps", "above 0", config.norm_epsilon)
    for base in config.rotary_bases:
        _expect(base > 0, "rope_theta", "above 0", base)
    _expect(
        config.rotary_factor > 0, "the factor of rope_parameters", "above 0", config.rotary_factor
    )
    for rate in (config.embedding_dropout, *config.hidden_dropout, *config.attention_dropout):
        _expect(0 <= rate < 1, "dropout rates", "from 0 to below 1", rate)
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"{config.num_heads} attention heads cannot share a hidden size of {config.hidden_size}"
        )
    if config.rotary_bases and config.hidden_size // config.num_heads % 2:
        raise ValueError(
            f"heads of {config.hidden_size // config.num_heads} features cannot have rotary "
            "positions"
        )
    if config.max_length < 1:
        numbered = f"positions are numbered from pad_token_id + 1 = {config.position_offset}"
        raise ValueError(f"max_position_embeddings is {config.max_positions}, but {numbered}")
    last = config.vocab_size - 1
    _expect(
        0 <= config.pad_token_id <= last,
        "pad_token_id",
        f"a token id up to {last}",
        config.pad_token_id,
    )
    for activation in (config.activation, config.mlm_activation or config.activation):
        _expect(
            activation in ACTIVATIONS, "activation", f"one of {', '.join(ACTIVATIONS)}", activation
        )


def _expect(is_valid: bool, key: str, expected: str, value: Any) -> None:
    if not is_valid:
        raise ValueError(f"{key} must be {expected}, not {value!r:.60}")


def published_pooler(name_or_path: str, tensor_names: Iterable[str]) -> str:
    """Return the pooler that a checkpoint's authors evaluate it with, or "" if nothing shows it."""
    if any(name.startswith(_BATCHNORM_PROJECTOR) for name in tensor_names):
        return "cls_before_pooler"
    name = name_or_path.partition("@")[0].rstrip("/").rpartition("/")[2]
    return next(
        (pooler for pattern, pooler in _EVALUATED_WITH.items() if re.fullmatch(pattern, name)), ""
    )


class _Tensor(NamedTuple):
    names: tuple[str, ...]  # ours, which are stacked along the first axis in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    transposed: bool


@functools.lru_cache
def _tensors_of(part: str, config: TransformerConfig) -> dict[str, _Tensor]:
    """Return the arrays of a part by the checkpoint's names, without prefix.

    If the family has no such part, there are none.
    """
    family = FAMILIES[config.family]
    modules_of_part = family.modules if part == "transformer" else getattr(family, part)
    table = {theirs: ours.split("+") for theirs, ours in modules_of_part.items()}
    if part == "transformer":
        for index in range(config.num_blocks):
            for theirs, ours in family.block.items():
                modules = [f"blocks.{index}.{module}" for module in ours.split("+")]
                table[f"{family.block_prefix}{index}.{theirs}"] = modules
    shapes = {
        name: array.shape
        for name, array in layers.shapes(functools.partial(_PARTS[part], config)).items()
    }
    unnamed = {*shapes}
    tensors = {}
    for theirs, modules in table.items():
        for leaf in ("kernel", "embedding", "scale", "bias"):
            names = tuple(f"{module}.{leaf}".removeprefix(".") for module in modules)
            if names[0] not in shapes:
                continue
            transposed = leaf == "kernel"
            first, *others = shapes[names[0]][::-1] if transposed else shapes[names[0]]
            hf_leaf = "bias" if leaf == "bias" else "weight"
            tensors[f"{theirs}.{hf_leaf}"] = _Tensor(
                names, (first * len(names), *others), transposed
            )
            unnamed.difference_update(names)
    assert not table or not unnamed, (
        f"{config.family}: the tables have no names for {', '.join(unnamed)}"
    )
    return tensors


def _unwrapped(tensors: Tensors, family: Family, source: str) -> Tensors:
    """Return the tensors by the names that they have outside a wrapper.

    Training code often saves the state of a module that contains the model, such as `module.` of
    DistributedDataParallel, so that all names begin with the model's name in that module.
    """
    if any(part in name for name in tensors for part in _ADAPTERS):
        raise CheckpointError(
            f"{source} holds the weights of a model and of its adapters, which are not merged. "
            "Call `merge_and_unload` of the model in peft, and save the result"
        )
    words = f"{next(iter(family.modules))}.weight"
    starts = {name.removesuffix(words) for name in tensors if f".{name}".endswith(f".{words}")}
    if not starts or starts & {"", family.prefix, family.other_prefix}:
        return tensors
    outer = min((start.removesuffix(family.prefix) for start in starts), key=len)
    if not all(start.startswith(outer) for start in starts):
        raise CheckpointError(
            f"{source} holds several encoders: {', '.join(sorted(starts))}. Save the one to use as "
            "a model of its own, with its `save_pretrained`"
        )
    return {name.removeprefix(outer): tensor for name, tensor in tensors.items()}


def _is_of_encoder(name: str, family: Family) -> bool:
    """Return whether a tensor is a part of the encoder by its name, and not of a head beside it."""
    inside = name.removeprefix(family.prefix).removeprefix(family.other_prefix)
    first = inside.partition(".")[0]
    if first == "pooler" and not family.pooler:  # a classifier's
        return False
    first_names = {each.partition(".")[0] for each in (*family.modules, family.block_prefix)}
    return inside != name or first in first_names or first == "pooler"


def _normalised(name: str, family: Family) -> str:
    """Return the name of a tensor without the encoder's prefix.

    Norms whose arrays have TensorFlow's names get the usual ones.
    """
    name = name.removeprefix(family.prefix).removeprefix(family.other_prefix)
    return re.sub(
        r"LayerNorm\.beta$",
        "LayerNorm.bias",
        re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name),
    )


def _encoding_part(
    tensors: Mapping[str, np.ndarray], family: Family, name_or_path: str
) -> dict[str, np.ndarray]:
    """Return the tensors that encoding needs of what the authors' training code saves.

    Log what is left out. The code of SimCSE, SimCSE++ and DiffCSE saves all that it trains as one
    model: the encoder, the projector (`mlp`) and, for DiffCSE, the discriminator and the generator.
    A projector of one dense layer is Hugging Face's pooler.
    """
    kept: dict[str, np.ndarray] = {}
    left_out = set()
    for name, tensor in tensors.items():
        part = name.partition(".")[0]
        if name.startswith(_DENSE_PROJECTOR) and family.pooler:
            kept[name.replace("mlp.dense", next(iter(family.pooler)))] = tensor
        elif part in _TRAINING_PARTS and not name.startswith(tuple(family.mlm_head)):
            left_out.add(part)
        else:
            kept[name] = tensor
    log_line(
        f"notice: {name_or_path} was saved by the training code of SimCSE or DiffCSE. "
        f"Reading its encoder; left out: {', '.join(sorted(left_out)) or 'nothing'}"
    )
    return kept
