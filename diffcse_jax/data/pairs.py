"""From documents to the rows that `data.pairs` names: sentences, leads and rests, passages.

Rows are text, tokenised once. What is drawn anew in every epoch is drawn of their tokens (`data/examples.py`).
"""

import collections
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence

from diffcse_jax.data import held_out
from diffcse_jax.data.corpus import Corpus, Fault, Record
from diffcse_jax.data.documents import Document, Documents, Section
from diffcse_jax.groups import DataConfig

FEWEST_CHARACTERS = 20  # of a rest, and of the neighbours that evaluation takes
MOST_CHARACTERS_PER_TOKEN = 16  # more than text has on average: what is cut here is cut as tokens anyway
CHARACTERS_PER_TOKEN = 4  # of English, in passages that are to have so many tokens
PASSAGE_CHARACTERS = 1000  # about 250 tokens of English, as in Contriever
FEWEST_PASSAGE_CHARACTERS = 100
PASSAGE_LENGTH = 1024  # tokens of a passage at most, where characters are tokens
RULES = 4  # of this module, `data/documents.py` and `data/markdown.py`: another number makes token stores anew

COUNT = "documents"
HELD_OUT = "of them held out"
SHARED = "texts left out that held-out documents have, too"
WITHOUT_REST = "sections without a lead and a rest left out"
SHORT = "documents too short for a passage left out"

Counts = collections.Counter[str]
Held = Callable[[str], bool]  # True of a text that held-out documents have
Rows = Callable[[Document, Held, Counts], Iterator[Record]]


def stored_length(data: DataConfig) -> int:
    """The tokens that a row may have: passages have more than the spans that are drawn of them."""
    return PASSAGE_LENGTH if data.pairs == "crops" else data.max_length


def corpus_of(documents: Documents, data: DataConfig) -> Corpus:
    """The rows of the documents that are not held out, without any text that held-out ones have, too."""
    share, counted = data.held_out, collections.Counter[str]()
    columns, rows = _form_of(data)

    def records() -> Iterator[Record]:
        counted.update({COUNT: 0, HELD_OUT: 0})  # told in this order
        out = held_out.held_out(documents, share) if share else ()
        texts = held_out.Texts(text for document in out for section in document for text in texts_of(section))
        for place, document in documents.read():
            if isinstance(document, Fault):
                yield place, document
                continue
            counted[COUNT] += 1
            if held_out.is_held_out(document, share):
                counted[HELD_OUT] += 1
            else:
                yield from rows(document, texts.__contains__, counted)
                yield place, Fault.EMPTY  # it ends

    how = (
        "documents",
        str(RULES),
        data.documents,
        str(share),
        *[f"{data.pairs} 2"] * (data.pairs in ("passages", "crops")),
    )
    return Corpus(documents.name, columns, records, documents.fingerprint, data.on_bad_line, how, counted=counted)


def _form_of(data: DataConfig) -> tuple[tuple[str, ...], Rows]:
    """The columns that `data.pairs` asks for, and what makes rows of them."""
    if data.pairs == "lead":
        return ("lead", "rest"), functools.partial(_leads, most_characters=MOST_CHARACTERS_PER_TOKEN * data.max_length)
    if data.pairs == "passages":
        return ("passage",), functools.partial(_passages_in_order, characters=CHARACTERS_PER_TOKEN * data.max_length)
    return (("passage",), _passages) if data.pairs == "crops" else (("sentence",), _sentences)


def texts_of(section: Section) -> list[str]:
    """A section's title, where it has one, and its sentences: the first is its lead."""
    return [*filter(None, [section.title]), *section.sentences()]


def lead_and_rest(texts: Sequence[str]) -> tuple[str, str] | None:
    """The first text, and the others as one; None where these are too short."""
    lead, *others = texts or [""]
    rest = " ".join(others)
    return (lead, rest) if len(rest) >= FEWEST_CHARACTERS else None


def _sentences(document: Document, held: Held, counted: Counts) -> Iterator[Record]:
    """Single sentences in their order. At a text that held-out documents have one document ends and another begins."""
    for section in document:
        for index, sentence in enumerate(section.sentences()):
            shared = held(sentence)
            counted[SHARED] += shared
            yield section.place_of(index), Fault.EMPTY if shared else (sentence,)
        yield section.place, Fault.EMPTY


def _leads(document: Document, held: Held, counted: Counts, *, most_characters: int) -> Iterator[Record]:
    """The lead and the rest of every section."""
    for section in document:
        texts = texts_of(section)
        own = [text for text in texts if not held(text)]
        counted[SHARED] += len(texts) - len(own)
        if pair := _with_or_without_title(section, own):
            yield section.place, (pair[0], pair[1][:most_characters])
        else:
            counted[WITHOUT_REST] += 1


def _with_or_without_title(section: Section, own: Sequence[str]) -> tuple[str, str] | None:
    """The lead and the rest of a section's texts; of every second title, by a hash of the texts, none is made a lead.

    Else those who ask in sentences would be worse off: titles alone teach to look for words of titles.
    """
    has_title = bool(section.title) and own[:1] == [section.title]
    if has_title and zlib.crc32(" ".join(own).encode(errors="surrogatepass")) % 2 and (pair := lead_and_rest(own[1:])):
        return pair
    return lead_and_rest(own)


def _passages(document: Document, held: Held, counted: Counts) -> Iterator[Record]:
    """A document's sentences as passages of about equal length, of `PASSAGE_CHARACTERS` at most where they can."""
    sentences = [sentence for section in document for sentence in section.sentences()]
    own = [sentence for sentence in sentences if not held(sentence)]
    counted[SHARED] += len(sentences) - len(own)
    passages = [text for text in passages_of(own, PASSAGE_CHARACTERS) if len(text) >= FEWEST_PASSAGE_CHARACTERS]
    yield from ((document[0].place, (text,)) for text in passages)
    counted[SHORT] += not passages


def _passages_in_order(document: Document, held: Held, counted: Counts, *, characters: int) -> Iterator[Record]:
    """The passages of each section. At a text that held-out documents have one document ends and another begins."""
    for section in document:
        for shared, sentences in itertools.groupby(section.sentences(), held):
            if shared:
                counted[SHARED] += len(list(sentences))
                continue
            yield from ((section.place, (text,)) for text in passages_of(list(sentences), characters))
            yield section.place, Fault.EMPTY


def passages_of(sentences: Sequence[str], characters: int) -> list[str]:
    """Whole sentences as texts of about equal length, of at most so many characters; a sentence may have more."""
    total = sum(map(len, sentences))
    room = max(characters / 2, characters - total / max(1, len(sentences)))  # the last sentence may reach beyond it
    groups = _in_parts(sentences, max(1, math.ceil(total / room)))
    return [text for group in groups for text in _halved(group, characters)]


def _in_parts(sentences: Sequence[str], parts: int) -> list[list[str]]:
    """At most so many groups of neighbours, those that begin in an equal part of the text."""
    ends = list(itertools.accumulate(map(len, sentences), initial=0))
    size = max(1, ends[-1] / parts)
    groups = itertools.groupby(zip(ends, sentences, strict=False), lambda entry: entry[0] // size)
    return [[sentence for _, sentence in group] for _, group in groups]


def _halved(sentences: Sequence[str], characters: int) -> list[str]:
    """The sentences as one text, or, where that is too long, its halves, and so on."""
    text = " ".join(sentences)
    if len(text) <= characters or len(sentences) == 1:
        return [text]
    ends = list(itertools.accumulate(map(len, sentences)))
    middle = min(range(1, len(sentences)), key=lambda place: abs(ends[place - 1] - ends[-1] / 2))
    return _halved(sentences[:middle], characters) + _halved(sentences[middle:], characters)
