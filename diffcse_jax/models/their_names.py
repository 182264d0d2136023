"""Names of sentence-transformers that `SentenceEncoder` does not have, and what to use instead.

docs/from_sentence_transformers.md lists them. Arguments have the value that changes nothing here,
which is accepted, and advice for all others.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from diffcse_jax.errors import ConfigError

Arguments = Mapping[str, tuple[Any, str]]

_DEVICES = "JAX chooses the devices. Set JAX_PLATFORMS, such as cpu, before the program starts"
_PROCESSES = "processes are not needed: one call of encode uses all devices"
_DTYPE = "name the precision in from_pretrained(..., dtype='bfloat16')"
_SAVE = "the folder that was loaded is the model: copy it. `diffcse export` writes that of a run"
_UPLOAD = "upload the model's folder with `hf upload USER/NAME FOLDER`"
_TRAIN = "train with diffcse_jax.train(texts) or `diffcse train`"
_ADAPTERS = "merge adapters into the model with peft, and load the folder that this writes"
_PARAMETERS = "the parameters are in `params`, a flat dict of arrays"

OF_ENCODE: Arguments = {
    "convert_to_numpy": (
        True,
        "embeddings are NumPy arrays. For a list of them, call list() on the result",
    ),
    "convert_to_tensor": (
        False,
        "embeddings are NumPy arrays. Call torch.from_numpy() on the result",
    ),
    "output_value": ("sentence_embedding", "only embeddings of sentences are returned"),
    "precision": (
        "float32",
        "embeddings are float32. For int8 or bits, give build_index a `storage`",
    ),
    "device": (None, _DEVICES),
    "truncate_dim": (None, "name it in from_pretrained"),
    "chunk_size": (None, _PROCESSES),
    "pool": (None, _PROCESSES),
}
OF_LOADING: Arguments = {
    "device": (None, _DEVICES),
    "trust_remote_code": (False, "code in a folder never runs"),
    "revision": (None, "name it after the id of the hub: from_pretrained('NAME@REVISION')"),
    "cache_folder": (None, "set HF_HOME before the program starts"),
    "local_files_only": (False, "set HF_HUB_OFFLINE=1 before the program starts"),
    "token": (None, "set HF_TOKEN, or log in with `hf auth login`"),
    "use_auth_token": (None, "set HF_TOKEN, or log in with `hf auth login`"),
    "model_kwargs": (None, _DTYPE),
    "processor_kwargs": (None, "the tokenizer is that of the folder. Set max_length to read less"),
    "tokenizer_kwargs": (None, "the tokenizer is that of the folder. Set max_length to read less"),
    "config_kwargs": (None, "change config.json in the folder"),
    "modules": (None, "modules are those of the folder"),
    "similarity_fn_name": (None, "it is that of config_sentence_transformers.json in the folder"),
    "model_card_data": (None, "`diffcse export` writes the model card"),
}
ATTRIBUTES: Mapping[str, str] = {
    "save": _SAVE,
    "save_pretrained": _SAVE,
    "push_to_hub": _UPLOAD,
    "save_to_hub": _UPLOAD,
    "to": _DEVICES,
    "cpu": _DEVICES,
    "cuda": _DEVICES,
    "device": f"jax.devices() lists them. {_DEVICES}",
    "clear_placement_cache": _DEVICES,
    "half": _DTYPE,
    "bfloat16": _DTYPE,
    "float": _DTYPE,
    "start_multi_process_pool": _PROCESSES,
    "stop_multi_process_pool": _PROCESSES,
    "encode_multi_process": _PROCESSES,
    "fit": _TRAIN,
    "old_fit": _TRAIN,
    "train": _TRAIN,
    "eval": "encoding never applies dropout. Leave the call out",
    "smart_batching_collate": _TRAIN,
    "gradient_checkpointing_enable": f"{_TRAIN}, with train.recompute",
    "evaluate": "use `diffcse evaluate`",
    "get_max_seq_length": "read `max_length`",
    "default_prompt_name": "name it in from_pretrained, and read `prompts.default_name`",
    "set_pooling_include_prompt": "prompts are always part of the embedding",
    "similarity_fn_name": "read `sentence_head.similarity`",
    "truncate_embeddings": "name truncate_dim in from_pretrained",
    "truncate_sentence_embeddings": "name truncate_dim in from_pretrained",
    "tokenize": "call `tokenizer`",
    "preprocess": "call `tokenizer`",
    "processor": "use `tokenizer`",
    "get_sentence_features": "call `tokenizer`",
    "transformers_model": "hf.read(name) returns the transformer's configuration and parameters",
    "modules": "`pooler` names them, and the folder's modules.json lists them",
    "parameters": _PARAMETERS,
    "named_parameters": _PARAMETERS,
    "state_dict": _PARAMETERS,
    "load_state_dict": "from_pretrained(FOLDER) loads weights",
    "load": "from_pretrained(FOLDER) loads a model",
    "get_backend": "JAX computes embeddings",
    "get_model_kwargs": "encode has no further arguments",
    "is_singular_input": "a string is one text, and any other iterable is many",
    "modalities": "only text is read",
    "supports": "only text is read",
    "merge": "train with eval.interpolate, which averages weights",
    **dict.fromkeys(
        (
            *("active_adapter", "active_adapters", "add_adapter", "delete_adapter"),
            *("disable_adapters", "enable_adapters", "get_adapter_state_dict", "load_adapter"),
            *("set_adapter", "check_peft_compatible_model", "has_peft_compatible_model"),
        ),
        _ADAPTERS,
    ),
    **dict.fromkeys(("append", "extend", "insert", "pop"), "modules are those of the folder"),
}


P = ParamSpec("P")
R = TypeVar("R")


def also_named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a method take arguments also by the names that sentence-transformers has for them.

    Args:
        **names: Our name by theirs.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        call: Callable[..., R] = method

        @functools.wraps(method)
        def renamed(*arguments: P.args, **options: P.kwargs) -> R:
            ours: dict[str, Any] = {}
            for name, value in options.items():
                if (name := names.get(name, name)) in ours:
                    raise ConfigError(f"{name} is given twice")
                ours[name] = value
            return call(*arguments, **ours)

        return renamed

    return decorate


def check_arguments(function: str, arguments: Mapping[str, Any], known: Arguments) -> None:
    """Raise an error for arguments that a function does not have.

    Arguments of sentence-transformers are accepted if their value has no effect there either.

    Raises:
        ConfigError: The argument is one of sentence-transformers, and its value has no meaning
            here.
        TypeError: It is unknown.
    """
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        usual, instead = known[name]
        if value != usual and not (usual is None and value == {}):  # no options are given
            raise ConfigError(f"{name}={value!r}: {instead}")
