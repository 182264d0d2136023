"""Running text as sentences, by rules that know no language but that many end sentences with a full stop.

Lines that were broken to fit a width are joined; other line ends are ends of sentences (titles, items of lists, one
sentence a line). A sentence ends at `.`, `?` or `!` before white space, and at their Chinese and Japanese
forms anywhere.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

WIDTHS = range(40, 121)  # characters of the longest line of text that was broken to fit a width
FEWEST_CHARACTERS = 12  # of a sentence; what is shorter, such as the number of an item, goes with what follows

SENTENCE_END = re.compile(r"(?<=[.?!])[\"')]?\s+")
END = re.compile(SENTENCE_END.pattern + r"|(?<=[\u3002\uff01\uff1f])[\u300d\u300f\u201d\uff09]?\s*")
ABBREVIATION = re.compile(
    r"\b(e\.?g|i\.?e|etc|vs|cf|eqs?|fig|no|vol|pp|al|resp|approx|dr|mr|st|[A-Z])\.$", re.IGNORECASE
)


def sentences_of(lines: Sequence[str]) -> list[str]:
    """The sentences of lines of text, without those that have no letter and no digit."""
    found = (sentence for paragraph in paragraphs(lines) for sentence in split_sentences(paragraph))
    return [sentence for sentence in found if any(map(str.isalnum, sentence))]


def paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Lines that were broken to fit a width as one, every other line by itself; blank lines end a paragraph."""
    for is_text, group in itertools.groupby((line.strip() for line in lines), bool):
        block = list(group)
        if is_text and _is_wrapped(block):
            yield " ".join(block)
        elif is_text:
            yield from block


def split_sentences(text: str) -> list[str]:
    """A paragraph's sentences: all of its text, in order.

    A sentence does not begin in lower case, unless the whole text is, nor end with an abbreviation.
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
    """True if all lines but the last fill a width, and a sentence goes on from one to the next."""
    longest = max(map(len, lines))
    return (
        longest in WIDTHS
        and all(len(line) > 0.6 * longest for line in lines[:-1])
        and any(line[-1] not in ".?!:;" and following[0].islower() for line, following in itertools.pairwise(lines))
    )
