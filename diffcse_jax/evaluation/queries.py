"""Queries made of unlabelled text: titles, sentences and other parts of passages."""

import collections
import heapq
import itertools
import string
from collections.abc import Callable, Iterable, Iterator

from diffcse_jax.config import DataConfig
from diffcse_jax.data.pairs import FEWEST_CHARACTERS, lead_and_rest, short_passages
from diffcse_jax.data.sampling import WINDOW
from diffcse_jax.data.sources import open_split
from diffcse_jax.data.split import Numbered, Split, texts_of
from diffcse_jax.documents.document import Section, digest
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.sentences import join, some_words, split_sentences, width, words
from diffcse_jax.errors import DataError, counted
from diffcse_jax.evaluation.metrics import RetrievalMetric
from diffcse_jax.hosts import report

MOST_PAIRS = 1000
MOST_DOCUMENTS = 4000  # that `queries_of_all` makes queries of
FEWEST_WORDS = 6  # in a sentence that is halved
MOST_WORDS = 64  # in the rest of a document after its lead
MOST_TOKENS = 128  # in a passage that is searched
WINDOWS = 2  # for each passage
KEYWORDS = 5  # for each passage

MIXED = "mixed_retrieval"

TrainingTexts = Callable[[], Iterable[str]]  # starts a pass over the sentences of a text
Pairs = list[tuple[str, str]]  # queries, and the texts that they should find
Query = tuple[str, str, int, int]  # a pair, and the numbers of its passage and document


def queries_of_documents(file: str, *, strict: bool = False) -> RetrievalMetric:
    """Return the dev metric `mixed_retrieval` of all documents of a file, folder or collection.

    What was read, and what was not, is printed. With `strict`, a loss raises `DataError` instead.
    """
    on_bad_line = "error" if strict else "skip"
    split = open_split(DataConfig(train_file=file, held_out=1.0, on_bad_line=on_bad_line))
    report(split.ledger)
    documents = split.held_out()
    queries = choose_queries(_queries_of(documents, split.name, MOST_TOKENS, MIXED), MOST_PAIRS)
    if len(queries) < 2:
        raise DataError(
            f"{file}: its documents give {counted(len(queries), 'quer{y}')}, and a comparison "
            "needs two. Documents with titles, or with at least two sentences, give queries"
        )
    return RetrievalMetric.of_rows(MIXED, 64, queries)


def held_out_queries(split: Split, max_length: int, metric: str, most: int) -> list[Query]:
    """Return at most `most` queries of the held-out documents for a metric of `HELD_OUT_PAIRS`.

    Args:
        split: The documents.
        max_length: The approximate number of tokens of a passage.
        metric: The name of the metric.
        most: The largest number of queries.
    """
    chosen = choose_queries(_queries_of(split.held_out(), split.name, max_length, metric), most)
    if len(chosen) < 2:
        left = f"data.held_out={split.share} of data.train_file={split.name} leaves"
        raise DataError(
            f"{left} {counted(len(chosen), 'pair{s}')} for {metric}, which needs two different "
            "ones. Hold out more documents or choose another eval.metric"
        )
    return chosen


def queries_of_all(split: Split) -> list[Query]:
    """Return queries of all documents or, of many, of a sample. A share must be held out.

    They also ask for what a run trains on, so they compare searches that need no training.
    """
    documents = split.sample(MOST_DOCUMENTS)
    return choose_queries(_queries_of(documents, split.name, MOST_TOKENS, MIXED), MOST_PAIRS)


def _queries_of(
    documents: Iterable[Numbered], name: str, max_length: int, metric: str
) -> Iterator[Query]:
    """Yield the queries of documents."""
    passages = itertools.count()
    unusable = Ledger(name)  # pairs whose texts are empty or too long
    for number, document in documents:
        for section in document.sections:
            for pairs in HELD_OUT_PAIRS[metric](section, max_length):
                passage = next(passages)
                yield from (
                    (*pair, passage, number) for pair in pairs if usable(pair, Place(), unusable)
                )


def choose_queries(
    queries: Iterable[Query], limit: int, order: Callable[[str], int] = digest
) -> list[Query]:
    """Choose at most `limit` queries, whatever order they come in.

    They are those with the lowest `order`, a hash. Chosen queries of different passages share no
    text. Memory holds at most four times the limit.
    """
    lowest: dict[int, Query] = {}
    for query in queries:
        lowest[order(" ".join(query[:2]))] = query
        if len(lowest) > 4 * limit:
            lowest = dict(heapq.nsmallest(2 * limit, lowest.items()))
    candidates = [query for _, query in sorted(lowest.items())[: 2 * limit]]
    places = {(text, passage) for *texts, passage, _ in candidates for text in texts}
    occurrences = collections.Counter(text for text, _ in places)
    shared = {text for text, count in occurrences.items() if count > 1}
    return [query for query in candidates if query[0] != query[1] and shared.isdisjoint(query[:2])][
        :limit
    ]


def training_halves(training: TrainingTexts, most: int) -> Pairs:
    """Return the halves of the first `most` different sentences.

    Short ones are used only if there are no others.
    """
    sentences: dict[str, None] = {}
    for fewest in (FEWEST_WORDS, 2):
        for sentence in training():
            if len(words(sentence)) >= fewest:
                sentences[sentence] = None
            if len(sentences) == most:
                break
        if len(sentences) >= 2:
            break
    return [halve(sentence) for sentence in sentences]


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
    return (
        [halve(sentence)]
        for sentence in section.sentences()
        if len(words(sentence)) >= FEWEST_WORDS
    )


def _mixed(section: Section, tokens: int) -> Iterator[Pairs]:
    for number, passage in enumerate(short_passages(section.sentences(), tokens)):
        title = [(section.title, passage)] if section.title and not number else []
        yield [
            *title,
            *_sentences_and_rests(passage),
            *_windows_and_rests(passage),
            (_keywords(passage), passage),
        ]


def _sentences_and_rests(passage: str) -> Iterator[tuple[str, str]]:
    sentences = split_sentences(passage)
    for index, sentence in enumerate(sentences):
        rest = join(sentences[:index] + sentences[index + 1 :])
        if WINDOW[0] <= len(words(sentence)) <= WINDOW[1] and len(words(rest)) >= WINDOW[0]:
            yield sentence, rest


def _windows_and_rests(passage: str) -> Iterator[tuple[str, str]]:
    """Yield windows of a passage and what is left of it.

    The passage has `pairs.FEWEST_WORDS` words or more. Its hash chooses sizes and places.
    """
    count = len(words(passage))
    (shortest, longest) = WINDOW
    for number in range(WINDOWS):
        random_size, random_start = divmod(digest(f"{number} {passage}"), 1 << 32)
        size = shortest + random_size % (min(longest, count - shortest) - shortest + 1)
        start = random_start % (count - size + 1)
        rest = join(
            filter(None, [some_words(passage, 0, start), some_words(passage, start + size)])
        )
        yield some_words(passage, start, start + size), rest


def _keywords(passage: str) -> str:
    """Return the longest words, in the order of the passage."""
    distinct = list(dict.fromkeys(word.strip(string.punctuation) for word in words(passage)))
    longest = sorted(distinct, key=len, reverse=True)[:KEYWORDS]
    return " ".join(word for word in distinct if word in longest)


HELD_OUT_PAIRS: dict[str, Callable[[Section, int], Iterator[Pairs]]] = {
    "lead_retrieval": _leads,
    "neighbours_retrieval": _neighbours,
    "halves_retrieval": _halves_of_sentences,
    MIXED: _mixed,
}
