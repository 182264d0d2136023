"""The text of html: titled sections, without what only surrounds a page's text.

Markdown and reStructuredText become html first, so all three are read here. lxml reports tags as it
finds them. No tree is built, so that deep nesting and tags that are never closed take linear time.
"""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diffcse_jax.documents.files import EXTRA
from diffcse_jax.errors import require_extra

MOST = 0.5  # an element with a larger share of a page's text is not beside the text: it is the text
ALL = 0.9  # and so are several `pre` or tables together
LONGEST_HEADING = 300  # characters; a longer one was never closed
LONGEST_TITLE = 256  # characters of a title or a path of headings; a longer title is text
# Elements inside each other. For an end tag, libxml2 may look through all that are open.
DEEPEST = 20_000
PIECE = 1 << 16  # bytes that are parsed at once
LONGEST_ANCHOR = 2  # characters of a link beside a heading, such as a pilcrow
LONGEST_LABEL = 20  # events inside it
BETWEEN_CELLS = " | "
PATH = ": "  # between headings

HEADINGS = ("", "h1", "h2", "h3", "h4", "h5", "h6")  # by level
BLOCKS = {
    *HEADINGS[1:], "address", "article", "aside", "blockquote", "body", "caption", "center", "dd",
    "details", "dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form",
    "header", "hgroup", "hr", "html", "legend", "li", "main", "menu", "nav", "ol", "option", "p",
    "pre", "search", "section", "select", "summary", "table", "tbody", "td", "textarea", "tfoot",
    "th", "thead", "tr", "ul",
}  # fmt: skip
NEVER_TEXT = {"script", "style", "title"}
# What surrounds the text of a page, and how a number of them is called.
SURROUNDINGS = {
    "nav": "menu{s}", "header": "page header{s}", "footer": "page footer{s}", "aside": "aside{s}",
    "form": "form{s}", "button": "button{s}", "svg": "drawing{s}", "template": "template{s}",
    "noscript": "part{s} for browsers without scripts",
}  # fmt: skip
CODE = {"pre": "code block{s}", "table": "table{s}"}  # what search reads and training does not
MEASURED = {**SURROUNDINGS, **CODE}
ARTICLES = {"article", "main", "section"}  # where these are text:
OF_ARTICLES = {"aside", "header"}
CELLS = {"td", "th"}
REFERENCES = {"footnote-reference", "footnote-definition-label"}  # classes of their numbers

TAG = re.compile(r"<(/?)([a-zA-Z][^\s/<>]*)")
CHANGED_ENDS = {"p": "<p", "br": "<br"}  # browsers read </p> and </br> so if nothing was open
EMPTY_ELEMENT = re.compile(r"<([a-zA-Z][\w:.-]*)(\s[^<>]*)?/>")  # of XHTML

Sections = tuple[tuple[str, list[str]], ...]


class Block(NamedTuple):
    """A heading, a paragraph, or the lines of preformatted text."""

    lines: list[str]
    level: int = 0  # of a heading


class Event(NamedTuple):
    """A text, or a tag at which an element starts or ends."""

    tag: str  # empty: a text
    text: str = ""
    is_end: bool = False


class Element(NamedTuple):
    """An element that has not ended yet."""

    tag: str
    start: int  # the number of its first event
    classes: frozenset[str]
    characters: int  # before it
    prose: int


def html_sections(
    text: str,
    title: str = "",
    *,
    with_code: bool,
    is_page: bool = False,
    first_is_title: bool = True,
) -> tuple[Sections, Mapping[str, int]]:
    """Read html as sections. A title counts if no heading of level 1 has text.

    Args:
        text: A page, or html that was made of another format.
        title: The title, if the text has no `title` element.
        with_code: Read tables and preformatted text.
        is_page: The text is a page, where tables and preformatted text may hold everything. Then
            they are read.
        first_is_title: The first heading is the title of the document, whatever its level.

    Returns:
        Titles and lines, and how many parts with text were left out, by kind.
    """
    etree = require_extra("lxml.etree", EXTRA)
    page = _Page()
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True)
    content = _without_stray_ends(text).encode()
    for start in range(0, len(content) or 1, PIECE):  # libxml2 reads all of a piece
        parser.feed(content[start : start + PIECE])
    parser.close()
    reader = _Reader(page, with_code=with_code, is_page=is_page)
    blocks = list(reader.blocks())
    has_title = any(block.level == 1 for block in blocks)
    title = "" if has_title else page.title or title
    if len(title) > LONGEST_TITLE:
        blocks = [Block([title]), *blocks]
        title = ""
    sections = sections_of(blocks, title, first_is_title=first_is_title)
    return tuple(sections), reader.left_out


def html_of_xhtml(text: str) -> str:
    """Write the end tag of each empty element, which html requires."""
    return EMPTY_ELEMENT.sub(r"<\1\2></\1>", text)


def sections_of(
    blocks: Iterable[Block], title: str = "", *, first_is_title: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """Yield titles and lines. A title is the path of headings, `Guide: Installation`.

    A repeated heading is named once. A heading without text or headings below it is a paragraph of
    the section above it. So is a heading that a long path leaves out.
    """
    path = {title: 1} if title else {}  # headings and their levels
    lines: list[str] = []
    alone = ""  # the latest heading, while no text has followed it
    for block in blocks:
        if not block.level:
            lines += [*block.lines, ""]
            alone = ""
            continue
        if lines:
            yield _joined(path), lines
            lines = []
        first = next(iter(path), "") if first_is_title else ""
        above = dict(item for item in path.items() if item[0] == first or item[1] < block.level)
        (heading,) = block.lines
        if alone and alone not in _shortened([*above, heading]):
            yield _joined(each for each in path if each != alone), [alone, ""]
        path = above
        alone = heading
        path.setdefault(alone, block.level)
    if lines:
        yield _joined(path), lines
    elif alone:
        yield _joined(each for each in path if each != alone), [alone, ""]


def _joined(path: Iterable[str]) -> str:
    return PATH.join(_shortened([*path]))


def _shortened(path: Sequence[str]) -> Sequence[str]:
    """Leave headings of a long path out: those after the first, then the first."""
    while len(path) > 1 and len(PATH.join(path)) > LONGEST_TITLE:
        path = [path[0], *path[2:]] if len(path) > 2 else path[1:]
    return path


def _without_stray_ends(text: str) -> str:
    """Make comments of end tags without a start tag.

    For each of them, libxml2 would look through all elements that are open.
    """
    opened: collections.Counter[str] = collections.Counter()

    def checked(tag: re.Match[str]) -> str:
        name = tag[2].lower()
        if not tag[1]:
            opened[name] += 1
            return tag[0]
        if not opened[name]:
            return CHANGED_ENDS.get(name, f"<!{tag[2]}")
        opened[name] -= 1
        return tag[0]

    return TAG.sub(checked, text)


class _Page:
    """What a parser finds on a page: texts and tags, and how much text is where.

    The text of links does not show where the text of a page is, because menus consist of links.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ends: dict[int, int] = {}  # the events at which elements start and end
        self.characters: collections.Counter[int] = collections.Counter()  # by starting event
        self.prose: collections.Counter[int] = collections.Counter()  # characters outside links
        self.prose_in: collections.Counter[str] = collections.Counter()  # by tag
        self.all_prose = 0
        self.plain: set[int] = set()  # elements whose tag does not count
        self.without_text: set[int] = set()  # labels and anchors
        self._all_characters = 0
        self._open: list[Element] = []
        self._opened: collections.Counter[str] = collections.Counter()  # by tag
        self._around: set[str] = set()  # tags of `MEASURED` that are open
        self._titles: dict[int, list[str]] = collections.defaultdict(list)
        self._tables: list[int] = []  # those that are open
        self._paragraphs = 0  # of the cell

    def start(self, tag: str, attributes: Mapping[str, str], _: Any) -> None:
        """Note that an element starts. The last argument, which lxml also gives, is for XML."""
        tag = tag.rpartition(":")[2]
        index = len(self.events)
        is_text = (tag in OF_ARTICLES and any(map(self._opened.__getitem__, ARTICLES))) or (
            tag == "button" and any(map(self._opened.__getitem__, HEADINGS))
        )
        if is_text:
            self.plain.add(index)
        self._note_layout(tag)
        if len(self._open) >= DEEPEST:
            raise RecursionError
        classes = frozenset(attributes.get("class", "").split())
        self._open.append(Element(tag, index, classes, self._all_characters, self.all_prose))
        self._opened[tag] += 1
        if tag in MEASURED:
            self._around.add(tag)
        if tag == "table":
            self._tables.append(index)
            self._paragraphs = 0
        self.events.append(Event(tag))

    def end(self, tag: str) -> None:
        """Note that an element ends."""
        tag = tag.rpartition(":")[2]
        while self._opened[tag]:
            element = self._open.pop()
            self._close(element)
            if element.tag == tag:
                return

    def data(self, text: str) -> None:
        """Note a text."""
        if self._open and self._open[-1].tag in NEVER_TEXT:
            element = self._open[-1]
            if element.tag == "title" and not self._opened["svg"]:
                self._titles[element.start].append(text)
            return
        self.events.append(Event("", text))
        number = sum(map(len, text.split()))
        self._all_characters += number
        if self._opened["a"]:
            return
        self.all_prose += number
        for tag in self._around:
            self.prose_in[tag] += number

    def close(self) -> None:
        """End what is open."""
        while self._open:
            self._close(self._open.pop())

    @property
    def title(self) -> str:
        """Return the text of the first `title` element."""
        return " ".join("".join(next(iter(self._titles.values()), [])).split())

    def text(self, start: int, stop: int) -> str:
        """Return the text between two events."""
        return " ".join("".join(event.text for event in self.events[start:stop]).split())

    def share(self, characters: int) -> float:
        """Return the share of the page's text that so many characters outside links are."""
        return characters / self.all_prose if self.all_prose else 1.0

    def _note_layout(self, tag: str) -> None:
        """Note headings in buttons, and tables that lay out a page, which have no rows to read."""
        if tag in CELLS:
            self._paragraphs = 0
        elif tag == "p":
            self._paragraphs += 1
        if tag in HEADINGS or tag in CODE or (tag == "p" and self._paragraphs > 1):
            self.plain.update(self._tables[-1:])
        if tag in HEADINGS:
            self.plain.update(each.start for each in self._open[-3:] if each.tag == "button")

    def _close(self, element: Element) -> None:
        index = element.start
        end = len(self.events)
        self.events.append(Event(element.tag, is_end=True))
        self.ends[index] = end
        self.characters[index] = self._all_characters - element.characters
        self.prose[index] = self.all_prose - element.prose
        self._opened[element.tag] -= 1
        if not self._opened[element.tag]:
            self._around.discard(element.tag)
        if element.tag == "table":
            self._tables.pop()
        if self._is_label(element, end):
            self.without_text.add(index)

    def _is_label(self, element: Element, end: int) -> bool:
        """Return whether an element is an anchor, a footnote's number, or a note's usual title."""
        if not element.classes.isdisjoint(REFERENCES):
            return True
        if end - element.start > LONGEST_LABEL:
            return False
        if element.tag == "a" and self.characters[element.start] <= LONGEST_ANCHOR:
            return not any(map(str.isalnum, self.text(element.start, end)))
        if "admonition-title" in element.classes and self._open:
            title = "".join(self.text(element.start, end).split())
            return title.casefold() in self._open[-1].classes
        return False


class _Reader:
    """Reads the paragraphs of a page, and counts what it leaves out."""

    def __init__(self, page: _Page, *, with_code: bool, is_page: bool):
        self._page = page
        self._with_code = with_code
        self._is_page = is_page
        self._texts: list[str] = []  # of the paragraph
        self.left_out: collections.Counter[str] = collections.Counter()

    def blocks(self) -> Iterator[Block]:
        """Yield headings, paragraphs, rows of tables and preformatted text."""
        index = 0
        while index < len(self._page.events):
            event = self._page.events[index]
            following = index + 1
            if event.tag in BLOCKS:
                yield from self._paragraph()
            elif event.tag == "br":
                self._texts.append("\n")
            else:
                self._texts.append(event.text)
            if self._leaves_out(index):
                following = self._page.ends[index] + 1
            elif (blocks := self._whole(index)) is not None:
                yield from blocks
                following = self._page.ends[index] + 1
            index = following
        yield from self._paragraph()

    def _paragraph(self) -> Iterator[Block]:
        """End the paragraph."""
        text = " ".join("".join(self._texts).split())
        self._texts = []
        if text:
            yield Block([text])

    def _leaves_out(self, index: int) -> bool:
        """Return whether an element that starts here is left out, and count it if it has text."""
        event = self._page.events[index]
        if not event.tag or event.is_end:
            return False
        if event.tag in NEVER_TEXT or index in self._page.without_text:
            return True
        kind = self._kind_left_out(event.tag, index)
        if kind and self._page.characters[index]:
            self.left_out[kind] += 1
        return bool(kind)

    def _kind_left_out(self, tag: str, index: int) -> str:
        """Return what an element is if it is left out, or an empty text."""
        of_tag = self._page.share(self._page.prose_in[tag])
        if tag in SURROUNDINGS and index not in self._page.plain:
            return SURROUNDINGS[tag] if of_tag <= MOST else ""
        if tag in CODE and not self._with_code:
            is_text = self._page.share(self._page.prose[index]) > MOST or of_tag > ALL
            return "" if is_text and self._is_page else CODE[tag]
        return ""

    def _whole(self, index: int) -> list[Block] | None:
        """Read an element that is not a sequence of paragraphs; return None for other ones."""
        event = self._page.events[index]
        if event.is_end:
            return None
        if event.tag == "pre":
            return self._preformatted(index)
        if event.tag == "table" and index not in self._page.plain:
            return [*self._rows(index)]
        if event.tag in HEADINGS[1:] and self._page.characters[index] <= LONGEST_HEADING:
            return self._heading(index)
        return None

    def _inside(self, index: int) -> Iterator[Event]:
        """Yield the events inside an element, without what is left out."""
        end = self._page.ends[index]
        index += 1
        while index < end:
            if self._leaves_out(index):
                index = self._page.ends[index]
            else:
                yield self._page.events[index]
            index += 1

    def _heading(self, index: int) -> list[Block]:
        text = " ".join("".join(map(_spaced, self._inside(index))).split())
        level = HEADINGS.index(self._page.events[index].tag) if len(text) <= LONGEST_TITLE else 0
        return [Block([text], level)] if text else []

    def _preformatted(self, index: int) -> list[Block]:
        """Read the lines of an element as they stand."""
        text = "".join(map(_broken, self._inside(index)))
        lines = [line.rstrip() for line in text.split("\n")]
        return [Block(lines)] if any(lines) else []

    def _rows(self, index: int) -> Iterator[Block]:
        """Yield the rows of a table as lines, and its caption."""
        cells: list[list[str]] = [[]]
        for event in (*self._inside(index), Event("tr", is_end=True)):
            if event.tag in ("tr", "caption"):
                texts = [" ".join("".join(cell).split()) for cell in cells]
                if any(texts):
                    yield Block([BETWEEN_CELLS.join(filter(None, texts))])
                cells = [[]]
            elif event.tag in CELLS and not event.is_end:
                cells.append([])
            else:
                cells[-1].append(_spaced(event))


def _broken(event: Event) -> str:
    """Return the text of an event; blocks begin on a new line."""
    is_break = event.tag == "br" or event.tag in BLOCKS
    return "\n" if is_break and not event.is_end else event.text


def _spaced(event: Event) -> str:
    """Return the text of an event; words of different blocks stay apart."""
    return " " if event.tag in BLOCKS or event.tag == "br" else event.text
