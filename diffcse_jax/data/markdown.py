"""Markdown as titled sections of plain paragraphs: no code, tables, pictures or markup."""

import itertools
import re
from collections.abc import Iterator

FENCE = re.compile(r"\s*(`{3,}(?!.*`)|~{3,})(.*)$")  # a line with code between backticks is none
HEADING = re.compile(r"\s{0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$")
TABLE_ROW = re.compile(r"\s*\|.*\|\s*$")
UNDERLINE = re.compile(r"\s{0,3}(=+|-{2,})\s*$")
ITEM = re.compile(r"\s*([-*+]|\d{1,3}[.)])\s+(\[[ xX]\]\s+)?")
NO_TEXT = re.compile(r"\s*\||( {4}|\t)\s*\S|\s*\[[^\]]+\]:\s|\s*([-*_]\s*){3,}$")  # tables, code, link targets, rules
MARKUP = (
    (re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])"), ""),
    (re.compile(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),
    (re.compile(r"</?[A-Za-z][^>]*>"), ""),
    (re.compile(r"<((https?|mailto):[^>]*)>"), r"\1"),
    (re.compile(r"(`+)(.+?)\1"), r"\2"),
    (re.compile(r"\*\*(.+?)\*\*|\*([^\s*][^*]*)\*"), r"\1\2"),
    (re.compile(r"\b__(.+?)__\b|\b_([^\s_][^_]*)_\b"), r"\1\2"),
)


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Titles and lines of what has text; the title is empty before the first heading. A line is a paragraph or blank.

    The first heading is its own section's title; further ones are told after it, `Guide: Installation`, for many
    documents have an installation.
    """
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.DOTALL)  # what comes before a page; comments
    title, first, paragraphs = "", "", [""]
    fence = ""  # that of the code which has begun
    for line, following in itertools.pairwise([*text.split("\n"), ""]):
        if fence:
            fence = "" if _ends(line, fence) else fence
        elif match := FENCE.match(line):
            fence = match[1]
            paragraphs += ["", ""]
        elif heading := _heading(line, following, after_text=bool(paragraphs[-1])):
            if any(paragraphs):
                yield title, paragraphs
            first = first or heading
            title, paragraphs = heading if heading == first else f"{first}: {heading}", [""]
        elif not line.strip() or UNDERLINE.match(line) or TABLE_ROW.match(line):
            paragraphs += ["", ""]
        elif NO_TEXT.match(line) and not paragraphs[-1]:
            continue
        else:
            item = ITEM.match(line)
            if item:
                paragraphs += ["", ""]
            words = plain(line[item.end() :] if item else line.lstrip("> "))
            paragraphs[-1] = f"{paragraphs[-1]} {words}".strip()
    if any(paragraphs):
        yield title, paragraphs


def plain(text: str) -> str:
    """A line without markup."""
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def _ends(line: str, fence: str) -> bool:
    """True if the line ends the code that a fence has begun: the same sign, as often or more, and nothing after it."""
    match = FENCE.match(line)
    return bool(match and match[1].startswith(fence) and not match[2].strip())


def _heading(line: str, following: str, *, after_text: bool) -> str:
    """The text of a heading, with signs before it or a line under it; empty if the line is none."""
    if match := HEADING.match(line):
        return plain(match[1])
    underlined = UNDERLINE.match(following) and line.strip() and not after_text
    return plain(line) if underlined and not ITEM.match(line) and not UNDERLINE.match(line) else ""
