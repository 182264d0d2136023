"""Passages: the parts of documents that are encoded and compared with queries.

A document becomes passages in two steps. `passages_of` joins the sentences of each section, up to
about 100 words. `SentenceEncoder.split` then cuts what is longer than the model reads, with
`split_text`. Each letter and digit of a document is in one of its passages, and a document is
without passages only if it is blank.
"""

import bisect
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from diffcse_jax.documents.document import Document, Section
from diffcse_jax.documents.sentences import END, joined_passages, paragraphs, split_sentences, width
from diffcse_jax.documents.text.encodings import encodable

PASSAGE_CHARACTERS = 512  # about 100 words
LONGEST_TITLE = 256  # characters; a longer one is text
OVERLAP = 0.125  # the largest share of a passage's tokens that the next passage repeats
# Change this number when documents become other passages. Indexes are then brought up to date.
PASSAGE_RULES = "4"

Span = tuple[int, int]  # characters of a text, from and to


class Passage(NamedTuple):
    """A part of a document."""

    document: int  # the number of the document
    title: str  # of its section; may be empty
    text: str
    start: int = 0  # the place of the first character in the document's text, all lines joined
    column: str = ""  # of a table, if the user named columns

    @property
    def searched(self) -> str:
        """The text that is encoded, and that BM25 reads: the passage after its title."""
        return f"{self.title} {self.text}" if self.title else self.text


def passages_of(document: Document, number: int) -> list[Passage]:
    """Return the passages of a document; none if it is blank.

    The sections of a `whole` document stay whole: its one text, or the columns that the user named.
    """
    passages = []
    start = 0
    for place, section in enumerate(document.sections):
        following = document.sections[place + 1].title if place + 1 < len(document.sections) else ""
        parts = _whole(section) if document.whole else _in_sentences(section, following)
        passages += [
            Passage(number, encodable(title), encodable(text), start + offset, section.column)
            for title, text, offset in parts
        ]
        start += sum(map(len, section.lines)) + len(section.lines)
    return passages


Part = tuple[str, str, int]  # the title and the text of a passage, and its place in the section


def _whole(section: Section) -> list[Part]:
    """Return a section as one passage."""
    title = " ".join(section.title.split())
    text = "\n".join(section.lines)
    if not text.strip():
        return [("", title, 0)] if title else []
    return [(title, text.strip(), len(text) - len(text.lstrip()))]


def _in_sentences(section: Section, following: str) -> Iterator[Part]:
    """Yield the passages of a section. `following` is the title of the next one."""
    title = " ".join(section.title.split())
    lines = section.lines
    before = 0
    if width(title) > LONGEST_TITLE:
        lines = [title, *section.lines]
        before = len(title) + 1
        title = ""
    sentences = _sentences(lines, sentence_a_line=section.sentence_a_line)
    if title and sentences and sentences[0][0] == title:  # the text repeats it
        sentences = sentences[1:]
    if not sentences and title and not _is_in_path(title, following):
        yield "", title, 0
    texts = joined_passages([sentence for sentence, _ in sentences], PASSAGE_CHARACTERS)
    firsts = _first_sentences(texts, [sentence for sentence, _ in sentences])
    places = _places("\n".join(lines), [sentences[first][1] for first in firsts])
    for text, place in zip(texts, places, strict=True):
        yield title, text, max(0, place - before)


def _is_in_path(title: str, following: str) -> bool:
    """Return whether the title of the next section, a path of headings, begins with a title."""
    return f"{' '.join(following.split())}: ".startswith(f"{title}: ")


def _has_words(text: str) -> bool:
    return any(map(str.isalnum, text))


def _sentences(lines: Sequence[str], *, sentence_a_line: bool) -> list[tuple[str, int]]:
    """Return the sentences, each with the number of its first character.

    White space does not count: splitting and joining keep all other characters. Sentences without
    letters and digits, such as a line of hyphens, are left out, unless there are no others.
    """
    if sentence_a_line:
        sentences: Iterable[str] = map(str.strip, lines)
    else:
        sentences = itertools.chain.from_iterable(map(split_sentences, paragraphs(lines)))
    numbered = []
    number = 0
    for sentence in sentences:
        if sentence:
            numbered.append((sentence, number))
        number += _visible(sentence)
    with_words = [pair for pair in numbered if _has_words(pair[0])]
    return with_words or numbered


def _visible(text: str) -> int:
    """Return the number of characters that are not white space."""
    return len("".join(text.split()))


def _first_sentences(texts: Sequence[str], sentences: Sequence[str]) -> list[int]:
    """Return the number of each text's first sentence. The texts are the sentences, joined."""
    ends = list(itertools.accumulate(map(_visible, sentences)))
    starts = itertools.accumulate(map(_visible, texts[:-1]), initial=0)
    return [bisect.bisect_right(ends, start) for start in starts] if texts else []


def _places(text: str, numbers: Sequence[int]) -> Iterator[int]:
    """Yield the places in a text of its visible characters with these increasing numbers."""
    words = re.finditer(r"\S+", text)
    word = next(words, None)
    before = 0
    for number in numbers:
        while word and before + len(word[0]) <= number:
            before += len(word[0])
            word = next(words, None)
        yield word.start() + number - before if word else 0


# Texts that are longer than a model reads


def split_text(text: str, tokens: Sequence[Span], limit: int) -> list[Span]:
    """Split a text, whose tokens have these places, into passages of at most `limit` tokens.

    A passage ends with the last sentence that ends in its second half. If none does, it ends with a
    word. The next passage begins up to an eighth of a passage earlier: with a sentence or, if none
    begins there, with a word.
    """
    begins = [start for start, _ in tokens]

    def span(first: int, stop: int) -> Span:
        start = begins[first] if first else 0
        end = begins[stop] if stop < len(tokens) else len(text)
        return start, start + len(text[start:end].rstrip())

    words = {number for number in range(1, len(tokens)) if tokens[number - 1][1] < begins[number]}
    sentences = {bisect.bisect_left(begins, gap.end()) for gap in END.finditer(text)}
    spans: list[Span] = []
    start = 0
    while start + limit < len(tokens):
        stop = (
            _first(range(start + limit, start + limit // 2, -1), sentences, words) or start + limit
        )
        spans.append(span(start, stop))
        earliest = max(start + 1, stop - max(1, int(OVERLAP * limit)))
        start = _first(range(earliest, stop), sentences, words) or earliest
    return [*spans, span(start, len(tokens))]


def _first(places: Iterable[int], *kinds: Container[int]) -> int | None:
    """Return the first place that is of the first kind. If there is none, try the next kind."""
    return next((place for kind in kinds for place in places if place in kind), None)
