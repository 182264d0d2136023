import time

import pytest

from diffcse_jax.data.markdown import sections

PAGE = """---
layout: page
---
# The *tool*

It does [one thing](https://example.org) well.
It does `it` fast, with [a link of its own][1].

[1]: https://example.org

## Installation ##

![a picture](a.png)

- Get **the package**.
- [x] Run it,
  with care.

```
code is no text
```

| a | table |
|---|---|

### Requirements

Python.

Heading by a line
-----------------
Text of it.
<!-- nobody
sees this -->
"""


def read(text):
    return [(title, [line for line in lines if line]) for title, lines in sections(text)]


def test_a_page_is_titled_sections():
    assert read(PAGE) == [
        ("The tool", ["It does one thing well. It does it fast, with a link of its own."]),
        ("The tool: Installation", ["Get the package.", "Run it, with care."]),
        ("The tool: Installation: Requirements", ["Python."]),
        ("The tool: Heading by a line", ["Text of it."]),
    ]


def test_code_and_tables_end_where_they_end():
    lines = ["# C#", "```make test``` runs all tests.", "````text", "```", "~~~", "code", "```` no end", "````"]
    lines += ["Then this follows:", "| a | b |", "|---|---|", "~~~ python", "more code", "~~~~", "## End ##", "Here."]
    assert read("\n".join(lines)) == [
        ("C#", ["make test runs all tests.", "Then this follows:"]),
        ("C#: End", ["Here."]),
    ]


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("### A\n\nx\n\n# B\n\nx\n\n## C\n\nx\n\n# D\n\nx", ["A", "A: B", "A: B: C", "A: D"]),  # the first is the title
        ("# A\n\n## A\n\nx\n\n## \n\nx\n\n### B\n\nx", ["A", "A", "A: B"]),  # told once; an empty one tells nothing
        ("---\ntitle: 'The page'\n---\nx\n\n## B\n\nx", ["The page", "The page: B"]),
        ('+++\ntitle = "The page"\n+++\n## B\n\nx\n\n## C\n\nx', ["The page: B", "The page: C"]),
        ("---\ntitle: Another\n---\nx\n\n# The page\n\nx", ["", "The page"]),
    ],
)
def test_titles_tell_what_a_section_is_below(text, titles):
    assert [title for title, _ in read(text)] == titles


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("`<vector>` has `a_b_c` and `*p`, 2 \\* 3 &lt; 7", ["<vector> has a_b_c and *p, 2 * 3 < 7"]),
        ("one\\\ntwo  \nthree", ["one two three"]),
        ("1. one\n\n   of it\n2. two\n   - three", ["one", "of it", "two", "three"]),
        ("see <https://example.org> <b>now</b> ![a *picture*](a.png)", ["see https://example.org now"]),
        ("<details>\n<summary>More</summary>\nHidden text.\n</details>", ["More Hidden text."]),
        ("<table>\n<tr><td>a</td></tr>\n</table>\n\nText.", ["Text."]),
        ("> [!NOTE]\n> Take care.", ["Take care."]),
        ("::: moniker range='>=1'\n\nText.\n\n::: moniker-end", ["Text."]),
        ("Since [!INCLUDE[version](a.md)] there is\n\n[!code-cpp[A#1](a.cpp)]\n\nit.", ["Since there is", "it."]),
        ("{% raw %}A{% endraw %} {{< note >}}B{{< /note >}} `{% if %}`", ["A B {% if %}"]),
    ],
)
def test_text_is_left_without_markup(text, paragraphs):
    assert [line for _, lines in read(text) for line in lines] == paragraphs


@pytest.mark.parametrize("part", ["{%", "[!a", "<!--", "[a", "_*", "> ", "{{<", "title: '\n"])
def test_no_text_takes_long(part):
    start = time.process_time()
    read("---\n" + part * 20_000)
    assert time.process_time() - start < 5  # half a second at most, where time grows with length
