"""How a folder's transformer reads text: the length that texts are cut to, and their case.

sentence-transformers records this in `sentence_bert_config.json` and, since release 6, the length
in `tokenizer_config.json`. Settings that would change embeddings and are not supported raise an
error. `tests/test_reading_settings.py` lists every setting.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import read_json_object, write_json
from diffcse_jax.models.files import expect, is_count

TEXT_SETTINGS = "sentence_bert_config.json"
# Until 2020, its name had one of these kinds in place of `bert`.
_OTHER_KINDS = ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TOKENIZER_CONFIG = "tokenizer_config.json"
SHORTEST = 3  # tokens: the special tokens of most tokenizers, and one more

Supported = Mapping[str, tuple[Any, ...] | None]  # values by setting; None stands for any value
_OF_MODULE: Supported = {
    "max_seq_length": None,
    "do_lower_case": (True, False),
    "processing_kwargs": None,
    "unpad_inputs": None,
    "backend": None,
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "modality_config": (
        {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    ),
    "query_length": (),
    "document_length": (),
    "query_expansion": (),
    "tokenizer_name_or_path": (),
    "model_args": ({},),
    "model_kwargs": ({},),
    "tokenizer_args": ({},),
    "processor_kwargs": ({},),
    "config_args": ({},),
    "config_kwargs": ({},),
}
_KINDS_OF_INPUT: Supported = dict.fromkeys(
    ("text", "common", "audio", "image", "video", "chat_template")
)
# Arguments of a tokenizer's call. Padding is masked, so that it changes nothing.
_OF_CALL: Supported = {
    "max_length": None,
    "padding": None,
    "pad_to_multiple_of": None,
    "stride": None,
    "verbose": None,
    "logits_to_keep": None,
    "return_token_type_ids": None,
    "padding_side": ("right",),
    "truncation": (True, "longest_first", "only_first"),
    "add_special_tokens": (True,),
    "is_split_into_words": (False,),
    "split_special_tokens": (False,),
    "return_tensors": ("pt",),
    "return_attention_mask": (True,),
    "return_overflowing_tokens": (False,),
    "return_special_tokens_mask": (False,),
    "return_offsets_mapping": (False,),
    "return_length": (False,),
}


class TextSettings(NamedTuple):
    """What a folder records of how its transformer reads text."""

    max_length: int | None = None  # tokens that texts are cut to, special tokens included
    lower_case: bool = False  # whether texts are put into lower case first

    def write(self, folder: Path) -> None:
        """Write the settings as all releases of sentence-transformers read them."""
        settings = {"max_seq_length": self.max_length, "do_lower_case": self.lower_case}
        write_json(folder / TEXT_SETTINGS, settings)


def text_settings(folder: Path) -> TextSettings:
    """Read how a folder's transformer reads text.

    Raises:
        CheckpointError: A setting is not supported.
    """
    names = (TEXT_SETTINGS, *(f"sentence_{kind}_config.json" for kind in _OTHER_KINDS))
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    recorded = read_json_object(path) if path else {}
    length = None
    if path:
        _check(recorded, _OF_MODULE, path)
        length = _length_of_call(recorded.get("processing_kwargs") or {}, path)
        length = length or _length(recorded, "max_seq_length", path)
    of_tokenizer = folder / _TOKENIZER_CONFIG
    if length is None and of_tokenizer.is_file():
        settings = read_json_object(of_tokenizer)
        value = settings.get("model_max_length", settings.get("max_len"))
        length = value if is_count(value, SHORTEST) else None  # often 1e30
    return TextSettings(length, recorded.get("do_lower_case") is True)


def _length_of_call(by_kind: Any, path: Path) -> int | None:
    """Return the length that the arguments of the tokenizer's call name."""
    expect(isinstance(by_kind, dict), path, "processing_kwargs", by_kind, "an object")
    _check(by_kind, _KINDS_OF_INPUT, path, "processing_kwargs.")
    length = None
    for kind in ("text", "common"):  # the second one wins
        name = f"processing_kwargs.{kind}"
        arguments = by_kind.get(kind) or {}
        expect(isinstance(arguments, dict), path, name, arguments, "an object")
        _check(arguments, _OF_CALL, path, f"{name}.")
        length = _length(arguments, "max_length", path, f"{name}.") or length
    return length


def _length(settings: Mapping[str, Any], key: str, path: Path, prefix: str = "") -> int | None:
    value = settings.get(key)
    is_length = value is None or is_count(value, SHORTEST)
    expect(is_length, path, f"{prefix}{key}", value, f"a whole number from {SHORTEST}")
    return value


def _check(settings: Mapping[str, Any], supported: Supported, path: Path, prefix: str = "") -> None:
    """Raise `CheckpointError` for a setting that is unknown or has an unsupported value."""
    for key, value in settings.items():
        values = supported.get(key, ())
        if value is not None and values is not None and value not in values:
            raise CheckpointError(
                f"{path}: {prefix}{key} is {str(value)[:60]!r}, which is not supported: the "
                "embeddings would not be those of sentence-transformers. Use sentence-transformers "
                "for this model, or remove the setting if the model was trained without it"
            )


def max_length_of(folder: Path, positions: int, trained: int = 0) -> int:
    """Return the number of tokens that texts are cut to, at most `positions`.

    It is the recorded length, or the length in training (`trained`) if that is larger. Without a
    record, it is `positions`.
    """
    return min(max(text_settings(folder).max_length or positions, trained), positions)
