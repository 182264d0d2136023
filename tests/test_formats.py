"""Documents in each format: their titles and text, what is left out, and what cannot be read."""

import importlib
import io
import json
import re
import zipfile

import pytest
from growth import assert_linear, assert_small
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rc_context
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from diffcse_jax.documents.files import formats
from diffcse_jax.documents.files import html as pages
from diffcse_jax.documents.files.formats import Parsed, Unreadable, parse
from diffcse_jax.documents.files.office import OFFICE


def parsed(content: bytes | str, kind: str = ".md", *, with_code: bool = False) -> Parsed:
    content = content.encode() if isinstance(content, str) else content
    found = parse(content, kind, with_code=with_code)
    assert isinstance(found, Parsed), found
    return found


def read(content: bytes | str, kind: str = ".md", **options) -> list[tuple[str, list[str]]]:
    sections = parsed(content, kind, **options).sections
    return [(title, [line for line in lines if line.strip()]) for title, lines in sections]


def text_of(content: bytes | str, kind: str = ".html", **options) -> str:
    parts = [text for title, lines in read(content, kind, **options) for text in (title, *lines)]
    return " ".join(" ".join(parts).split())


# Markdown, html and rst

PAGE = b"""---
layout: page
---
# The *tool*

It does [one thing](https://example.org) well.
It does `it` fast, with [a link of its own][1].

[1]: https://example.org

## Installation ##

- Get **the package**.
- [x] Run it,
  with care.

```
code is not text
```

| a | table |
|---|---|

Heading by a line
-----------------
Text of it.
<!-- nobody
sees this -->
"""
HTML_PAGE = b"""<html><head><title>Not this</title><style>p {}</style></head><body><nav>Home</nav>
<h1>The <em>tool</em></h1><p>It does <a href="x">one thing</a> well. It does <code>it</code> fast,
with a link of its own.</p><h2>Installation<a class="headerlink" href="#i">\xc2\xb6</a></h2>
<ul><li>Get <b>the package</b>.<li>Run it, with care.</ul>
<pre>code is not text</pre><table><tr><td>a</td><td>table</td></tr></table>
<h2>Heading by a line</h2><div>Text of it.<script>x()</script></div><!-- nobody sees this -->
</body></html>"""
RST_PAGE = b"""
The *tool*
==========

It does `one thing <https://example.org>`_ well. It does :func:`it <a.b>` fast, with a link of its own.

.. note that nobody sees

Installation
------------

.. note:: Get **the package**.

- Run it,
  with care.

.. include:: /etc/hostname

::

    code is not text

.. list-table::

   * - a
     - table

.. math:: x^2

Heading by a line
-----------------
Text of it.
"""
PAGES = [(PAGE, ".md"), (HTML_PAGE, ".html"), (RST_PAGE, ".rst")]


@pytest.mark.parametrize(("content", "kind"), PAGES)
def test_a_page_becomes_titled_sections(content, kind):
    paragraphs = ["It does one thing well. It does it fast, with a link of its own."]
    items = ["Get the package.", "Run it, with care."]
    titles = ["The tool", "The tool: Installation", "The tool: Heading by a line"]
    found = parsed(content, kind)
    assert read(content, kind) == [*zip(titles, [paragraphs, items, ["Text of it."]], strict=True)]
    math = kind == ".rst"
    assert (found.left_out["code block{s}"], found.left_out["table{s}"]) == (1 + math, 1)
    searched = read(content, kind, with_code=True)
    assert searched[1] == (titles[1], [*items, "code is not text", "a | table", *["x^2"] * math])
    menu = {"menu{s}": 1} if kind == ".html" else {}
    left_out = parsed(content, kind, with_code=True).left_out
    assert left_out == ({"unread directive{s}": 1} if kind == ".rst" else menu)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The first heading is the title.
        ("### A\n\nx\n\n# B\n\nx\n\n## C\n\nx\n\n# D\n\nx", ["A", "A: B", "A: B: C", "A: D"]),
        ("# A\n\n## A\n\nx\n\n### B\n\nx", ["A", "A: B"]),  # a repeated heading
        ("---\ntitle: 'The page'\n---\nx\n\n## B\n\nx", ["The page", "The page: B"]),
        ('+++\ntitle = "The page"\n+++\n## B\n\nx\n\n## C\n\nx', ["The page: B", "The page: C"]),
        ("---\ntitle: Another\n---\nx\n\n# The page\n\nx", ["", "The page"]),
        ("# A {#name .class}\n\nx", ["A"]),
        ("`<vector>` has `a_b_c` and `*p`, 2 \\* 3 &lt; 7", "<vector> has a_b_c and *p, 2 * 3 < 7"),
        ("see <https://example.org> <b>now</b> ![a *b*](a.png)", "see https://example.org now"),
        ("> [!NOTE]\n> Take care.", "Take care."),
        ("> [!hint] Careful\n> Take care.", "Careful Take care."),
        ("{% raw %}A{% endraw %} {{< note >}}B{{< /note >}} `{% if %}`", "A B {% if %}"),
        ("One line.<br>Another.\n\n<hr>\n\nMore.", "One line. Another. More."),
        ("````text\n```\n~~~\ncode\n```` no end\n````\n~~~ python\nmore\n~~~~\nHere.", "Here."),
        ("A note[^1].\n\n[^1]: Its text.", "A note. Its text."),
        (
            ">" * 40 + " deep\n\n" + "".join(" " * 2 * i + "- a\n" for i in range(40)),
            "deep" + " a" * 40,
        ),
    ],
)
def test_markdown_has_titles_of_all_headings_and_text_without_markup(text, expected):
    if isinstance(expected, list):
        assert [title for title, _ in read(text)] == expected
    else:
        assert text_of(text, ".md") == expected


SPHINX_PAGE = """
.. index:: single: nothing

Sums
====

.. py:function:: compute(a, *, b)
   :noindex:

   Compute the *sum*.

   .. versionchanged:: 3.7
      Added the value b.

.. seealso:: The other page.

.. toctree::

   never

.. only:: html

   Read `this <a>`_.

.. testcode::

   x = 1
"""


def test_text_in_directives_of_sphinx_is_read():
    text = ["Compute the sum.", "Added the value b.", "The other page.", "Read this."]
    assert read(SPHINX_PAGE, ".rst") == [("Sums", text)]
    searched = text_of(SPHINX_PAGE, ".rst", with_code=True)
    assert searched.startswith("Sums compute(a, *, b) Compute")
    assert searched.endswith("x = 1")
    assert "nothing" not in searched
    assert "never" not in searched


def test_a_heading_without_text_is_not_lost():
    text = "# Guide\n\n## First\n\n## Second\n\nText.\n\n### Deeper\n\n#### Deepest\n\n# Last"
    assert read(text) == [
        ("Guide", ["First"]),
        ("Guide: Second", ["Text."]),
        ("Guide: Second: Deeper", ["Deepest"]),
        ("Guide", ["Last"]),
    ]
    assert read("# Only") == [("", ["Only"])]


@pytest.mark.parametrize(
    ("front", "title"),
    [
        (
            "title: >-\n  How to renew a library\n  card\ndate: 2026-01-01",
            "How to renew a library card",
        ),
        ('title: "Parking \\"near\\" the hall"   # reviewed', 'Parking "near" the hall'),
        ("title: It's here: now\nbad key: [", None),
        ("title: 'It''s #1'", "It's #1"),
        ("title: 1.10", "1.10"),
        ("title: [one, two]", "one two"),
        ("title: {a: b}", ""),
        ("title: ~", ""),
        ("title: !tag x", "x"),
        ("# only a comment\ntitle: |\n  two\n  lines", "two lines"),
        ("title: a" + " " * 4_000 + "b", "a b"),
        ("", ""),
        ("title: " + "[" * 100, None),
        (
            "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(9)) + "title: *b8",
            None,
        ),
    ],
)
def test_the_title_in_front_matter_is_what_yaml_says(front, title):
    front += "\n" * bool(front)
    for end in ("---", "..."):
        text = f"---\n{front}{end}\nText below."
        if title is None:  # not valid
            assert front.split()[1] in text_of(text, ".md")
            problem = "not valid YAML, or has aliases"
            assert parsed(text).notes == (f"front matter is {problem}, and was read as text",)
        else:
            assert read(text) == [(title, ["Text below."])]
        assert text_of(text.replace("\n", "\r\n"), ".md") == text_of(text, ".md")


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nNote: this is text.\n\n---\n\nMore of it.",
        "---\nThis is text: it has a colon.\n---\nMore of it.",
        "---\nNo end of front matter.",
        "+++\nnot = [toml\n+++\nMore of it.",
        "Text.\n\n---\ntitle: none\n---\n",
    ],
)
def test_what_is_not_front_matter_is_text(text):
    words = set(re.findall(r"\w+", text))
    assert words <= set(re.findall(r"\w+", text_of(text, ".md")))


# Html

LONG = "This is the text of the page, which has some words. "
PARAGRAPHS = f"<h1>Hours</h1><p>{LONG * 3}</p><p>We open at nine.</p>"


@pytest.mark.parametrize(
    "page",
    [
        "<form>{}</form>",
        "<nav><a href=x>Home</a><p>{}",  # never closed
        "<header><a>Home</a>{}</header><p>Imprint.</p>",
        "<aside>{}</aside>",
        "<footer>{}</footer>",
        "<noscript><article>{}</article></noscript>",
        "<form><nav><a>Home</a></nav><table><tr><td><a>Menu</a></td><td>{}</td></tr></table></form>",
        "<table><tr><td><table><tr><td>{}</td></tr></table></td></tr></table>",
        "<b><i><font><center>{}",
        "<pre>{}</pre>",
        "<button>{}</button>",
        "<main><header>{}</header></main><article><aside>{}</aside></article>",
    ],
)
def test_what_holds_most_of_a_page_is_its_text(page):
    for with_code in (False, True):
        text = text_of(page.replace("{}", PARAGRAPHS), with_code=with_code)
        assert "Hours" in text
        assert "words. We open at nine." in text


def test_what_surrounds_the_text_is_left_out_and_counted():
    parts = {tag: f"<{tag}>Never read this.</{tag}>" for tag in pages.SURROUNDINGS}
    page = "".join(parts.values()) + PARAGRAPHS * 5
    assert "Never" not in text_of(page)
    assert parsed(page, ".html").left_out == {kind: 1 for kind in pages.SURROUNDINGS.values()}
    empty = "<nav></nav><form> <input> </form>" + PARAGRAPHS
    assert parsed(empty, ".html").left_out == {}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<title>The page</title><h1><img></h1><p>Text.<figcaption>More.",
         [("The page", ["Text.", "More."])]),
        ("<article><header><h1>One</h1></header><p>Text.", [("One", ["Text."])]),
        ("<h2><button>More</button></h2><p>Text.<button><h3>Even <i>more</i></h3></button>Rest.",
         [("More", ["Text."]), ("More: Even more", ["Rest."])]),
        ("<h1><div>Two</div> lines<br>of it</h1><p>Text.", [("Two lines of it", ["Text."])]),
        (f"<h1>Never closed <div>{LONG * 9}</div>", [("", ["Never closed", (LONG * 9).strip()])]),
        ("<div class=note><p class=admonition-title>Note</p>Text.</div>", [("", ["Text."])]),
        ("<div class=note><p class=admonition-title>My title</p>Text.</div>", [("", ["My title", "Text."])]),
        ("<p>One<svg><title>An icon</title></svg> two<wbr>three</p>", [("", ["One twothree"])]),
        ("<h1>A</h1>x<h2>B</h2>x<my-part><p>In it.</p></my-part>", [("A", ["x"]), ("A: B", ["x", "In it."])]),
        ("text</p>more</b> text</div>end</br>", [("", ["text", "more textend"])]),
        ("&lt;b&gt; &amp;amp; &nbsp;&#8364;&#xD800;", [("", ["<b> &amp; \u20ac\ufffd"])]),
    ],
)  # fmt: skip
def test_html_as_browsers_read_it(page, expected):
    assert read(page, ".html") == expected


def test_tables_and_preformatted_text_are_searched():
    table = (
        "<table><caption>Prices</caption><tr><th>Place<th>Rate<tr><td><p>Oslo</p><td>90 <b>euro</b>"
        "<br>a day<tr><td><td></table>"
    )
    page = f"<p>{LONG * 9}{table}<pre>one <button>Copy</button>\n\n  two<br>three </pre>"
    lines = ["Prices", "Place | Rate", "Oslo | 90 euro a day", "one", "  two", "three"]
    assert read(page, ".html", with_code=True)[0][1][1:] == lines
    assert parsed(page, ".html").left_out == {"code block{s}": 1, "table{s}": 1}


@pytest.mark.parametrize(
    ("encoding", "declared"),
    [("utf-8", ""), ("utf-8", "latin1"), ("latin1", "latin1"), ("cp1252", "utf-8"), ("utf-16", ""),
     ("cp932", "shift_jis"), ("gbk", "gb2312"), ("iso2022_jp", "iso-2022-jp"), ("utf-8", "unknown")],
)  # fmt: skip
def test_pages_are_read_in_their_encoding(encoding, declared):
    word = "Caf\xe9" if encoding in ("latin1", "cp1252") else "\u65e5\u672c"
    page = f'<meta http-equiv=x content="text/html; charset={declared}"><p>{word} is open.'
    assert text_of(page.encode(encoding)) == f"{word} is open."


def test_xhtml_has_elements_without_end_tags():
    page = '<?xml version="1.0"?><html><head><title/><script src="x"/></head><body><a id="b"/><p/>Text.'
    for kind in (".xhtml", ".html"):
        assert text_of(page, kind) == "Text."


WORDS = st.lists(st.text("abc", min_size=6, max_size=9), min_size=1, max_size=4).map(" ".join)
TAGS = (
    "p",
    "div",
    "h1",
    "h3",
    "li",
    "b",
    "pre",
    "table",
    "td",
    "nav",
    "form",
    "header",
    "button",
    "a",
)
TREES = st.recursive(
    WORDS, lambda inner: st.tuples(st.sampled_from(TAGS), st.lists(inner, min_size=1, max_size=4)), max_leaves=12
)  # fmt: skip


@given(TREES, st.booleans(), st.booleans())
def test_no_text_of_a_page_is_lost_without_a_count(tree, is_closed, with_code):
    def written(part) -> str:
        if isinstance(part, str):
            return f" {part} "
        tag, inner = part
        return f"<{tag}>{''.join(map(written, inner))}" + f"</{tag}>" * is_closed

    page = written(tree)
    found = parse(page.encode(), ".html", with_code=with_code)
    words = set(re.findall("[abc]{6,}", page))
    if isinstance(found, Parsed):
        texts = (text for title, lines in found.sections for text in (title, *lines))
        words -= set(" ".join(texts).split())
    assert not words or found == Unreadable("without text") or found.left_out


# Pdf


def pdf(*pages: list[str]) -> bytes:
    file = io.BytesIO()
    with rc_context({"pdf.use14corefonts": True}), PdfPages(file) as document:
        for lines in pages:
            figure = Figure()
            for number, line in enumerate(lines):
                figure.text(0.1, 0.9 - 0.05 * number, line, fontsize=10, family="Helvetica")
            document.savefig(figure)
    return file.getvalue()


PDF_PAGES = (
    ["The title", "",
     "The quick brown fox jumps over the lazy dog, and then it accom-",
     "modates itself in its den. There it sleeps until the sun has risen,",
     "and all the other animals of the", "", "1"],
    ["forest have gone home. Then it comes out.",
     "A new paragraph begins here, after a short line of text, and it goes",
     "on.", "", "2"],
)  # fmt: skip


def test_lines_of_a_pdf_become_paragraphs():
    title = "The title"
    first = (
        "The quick brown fox jumps over the lazy dog, and then it accommodates itself in its den. "
        "There it sleeps until the sun has risen, and all the other animals of the forest have gone "
        "home. Then it comes out."
    )
    second = "A new paragraph begins here, after a short line of text, and it goes on."
    assert read(pdf(*PDF_PAGES), ".pdf") == [("", [title, first, second])]
    assert parsed(pdf(*PDF_PAGES), ".pdf").left_out == {"page number{s}": 2}
    repeated = [["Handbook", "", f"Text of page {number}."] for number in range(4)]
    assert text_of(pdf(*repeated), ".pdf").count("Handbook") == 1
    assert parsed(pdf(["Text."], []), ".pdf").notes == ("1 of 2 pages hold no text",)


def encrypted(content: bytes) -> bytes:
    start = content.rindex(b"trailer")
    keys = b"<< /ID [<00> <00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>"
    return content[:start] + content[start:].replace(b"<<", keys % (b"41" * 32, b"42" * 32), 1)


# Office


def zipped(parts: dict[str, str]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


SCHEMAS = "http://schemas.openxmlformats.org"
KIND = f"{SCHEMAS}/officeDocument/2006/relationships"
WORD = f"{SCHEMAS}/wordprocessingml/2006/main"
SHEET = f"{SCHEMAS}/spreadsheetml/2006/main"


def relation(name: str, target: str) -> str:
    inner = f'<Relationship Id="r1" Type="{KIND}/{name}" Target="{target}"/>'
    return f'<Relationships xmlns="{SCHEMAS}/package/2006/relationships">{inner}</Relationships>'


def cell(place: str, text: str) -> str:
    return f'<c r="{place}" t="inlineStr"><is><t>{text}</t></is></c>'


DOCX = zipped(
    {
        "word/document.xml": f"""<w:document xmlns:w="{WORD}"><w:body>
<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Questions &amp; answers</w:t></w:r></w:p>
<w:p><w:r><w:t>AT&amp;T pays &lt; 5 &#8364; for *it*.</w:t></w:r></w:p>
<w:tbl><w:tr><w:tc><w:p><w:r><w:t>Oslo</w:t></w:r></w:p></w:tc>
<w:tc><w:p><w:r><w:t>90 &gt; 80</w:t></w:r></w:p></w:tc></w:tr></w:tbl></w:body></w:document>""",
        "word/header1.xml": "",
    }
)
XLSX = zipped(
    {
        "_rels/.rels": relation("officeDocument", "xl/workbook.xml"),
        "xl/_rels/workbook.xml.rels": relation("worksheet", "worksheets/1.xml"),
        "xl/workbook.xml": f'''<workbook xmlns="{SHEET}" xmlns:r="{KIND}"><sheets>
        <sheet name="Cafe" sheetId="1" r:id="r1"/></sheets></workbook>''',
        "xl/worksheets/1.xml": f'''<worksheet xmlns="{SHEET}"><sheetData>
        <row r="1">{cell("A1", "question")}{cell("B1", "answer")}</row>
        <row r="2">{cell("A2", "When is it open?")}{cell("B2", "Q&amp;A &lt; 5")}</row>
        </sheetData></worksheet>''',
    }
)
EPUB = zipped({
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": """<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
        <rootfiles><rootfile full-path="a.opf" media-type="application/oebps-package+xml"/></rootfiles>
        </container>""",
    "a.opf": """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
        <item id="a" href="a.xhtml" media-type="application/xhtml+xml"/>
        <item id="b" href="b.xhtml" media-type="application/xhtml+xml"/>
        </manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>""",
    **{f"{name}.xhtml": f'''<html xmlns="http://www.w3.org/1999/xhtml"><body>
        <h1>Part {name}</h1><p>If 1 &lt;2&gt; &amp; <code>{name} &lt; b</code>.</p></body></html>''' for name in "ab"},
})  # fmt: skip
NOTEBOOK = json.dumps({"cells": [
    {"cell_type": "markdown", "source": ["# The *plan*\n", "\n", "We \ud83d measure.\n"]},
    {"cell_type": "code", "source": "x = 1 < 2", "outputs": [{"text": "True"}]},
    {"cell_type": "raw", "source": "a <b> c"},
]}).encode()  # fmt: skip


def test_office_documents_and_notebooks():
    pytest.importorskip("kreuzberg")
    assert read(DOCX, ".docx") == [("Questions & answers", ["AT&T pays < 5 \u20ac for *it*."])]
    assert "Oslo | 90 > 80" in text_of(DOCX, ".docx", with_code=True)
    assert parsed(DOCX, ".docx").left_out == {"table{s}": 1, "page header{s}": 1}
    assert read(XLSX, ".xlsx") == [("Cafe", ["question | answer", "When is it open? | Q&A < 5"])]
    assert read(EPUB, ".epub") == [(f"Part {name}", [f"If 1 <2> & {name} < b."]) for name in "ab"]
    rtf = rb"{\rtf1\ansi\ansicpg1252 A caf\'e9.\par Another.\par}"
    assert read(rtf, ".rtf") == [("", ["A caf\xe9.", "Another."])]


def test_cells_that_are_repeated_too_often_are_refused():
    pytest.importorskip("kreuzberg")
    content = f"""<w:document xmlns:w="{WORD}"><w:body><w:tbl><w:tr><w:tc>
    <w:tcPr><w:gridSpan w:val="300"/></w:tcPr><w:p><w:r><w:t>{"word " * 1000}</w:t></w:r></w:p>
    </w:tc></w:tr></w:tbl></w:body></w:document>"""
    repeated = zipped({"word/document.xml": content})
    found = parse(repeated, ".docx", with_code=True)
    assert found == Unreadable("with cells that are repeated too often")


def test_notebooks():
    found = parsed(NOTEBOOK, ".ipynb")
    assert found.sections[0][0] == "The plan"
    assert text_of(NOTEBOOK, ".ipynb") == "The plan We \ufffd measure. a <b> c"
    assert "x = 1 < 2" in text_of(NOTEBOOK, ".ipynb", with_code=True)
    assert found.left_out == {"code block{s}": 1, "output{s} of code": 1}
    old = {
        "worksheets": [
            {
                "cells": [
                    {"cell_type": "heading", "level": 2, "source": "A"},
                    {"cell_type": "code", "input": "b"},
                ]
            }
        ]
    }
    assert read(json.dumps(old), ".ipynb", with_code=True) == [("A", ["b"])]


# Whatever the format


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (b"", ".md", "empty"),
        (b" \r\n\t", ".html", "empty"),
        (b"<p><img></p>", ".html", "without text"),
        (b"<!-- <p>Hidden.", ".md", "without text"),
        (b'{"cells": []}', ".ipynb", "without text"),
        (b"{", ".ipynb", "damaged"),
        (b"[" * 100_000, ".ipynb", "nested too deeply"),
        (b"x", ".docx", "damaged"),
        (DOCX[:300], ".docx", "damaged"),
        (b"x", ".epub", "damaged"),
        (b"\xd0\xcf\x11\xe0" + "EncryptedPackage".encode("utf-16-le"), ".xlsx", "encrypted"),
        (b"%PDF-1.4\nbroken", ".pdf", "damaged"),
        (pdf([]), ".pdf", "without text"),
        (encrypted(pdf(["Text."])), ".pdf", "encrypted"),
        ("".join(f".. |{i}| replace:: |{i + 1}| |{i + 1}|\n" for i in range(30)) + "\n|0|", ".rst",
         "with names that stand for too much text"),
        (b"- " * 5000 + b"a", ".rst", "nested too deeply"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_has_a_reason(content, kind, reason):
    content = content.encode() if isinstance(content, str) else content
    if kind in OFFICE:
        pytest.importorskip("kreuzberg")
    assert parse(content, kind, with_code=False) == Unreadable(reason)


@pytest.mark.parametrize(
    ("kind", "library", "extra"),
    [(".html", "lxml", "documents"), (".md", "pyromark", "documents"), (".rst", "docutils", "documents"),
     (".pdf", "pypdfium2", "documents"), (".docx", "kreuzberg", "office")],
)  # fmt: skip
def test_a_missing_or_broken_library_is_named(monkeypatch, kind, library, extra):
    def fail(name: str) -> None:
        raise next(errors)("libz.so: not found", name=name.partition(".")[0])

    usual = importlib.import_module
    errors = iter([ModuleNotFoundError, ModuleNotFoundError, ImportError, ImportError])
    monkeypatch.setattr(
        importlib, "import_module", lambda name: (fail if name.startswith(library) else usual)(name)
    )
    reason = f"unreadable without the extra {extra}: pip install 'diffcse_jax[{extra}]'"
    assert parse(b"Text.", kind, with_code=False) == Unreadable(reason)
    assert formats.lacks_library(kind)
    reason = parse(b"Text.", kind, with_code=False).reason
    problem = f"not read, because the package {library} is installed, but Python cannot import it"
    assert reason.startswith(f"{problem}: libz.so: not found. Install, update or")
    assert formats.lacks_library(kind)


@pytest.mark.parametrize("kind", [".txt", ".md", ".html", ".rst"])
def test_broken_characters_are_replaced_and_noted(kind):
    found = parsed(b"\xef\xbb\xbfOne\0two\r\rthree", kind)
    assert text_of(b"\xef\xbb\xbfOne\0two\r\rthree", kind) == "One\ufffdtwo three"
    assert found.notes == ("1 character without meaning became U+FFFD",)
    text = "Gr\xfc\xdfe aus K\xf6ln an alle G\xe4ste"
    assert text_of(text.encode("cp1252"), kind) == text
    assert "windows-1252" in str(parsed(text.encode("cp1252"), kind).notes)


# Time

HOSTILE = {
    ".html": ["<a ", "<!--", "a<br>", "<div></b>", "<b>x</i>", "<h1><a>", "<p id='", "<ul><li>", "<nav><pre>", "</p>"],
    ".xhtml": ["<a ", "<a/>"],
    ".md": ["[a](", "*a_ ", "`a", "> ", "|a", "[a]: b\n", "# a\n", "{% ", "{{< ", "[!a", "a {#"],
    ".rst": [":a:", ":a:`", "http://a "],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, parts in HOSTILE.items() for part in parts]
)
def test_time_grows_with_the_size_of_a_document(kind, part):
    assert_linear(lambda text: parse(text.encode(), kind, with_code=True), part)


COSTLY = {
    "<b> <div> </b>": (".html", lambda n: "<b>" * n + "<div>" * n + "</b>" * n, 12_000),
    "TOML": (".md", lambda n: f"+++\n{'a.' * n}a = 1\n+++\nText.", 8_000),
    "*a": (".rst", lambda n: "*a " * n, 3_000),
    "_`a`": (".rst", lambda n: "_`a` " * n, 3_000),
    "contents": (".rst", lambda n: ".. contents::\n\n" * n + "a\n=\n\n" * n, 100),
    "target-notes": (".rst", lambda n: ".. target-notes::\n\n" * n + ".. _a: http://b\n\n" * n, 100),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_small_documents_take_little_time(name):
    kind, make, number = COSTLY[name]
    assert_small(lambda text: parse(text.encode(), kind, with_code=True), make, number)


def test_a_document_is_no_larger_than_its_limit(monkeypatch):
    monkeypatch.setattr(formats, "MOST_MEMORY", 20_000)
    assert isinstance(parse(b"ab\n\n" * 100, ".txt", with_code=True), Parsed)
    many = parse(b"ab\n\n" * 1000, ".txt", with_code=True)
    assert many == Unreadable("needs too much memory", is_limit=True)


def test_names_stand_for_no_more_than_a_limit():
    def repeated(number: int) -> str:
        return f".. |a| replace:: {'text ' * 4000}\n\n" + "|a|\n\n" * number

    assert isinstance(parse(repeated(20).encode(), ".rst", with_code=True), Parsed)
    found = parse(repeated(1900).encode(), ".rst", with_code=True)
    assert found == Unreadable("with names that stand for too much text")


def test_markup_is_text_where_there_is_too_much_of_it():
    found = parsed("*one*\n\n" + "*a " * 10_000, ".rst")
    assert found.notes == ("1 paragraph with too much markup, which was read as text",)
    assert [line for line in found.sections[0][1] if line] == ["one", ("*a " * 10_000).strip()]


@pytest.mark.parametrize("kind", [".md", ".html"])
def test_long_headings_do_not_repeat_in_each_title(kind):
    headings = [f"{letter * 200} end" for letter in "abcde"]
    text = "".join(f"<h{level}>{each}</h{level}>\n\n" for level, each in enumerate(headings, 1))
    text += "<h6>a</h6>\n\n<p>b</p>\n\n" * 50
    sections = parsed(text, kind).sections
    titles = [title for title, _ in sections]
    assert max(map(len, titles)) <= 256
    assert titles[-1] == f"{headings[0]}: a"
    lines = [line for _, lines in sections for line in lines]
    assert all(lines.count(heading) == 1 for heading in headings[1:])
    title = "Long " * 100
    page = f"<title>{title}</title>" + "<h2>a</h2>" * 50
    assert text_of(page).count("Long") == 100


@pytest.mark.parametrize("tag", ["<div>", "<b>"])
def test_a_page_of_any_depth_is_read(tag):
    assert text_of(tag * 5_000 + "the text" + "</x>" * 5_000 + "end") == "the textend"
