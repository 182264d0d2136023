"""Sentences of files for commands that encode them, each with what tells where it is from."""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffcse_jax.data.corpus import Corpus, Fault, Record
from diffcse_jax.data.lines import LONGEST_LINE, lines_of
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.vector_folder import TEXT
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig

STDIN = "-"
ALSO_TOLD = {"; set data.pairs, to 'lead' for example": "; copy their text into a txt file"}  # pairs are training's
# Of the source's own columns these names are taken, and `embedding`, which comes later.
LINE, ID, COLUMN = "line", "id", "column"

Entry = Mapping[str, Any]  # `line`, `id` where asked for, `column` where several are read, `sentence`


@dataclasses.dataclass(frozen=True)
class Entries:
    """The sentences of one source. Iterating reads it from its start.

    Attributes:
        corpus: its rows: the id if there is one, then the texts.
        columns: of the texts, if they were named.
        has_id: whether rows begin with an id.
        options: what options of a configuration are called here, for errors.
    """

    corpus: Corpus
    columns: tuple[str, ...]
    has_id: bool
    options: Mapping[str, str]

    def __iter__(self) -> Iterator[Entry]:
        """Yields the sentences in order, those of one row in the order of the columns.

        Raises:
            DataError: as `Corpus.numbered`.
        """
        with told(self.options):
            for line, row in self.corpus.numbered():
                identity: dict[str, Any] = {LINE: line}
                if self.has_id:
                    identity[ID] = row[0]
                texts = row[self.has_id :]
                if len(self.columns) < 2:
                    yield identity | {TEXT: texts[0]}
                    continue
                for column, text in zip(self.columns, texts, strict=True):
                    yield identity | {COLUMN: column, TEXT: text}


def read_entries(
    source: str | Path,
    option: str,
    *,
    columns: Sequence[str] = (),
    id_column: str = "",
    on_bad_line: str = "skip",
    instead: str = "correct the line",
) -> Entries:
    """The sentences of what training reads (a file, a pattern, a folder), or of standard input (`-`), one a line.

    Args:
        source: the name of it, or `-`.
        option: the name, in errors, of the option that it was given by.
        columns: whose texts are read; empty: the only one, or the first of those whose names tell their roles.
        id_column: a further one, whose values name the rows; of jsonl and json also whole numbers.
        on_bad_line: `skip` or `error`.
        instead: in errors, what to do about a bad line.

    Raises:
        DataError: the source cannot be read or lacks a column, or it has several and none is named.
    """
    options = {
        "data.train_file": option,
        "data.columns": "--columns",
        "set data.on_bad_line=skip": instead,
    }
    if str(source) == STDIN:
        if columns or id_column:
            raise DataError("standard input has no columns; leave out --columns and --id_column")
        return Entries(_standard_input(on_bad_line), (), False, options)
    if id_column in columns:
        raise DataError(f"--id_column {id_column} is one of --columns, too; it names rows and is not text")
    if id_column and not columns:
        raise DataError("--id_column: name the columns of text, too: --columns NAME [NAME ...]")
    with told(options):
        wanted = (*([id_column] if id_column else []), *columns)
        data = DataConfig(train_file=str(source), columns=wanted, on_bad_line=on_bad_line)
        corpus = open_corpus(data, option, id_column=id_column)
        return Entries(corpus, tuple(columns), bool(id_column), options)


def in_chunks(entries: Iterable[Entry], rows: int, characters: int = sys.maxsize) -> Iterator[list[Entry]]:
    """The entries in lists of so many; of fewer where their sentences reach a number of characters."""
    chunk: list[Entry] = []
    held = 0
    for entry in entries:
        chunk.append(entry)
        held += len(entry[TEXT])
        if len(chunk) == rows or held >= characters:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def table_of(entries: Sequence[Entry]) -> pa.Table:
    """The entries as a table, a column for each of their keys."""
    return pa.table({name: pa.array([entry[name] for entry in entries]) for name in entries[0]})


@contextlib.contextmanager
def told(options: Mapping[str, str]) -> Iterator[None]:
    """Errors of the sources name the command's options and not those of a configuration."""
    try:
        yield
    except DataError as error:
        message = re.sub(r" \(as in --config\..*\)", "", str(error))
        for key, option in {**ALSO_TOLD, **options}.items():
            message = message.replace(key, option)
        raise type(error)(message) from error


def _standard_input(on_bad_line: str) -> Corpus:
    def records() -> Iterator[Record]:
        for number, line in enumerate(lines_of(sys.stdin.buffer), 1):
            text = "" if line is None else line.decode(errors="surrogateescape")
            yield number, Fault.TOO_LONG if line is None or len(text) > LONGEST_LINE else (text,)

    def no_fingerprint() -> str:
        raise DataError("standard input can be read once only")

    return Corpus("standard input", ("sentence",), records, no_fingerprint, on_bad_line)
