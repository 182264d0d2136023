"""Queries made of passages: sentences, windows of words, and a few rare words.

They stand for what people may ask, where a run measures how rankings agree.
"""

import collections
import itertools
import string
from collections.abc import Iterable, Mapping

import numpy as np

from diffcse_jax.data.sampling import WINDOW
from diffcse_jax.documents.sentences import some_words, split_sentences, words

RAREST = 12  # words of a passage, of which a query has some
KEYWORDS = (2, 6)
FEWEST_WORDS = 4  # in a sentence that is a query

Frequencies = Mapping[str, int]  # the number of passages that have a word


def word_frequencies(texts: Iterable[str]) -> Frequencies:
    """Return the number of texts that have each word."""
    words_of_texts = (set(_bare_words(text)) for text in texts)
    return collections.Counter(itertools.chain.from_iterable(words_of_texts))


def make_query(text: str, frequencies: Frequencies, generator: np.random.Generator) -> str:
    """Return a query that a passage might answer: a sentence, a window, or some of its rare words.

    A passage without a sentence of a usual length gives a window.
    """
    kind = generator.integers(3)
    if kind == 0:
        return _keywords(text, frequencies, generator) or _window(text, generator)
    sentences = [each for each in split_sentences(text) if _is_usual(each)] if kind == 1 else []
    if sentences:
        return sentences[generator.integers(len(sentences))]
    return _window(text, generator)


def _is_usual(sentence: str) -> bool:
    return FEWEST_WORDS <= len(words(sentence)) <= WINDOW[1]


def _window(text: str, generator: np.random.Generator) -> str:
    """Return some words that follow one another, at most as many as the text has."""
    count = len(words(text))
    shortest, longest = (min(each, count) for each in WINDOW)
    size = int(generator.integers(shortest, longest, endpoint=True))
    start = int(generator.integers(count - size, endpoint=True))
    return some_words(text, start, start + size)


def _keywords(text: str, frequencies: Frequencies, generator: np.random.Generator) -> str:
    """Return some of the rarest words in a random order; empty if the text has fewer than two."""
    distinct = dict.fromkeys(_bare_words(text))
    rarest = sorted(distinct, key=lambda word: frequencies.get(word, 0))[:RAREST]
    fewest, most = (min(each, len(rarest)) for each in KEYWORDS)
    if fewest < KEYWORDS[0]:
        return ""
    count = int(generator.integers(fewest, most, endpoint=True))
    return " ".join(rarest[place] for place in generator.permutation(len(rarest))[:count])


def _bare_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation around them."""
    bare = (word.strip(string.punctuation) for word in words(text.lower()))
    return [word for word in bare if word]
