"""Tokenizers of Hugging Face folders that the library tokenizers reads as transformers does.

transformers takes seconds to import. Its classes build a tokenizer from the vocabulary in
`tokenizer.json` and the settings in `tokenizer_config.json`. Often `tokenizer.json` holds just what
they would build; then it is read as it stands.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_BERT_TOKENS = {name: f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_ROBERTA_TOKENS = dict(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>")
_ROBERTA_TOKENS |= {"mask": "<mask>"}
_LISTS = ("extra_special_tokens", "additional_special_tokens")
# What else could change a tokenizer.
_NEEDS_TRANSFORMERS = ("auto_map", "fast_tokenizer_files", "init_inputs")


class Settings(NamedTuple):
    """What the files beside `tokenizer.json` say.

    Attributes:
        values: The entries of `tokenizer_config.json`, and of `special_tokens_map.json` if
            transformers reads it.
        tokens: The special tokens by their names, such as `cls`.
        input_names: What the tokenizer gives to a network.
        truncation_side: `left` or `right`, the side that is cut.
    """

    values: Mapping[str, Any]
    tokens: Mapping[str, str]
    input_names: Sequence[str]
    truncation_side: str


class _Parts(NamedTuple):
    """A tokenizer without its vocabulary, as a class of transformers builds it."""

    is_model: bool  # whether the tokenizer's model is the one of the class
    normalizer: Any
    pre_tokenizer: Any
    post_processor: Any
    decoder: Any


class _Kind(NamedTuple):
    """A class of transformers: the special tokens that it has by default, and what it builds."""

    tokens: Mapping[str, str]
    parts: Callable[[Tokenizer, Settings], _Parts]
    input_names: tuple[str, ...] = ("input_ids", "attention_mask")


def read_as_it_stands(folder: Path) -> tuple[Tokenizer, Settings] | None:
    """Return the tokenizer and settings of a folder, or None if transformers has to read it."""
    with contextlib.suppress(Exception):  # transformers names what is wrong
        values = _values(folder)
        kind = _KINDS.get(values["tokenizer_class"].removesuffix("Fast"))
        if kind and not any(values.get(key) for key in _NEEDS_TRANSFORMERS):
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
            settings = Settings(
                values,
                {**kind.tokens, **_named_tokens(values)},
                values.get("model_input_names", kind.input_names),
                values.get("truncation_side", (backend.truncation or {}).get("direction", "right")),
            )
            if _adds_nothing(backend, settings) and _is_as_built(backend, kind, settings):
                return backend, settings
    return None


def _values(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder. Raise an error if it has files of older releases."""
    values = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in values:
        return values
    if os.path.exists(folder / "added_tokens.json"):
        raise ValueError("transformers adds these tokens")
    path = folder / "special_tokens_map.json"
    return values | (_read(path) if os.path.exists(path) else {})


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _named_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the settings name. Raise an error for other values."""
    named = {key: value for key, value in values.items() if key.endswith("_token")}
    return {
        key.removesuffix("_token"): _text(value)
        for key, value in named.items()
        if not isinstance(value, bool)  # such as `add_bos_token`
    }


def _text(token: Any) -> str:
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{token!r} is not a token")
    return text


def _adds_nothing(backend: Tokenizer, settings: Settings) -> bool:
    """Return whether a tokenizer has all added tokens that the settings ask for."""
    there = backend.get_added_tokens_decoder()
    recorded = settings.values.get("added_tokens_decoder")
    if recorded is not None:
        asked = {int(number): AddedToken(**token) for number, token in recorded.items()}
        if {number: repr(token) for number, token in asked.items()} != {
            number: repr(token) for number, token in there.items()
        }:
            return False
    special = {token.content for token in there.values() if token.special}
    others = {_text(token) for key in _LISTS for token in settings.values.get(key) or ()}
    # Built from the vocabulary, tokens outside it get the next ids.
    model, size = backend.model, backend.get_vocab_size(with_added_tokens=False)
    outside = [number for number in sorted(there) if model.id_to_token(number) is None]
    return (
        settings.truncation_side in ("left", "right")
        and special.issuperset(settings.tokens.values())
        and special.issuperset(others)
        and outside == [*range(size, size + len(outside))]
    )


def _is_as_built(backend: Tokenizer, kind: _Kind, settings: Settings) -> bool:
    """Return whether a class of transformers would build this tokenizer."""
    parts = kind.parts(backend, settings)
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    return parts.is_model and all(
        _state(getattr(backend, name)) == _state(getattr(parts, name)) for name in names
    )


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _words(values: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return BERT's normalizer, splitter of words, and decoder."""
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=values.get("tokenize_chinese_chars", True),
        strip_accents=values.get("strip_accents"),
        lowercase=values.get("do_lower_case", True),
    )
    return normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##")


def _is_word_piece(backend: Tokenizer, unk: str) -> bool:
    model = backend.model
    return isinstance(model, models.WordPiece) and (
        model.unk_token,
        model.continuing_subword_prefix,
        model.max_input_chars_per_word,
    ) == (unk, "##", 100)


def _numbered(backend: Tokenizer, settings: Settings, name: str) -> tuple[str, int]:
    """Return a special token and its id. Raise an error if the vocabulary lacks it."""
    token = settings.tokens[name]
    number = backend.token_to_id(token)
    if number is None:
        raise ValueError(f"{token!r} is not in the vocabulary")
    return token, number


def _bert(backend: Tokenizer, settings: Settings) -> _Parts:
    normalizer, pre_tokenizer, decoder = _words(settings.values)
    cls, sep = (_numbered(backend, settings, name) for name in ("cls", "sep"))
    single = f"{cls[0]}:0 $A:0 {sep[0]}:0"
    ends = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1 {sep[0]}:1", special_tokens=[cls, sep]
    )
    is_model = _is_word_piece(backend, settings.tokens["unk"])
    return _Parts(is_model, normalizer, pre_tokenizer, ends, decoder)


def _mpnet(backend: Tokenizer, settings: Settings) -> _Parts:
    normalizer, pre_tokenizer, decoder = _words(settings.values)
    cls, sep = (_numbered(backend, settings, name) for name in ("cls", "sep"))
    ends = processors.RobertaProcessing(sep, cls, True, False)
    is_model = _is_word_piece(backend, settings.tokens["unk"])
    return _Parts(is_model, normalizer, pre_tokenizer, ends, decoder)


def _roberta(backend: Tokenizer, settings: Settings) -> _Parts:
    model = backend.model
    is_model = isinstance(model, models.BPE) and (
        *(model.dropout, model.unk_token),
        *(model.continuing_subword_prefix, model.end_of_word_suffix),
        *(model.fuse_unk, model.byte_fallback, model.ignore_merges),
    ) == (None, None, "", "", False, False, False)
    has_space = settings.values.get("add_prefix_space", False)
    trims = settings.values.get("trim_offsets", True)
    cls, sep = (_numbered(backend, settings, name) for name in ("cls", "sep"))
    ends = processors.RobertaProcessing(sep, cls, trims, has_space)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_space)
    return _Parts(is_model, None, pre_tokenizer, ends, decoders.ByteLevel())


def _xlm_roberta(backend: Tokenizer, settings: Settings) -> _Parts:
    scheme = "always" if settings.values.get("add_prefix_space", True) else "never"
    pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    )
    bos, eos = (_numbered(backend, settings, name) for name in ("bos", "eos"))
    ends = processors.TemplateProcessing(
        single=[bos[0], "$A", eos[0]],
        pair=[bos[0], "$A", eos[0], eos[0], "$B", eos[0]],
        special_tokens=[bos, eos],
    )
    # A table of SentencePiece's. transformers keeps it.
    normalizer = backend.normalizer
    is_kept = normalizer is None or isinstance(normalizer, normalizers.Precompiled)
    return _Parts(
        is_kept and _is_unigram(backend.model),
        normalizer,
        pre_tokenizer,
        ends,
        decoders.Metaspace(prepend_scheme=scheme),
    )


def _is_unigram(model: Any) -> bool:
    if not isinstance(model, models.Unigram):
        return False
    state = json.loads(model.__getstate__())
    return (state["unk_id"], state["byte_fallback"]) == (3, False)


def _any(backend: Tokenizer, settings: Settings) -> _Parts:
    """Return what the general class builds: it takes `tokenizer.json` as it stands."""
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    return _Parts(backend.post_processor is not None, *(getattr(backend, name) for name in names))


_KINDS = {
    "BertTokenizer": _Kind(_BERT_TOKENS, _bert, ("input_ids", "token_type_ids", "attention_mask")),
    "DistilBertTokenizer": _Kind(_BERT_TOKENS, _bert),
    "MPNetTokenizer": _Kind(_ROBERTA_TOKENS | {"unk": "[UNK]"}, _mpnet),
    "RobertaTokenizer": _Kind(_ROBERTA_TOKENS, _roberta),
    "XLMRobertaTokenizer": _Kind(_ROBERTA_TOKENS, _xlm_roberta),
    "PreTrainedTokenizer": _Kind({}, _any),
    "TokenizersBackend": _Kind({}, _any),
}
