"""The configuration of Sphinx, which builds these pages as HTML (`make docs`).

The source folder is the repository's root, so that links work both here and on a Git host. Pages
need no network, neither to be built nor to be read.
"""

import dataclasses
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import figures  # noqa: E402, of this folder
import reference  # noqa: E402, of this folder

project = "diffcse_jax"
author = "The diffcse_jax authors"
project_copyright = "MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
]
exclude_patterns = [".*", "build", "dist", "docs/_build", "runs"]  # not searched for pages

highlight_language = "none"  # for blocks without a language

html_theme = "furo"
html_title = "diffcse_jax"
html_math_renderer = "mathml"
html_show_sphinx = False
html_additional_pages = {"index": "redirect.html"}  # for readers who open the folder
templates_path = ["."]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # the same anchors of headings as on Git hosts

default_role = "code"  # for text in single backquotes in docstrings
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as they are written
toc_object_entries_show_parents = "hide"
# The types of other packages, and the shapes of arrays, which look like names to Sphinx.
nitpick_ignore_regex = [("py:.*", ".*")]
# Folders of the repository, which a Git host shows, but which are not pages here.
FOLDERS = [
    path.relative_to(HERE.parent)
    for pattern in ("[a-z]*/", "[a-z]*/*/")
    for path in HERE.parent.glob(pattern)
]
nitpick_ignore = [
    ("myst", f"{start}{folder}{end}")
    for start in ("", "../")
    for folder in FOLDERS
    for end in ("", "/")
]

# Names on the page of Python, made from docstrings when pages are built.
PAGE, MARKER = "docs/python", "<!-- names -->"
# A figure that is drawn when pages are built; code hosts show nothing in its place.
FIGURE = re.compile(r"<!-- figure (\w+): (.*?) -->", re.DOTALL)


def setup(app: Sphinx) -> None:
    """Connect the functions below."""
    app.connect("builder-inited", lambda _: figures.draw_for_pages())
    app.connect("source-read", fill)
    # The page depends on the package, not only on its file.
    app.connect("env-get-outdated", lambda *_: [PAGE])
    app.connect("autodoc-process-signature", short_signature)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the marker on the page of Python, and the comments that name figures."""
    if docname == PAGE:
        source[0] = source[0].replace(MARKER, reference.python_directives())
    source[0] = FIGURE.sub(r"![\2](figures/\1.svg)", source[0])


def short_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Shorten the signature of a dataclass with many fields, which are listed below it anyway."""
    long = dataclasses.is_dataclass(obj) and len(signature or "") > 300
    return ("(...)" if long else signature), returns


def visit_math(translator: nodes.NodeVisitor, node: nodes.math) -> None:
    """Write a formula within a line as MathML, which browsers draw without scripts."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(translator: nodes.NodeVisitor, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode
