"""Markdown as titled sections of plain paragraphs: no code blocks, tables, pictures or markup.

Parsed as CommonMark, with tables. What generators of sites add to it is left out: front matter (its title is read),
containers (`:::`), inclusions and alerts (`[!NOTE]`), and templates (`{% if %}`, `{{< note >}}`).
"""

import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

FRONT_MATTER = re.compile(r"\A(---|\+\+\+)\n(.*?)\n(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
FRONT_TITLE = re.compile(r"^title[ \t]*[:=](.*)$", re.MULTILINE)
CONTAINER = re.compile(r"^[ \t>]*:{3,}.*$", re.MULTILINE)
INCLUSION = re.compile(r"\[![A-Za-z][^\[\]\n]*(\[[^\[\]\n]*\]\([^()\n]*\))?\]")
TEMPLATE = re.compile(r"\{%[^%]*%\}|\{\{[<%][^{}]*[>%]\}\}")
CHECKBOX = re.compile(r"\A\[[ xX]\]\s+")
TAG = re.compile(r"<!--((?!<!--).)*?-->|<[^<>]*>", re.DOTALL)
NO_PROSE = re.compile(r"\s*<(pre|script|style|svg|table)\b", re.IGNORECASE)

HEADINGS = ("", "h1", "h2", "h3", "h4", "h5", "h6")  # by level
BLOCKS = MarkdownIt("commonmark").enable("table").disable("inline")
INLINE = MarkdownIt("commonmark")


class Heading(NamedTuple):
    level: int
    text: str


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Titles and lines of what has text; the title is empty before the first heading. A line is a paragraph or blank.

    The first heading, or the front matter's title where that is no heading of level 1, is the document's. Others are
    told after it and after those that they are below, `Guide: Installation: Requirements`, for many documents have an
    installation, and some have requirements in every section.
    """
    front = FRONT_MATTER.match(text)
    links: dict[str, Any] = {}  # those that are defined anywhere in the text
    tokens = BLOCKS.parse(CONTAINER.sub("", text[front.end() :] if front else text), links)
    path = _front_title(front[2]) if front and not _begins_with_title(tokens) else []
    paragraphs: list[str] = []
    block = ""  # the tag that the line is in
    for token in tokens:
        if token.nesting == 1:
            block = token.tag
        elif token.type == "html_block" and not NO_PROSE.match(token.content):
            paragraphs += [" ".join(TAG.sub(" ", token.content).split()), ""]
        elif token.type == "inline" and block == "p":
            paragraphs += [CHECKBOX.sub("", plain(token.content, links)), ""]
        elif token.type == "inline" and block in HEADINGS:
            if any(paragraphs):
                yield _title(path), paragraphs
            path, paragraphs = _below(path, Heading(HEADINGS.index(block), plain(token.content, links))), []
    if any(paragraphs):
        yield _title(path), paragraphs


def plain(text: str, links: MutableMapping[str, Any]) -> str:
    """A paragraph or heading as a line without markup.

    Args:
        text: its source.
        links: the definitions of links that the document has.
    """
    (line,) = INLINE.parseInline(INCLUSION.sub("", text), links)
    return " ".join("".join(map(_words, line.children or ())).split())


def _words(token: Token) -> str:
    """The text of a part of a line; of pictures and HTML there is none."""
    if token.type in ("softbreak", "hardbreak"):
        return " "
    if token.type == "code_inline":
        return token.content
    return TEMPLATE.sub("", token.content) if token.type == "text" else ""


def _front_title(front_matter: str) -> list[Heading]:
    """The title of front matter (YAML or TOML), as a path of headings: none or one."""
    match = FRONT_TITLE.search(front_matter)
    title = match[1].strip() if match else ""
    if title[:1] in ("'", '"') and title[:1] == title[-1:]:
        title = title[1:-1]
    return [Heading(1, title)] if title else []


def _begins_with_title(tokens: Sequence[Token]) -> bool:
    """True if the first heading is of level 1."""
    return next((token.tag for token in tokens if token.type == "heading_open"), "") == "h1"


def _below(path: Sequence[Heading], heading: Heading) -> list[Heading]:
    """The path of a heading: the document's title, the headings that it is below, and itself, unless it repeats one."""
    above = [*path[:1], *(other for other in path[1:] if other.level < heading.level)]
    is_told = not heading.text or heading.text in (other.text for other in above)
    return above if is_told else [*above, heading]


def _title(path: Sequence[Heading]) -> str:
    return ": ".join(heading.text for heading in path)
