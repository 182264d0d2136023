"""Tokenizers of Hugging Face folders, and their backends without padding and truncation."""

from pathlib import Path

import tokenizers
import transformers

from diffcse_jax.errors import CheckpointError


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """The fast tokenizer of a Hugging Face folder.

    Raises:
        CheckpointError: there is none, or its files cannot be read.
    """
    # Without any of these, transformers returns a tokenizer whose vocabulary is empty.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
        raise CheckpointError(f"{folder} holds no tokenizer: neither tokenizer.json nor a vocabulary")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise a dozen types
        raise CheckpointError(f"{folder}: cannot load the tokenizer: {error}") from error


def unlimited_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast) -> tokenizers.Tokenizer:
    """A copy of the tokenizer's backend that neither pads nor cuts."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend
