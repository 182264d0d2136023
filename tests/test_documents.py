"""Sentences, documents in each format, those that are held out, and the rows that are made of the others."""

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib import rc_context
from matplotlib.figure import Figure

from diffcse_jax.config import DataConfig
from diffcse_jax.data import docstrings, documents
from diffcse_jax.data import sentences as rules
from diffcse_jax.data.formats import READERS
from diffcse_jax.data.pairs import REPEATED, SHARED, Holdout
from diffcse_jax.data.readers import Corpus, Fault
from diffcse_jax.data.sentences import paragraphs, sentences_of, split_sentences
from diffcse_jax.data.sources import open_corpus, open_documents, open_text
from diffcse_jax.errors import DataError, UserError


def opened(train_file: str | Path, pairs: str, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(train_file), pairs=pairs, **options))


# Sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It reads a file. It writes one!  Does it work?", ["It reads a file.", "It writes one!", "Does it work?"]),
        ("See Smith et al. for more, e.g. Fig. 3 there.", ["See Smith et al. for more, e.g. Fig. 3 there."]),
        ("He said (at last.) Then he left the room.", ["He said (at last.)", "Then he left the room."]),
        ("Written by Foo Inc. in the year 1999 or so.", ["Written by Foo Inc. in the year 1999 or so."]),
        ("a first sentence . a second sentence .", ["a first sentence .", "a second sentence ."]),
        ("1. Install the package. 2. Run it now.", ["1. Install the package.", "2. Run it now."]),
        ("\u3053\u308c\u306f\u6700\u521d\u306e\u6587\u3067\u3059\u3088\u306d\u3002" * 2,
         ["\u3053\u308c\u306f\u6700\u521d\u306e\u6587\u3067\u3059\u3088\u306d\u3002"] * 2),
        ("Am 3. Mai kommt z. B. Dr. Maier, Nr. 5 von ca. 10. Danach ist Schluss.",
         ["Am 3. Mai kommt z. B. Dr. Maier, Nr. 5 von ca. 10.", "Danach ist Schluss."]),
        ("\u201eDas ist das Ende.\u201c Dann ging er heim.", ["\u201eDas ist das Ende.\u201c", "Dann ging er heim."]),
        ("Does it support postscript ? if so try it.", ["Does it support postscript ?", "if so try it."]),
        ("you need an Ubuntu disc. then you build it.", ["you need an Ubuntu disc.", "then you build it."]),
        ("malloc() gets memory. free() frees it. Both are fast.",
         ["malloc() gets memory. free() frees it.", "Both are fast."]),
        ("\u6587" * 9 + "\u3002\u306f\u3044\u3002", ["\u6587" * 9 + "\u3002\u306f\u3044\u3002"]),
        ("", []),
        *((sentence * 3, [sentence.strip()] * 3) for sentence in (
            "\u0645\u0627 \u0647\u0630\u0627 \u0627\u0644\u0634\u064a\u0621\u061f ",  # Arabic, with spaces
            "\u092f\u0939 \u092a\u0939\u0932\u093e \u0935\u093e\u0915\u094d\u092f \u0964",  # Hindi
            "\u4ed6\u4eca\u5929\u4e0d\u6765\u4e86\uff01\uff1f",  # Chinese
            "\u300c\u3053\u308c\u3067\u6c7a\u307e\u3063\u305f\u3002\u300d\u3068\u8a00\u3063\u305f\u3002",  # Japanese
        )),
    ],
)  # fmt: skip
def test_where_sentences_end(text, expected):
    assert split_sentences(text) == expected


@given(st.text("aB. ?\u3002)\n", max_size=80))
def test_splitting_loses_no_text(text):
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_wrapped_lines_are_joined():
    lines = [
        "The quick brown fox jumps over the lazy dog, and then it",
        "goes home to its den. There it sleeps until the sun has",
        "come up.",
    ]
    title, items = "A title of its own", ["- the first item of a list", "- the second one, which is longer"]
    assert list(paragraphs([title, "", *lines, "", *items])) == [title, " ".join(lines), *items]
    lines = ["This line is a sentence, and rather long it is.", "This one is, too, and about as long as that.", "12"]
    assert sentences_of([*lines, "---"]) == lines


def test_text_without_spaces_has_words_and_joins_without_spaces():
    japanese, thai = "\u3053\u308c\u306f\u6587\u3060\u3002", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22"
    pairs = [japanese[:2], japanese[2:4], japanese[4:]]
    assert rules.words(f"two words {japanese}{thai}") == ["two", "words", *pairs, thai[:4], thai[4:]]
    assert rules.some_words(japanese * 2, 1, 4) == (japanese * 2)[2:8]
    assert rules.join([japanese, japanese, "a", "b", thai, thai]) == f"{japanese}{japanese} a b {thai} {thai}"
    wrapped = [japanese * 4, japanese * 3 + japanese[:-1], japanese]
    assert list(paragraphs(wrapped)) == ["".join(wrapped)]
    assert rules.canonical("\n".join(wrapped)) == rules.canonical("".join(wrapped))
    assert rules.canonical("Ma\u0308rz  2") == rules.canonical("M\xe4rz \uff12") == "m\xe4rz 2"


# Formats

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
with a link of its own.</p><h2>Installation</h2><ul><li>Get <b>the package</b>.<li>Run it, with care.</ul>
<pre>code is not text</pre><table><tr><td>a</td></tr></table>
<h2>Heading by a line</h2><div>Text of it.<script>x()</script></div><!-- nobody sees this --></body></html>"""
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

.. unknown:: x

.. math:: x^2

Heading by a line
-----------------
Text of it.
"""


def read(content: bytes | str, extension: str = ".md") -> list[tuple[str, list[str]]]:
    content = content.encode() if isinstance(content, str) else content
    return [(title, [line for line in lines if line]) for title, lines in READERS[extension](content)]


@pytest.mark.parametrize(("content", "extension"), [(PAGE, ".md"), (HTML_PAGE, ".html"), (RST_PAGE, ".rst")])
def test_a_page_becomes_titled_sections(content, extension):
    assert read(content, extension) == [
        ("The tool", ["It does one thing well. It does it fast, with a link of its own."]),
        ("The tool: Installation", ["Get the package.", "Run it, with care."]),
        ("The tool: Heading by a line", ["Text of it."]),
    ]


def test_a_page_whose_heading_is_not_read_has_its_title():
    page = "<title>The page</title><article><header><h1>One</h1></header><h1><img></h1><p>Text.<figcaption>More."
    assert read(page, ".html") == [("The page", ["Text.", "More."])]


def pdf(text: str) -> bytes:
    file, figure = io.BytesIO(), Figure()
    figure.text(0, 0.5, text)
    with rc_context({"pdf.use14corefonts": True}):
        figure.savefig(file, format="pdf")
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("### A\n\nx\n\n# B\n\nx\n\n## C\n\nx\n\n# D\n\nx", ["A", "A: B", "A: B: C", "A: D"]),  # the first is the title
        ("# A\n\n## A\n\nx\n\n### B\n\nx", ["A", "A: B"]),  # a repeated heading
        ("---\ntitle: 'The page'\n---\nx\n\n## B\n\nx", ["The page", "The page: B"]),
        ('+++\ntitle = "The page"\n+++\n## B\n\nx\n\n## C\n\nx', ["The page: B", "The page: C"]),
        ("---\ntitle: Another\n---\nx\n\n# The page\n\nx", ["", "The page"]),
        ("`<vector>` has `a_b_c` and `*p`, 2 \\* 3 &lt; 7", "<vector> has a_b_c and *p, 2 * 3 < 7"),
        ("see <https://example.org> <b>now</b> ![a *picture*](a.png)", "see https://example.org now"),
        ("> [!NOTE]\n> Take care.", "Take care."),
        ("{% raw %}A{% endraw %} {{< note >}}B{{< /note >}} `{% if %}`", "A B {% if %}"),
        ("One line.<br>Another.\n\n<hr>\n\nMore.", "One line. Another. More."),
        ("````text\n```\n~~~\ncode\n```` no end\n````\n~~~ python\nmore code\n~~~~\nHere.", "Here."),
    ],
)
def test_markdown_has_titles_of_all_headings_and_text_without_markup(text, expected):
    titles, (lines, *_) = zip(*read(text), strict=True)
    assert ([*titles] if isinstance(expected, list) else " ".join(lines)) == expected


PAIRS = [
    ("A clock hangs in the hall.", "It tells the time. It has two hands of brass."),
    ("A boat is on the river.", "It has two sails and one mast."),
    ("A word is here.", "Word."),
]
FORMS: dict[str, dict[str, str]] = {
    "blank lines": {"a.txt": "\n\n".join(map("\n".join, PAIRS))},
    "lines": {"a.txt": "\n".join(map(" ".join, PAIRS)) + "\n\n"},
    "mixed": {
        "0.html": "<h1>{}</h1><p>{}</p>".format(*PAIRS[0]), ".git/a.txt": "Never read.", "a.png": "",
        "_1.rst": "{}\n=======================\n\n{}\n".format(*PAIRS[1]),
        "more/2.jsonl": json.dumps({"title": PAIRS[2][0], "text": PAIRS[2][1], "n": 1}),
        "_category_.json": '{"label": "Pages"}', "settings.json": '{"label": "Pages"}',
        "numbers.csv": "id;name\n1;Pages\n",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_rows_and_can_be_searched(tmp_path, form):
    for name, content in FORMS[form].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    path = tmp_path / ("" if form == "mixed" else "a.txt")
    corpus = opened(path, "lead")
    assert list(corpus) == PAIRS[:2]
    assert corpus.columns == ("lead", "rest")
    skipped = "; skipped files: 1 named _*, 1 .png; skipped 2 tables without texts" if form == "mixed" else ""
    assert corpus.summary() == f"3 documents, 1 section too short for a pair left out{skipped}"
    _, numbers, _ = zip(*opened(path, "dropout").in_documents(), strict=True)
    sentences = [numbers.count(number) for number in sorted({*numbers})]
    assert sentences[:2] == ([2, 1] if form == "mixed" else [3, 2])
    if form == "mixed":
        places, _, searched = zip(*open_text(path).in_documents(), strict=True)
        assert [text for (text,) in searched] == [rest for _, rest in PAIRS]
        assert places == ("0.html", "_1.rst", "more/2.jsonl, line 1")


def test_pdf_and_unreadable_files(tmp_path, monkeypatch):
    (tmp_path / "a.pdf").write_bytes(pdf("This is a page. It has two sentences."))
    (tmp_path / "b.pdf").write_bytes(pdf("Never read.")[:200])
    for name in ("c.txt", "d.rst"):
        (tmp_path / name).write_bytes(b"This is text.\n\nThis \xff is not.\n")
    corpus = opened(tmp_path, "neighbours")
    assert list(corpus) == [("This is a page.",), ("It has two sentences.",), ("This is text.",), ("This is text.",)]
    assert {**corpus.skipped} == {Fault.UNREADABLE: 1, Fault.NOT_UTF8: 2}
    for name, message in [("b.pdf", r"b\.pdf: unreadable"), ("c.txt", r"c\.txt: not UTF-8 \(to convert")]:
        with pytest.raises(DataError, match=message):
            list(opened(f"{tmp_path}/[{name[0]}].*", "neighbours", on_bad_line="error"))
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(UserError, match=r"package pypdf, which is not installed\. Install the extra 'documents'"):
        list(open_text(tmp_path / "a.pdf"))


def test_of_a_search_collection_only_documents_are_read(tmp_path):
    (tmp_path / "set/qrels").mkdir(parents=True)
    row = {"_id": "a", "title": "A clock", "text": "This is a clock that tells the time."}
    (tmp_path / "set/corpus.jsonl").write_text(json.dumps(row))
    (tmp_path / "set/queries.jsonl").write_text(json.dumps({"_id": "q", "text": "What is a clock? It tells what."}))
    (tmp_path / "set/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    for folder in (tmp_path / "set", tmp_path):
        corpus = opened(folder, "lead")
        assert list(corpus) == [("A clock", row["text"])]
        assert "skipped files: 2 with queries and judgements" in corpus.summary()
        assert [text for (text,) in open_text(folder)] == [row["text"]]
    (tmp_path / "set/corpus.jsonl").unlink()
    assert "judgements" not in opened(tmp_path, "lead").summary()  # queries beside no corpus are text


def test_every_document_of_ten_words_gives_a_pair(tmp_path):
    ten, nine = ("one two three four five six seven eight nine ten", "one two three four five six seven eight nine")
    long = " ".join(f"{number} is a word" for number in range(200))
    (tmp_path / "a.txt").write_text(f"{ten}\n{nine}\n{long}\nThis is a first sentence. That is its second sentence.")
    corpus = opened(tmp_path / "a.txt", "lead", cloze=1.0, max_length=64)
    first, *passages, last = list(corpus)
    assert first == (ten, ten)
    assert last == ("This is a first sentence.", "That is its second sentence.")
    assert all(lead == rest and len(rest) <= 4 * 64 for lead, rest in passages)
    assert " ".join(rest for _, rest in passages) == long
    assert corpus.counted["section{s} too short for a pair left out"] == 1
    assert list(opened(tmp_path / "a.txt", "lead")) == [last]


def test_tables_without_title_or_text(tmp_path):
    objects = [{"text": "Here is one. Here is another text."}, {"title": None, "text": "This is one sentence."},
               {"title": "T", "text": "This is a third one."}, {"title": "T"}, {"title": "T", "text": []}]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, objects)))
    corpus = opened(tmp_path / "a.jsonl", "lead")
    assert list(corpus) == [("Here is one.", "Here is another text."), ("T", "This is a third one.")]
    found = "3 documents, 1 section too short for a pair left out"
    assert corpus.summary() == f"{found}; skipped 2 lines: 1 missing key, 1 value not a string"
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: missing key"):
        list(opened(tmp_path / "a.jsonl", "lead", on_bad_line="error"))
    (tmp_path / "b.md").write_text("Never read.")
    assert opened(tmp_path, "lead", columns=("title", "text")).summary() == "skipped 1 file without columns"


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("a.jsonl", '{"body": "a"}', {"pairs": "lead"}, r"no column 'text'\. It has: body\. .* \(data\.columns or"),
        ("a.csv", "a,b,c\n", {"pairs": "lead", "columns": ("a", "b", "c")}, "name a title and a text"),
        ("a.md", "# One\n", {"pairs": "lead", "columns": ("text",)}, r"a\.md has no columns\. Leave data\.columns"),
        ("folder/a.md", "# One\n", {}, r"folder: these files contain documents\. Set data\.pairs"),
        ("a.md", "# One\n", {"columns": ("text",)}, r"a\.md: these files contain documents\. Do not name columns$"),
        ("a.md", "# A\n\nOne.", {"pairs": "lead", "held_out": 0.1}, r"a single document, and data\.held_out=0\.1"),
    ],
)
def test_sources_without_documents_are_refused(tmp_path, name, content, options, reason):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        list(open_corpus(DataConfig(train_file=str(tmp_path / Path(name).parts[0]), **options)))


# Pairs and passages


def test_every_second_title_is_not_a_lead(tmp_path):
    rows = [{"title": f"Title {i}", "text": f"Subject {i} is told here. More of it is told there."} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(opened(tmp_path / "a.jsonl", "lead"))
    titled = [lead.startswith("Title") for lead, _ in found]
    assert 70 < sum(titled) < 130  # of 200, with a standard deviation of 7
    for row, (lead, rest), has_title in zip(rows, found, titled, strict=True):
        assert f"{lead} {rest}" == (f"{row['title']} {row['text']}" if has_title else row["text"])


# Documents that are held out

words = st.sampled_from(["Alpha", "beta", "gamma", "delta"])
texts = st.lists(st.lists(words, min_size=3, max_size=6).map(lambda w: " ".join(w).capitalize() + "."), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts.filter(bool), min_size=2, max_size=9, unique_by=tuple), st.randoms())
def test_no_text_is_on_both_sides_whatever_the_order(tmp_path, contents, random):
    data = DataConfig(str(tmp_path / "a.txt"), pairs="dropout", held_out=0.4)

    def held_out() -> set[str]:
        (tmp_path / "a.txt").write_text("\n\n".join("\n".join(text) for text in contents))
        found = {" ".join(section.sentences()) for (section,) in Holdout(open_documents(data), data.held_out)}
        texts = [sentence for text in contents if " ".join(text) not in found for sentence in text]
        kept_out = {sentence for text in contents if " ".join(text) in found for sentence in text}
        trained = [row[0] for _, row in open_corpus(data).records() if isinstance(row, tuple)]
        assert trained == [sentence for sentence in texts if sentence not in kept_out]
        return found

    before = held_out()
    random.shuffle(contents)
    contents += [*contents[:3], ["Something else entirely."]]
    assert held_out() - {"Something else entirely."} == before


def test_boilerplate_is_left_out_of_both_sides(tmp_path):
    licence = " ".join(f"Licence sentence {i} is the same everywhere." for i in range(10))
    rows = [{"title": f"Title {i}", "text": f"This is subject {i}. It has number {i}. {licence}"} for i in range(580)]
    twins = [{"title": f"Twin {i % 20}", "text": f"These are twins, {i % 20}. Only {i} has this."} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows + twins)))
    corpus = opened(tmp_path / "a.jsonl", "lead", held_out=0.1)
    trained = list(corpus)
    holdout = list(Holdout(open_documents(DataConfig(str(tmp_path / "a.jsonl"), pairs="lead")), 0.1))
    assert 30 < len(holdout) < 95
    assert "Licence" not in str(trained) + str(holdout)
    assert corpus.counted[REPEATED] == 10 * sum("subject" in " ".join(row) for row in trained)
    assert corpus.counted[SHARED] < 20  # texts of twins


# Docstrings

NUMPY_STYLE = """
    Compute the ``median`` along the specified *axis*.  The result of `numpy.median` is exact.

    Returns the median of the array elements, see :func:`mean <numpy.mean>`. It is robust, e.g. against outliers.

    Parameters
    ----------
    a : array_like
        Input array or object that can be converted to an array.

    Notes
    -----
    Given a vector of values, the median is its middle value [1]_. The method is described in [2]_.
    It is the value :math:`m` for which half of the values are larger.

    .. versionadded:: 1.0
       This paragraph is part of a directive and does not count.

    - This is an item of a list.
"""

GOOGLE_STYLE = """Opens the file at the path.

    Files are opened for reading in binary mode
    unless told otherwise by the caller.

    Args:
      path: The path of the file to open.

    set_mode(path) is called when x_y = 3 for now.
    """


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (NUMPY_STYLE, ["Compute the median along the specified axis.",
                       "Returns the median of the array elements, see mean.", "It is robust, e.g. against outliers.",
                       "Given a vector of values, the median is its middle value."]),
        (GOOGLE_STYLE, ["Opens the file at the path.",
                        "Files are opened for reading in binary mode unless told otherwise by the caller."]),
        ("Too short a one.", []),
        ("This has no end of a sentence", []),
        (" ".join(["Word"] * 60) + ".", [" ".join(["Word"] * 60) + "."]),
        (" ".join(["Word"] * 61) + ".", []),
        ("Is this a short question? Yes, it is one, indeed!", ["Is this a short question?", "Yes, it is one, indeed!"]),
    ],
)  # fmt: skip
def test_sentences_are_prose_without_markup(docstring, expected):
    assert [*filter(docstrings.is_english, docstrings.spans_of(docstring))] == expected


FUNCTION = '''
def function_{0}():
    """Compute the value of function {0}.

    The value of number {0} is large for most of the arguments. This sentence occurs in all docstrings here.
    """
    raise RuntimeError("this must not run")
'''


def test_functions_are_either_in_the_corpus_or_held_out(tmp_path, monkeypatch):
    """200 functions stand for the installed packages."""
    (tmp_path / "module.py").write_text("".join(map(FUNCTION.format, range(200))) + "\n1 / 0\n")
    (tmp_path / "broken.py").write_text("def (")
    files = [("package.broken", tmp_path / "broken.py"), ("package.module", tmp_path / "module.py")]
    monkeypatch.setattr(docstrings, "_source_files", lambda: iter(files))
    docstrings._docstrings.cache_clear()
    pairs = docstrings.docstring_pairs()
    corpus = [sentence for (sentence,) in open_corpus(DataConfig(train_file="docstrings"))]
    leads = list(open_corpus(DataConfig(train_file="docstrings", pairs="lead")))
    assert docstrings.docstring_pairs(3) == pairs[:3]
    docstrings._docstrings.cache_clear()
    assert 5 <= len(pairs) <= 40  # 20 expected, standard deviation 4
    summaries = [f"Compute the value of function {number}." for number in range(200)]
    values = [f"The value of number {number} is large for most of the arguments." for number in range(200)]
    repeated = "This sentence occurs in all docstrings here."
    held_out = {summaries.index(summary) for summary, _ in pairs}
    assert dict(pairs) == {summaries[number]: f"{values[number]} {repeated}" for number in held_out}
    trained = [number for number in range(200) if number not in held_out]
    assert {*corpus} == {text for number in trained for text in (summaries[number], values[number])}
    assert sorted(leads) == sorted((summaries[number], values[number]) for number in trained)
