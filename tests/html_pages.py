"""Reading HTML pages as a browser would: well-formed, whole in one file, and shown in Chromium where there is one."""

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"br", "hr", "input", "link", "meta"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tags with their attributes, and the text that is shown."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("style", "script"):
            self.inline[self._open[-1]] = data
        else:
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] or "" for _, attributes in self.tags if attribute in attributes]


def checked(text: str) -> Page:
    """The page, once it is well-formed, fetches nothing, and has a policy for its own style and script alone."""
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"img", "iframe", "object", "embed", "base", "video", "audio", "font"}
    assert not any(name.startswith("on") or name in ("src", "style") for _, each in page.tags for name in each)
    assert all(value.startswith(("#", "/?", "data:,")) for value in page.values("href"))
    assert not re.search(r"url\(|@import|https?:", page.inline["style"] + page.inline["script"])
    (policy,) = (each["content"] for tag, each in page.tags if tag == "meta" and "http-equiv" in each)
    assert policy.startswith("default-src 'none'")
    for content in page.inline.values():
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy
    assert len(ids := page.values("id")) == len(set(ids))
    return page


def in_browser(text: str, folder: Path, *, width: int, script: str) -> Page:
    """The page as Chromium has it after a script, which may write to `document.body.dataset`."""
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    checked(text)
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    file = folder / "page.html"
    file.write_text(without_policy.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Page(shown.stdout)
