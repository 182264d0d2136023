"""Documents: text that belongs together. A document has sections, and a section has a title or none, and sentences.

A document is a block between blank lines (or a line) of a txt file, a row of a table, a file of a folder, or a
docstring. Memory holds one document at a time.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.data import markup
from diffcse_jax.data.corpus import Fault, OptionNames, Place, listed
from diffcse_jax.data.readers import RowFile, extension, file_sha256, lines, open_file, read_bytes
from diffcse_jax.data.sentence_splitter import sentences_of
from diffcse_jax.errors import DataError

FORMATS = (".txt", *markup.READERS)  # a file of a folder is a document
KNOWN = (
    "a txt file; a csv, tsv, jsonl, json or Parquet file with a column `text` (and `title`); markdown, html, rst or "
    "pdf files; a folder or pattern of any of these; or docstrings"
)
LOOKED_AT = 10_000  # lines among which a blank line shows that blank lines separate documents
TITLE_AND_TEXT = ("title", "text")


class Section(NamedTuple):
    """A part of a document.

    Attributes:
        place: The line on which it begins or, in a folder, its file.
        title: May be empty.
        lines: Its text.
        sentence_a_line: Each line is a sentence.
    """

    place: Place
    title: str
    lines: Sequence[str]
    sentence_a_line: bool = False

    def sentences(self) -> list[str]:
        """Return the sentences, without a title that the text repeats at its start."""
        found = [line.strip() for line in self.lines] if self.sentence_a_line else sentences_of(self.lines)
        return found[1:] if self.title and found[:1] == [self.title] else found

    def place_of(self, sentence: int) -> Place:
        """Return the line of a sentence if it is known, otherwise the section's place."""
        return self.place + sentence if self.sentence_a_line and isinstance(self.place, int) else self.place


Document = Sequence[Section]
Placed = tuple[Place, Document | Fault]


@dataclasses.dataclass(frozen=True)
class Documents:
    """A source of documents.

    Attributes:
        name: Name in messages.
        read: Starts a pass over places and the documents there, or their faults.
        fingerprint: Returns the SHA-256 of the content in hexadecimal.
        note: Which files were skipped.
    """

    name: str
    read: Callable[[], Iterable[Placed]]
    fingerprint: Callable[[], str]
    note: str = ""

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that can be read."""
        return (document for _, document in self.read() if not isinstance(document, Fault))


def of_text_file(path: Path, *, sentence_a_line: bool) -> Documents:
    """Return the documents of a txt file: the blocks between blank lines or, without blank lines, the lines.

    Args:
        path: The file.
        sentence_a_line: Each line is a sentence, and blank lines separate documents in any case.
    """
    blocks = sentence_a_line or has_blank_lines(path)
    read = functools.partial(_blocks, path, sentence_a_line) if blocks else functools.partial(_lines, path)
    return Documents(str(path), read, functools.partial(file_sha256, path))


def has_blank_lines(path: Path) -> bool:
    """Tell whether, among the first lines, blank ones separate text."""
    first = itertools.islice(lines(path), LOOKED_AT)
    return sum(is_text for is_text, _ in itertools.groupby(first, lambda line: bool(line.strip()))) > 1


def open_table(
    path: Path, columns: Sequence[str], names: OptionNames, *, strict: bool = True
) -> RowFile | None:  # fmt: skip
    """Open a table whose rows are documents.

    Args:
        path: A csv, tsv, jsonl, json or Parquet file.
        columns: The columns of title and text, or of the text alone. Empty: `title` and `text`.
        names: Options for errors.
        strict: Raise an error if the text is missing; otherwise return None.

    Raises:
        DataError: There are more than two columns, or one is missing.
    """
    if len(columns) > 2:
        raise DataError(f"{path}: a document has a title and a text, but {names.columns} names {len(columns)} columns")
    file = open_file(path, columns or TITLE_AND_TEXT, names)
    missing = [column for column in columns or TITLE_AND_TEXT[-1:] if column not in file.columns]
    if missing and strict:
        raise DataError(
            f"{path}: no column {missing[0]!r}. It has: {listed(file.columns)}. Name the columns of title and text, or "
            f"of the text alone, in {names.columns}"
        )
    return None if missing else file


def of_files(
    name: str, root: Path, prose: Sequence[Path], tables: Sequence[RowFile], columns: Sequence[str], note: str = ""
) -> Documents:
    """Return the documents of a folder: each file of prose, and each row of a table.

    Args:
        name: Name in messages.
        root: The folder that contains the files.
        prose: Files of `FORMATS`.
        tables: Files of `open_table`.
        columns: As in `open_table`.
        note: Which files were skipped.
    """

    def read() -> Iterator[Placed]:
        for path in prose:
            yield _of_prose(path.relative_to(root).as_posix(), path)
        for table in tables:
            file = f"{table.path.relative_to(root).as_posix()}, {table.unit} " if len(tables) > 1 or prose else ""
            yield from _of_rows(table, columns or TITLE_AND_TEXT, file)

    def fingerprint() -> str:
        files = [*prose, *(table.path for table in tables)]
        parts = [f"{file.relative_to(root).as_posix()} {file_sha256(file)}" for file in files]
        return hashlib.sha256("\n".join([*parts, *columns]).encode(errors="surrogateescape")).hexdigest()

    return Documents(name, read, fingerprint, note)


def of_docstrings() -> Documents:
    """Return the docstrings of the installed packages, without the functions held out for evaluation."""
    from diffcse_jax.data.docstrings import docstring_documents

    def read() -> Iterator[Placed]:
        return ((name, (Section(name, "", text, sentence_a_line=True),)) for name, text in docstring_documents())

    def fingerprint() -> str:
        texts = ("\n".join([*sentences, "\n"]) for _, sentences in docstring_documents())
        return hashlib.sha256("".join(texts).encode()).hexdigest()

    return Documents("docstrings", read, fingerprint)


def _blocks(path: Path, sentence_a_line: bool) -> Iterator[Placed]:
    for is_text, group in itertools.groupby(enumerate(lines(path), 1), lambda entry: bool(entry[1].strip())):
        if is_text:
            numbers, text = zip(*group, strict=True)
            yield numbers[0], (Section(numbers[0], "", text, sentence_a_line),)


def _lines(path: Path) -> Iterator[Placed]:
    for number, line in enumerate(lines(path), 1):
        yield number, (Section(number, "", [line]),) if line.strip() else Fault.EMPTY


def _of_rows(table: RowFile, columns: Sequence[str], file: str) -> Iterator[Placed]:
    *title_column, text_column = columns
    for number, entry in table.entries(columns):
        place = f"{file}{number}" if file else number
        if isinstance(entry, Fault):
            yield place, entry
        elif text_column not in entry:
            yield place, Fault.MISSING_KEY
        else:
            title, text = ([entry.get(key) or "" for key in title_column] or [""])[0], entry[text_column]
            is_text = isinstance(title, str) and isinstance(text, str)
            yield place, (_section(place, title, text),) if is_text else Fault.NOT_STRING


def _section(place: Place, title: str, text: str) -> Section:
    return Section(place, " ".join(title.split()), text.split("\n"))


def _of_prose(place: str, path: Path) -> Placed:
    content = read_bytes(path)
    if extension(path) == ".txt":
        text = content.decode("utf-8-sig", errors="surrogateescape").replace("\r\n", "\n")
        return place, (_section(place, "", text),) if text.strip() else Fault.EMPTY
    try:
        found = list(markup.READERS[extension(path)](content))
    except markup.UnreadableError:
        return place, Fault.UNREADABLE
    return place, tuple(Section(place, title, lines) for title, lines in found) or Fault.EMPTY
