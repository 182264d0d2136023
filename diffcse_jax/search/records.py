"""The texts of files with their places, as `encode`, `embed`, `search` and `build_index` read them."""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffcse_jax.data.readers import Corpus
from diffcse_jax.data.sources import open_text
from diffcse_jax.errors import DataError

STDIN = "-"
TITLED = ("titled passage",)  # the column of documents with titles
TEXT, LINE, FILE, ID, COLUMN = "sentence", "line", "file", "id", "column"  # the keys of a record

TITLE, DOCUMENT, START = "title", "document", "start"  # of passages: the first character in the text is `start`

# `line`, or `file` (with its line) if a source has several; `id` if asked for; `column` if several are read; `title` of
# a document's passage; `sentence`.
Record = Mapping[str, Any]
Sentences = str | Iterable[str]


def checked_sentences(sentences: Any) -> list[str]:
    """Return one string or an iterable of strings as a list; raise `DataError` for anything else."""
    if isinstance(sentences, bytes | Mapping) or hasattr(sentences, "columns") or not isinstance(sentences, Iterable):
        kind = type(sentences).__name__
        raise DataError(f"expected a string or an iterable of strings, got {kind}. Of a table, give one column")
    texts = [sentences] if isinstance(sentences, str) else list(sentences)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"sentence {number} is {text!r:.60} ({type(text).__name__}), not a string. Each text gets an embedding "
                "of its own: give one flat list of strings"
            )
    return texts


@dataclasses.dataclass(frozen=True)
class Records:
    """The texts of one source. Each iteration reads it from the start."""

    corpus: Corpus  # the rows: the id, if there is one, then the texts
    columns: tuple[str, ...]  # of the texts, if they were named
    has_id: bool

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the source in hexadecimal; reads all of it."""
        return self.corpus.fingerprint()

    def __iter__(self) -> Iterator[Record]:
        """Yield the texts in order, and those of one row in the order of the columns; raises like `Corpus.numbered`."""
        for number, row in self.corpus.numbered():
            place: dict[str, Any] = {FILE if isinstance(number, str) else LINE: number}
            if self.has_id:
                place[ID] = row[0]
            texts = row[self.has_id :]
            if self.corpus.columns == TITLED:
                *title, text = texts[0].split("\n", 1)
                yield place | {TITLE: "".join(title), TEXT: text}
            elif len(self.columns) < 2:
                yield place | {TEXT: texts[0]}
            else:
                for column, text in zip(self.columns, texts, strict=True):
                    yield place | {COLUMN: column, TEXT: text}


def read_records(
    source: str | Path,
    option: str = "--input",
    *,
    columns: Sequence[str] = (),
    id_column: str = "",
    every_line: bool = False,
    titled: bool = False,
) -> Records:
    """Open anything that training reads (a file, a pattern, a folder), or standard input (`-`), one text per line.

    Args:
        source: Its name, or `-`.
        option: The option that named it, for errors.
        columns: Columns whose texts are read. By default the only one, or the first with a known name.
        id_column: A column whose values identify the rows; in jsonl and json they may be whole numbers.
        every_line: Refuse lines without text instead of skipping them.
        titled: Read the titles of documents, too.
    """
    on_bad_line = "error" if every_line else "skip"
    if str(source) == STDIN:
        if columns or id_column:
            raise DataError("standard input has no columns. Remove --columns and --id_column")
        lines = ((line.decode(errors="surrogateescape"),) for line in sys.stdin.buffer)
        corpus = Corpus("standard input", (TEXT,), lambda: enumerate(lines, 1), _refuse_digest, on_bad_line)
        return Records(corpus, (), has_id=False)
    if id_column and (not columns or id_column in columns):
        raise DataError(f"--id_column {id_column} needs the columns of text, without itself. Add --columns NAME ...")
    wanted = (*([id_column] if id_column else []), *columns)
    corpus = open_text(source, option, columns=wanted, id_column=id_column, on_bad_line=on_bad_line, titled=titled)
    return Records(corpus, tuple(columns), has_id=bool(id_column))


def _refuse_digest() -> str:
    raise DataError("standard input can be read only once. Name a file")


def read_all(inputs: Sequence[str], option: str = "--input", **options: Any) -> Iterator[Record]:
    """Yield the texts of all inputs, with the name of their `file` if there are several; report what is skipped.

    Arguments and errors are those of `read_records`; all inputs are opened before the first is read.
    """
    if STDIN in inputs and sys.stdin.isatty():
        print("reading sentences from the terminal, one per line; Ctrl-D ends them", file=sys.stderr)
    sources = [read_records(each, option, **options) for each in inputs]

    def records() -> Iterator[Record]:
        for name, source in zip(inputs, sources, strict=True):
            file = {FILE: name} if len(sources) > 1 else {}
            yield from (file | dict(record) for record in source)
            if skipped := source.corpus.skipped_summary():
                print(f"{source.corpus.name}: {skipped}", file=sys.stderr)

    return records()


def in_chunks(records: Iterable[Record], rows: int, characters: int = sys.maxsize) -> Iterator[list[Record]]:
    """Yield lists of `rows` records, or fewer if the texts reach a number of characters."""
    chunk: list[Record] = []
    held = 0
    for record in records:
        chunk.append(record)
        held += len(record[TEXT])
        if len(chunk) == rows or held >= characters:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def table_of(records: Sequence[Record]) -> pa.Table:
    """Return the records as a table with a column for each key."""
    names = records[0] if records else {TEXT: ""}
    return pa.table({name: pa.array([record[name] for record in records]) for name in names})
