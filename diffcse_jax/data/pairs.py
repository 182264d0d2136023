"""Make the rows that `data.pairs` names from documents: sentences, leads and rests, or passages."""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence

from diffcse_jax.config import DataConfig
from diffcse_jax.data.split import Split, texts_of
from diffcse_jax.data.token_store import Corpus, Kind, Row
from diffcse_jax.documents.document import Document, Section
from diffcse_jax.documents.ledger import Ledger, usable
from diffcse_jax.documents.sentences import join, joined_passages, some_words, width, words

FEWEST_CHARACTERS = 20  # the shortest rest, and the shortest neighbours in an evaluation
FEWEST_WORDS = 10  # of a passage that queries are taken out of
MOST_CHARACTERS_PER_TOKEN = 16  # more than text has on average. Longer text would be cut as tokens
CHARACTERS_PER_TOKEN = 4  # of English
PASSAGE_CHARACTERS = 1000  # about 250 tokens of English, as in Contriever
FEWEST_PASSAGE_CHARACTERS = 100
PASSAGE_LENGTH = 1024  # the largest number of tokens of a passage, with one token per character
# Change this number when this file, or what it imports, makes other rows. Stores are then rebuilt.
RULES = "12"


def stored_length(data: DataConfig) -> int:
    """Return the largest number of tokens of a row.

    Passages are longer than the spans that are drawn from them.
    """
    return PASSAGE_LENGTH if data.pairs == "crops" else data.max_length


def corpus_of(split: Split, data: DataConfig) -> Corpus:
    """Return the rows of the documents that are not held out, without texts of held-out ones."""
    columns, texts_of_document = _MAKERS[data.pairs]

    def read(ledger: Ledger) -> Iterator[list[Row]]:
        for number, document in split.training(ledger):
            source = _Source(document, split, data, ledger)
            rows = []
            is_continued = False
            for text in texts_of_document(source):
                texts = usable(text.texts, document.place, ledger)
                if texts is not None:
                    follows = text.follows and is_continued
                    rows.append(Row(texts, number, document.place, text.kind, follows))
                is_continued = texts is not None
            yield rows

    reading: tuple[str, ...] = ("documents", RULES, str(data.held_out))
    if columns == ("passage",):  # of other lengths for each value
        reading += (data.pairs,)
    if data.pairs == "lead" and data.cloze:
        reading += ("cloze",)
    is_strict = data.on_bad_line == "error"
    return Corpus(split.name, columns, read, split.fingerprint, is_strict, reading)


@dataclasses.dataclass(frozen=True)
class _Source:
    """What the rows of a document are made of."""

    document: Document
    split: Split
    data: DataConfig
    ledger: Ledger

    def kept(self, texts: Sequence[str]) -> list[str]:
        """Return the texts that training uses."""
        return [text for text in texts if not self.split.drops(text, self.ledger)]


@dataclasses.dataclass(frozen=True)
class _Made:
    """The texts of a row."""

    texts: tuple[str, ...]
    kind: Kind = Kind.TEXTS
    follows: bool = False  # the text before it in the document is that of the row before


# Rows


def lead_and_rest(texts: Sequence[str]) -> tuple[str, str] | None:
    """Return the first text, and the others joined; None if those are too short."""
    lead, *others = texts or [""]
    rest = join(others)
    return (lead, rest) if width(rest) >= FEWEST_CHARACTERS else None


def _leads(source: _Source) -> Iterator[_Made]:
    """Yield the lead and the rest of each section.

    For half of the titles, chosen by a hash, the first sentence is the lead instead: a model that
    learns from titles only becomes worse for users who ask in sentences. With `data.cloze`, a
    section without a lead becomes passages (see `sampling.Cloze`).
    """
    data, ledger = source.data, source.ledger
    for section in source.document.sections:
        texts = source.kept(texts_of(section))
        pair = lead_and_rest(texts)
        if texts[:1] == [section.title] and _is_odd(texts):
            pair = lead_and_rest(texts[1:]) or pair
        if pair:
            lead, rest = pair
            yield _Made((lead, rest[: MOST_CHARACTERS_PER_TOKEN * data.max_length]))
            continue
        passages = short_passages(texts, data.max_length) if data.cloze else []
        yield from (_Made((text, text), Kind.PASSAGE) for text in passages)
        ledger.make("passage{s} without a title or first sentence", len(passages))
        if not passages:
            ledger.leave_out(
                "in sections too short for a pair", source.document.place, is_loss=False
            )


def _is_odd(texts: Sequence[str]) -> bool:
    return bool(zlib.crc32(" ".join(texts).encode(errors="surrogatepass")) % 2)


def _long_passages(source: _Source) -> Iterator[_Made]:
    """Yield a document as passages of about equal length."""
    sections = source.document.sections
    texts = source.kept([text for section in sections for text in _sentences_of(source, section)])
    joined = joined_passages(texts, PASSAGE_CHARACTERS)
    passages = [text for text in joined if width(text) >= FEWEST_PASSAGE_CHARACTERS]
    yield from (_Made((text,)) for text in passages)
    if too_short := len(joined) - len(passages):
        place = source.document.place
        source.ledger.leave_out("too short for a passage", place, too_short, is_loss=False)


def _sentences(source: _Source) -> Iterator[_Made]:
    """Yield the sentences of each section."""
    for texts in _consecutive(source):
        yield from (_Made((text,), follows=index > 0) for index, text in enumerate(texts))


def _passages(source: _Source) -> Iterator[_Made]:
    """Yield the passages of each section."""
    for texts in _consecutive(source):
        passages = joined_passages(texts, CHARACTERS_PER_TOKEN * source.data.max_length)
        yield from (_Made((text,), follows=index > 0) for index, text in enumerate(passages))


def _consecutive(source: _Source) -> Iterator[list[str]]:
    """Yield the sentences of each section, in parts between those that are left out."""
    for section in source.document.sections:
        texts = _sentences_of(source, section)
        is_dropped = [source.split.drops(text, source.ledger) for text in texts]
        for dropped, group in itertools.groupby(
            zip(is_dropped, texts, strict=True), lambda x: x[0]
        ):
            if not dropped:
                yield [text for _, text in group]


def _sentences_of(source: _Source, section: Section) -> list[str]:
    """Return the sentences of a section. If it has only a title, enter that in the ledger."""
    texts = section.sentences()
    if section.title and not texts:
        place = source.document.place
        source.ledger.leave_out("in sections with a title alone", place, is_loss=False)
    return texts


def short_passages(sentences: Sequence[str], tokens: int) -> list[str]:
    """Return passages of about `tokens` tokens and at least `FEWEST_WORDS` words.

    A longer sentence is cut between words.
    """
    characters = CHARACTERS_PER_TOKEN * tokens
    pieces = []
    for sentence in sentences:
        parts = math.ceil(width(sentence) / characters)
        count = len(words(sentence))
        bounds = [count * part // parts for part in range(parts + 1)]
        pieces += [some_words(sentence, *each) for each in itertools.pairwise(bounds)]
    return [
        text for text in joined_passages(pieces, characters) if len(words(text)) >= FEWEST_WORDS
    ]


# By `data.pairs`: the columns, and the function that makes rows of a document.
_MAKERS: dict[str, tuple[tuple[str, ...], Callable[[_Source], Iterator[_Made]]]] = {
    "dropout": (("sentence",), _sentences),
    "neighbours": (("sentence",), _sentences),
    "lead": (("lead", "rest"), _leads),
    "passages": (("passage",), _passages),
    "crops": (("passage",), _long_passages),
}
