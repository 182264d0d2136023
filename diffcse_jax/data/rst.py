"""reStructuredText as html, by docutils."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from diffcse_jax.errors import require_extra

EXTRA = "documents"
MOST_SUBSTITUTIONS = 2_000  # names in texts that themselves replace names
LEFT_OUT = "directive{s} that only Sphinx knows"

SETTINGS = {
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "_disable_config": True,
    "warning_stream": False,
    "report_level": 5,
    "halt_level": 5,
    "doctitle_xform": False,
    "docinfo_xform": False,
    "initial_header_level": 1,
    "math_output": "LaTeX",
    "line_length_limit": 1 << 30,
}
ROLE = re.compile(r"(?<![\w:+.-])([\w:+.-]*:)`([^`]*)`")


class TooManySubstitutionsError(Exception):
    """Names that stand for texts with names, and so on, until they are millions."""


def html_of_rst(text: str) -> tuple[str, Mapping[str, int]]:
    """Return html, and how many parts were left out, by kind.

    Directives of Sphinx, included files and raw text of other formats are not read.
    """
    core = require_extra("docutils.core", EXTRA)
    writers = require_extra("docutils.writers.html4css1", EXTRA)
    reader = _reader_class()()
    parts = core.publish_parts(
        without_roles(text), reader=reader, writer=writers.Writer(), settings_overrides=SETTINGS
    )
    left_out = {LEFT_OUT: reader.unknown} if reader.unknown else {}
    return parts["body"], left_out


def without_roles(text: str) -> str:
    """Return a text in which Sphinx's roles, :role:`name <target>`, are only names. Math stays."""
    return ROLE.sub(_name_of_role, text)


def _name_of_role(role: re.Match[str]) -> str:
    run, body = role.groups()
    start = next((index for index in range(len(run) - 2) if _is_role(run, index)), None)
    name, bracket, target = body.partition("<")
    if start is None or (bracket and not target.endswith(">")):
        return role[0]
    return run[:start] + name.rstrip()


def _is_role(run: str, start: int) -> bool:
    return run[start] == ":" and not run.startswith("math:", start + 1)


@functools.cache
def _reader_class() -> Any:
    """Return a reader that looks at a document before docutils expands it and forgets errors."""
    standalone = require_extra("docutils.readers.standalone", EXTRA)

    class Reader(standalone.Reader):
        unknown = 0

        def parse(self) -> None:
            super().parse()
            _check_substitutions(self.document)
            self.unknown = sum(map(_holds_unread_text, self.document.findall()))

    return Reader


def _holds_unread_text(node: Any) -> bool:
    """Return whether a node is an error that shows the text which could not be read."""
    return node.tagname == "system_message" and any(
        child.tagname == "literal_block" for child in node.children
    )


def _check_substitutions(document: Any) -> None:
    """Raise an error if expanding the names in a document would take long."""
    names = {
        name: _references(definition) for name, definition in document.substitution_defs.items()
    }
    nested = {name.lower(): references for name, references in names.items()}
    sizes: dict[str, int] = {}
    number = sum(_expansions(name, nested, sizes) for name in _references(document))
    if number > MOST_SUBSTITUTIONS:
        raise TooManySubstitutionsError


def _references(node: Any) -> list[str]:
    """Return the names inside a node that stand for texts."""
    found = node.findall(lambda each: each.tagname == "substitution_reference")
    return [each["refname"].lower() for each in found]


def _expansions(name: str, nested: Mapping[str, list[str]], sizes: dict[str, int]) -> int:
    """Return how many names the text of a name brings, also in the texts of those names."""
    if name not in sizes:
        sizes[name] = 0  # if it contains itself, which docutils refuses
        sizes[name] = sum(1 + _expansions(each, nested, sizes) for each in nested.get(name, ()))
    return sizes[name]
