"""Sentences and words of text in any language, by short rules and Unicode's properties.

Chinese and Japanese have no spaces, and a mark such as U+3002 ends a sentence wherever it stands.
Thai, Lao, Khmer and Burmese have no spaces between words. Two characters of the former count as a
word, as do four of the latter.
"""

import itertools
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import regex

WIDTHS = range(40, 121)  # of the longest line of wrapped text
# Of a sentence. Shorter text, such as the number of an item, is joined to what follows.
FEWEST_CHARACTERS = 12
SENTENCE_END = regex.compile(r"(?<=[.?!])[\"')]?\s+")  # of English
ABBREVIATION = regex.compile(
    r"\b(e\.?g|i\.?e|etc|vs|cf|eqs?|fig|no|vol|pp|al|resp|approx|dr|mr|st|\p{L}"
    r"|nr|bzw|ca|vgl|ggf|evtl|inkl|sog|bspw|prof|hrsg|mio|mrd|abb|kap|tel|mrs|sr|sra)\.$"
    r"|\b(am|vom|zum|zur|bis|im|ab|seit|der|die|das|dem|den|des)\s\d{1,2}\.$",  # German: am 3. Mai
    regex.IGNORECASE,
)
LONGEST_ABBREVIATION = 16  # more than its characters
END = regex.compile(
    r"(?V1)(?<=[.?!])[\"')\p{Pi}\p{Pf}]?\s+"
    r"|(?<=[\p{Sentence_Terminal}--[.?!]])(?![\p{Sentence_Terminal}\d]|\p{Pe}+\p{Hiragana})"
    r"[\p{Pe}\p{Pf}]*\s*"
)
_MARK_AFTER_SPACE = regex.compile(r"\s[?!]$")
# Without marks that also stand on letters of other scripts, such as the dot below of Vietnamese.
CJK = r"[[\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}]--[\u0300-\u036f]]"
_SA = r"\p{Line_Break=SA}"
_WORD = regex.compile(rf"(?V1){CJK}{{1,2}}|{_SA}{{1,4}}|[^\s{CJK}{_SA}]+")
# Unicode's Stream-Safe Text Format. Normalisation sorts runs of marks, in quadratic time.
LONGEST_RUN_OF_MARKS = 30
_MARKS = regex.compile(rf"(\p{{M}}{{{LONGEST_RUN_OF_MARKS}}})\p{{M}}++")
_CJK_SPACE = regex.compile(rf"(?V1)(?<={CJK})\s+(?={CJK})")


def sentences_of(text: Sequence[str]) -> list[str]:
    """Return the sentences of lines of text, without those that have neither letters nor digits."""
    sentences = (
        sentence for paragraph in paragraphs(text) for sentence in split_sentences(paragraph)
    )
    return [sentence for sentence in sentences if any(map(str.isalnum, sentence))]


def paragraphs(text: Sequence[str]) -> Iterator[str]:
    """Join lines that were wrapped to a width, and yield other lines alone.

    Blank lines end a paragraph. Wrapped lines, except the last, nearly fill the width, and at least
    one sentence continues on the next line.
    """
    for is_text, group in itertools.groupby((line.strip() for line in text), bool):
        block = list(group)
        longest = max(map(width, block))
        is_wrapped = (
            longest in WIDTHS
            and all(width(line) > 0.6 * longest for line in block[:-1])
            and any(
                not regex.match(r"[:;\p{Sentence_Terminal}]", line[-1])
                and unicodedata.category(following[0]) in ("Ll", "Lo")
                for line, following in itertools.pairwise(block)
            )
        )
        if is_text:
            yield from [join(block)] if is_wrapped else block


def split_sentences(text: str) -> list[str]:
    """Split a paragraph into sentences, which together have all of its text.

    A sentence ends at `.`, `?` or `!` before white space, and at the marks of other scripts
    anywhere. It does not end with an abbreviation. The next one does not begin in lower case,
    unless the whole text does or the mark is a `?` or `!` after a space.
    """
    text = text.strip()
    gaps = list(END.finditer(text))
    starts = [text[:1], *(text[gap.end() : gap.end() + 1] for gap in gaps)]
    is_cased = any(map(str.isupper, text))
    capitals = is_cased and (not starts[0].islower() or any(map(str.isupper, starts)))
    sentences = []
    start = 0
    for gap in gaps:
        mark = gap.start()
        end = mark + len(gap[0].rstrip())
        if _is_short(text, start, end) or ends_with_abbreviation(text, start, mark):
            continue
        if (
            not capitals
            or not text[gap.end() : gap.end() + 1].islower()
            or _MARK_AFTER_SPACE.match(text, max(start, mark - 2), mark)
        ):
            sentences.append(text[start:end])
            start = gap.end()
    rest = text[start:]
    if sentences and rest and _is_short(text, start, len(text)):
        rest = join([sentences.pop(), rest])
    return [*sentences, rest] if rest else sentences


def ends_with_abbreviation(text: str, start: int, end: int) -> bool:
    """Return whether this part of a text ends with an abbreviation.

    Only its last characters are read, so that a long text without sentences takes linear time.
    """
    return bool(ABBREVIATION.search(text, max(start, end - LONGEST_ABBREVIATION), end))


def _is_short(text: str, start: int, end: int) -> bool:
    """Return whether this part of a text is too short for a sentence."""
    return end - start < FEWEST_CHARACTERS and width(text[start:end]) < FEWEST_CHARACTERS


def join(texts: Iterable[str]) -> str:
    """Join texts by spaces, without a space between Chinese or Japanese characters."""
    return _CJK_SPACE.sub("", " ".join(texts))


def width(text: str) -> int:
    """Return the number of characters, where wide ones, such as those of Chinese, count as two."""
    if text.isascii():
        return len(text)
    return len(text) + sum(unicodedata.east_asian_width(each) in "WF" for each in text)


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return _WORD.findall(text)


def some_words(text: str, start: int, stop: int | None = None) -> str:
    """Return the part of a text from one word to another."""
    spans = [match.span() for match in _WORD.finditer(text)][start:stop]
    return text[spans[0][0] : spans[-1][1]] if spans else ""


def canonical(text: str) -> str:
    """Return a text without its case, wrapping and encoding of letters, for comparisons."""
    normalized = unicodedata.normalize("NFKC", with_few_marks(text))
    return _CJK_SPACE.sub("", " ".join(normalized.casefold().split()))


def with_few_marks(text: str) -> str:
    """Return a text that can be normalised in linear time: long runs of marks are cut."""
    return text if text.isascii() else _MARKS.sub(r"\1", text)


def joined_passages(sentences: Sequence[str], characters: int) -> list[str]:
    """Join whole sentences into texts of about equal length and at most `characters`.

    One sentence may be longer.
    """
    total = sum(map(width, sentences))
    # The last sentence of a passage may reach beyond its size.
    room = max(characters / 2, characters - total / max(1, len(sentences)))
    size = max(1, total / max(1, math.ceil(total / room)))
    starts = itertools.accumulate(map(width, sentences), initial=0)
    groups = itertools.groupby(zip(starts, sentences, strict=False), lambda entry: entry[0] // size)
    texts = []
    for _, group in groups:
        texts += _halved([sentence for _, sentence in group], characters)
    return texts


def _halved(sentences: Sequence[str], characters: int) -> list[str]:
    """Join the sentences. If the text is too long, halve it until the parts are short enough."""
    text = join(sentences)
    if width(text) <= characters or len(sentences) == 1:
        return [text]
    ends = list(itertools.accumulate(map(width, sentences)))
    middle = min(range(1, len(sentences)), key=lambda place: abs(ends[place - 1] - ends[-1] / 2))
    return _halved(sentences[:middle], characters) + _halved(sentences[middle:], characters)
