"""Documents: text that belongs together. A document has sections. A section has sentences and may have a title.

A document is a block between blank lines (or a line) of a txt file, a row of a table, a file of a folder, or a
docstring. Memory holds one document at a time.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.data.readers import Fault, Place, extension, lines, opened
from diffcse_jax.data.sentences import ABBREVIATION, SENTENCE_END, sentences_of
from diffcse_jax.errors import UserError, require_extra

LOOKED_AT = 10_000  # lines among which a blank line shows that blank lines separate documents


class Section(NamedTuple):
    """A part of a document."""

    title: str  # may be empty
    lines: Sequence[str]
    sentence_a_line: bool = False

    def sentences(self) -> list[str]:
        """Return the sentences, without a title that the text repeats at its start."""
        found = [line.strip() for line in self.lines] if self.sentence_a_line else sentences_of(self.lines)
        return found[1:] if self.title and found[:1] == [self.title] else found


Document = Sequence[Section]
Placed = tuple[Place, Document | Fault]  # with the line on which it begins or, in a folder, its file


@dataclasses.dataclass(frozen=True)
class Documents:
    """A source of documents."""

    name: str  # in messages
    read: Callable[[], Iterable[Placed]]  # starts a pass
    fingerprint: Callable[[], str]  # returns the SHA-256 of the content in hexadecimal
    note: str = ""  # which files were skipped

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that can be read."""
        return (document for _, document in self.read() if not isinstance(document, Fault))


def in_text_file(path: Path) -> Iterator[Placed]:
    """Yield the documents of a txt file: the blocks between blank lines or, without blank lines, the lines."""
    separated, numbered = has_blank_lines(path), enumerate(lines(path), 1)
    for _, group in itertools.groupby(numbered, lambda line: bool(line[1].strip()) if separated else line[0]):
        numbers, text = zip(*group, strict=True)
        yield numbers[0], ((Section("", text),) if text[0].strip() else Fault.EMPTY)


def has_blank_lines(path: Path) -> bool:
    """Return whether blank lines separate text, by the first lines."""
    first = itertools.islice(lines(path), LOOKED_AT)
    return sum(is_text for is_text, _ in itertools.groupby(first, lambda line: bool(line.strip()))) > 1


def of_texts(*texts: str) -> Document:
    """Return the document of a row of a table, which has a title and a text, or only a text."""
    title = " ".join(texts[0].split()) if len(texts) > 1 else ""
    return (Section(title, texts[-1].split("\n")),)


def of_file(path: Path) -> Document | Fault:
    """Return a file, which has one of the extensions of `READERS`, as a document."""
    with opened(path) as file:
        content = file.read()
    try:
        found = list(READERS[extension(path)](content))
    except UserError:  # a library is missing
        raise
    except (Exception, SystemExit):  # for damaged and encrypted files, libraries raise many types
        return Fault.UNREADABLE
    sections = tuple(Section(title, text) for title, text in found if any(map(str.strip, text)))
    return sections or Fault.EMPTY


# Files: titled sections of plain paragraphs, without code, tables, pictures or markup
#
# Each reader takes the bytes of a file and yields titles and lines. A line is a paragraph or blank. The title of a
# section is the path of its headings, `Guide: Installation`, because many documents have a section called Installation.

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


# Docstrings of the standard library and of scientific packages, so that a first run needs no download
#
# Source files are parsed, never imported. One function in ten is held out for evaluation: the summary and the rest of
# its docstring are a pair, and its sentences are left out of the corpus.

PACKAGES = ("numpy", "scipy", "jax", "flax", "optax", "matplotlib")
SKIPPED_FOLDERS = {"test", "tests", "_testing", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT_SHARE = 10  # one function in ten
WORDS = range(5, 61)  # words of a sentence
REST_WORDS = range(8, 61)  # words of the second half of a pair

PROSE_SECTIONS = {"notes", "note", "summary", "extended summary", "description", "warnings", "warning", "details"}
UNDERLINE = re.compile(r"([=\-~^*#`\"'])\1{2,}$")
FIELD_HEADING = re.compile(r"[A-Z][A-Za-z ]{2,30}::?$")
LIST_ITEM = re.compile(r"([-*+•]|\(?(\d{1,2}|[a-z])[.)])\s|[:|>+@.]|[\w, *]+ : |[a-z]\w*:\s|\w+ +-- ")
MARKUP = (  # pattern and replacement; a NUL makes its sentence unfit
    (re.compile(r":math:`[^`]*`|\$[^$]*\$"), "\0"),
    (ROLE, r"\1"),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"`([^`<]*?)\s*(?:<[^`]*>)?`_{0,2}"), r"\1"),  # `name`, `text <target>`_
    (re.compile(r"\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*"), r"\1\2"),
    (re.compile(r"\b(and|by|from|in|of|see|than|to|with)\s+\[[\w#*]+\]_"), "\0"),  # a citation used as a noun
    (re.compile(r"\s*\[[\w#*]+\]_"), ""),
)
CODE = re.compile(
    r"[^\w\s.,;:!?'\"()-]|_"  # signs that are rare in prose
    r"|\w\(|\(\)|::|--|\.\.|(?<!\w)\.\w|'\w+'\w"
    r"|\b(?!(e\.g|i\.e)\b)[A-Za-z]\w*\.\w"  # dotted names
    r"|\b[a-z]+[A-Z]"  # camelCase
)


class Docstring(NamedTuple):
    name: str  # of the documented object
    sentences: tuple[str, ...]  # the English ones
    has_summary: bool  # the first of them is the summary


def docstring_sentences() -> Iterable[str]:
    """Return the distinct sentences of 5 to 60 words, in an order that depends on the installed sources only."""
    return dict.fromkeys(sentence for item in _docstrings()[0] for sentence in item.sentences)


def docstring_pairs(limit: int = 500) -> list[tuple[str, str]]:
    """Return held-out pairs: the first sentence of a function's docstring, and up to 60 words of the rest.

    A hash of the function's name chooses at most `limit` pairs. No half occurs twice or in `docstring_sentences`.
    """
    pairs = []
    for item in sorted(_docstrings()[1], key=lambda item: _hash(item.name)):
        rests = itertools.accumulate(item.sentences[1:], lambda text, sentence: f"{text} {sentence}")
        rest = [text for text in rests if len(text.split()) < REST_WORDS.stop]
        if item.has_summary and rest and len(rest[-1].split()) in REST_WORDS:
            pairs.append((item.sentences[0], rest[-1]))
    occurrences = Counter(half for pair in pairs for half in pair)
    return [pair for pair in pairs if all(occurrences[half] == 1 for half in pair)][:limit]


def docstring_documents() -> Documents:
    """Return the docstrings that are not held out and have an English summary, without held-out sentences."""

    def read() -> Iterator[Placed]:
        # Each text once, with the name of the last object that has it.
        texts = {item.sentences: item.name for item in _docstrings()[0] if item.has_summary}
        return ((name, (Section("", text, sentence_a_line=True),)) for text, name in texts.items())

    return Documents("docstrings", read, docstring_fingerprint)


def docstring_fingerprint() -> str:
    """Return the SHA-256 of the docstrings in hexadecimal."""
    return hashlib.sha256(repr(_docstrings()).encode()).hexdigest()


@functools.cache
def _docstrings() -> tuple[list[Docstring], list[Docstring]]:
    """Return the docstrings for training, without held-out sentences, and those that are held out."""
    training: list[Docstring] = []
    held_out: list[Docstring] = []
    for module, file in _source_files():
        for item, is_function in _docstrings_of(module, file):
            (held_out if is_function and _hash(item.name) % HELD_OUT_SHARE == 0 else training).append(item)
    kept_out = {sentence for item in held_out for sentence in item.sentences}
    for number, (name, sentences, has_summary) in enumerate(training):
        kept = tuple(sentence for sentence in sentences if sentence not in kept_out)
        training[number] = Docstring(name, kept, has_summary and sentences[0] not in kept_out)
    return training, held_out


def spans_of(docstring: str) -> list[str]:
    """Split the running text, without markup, lists, tables, code, parameters and headings, into sentences."""
    spans, in_prose = [], True
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.split("\n")
        if len(lines) > 1 and UNDERLINE.match(lines[1].strip()):
            in_prose = lines[0].strip().lower() in PROSE_SECTIONS
            lines = lines[2:]
        elif FIELD_HEADING.match(lines[0]):
            continue
        is_prose = in_prose and lines
        if not is_prose or any(line[:1].isspace() or LIST_ITEM.match(line) or UNDERLINE.match(line) for line in lines):
            continue
        text = " ".join(" ".join(lines).split())
        for pattern, plain in MARKUP:
            text = pattern.sub(plain, text)
        start = 0
        for gap in SENTENCE_END.finditer(text):
            if not ABBREVIATION.search(text[start : gap.start()]):
                spans.append(text[start : gap.end()].strip())
                start = gap.end()
        spans.append(text[start:].strip())
    return spans


def is_english(sentence: str) -> bool:
    """Return whether a sentence is English prose of a usual length, without code."""
    letters = sum(character.isalpha() or character.isspace() for character in sentence)
    return (
        len(sentence.split()) in WORDS
        and sentence[0].isupper()
        and sentence[-1] in ".?!"
        and sentence.count("(") == sentence.count(")")
        and letters >= 0.85 * len(sentence)
        and not CODE.search(sentence)
    )


def _hash(name: str) -> int:
    """Return a hash that is the same in each process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _source_files() -> Iterator[tuple[str, Path]]:
    """Yield module names and files of the standard library and of the installed packages, in sorted order."""
    roots = [("", Path(sysconfig.get_paths()["stdlib"]))]
    for package in PACKAGES:
        if (spec := importlib.util.find_spec(package)) and spec.origin:
            roots.append((package, Path(spec.origin).parent))
    for package, root in roots:
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if not SKIPPED_FOLDERS.intersection(parts) and not parts[-1].startswith("test"):
                yield ".".join(filter(None, (package, *parts))), file


def _docstrings_of(module: str, file: Path) -> Iterator[tuple[Docstring, bool]]:
    """Yield the docstrings of a file, and whether each is that of a function."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in old sources
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates that are not Python
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    pending: list[tuple[str, Any]] = [(module, tree)]
    while pending:
        name, node = pending.pop()
        if text := ast.get_docstring(node, clean=False):
            spans = spans_of(text)
            sentences = tuple(filter(is_english, spans))
            has_summary = bool(sentences) and sentences[0] == spans[0]
            yield Docstring(name, sentences, has_summary), isinstance(node, functions)
        children = (child for child in ast.iter_child_nodes(node) if isinstance(child, (*functions, ast.ClassDef)))
        pending += [(f"{name}.{child.name}", child) for child in children]
