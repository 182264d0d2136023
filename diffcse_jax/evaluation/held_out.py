"""Queries made of unlabelled text, and the texts that they should find, for dev metrics."""

import collections
import heapq
import itertools
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from diffcse_jax.config import DataConfig
from diffcse_jax.data.documents import Section
from diffcse_jax.data.pairs import FEWEST_CHARACTERS, Holdout, digest, lead_and_rest, short_passages, texts_of
from diffcse_jax.data.readers import Fault, checked
from diffcse_jax.data.sampling import WINDOW
from diffcse_jax.data.sentences import join, some_words, split_sentences, width, words
from diffcse_jax.data.sources import open_documents
from diffcse_jax.errors import DataError, counted

FEWEST_WORDS = 6  # of a sentence that is halved
MOST_WORDS = 64  # of a rest
WINDOWS = 2  # of a passage
KEYWORDS = 5

Pair = TypeVar("Pair", bound=tuple[Any, ...])
Pairs = list[tuple[str, str]]


class Query(NamedTuple):
    """A query and the text that it should find. Only texts of other passages compete with that text."""

    query: str
    target: str
    passage: int
    document: int


def held_out_queries(data: DataConfig, metric: str, most: int) -> list[Query]:
    """Return at most `most` queries of the held-out documents for a metric of `HELD_OUT_PAIRS`."""
    passages = itertools.count()

    def usable() -> Iterator[Query]:
        for number, document in enumerate(Holdout(open_documents(data), data.held_out)):
            for section in document:
                for pairs in HELD_OUT_PAIRS[metric](section, data.max_length):
                    passage = next(passages)
                    yield from (Query(*pair, passage, number) for pair in pairs if not isinstance(checked(pair), Fault))

    chosen = choose_pairs(usable(), most, digest)
    if len(chosen) < 2:
        left = f"data.held_out={data.held_out} of data.train_file={data.train_file} leaves"
        raise DataError(
            f"{left} {counted(len(chosen), 'pair{s}')} for {metric}, which needs two different ones. Hold out more "
            "documents or choose another eval.metric"
        )
    return chosen


def choose_pairs(pairs: Iterable[Pair], limit: int, order: Callable[[str], int]) -> list[Pair]:
    """Choose pairs that share no text: those with the lowest `order`, a hash, in whatever order they come.

    Further items of a pair say where it is from, such as its passage. Pairs that are equal in them may share a text.
    Memory holds at most four times the limit.
    """
    lowest: dict[int, Pair] = {}
    for pair in pairs:
        lowest[order(" ".join(pair[:2]))] = pair
        if len(lowest) > 4 * limit:
            lowest = dict(heapq.nsmallest(2 * limit, lowest.items()))
    candidates = [pair for _, pair in sorted(lowest.items())[: 2 * limit]]
    places = {(text, pair[2:] or pair) for pair in candidates for text in pair[:2]}
    occurrences = collections.Counter(text for text, _ in places)
    shared = {text for text, count in occurrences.items() if count > 1}
    return [pair for pair in candidates if pair[0] != pair[1] and shared.isdisjoint(pair[:2])][:limit]


def training_halves(training: Callable[[], Iterable[str]], most: int) -> Pairs:
    """Return the halves of the first different sentences; of short ones only if there are no others."""
    found: dict[str, None] = {}
    for fewest in (FEWEST_WORDS, 2):
        for sentence in training():
            if len(words(sentence)) >= fewest:
                found[sentence] = None
            if len(found) == most:
                break
        if len(found) >= 2:
            break
    return [halve(sentence) for sentence in found]


def halve(sentence: str) -> tuple[str, str]:
    """Return the two halves of a sentence, by words."""
    middle = len(words(sentence)) // 2
    return some_words(sentence, 0, middle), some_words(sentence, middle)


# The pairs of each passage of a section


def _leads(section: Section, tokens: int) -> Iterator[Pairs]:
    if pair := lead_and_rest(texts_of(section)):
        yield [(pair[0], some_words(pair[1], 0, MOST_WORDS))]


def _neighbours(section: Section, tokens: int) -> Iterator[Pairs]:
    sentences = section.sentences()
    pairs = zip(sentences[::2], sentences[1::2], strict=False)  # a sentence twice would find itself
    return ([pair] for pair in pairs if min(map(width, pair)) >= FEWEST_CHARACTERS)


def _halves_of_sentences(section: Section, tokens: int) -> Iterator[Pairs]:
    return ([halve(sentence)] for sentence in section.sentences() if len(words(sentence)) >= FEWEST_WORDS)


def _mixed(section: Section, tokens: int) -> Iterator[Pairs]:
    for number, passage in enumerate(short_passages(section.sentences(), tokens)):
        title = [(section.title, passage)] if section.title and not number else []
        yield [*title, *_sentences_and_rests(passage), *_windows_and_rests(passage), (_keywords(passage), passage)]


def _sentences_and_rests(passage: str) -> Iterator[tuple[str, str]]:
    sentences = split_sentences(passage)
    for index, sentence in enumerate(sentences):
        rest = join(sentences[:index] + sentences[index + 1 :])
        if WINDOW[0] <= len(words(sentence)) <= WINDOW[1] and len(words(rest)) >= WINDOW[0]:
            yield sentence, rest


def _windows_and_rests(passage: str) -> Iterator[tuple[str, str]]:
    """Yield windows whose sizes and places a hash of the passage chooses."""
    count = len(words(passage))
    for number in range(WINDOWS):
        sizes, places = divmod(digest(f"{number} {passage}"), 1 << 32)
        size = WINDOW[0] + sizes % (min(WINDOW[1], count - WINDOW[0]) - WINDOW[0] + 1)
        start = places % (count - size + 1)
        rest = join(filter(None, [some_words(passage, 0, start), some_words(passage, start + size)]))
        yield some_words(passage, start, start + size), rest


def _keywords(passage: str) -> str:
    """Return the longest words, in their order."""
    distinct = list(dict.fromkeys(word.strip(string.punctuation) for word in words(passage)))
    longest = sorted(distinct, key=len, reverse=True)[:KEYWORDS]
    return " ".join(word for word in distinct if word in longest)


HELD_OUT_PAIRS: dict[str, Callable[[Section, int], Iterator[Pairs]]] = {
    "lead_retrieval": _leads,
    "neighbours_retrieval": _neighbours,
    "halves_retrieval": _halves_of_sentences,
    "mixed_retrieval": _mixed,
}
