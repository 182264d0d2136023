"""The paragraphs of a pdf, which holds only characters and their places.

PDFium finds words and lines. Here, lines become paragraphs: a line goes on if the first word of the
next line would not have fitted into it. What pages repeat at their edges is left out.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diffcse_jax.documents.files import EXTRA, EncryptedError
from diffcse_jax.errors import require_extra

PASSWORD_ERROR = 4  # FPDF_ERR_PASSWORD
ALIKE = 1.25  # lines of one paragraph have about the same height and distance
NEARBY = 20  # lines before and after, among which the longest one shows the width
RAGGED = 0.15  # share of its width by which a full line may be shorter than others
REPEATED = 3  # pages that have a header or footer in common

LINE_HYPHEN = re.compile("(.?)[\x02\ufffe](?=(.?))")  # where PDFium joined a divided word
ENDS_DIVIDED = re.compile(r"[^\W\d_][-\u00ad\u2010]$")
ENDS_SENTENCE = re.compile(r"[.!?:][\"')\u2019\u201d]?$")
LIST_ITEM = re.compile(r"[-*\u2022\u2013\u25aa\u25cf\u25e6]\s|\(?(\d{1,2}|[a-z])[.)]\s")
LEADERS = re.compile(r"\.{4}|(?: \.){4}|(?:\. ){4}")  # to the number of a page
DASHES = r"[-\u2013\u2014\s]*"
PAGE_NUMBER = re.compile(rf"{DASHES}(\d{{1,4}}|(?=[ivx])x{{0,3}}(ix|iv|v?i{{0,3}})){DASHES}")
DIGITS = re.compile(r"\d+")


class Line(NamedTuple):
    """A line of text and its place on a page, in points.

    A line with a divided word goes on in the next one on the page, where it ends.
    """

    text: str
    page: int
    left: float
    right: float
    bottom: float
    last_bottom: float  # at its end
    height: float
    first_word: float  # its width


def pdf_paragraphs(content: bytes) -> tuple[list[str], Mapping[str, int], tuple[str, ...]]:
    """Return the paragraphs, how much was left out by kind, and notes about pages without text.

    PDFium must not be used in two threads at a time.
    """
    pdfium = require_extra("pypdfium2", EXTRA)
    left_out: collections.Counter[str] = collections.Counter()
    pages: list[list[Line]] = []
    try:
        document = pdfium.PdfDocument(content)
    except pdfium.PdfiumError as error:
        if error.err_code == PASSWORD_ERROR:
            raise EncryptedError from error
        raise
    for number in range(len(document)):
        try:
            pages.append(_lines(document[number].get_textpage(), number))
        except pdfium.PdfiumError:
            left_out["damaged page{s}"] += 1
    empty = sum(not page for page in pages)
    notes = (f"{empty:,} of {len(pages):,} pages hold no text",) if empty else ()
    return list(_paragraphs(_without_edges(pages, left_out))), left_out, notes


def _lines(page: Any, number: int) -> list[Line]:
    """Return the lines of a page."""
    lines, start = [], 0  # in UTF-16, as PDFium counts
    for line in page.get_text_range().split("\r\n"):
        units = len(line) + sum(character > "\uffff" for character in line)
        if text := line.strip():
            before = len(line) - len(line.lstrip())
            after = len(line) - len(line.rstrip())
            first = start + before
            left, bottom, first_right, top = page.get_charbox(first, loose=True)
            word = len(text.split(maxsplit=1)[0])
            word_right = page.get_charbox(min(first + word, start + units) - 1, loose=True)[2]
            last = page.get_charbox(start + units - after - 1, loose=True)
            width = max(word_right, first_right) - left
            text = " ".join(LINE_HYPHEN.sub(_joined, text).split())
            lines.append(Line(text, number, left, last[2], bottom, last[1], top - bottom, width))
        start += units + len("\r\n")
    return lines


def _joined(hyphen: re.Match[str]) -> str:
    """Leave out the hyphen of a divided word, but not that of `Anglo-Saxon`."""
    before, after = hyphen.groups()
    return before if after.islower() or before.isupper() else f"{before}-"


def _without_edges(pages: Sequence[list[Line]], left_out: collections.Counter[str]) -> list[Line]:
    """Return the lines without page numbers, and without copies of headers and footers."""
    edges = [_edges(page) for page in pages]
    keys = [
        {index: (kind, DIGITS.sub("0", page[index].text)) for index, kind in page_edges.items()}
        for page, page_edges in zip(pages, edges, strict=True)
    ]
    pages_with = collections.Counter(key for page in keys for key in page.values())
    seen: set[tuple[str, str]] = set()
    kept = []
    for page, page_keys in zip(pages, keys, strict=True):
        for index, line in enumerate(page):
            key = page_keys.get(index, ("", ""))
            is_edge = index in page_keys and len(pages) > 1
            if is_edge and PAGE_NUMBER.fullmatch(line.text):
                left_out["page number{s}"] += 1
            elif is_edge and key in seen and pages_with[key] >= REPEATED:
                left_out[f"repeated page {key[0]}{{s}}"] += 1
            else:
                kept.append(line)
            seen.add(key)
    return kept


def _edges(page: Sequence[Line]) -> dict[int, str]:
    """Return the numbers of the highest and the lowest lines of a page, with what they may be."""
    highest = max((line.bottom for line in page), default=0.0)
    lowest = min((line.last_bottom for line in page), default=0.0)
    edges = {}
    for index, line in enumerate(page):
        if line.bottom > highest - line.height / 2:
            edges[index] = "header"
        elif line.last_bottom < lowest + line.height / 2:
            edges[index] = "footer"
    return edges


def _paragraphs(lines: Sequence[Line]) -> Iterator[str]:
    """Join lines to paragraphs."""
    distances = _distances(lines)
    text = ""
    for index, line in enumerate(lines):
        if index and _goes_on(lines, index - 1, distances[line.page]):
            is_divided = ENDS_DIVIDED.search(text) and line.text[0].islower()
            text = text[:-1] + line.text if is_divided else f"{text} {line.text}"
            continue
        if text:
            yield text
        text = line.text
    if text:
        yield text


def _distances(lines: Sequence[Line]) -> dict[int, float]:
    """Return the most frequent distance between lines on each page."""
    counts: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for line, following in itertools.pairwise(lines):
        distance = line.last_bottom - following.bottom
        if line.page == following.page and distance > 0:
            counts[line.page][round(distance)] += 1
    distances: dict[int, float] = collections.defaultdict(float)
    distances.update({page: float(each.most_common(1)[0][0]) for page, each in counts.items()})
    return distances


def _goes_on(lines: Sequence[Line], index: int, distance: float) -> bool:
    """Return whether a paragraph goes on after a line, by the usual distance on the page."""
    line = lines[index]
    following = lines[index + 1]
    down = line.last_bottom - following.bottom
    if line.page != following.page or down < -line.height:  # next page, or next column
        return not ENDS_SENTENCE.search(line.text) and following.text[0].islower()
    if abs(down) < line.height / 2:  # on the same line
        return following.left >= line.right - 1
    if (
        down > ALIKE * max(distance, 1.0)
        or not _is_alike(line, following)
        or LIST_ITEM.match(following.text)
        or LEADERS.search(line.text)
        or (ENDS_SENTENCE.search(line.text) and following.left > line.left + following.height / 2)
    ):
        return False
    return _is_full(lines, index, distance)


def _is_alike(line: Line, following: Line) -> bool:
    """Return whether two lines have about the same height."""
    return 1 / ALIKE < line.height / max(following.height, 0.1) < ALIKE


def _is_full(lines: Sequence[Line], index: int, distance: float) -> bool:
    """Return whether the first word of the next line would not have fitted into a line."""
    line = lines[index]
    following = lines[index + 1]
    others = [*_nearby(lines, index, -1, distance), *_nearby(lines, index, 1, distance)]
    longest = max((each.right for each in others), default=0.0)
    if line.right + following.first_word < longest:
        return False
    is_usual = longest > line.right - RAGGED * (line.right - line.left)
    return is_usual or following.text[0].islower()


def _nearby(lines: Sequence[Line], index: int, step: int, distance: float) -> Iterator[Line]:
    """Yield the lines before or after one, as far as they follow without a gap."""
    for number in range(index + step, index + step * NEARBY, step):
        if not 0 <= number < len(lines):
            return
        upper, lower = sorted((number, number - step))
        down = lines[upper].last_bottom - lines[lower].bottom
        is_same_page = lines[upper].page == lines[lower].page
        is_same_block = is_same_page and _is_alike(lines[upper], lines[lower])
        if not is_same_block or not 0 < down < ALIKE * max(distance, 1.0):
            return
        yield lines[number]
