"""HTML and SVG elements. Text becomes part of them escaped, unless it is `Markup` already."""

import html
from collections.abc import Collection, Iterable, Sequence

VOID = frozenset({"br", "hr", "input", "link", "meta"})  # elements of HTML that have no content


class Markup(str):
    """Text that is markup."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: str | float | bool | None) -> Markup:
    """An element.

    Args:
        name: its tag.
        content: what it holds; text is escaped, `Markup` is not.
        attributes: `http_equiv` becomes `http-equiv`, and `class_` becomes `class`. True stands for an attribute
            without a value; False and None leave it out.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    start = f"<{name}{written}>"
    return Markup(start if name in VOID else f"{start}{joined(content)}</{name}>")


def joined(parts: Iterable[str], separator: str = "") -> Markup:
    """The parts one after another, text among them escaped."""
    return Markup(separator.join(escaped(part) for part in parts))


def escaped(text: str) -> Markup:
    """The text as markup."""
    return text if isinstance(text, Markup) else Markup(html.escape(_visible(text)))


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False, own: Collection[str] = ()
) -> Markup:
    """A table in a box that scrolls by itself where the screen is narrow; the first cell of a row names it.

    Args:
        titles: of the columns.
        rows: their cells.
        numbers: all cells but the first are numbers, which are aligned at their ends.
        own: the first cells of rows that are marked among the others.
    """
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    body = []
    for first, *rest in rows:
        cells = [element("th", first, scope="row"), *(element("td", cell) for cell in rest)]
        body.append(element("tr", *cells, class_="own" if first in own else None))
    whole = element("table", element("thead", head), element("tbody", *body), class_="numbers" if numbers else None)
    name = f"table: {', '.join(filter(None, titles))}"
    return element("div", whole, class_="scrolled", tabindex="0", role="region", aria_label=name)


def _attribute(key: str, value: str | float | bool) -> str:
    if value is False:
        return ""
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(_visible(str(value)))}"'


def _visible(text: str) -> str:
    """The text without what no document may hold: control characters and halves of surrogate pairs."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_forbidden(character) else character for character in text)


def _is_forbidden(character: str) -> bool:
    return (
        (character < " " and character not in "\t\n\r")
        or "\x7f" <= character <= "\x9f"
        or "\ud800" <= character <= "\udfff"
    )
