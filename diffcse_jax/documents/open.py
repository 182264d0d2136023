"""The door to texts: sort what a user names into lines, tables and prose, and read its documents.

`open_source` decides how each file is read:

| file            | named by itself                  | in a folder, or matched by a pattern |
|-----------------|----------------------------------|--------------------------------------|
| txt             | lines: each line is a text       | prose; for training rows, lines      |
| csv, jsonl, ... | a table: each row is a text      | the same                             |
| md, html, pdf   | prose: the file is one document  | the same                             |
| pairs (`open_pairs`): tsv, txt and unknown ones are lines; other tables are tables             |

What is made of these depends on the use. Search reads each line as a document, and training on
documents reads the text between two blank lines as one. Search collections, synonyms and label
files have readers of their own.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from diffcse_jax.documents.docstrings import docstring_documents
from diffcse_jax.documents.document import Document, Documents, Section
from diffcse_jax.documents.files import formats
from diffcse_jax.documents.files.pool import parse_files
from diffcse_jax.documents.find import (
    LINES,
    STDIN,
    Skipped,
    Source,
    enter_skipped,
    find_source,
    fingerprint,
)
from diffcse_jax.documents.ids import IdsOfFiles, id_among, place_id, row_id
from diffcse_jax.documents.ledger import EMPTY, NO_TEXT, Ledger, Place
from diffcse_jax.documents.tables import formats as tables
from diffcse_jax.documents.tables.delimited import TAB_EXTENSIONS
from diffcse_jax.documents.tables.layout import (
    Layout,
    document_of,
    is_emptied,
    layout_of,
)
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.documents.text.lines import (
    LineBlock,
    Numbered,
    blocks_of,
    extension,
    read_blocks,
    read_lines,
)
from diffcse_jax.errors import DataError

LOOKED_AT = 10_000  # lines among which a blank line shows that blank lines separate documents
WITHOUT_COLUMNS = "without columns"
BESIDE_FILES = "a data set beside files, which may have the same rows"


# Sorting


@dataclasses.dataclass(frozen=True)
class Opened:
    """A source whose files are sorted by how they are read.

    Attributes:
        source: What the name stands for.
        lines: Files of which each line is a text.
        tables: Tables of which each row is a text.
        prose: Files of which each is a document.
        unread: Files that are not read, with the reason.
    """

    source: Source
    lines: tuple[Path, ...] = ()
    tables: tuple[Table, ...] = ()
    prose: tuple[Path, ...] = ()
    unread: tuple[Skipped, ...] = ()

    @property
    def is_of_tables(self) -> bool:
        """Return whether there are tables, and nothing else to read."""
        return bool(self.tables) and not (self.lines or self.prose)


def open_source(
    name: str,
    option: str,
    *,
    columns: Sequence[str] = (),
    of_rows: bool = False,
    follow_links: bool = False,
) -> Opened:
    """Find the files that a name stands for, and sort them by how they are read.

    A table that cannot be read is an error only if nothing else was found. Otherwise it is among
    `unread`.

    Args:
        name: A file, folder, pattern or known name; see `find_source`.
        option: The option that named it, for errors.
        columns: Columns that the user named; see `open_table`.
        of_rows: Each line of txt files is a text, also in a folder. A data set beside files is not
            read.
        follow_links: See `find_source`.
    """
    source = find_source(name, option, follow_links=follow_links)
    lines: list[Path] = []
    prose: list[Path] = []
    of_tables: list[Path] = []
    unread = source.skipped
    if of_rows and source.files:
        unread += tuple(Skipped(str(folder), BESIDE_FILES) for folder in source.data_sets)
    else:
        of_tables += source.data_sets
    are_lines = source.is_file or of_rows
    for path, kind in source.files.items():
        if kind in LINES and are_lines:
            lines.append(path)
        elif kind in formats.KINDS:  # a txt file of a folder, too
            prose.append(path)
        else:
            of_tables.append(path)
    opened = Opened(source, tuple(lines), (), tuple(prose), unread)
    return _with_tables(opened, of_tables, columns) if of_tables else opened


def _with_tables(opened: Opened, paths: Sequence[Path], columns: Sequence[str]) -> Opened:
    """Open tables. Those that cannot be read, or have no rows, are unread."""
    readable: list[Table] = []
    unread = [*opened.unread]
    for path in paths:
        try:
            table = tables.open_table(path, str(path), columns)
        except DataError as error:
            if opened.source.is_single:
                raise
            unread.append(Skipped(str(path), str(error)))
            continue
        if table.columns:
            readable.append(table)
        else:
            unread.append(Skipped(str(path), NO_TEXT, is_loss=False))
    return dataclasses.replace(opened, tables=tuple(readable), unread=tuple(unread))


def open_pairs(path: Path) -> Table | None:
    """Open a table of pairs; return None if each line of the file is a pair.

    Pairs that are separated by tabs are lines, because their first line may be a pair and quotes
    in them are text. Files of unknown kinds are lines, too.
    """
    kind = extension(path)
    is_table = kind in tables.KINDS and kind not in TAB_EXTENSIONS
    return tables.open_table(path, str(path)) if is_table else None


# Documents


def open_documents_to_search(
    name: str | Path,
    option: str = "--input",
    *,
    columns: Sequence[str] = (),
    id_column: str = "",
    follow_links: bool = False,
) -> Documents:
    """Open any text that a user may name; see `open_source` and `documents_to_search`."""
    opened = open_source(str(name), option, columns=columns, follow_links=follow_links)
    return documents_to_search(opened, option, columns=columns, id_column=id_column)


def documents_to_search(
    opened: Opened, option: str = "--input", *, columns: Sequence[str] = (), id_column: str = ""
) -> Documents:
    """Return the documents of all commands but training: lines, rows and prose.

    Of a table, the known columns `title` and `text` are read, or else all columns of text.

    Args:
        opened: The source. The lines of standard input and docstrings have no columns: `columns`
            and `id_column` are refused.
        option: The option that named it, for errors.
        columns: The columns of a table that are read. Each is a text of its own.
        id_column: The column that identifies rows. By default it is `_id` or `id`, if there is one.
    """
    source = opened.source
    if columns or id_column:
        _require_columns_apply(source, option)
    if source.is_docstrings:
        return docstring_documents()

    layout_for = functools.partial(_layout_to_search, columns=columns, id_column=id_column)
    opened, of_tables = _with_layouts(opened, layout_for)
    if columns or id_column:
        opened = _of_tables_alone(opened)
    _require_text(opened, of_tables)
    read = functools.partial(_read_to_search, opened, of_tables)
    return Documents(source.name, read, lambda: fingerprint(source, _marks(opened, columns)))


def _read_to_search(
    opened: Opened, of_tables: "Sequence[_LaidOut]", ledger: Ledger
) -> Iterator[Document]:
    """Yield each line, file and row with text as a document."""
    if opened.unread:
        enter_skipped(opened.unread, ledger)
    if note := _about_txt_files(opened):
        ledger.note(note)
    if opened.source.is_stdin:
        yield from _line_documents(STDIN, blocks_of(sys.stdin.buffer, STDIN, ledger), ledger)
    for file in opened.lines:
        name = str(file)
        yield from _line_documents(name, read_blocks(file, name, ledger), ledger)
    yield from _file_documents(opened.prose, ledger, with_code=True)
    if len(of_tables) > 1:
        yield from _with_ids_of_files(_row_documents(of_tables, ledger, with_columns=True), ledger)
    else:
        yield from _row_documents(of_tables, ledger, with_columns=True)


def documents_to_train(opened: Opened, columns: Sequence[str]) -> Documents:
    """Return documents to make training rows of: prose, rows, or the blocks of a txt file.

    Args:
        opened: The source.
        columns: The columns of a table that hold the title and the text, or the text alone.
    """
    source = opened.source
    if source.is_docstrings:
        return docstring_documents()

    layout_for = functools.partial(_layout_to_train, columns=columns)
    opened, of_tables = _with_layouts(opened, layout_for)
    if columns and not opened.lines:
        opened = _of_tables_alone(opened)
    _require_text(opened, of_tables)

    def read(ledger: Ledger) -> Iterator[Document]:
        enter_skipped(opened.unread, ledger)
        for file in opened.lines:
            yield from _paragraph_documents(file, ledger)
        yield from _file_documents(opened.prose, ledger, with_code=False)
        yield from _row_documents(of_tables, ledger, with_columns=False)

    # Of a txt file that the user names, the content says all.
    marks = () if opened.lines else _marks(opened, columns)
    return Documents(source.name, read, functools.partial(fingerprint, source, marks))


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


def _of_tables_alone(opened: Opened) -> Opened:
    """Leave out all but tables, because only these have the columns that the user named."""
    others = [Skipped(str(file), WITHOUT_COLUMNS) for file in (*opened.lines, *opened.prose)]
    return dataclasses.replace(opened, lines=(), prose=(), unread=(*opened.unread, *others))


def _require_text(opened: Opened, of_tables: "Sequence[_LaidOut]") -> None:
    """Raise `DataError` if there is nothing to read."""
    if not (opened.lines or opened.prose or of_tables or opened.source.is_stdin):
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in opened.unread[:5])
        raise DataError(f"{opened.source.name}: no table with a column of text ({reasons})")


def _about_txt_files(opened: Opened) -> str:
    """Say what the documents of several txt files are; nothing of one that the user named."""
    number = sum(extension(file) in LINES for file in opened.prose)
    return f"{opened.source.name}: each of its txt files is a document" if number > 1 else ""


def _marks(opened: Opened, columns: Sequence[str]) -> tuple[str, ...]:
    """Return what else, besides the content, decides how files are read; see `fingerprint`.

    Of a txt file that the user names, each line or block is a document. If it is the one file of a
    folder, it is read whole. Documents whose library is missing are left out, until it is
    installed.
    """
    kinds = sorted({extension(file) for file in opened.prose})
    unread = [f"without {kind}" for kind in kinds if formats.lacks_library(kind)]
    is_whole = len(opened.source.files) == 1 and kinds and kinds[0] in LINES
    return (*columns, *(["whole"] if is_whole else []), *unread)


# Lines


def _line_documents(name: str, blocks: Iterable[LineBlock], ledger: Ledger) -> Iterator[Document]:
    """Yield each line as a document."""
    ledger.count_file()
    for block in blocks:
        for number, text in zip(block.numbers, block.texts, strict=True):
            place = Place(name, number)
            yield Document(place_id(place), (Section("", (text,)),), place, whole=True)


def _paragraph_documents(file: Path, ledger: Ledger) -> Iterator[Document]:
    """Yield the blocks between blank lines of a file or, without blank lines, the lines."""
    name = str(file)
    ledger.count_file()
    numbered = read_lines(file, name, ledger)
    separated = _has_blank_lines(file)

    def block(line: Numbered) -> bool | int:
        return bool(line[1].strip()) if separated else line[0]

    for _, group in itertools.groupby(numbered, block):
        numbers, lines = zip(*group, strict=True)
        place = Place(name, numbers[0])
        if lines[0].strip():
            ledger.keep()
            yield Document(place_id(place), (Section("", lines),), place)


def _has_blank_lines(file: Path) -> bool:
    """Return whether blank lines separate text, by the first lines."""
    first = itertools.islice(read_lines(file, str(file), Ledger(str(file))), LOOKED_AT)
    blocks = itertools.groupby(first, lambda line: bool(line[1].strip()))
    return sum(is_text for is_text, _ in blocks) > 1


# Prose


def _file_documents(
    files: Sequence[Path], ledger: Ledger, *, with_code: bool
) -> Iterator[Document]:
    """Yield each file that has text as a document."""
    if not files:
        return
    for file, parsed in zip(files, parse_files(files, with_code=with_code), strict=True):
        name = str(file)
        if isinstance(parsed, formats.Unreadable):
            ledger.skip_file(name, parsed.reason, is_loss=parsed.reason != EMPTY)
            if parsed.is_limit:
                ledger.beyond_limits.append(name)
            continue
        for what, number in parsed.left_out.items():
            ledger.leave_out(what, Place(name), number, is_loss=False)
        for note in parsed.notes:
            ledger.note(f"{name}: {note}")
        ledger.count_file()
        ledger.keep()
        sections = tuple(Section(title, lines) for title, lines in parsed.sections)
        yield Document(name, sections, Place(name))


# Rows


class _LaidOut(NamedTuple):
    """A table whose rows are documents."""

    table: Table
    layout: Layout


def _with_layouts(
    opened: Opened, layout_for: Callable[[Table], Layout | None]
) -> tuple[Opened, list[_LaidOut]]:
    """Return the tables with text. Others are unread then.

    A table without a column that the user named is an error only if nothing else was found.
    """
    of_tables = []
    unread = [*opened.unread]
    for table in opened.tables:
        try:
            layout = layout_for(table)
        except DataError as error:
            if opened.source.is_single:
                raise
            unread.append(Skipped(table.name, str(error)))
            continue
        if layout:
            of_tables.append(_LaidOut(table, layout))
        else:
            has = f"without a column of text. It has: {listed(table.columns)}"
            unread.append(Skipped(table.name, has))
    return dataclasses.replace(opened, unread=tuple(unread)), of_tables


def _layout_to_search(table: Table, columns: Sequence[str], id_column: str) -> Layout | None:
    """Return the layout in which each column that the user named is a text of its own."""
    if columns:
        table.require(columns, "columns")
    if id_column:
        table.require([id_column], "id_column")
    usual = _usual_layout(table, id_column)
    if not columns:
        return usual
    column = usual.id if usual else id_column or None
    return Layout(tuple(columns), id=column, are_separate=True)


def _layout_to_train(table: Table, columns: Sequence[str]) -> Layout | None:
    """Return the layout in which the columns that the user named are the title and the text."""
    if columns:
        table.require(columns, "data.columns")
    usual = _usual_layout(table)
    if not columns:
        return usual
    *title, text = columns
    return Layout((text,), title[0] if title else None, usual.id if usual else None)


def _usual_layout(table: Table, id_column: str = "") -> Layout | None:
    """Return the layout by the names and values of columns."""
    return layout_of(
        table.name, table.columns, table.text_columns, id_column, is_open=table.is_open
    )


def _with_ids_of_files(documents: Iterable[Document], ledger: Ledger) -> Iterator[Document]:
    """Yield the rows of several tables, whose ids then differ from table to table."""
    ids = IdsOfFiles()
    for document in documents:
        yield dataclasses.replace(document, id=ids.of(document.id, document.place.file))
    if note := ids.note():
        ledger.note(note)


def _row_documents(
    of_tables: Sequence[_LaidOut], ledger: Ledger, *, with_columns: bool
) -> Iterator[Document]:
    """Yield each row with text as a document, with its other columns or without."""
    for table, layout in of_tables:
        ledger.count_file()
        if layout.note:
            ledger.note(layout.note)
        others = table.columns if with_columns else ()
        read = dict.fromkeys((*others, *layout.columns))
        for number, values in table.rows([*read], ledger, notes_late_text=layout.is_guessed):
            if layout.id is None and table.is_open and (column := id_among(values)) is not None:
                layout = dataclasses.replace(layout, id=column)  # later rows may have ids
            place = Place(table.name, number)
            if document := document_of(values, layout, place, ledger, with_columns=with_columns):
                yield document
            elif is_emptied(values, layout):
                key = row_id(values, layout.id_in(values), place)
                ledger.emptied.add(key or place_id(place))
