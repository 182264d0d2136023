"""Sphinx: the pages of this folder, and those that they link to, as HTML (`make docs`).

The source folder is the repository's root, so that a link means the same here and on a Git host's page. Nothing is read
from the network, neither when pages are built nor when they are read.
"""

import dataclasses
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reference  # noqa: E402, of this folder

project = "diffcse_jax"
author = "the authors of diffcse_jax"
project_copyright = "MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
exclude_patterns = [".*", "build", "dist", "docs/_build", "runs"]  # not looked into

highlight_language = "none"  # of blocks that name none

html_theme = "furo"
html_title = "diffcse_jax"
html_math_renderer = "mathml"
html_show_sphinx = False
html_additional_pages = {"index": "redirect.html"}  # for who opens the folder
templates_path = ["."]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # as Git's web pages give them to headings

default_role = "code"  # what docstrings have in single backquotes
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as they are written
toc_object_entries_show_parents = "hide"
# The types of other packages, and the shapes of arrays, which look like names to Sphinx.
nitpick_ignore_regex = [("py:.*", ".*")]
# Folders of the repository, which a Git host shows and which are no pages here.
FOLDERS = [path.relative_to(HERE.parent) for pattern in ("[a-z]*/", "[a-z]*/*/") for path in HERE.parent.glob(pattern)]
nitpick_ignore = [("myst", f"{start}{folder}{end}") for start in ("", "../") for folder in FOLDERS for end in ("", "/")]

# Python names on the page of reference, made from docstrings when pages are built.
PAGE, MARKER = "docs/reference", "<!-- names -->"


def setup(app: Sphinx) -> None:
    """Connect what is generated."""
    app.connect("source-read", fill)
    app.connect("env-get-outdated", lambda *_: [PAGE])  # made from the package, not only from its file
    app.connect("autodoc-process-signature", short_signature)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the marker of the page of reference."""
    if docname == PAGE:
        source[0] = source[0].replace(MARKER, reference.python_directives())


def short_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """That of a dataclass with many fields, which are listed below it anyway, without them."""
    long = dataclasses.is_dataclass(obj) and len(signature or "") > 300
    return ("(...)" if long else signature), returns


def visit_math(translator: nodes.NodeVisitor, node: nodes.math) -> None:
    """A formula within a line, as MathML, which browsers draw without scripts."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(translator: nodes.NodeVisitor, node: nodes.math_block) -> None:
    """A formula of its own lines."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode
