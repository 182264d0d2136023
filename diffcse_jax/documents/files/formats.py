"""Formats of documents: the bytes of one file become titled sections.

A line of a section is a paragraph or blank. The title of a section is the path of its headings,
`Guide: Installation`, because many documents have a section called Installation. Processes that
only read documents import this file, so it imports little, and libraries where they are used.
"""

import codecs
import contextlib
import html
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diffcse_jax.documents.files import EXTRA, EncryptedError, TooLargeError, TooRepetitiveError
from diffcse_jax.documents.files.html import Sections, html_of_xhtml, html_sections
from diffcse_jax.documents.files.office import (
    OFFICE,
    OFFICE_EXTRA,
    PARTS,
    SHEETS,
    office_markdown,
    without_stand_ins,
)
from diffcse_jax.documents.files.pdf import pdf_paragraphs
from diffcse_jax.documents.files.rst import TooManySubstitutionsError, html_of_rst
from diffcse_jax.documents.ledger import EMPTY, NO_TEXT
from diffcse_jax.documents.text.encodings import REPLACEMENT, Decoded, decode
from diffcse_jax.errors import MissingPackageError, UserError, counted, require_extra

DAMAGED = "damaged"
ENCRYPTED = "encrypted"
TOO_LARGE = "larger than 256 MB"
OUT_OF_MEMORY = "needs too much memory"
TOO_DEEP = "nested too deeply"
REPETITIVE = "with cells that are repeated too often"
ENDLESS = "with names that stand for too much text"
MOST_MEMORY = 256 << 20  # bytes of memory that the titles and lines of a document may take


class Parsed(NamedTuple):
    """The text of a document."""

    sections: Sections  # titles and lines
    left_out: Mapping[str, int]  # by kind, such as {"code block{s}": 3, "table{s}": 1}
    notes: tuple[str, ...]  # what was assumed, such as "read as windows-1252"


class Unreadable(NamedTuple):
    """A document without text, or whose text cannot be read."""

    reason: str
    is_limit: bool = False  # of time or memory: another try may read it


def parse(content: bytes, kind: str, *, with_code: bool) -> Parsed | Unreadable:
    """Read a document.

    Args:
        content: The file, decompressed.
        kind: Its extension, one of `KINDS`.
        with_code: Also read tables, code and preformatted text, as search does. Training leaves
            them out.
    """
    read = _READERS[kind]
    if not content.strip():
        return Unreadable(EMPTY)
    try:
        parsed = read(content, kind, with_code)
    except MissingPackageError:
        extra = OFFICE_EXTRA if kind in OFFICE else EXTRA
        command = f"pip install 'diffcse_jax[{extra}]'"
        return Unreadable(f"unreadable without the extra {extra}: {command}")
    except UserError as error:  # a library is broken
        return Unreadable(f"not read, because {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # libraries raise many types, and those in Rust their own
        reasons = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
        return Unreadable(next(reasons, DAMAGED), is_limit=isinstance(error, MemoryError))
    return _checked(parsed)


def lacks_library(kind: str) -> bool:
    """Return whether documents of a kind are left out, because a library is missing or broken."""
    for library in _LIBRARIES.get(_READERS[kind], ()):
        try:
            require_extra(library, EXTRA)
        except UserError:
            return True
    return False


_REASONS: dict[type[BaseException], str] = {
    EncryptedError: ENCRYPTED,
    TooLargeError: TOO_LARGE,
    TooManySubstitutionsError: ENDLESS,
    TooRepetitiveError: REPETITIVE,
    MemoryError: OUT_OF_MEMORY,
    RecursionError: TOO_DEEP,
}


def _checked(parsed: Parsed) -> Parsed | Unreadable:
    """Replace characters that cannot be stored, and leave out sections without text."""
    broken = 0

    def repaired(text: str) -> str:
        nonlocal broken
        text, number = NOT_STORABLE.subn(REPLACEMENT, text)
        broken += number
        return text

    with_text = [section for section in parsed.sections if any(map(str.strip, section[1]))]
    sections = tuple((repaired(title), list(map(repaired, lines))) for title, lines in with_text)
    if not sections:
        return Unreadable(NO_TEXT)
    if sum(_memory(title) + sum(map(_memory, lines)) for title, lines in sections) > MOST_MEMORY:
        return Unreadable(OUT_OF_MEMORY, is_limit=True)
    return Parsed(sections, dict(parsed.left_out), (*parsed.notes, *_replaced_note(broken)))


def _memory(text: str) -> int:
    """Return the bytes of memory that a text takes, with its place in a list."""
    return sys.getsizeof(text) + 8


# Text

NOT_STORABLE = re.compile("[\0\ud800-\udfff]")  # NUL, and halves of characters of UTF-16
CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?([\w.:-]+)""", re.I)
DECLARED_BEFORE = 4096  # bytes
WEB_ENCODINGS = {  # browsers read the left ones as the right ones
    "iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949",
    "big5": "big5hkscs",
}  # fmt: skip


def _decoded(content: bytes) -> Decoded:
    """Decode a file."""
    decoded = decode(content)
    return _cleaned(decoded.text, decoded.notes)


def _cleaned(text: str, notes: tuple[str, ...] = ()) -> Decoded:
    """End lines with line feeds, and replace what cannot be stored."""
    text, broken = NOT_STORABLE.subn(REPLACEMENT, text.replace("\r\n", "\n").replace("\r", "\n"))
    return Decoded(text, (*notes, *_replaced_note(broken)))


def _replaced_note(number: int) -> tuple[str, ...]:
    """Say how many characters were replaced."""
    if not number:
        return ()
    return (f"{counted(number, 'character{s}')} without meaning became U+FFFD",)


def _read_text(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read a text as one section without a title."""
    text = _decoded(content)
    return Parsed((("", text.text.split("\n")),), {}, text.notes)


# Html


def _read_html(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read a page, or XHTML."""
    text = _decoded_page(content)
    is_xml = kind in (".xhtml", ".xht") or content.lstrip().startswith(b"<?xml")
    page = html_of_xhtml(text.text) if is_xml else text.text
    sections, left_out = html_sections(page, with_code=with_code, is_page=True)
    return Parsed(sections, left_out, text.notes)


def _decoded_page(content: bytes) -> Decoded:
    """Decode a page as UTF-8, else as it says, else as it seems."""
    declared = _declared(content)
    is_ascii = declared.startswith("iso2022")  # which is no UTF-8, though its bytes are valid
    for encoding in [declared] if is_ascii else filter(None, ["utf-8-sig", declared]):
        with contextlib.suppress(UnicodeDecodeError):
            return _cleaned(content.decode(encoding))
    return _decoded(content)


def _declared(content: bytes) -> str:
    """Return the encoding that a page names, or an empty text if Python does not know it."""
    match = CHARSET.search(content[:DECLARED_BEFORE])
    if not match:
        return ""
    try:
        name = codecs.lookup(match[1].decode("ascii", errors="replace")).name
    except LookupError:
        return ""
    is_wide = name.startswith(("utf-16", "utf-32"))  # else the declaration could not be read
    return "utf-8" if is_wide else WEB_ENCODINGS.get(name, name)


# Markdown

FRONT_MATTER = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(?![ \t]*\n)"  # no blank line follows
    r"(.*?\n)??(?:\1|\.\.\.)[ \t]*(?:\n|\Z)",
    re.DOTALL,
)
LONGEST_FRONT_MATTER = 4096  # characters; TOML takes time that grows with the square
NOT_TEXT = re.compile(
    r"^[ \t>]*:{3,}.*$"  # ::: of site generators
    r"|\[![A-Za-z][^\[\]\n]*(\[[^\[\]\n]*\]\([^()\n]*\))?\]"  # [!NOTE]
    r"|(?<!`)(\{%[^%]*%\}|\{\{[<%][^{}]*[>%]\}\})"  # templates
    r"|[ \t]\{:?[ \t]*[#.][^{}\n]*\}[ \t]*$",  # names of headings
    re.MULTILINE,
)
MDX_CODE = re.compile(r"^(?:import\s.*\sfrom\s|import\s+[\"']|export\s).*$", re.MULTILINE)


def _read_markdown(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read CommonMark with tables. A title in front matter counts if no heading has level 1."""
    text = _decoded(content)
    title, body, notes = _without_front_matter(text.text)
    if kind == ".mdx":
        body = MDX_CODE.sub("", body)
    sections, left_out = html_sections(_html_of_markdown(body), title, with_code=with_code)
    return Parsed(sections, left_out, (*text.notes, *notes))


def _html_of_markdown(text: str) -> str:
    pyromark = require_extra("pyromark", EXTRA)
    known = pyromark.Options
    options = known.ENABLE_TABLES | known.ENABLE_TASKLISTS
    options |= known.ENABLE_GFM | known.ENABLE_FOOTNOTES
    return pyromark.html(NOT_TEXT.sub("", text), options=options)


def _without_front_matter(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the title in front matter of YAML or TOML, the text below it, and notes.

    Front matter that is long or not valid is text. So is what stands between two lines of dashes if
    it is not a mapping.
    """
    match = FRONT_MATTER.match(text)
    if not match:
        return "", text, ()
    below = text[match.end() :]
    front = match[2] or ""
    try:
        values = _loaded(front, match[1])
    except ValueError as error:
        note = f"front matter is {error}, and was read as text"
        return "", f"{front}\n\n{below}", (note,)
    is_front = isinstance(values, dict) and ("title" in values or not any(map(_is_prose, values)))
    if not is_front:
        return "", text, ()
    return _title(values.get("title")), below, ()


def _loaded(front: str, mark: str) -> Any:
    """Return the values in front matter, or raise `ValueError` that says what it is."""
    if len(front) > LONGEST_FRONT_MATTER:
        raise ValueError(f"longer than {LONGEST_FRONT_MATTER:,} characters")
    if not front.strip():
        return {}
    load, problem = _LOADERS[mark]
    try:
        return load(front)
    except (ValueError, RecursionError) as error:
        raise ValueError(problem) from error


def _yaml(text: str) -> Any:
    """Load YAML whose values stay text: `1.10` is not a number.

    An alias repeats what stands elsewhere, so that a few of them may stand for millions of values.
    """
    yaml = require_extra("yaml", EXTRA)
    try:
        if "*" in text and any(isinstance(each, yaml.AliasToken) for each in yaml.scan(text)):
            raise ValueError
        return yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError from error


_LOADERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "---": (_yaml, "not valid YAML, or has aliases"),
    "+++": (tomllib.loads, "not valid TOML"),
}


def _is_prose(key: Any) -> bool:
    return not isinstance(key, str) or " " in key


def _title(value: Any) -> str:
    """Return the title that a value of front matter is. Values in a list are joined."""
    if isinstance(value, dict) or value is None or value in ("~", "null"):
        return ""
    values = value if isinstance(value, list) else [value]
    return " ".join(" ".join(str(each) for each in values if not isinstance(each, list)).split())


# reStructuredText


def _read_rst(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read reStructuredText. Directives of Sphinx are left out."""
    text = _decoded(content)
    page, unread, notes = html_of_rst(text.text)
    sections, left_out = html_sections(page, with_code=with_code)
    return Parsed(sections, {**left_out, **unread}, (*text.notes, *notes))


# Pdf


def _read_pdf(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read a pdf as one section without a title."""
    paragraphs, left_out, notes = pdf_paragraphs(content)
    lines = [line for paragraph in paragraphs for line in (paragraph, "")]
    return Parsed((("", lines),), left_out, notes)


# Notebooks


def _read_notebook(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read the cells of a Jupyter notebook, without what its code has printed."""
    text = _decoded(content)
    notebook = json.loads(text.text)
    sheets = notebook.get("worksheets", [notebook])  # of old notebooks
    cells = [cell for sheet in sheets for cell in sheet.get("cells", ())]
    pages = [_html_of_cell(cell) for cell in cells]
    sections, left_out = html_sections("\n".join(pages), with_code=with_code)
    outputs = sum(bool(cell.get("outputs")) for cell in cells)
    counts = {**left_out, "output{s} of code": outputs} if outputs else left_out
    return Parsed(sections, counts, text.notes)


def _html_of_cell(cell: Mapping[str, Any]) -> str:
    source = cell.get("source", cell.get("input", ""))
    text, _ = NOT_STORABLE.subn(REPLACEMENT, source if isinstance(source, str) else "".join(source))
    if cell["cell_type"] == "markdown":
        return _html_of_markdown(text)
    tag = {"code": "pre", "heading": f"h{cell.get('level', 1)}"}.get(cell["cell_type"], "p")
    return f"<{tag}>{html.escape(text)}</{tag}>"


# Office


def _read_office(content: bytes, kind: str, with_code: bool) -> Parsed:
    """Read an office document. The parts of some kinds are of equal rank, each with a heading."""
    markdown, unread = office_markdown(content, kind)
    sections, left_out = html_sections(
        without_stand_ins(_html_of_markdown(markdown)),
        with_code=with_code or kind in SHEETS,
        first_is_title=kind not in PARTS,
    )
    return Parsed(sections, {**left_out, **unread}, ())


_Reader = Callable[[bytes, str, bool], Parsed]
_READERS: dict[str, _Reader] = {
    **dict.fromkeys((".txt", ".text", ".adoc", ".asciidoc"), _read_text),
    **dict.fromkeys((".md", ".markdown", ".mkd", ".mdx", ".rmd", ".qmd"), _read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xht"), _read_html),
    ".rst": _read_rst,
    ".pdf": _read_pdf,
    ".ipynb": _read_notebook,
    **dict.fromkeys(OFFICE, _read_office),
}
_LIBRARIES: dict[_Reader, tuple[str, ...]] = {
    _read_markdown: ("pyromark", "yaml", "lxml.etree"),
    _read_html: ("lxml.etree",),
    _read_rst: ("docutils.core", "lxml.etree"),
    _read_pdf: ("pypdfium2",),
    _read_notebook: ("pyromark", "lxml.etree"),
    _read_office: ("kreuzberg", "pyromark", "lxml.etree"),
}
KINDS = tuple(_READERS)
PLAIN_TEXT = tuple(kind for kind, read in _READERS.items() if read is _read_text)
