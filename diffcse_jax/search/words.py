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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from diffcse_jax.documents.language import NAMES, NOT_A_LANGUAGE, described, languages_of
from diffcse_jax.documents.sentences import CJK, with_few_marks
from diffcse_jax.errors import ConfigError, require_extra

# Change this number when texts become other words. BM25 of older indexes is then counted again.
WORD_RULES = 5
NO_LANGUAGE = "none"  # neither stems nor stop words
MAIN_SHARE = 0.8  # of the letters in one language; with a smaller share, the language is unclear

DOTLESS_I = "\u0131"

_CHARACTER = r"[\p{L}\p{M}\p{N}]"
_UNSPACED = rf"[{CJK}\p{{scx=Hang}}\p{{Line_Break=SA}}]"
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
# Arabic vowel signs and the stroke that lengthens a word; Hebrew points and accents.
_POINTS = _compiled(r"[\u0640[\p{M}&&[\p{scx=Arab}\p{scx=Hebr}]]]+")
_WORDS_OF_ONE = _compiled(r"[\p{Han}\p{Hangul}]")
_HAS_UNSPACED = _compiled(rf"[{_CHARACTER}&&{_UNSPACED}]")
_TOKENS = _compiled(f"{_tokens()})")
_MIXED_TOKENS = _compiled(rf"{_tokens('--' + _UNSPACED)} | [{_CHARACTER}&&{_UNSPACED}]++)")
_ACCENTS = _compiled(r"(?<=[\p{Latin}\u0435]\p{M}*)\p{Mn}+")  # also of the Russian \u0451
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
# Digits in groups of three, or as in India: `1,000`, `1.000.000,50`, `1'000`, `1_000`, `1,00,000`.
_GROUPED = _compiled(
    rf"""
    (?<whole>
    \p{{Nd}}{{1,3}} (?<joint>[,._]|{_APOSTROPHE}) \p{{Nd}}{{3}} (?:\g<joint>\p{{Nd}}{{3}})*
    | \p{{Nd}}{{1,2}} (?:,\p{{Nd}}{{2}})+ ,\p{{Nd}}{{3}} )
    (?<decimals> (?!\g<joint>)[.,]\p{{Nd}}+ )?
    """
)
_OTHER_DIGITS = _compiled(r"[\p{Nd}--[0-9]]")
_SEPARATORS_OF_DIGITS = str.maketrans({"\u066b": ".", "\u066c": ","})  # Arabic
_SPACE_IN_NUMBER = _compiled(r"(?<=\p{Nd})[\u00a0\u2009\u202f](?=\p{Nd}{3}(?!\p{Nd}))")
# Arabic letters without the hamza, and what Persian and Arabic write differently.
_ALEF = dict.fromkeys("\u0622\u0623\u0625\u0671", "\u0627")
_AS_IN_ARABIC = str.maketrans(
    {"\u06a9": "\u0643", **dict.fromkeys("\u0626\u0649\u06cc", "\u064a"), "\u0624": "\u0648"}
    | _ALEF
)
_AS_IN_PERSIAN = str.maketrans(
    {"\u0643": "\u06a9", **dict.fromkeys("\u0626\u0649\u064a", "\u06cc"), "\u0624": "\u0648"}
    | _ALEF
)
# Letters that are not a letter and an accent: strokes and ligatures.
_PLAIN_LETTERS = str.maketrans(
    {
        DOTLESS_I: "i",
        "\u0142": "l",
        "\u00f8": "o",
        "\u0111": "d",
        "\u00f0": "d",
        "\u00e6": "ae",
        "\u0153": "oe",
    }
)
_PRONOUNS = {"english": "i"}  # single letters that are hardly ever a name


class Words:
    """Reads the words of texts in a language."""

    def __init__(self, language: str):
        self.language = language
        self._stop_words = frozenset(map(self._folded, stop_words(language)))
        stem = _stemmer(language)
        lock = threading.Lock()

        @functools.lru_cache(1 << 20)
        def stems_of(letter: str, token: str, is_shouted: bool) -> tuple[str, ...]:
            """Return the stems of one of a text's tokens."""
            words = self._words(letter, token, is_shouted=is_shouted)
            with lock:  # threads must not use a stemmer at the same time
                stems = [*map(stem, words)]
            return tuple(filter(None, map(without_accents, stems)))

        self._stems_of = stems_of

    def __call__(self, text: str, *, with_characters: bool = False) -> list[str]:
        """Return the stems of the words, in order, without stop words.

        Args:
            text: A text or a query.
            with_characters: Also return each Chinese, Japanese or Korean character that may be a
                word, as a query of this character alone looks for it.
        """
        tokens = tokens_of(text, with_characters=with_characters)
        is_shouted = _is_shouted(text, tokens)
        stems = (self._stems_of(letter, token, is_shouted) for letter, token in tokens)
        return list(itertools.chain.from_iterable(stems))

    def ignored(self, text: str) -> list[str]:
        """Return the tokens of a text that are stop words, each once."""
        tokens = tokens_of(text)
        is_shouted = _is_shouted(text, tokens)
        without_words = (
            letter or token
            for letter, token in tokens
            if parts_of(letter or token) and not self._words(letter, token, is_shouted=is_shouted)
        )
        return [*dict.fromkeys(without_words)]

    def _words(self, letter: str, token: str, *, is_shouted: bool) -> list[str]:
        """Return the words of a token. `IT` is not a stop word, unless the text is shouted."""
        if letter:
            word = self._folded(letter)
            return [word] if word != _PRONOUNS.get(self.language) else []
        words = list(map(self._folded, parts_of(token)))
        if len(token) > 1 and token.isupper() and not is_shouted:
            return words
        return [word for word in words if word not in self._stop_words]

    def _folded(self, word: str) -> str:
        """Return a word in one case and with the letters that the stemmer expects."""
        word = fold_case(word, is_turkish=self.language == "turkish")
        is_persian = self.language == "persian"
        return word.translate(_AS_IN_PERSIAN if is_persian else _AS_IN_ARABIC)


def _stemmer(language: str) -> Callable[[str], str]:
    """Return the function that reduces words to stems; without a language, they stay."""
    stemmer = require_extra("Stemmer", "search")
    if language == NO_LANGUAGE:
        return str
    if language not in stemmer.algorithms():
        known = ", ".join([*stemmer.algorithms(), NO_LANGUAGE])
        raise ConfigError(f"language={language!r}: there is no stemmer for it. Use one of: {known}")
    return stemmer.Stemmer(language).stemWord


def _is_shouted(text: str, tokens: Sequence[tuple[str, str]]) -> bool:
    """Return whether a text of several words is in capitals, so that these say nothing."""
    return len(tokens) > 1 and text.isupper()


def tokens_of(text: str, *, with_characters: bool = False) -> list[tuple[str, str]]:
    """Return a text's tokens in order: each is a letter that is a name, or else any other token.

    One of a pair is empty. A letter that is a name is not a stop word: `vitamin A`. Text without
    spaces becomes pairs of characters, `with_characters` followed by those that may be words.
    """
    if text.isascii():
        return _TOKENS.findall(text)
    text = with_few_marks(_IGNORED.sub("", text))
    text = text.replace("\u00b4", "'").replace("\u02bc", "'")  # which NFKC does not turn into one
    text = unicodedata.normalize("NFKC", _SPACE_IN_NUMBER.sub(",", text))
    text = _POINTS.sub("", text).translate(_SEPARATORS_OF_DIGITS)
    text = _OTHER_DIGITS.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    if not _HAS_UNSPACED.search(text):
        return _TOKENS.findall(text)
    tokens: list[tuple[str, str]] = []
    for letter, token in _MIXED_TOKENS.findall(text):
        is_unspaced = len(token) > 1 and _HAS_UNSPACED.match(token)
        pairs = map("".join, itertools.pairwise(token)) if is_unspaced else [token]
        tokens += [(letter, pair) for pair in pairs]
        if is_unspaced and with_characters:
            tokens += [("", character) for character in _WORDS_OF_ONE.findall(token)]
    return tokens


def parts_of(token: str) -> list[str]:
    """Return a token's parts in order, and after them the whole: `a.b_c` has a, b, c, bc and abc.

    The joints `.`, `-` and `_` fall away, so that `parse_config` and `parseConfig` have one whole.
    """
    if token.isalpha() and (token.islower() or token[1:].islower()):
        return [token]
    if grouped := _GROUPED.fullmatch(token):
        pieces = grouped["whole"].split(grouped["joint"] or ",")
        return [*pieces, *parts_of("".join(pieces) + (grouped["decimals"] or ""))]
    for level in _LEVELS:
        pieces = level.boundary.split(token)
        if len(pieces) > 1:
            kept = filter(level.is_part, pieces)
            parts = list(itertools.chain.from_iterable(map(parts_of, kept)))
            whole = _REMOVED_JOINTS.sub("", token)
            return [*parts, whole] if level.has_whole and parts != [whole] else parts
    return [token]


def without_accents(word: str) -> str:
    """Return a word without the accents of Latin letters: `cafe` finds what `café` does."""
    if word.isascii():
        return word
    decomposed = unicodedata.normalize("NFD", word)
    return unicodedata.normalize("NFC", _ACCENTS.sub("", decomposed)).translate(_PLAIN_LETTERS)


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


def stemmer_of(code: str) -> str:
    """Return the stemmer of a language, by its ISO 639 code; `NO_LANGUAGE` if there is none."""
    name = NAMES.get(code, "").lower()
    return name if name in require_extra("Stemmer", "search").algorithms() else NO_LANGUAGE


class LanguageChoice(NamedTuple):
    """How BM25 reads the words of texts, and why.

    Attributes:
        language: A stemmer, or `NO_LANGUAGE`.
        shares: Of the languages in the texts, by their ISO 639 codes.
    """

    language: str
    shares: Mapping[str, float]

    def __str__(self) -> str:
        shares = described(self.shares)
        if self.language != NO_LANGUAGE:
            words = "stems and stop words" if stop_words(self.language) else "stems"
            return f"{self.language} {words} (languages of the texts: {shares})"
        main = [code for code, share in self.shares.items() if share >= MAIN_SHARE]
        if main and main[0] != NOT_A_LANGUAGE:
            reason = f"there is no stemmer for {NAMES.get(main[0], main[0])}"
        elif main or not self.shares:
            reason = "the texts are not in a language"
        else:
            reason = f"the language of the texts is unclear ({shares})"
        return f"neither stems nor stop words, because {reason}"


def choose_language(texts: Sequence[str]) -> LanguageChoice:
    """Return the language of most texts, or `NO_LANGUAGE` if it is unclear or has no stemmer."""
    shares = languages_of(texts)
    by_stemmer = collections.defaultdict[str, float](float)
    for code, share in shares.items():
        by_stemmer[stemmer_of(code)] += share
    main = [language for language, share in by_stemmer.items() if share >= MAIN_SHARE]
    return LanguageChoice(main[0] if main else NO_LANGUAGE, shares)


def stop_words(language: str) -> frozenset[str]:
    """Return the words that BM25 ignores: Lucene's 33 and `i` in English, elsewhere bm25s's.

    They are empty for a language for which bm25s has none.
    """
    name = "EN" if language == "english" else language.upper()
    words = getattr(bm25s().stopwords, f"STOPWORDS_{name}", ())
    return frozenset(words) | set(_PRONOUNS.get(language, ""))


def bm25s() -> Any:
    """Return the library, which logs warnings only."""
    library = require_extra("bm25s", "search")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library
