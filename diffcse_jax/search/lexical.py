"""BM25, which scores texts by the words that they share with a query, and its combination with embeddings.

The scores are those of bm25s, in Lucene's variant. Words are in lower case and reduced to their stems, without stop
words. Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese are always read as pairs of neighbouring characters.
"""

import collections
import functools
import itertools
import logging
import threading
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import regex
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import ConfigError, DataError, require_extra

K1, B = 1.2, 0.75
# The languages that are detected. For each, bm25s has stop words and there is a stemmer.
DETECTED = ("danish", "dutch", "english", "french", "german", "italian", "norwegian", "portuguese", "russian",
            "spanish", "swedish", "turkish")  # fmt: skip
FEWEST_STOP_WORDS = 0.1  # the share of stop words in a text whose language is detected
DETECTION_TEXTS = 1000  # about as many texts are read to detect the language

CANDIDATES = 100  # best rows of each half, whose scores are combined
DEFAULT_WEIGHT = 0.1  # of BM25; docs/records/search.md has the measurement
WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))

_LETTERS = r"[\p{L}\p{M}\p{N}_]"
_SCRIPTS = r"[\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{scx=Hang}\p{Line_Break=SA}]"
_UNSPACED = regex.compile(rf"[{_LETTERS}&&{_SCRIPTS}]", regex.V1)
_WORD = regex.compile(rf"[{_LETTERS}&&{_SCRIPTS}]+|[{_LETTERS}--{_SCRIPTS}]{{2,}}", regex.V1)


class LexicalIndex:
    """The words of texts in a language, for BM25. `bm25` is an index of bm25s; if it is None, `build` fills one."""

    def __init__(self, language: str, bm25: Any = None):
        stemmer = require_extra("Stemmer", "search")
        if language not in stemmer.algorithms():
            known = ", ".join(stemmer.algorithms())
            raise ConfigError(f"language={language!r}: there is no stemmer for it. Use one of: {known}")
        self.language = language
        self._bm25 = _bm25s().BM25(k1=K1, b=B) if bm25 is None else bm25
        ignored, stem, lock = stop_words(language), stemmer.Stemmer(language).stemWord, threading.Lock()

        @functools.lru_cache(1 << 20)
        def stem_of(word: str) -> str:
            """Return the stem of a word, or an empty string for a stop word."""
            with lock:  # threads must not use a stemmer at the same time
                return "" if word in ignored else stem(word)

        self._stem = stem_of

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy make an equal index, without the lock and the stemmer."""
        return type(self), (self.language, self._bm25)

    @classmethod
    def build(cls, texts: Sequence[str], language: str = "") -> "LexicalIndex":
        """Count the words of texts. If no language is given, it is detected."""
        index = cls(language or detect_language(texts))
        vocabulary: dict[str, int] = {}
        rows = [[vocabulary.setdefault(word, len(vocabulary)) for word in index.words(text)] for text in texts]
        if not vocabulary:
            raise DataError("the texts contain no words that BM25 could count. Use mode='dense'")
        index._bm25.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return index

    @classmethod
    def load(cls, folder: Path, language: str) -> "LexicalIndex":
        """Load the files that `save` has written. Scores stay on disk."""
        return cls(language, _bm25s().BM25.load(folder, mmap=True, show_progress=False))

    def save(self, folder: Path) -> None:
        """Write the files of bm25s."""
        self._bm25.save(folder, show_progress=False)

    def scores(self, query: str) -> Float32[np.ndarray, " rows"]:
        """Return the score of each text; 0 if it shares no word with the query."""
        return self._bm25.get_scores_from_ids(self._bm25.get_tokens_ids(self.words(query)))

    def words(self, text: str) -> list[str]:
        """Return the stems of the words, in order, without stop words."""
        return list(filter(None, map(self._stem, split_words(text))))


def split_words(text: str) -> list[str]:
    """Return words of two characters or more in lower case, and pairs of characters of scripts without spaces."""
    text = unicodedata.normalize("NFKC", text).lower()  # in this order: NFKC turns ™ into TM
    found = _WORD.findall(text)
    if not _UNSPACED.search(text):
        return found
    words: list[str] = []
    for word in found:
        is_unspaced = len(word) > 1 and _UNSPACED.match(word)
        words += map("".join, itertools.pairwise(word)) if is_unspaced else [word]
    return words


def detect_language(texts: Sequence[str]) -> str:
    """Return the language with the most stop words in the texts; English if no language has many."""
    sample = texts[:: max(1, len(texts) // DETECTION_TEXTS)]
    counts = collections.Counter(word for text in sample for word in split_words(text))
    found = {language: sum(counts[word] for word in stop_words(language, all_of_them=True)) for language in DETECTED}
    best = max(DETECTED, key=found.__getitem__)
    return best if found[best] > FEWEST_STOP_WORDS * counts.total() else "english"


def stop_words(language: str, all_of_them: bool = False) -> frozenset[str]:
    """Return the words that BM25 ignores: Lucene's 33 for English (or all 179), and bm25s' for other languages."""
    name = language.upper()
    if language == "english":
        name = "EN_PLUS" if all_of_them else "EN"
    return frozenset(getattr(_bm25s().stopwords, f"STOPWORDS_{name}", ()))


def _bm25s() -> Any:
    bm25s = require_extra("bm25s", "search")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def best_rows(scores: Float[np.ndarray, " rows"], count: int) -> Int[np.ndarray, " best"]:
    """Return the rows with the highest scores, best first. Rows with equal scores keep their order."""
    count = min(count, len(scores))
    if not count:
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return rows[np.argsort(-scores[rows], kind="stable")[:count]]


def found_by_words(scores: Float[np.ndarray, " rows"], count: int) -> Int[np.ndarray, " best"]:
    """Return the rows with the highest BM25 scores, without those that share no word with the query."""
    rows = np.flatnonzero(scores > 0)  # first, because partitioning many equal values takes 30 ms
    return rows[best_rows(scores[rows], count)]


def combine(
    dense: Float[np.ndarray, " candidates"],
    lexical: Float[np.ndarray, " candidates"],
    weight: float,
    all_dense: Float[np.ndarray, " sample"],
    all_lexical: Float[np.ndarray, " rows"],
) -> Float[np.ndarray, " candidates"]:
    """Return the weighted mean of two z-scores: `weight` for BM25, the rest for the embeddings.

    Args:
        dense: Cosine similarities of a query's candidates.
        lexical: BM25 scores of the same candidates.
        weight: From 0 (embeddings only) to 1 (BM25 only).
        all_dense: Cosine similarities of all rows, or of a sample, whose mean and deviation standardise.
        all_lexical: BM25 scores of all rows, whose mean and deviation standardise.
    """
    return (1 - weight) * _standardised(dense, all_dense) + weight * _standardised(lexical, all_lexical)


def _standardised(
    scores: Float[np.ndarray, " candidates"], of: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " candidates"]:
    scale = of.std() if len(of) else 0
    return (scores - of.mean()) / scale if scale > 1e-9 else np.zeros_like(scores)


def choose_weight(
    dense: Float[np.ndarray, "queries rows"],
    lexical: Float[np.ndarray, "queries rows"],
    relevant: Sequence[Collection[int]],
) -> float:
    """Choose the weight of BM25 for held-out queries, each with the rows that it should find, by nDCG@10.

    `dense` are cosine similarities, and `lexical` are BM25 scores. The weight is the default, unless another one of
    `WEIGHTS` is better by more than one standard error over the queries.
    """
    tried = [DEFAULT_WEIGHT, *WEIGHTS]
    gains = np.zeros((len(relevant), len(tried)))
    for query, (by_cosine, by_words, wanted) in enumerate(zip(dense, lexical, relevant, strict=True)):
        for column, weight in enumerate(tried):
            scores = combine(by_cosine, by_words, weight, by_cosine, by_words)
            gains[query, column] = ndcg(best_rows(scores, 10), dict.fromkeys(wanted, 1.0))
    if not len(gains):
        return DEFAULT_WEIGHT
    best = int(gains.mean(axis=0).argmax())
    gained = gains[:, best] - gains[:, 0]
    return tried[best] if gained.mean() > gained.std() / len(gained) ** 0.5 else DEFAULT_WEIGHT


def ndcg(order: Int[np.ndarray, " k"], grades: Mapping[int, float]) -> float:
    """Return nDCG@10 of a ranking, from 0 to 1; rows without a grade count 0."""
    discounts = 1 / np.log2(np.arange(2, 12))
    ideal = np.sort([*grades.values()])[::-1][:10]
    found = np.array([grades.get(row, 0) for row in order[:10].tolist()])
    return float(found @ discounts[: len(found)] / (ideal @ discounts[: len(ideal)]))
