"""Sentences that a caller gives."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from diffcse_jax.errors import DataError, shown

Sentences = str | Iterable[str]


def checked_sentences(sentences: Any) -> list[str]:
    """Return one string or an iterable of strings as a list; refuse anything else."""
    is_table = isinstance(sentences, bytes | Mapping) or hasattr(sentences, "columns")
    if is_table or not isinstance(sentences, Iterable):
        kind = type(sentences).__name__
        raise DataError(
            f"expected a string or an iterable of strings, got {kind}. Of a table, give one column"
        )
    if isinstance(sentences, Set):
        raise DataError("a set has no order, so no row could be told from another. Give a list")
    if hasattr(sentences, "to_pylist"):  # a column of pyarrow, whose items are its own scalars
        sentences = sentences.to_pylist()
    texts = [sentences] if isinstance(sentences, str) else list(sentences)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise DataError(
                f"sentence {number} is {shown(text)} ({type(text).__name__}), not a string. Each "
                "text gets an embedding of its own: give one flat list of strings"
            )
        if text.encode(errors="ignore").decode() != text:
            raise DataError(
                f"sentence {number}: {text!r:.60} contains a lone surrogate: the text was not "
                "valid UTF-8"
            )
    return texts
