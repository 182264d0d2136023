"""Texts with their places, as `encode`, `embed`, `search` and `build_index` read them, and passages of long texts."""

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from diffcse_jax.data.readers import Corpus
from diffcse_jax.data.sentences import END
from diffcse_jax.data.sources import open_text
from diffcse_jax.errors import DataError

STDIN = "-"
TITLED = ("titled passage",)  # the column of documents with titles
OVERLAP = 0.125  # the share of a passage's tokens that the next passage repeats at most

TEXT, LINE, FILE, ID, COLUMN = "sentence", "line", "file", "id", "column"  # the keys of a record
TITLE, DOCUMENT, START = "title", "document", "start"  # of passages: the first character in the text is `start`

# `sentence`; its `line` or, if a source has several files, its `file` with the line; `id`, if a column was named;
# `column`, if several are read; and `title`, of a document's passage.
Record = dict[str, Any]
Sentences = str | Iterable[str]
Span = tuple[int, int]  # characters of a text, from and to


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
        if text.encode(errors="ignore").decode() != text:
            raise DataError(f"sentence {number}: {text!r:.60} contains a lone surrogate: the text was not valid UTF-8")
    return texts


def records_of(sentences: Any, *, titled: bool = False) -> Sequence[Record]:
    """Return the texts of a file or folder, a list of dicts, or an iterable of strings as records.

    Raises `DataError` if the `sentence` of a dict is missing or not a string, or if another item is not a string.
    """
    if isinstance(sentences, str | Path):
        return [*read_records(sentences, "build_index", titled=titled)]
    if not (isinstance(sentences, list) and sentences and isinstance(sentences[0], Mapping)):
        return [{TEXT: text} for text in checked_sentences(sentences)]
    for number, record in enumerate(sentences):
        if not isinstance(record, Mapping):
            raise DataError(f"row {number} is {record!r:.60}, not a dict like row 0. Give strings only, or dicts only")
    checked_sentences(record.get(TEXT) for record in sentences)
    return sentences


@dataclasses.dataclass(frozen=True)
class Records:
    """The texts of one source. Each iteration reads it from the start."""

    corpus: Corpus  # the rows: the id, if there is one, then the texts
    columns: tuple[str, ...] = ()  # of the texts, if they were named
    has_id: bool = False

    def __iter__(self) -> Iterator[Record]:
        """Yield the texts in order, and those of one row in the order of the columns; raises like `Corpus`."""
        for number, _, row in self.corpus.in_documents():
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
    titled: bool = False,
    on_bad_line: str = "skip",
) -> Records:
    """Open anything that training reads (a file, a pattern, a folder), or standard input (`-`), one text per line.

    Args:
        source: Its name, or `-`.
        option: The option that named it, for errors.
        columns: Columns whose texts are read. By default the only one, or the first with a known name.
        id_column: A column whose values identify the rows.
        titled: Also read the titles of documents.
        on_bad_line: What to do about a line without text: `skip` or `error`.
    """
    if str(source) == STDIN:
        if columns or id_column:
            raise DataError("standard input has no columns. Remove --columns and --id_column")
        lines = ((line.decode(errors="surrogateescape"),) for line in sys.stdin.buffer)
        corpus = Corpus("standard input", (TEXT,), lambda: enumerate(lines, 1), _refuse_digest, on_bad_line)
        return Records(corpus)
    if id_column and (not columns or id_column in columns):
        raise DataError(f"--id_column {id_column} needs the columns of text, without itself. Add --columns NAME ...")
    wanted = (*([id_column] if id_column else []), *columns)
    corpus = open_text(source, option, columns=wanted, on_bad_line=on_bad_line, titled=titled)
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
    for name, source in zip(inputs, sources, strict=True):
        file = {FILE: name} if len(sources) > 1 else {}
        yield from (file | record for record in source)
        if skipped := source.corpus.skipped_summary():
            print(f"{source.corpus.name}: {skipped}", file=sys.stderr)


def in_chunks(records: Iterable[Record], rows: int) -> Iterator[list[Record]]:
    """Yield lists of at most `rows` records. Python 3.12 has `itertools.batched`."""
    remaining = iter(records)
    while chunk := list(itertools.islice(remaining, rows)):
        yield chunk


def table_of(records: Sequence[Record]) -> pa.Table:
    """Return the records as a table with a column for each key. It is null where a record does not have the key."""
    columns = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(records)) or (TEXT,):
        try:
            columns[name] = pa.array([record.get(name) for record in records])
        except pa.ArrowException as error:
            raise DataError(f"the values of {name!r} differ in type: {error}. Give strings only") from error
    return pa.table(columns)


def split_text(text: str, tokens: Sequence[Span], limit: int) -> list[Span]:
    """Split a text, whose tokens have the places `tokens`, into overlapping passages of at most `limit` tokens.

    A passage ends with the last sentence that ends in its second half. If none does, it ends with a word. The next
    passage begins up to an eighth of a passage earlier: with a sentence or, if none begins there, with a word.
    """
    begins = [start for start, _ in tokens]
    words = {number for number in range(1, len(tokens)) if tokens[number - 1][1] < begins[number]}
    sentences = {bisect.bisect_left(begins, gap.end()) for gap in END.finditer(text)}
    found: list[Span] = []
    start = 0
    while start + limit < len(tokens):
        stop = _first(range(start + limit, start + limit // 2, -1), sentences, words) or start + limit
        found.append((begins[start], tokens[stop - 1][1]))
        earliest = max(start + 1, stop - max(1, int(OVERLAP * limit)))
        start = _first(range(earliest, stop), sentences, words) or earliest
    return [*found, (begins[start], tokens[-1][1])] if tokens else [(0, len(text))]


def _first(places: Iterable[int], *kinds: Container[int]) -> int | None:
    """Return the first place that is of the first kind. If there is none, try the next kind."""
    return next((place for kind in kinds for place in places if place in kind), None)


def as_passages(records: Sequence[Record], spans: Sequence[Sequence[Span]] = ()) -> list[Record]:
    """Return a record for each passage of each text. Without `spans`, texts stay whole.

    Records with the same `file` and `line` are passages of one document. Records without these get a `document`.
    """
    found: list[Record] = []
    for number, record in enumerate(records):
        place = {} if LINE in record or FILE in record else {DOCUMENT: number}
        text = record[TEXT]
        passages = spans[number] if spans else [(0, len(text))]
        found += [place | record | {START: start, TEXT: text[start:end]} for start, end in passages]
    return found


def documents_of(table: pa.Table) -> Int[np.ndarray, " rows"]:
    """Return the number of each row's document. Only passages, which have a `start`, share one."""
    places = [table[name].to_pylist() for name in (FILE, LINE, DOCUMENT) if name in table.column_names]
    if not places or START not in table.column_names:
        return np.arange(len(table))
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(place, len(numbers)) for place in zip(*places, strict=True)])


def place_of(record: Record) -> str:
    """Return the id of a text, or else its file and line."""
    names = [ID] if ID in record else [name for name in (FILE, LINE) if name in record]
    return ":".join(str(record[name]) for name in names)


def title_of(record: Record) -> str:
    """Return what stands in front of a passage that is searched: its title and a space, or an empty string."""
    return f"{record[TITLE]} " if record.get(TITLE) else ""


def searched_texts(table: pa.Table) -> list[str]:
    """Return what is encoded and what BM25 reads: passages after their titles."""
    rows = table.select([name for name in (TITLE, TEXT) if name in table.column_names]).to_pylist()
    return [title_of(row) + row[TEXT] for row in rows]
