"""What an encoder does not read of texts: what is cut off, and words that its tokenizer lacks.

A tokenizer gives one token to all words that it does not know, such as those of another script, or
words of more than 100 characters in BERT's. Texts of such words have the same embedding.
"""

import collections
import contextlib
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tokenizers

from diffcse_jax.errors import warn_user

LARGE_SHARE = 1 / 4  # of a text's letters, in unknown words
WIDE = 3  # letters that a wide one, such as a Chinese character, counts as


class Reader(NamedTuple):
    """A model that reads texts, and how many tokens."""

    name: str
    max_length: int


class _Open(threading.local):
    """Counts of texts by reader, while `added_up` is open in this thread."""

    counts: dict[Reader, collections.Counter[str]] | None = None


_open = _Open()


def largely_unknown(
    backend: tokenizers.Tokenizer,
    texts: Sequence[str],
    prompts: Sequence[int],
    token_ids: Sequence[list[int]],
    unknown_id: int | None,
) -> list[bool]:
    """Return which texts have a large share of their letters in words that the tokenizer lacks.

    Tokens are no measure: in a script without spaces, a whole clause is one unknown token. The
    places of tokens in a text cost time, so they are asked for only if it has an unknown one.

    Args:
        backend: The tokenizer, which may truncate texts.
        texts: The texts.
        prompts: How many characters at the beginning of each text are not counted.
        token_ids: The tokens of each text.
        unknown_id: The token of all unknown words. None: the tokenizer never gives one.
    """
    found = [unknown_id in ids for ids in token_ids]
    rows = [row for row, has_unknown in enumerate(found) if has_unknown]
    for row, encoding in zip(rows, backend.encode_batch([texts[row] for row in rows]), strict=True):
        skipped = prompts[row]
        # Special tokens around the text have no extent.
        spans = [
            (token, max(start, skipped), end)
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if max(start, skipped) < end
        ]
        unknown = sum(
            _letters(texts[row][start:end]) for token, start, end in spans if token == unknown_id
        )
        found[row] = unknown > 0 and unknown >= LARGE_SHARE * _letters(
            texts[row][spans[0][1] : spans[-1][2]]
        )
    return found


def _letters(text: str) -> int:
    """Return the number of characters that are not white space. Wide letters count more."""
    return sum(
        WIDE if char.isalpha() and unicodedata.east_asian_width(char) == "W" else 1
        for char in text
        if not char.isspace()
    )


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
