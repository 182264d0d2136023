"""reStructuredText as html, by docutils, with the directives that only Sphinx knows."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from diffcse_jax.documents.files import EXTRA
from diffcse_jax.errors import counted, require_extra

MOST_SUBSTITUTED = 1 << 20  # characters that stand for names
COST_OF_A_NAME = 500  # characters that take docutils as long as a name in the text of another
# Characters of a paragraph times those that may be markup: docutils takes as long for markup in a
# long paragraph. Above this number, a paragraph is read without its markup.
MOST_MARKUP = 1 << 23
LISTS = {"contents", "target-notes"}  # docutils would write all headings or links into each
LEFT_OUT = "unread directive{s}"

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
MARKUP = "*`|_"
ROLE = re.compile(r"(?<![\w:+.-])([\w:+.-]*:)`([^`]*)`")
DIRECTIVE = re.compile(r"^[ \t]*\.\. ([\w:.+-]+?)::(?:[ \t]|$)", re.MULTILINE)
# Settings, links to other files and tables of contents, which have no text of their own, and code.
# All but the latter are of Sphinx and its extensions. What stands in other directives is text.
WITHOUT_TEXT = {
    "autoclass", "autodata", "autoexception", "autofunction", "automethod", "automodule",
    "autosummary", "codeauthor", "currentmodule", "default-domain", "highlight", "index",
    "literalinclude", "module", "moduleauthor", "py:currentmodule", "py:module", "rst-class",
    "sectionauthor", "tabularcolumns", "toctree", *LISTS,
}  # fmt: skip
CODE = {
    "code-cell", "digraph", "doctest", "graph", "graphviz", "ipython", "jupyter-execute", "mermaid",
    "plantuml", "plot", "productionlist", "prompt", "testcode", "testoutput", "testsetup",
}  # fmt: skip


class TooManySubstitutionsError(Exception):
    """Names that stand for texts with names, and so on, until they are millions."""


def html_of_rst(text: str) -> tuple[str, Mapping[str, int], tuple[str, ...]]:
    """Return html, how many parts were left out by kind, and notes.

    Included files and raw text of other formats are not read.
    """
    core = require_extra("docutils.core", EXTRA)
    writers = require_extra("docutils.writers.html4css1", EXTRA)
    rst = require_extra("docutils.parsers.rst", EXTRA)
    markup = _Markup()
    reader = _reader_class()(rst.Parser(inliner=markup.inliner))
    with _sphinx_directives(text):
        parts = core.publish_parts(
            without_roles(text),
            reader=reader,
            writer=writers.Writer(),
            settings_overrides=SETTINGS,
        )
    left_out = {LEFT_OUT: reader.unread} if reader.unread else {}
    return parts["body"], left_out, tuple(_about_plain(markup.plain))


def _about_plain(paragraphs: int) -> Iterator[str]:
    """Yield a note about paragraphs whose markup is not read."""
    if paragraphs:
        yield f"{counted(paragraphs, 'paragraph{s}')} with too much markup, which was read as text"


# Roles


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


# Directives


@contextlib.contextmanager
def _sphinx_directives(text: str) -> Iterator[None]:
    """Let docutils read the directives in a text that it does not know."""
    directives = require_extra("docutils.parsers.rst.directives", EXTRA)
    english = require_extra("docutils.parsers.rst.languages.en", EXTRA)
    names = {name.lower() for name in DIRECTIVE.findall(text)}
    known = {*english.directives, *directives._directives} - LISTS
    unknown = names - known
    for name in unknown:
        directives.register_directive(name, _directive_class())
    try:
        yield
    finally:
        for name in unknown:
            del directives._directives[name]


@functools.cache
def _directive_class() -> Any:
    """Return what reads a directive of Sphinx: a line of code, options, and text."""
    nodes = require_extra("docutils.nodes", EXTRA)
    rst = require_extra("docutils.parsers.rst", EXTRA)
    statemachine = require_extra("docutils.statemachine", EXTRA)

    class Options(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return rst.directives.unchanged

    base: Any = rst.Directive

    class Directive(base):
        has_content = True
        optional_arguments = 1
        final_argument_whitespace = True
        option_spec = Options({"noindex": rst.directives.unchanged})

        def run(self) -> list[Any]:
            first, *lines = "".join(self.arguments).split("\n")
            body = [*lines, "", *self.content]
            if self.name in WITHOUT_TEXT:
                return []
            if self.name in CODE:
                code = "\n".join([first, *body])
                return [nodes.literal_block(code, code)]
            is_code = "(" in first or " " not in first.strip()
            container = nodes.container()
            if first:
                container += (nodes.literal_block if is_code else nodes.paragraph)(first, first)
            self.state.nested_parse(
                statemachine.StringList(body, ""), self.content_offset, container
            )
            return [container]

    return Directive


# Documents


class _Markup:
    """Reads the markup in paragraphs, in time that grows with their length.

    Attributes:
        inliner: What docutils reads markup with. A class of ours in its place would break docutils.
        plain: The number of paragraphs whose markup is text.
    """

    def __init__(self) -> None:
        self.inliner = require_extra("docutils.parsers.rst.states", EXTRA).Inliner()
        self.plain = 0
        self._text = require_extra("docutils.nodes", EXTRA).Text
        self._parse = self.inliner.parse
        self.inliner.parse = self._bounded
        # Addresses become links, whose text they are. docutils would call itself for each.
        self.inliner.implicit_inline = lambda text, _: [self._text(text)] if text else []

    def _bounded(self, text: str, *context: Any) -> Any:
        if len(text) * sum(map(text.count, MARKUP)) <= MOST_MARKUP:
            return self._parse(text, *context)
        self.plain += 1
        return [self._text(text)], []


@functools.cache
def _reader_class() -> Any:
    """Return a reader that looks at a document before docutils expands it and forgets errors."""
    base: Any = require_extra("docutils.readers.standalone", EXTRA).Reader

    class Reader(base):
        unread = 0

        def new_document(self) -> Any:
            document = super().new_document()
            note = document.note_explicit_target
            # Nobody sees the messages about repeated names. To place one takes time that grows with
            # the number of them.
            document.note_explicit_target = lambda target, _=None: note(target)
            return document

        def parse(self) -> None:
            super().parse()
            _check_substitutions(self.document)
            self.unread = sum(map(_holds_unread_text, self.document.findall()))

    return Reader


def _holds_unread_text(node: Any) -> bool:
    """Return whether a node is an error that shows the text which could not be read."""
    if node.tagname != "system_message":
        return False
    return any(child.tagname == "literal_block" for child in node.children)


def _check_substitutions(document: Any) -> None:
    """Raise an error if expanding the names in a document would take long."""
    texts = {name.lower(): text for name, text in document.substitution_defs.items()}
    costs: dict[str, int] = {}
    if sum(_cost(name, texts, costs) for name in _references(document)) > MOST_SUBSTITUTED:
        raise TooManySubstitutionsError


def _references(node: Any) -> list[str]:
    """Return the names inside a node that stand for texts."""
    references = node.findall(lambda each: each.tagname == "substitution_reference")
    return [each["refname"].lower() for each in references]


def _cost(name: str, texts: Mapping[str, Any], costs: dict[str, int]) -> int:
    """Return how many characters stand for a name, also through names in its text."""
    if name not in texts:
        return 0
    if name not in costs:
        costs[name] = 0  # if it contains itself, which docutils refuses
        below = (COST_OF_A_NAME + _cost(each, texts, costs) for each in _references(texts[name]))
        costs[name] = len(texts[name].astext()) + sum(below)
    return costs[name]
