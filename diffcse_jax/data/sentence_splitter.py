"""Split running text into sentences by rules for languages that end sentences with a full stop."""

import itertools
import re
from collections.abc import Iterator, Sequence

WIDTHS = range(40, 121)  # characters of the longest line of wrapped text
FEWEST_CHARACTERS = 12  # of a sentence; shorter text, such as the number of an item, joins what follows

SENTENCE_END = re.compile(r"(?<=[.?!])[\"')]?\s+")
END = re.compile(SENTENCE_END.pattern + r"|(?<=[\u3002\uff01\uff1f])[\u300d\u300f\u201d\uff09]?\s*")
ABBREVIATION = re.compile(
    r"\b(e\.?g|i\.?e|etc|vs|cf|eqs?|fig|no|vol|pp|al|resp|approx|dr|mr|st|[A-Z])\.$", re.IGNORECASE
)


def sentences_of(lines: Sequence[str]) -> list[str]:
    """Return the sentences of lines of text, without those that have neither letters nor digits."""
    found = (sentence for paragraph in paragraphs(lines) for sentence in split_sentences(paragraph))
    return [sentence for sentence in found if any(map(str.isalnum, sentence))]


def paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Join lines that were wrapped to a width, and yield other lines alone. Blank lines end a paragraph."""
    for is_text, group in itertools.groupby((line.strip() for line in lines), bool):
        block = list(group)
        if is_text and _is_wrapped(block):
            yield " ".join(block)
        elif is_text:
            yield from block


def split_sentences(text: str) -> list[str]:
    """Split a paragraph into sentences, which together have all of its text.

    A sentence ends at `.`, `?` or `!` before white space, and at the Chinese and Japanese forms anywhere. It does not
    end with an abbreviation, and the next one does not begin in lower case unless the whole text is in lower case.
    """
    lower_case = not any(map(str.isupper, text))
    found, start = [], 0
    for gap in END.finditer(text):
        begun = text[start : gap.end()].strip()
        if len(begun) < FEWEST_CHARACTERS or ABBREVIATION.search(text[start : gap.start()]):
            continue
        if lower_case or not text[gap.end() : gap.end() + 1].islower():
            found.append(begun)
            start = gap.end()
    rest = text[start:].strip()
    if found and len(rest) < FEWEST_CHARACTERS:
        return [*found[:-1], f"{found[-1]} {rest}".strip()]
    return [*found, rest] if rest else found


def _is_wrapped(lines: Sequence[str]) -> bool:
    """Tell whether all lines but the last fill a width, and a sentence continues from one line to the next."""
    longest = max(map(len, lines))
    return (
        longest in WIDTHS
        and all(len(line) > 0.6 * longest for line in lines[:-1])
        and any(line[-1] not in ".?!:;" and following[0].islower() for line, following in itertools.pairwise(lines))
    )
