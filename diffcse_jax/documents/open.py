"""Open any text that a user may name, as documents.

`open_documents_to_search` reads the text of all commands but training. All training text can also
be encoded and searched.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.documents import docstrings
from diffcse_jax.documents.document import Document, Documents, IdsOfFiles, Section, id_of
from diffcse_jax.documents.files import formats
from diffcse_jax.documents.files.pool import parse_files
from diffcse_jax.documents.find import LINES, STDIN, Skipped, Source, find_source, fingerprint
from diffcse_jax.documents.ledger import EMPTY, NO_TEXT, Ledger, Place, usable
from diffcse_jax.documents.tables import table as tables
from diffcse_jax.documents.tables.layout import (
    Layout,
    document_of,
    id_among,
    is_emptied,
    layout_of,
    own_id,
    require_columns,
)
from diffcse_jax.documents.tables.table import Table, open_table
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.documents.text.lines import extension, lines_of, read_lines
from diffcse_jax.errors import DataError

LOOKED_AT = 10_000  # lines among which a blank line shows that blank lines separate documents
LOOKED_AT_FILES = 10


def open_documents_to_search(
    name: str | Path, option: str = "--input", *, columns: Sequence[str] = (), id_column: str = ""
) -> Documents:
    """Open any text that a user may name.

    See `find_source`. Errors name the `option` that named the text. A line of a txt file is a
    document, and so is a row of a table, or another file. Of a table, the known columns `title` and
    `text` are read, or else all columns of text.

    Args:
        name: A file, folder, pattern or known name, or `-` for the lines of standard input. The
            last two have no columns: `columns` and `id_column` are refused.
        option: The option that named it, for errors.
        columns: The columns of a table that are read. Each is a text of its own.
        id_column: The column that identifies rows. By default it is `_id` or `id`, if there is one.
    """
    source = find_source(str(name), option)
    if columns or id_column:
        _require_columns_apply(source, option)
    if source.is_docstrings:
        return docstrings.docstring_documents()
    return documents_of(source, Reading(columns, id_column, with_code=True, is_search=True))


def _require_columns_apply(source: Source, option: str) -> None:
    """Raise `DataError` if the user named columns of a source that has none."""
    do_not_apply = "so --columns and --id_column do not apply"
    if source.is_stdin:
        remedy = "Write the table to a file and name it"
        raise DataError(
            f"{option} {source.name}: standard input is read as lines, {do_not_apply}. {remedy}"
        )
    if source.is_docstrings:
        raise DataError(
            f"{option} {source.name}: docstrings have no columns, {do_not_apply}. Leave them out"
        )


class Reading(NamedTuple):
    """How the files of a source are read as documents."""

    columns: Sequence[str] = ()  # of tables, if the user named some
    id_column: str = ""
    with_code: bool = False  # also read tables, code and preformatted text in documents
    is_search: bool = False  # named columns are texts of their own, and lines of a txt file, too

    @property
    def needs_tables(self) -> bool:
        """Return whether only tables have what the user named."""
        return bool(self.columns or self.id_column)


class _Opened(NamedTuple):
    """The files of a source by the way they are read."""

    lines: Sequence[Path]
    prose: Sequence[Path]
    tables: Sequence[tuple[Table, Layout]]
    skipped: Sequence[Skipped]

    def note(self, name: str) -> str:
        """Return which documents the txt files of a source hold; empty unless it has several."""
        if len(self.lines) > 1:
            return f"{name}: each line of its txt files is a document"
        if sum(extension(file) in LINES for file in self.prose) > 1:
            return f"{name}: each of its txt files is a document"
        return ""


def documents_of(source: Source, reading: Reading) -> Documents:
    """Return the documents of files and tables."""
    opened = _open(source, reading)

    def read(ledger: Ledger) -> Iterator[Document]:
        source.account(ledger)
        Source(source.name, skipped=tuple(opened.skipped)).account(ledger)
        if reading.is_search and (note := opened.note(source.name)):
            ledger.note(note)
        if source.is_stdin:
            yield from _lines(STDIN, lines_of(sys.stdin.buffer, STDIN, ledger), ledger)
        for file in opened.lines:
            yield from _lines(str(file), read_lines(file, str(file), ledger), ledger)
        yield from _prose(opened.prose, reading.with_code, ledger)
        if reading.is_search and len(opened.tables) > 1:
            yield from _rows_of_files(opened.tables, ledger)
            return
        for table, layout in opened.tables:
            yield from _rows(table, layout, ledger)

    return Documents(
        source.name, read, lambda: fingerprint(source, _marks(source, reading, opened))
    )


def _marks(source: Source, reading: Reading, opened: _Opened) -> tuple[str, ...]:
    """Return how files are read, as far as their content does not say it; see `fingerprint`.

    Of a txt file that the user names, each line or block is a document. If it is the one file of a
    folder, it may be read whole. Documents whose library is missing are left out, until it is
    installed.
    """
    kinds = sorted({extension(file) for file in opened.prose})
    unread = [f"without {kind}" for kind in kinds if formats.lacks_library(kind)]
    is_alone = len(source.files) == 1 and extension(source.files[0]) in LINES
    is_whole = is_alone and bool(opened.prose)
    return (*reading.columns, *(["whole"] if is_whole else []), *unread)


def _open(source: Source, reading: Reading) -> _Opened:
    """Decide how each file is read, and open the tables."""
    found, skipped = _open_tables(source, reading)
    prose = source.of_kinds(formats.KINDS)
    lines: list[Path] = []
    if reading.needs_tables:
        skipped += [Skipped(str(file), "without columns") for file in prose]
        prose = []
    elif reading.is_search and len(prose) == len(source.files) and _are_lines(source):
        lines = prose
        prose = []
    if not (prose or lines or found or source.is_stdin):
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in skipped[:5])
        raise DataError(f"{source.name}: no table with a column of text ({reasons})")
    return _Opened(lines, prose, found, skipped)


def _open_tables(
    source: Source, reading: Reading
) -> tuple[list[tuple[Table, Layout]], list[Skipped]]:
    """Open the tables of a source; return those with text, and the others with the reason.

    A table that cannot be read is an error only if it is the one file that the user named.
    """
    paths = [*source.data_sets, *source.of_kinds(tables.KINDS)]
    found = []
    skipped = []
    for path in paths:
        try:
            table = open_table(path, str(path), reading.columns)
            layout = _layout(table, reading)
        except DataError as error:
            if len(source.files) + len(source.data_sets) < 2:
                raise
            skipped.append(Skipped(str(path), str(error)))
            continue
        if layout:
            found.append((table, layout))
        else:
            reason = f"without a column of text. It has: {listed(table.columns)}"
            skipped.append(
                Skipped(str(path), reason if table.columns else NO_TEXT, bool(table.columns))
            )
    return found, skipped


def _layout(table: Table, reading: Reading) -> Layout | None:
    if not table.columns:
        return None
    named = [*reading.columns, *filter(None, [reading.id_column])]
    require_columns(table.name, table.columns, table.missing(named))
    usual = layout_of(
        table.name,
        table.columns,
        table.text_columns,
        reading.id_column,
        is_open=table.is_open,
    )
    if not reading.columns:
        return usual
    own_id = usual.id if usual else reading.id_column or None
    if reading.is_search:
        return Layout(tuple(reading.columns), id=own_id, are_separate=True)
    *title, text = reading.columns
    return Layout((text,), title[0] if title else None, own_id)


def _are_lines(source: Source) -> bool:
    """Return whether files are lines of text, and not documents."""
    if any(extension(file) not in LINES for file in source.files):
        return False
    return source.is_file or not any(map(has_blank_lines, source.files[:LOOKED_AT_FILES]))


def _lines(name: str, lines: Iterable[tuple[int, str]], ledger: Ledger) -> Iterator[Document]:
    """Yield each line as a document."""
    ledger.read_file()
    for number, line in lines:
        place = Place(name, number)
        if texts := usable((line,), place, ledger):
            ledger.keep()
            yield Document(id_of(place), (Section("", texts),), place, whole=True)


def _prose(files: Sequence[Path], with_code: bool, ledger: Ledger) -> Iterator[Document]:
    """Yield each file that has text as a document."""
    for file, parsed in zip(files, parse_files(files, with_code=with_code), strict=True):
        name = str(file)
        if isinstance(parsed, formats.Unreadable):
            ledger.skip_file(name, parsed.reason, is_loss=parsed.reason != EMPTY)
            continue
        for what, number in parsed.left_out.items():
            ledger.leave_out(what, Place(name), number, is_loss=False)
        for note in parsed.notes:
            ledger.note(f"{name}: {note}")
        ledger.read_file()
        ledger.keep()
        sections = tuple(Section(title, lines) for title, lines in parsed.sections)
        yield Document(name, sections, Place(name))


def _rows_of_files(opened: Sequence[tuple[Table, Layout]], ledger: Ledger) -> Iterator[Document]:
    """Yield the rows of several tables as documents.

    The ids of rows of different tables differ.
    """
    ids = IdsOfFiles()
    for table, layout in opened:
        for document in _rows(table, layout, ledger):
            yield dataclasses.replace(document, id=ids.of(document.id, document.place.file))
    if note := ids.note():
        ledger.note(note)


def _rows(table: Table, layout: Layout, ledger: Ledger) -> Iterator[Document]:
    """Yield each row of a table that has text as a document."""
    ledger.read_file()
    if layout.note:
        ledger.note(layout.note)
    others = [column for column in (layout.title, layout.id) if column is not None]
    columns = dict.fromkeys([*table.columns, *layout.texts, *others])
    for row, values in table.rows([*columns], ledger, notes_late_text=layout.is_found):
        if layout.id is None and table.is_open:  # later rows may have ids
            layout = layout._replace(id=id_among(values))
        place = Place(table.name, row)
        if document := document_of(values, layout, place, ledger):
            yield document
        elif ledger.emptied is not None and is_emptied(values, layout):
            ledger.emptied.add(own_id(values, layout) or id_of(place))


def has_blank_lines(file: Path) -> bool:
    """Return whether blank lines separate text, by the first lines."""
    first = itertools.islice(read_lines(file, str(file), Ledger(str(file))), LOOKED_AT)
    return (
        sum(is_text for is_text, _ in itertools.groupby(first, lambda line: bool(line[1].strip())))
        > 1
    )
