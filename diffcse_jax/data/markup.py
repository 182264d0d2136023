"""Read markdown, html, rst and pdf as titled sections of plain paragraphs, without code, tables, pictures or markup.

Each reader takes the bytes of a file and yields titles and lines. A line is a paragraph or blank. The title of a
section is the path of its headings, `Guide: Installation`, because many documents have a section called Installation.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from diffcse_jax.errors import require_extra

EXTRA = "documents"
Sections = Iterator[tuple[str, list[str]]]

FRONT_MATTER = re.compile(r"\A(---|\+\+\+)\n(.*?)\n(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
FRONT_TITLE = re.compile(r"^title[ \t]*[:=](.*)$", re.MULTILINE)
NOT_TEXT_IN_MARKDOWN = re.compile(
    r"^[ \t>]*:{3,}.*$"  # ::: of site generators
    r"|\[![A-Za-z][^\[\]\n]*(\[[^\[\]\n]*\]\([^()\n]*\))?\]"  # [!NOTE]
    r"|(?<!`)(\{%[^%]*%\}|\{\{[<%][^{}]*[>%]\}\})"  # templates
    r"|(?<=[-*+.)] )\[[ xX]\][ \t]+",  # boxes of a list
    re.MULTILINE,
)
HEADINGS = ("", "h1", "h2", "h3", "h4", "h5", "h6")  # by level
HTML_BLOCKS = [*HEADINGS[1:], "p", "li", "dd", "dt", "div", "blockquote", "section", "article", "main", "body", "html",
               "[document]"]  # fmt: skip
NOT_TEXT_IN_HTML = ["script", "style", "template", "noscript", "svg", "nav", "header", "footer", "aside", "form", "pre",
                    "table", "title", "button"]  # fmt: skip
ROLE = re.compile(r":(?!math:)[\w:+.-]+:`([^`<]*?)\s*(?:<[^`]*>)?`")  # Sphinx's :role:`name <target>`


class Heading(NamedTuple):
    """A heading and its level; level 1 is the title of the document."""

    level: int
    text: str


def titled_sections(blocks: Iterable[Heading | str], title: str = "") -> Sections:
    """Group paragraphs into sections, and name each by the path of its headings, or of the document's title."""
    path = [Heading(1, title)] if title else []
    paragraphs: list[str] = []
    for block in [*blocks, Heading(0, "")]:
        if isinstance(block, str):
            paragraphs += [block, ""]
            continue
        if any(paragraphs):
            yield ": ".join(heading.text for heading in path), paragraphs
        # Keep the document's title and the headings above, without empty and repeated ones.
        path, paragraphs = [*path[:1], *(other for other in path[1:] if other.level < block.level)], []
        if block.text and block.text not in (other.text for other in path):
            path.append(block)


def markdown_sections(content: bytes) -> Sections:
    """Read CommonMark with tables. A title in front matter (YAML or TOML) counts if no heading has level 1."""
    markdown_it = require_extra("markdown_it", EXTRA)
    text, title = content.decode("utf-8-sig", errors="surrogateescape").replace("\r\n", "\n"), ""
    if front := FRONT_MATTER.match(text):
        text, line = text[front.end() :], FRONT_TITLE.search(front[2])
        title = line[1].strip() if line else ""
        title = title[1:-1] if title[:1] in ("'", '"') and title[:1] == title[-1:] else title
    parser = markdown_it.MarkdownIt("commonmark").enable("table")
    return html_sections(parser.render(NOT_TEXT_IN_MARKDOWN.sub("", text)), title)


def html_sections(content: bytes | str, title: str = "") -> Sections:
    """Read the text of an html page, without navigation, forms, tables and code."""
    page = require_extra("bs4", EXTRA).BeautifulSoup(content, "html.parser")
    title = "" if page.h1 else " ".join(page.title.get_text().split()) if page.title else title
    for element in [each for each in page.descendants if each.name in NOT_TEXT_IN_HTML]:
        element.decompose()

    def blocks() -> Iterator[Heading | str]:
        parents = ((next(each for each in text.parents if each.name in HTML_BLOCKS), text) for text in page.strings)
        for _, group in itertools.groupby(parents, lambda pair: id(pair[0])):
            (parent, *_), texts = zip(*group, strict=True)
            if text := " ".join("".join(texts).split()):
                yield Heading(HEADINGS.index(parent.name), text) if parent.name in HEADINGS else text

    return titled_sections(blocks(), title)


def rst_sections(content: bytes) -> Sections:
    """Read reStructuredText. Sphinx's own directives, included files and raw text are left out."""
    core, nodes = require_extra("docutils.core", EXTRA), require_extra("docutils.nodes", EXTRA)
    text = ROLE.sub(r"\1", content.decode("utf-8-sig", errors="replace"))
    settings = {
        "file_insertion_enabled": False, "raw_enabled": False, "_disable_config": True, "report_level": 5,
        "halt_level": 5, "warning_stream": io.StringIO(), "doctitle_xform": False,
    }  # fmt: skip
    document = core.publish_doctree(text, settings_overrides=settings)

    def blocks() -> Iterator[Heading | str]:
        for node in document.findall(lambda node: isinstance(node, nodes.title | nodes.paragraph)):
            parents, text = [node.parent], " ".join(node.astext().split())
            while parent := parents[-1].parent:
                parents.append(parent)
            if isinstance(node, nodes.title) and isinstance(node.parent, nodes.section):
                yield Heading(sum(isinstance(parent, nodes.section) for parent in parents), text)
            elif isinstance(node, nodes.paragraph) and not {nodes.table, nodes.system_message} & {*map(type, parents)}:
                yield text

    return titled_sections(blocks())


def pdf_sections(content: bytes) -> Sections:
    """Read the text of a pdf as one section without a title; a paragraph may continue on the next page."""
    pypdf = require_extra("pypdf", EXTRA)
    pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(content)).pages]
    lines = [line.strip() for page in pages for line in page.split("\n")]
    return iter([("", lines)] if any(lines) else [])


READERS: dict[str, Callable[[bytes], Sections]] = {
    ".md": markdown_sections,
    ".markdown": markdown_sections,
    ".html": html_sections,
    ".htm": html_sections,
    ".rst": rst_sections,
    ".pdf": pdf_sections,
}
