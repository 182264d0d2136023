"""Make the rows that `data.pairs` names from documents: sentences, leads and rests, or passages.

Some documents are held out for evaluation. A hash of a document's words decides which, so that neither the order nor
other documents matter, and equal documents stay together.
"""

import collections
import hashlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from diffcse_jax.config import DataConfig
from diffcse_jax.data.documents import Document, Documents, Section
from diffcse_jax.data.readers import Corpus, Fault, Place, Row
from diffcse_jax.data.sentences import canonical, join, some_words, width, words
from diffcse_jax.errors import DataError
from diffcse_jax.hosts import Progress

FEWEST_CHARACTERS = 20  # the shortest rest, and the shortest neighbours in an evaluation
FEWEST_WORDS = 10  # of a passage that queries are taken out of
MOST_CHARACTERS_PER_TOKEN = 16  # more than text has on average. Longer text would be cut as tokens anyway
CHARACTERS_PER_TOKEN = 4  # of English
PASSAGE_CHARACTERS = 1000  # about 250 tokens of English, as in Contriever
FEWEST_PASSAGE_CHARACTERS = 100
PASSAGE_LENGTH = 1024  # the largest number of tokens of a passage, in languages with one token per character
BOILERPLATE = (10, 0.01)  # boilerplate is in at least this many documents, and in at least this share of them
RULES = "9"  # change it when this file or what it imports change the rows, so that stores are rebuilt

DOCUMENTS = "document{s}"
HELD_OUT = "of them held out"
REPEATED = "repeated text{s} left out (boilerplate)"
SHARED = "text{s} left out that held-out documents also contain"


def stored_length(data: DataConfig) -> int:
    """Return the largest number of tokens of a row. Passages are longer than the spans that are drawn from them."""
    return PASSAGE_LENGTH if data.pairs == "crops" else data.max_length


def corpus_of(documents: Documents, data: DataConfig) -> Corpus:
    """Return the rows of the documents that are not held out, without texts of held-out documents."""
    counted: collections.Counter[str] = collections.Counter()
    columns, rows = _FORMS[data.pairs]

    def records() -> Iterator[tuple[Place, Row | Fault]]:
        counted.update({DOCUMENTS: 0, HELD_OUT: 0})  # reported in this order
        holdout = Holdout(documents, data.held_out, counted)
        for place, document in documents.read():
            if isinstance(document, Fault):
                yield place, document
                continue
            counted[DOCUMENTS] += 1
            if holdout.has(document):
                counted[HELD_OUT] += 1
            else:
                yield from ((place, row) for row in rows(document, holdout, data))
                yield place, Fault.EMPTY  # ends the document

    reading: tuple[str, ...] = ("documents", RULES, str(data.held_out))
    if columns == ("passage",):  # of other lengths for each value
        reading += (data.pairs,)
    if data.pairs == "lead" and data.cloze:
        reading += ("cloze",)
    bad, note = data.on_bad_line, documents.note
    return Corpus(documents.name, columns, records, documents.fingerprint, bad, reading, note, counted=counted)


# Documents that are held out


def digest(text: str) -> int:
    """Return a 64-bit hash of a text that ignores case, white space and how letters are encoded."""
    return int.from_bytes(hashlib.blake2b(canonical(text).encode(errors="surrogatepass"), digest_size=8).digest())


def is_in_share(text: str, share: float) -> bool:
    """Return whether a text belongs to this share of all texts. A hash of the text decides."""
    return digest(text) < share * 2**64


class Holdout:
    """The share of the documents that is held out, and the texts that training or evaluation leave out.

    A text that many documents contain, such as a licence, is left out of both sides. Training also leaves out the other
    texts of held-out documents. The source is read once if the share is positive.
    """

    def __init__(self, documents: Documents, share: float, counted: collections.Counter[str] | None = None):
        self._documents, self._share = documents, share
        self.counted: collections.Counter[str] = collections.Counter() if counted is None else counted
        self._held = set[int]()
        found: list[np.ndarray] = []
        seen: set[int] = set()
        with Progress(f"reading {documents.name}", "documents", quiet=not share) as progress:
            for document in documents if share else ():
                whole = digest(_text_of(document))
                progress.update(1)
                if whole in seen:  # a copy does not make its texts boilerplate
                    continue
                seen.add(whole)
                texts = {digest(text) for section in document for text in texts_of(section)}
                found.append(np.fromiter(texts, np.uint64, len(texts)))
                if self.has(document):
                    self._held |= texts
        if share and len(seen) == 1:
            raise DataError(
                f"{documents.name} is a single document, and data.held_out={share} keeps whole documents for "
                "evaluation. Name a folder of documents, put blank lines between them, or set data.held_out=0"
            )
        digests, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *found]), return_counts=True)
        self._boilerplate = {*digests[counts >= max(BOILERPLATE[0], BOILERPLATE[1] * len(seen))].tolist()}

    def has(self, document: Document) -> bool:
        """Return whether a document is held out."""
        return bool(self._share) and is_in_share(_text_of(document), self._share)

    def drops(self, text: str) -> bool:
        """Return whether training leaves out a text, and count why."""
        if not self._share:
            return False
        number = digest(text)
        is_repeated, is_shared = number in self._boilerplate, number in self._held
        if is_repeated or is_shared:
            self.counted[REPEATED if is_repeated else SHARED] += 1
        return is_repeated or is_shared

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that are held out, without boilerplate."""
        for document in filter(self.has, self._documents):
            sections = []
            for section in document:
                title = "" if digest(section.title) in self._boilerplate else section.title
                texts = [text for text in section.sentences() if digest(text) not in self._boilerplate]
                sections.append(Section(title, texts, sentence_a_line=True))
            yield tuple(sections)


def _text_of(document: Document) -> str:
    return " ".join(text for section in document for text in (section.title, *section.lines))


# Rows


def texts_of(section: Section) -> list[str]:
    """Return a section's title, if it has one, and its sentences. The first text is the lead."""
    return [*filter(None, [section.title]), *section.sentences()]


def lead_and_rest(texts: Sequence[str]) -> tuple[str, str] | None:
    """Return the first text, and the others joined; None if those are too short."""
    lead, *others = texts or [""]
    rest = join(others)
    return (lead, rest) if width(rest) >= FEWEST_CHARACTERS else None


def _leads(document: Document, holdout: Holdout, data: DataConfig) -> Iterator[Row | Fault]:
    """Yield the lead and the rest of each section.

    For half of the titles, chosen by a hash, the first sentence is the lead instead: a model that learns from titles
    only becomes worse for users who ask in sentences. With `data.cloze`, a section without a lead becomes passages,
    each a row of two equal texts (see `sampling.Cloze`).
    """
    for section in document:
        own = [text for text in texts_of(section) if not holdout.drops(text)]
        pair = lead_and_rest(own)
        if own[:1] == [section.title] and zlib.crc32(" ".join(own).encode(errors="surrogatepass")) % 2:
            pair = lead_and_rest(own[1:]) or pair
        if pair:
            lead, rest = pair
            yield lead, rest[: MOST_CHARACTERS_PER_TOKEN * data.max_length]
            continue
        passages = short_passages(own, data.max_length) if data.cloze else []
        yield from ((text, text) for text in passages)
        holdout.counted["passage{s} without a title or first sentence"] += len(passages)
        if not passages:
            holdout.counted["section{s} too short for a pair left out"] += 1


def _long_passages(document: Document, holdout: Holdout, data: DataConfig) -> Iterator[Row | Fault]:
    """Yield a document as passages of about equal length."""
    own = [sentence for section in document for sentence in section.sentences() if not holdout.drops(sentence)]
    passages = [text for text in passages_of(own, PASSAGE_CHARACTERS) if width(text) >= FEWEST_PASSAGE_CHARACTERS]
    yield from ((text,) for text in passages)
    if not passages:
        holdout.counted["document{s} too short for a passage left out"] += 1


def _in_order(document: Document, holdout: Holdout, data: DataConfig) -> Iterator[Row | Fault]:
    """Yield the sentences or passages of each section; for search, below a line with its title.

    The end of a section ends a document, and so does a text that is left out.
    """
    for section in document:
        title = f"{' '.join(section.title.split())}\n" if section.title and data.pairs == "titled" else ""
        for dropped, group in itertools.groupby(section.sentences(), holdout.drops):
            if dropped:
                continue
            texts = list(group)
            if data.pairs in ("passages", "titled"):
                texts = passages_of(texts, CHARACTERS_PER_TOKEN * data.max_length)
            yield from ((title + text,) for text in texts)
            yield Fault.EMPTY


def passages_of(sentences: Sequence[str], characters: int) -> list[str]:
    """Join whole sentences into texts of about equal length and at most `characters`. One sentence may be longer."""
    total = sum(map(width, sentences))
    room = max(characters / 2, characters - total / max(1, len(sentences)))  # the last sentence may reach beyond it
    size = max(1, total / max(1, math.ceil(total / room)))
    starts = itertools.accumulate(map(width, sentences), initial=0)
    groups = itertools.groupby(zip(starts, sentences, strict=False), lambda entry: entry[0] // size)
    return [text for _, group in groups for text in _halved([sentence for _, sentence in group], characters)]


def short_passages(sentences: Sequence[str], tokens: int) -> list[str]:
    """Return passages of about `tokens` and at least `FEWEST_WORDS`. A longer sentence is cut between words."""
    characters, pieces = CHARACTERS_PER_TOKEN * tokens, []
    for sentence in sentences:
        parts, count = math.ceil(width(sentence) / characters), len(words(sentence))
        bounds = [count * part // parts for part in range(parts + 1)]
        pieces += [some_words(sentence, *each) for each in itertools.pairwise(bounds)]
    return [text for text in passages_of(pieces, characters) if len(words(text)) >= FEWEST_WORDS]


def _halved(sentences: Sequence[str], characters: int) -> list[str]:
    """Join the sentences. If the text is too long, halve it until the parts are short enough."""
    text = join(sentences)
    if width(text) <= characters or len(sentences) == 1:
        return [text]
    ends = list(itertools.accumulate(map(width, sentences)))
    middle = min(range(1, len(sentences)), key=lambda place: abs(ends[place - 1] - ends[-1] / 2))
    return _halved(sentences[:middle], characters) + _halved(sentences[middle:], characters)


# By `data.pairs`: the columns, and the function that makes rows of a document.
_FORMS: dict[str, tuple[tuple[str, ...], Callable[[Document, Holdout, DataConfig], Iterator[Row | Fault]]]] = {
    "dropout": (("sentence",), _in_order),
    "neighbours": (("sentence",), _in_order),
    "lead": (("lead", "rest"), _leads),
    "passages": (("passage",), _in_order),
    "crops": (("passage",), _long_passages),
    "titled": (("titled passage",), _in_order),  # for search, not for training
}
