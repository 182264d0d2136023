"""What an encoder does not read of texts: what is cut off, and words that its tokenizer lacks.

A tokenizer gives one token to all words that it does not know, such as those of another script, or
words of more than 100 characters in BERT's. Texts of such words have the same embedding.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import transformers
from jaxtyping import Bool, Int, Integer

from diffcse_jax.errors import warn_user


class Reader(NamedTuple):
    """A model that reads texts, and how many tokens."""

    name: str
    max_length: int


class UnknownTokens(NamedTuple):
    """The ids of tokens that stand for unknown words. None: the tokenizer never gives one."""

    word: int | None  # all unknown words, such as [UNK]
    space: int | None = None  # the space before a word, alone: SentencePiece's before unknown words

    @classmethod
    def of(cls, tokenizer: transformers.PreTrainedTokenizerFast) -> "UnknownTokens":
        """Return those of a tokenizer."""
        return cls(tokenizer.unk_token_id, tokenizer.backend_tokenizer.token_to_id("\u2581"))


class _Open(threading.local):
    """Counts of texts by reader, while `added_up` is open in this thread."""

    counts: dict[Reader, collections.Counter[str]] | None = None


_open = _Open()


def mostly_unknown(
    token_ids: Integer[np.ndarray, " tokens"],
    offsets: Int[np.ndarray, " texts_and_1"],
    unknown: UnknownTokens,
    others: int | Int[np.ndarray, " texts"],
) -> Bool[np.ndarray, " texts"]:
    """Return which texts consist mostly of words that the tokenizer does not know.

    These are more than half of their tokens, without tokens of a space alone.

    Args:
        token_ids: The tokens of all texts.
        offsets: Where each text starts in `token_ids`, and the end of the last one.
        unknown: The tokens of unknown words.
        others: The number of special tokens and of tokens of the prompt in each text.
    """
    lengths = np.diff(offsets) - others
    if unknown.word is None or not (counts := _counts(token_ids, offsets, unknown.word)).any():
        return np.zeros(len(lengths), bool)
    if unknown.space is not None:
        lengths = lengths - _counts(token_ids, offsets, unknown.space)
    return 2 * counts > np.maximum(lengths, 0)


def _counts(
    token_ids: Integer[np.ndarray, " tokens"], offsets: Int[np.ndarray, " texts_and_1"], token: int
) -> Int[np.ndarray, " texts"]:
    """Return how often each text has a token."""
    return np.diff(np.searchsorted(np.flatnonzero(token_ids == token), offsets))


def describe_unknown(count: int, texts: int, model: str) -> str:
    """Return what is wrong with texts that consist mostly of unknown words, and what to do."""
    verb = "consists" if count == 1 else "consist"
    return (
        f"{count:,} of {texts:,} texts {verb} mostly of words that {model} does not know: use a "
        "multilingual encoder, or `--mode lexical`"
    )


def report_unread(reader: Reader, *, texts: int, cut: int, unknown: int) -> None:
    """Warn of texts that were cut or consist mostly of unknown words, or add them up."""
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
