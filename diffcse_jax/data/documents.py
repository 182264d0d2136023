"""Documents: text that belongs together, of files, folders and docstrings, read as a stream.

A document is one or more sections, each with a title, where it has one, and sentences. Memory holds one document at a
time.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.data import markdown, text_files
from diffcse_jax.data.corpus import Fault, Place, listed
from diffcse_jax.data.formats import extension
from diffcse_jax.data.sentences import sentences_of
from diffcse_jax.errors import DataError

MOST_CHARACTERS = 100_000_000  # of a document: a file without blank lines is a document as large as itself
LOOKED_AT = 10_000  # lines; a blank one among them tells that blank lines separate documents
TITLE_AND_TEXT = ("title", "text")


class Section(NamedTuple):
    """A part of a document.

    Attributes:
        place: the line of the file that it begins on; in a folder, its file.
        title: empty where it has none.
        lines: its text.
        sentence_a_line: every line is a sentence as it stands.
    """

    place: Place
    title: str
    lines: Sequence[str]
    sentence_a_line: bool = False

    def sentences(self) -> list[str]:
        """The sentences, without a title that the text repeats at its start."""
        found = [line.strip() for line in self.lines] if self.sentence_a_line else sentences_of(self.lines)
        return found[1:] if self.title and found[:1] == [self.title] else found

    def place_of(self, sentence: int) -> Place:
        """The line of a sentence, or, where it is not known, the section's."""
        return self.place + sentence if self.sentence_a_line and isinstance(self.place, int) else self.place


Document = Sequence[Section]


@dataclasses.dataclass(frozen=True)
class Documents:
    """A source of documents.

    Attributes:
        name: its name in messages.
        read: starts a pass over places (lines from 1, or files of a folder) and the documents there, or their faults.
        fingerprint: the SHA-256 of the content, as hexadecimal digits; reads all of it.
    """

    name: str
    read: Callable[[], Iterable[tuple[Place, Document | Fault]]]
    fingerprint: Callable[[], str]

    def __iter__(self) -> Iterator[Document]:
        """Yields the documents that can be read."""
        return (document for _, document in self.read() if not isinstance(document, Fault))


def of_text_file(path: Path, fingerprint: Callable[[], str], *, sentence_a_line: bool) -> Documents:
    """Documents of a txt file: between blank lines; without blank lines, a document a line.

    Args:
        path: the file.
        fingerprint: of the source.
        sentence_a_line: lines are sentences, and documents are between blank lines in any case.
    """
    read = _line_documents
    if sentence_a_line or _has_blank_lines(path):
        read = functools.partial(_block_documents, sentence_a_line=sentence_a_line)
    return Documents(str(path), functools.partial(read, path), fingerprint)


def of_objects(
    name: str,
    available: Sequence[str],
    objects: Callable[[], Iterable[tuple[Place, dict[str, Any] | Fault]]],
    columns: Sequence[str],
    fingerprint: Callable[[], str],
) -> Documents:
    """Documents of jsonl, json and Parquet files, one object (or row) each.

    Args:
        name: of the source, in messages.
        available: the keys of the first object.
        objects: starts a pass over the objects.
        columns: the keys of title and text, or of the text alone; none: `title` and `text`. An object without a title,
            or with an empty one, is a document all the same.
        fingerprint: of the source.

    Raises:
        DataError: more than two keys, or the first object lacks one of them (without `columns` its text).
    """
    wanted = columns or TITLE_AND_TEXT
    if len(wanted) > 2:
        raise DataError(f"{name}: a document has a title and a text, and data.columns names {len(wanted)} keys")
    missing = [key for key in columns or wanted[-1:] if key not in available]
    if missing:
        raise DataError(
            f"{name}: no key {missing[0]!r}; it has: {listed(available)}; name those of title and text, or of the "
            "text alone, in data.columns"
        )
    return Documents(name, lambda: _object_documents(objects(), wanted), fingerprint)


def of_files(name: str, root: Path, files: Sequence[Path]) -> Documents:
    """Documents of txt and markdown files, one each.

    Args:
        name: of the source, in messages.
        root: the folder that they lie in or below.
        files: what they are.
    """

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(root).as_posix()}\n{len(content)}\n".encode(errors="surrogateescape"))
            digest.update(content)
        return digest.hexdigest()

    return Documents(name, functools.partial(_file_documents, root, files), fingerprint)


def of_docstrings() -> Documents:
    """Documents of the installed packages: their docstrings, without the functions that are held out for evaluation."""
    from diffcse_jax.data.docstrings import docstring_documents

    def read() -> Iterator[tuple[Place, Document]]:
        for name, sentences in docstring_documents():
            yield name, (Section(name, "", sentences, sentence_a_line=True),)

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for _, sentences in docstring_documents():
            digest.update("\n".join([*sentences, "\n"]).encode())
        return digest.hexdigest()

    return Documents("docstrings", read, fingerprint)


def _has_blank_lines(path: Path) -> bool:
    """True if, among the first lines, text follows a blank one that follows text."""
    lines = itertools.islice(text_files.lines(path), LOOKED_AT)
    runs = [is_text for is_text, _ in itertools.groupby(lines, lambda line: bool(line.strip()))]
    return sum(runs) > 1


def _block_documents(path: Path, *, sentence_a_line: bool) -> Iterator[tuple[Place, Document | Fault]]:
    for kind, group in itertools.groupby(enumerate(text_files.lines(path), 1), lambda entry: _kind(entry[1])):
        if kind is Fault.TOO_LONG:
            yield from ((number, Fault.TOO_LONG) for number, _ in group)
        elif kind is None:
            numbers, lines = zip(*_of_bounded_size(path, group), strict=True)
            yield numbers[0], (Section(numbers[0], "", lines, sentence_a_line),)


def _kind(line: str | Fault) -> Fault | None:
    """The fault of a line; None if it is text."""
    if isinstance(line, Fault):
        return line
    return None if line.strip() else Fault.EMPTY


def _of_bounded_size(path: Path, numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    size = 0
    for number, line in numbered:
        size += len(line)
        if size > MOST_CHARACTERS:
            raise DataError(
                f"{path}, line {number}: a document of more than {MOST_CHARACTERS:,} characters; put blank lines "
                "between documents, or none at all to have a document a line, with data.documents='auto'"
            )
        yield number, line


def _line_documents(path: Path) -> Iterator[tuple[Place, Document | Fault]]:
    for number, line in enumerate(text_files.lines(path), 1):
        yield number, _kind(line) or (Section(number, "", [line]),)


def _object_documents(
    objects: Iterable[tuple[Place, dict[str, Any] | Fault]], columns: Sequence[str]
) -> Iterator[tuple[Place, Document | Fault]]:
    *of_title, of_text = columns
    for place, entry in objects:
        if isinstance(entry, Fault):
            yield place, entry
        elif of_text not in entry:
            yield place, Fault.MISSING_KEY
        else:
            texts = [*(entry.get(key) or "" for key in of_title), entry[of_text]]
            is_text = all(isinstance(text, str) for text in texts)
            yield place, _titled(place, *texts) if is_text else Fault.NOT_STRING


def _titled(place: Place, *texts: str) -> Document:
    """A document of a title, where there is one, and a text."""
    *title, text = texts
    return (Section(place, " ".join(" ".join(title).split()), text.split("\n")),)


def _file_documents(root: Path, files: Sequence[Path]) -> Iterator[tuple[Place, Document | Fault]]:
    for path in files:
        place = path.relative_to(root).as_posix()
        lines = [line for _, line in _of_bounded_size(path, enumerate(text_files.lines(path), 1))]
        text = "".join(lines).replace("\r\n", "\n")
        if any(isinstance(line, Fault) for line in lines):
            yield place, Fault.TOO_LONG
        elif not text.strip():
            yield place, Fault.EMPTY
        elif extension(path) == ".txt":
            yield place, (Section(place, "", text.split("\n")),)
        else:
            yield place, tuple(Section(place, title, lines) for title, lines in markdown.sections(text))
