"""Reads HTML pages as a browser would: well formed, whole in one file, loading nothing."""

import re
from html.parser import HTMLParser

VOID = {"br", "hr", "input", "link", "meta"}


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.style = "", ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> occurs twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [
            attributes[attribute] or "" for _, attributes in self.tags if attribute in attributes
        ]


def checked(text: str) -> Page:
    """Return the page after checking that it is well formed, runs no script and loads nothing."""
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "video",
        "audio",
    }
    assert not any(name.startswith("on") or name == "src" for _, each in page.tags for name in each)
    assert all(value.startswith(("#", "/?", "data:,")) for value in page.values("href"))
    assert not re.search(r"url\((?!#)|@import|https?:", page.style)
    (policy,) = (
        each["content"] for tag, each in page.tags if tag == "meta" and "http-equiv" in each
    )
    assert policy.startswith("default-src 'none'")
    assert len(ids := page.values("id")) == len(set(ids))
    return page
