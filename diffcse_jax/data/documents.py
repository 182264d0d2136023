"""Documents: text that belongs together. A document has sections. A section has sentences and may have a title.

A document is a block between blank lines (or a line) of a txt file, a row of a table, a file of a folder, or a
docstring. Memory holds one document at a time.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.data import markup
from diffcse_jax.data.readers import Entry, Fault, Place, RowFile, extension, lines, opened, placed_entries
from diffcse_jax.data.sentences import sentences_of
from diffcse_jax.errors import UserError
from diffcse_jax.io import sha256

FORMATS = (".txt", *markup.READERS)  # a file of a folder is a document
LOOKED_AT = 10_000  # lines among which a blank line shows that blank lines separate documents
TITLE_AND_TEXT = ("title", "text")


class Section(NamedTuple):
    """A part of a document."""

    place: Place  # the line on which it begins or, in a folder, its file
    title: str  # may be empty
    lines: Sequence[str]
    sentence_a_line: bool = False

    def sentences(self) -> list[str]:
        """Return the sentences, without a title that the text repeats at its start."""
        found = [line.strip() for line in self.lines] if self.sentence_a_line else sentences_of(self.lines)
        return found[1:] if self.title and found[:1] == [self.title] else found


Document = Sequence[Section]
Placed = tuple[Place, Document | Fault]


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


def of_text_file(path: Path) -> Documents:
    """Return the documents of a txt file: the blocks between blank lines or, without blank lines, the lines."""
    blocks = has_blank_lines(path)

    def read() -> Iterator[Placed]:
        numbered = enumerate(lines(path), 1)
        for is_text, group in itertools.groupby(numbered, lambda entry: bool(entry[1].strip())):
            if is_text and blocks:
                numbers, text = zip(*group, strict=True)
                yield numbers[0], (Section(numbers[0], "", text),)
            elif not blocks:
                for number, line in group:
                    yield number, (Section(number, "", [line]),) if is_text else Fault.EMPTY

    return Documents(str(path), read, lambda: sha256([path]))


def has_blank_lines(path: Path) -> bool:
    """Return whether blank lines separate text, by the first lines."""
    first = itertools.islice(lines(path), LOOKED_AT)
    return sum(is_text for is_text, _ in itertools.groupby(first, lambda line: bool(line.strip()))) > 1


def of_files(
    name: str, root: Path, prose: Sequence[Path], tables: Sequence[RowFile], columns: Sequence[str], note: str
) -> Documents:
    """Return each file of prose (see `FORMATS`) and each row of a table, whose columns are title and text or text."""
    columns = tuple(columns or TITLE_AND_TEXT)

    def read() -> Iterator[Placed]:
        for path in prose:
            file = path.relative_to(root).as_posix()
            yield file, _of_prose(file, path)
        for place, entry in placed_entries(tables, columns, root if len(tables) > 1 or prose else None):
            yield place, _of_row(place, entry, columns)

    def fingerprint() -> str:
        files = [*prose, *(table.path for table in tables)]
        parts = [f"{file.relative_to(root).as_posix()} {sha256([file])}" for file in files]
        return hashlib.sha256("\n".join([*parts, *columns]).encode(errors="surrogateescape")).hexdigest()

    return Documents(name, read, fingerprint, note)


def _of_row(place: Place, entry: Entry, columns: Sequence[str]) -> Document | Fault:
    if isinstance(entry, Fault):
        return entry
    if columns[-1] not in entry:
        return Fault.MISSING_KEY
    title, text = (entry.get(columns[0]) or "") if len(columns) > 1 else "", entry[columns[-1]]
    if not (isinstance(title, str) and isinstance(text, str)):
        return Fault.NOT_STRING
    return (Section(place, " ".join(title.split()), text.split("\n")),)


def _of_prose(place: str, path: Path) -> Document | Fault:
    with opened(path) as file:
        content = file.read()
    if extension(path) == ".txt":
        text = content.decode("utf-8-sig", errors="surrogateescape").replace("\r\n", "\n")
        return (Section(place, "", text.split("\n")),) if text.strip() else Fault.EMPTY
    try:
        found = list(markup.READERS[extension(path)](content))
    except UserError:  # a library is missing
        raise
    except (Exception, SystemExit):  # for damaged and encrypted files, libraries raise many types
        return Fault.UNREADABLE
    return tuple(Section(place, title, text) for title, text in found) or Fault.EMPTY
