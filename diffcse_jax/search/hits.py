"""What a search finds: hits with their places and snippets, and a note if nothing fits."""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from diffcse_jax.documents.sentences import CJK

SNIPPET = 200  # characters, about

_SPACED = rf"{CJK}\p{{Line_Break=SA}}"
# Characters of scripts without spaces stand alone.
_WORD = regex.compile(rf"(?V1)[{_SPACED}]|[^\s{_SPACED}]+")

_PLAIN = regex.compile(r"\w{3,}")

Stems = Callable[[str], Collection[str]]  # returns the words of a text as a search compares them


class Hit(NamedTuple):
    """A document that was found, with its best passage."""

    score: float  # the cosine similarity, the BM25 score, or the weighted mean of their z-scores
    rank: int  # from 1
    id: str  # of the document
    title: str  # of the section; may be empty
    text: str  # the passage
    file: str = ""  # as the user named it; empty if the text was given in memory
    line: int | None = None  # or the row of a table, from 1; None if a file is one document
    start: int = 0  # the place of the passage in the document's text
    columns: Mapping[str, Any] = {}  # the other columns of the document's row
    snippet: str = ""  # the part of the passage with the words of the query
    # In a hybrid search, the ranks by `dense` and by `lexical`, if they found it.
    ranks: Mapping[str, int] = {}

    def place(self) -> str:
        """Return the id, and the file and line unless the id names them."""
        where = f"{self.file}:{self.line}" if self.line and self.file else self.file
        return f"{self.id} ({where})" if where and where != self.id else self.id

    def is_cut(self) -> bool:
        """Return whether the snippet is only a part of the passage."""
        return self.snippet != " ".join(self.text.split())


class Hits(list[Hit]):
    """The hits of a query, best first.

    Attributes:
        note: Sentences for the user if nothing fits the query well, if words or meaning alone
            found something, or if BM25 ignored words of the query. Otherwise empty.
        closeness: How close the best passage is by meaning: 0 is usual for two passages of the
            index, and 1 for a passage and its nearest one. None if meaning was not compared.
    """

    def __init__(self, hits: Iterable[Hit] = (), note: str = "", closeness: float | None = None):
        super().__init__(hits)
        self.note = note
        self.closeness = closeness


class Match(NamedTuple):
    """A word of a text that a query contains, too."""

    start: int
    end: int
    stems: frozenset[str]


def matches(text: str, wanted: Collection[str], stems: Stems) -> list[Match]:
    """Return the words of a text that have one of the wanted stems, in order."""
    if not wanted:
        return []
    shared_words = []
    for word in _WORD.finditer(text):
        start, end = word.span()
        if end - start == 1:  # scripts without spaces are compared by pairs of characters
            end = min(start + 2, len(text))
        if shared := frozenset(stems(text[start:end])).intersection(wanted):
            shared_words.append(Match(start, end, shared))
    return shared_words


def snippet(text: str, shared: Sequence[Match]) -> str:
    """Return a part of a text, of whole words, that contains the most words of the query."""
    if len(text) <= SNIPPET * 1.2:
        return " ".join(text.split())
    first, last = _densest(shared)
    room = max(0, SNIPPET - (last - first))
    start = max(0, min(first - room // 4, len(text) - SNIPPET))
    end = min(len(text), max(start + SNIPPET, last))
    start, end = _at_words(text, start, end, first, last)
    before = "... " if text[:start].strip() else ""
    after = " ..." if text[end:].strip() else ""
    return f"{before}{' '.join(text[start:end].split())}{after}"


def _densest(shared: Sequence[Match]) -> tuple[int, int]:
    """Return the span of about `SNIPPET` characters with the most different words of the query."""
    inside: collections.Counter[str] = collections.Counter()
    best = (0, 0)
    most = 0
    left = 0
    for match in shared:
        inside.update(match.stems)
        while match.end - shared[left].start > SNIPPET and shared[left] is not match:
            inside.subtract(shared[left].stems)
            inside += collections.Counter()  # without those that have gone
            left += 1
        if len(inside) > most:
            start = shared[left].start
            best = (start, min(match.end, start + SNIPPET))
            most = len(inside)
    return best


def _at_words(text: str, start: int, end: int, first: int, last: int) -> tuple[int, int]:
    """Move the ends of a span to spaces nearby, but not into the span from `first` to `last`."""
    if start and not text[start - 1].isspace():
        space = next(
            (at for at in range(start, min(first, start + 40)) if text[at].isspace()), None
        )
        start = start if space is None else space + 1
    if end < len(text) and not text[end].isspace():
        space = next(
            (at for at in range(end, max(last, end - 40), -1) if text[at - 1].isspace()), None
        )
        end = end if space is None else space - 1
    return start, end


def plain_words(text: str) -> frozenset[str]:
    """Return the words of three letters or more in lower case."""
    return frozenset(_PLAIN.findall(text.lower()))
