"""BM25, which scores texts by the words that they share with a query.

The scores are those of bm25s, in Lucene's variant. `words.py` says what a word is.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import DataError
from diffcse_jax.search.words import Words, bm25s, choose_language

K1, B = 1.2, 0.75
MOST_STEMS = 1 << 18  # words whose stems are kept in memory


class NoWordsError(DataError):
    """Texts without a word, such as those of symbols."""


class LexicalIndex:
    """The words of texts in a language, for BM25.

    `bm25` is an index of bm25s; if it is None, `build` fills one.
    """

    def __init__(self, language: str, bm25: Any = None):
        self.language = language
        self.words = Words(language)  # returns the words of a text
        self._bm25 = bm25s().BM25(k1=K1, b=B) if bm25 is None else bm25
        words = self.words

        @functools.lru_cache(MOST_STEMS)
        def stems(text: str) -> frozenset[str]:
            return frozenset(words(text))

        self.stems = stems  # returns the different words: snippets look up the same ones often

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy make an equal index, without the lock and the stemmer."""
        return type(self), (self.language, self._bm25)

    @classmethod
    def build(cls, texts: Sequence[str], language: str = "") -> "LexicalIndex":
        """Count the words of texts. An empty language is detected."""
        index = cls(language or choose_language(texts).language)
        vocabulary: dict[str, int] = {}
        rows = [
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in index.words(text, with_characters=True)
            ]
            for text in texts
        ]
        if not vocabulary:
            raise NoWordsError(
                "the texts have no words that BM25 could count. Use the mode 'dense'"
            )
        index._bm25.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return index

    @classmethod
    def load(cls, folder: Path, language: str) -> "LexicalIndex":
        """Load the files that `save` has written. Scores stay on disk."""
        return cls(language, bm25s().BM25.load(folder, mmap=True, show_progress=False))

    def save(self, folder: Path) -> None:
        """Write the files of bm25s."""
        self._bm25.save(folder, show_progress=False)

    def scores(self, query: str) -> Float32[np.ndarray, " rows"]:
        """Return the score of each text; 0 if it shares no word with the query."""
        return self._bm25.get_scores_from_ids(self._bm25.get_tokens_ids(self.words(query)))


def best_rows(scores: Float[np.ndarray, " rows"], count: int) -> Int[np.ndarray, " best"]:
    """Return the rows with the highest scores, best first. Equal scores keep their order."""
    count = min(count, len(scores))
    if not count:
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return rows[np.argsort(-scores[rows], kind="stable")[:count]]


def found_by_words(scores: Float[np.ndarray, " rows"], count: int) -> Int[np.ndarray, " best"]:
    """Return the rows with the highest BM25 scores, without those that share no word."""
    rows = np.flatnonzero(scores > 0)  # first, because partitioning many equal values takes 30 ms
    return rows[best_rows(scores[rows], count)]
