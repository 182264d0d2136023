"""Tokenizers of Hugging Face folders, and their backends without padding and truncation."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
import transformers

from diffcse_jax.data.lines import LONGEST_LINE
from diffcse_jax.errors import CheckpointError

CHARACTERS_PER_TOKEN = 16  # of the start of a text that is tokenised first; English words have 4 to 5
UNKNOWN_WORD = "\u16a0"  # a rune
CHARACTERS_AT_ONCE = 1 << 22  # tokens of so much text are held as the library holds them, in 100 bytes each


class Tokenised(NamedTuple):
    """Texts as tokens.

    Attributes:
        ids: of every text its tokens, special ones included.
        cut: of every text, whether it had more.
    """

    ids: list[list[int]]
    cut: list[bool]


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """The fast tokenizer of a Hugging Face folder. Code that comes with the folder is never run.

    Raises:
        CheckpointError: there is none, or its files cannot be read.
    """
    # Without any of these, transformers returns a tokenizer whose vocabulary is empty.
    if not any(os.path.isfile(folder / name) for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
        raise CheckpointError(f"{folder} holds no tokenizer: neither tokenizer.json nor a vocabulary")
    for path in folder.iterdir():
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # transformers would wait
            raise CheckpointError(f"{folder} holds {path.name}, which is a pipe or a device")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a dozen types
        reason = str(error)
        if "trust_remote_code" in reason:  # advice to let it run
            reason = "it is code of the folder's own, which is never run here; tokenizer.json must do without"
        raise CheckpointError(f"{folder}: cannot load the tokenizer: {reason}") from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise CheckpointError(f"{folder}: {type(tokenizer).__name__} is no fast tokenizer; tokenizer.json would be one")
    try:
        tokenizer.backend_tokenizer.encode(UNKNOWN_WORD)
    except Exception as error:  # the library raises Exception itself: its vocabulary has no token for unknown words
        raise CheckpointError(f"{folder}: the tokenizer cannot read a word it does not know: {error}") from error
    return tokenizer


def unlimited_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast) -> tokenizers.Tokenizer:
    """A copy of the tokenizer's backend that neither pads nor cuts."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def tokenise(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> Tokenised:
    """Tokenises texts for a backend that cuts them: their ends, which it would drop, are mostly not looked at.

    What is tokenised is the start of a text up to a space, and, only if that gives too few tokens, all of it. So the
    tokens are those of the whole text, unless it is longer than `LONGEST_LINE` and has few spaces.

    Args:
        backend: truncation is enabled.
        texts: of any length.
    """
    if backend.truncation is None:
        raise ValueError("the backend cuts nothing; enable its truncation")
    size = CHARACTERS_PER_TOKEN * backend.truncation["max_length"]
    found = Tokenised([], [])
    for group in _groups(texts, size):
        encodings = backend.encode_batch_fast([start for _, start in group])
        for row, (text, start) in enumerate(group):
            whole = text[: max(size, LONGEST_LINE)]
            if len(start) < len(whole) and not encodings[row].overflowing:
                encodings[row] = backend.encode_batch_fast([whole])[0]
            found.ids.append(encodings[row].ids)
            found.cut.append(bool(encodings[row].overflowing) or len(whole) < len(text))
    return found


def _groups(texts: Sequence[str], size: int) -> Iterator[list[tuple[str, str]]]:
    """Groups of texts, each text with its start, of at most `size` characters if it has a space there."""
    group: list[tuple[str, str]] = []
    characters = 0
    for text in texts:
        end = text.rfind(" ", 0, size) if len(text) > size else -1
        start = text[: max(size, LONGEST_LINE)] if end < 0 else text[:end]
        group.append((text, start))
        characters += len(start)
        if characters >= CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group
