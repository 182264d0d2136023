"""Load tokenizers from Hugging Face folders, and tokenise only the beginnings of long texts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
import transformers

from diffcse_jax.errors import CheckpointError, warn_user
from diffcse_jax.io import read_json_object
from diffcse_jax.models.sentence_folder import TEXT_SETTINGS

CHARACTERS_PER_TOKEN = 16  # length of the beginning that is tokenised first. English has 4 to 5
TEXTS_AT_ONCE = 1000  # the library needs about 100 bytes per token


class Tokenised(NamedTuple):
    """Tokens of texts, including special tokens, and whether each text was cut."""

    ids: list[list[int]]
    cut: list[bool]


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """Load the fast tokenizer of a Hugging Face folder, or raise `CheckpointError`. Code in the folder never runs."""
    # Without any of these, transformers returns a tokenizer with an empty vocabulary.
    if not any(os.path.isfile(folder / name) for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
        raise CheckpointError(f"{folder} does not contain a tokenizer (tokenizer.json or a vocabulary)")
    for path in folder.iterdir():
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # transformers would wait
            raise CheckpointError(f"{folder} contains {path.name}, which is a pipe or a device. Remove it")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a dozen types
        reason = str(error)
        if "trust_remote_code" in reason:  # advice to execute it
            reason = "it needs code from the folder, which is never executed here. Use a folder with tokenizer.json"
        raise CheckpointError(f"{folder}: cannot load the tokenizer: {reason}") from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise CheckpointError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer. Add a tokenizer.json")
    try:
        tokenizer.backend_tokenizer.encode("\u16a0")  # a rune
    except Exception as error:  # the library raises Exception: the vocabulary lacks a token for unknown words
        raise CheckpointError(f"{folder}: the tokenizer cannot read an unknown word: {error}") from error
    settings = folder / TEXT_SETTINGS
    if settings.is_file() and read_json_object(settings).get("do_lower_case") is True:
        backend = tokenizer.backend_tokenizer
        steps = [tokenizers.normalizers.Lowercase(), *filter(None, [backend.normalizer])]
        backend.normalizer = tokenizers.normalizers.Sequence(steps)
    return tokenizer


def unlimited_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer's backend without padding and truncation."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def tokenise(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> Tokenised:
    """Tokenise texts by a backend with truncation, mostly without reading the part that it would cut.

    The beginning of a text, up to a space, is tokenised first. If that gives too few tokens, the whole text is.
    """
    assert backend.truncation is not None
    size, found = CHARACTERS_PER_TOKEN * backend.truncation["max_length"], Tokenised([], [])
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        group = texts[first : first + TEXTS_AT_ONCE]
        starts = [text[: max(0, text.rfind(" ", 0, size))] if len(text) > size else text for text in group]
        for text, start, encoding in zip(group, starts, backend.encode_batch_fast(starts), strict=True):
            if len(start) < len(text) and not encoding.overflowing:
                (encoding,) = backend.encode_batch_fast([text])
            found.ids.append(encoding.ids)
            found.cut.append(bool(encoding.overflowing))
    return found


def warn_of_cut(cut: int, texts: int, max_length: int) -> None:
    """Warn if texts were cut to the tokens that a model reads."""
    if cut:
        warn_user(f"truncated {cut:,} of {texts:,} texts to {max_length:,} tokens, the most that the model reads")
