"""Docstrings of the standard library and of scientific packages.

A first run with them needs no download. Source files are parsed, never imported. One function in
ten is held out for evaluation: the summary and the rest of its docstring are a pair, and its
sentences are left out of the corpus.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import itertools
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.documents.document import Document, Documents, Section
from diffcse_jax.documents.files.rst import without_roles
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.sentences import SENTENCE_END, ends_with_abbreviation

PACKAGES = ("numpy", "scipy", "jax", "flax", "optax", "matplotlib")
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "_testing",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
HELD_OUT_SHARE = 10  # one function in ten
WORDS = range(5, 61)  # words of a sentence
REST_WORDS = range(8, 61)  # words of the second half of a pair

PROSE_SECTIONS = {
    "notes",
    "note",
    "summary",
    "extended summary",
    "description",
    "warnings",
    "warning",
    "details",
}
UNDERLINE = re.compile(r"([=\-~^*#`\"'])\1{2,}$")
FIELD_HEADING = re.compile(r"[A-Z][A-Za-z ]{2,30}::?$")
LIST_ITEM = re.compile(
    r"([-*+•]|\(?(\d{1,2}|[a-z])[.)])\s|[:|>+@.]|[\w, *]+ : |[a-z]\w*:\s|\w+ +-- "
)
MATH = re.compile(r":math:`[^`]*`|\$[^$]*\$")
UNFIT = "\0"  # in a sentence that is left out
MARKUP = (  # pattern and replacement
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"`([^`<]*?)\s*(?:<[^`]*>)?`_{0,2}"), r"\1"),  # `name`, `text <target>`_
    (re.compile(r"\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*"), r"\1\2"),
    # A citation that is used as a noun.
    (re.compile(r"\b(and|by|from|in|of|see|than|to|with)\s+\[[\w#*]+\]_"), UNFIT),
    (re.compile(r"\s*\[[\w#*]+\]_"), ""),
)
CODE = re.compile(
    r"[^\w\s.,;:!?'\"()-]|_"  # signs that are rare in prose
    r"|\w\(|\(\)|::|--|\.\.|(?<!\w)\.\w|'\w+'\w"
    r"|\b(?!(e\.g|i\.e)\b)[A-Za-z]\w*\.\w"  # dotted names
    r"|\b[a-z]+[A-Z]"  # camelCase
)


class Docstring(NamedTuple):
    name: str  # of the documented object
    sentences: tuple[str, ...]  # the English ones
    has_summary: bool  # the first of them is the summary


def docstring_sentences() -> Iterable[str]:
    """Return the distinct sentences of 5 to 60 words.

    Their order depends on the installed sources only.
    """
    return dict.fromkeys(sentence for item in _docstrings()[0] for sentence in item.sentences)


def docstring_pairs(limit: int = 500) -> list[tuple[str, str]]:
    """Return held-out pairs of the first sentence of a docstring and its rest.

    The rest has up to 60 words. A hash of the function's name chooses at most `limit` pairs. No
    half occurs twice or in `docstring_sentences`.
    """
    pairs = []
    for item in sorted(_docstrings()[1], key=lambda item: _hash(item.name)):
        rests = itertools.accumulate(
            item.sentences[1:], lambda text, sentence: f"{text} {sentence}"
        )
        rest = [text for text in rests if len(text.split()) < REST_WORDS.stop]
        if item.has_summary and rest and len(rest[-1].split()) in REST_WORDS:
            pairs.append((item.sentences[0], rest[-1]))
    occurrences = Counter(half for pair in pairs for half in pair)
    return [pair for pair in pairs if all(occurrences[half] == 1 for half in pair)][:limit]


def docstring_documents() -> Documents:
    """Return the docstrings that are not held out and have an English summary.

    Held-out sentences are left out of them.
    """

    def read(ledger: Ledger) -> Iterator[Document]:
        # Each text once, with the name of the last object that has it.
        texts = {item.sentences: item.name for item in _docstrings()[0] if item.has_summary}
        for text, name in texts.items():
            ledger.keep()
            yield Document(name, (Section("", text, sentence_a_line=True),), Place(name))

    return Documents("docstrings", read, docstring_fingerprint)


def docstring_fingerprint() -> str:
    """Return the SHA-256 of the docstrings in hexadecimal."""
    return hashlib.sha256(repr(_docstrings()).encode()).hexdigest()


@functools.cache
def _docstrings() -> tuple[list[Docstring], list[Docstring]]:
    """Return the docstrings for training, without held-out sentences, and the held-out ones."""
    training: list[Docstring] = []
    held_out: list[Docstring] = []
    for module, file in _source_files():
        for item, is_function in _docstrings_of(module, file):
            (
                held_out if is_function and _hash(item.name) % HELD_OUT_SHARE == 0 else training
            ).append(item)
    kept_out = {sentence for item in held_out for sentence in item.sentences}
    for number, (name, sentences, has_summary) in enumerate(training):
        kept = tuple(sentence for sentence in sentences if sentence not in kept_out)
        training[number] = Docstring(name, kept, has_summary and sentences[0] not in kept_out)
    return training, held_out


def spans_of(docstring: str) -> list[str]:
    """Split the running text of a docstring into sentences.

    Markup, lists, tables, code, parameters and headings are left out.
    """
    spans = []
    in_prose = True
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.split("\n")
        if len(lines) > 1 and UNDERLINE.match(lines[1].strip()):
            in_prose = lines[0].strip().lower() in PROSE_SECTIONS
            lines = lines[2:]
        elif FIELD_HEADING.match(lines[0]):
            continue
        is_prose = in_prose and lines
        if not is_prose or any(
            line[:1].isspace() or LIST_ITEM.match(line) or UNDERLINE.match(line) for line in lines
        ):
            continue
        text = without_roles(MATH.sub(UNFIT, " ".join(" ".join(lines).split())))
        for pattern, plain in MARKUP:
            text = pattern.sub(plain, text)
        start = 0
        for gap in SENTENCE_END.finditer(text):
            if not ends_with_abbreviation(text, start, gap.start()):
                spans.append(text[start : gap.end()].strip())
                start = gap.end()
        spans.append(text[start:].strip())
    return spans


def is_english(sentence: str) -> bool:
    """Return whether a sentence is English prose of a usual length, without code."""
    letters = sum(character.isalpha() or character.isspace() for character in sentence)
    return (
        len(sentence.split()) in WORDS
        and sentence[0].isupper()
        and sentence[-1] in ".?!"
        and sentence.count("(") == sentence.count(")")
        and letters >= 0.85 * len(sentence)
        and not CODE.search(sentence)
    )


def _hash(name: str) -> int:
    """Return a hash that is the same in each process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _source_files() -> Iterator[tuple[str, Path]]:
    """Yield the modules of Python and of installed packages, in order, with their source files."""
    roots = [("", Path(sysconfig.get_paths()["stdlib"]))]
    for package in PACKAGES:
        if (spec := importlib.util.find_spec(package)) and spec.origin:
            roots.append((package, Path(spec.origin).parent))
    for package, root in roots:
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if not SKIPPED_FOLDERS.intersection(parts) and not parts[-1].startswith("test"):
                yield ".".join(filter(None, (package, *parts))), file


def _docstrings_of(module: str, file: Path) -> Iterator[tuple[Docstring, bool]]:
    """Yield the docstrings of a file, and whether each is that of a function."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in old sources
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates that are not Python
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    pending: list[tuple[str, Any]] = [(module, tree)]
    while pending:
        name, node = pending.pop()
        if text := ast.get_docstring(node, clean=False):
            spans = spans_of(text)
            sentences = tuple(filter(is_english, spans))
            has_summary = bool(sentences) and sentences[0] == spans[0]
            yield Docstring(name, sentences, has_summary), isinstance(node, functions)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*functions, ast.ClassDef)):
                pending.append((f"{name}.{child.name}", child))
