"""Whole HTML pages in one file each: style and script inside, nothing fetched from anywhere."""

import base64
import hashlib
from importlib import resources

from diffcse_jax.pages.markup import Markup, element, joined

POLICY = (
    "default-src 'none'; style-src {styles}; script-src {scripts}; img-src data:; base-uri 'none'; form-action 'self'"
)


def page(title: str, body: Markup, *, style: str, script: str) -> str:
    """A document whose policy lets a browser use its own style and script and no others, and fetch nothing.

    Args:
        title: of the browser's tab.
        body: what is shown.
        style: CSS beside that of all pages.
        script: JavaScript; the page must be whole without it.
    """
    styles = f"{asset('diffcse_jax.pages', 'common.css')}\n{style}"
    policy = POLICY.format(styles=_digest(styles), scripts=_digest(script))
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),  # or browsers ask for one
        element("title", title),
        element("style", Markup(styles)),
    ]
    document = element(
        "html", element("head", *head), element("body", body, element("script", Markup(script))), lang="en"
    )
    return joined([Markup("<!DOCTYPE html>"), document], "\n") + "\n"


def asset(package: str, name: str) -> str:
    """The text of a file that the package carries."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    """The source expression of a policy that allows exactly this inline content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
