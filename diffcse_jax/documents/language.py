"""Which languages texts are in, judged together.

A short text alone is often unclear: "Station 3" could be English, German or Danish. Among other
texts of a collection it is not. So the shares of the languages are estimated for all texts at once:
each text counts for the languages that it may be in, by how common these are in the collection
(expectation maximisation for the weights of a mixture).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from diffcse_jax.errors import require_extra
from diffcse_jax.io import disk_errors

SAMPLE_TEXTS = 1000  # about as many texts are read, evenly spaced
SAMPLE_CHARACTERS = 500  # of each
STEPS = 20
# Letters that say nothing are added, so that the language of a few words is not certain.
NEUTRAL_LETTERS = 100
# At least, of a text to be in no language. Lists of names and of products then count as that.
DOUBT = 0.05
SMALLEST_SHARE = 0.01  # of a language that is returned
NOT_A_LANGUAGE = "zxx"  # serial numbers, lists of names and the like
# The usual languages among those that are detected.
NAMES = {
    "af": "Afrikaans",
    "am": "Amharic",
    "an": "Aragonese",
    "ar": "Arabic",
    "ary": "Arabic",
    "arz": "Arabic",
    "as": "Assamese",
    "az": "Azerbaijani",
    "ba": "Bashkir",
    "be": "Belarusian",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "br": "Breton",
    "bs": "Bosnian",
    "ca": "Catalan",
    "cs": "Czech",
    "cy": "Welsh",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "eo": "Esperanto",
    "es": "Spanish",
    "et": "Estonian",
    "eu": "Basque",
    "fa": "Persian",
    "fi": "Finnish",
    "fo": "Faroese",
    "fr": "French",
    "fy": "Frisian",
    "ga": "Irish",
    "gd": "Gaelic",
    "gl": "Galician",
    "grc": "Greek",
    "gu": "Gujarati",
    "ha": "Hausa",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "ht": "Haitian Creole",
    "hu": "Hungarian",
    "hy": "Armenian",
    "id": "Indonesian",
    "ig": "Igbo",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "jv": "Javanese",
    "ka": "Georgian",
    "kk": "Kazakh",
    "km": "Khmer",
    "kn": "Kannada",
    "ko": "Korean",
    "ku": "Kurdish",
    "ky": "Kyrgyz",
    "la": "Latin",
    "lb": "Luxembourgish",
    "lg": "Ganda",
    "lij": "Ligurian",
    "ln": "Lingala",
    "lo": "Lao",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "mg": "Malagasy",
    "mk": "Macedonian",
    "ml": "Malayalam",
    "mn": "Mongolian",
    "mr": "Marathi",
    "ms": "Malay",
    "mt": "Maltese",
    "my": "Burmese",
    "ne": "Nepali",
    "nl": "Dutch",
    "nn": "Norwegian",
    "no": "Norwegian",
    "nso": "Sepedi",
    "oc": "Occitan",
    "om": "Oromo",
    "or": "Odia",
    "pa": "Punjabi",
    "pcm": "Nigerian Pidgin",
    "pl": "Polish",
    "ps": "Pashto",
    "pt": "Portuguese",
    "qu": "Quechua",
    "ro": "Romanian",
    "ru": "Russian",
    "rw": "Kinyarwanda",
    "sa": "Sanskrit",
    "se": "Sami",
    "si": "Sinhala",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sn": "Shona",
    "so": "Somali",
    "sq": "Albanian",
    "sr": "Serbian",
    "st": "Sesotho",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "tg": "Tajik",
    "th": "Thai",
    "tk": "Turkmen",
    "tl": "Tagalog",
    "tr": "Turkish",
    "tt": "Tatar",
    "ug": "Uyghur",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "uz": "Uzbek",
    "vec": "Venetian",
    "vi": "Vietnamese",
    "vo": "Volapük",
    "wa": "Walloon",
    "wuu": "Chinese",
    "xh": "Xhosa",
    "yo": "Yoruba",
    "yue": "Chinese",
    "zh": "Chinese",
    "zu": "Zulu",
    NOT_A_LANGUAGE: "no language",
}


def languages_of(texts: Sequence[str]) -> Mapping[str, float]:
    """Return the share of the letters in each language, by its ISO 639 code, the largest first.

    `NOT_A_LANGUAGE` may be among them. Texts without letters do not count. If no text has letters,
    nothing is returned.

    Raises:
        UserError: The extra `search` is not installed.
    """
    step = max(1, math.ceil(len(texts) / SAMPLE_TEXTS))
    sample = [text[:SAMPLE_CHARACTERS] for text in texts[::step]]
    letters = np.array([sum(map(str.isalpha, text)) for text in sample], np.float64)
    chosen = np.flatnonzero(letters)
    if not len(chosen):
        return {}
    known = detector()
    ranked = [dict(known.rank(sample[row])) for row in chosen.tolist()]
    names = known.labels
    alone = np.array([[each[name] for name in names] for each in ranked], np.float64)
    in_none = alone[:, names.index(NOT_A_LANGUAGE)]
    np.maximum(in_none, DOUBT, out=in_none)
    shares = _mixture(alone, letters[chosen])
    order = np.argsort(-shares, kind="stable")
    return {names[row]: float(shares[row]) for row in order if shares[row] >= SMALLEST_SHARE}


def described(shares: Mapping[str, float]) -> str:
    """Return the largest shares for a message, such as `German 97%`."""
    largest = [*shares.items()][:3]
    return ", ".join(f"{NAMES.get(code, code)} {share:.0%}" for code, share in largest)


def _mixture(
    alone: Float[np.ndarray, "texts languages"], weights: Float[np.ndarray, " texts"]
) -> Float[np.ndarray, " languages"]:
    """Return the shares of languages in texts. `alone` has each text's probabilities by itself."""
    count = alone.shape[1]
    prior = np.full(count, 1 / count)
    shares = prior
    for _ in range(STEPS):
        likely = alone * prior
        shares = weights @ (likely / likely.sum(axis=1, keepdims=True)) / weights.sum()
        letters = shares * weights.sum() + NEUTRAL_LETTERS / count
        prior = letters / letters.sum()
    return shares


@functools.cache
def detector() -> Any:
    """Return what knows 139 languages, with probabilities that fit the length of a text."""
    library = require_extra("py3langid.langid", "search")
    place = Path("a temporary file in TMPDIR or /tmp")  # into which the model is unpacked
    with disk_errors(place, safe="Nothing was changed.", instead="set TMPDIR"):
        return library.LanguageIdentifier.from_model_file(library.MODEL_FILE, norm_probs=True)
