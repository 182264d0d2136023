"""How a text becomes the words that BM25 counts.

A word is a run of letters and digits; single letters and digits count. What `.`, `-` or `_` join,
and what is written like `userProfile` or `2.14`, counts by its parts and as a whole. `C++`, `C#`
and `.NET` are words. Words are in one case and reduced to their stems, without stop words. Chinese,
Japanese, Korean, Thai, Lao, Khmer and Burmese are read as pairs of neighbouring characters.
"""

import collections
import functools
import itertools
import logging
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import regex

from diffcse_jax.errors import ConfigError, require_extra

# The languages that are detected. For each, bm25s has stop words and there is a stemmer.
DETECTED = (
    "danish",
    "dutch",
    "english",
    "french",
    "german",
    "italian",
    "norwegian",
    "portuguese",
    "russian",
    "spanish",
    "swedish",
    "turkish",
)
FEWEST_STOP_WORDS = 0.1  # the share of stop words in a text whose language is detected
DETECTION_TEXTS = 1000  # about as many texts are read to detect the language

DOTLESS_I = "\u0131"
# Unicode's Stream-Safe Text Format. Normalisation sorts runs of marks, in quadratic time.
LONGEST_RUN_OF_MARKS = 30

_CHARACTER = r"[\p{L}\p{M}\p{N}]"
_UNSPACED = r"[\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{scx=Hang}\p{Line_Break=SA}]"
_APOSTROPHE = r"['\u2019`]"
_JOINT = rf"(?:_++|[-\u2010.]|{_APOSTROPHE}|,(?<=\p{{Nd}},)(?=\p{{Nd}}))"


def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern, regex.V1 | regex.VERBOSE)


def _tokens(other_than: str = "") -> str:
    """Return the pattern of tokens in scripts with spaces."""
    run = rf"[[\p{{L}}\p{{N}}]{other_than}][{_CHARACTER}{other_than}]*+"
    return rf"""
        # A letter of its own after a word, if it is a capital or ends a clause: `vitamin A is`.
        (\p{{L}}) (?!{_CHARACTER}) (?<={_CHARACTER},?[ ].) (?!_|\+\+|\#|{_JOINT}{_CHARACTER})
        (?: (?<=\p{{Lu}}) | (?=[.?!;:)\n]|\s*+\Z) )
        | ( (?:\.(?<!(?:[_.]|{_CHARACTER})\.)(?=\p{{L}}))?+  # `.NET`
            {run} (?:{_JOINT}{run})*+
            (?:\+\+|\#(?<=(?<!{_CHARACTER})\p{{L}}\#))?+  # `C++`, `C#`
    """


_IGNORED = _compiled(r"\p{Default_Ignorable_Code_Point}+")
_MARKS = _compiled(rf"(\p{{M}}{{{LONGEST_RUN_OF_MARKS}}})\p{{M}}++")
_HAS_UNSPACED = _compiled(rf"[{_CHARACTER}&&{_UNSPACED}]")
_TOKENS = _compiled(f"{_tokens()})")
_MIXED_TOKENS = _compiled(rf"{_tokens('--' + _UNSPACED)} | [{_CHARACTER}&&{_UNSPACED}]++)")
_GREEK = _compiled(r"\p{Greek}")
_GREEK_ACCENTS = _compiled(r"(?<=\p{Greek}\p{M}*)[\u0300\u0301\u0313\u0314\u0342]")
# What falls away when parts are joined. Between digits it stays: 2019-11 is not 201911.
_REMOVED_JOINTS = _compiled(
    r"(?<=[\p{L}\p{M}\p{N}--\p{Nd}])(?:_++|[-\u2010.]) | (?<=\p{Nd})(?:_++|[-\u2010.])(?!\p{Nd})"
)


class _Level(NamedTuple):
    """One way in which tokens consist of parts."""

    boundary: regex.Pattern[str]
    has_whole: bool = True  # whether the parts also count joined
    has_letters: bool = False  # whether single letters are parts: `T-cell`, but not `e.g.`

    def is_part(self, piece: str) -> bool:
        """Whether a piece counts as a word."""
        if len(piece) == 1:
            return piece.isdigit() or (self.has_letters and piece.isalpha())
        return bool(piece.strip("+#"))


_LEVELS = (
    _Level(_compiled(_APOSTROPHE), has_whole=False),  # `l'heure`, `don't`
    _Level(_compiled(r"\.(?!\p{Nd}) | (?<!\p{Nd})\.")),  # `example.com`
    _Level(_compiled(r"_+ | [-\u2010]"), has_letters=True),  # `parse_config`, `ERR-4711`
    _Level(
        _compiled(
            r"""
            (?<=[\p{Ll}\p{Nd}])(?=\p{Lu})                                  # `userProfile`
            | (?<=\p{Lu})(?=\p{Lu}\p{Ll})(?!\p{Lu}s(?!\p{Ll}))             # `HTTPServer`; `PDFs`
            | (?<=\p{L})(?=\p{Nd}+[.,]) | (?=\p{L})(?<=[.,]\p{Nd}+)        # `python3.11`, `v1.2.3`
            | (?<=\p{L}{2})(?=\p{Nd}{2}) | (?<=\p{Nd}{2})(?=\p{L}{2})      # `ISO9001`, not `B12`
            | (?=\+\+|\#)                                                  # `notepad++`
            """
        )
    ),
    _Level(_compiled("[.,]")),  # `2.14`
)
_PRONOUNS = {"english": "i"}  # single letters that are hardly ever a name


class Words:
    """Reads the words of texts in a language."""

    def __init__(self, language: str):
        stemmer = require_extra("Stemmer", "search")
        if language not in stemmer.algorithms():
            known = ", ".join(stemmer.algorithms())
            raise ConfigError(
                f"language={language!r}: there is no stemmer for it. Use one of: {known}"
            )
        self.language = language
        fold = functools.partial(fold_case, is_turkish=language == "turkish")
        ignored = set(map(fold, stop_words(language)))
        stem = stemmer.Stemmer(language).stemWord
        lock = threading.Lock()

        @functools.lru_cache(1 << 20)
        def stems_of(letter: str, token: str) -> tuple[str, ...]:
            """Return the stems of one of a text's tokens."""
            if letter:
                words = [fold(letter)] if fold(letter) != _PRONOUNS.get(language) else []
            else:
                words = [word for word in map(fold, parts_of(token)) if word not in ignored]
            with lock:  # threads must not use a stemmer at the same time
                stems = [stem(word).replace(DOTLESS_I, "i") for word in words]
            return tuple(filter(None, stems))

        self._stems_of = stems_of

    def __call__(self, text: str) -> list[str]:
        """Return the stems of the words, in order, without stop words."""
        stems = itertools.starmap(self._stems_of, tokens_of(text))
        return list(itertools.chain.from_iterable(stems))


def tokens_of(text: str) -> list[tuple[str, str]]:
    """Return a text's tokens in order: each is a letter that is a name, or else any other token.

    One of a pair is empty. A letter that is a name is not a stop word: `vitamin A`.
    """
    if text.isascii():
        return _TOKENS.findall(text)
    text = _MARKS.sub(r"\1", _IGNORED.sub("", text))
    text = text.replace("\u00b4", "'").replace("\u02bc", "'")  # which NFKC does not turn into one
    text = unicodedata.normalize("NFKC", text)
    if not _HAS_UNSPACED.search(text):
        return _TOKENS.findall(text)
    tokens: list[tuple[str, str]] = []
    for letter, token in _MIXED_TOKENS.findall(text):
        is_unspaced = len(token) > 1 and _HAS_UNSPACED.match(token)
        pairs = map("".join, itertools.pairwise(token)) if is_unspaced else [token]
        tokens += [(letter, pair) for pair in pairs]
    return tokens


def parts_of(token: str) -> list[str]:
    """Return a token's parts in order, and after them the whole: `a.b_c` has a, b, c, bc and abc.

    The joints `.`, `-` and `_` fall away, so that `parse_config` and `parseConfig` have one whole.
    """
    if token.isalpha() and (token.islower() or token[1:].islower()):
        return [token]
    for level in _LEVELS:
        pieces = level.boundary.split(token)
        if len(pieces) > 1:
            kept = filter(level.is_part, pieces)
            parts = list(itertools.chain.from_iterable(map(parts_of, kept)))
            whole = _REMOVED_JOINTS.sub("", token)
            return [*parts, whole] if level.has_whole and parts != [whole] else parts
    return [token]


def fold_case(word: str, is_turkish: bool = False) -> str:
    """Return a word in one case: the same for a word and for the word in capitals.

    Turkish has i with and without a dot, and so have the capitals. Elsewhere all four are i,
    because texts contain Turkish names. Greek capitals have no accents.
    """
    if is_turkish:
        word = word.replace("I", DOTLESS_I)
    word = word.replace("\u0130", "i").casefold().replace("i\u0307", "i")
    if not is_turkish:
        word = word.replace(DOTLESS_I, "i")
    if _GREEK.search(word):
        decomposed = unicodedata.normalize("NFD", word)
        word = unicodedata.normalize("NFC", _GREEK_ACCENTS.sub("", decomposed))
    return word


def detect_language(texts: Sequence[str]) -> str:
    """Return the language with the most stop words in the texts; English if none has many."""
    sample = texts[:: max(1, len(texts) // DETECTION_TEXTS)]
    pairs = itertools.chain.from_iterable(map(tokens_of, sample))
    parts = itertools.chain.from_iterable(parts_of(letter or token) for letter, token in pairs)
    counts = collections.Counter(map(fold_case, parts))
    found = {}
    for language in DETECTED:
        ignored = set(map(fold_case, stop_words(language, all_of_them=True)))
        found[language] = sum(counts[word] for word in ignored)
    best = max(DETECTED, key=found.__getitem__)
    return best if found[best] > FEWEST_STOP_WORDS * counts.total() else "english"


def stop_words(language: str, all_of_them: bool = False) -> frozenset[str]:
    """Return the words that BM25 ignores.

    English has Lucene's 33 and `i`, or all 179. Other languages have those of bm25s.
    """
    name = language.upper()
    if language == "english":
        name = "EN_PLUS" if all_of_them else "EN"
    found = getattr(bm25s().stopwords, f"STOPWORDS_{name}", ())
    return frozenset(found) | set(_PRONOUNS.get(language, ""))


def bm25s() -> Any:
    """Return the library, which logs warnings only."""
    library = require_extra("bm25s", "search")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library
