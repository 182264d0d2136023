"""What an encoder does not read of texts: what is cut off, and words that its tokenizer lacks.

A tokenizer gives one token to all words that it does not know, such as those of another script, or
words of more than 100 characters in BERT's. Texts of such words have the same embedding.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from diffcse_jax.errors import warn_user


class Reader(NamedTuple):
    """A model that reads texts, and how many tokens."""

    name: str
    max_length: int


class _Open(threading.local):
    """Counts of texts by reader, while `added_up` is open in this thread."""

    counts: dict[Reader, collections.Counter[str]] | None = None


_open = _Open()


def describe_unknown(count: int, texts: int, model: str) -> str:
    """Return what is wrong with texts that consist largely of unknown words, and what to do."""
    verb = "consists" if count == 1 else "consist"
    return (
        f"{count:,} of {texts:,} texts {verb} largely of words that {model} does not know: use a "
        "multilingual encoder, or search by words (mode lexical)"
    )


def report_unread(reader: Reader, *, texts: int, cut: int, unknown: int) -> None:
    """Warn of texts that were cut or consist largely of unknown words, or add them up."""
    counts = collections.Counter(texts=texts, cut=cut, unknown=unknown)
    if _open.counts is None:
        _warn(reader, counts)
    else:
        _open.counts.setdefault(reader, collections.Counter()).update(counts)


@contextlib.contextmanager
def added_up() -> Iterator[None]:
    """Add up what encoders do not read during the block, in this thread. Warn once, at its end."""
    if _open.counts is not None:  # an outer block warns
        yield
        return
    counts: dict[Reader, collections.Counter[str]] = {}
    _open.counts = counts
    try:
        yield
    finally:
        _open.counts = None
        for reader, of_reader in counts.items():
            _warn(reader, of_reader)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Report nothing of what encoders do not read during the block, in this thread.

    This is for texts that are not the user's.
    """
    outer = _open.counts
    _open.counts = {}
    try:
        yield
    finally:
        _open.counts = outer


def _warn(reader: Reader, counts: collections.Counter[str]) -> None:
    texts = counts["texts"]
    if cut := counts["cut"]:
        warn_user(
            f"truncated {cut:,} of {texts:,} texts to {reader.max_length:,} tokens, the most that "
            "the model reads"
        )
    if unknown := counts["unknown"]:
        warn_user(describe_unknown(unknown, texts, reader.name))
