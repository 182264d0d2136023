"""Formats of documents: the titled sections of a markdown, html, rst, pdf or txt file.

Each reader takes the bytes of a file and yields titles and lines. A line is a paragraph or blank. The title of a
section is the path of its headings, `Guide: Installation`, because many documents have a section called Installation.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from diffcse_jax.errors import require_extra

EXTRA = "documents"
Sections = Iterator[tuple[str, list[str]]]

FRONT_MATTER = re.compile(r"\A(---|\+\+\+)\n(.*?)\n(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
FRONT_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(?P<quote>['\"]?)(?P<title>.*?)(?P=quote)[ \t]*$", re.MULTILINE)
NOT_TEXT_IN_MARKDOWN = re.compile(
    r"^[ \t>]*:{3,}.*$"  # ::: of site generators
    r"|\[![A-Za-z][^\[\]\n]*(\[[^\[\]\n]*\]\([^()\n]*\))?\]"  # [!NOTE]
    r"|(?<!`)(\{%[^%]*%\}|\{\{[<%][^{}]*[>%]\}\})"  # templates
    r"|(?<=[-*+.)] )\[[ xX]\][ \t]+",  # boxes of a list
    re.MULTILINE,
)
HEADINGS = ("", "h1", "h2", "h3", "h4", "h5", "h6")  # by level
HTML_BLOCKS = [*HEADINGS[1:], "p", "li", "dd", "dt", "div", "blockquote", "section", "article", "main", "summary",
               "figcaption", "address", "body", "html", "[document]"]  # fmt: skip
NOT_TEXT_IN_HTML = ["script", "style", "template", "noscript", "svg", "nav", "header", "footer", "aside", "form", "pre",
                    "table", "title", "button"]  # fmt: skip
ROLE = re.compile(r":(?!math:)[\w:+.-]+:`([^`<]*?)\s*(?:<[^`]*>)?`")  # Sphinx's :role:`name <target>`


def markdown_sections(content: bytes) -> Sections:
    """Read CommonMark with tables. A title in front matter (YAML or TOML) counts if no heading has level 1."""
    markdown_it = require_extra("markdown_it", EXTRA)
    text = content.decode("utf-8-sig", errors="surrogateescape").replace("\r\n", "\n")
    title = ""
    if front := FRONT_MATTER.match(text):
        text = text[front.end() :]
        if line := FRONT_TITLE.search(front[2]):
            title = line["title"]
    parser = markdown_it.MarkdownIt("commonmark").enable("table")
    return html_sections(parser.render(NOT_TEXT_IN_MARKDOWN.sub("", text)), title)


def html_sections(content: bytes | str, title: str = "") -> Sections:
    """Read the text of an html page, without navigation, forms, tables and code. A title counts if no h1 has text."""
    page = require_extra("bs4", EXTRA).BeautifulSoup(content, "html.parser")
    if page.title:
        title = " ".join(page.title.get_text().split())
    for element in [*page.find_all(NOT_TEXT_IN_HTML), *page.find_all(class_="admonition-title")]:
        element.decompose()
    for line_break in page.find_all(["br", "hr"]):
        line_break.replace_with("\n")
    if any(heading.get_text(strip=True) for heading in page.find_all("h1")):
        title = ""

    def block_of(text: Any) -> Any:
        return next(parent for parent in text.parents if parent.name in HTML_BLOCKS)

    path = {title: 1} if title else {}  # headings and their levels
    paragraphs: list[str] = []
    for _, group in itertools.groupby(page.strings, lambda text: id(block_of(text))):
        strings = list(group)
        block, text = block_of(strings[0]), " ".join("".join(strings).split())
        if text and block.name not in HEADINGS:
            paragraphs += [text, ""]
        elif text:
            if paragraphs:
                yield ": ".join(path), paragraphs
            # Keep the document's title and the headings above. A repeated heading is named once.
            first, level = next(iter(path), ""), HEADINGS.index(block.name)
            path = {heading: above for heading, above in path.items() if heading == first or above < level}
            path.setdefault(text, level)
            paragraphs = []
    if paragraphs:
        yield ": ".join(path), paragraphs


def rst_sections(content: bytes) -> Sections:
    """Read reStructuredText as html. Sphinx's own directives, included files and raw text are left out."""
    core, html = require_extra("docutils.core", EXTRA), require_extra("docutils.writers.html4css1", EXTRA)
    text = ROLE.sub(r"\1", content.decode("utf-8-sig", errors="surrogateescape"))
    settings = {
        "file_insertion_enabled": False, "raw_enabled": False, "_disable_config": True, "warning_stream": False,
        "report_level": 5, "halt_level": 5, "doctitle_xform": False, "initial_header_level": 1, "math_output": "LaTeX",
    }  # fmt: skip
    return html_sections(core.publish_parts(text, writer=html.Writer(), settings_overrides=settings)["body"])


def pdf_sections(content: bytes) -> Sections:
    """Read the text of a pdf as one section without a title; a paragraph may continue on the next page."""
    pypdf = require_extra("pypdf", EXTRA)
    pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(content)).pages]
    yield "", [line.strip() for page in pages for line in page.split("\n")]


def text_sections(content: bytes) -> Sections:
    """Read a txt file as one section without a title."""
    yield "", content.decode("utf-8-sig", errors="surrogateescape").replace("\r\n", "\n").split("\n")


READERS: dict[str, Callable[[bytes], Sections]] = {
    ".txt": text_sections,
    ".md": markdown_sections,
    ".markdown": markdown_sections,
    ".html": html_sections,
    ".htm": html_sections,
    ".rst": rst_sections,
    ".pdf": pdf_sections,
}
from typing import NamedTuple
class Unreadable(NamedTuple):
    reason: str
class Parsed(NamedTuple):
    sections: tuple
    left_out: dict
    notes: tuple
KINDS = tuple(READERS)
