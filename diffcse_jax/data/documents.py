"""Documents: text that belongs together. A document has sections. A section has sentences and may have a title.

A document is a block between blank lines (or a line) of a txt file, a row of a table, a file of a folder, or a
docstring. Memory holds one document at a time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.data.formats import READERS
from diffcse_jax.data.readers import Fault, Place, extension, lines, opened
from diffcse_jax.data.sentences import sentences_of
from diffcse_jax.errors import UserError

LOOKED_AT = 10_000  # lines among which a blank line shows that blank lines separate documents


class Section(NamedTuple):
    """A part of a document."""

    title: str  # may be empty
    lines: Sequence[str]
    sentence_a_line: bool = False

    def sentences(self) -> list[str]:
        """Return the sentences, without a title that the text repeats at its start."""
        found = [line.strip() for line in self.lines] if self.sentence_a_line else sentences_of(self.lines)
        return found[1:] if self.title and found[:1] == [self.title] else found


Document = Sequence[Section]
Placed = tuple[Place, Document | Fault]  # with the line on which it begins or, in a folder, its file


@dataclasses.dataclass(frozen=True)
class Documents:
    """A source of documents."""

    name: str  # in messages
    read: Callable[[], Iterable[Placed]]  # starts a pass
    fingerprint: Callable[[], str]  # returns the SHA-256 of the content in hexadecimal
    note: str = ""  # which files were skipped

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that can be read."""
        return (document for _, document in self.read() if not isinstance(document, Fault))


def in_text_file(path: Path) -> Iterator[Placed]:
    """Yield the documents of a txt file: the blocks between blank lines or, without blank lines, the lines."""
    separated, numbered = has_blank_lines(path), enumerate(lines(path), 1)
    for _, group in itertools.groupby(numbered, lambda line: bool(line[1].strip()) if separated else line[0]):
        numbers, text = zip(*group, strict=True)
        yield numbers[0], ((Section("", text),) if text[0].strip() else Fault.EMPTY)


def has_blank_lines(path: Path) -> bool:
    """Return whether blank lines separate text, by the first lines."""
    first = itertools.islice(lines(path), LOOKED_AT)
    return sum(is_text for is_text, _ in itertools.groupby(first, lambda line: bool(line.strip()))) > 1


def of_texts(*texts: str) -> Document:
    """Return the document of a row of a table, which has a title and a text, or only a text."""
    title = " ".join(texts[0].split()) if len(texts) > 1 else ""
    return (Section(title, texts[-1].split("\n")),)


def of_file(path: Path) -> Document | Fault:
    """Return a file, which has one of the extensions of `READERS`, as a document."""
    with opened(path) as file:
        content = file.read()
    try:
        found = list(READERS[extension(path)](content))
    except UserError:  # a library is missing
        raise
    except (Exception, SystemExit):  # for damaged and encrypted files, libraries raise many types
        return Fault.UNREADABLE
    sections = tuple(Section(title, text) for title, text in found if any(map(str.strip, text)))
    return sections or Fault.EMPTY
