"""Open rows to train on: lines, or rows of tables with a column for each text."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from diffcse_jax.config import DataConfig
from diffcse_jax.data.columns import (
    TrainingColumns,
    common_negatives,
    expand,
    training_columns,
    why_not,
)
from diffcse_jax.data.corpus import Corpus, Row
from diffcse_jax.documents import docstrings
from diffcse_jax.documents.find import LINES, Source, find_source, fingerprint
from diffcse_jax.documents.ledger import NO_TEXT, Ledger, Place, usable
from diffcse_jax.documents.tables import table as tables
from diffcse_jax.documents.tables.layout import texts_of_row
from diffcse_jax.documents.tables.table import Table, open_table
from diffcse_jax.documents.tables.values import SAMPLE_ROWS, FileRows, is_list, listed
from diffcse_jax.documents.text.lines import extension, read_lines
from diffcse_jax.errors import DataError, NoSentencesError

ADVICE = "Name the columns in data.columns"
NO_ROWS = "without rows to train on (data.pairs makes some of documents)"


@dataclasses.dataclass(frozen=True)
class _Columns:
    """How the rows of tables become rows of texts."""

    names: tuple[str, ...]  # of the texts of a row
    note: str = ""  # what was assumed
    lists: TrainingColumns | None = None  # the columns, if some hold lists of texts
    negatives: int = 0  # hard negatives of each row, if columns hold lists

    @property
    def read(self) -> tuple[str, ...]:
        """The columns to read."""
        return self.lists.names if self.lists else self.names

    def texts(self, values: dict, place: Place, ledger: Ledger) -> Iterator[tuple[str, ...]]:
        """Yield the texts of a row of a table. Enter what is left out in the ledger."""
        if self.lists:
            expanded = expand(values, self.lists, self.negatives)
            for reason, number in expanded.left_out.items():
                ledger.leave_out(reason, place, number)
            yield from expanded.rows
        elif texts := texts_of_row(values, self.names, place, ledger):
            if any(is_list(values[name]) and len(values[name]) > 1 for name in self.names):
                ledger.change("row{s} with a list of texts", "each list read as one text", place)
            yield texts


def open_rows(data: DataConfig) -> Corpus:
    """Open the rows of the files that `data.train_file` names."""
    source = find_source(data.train_file)
    found = _tables(source, data.columns)
    columns = _columns(source.name, found, data.columns)
    for table in found:
        if missing := table.missing(columns.read):
            has = f"It has: {listed(table.columns)}"
            raise DataError(f"{table.name}: no column {missing[0]!r}. {has}. {ADVICE}")

    def read(ledger: Ledger) -> Iterator[Row]:
        source.account(ledger)
        _account_for_others(source, found, ledger)
        if columns.note:
            ledger.note(columns.note)
        numbers = itertools.count()
        for table in found:
            ledger.read_file()
            rows = table.rows(columns.read, ledger, notes_late_text=not data.columns)
            for number, values in rows:
                place = Place(table.name, number)
                for texts in columns.texts(values, place, ledger):
                    if own := usable(texts, place, ledger):
                        ledger.keep()
                        yield Row(own, next(numbers), place)

    def digest() -> str:
        return fingerprint(source, ("lists",) if columns.lists else ())

    is_strict = data.on_bad_line == "error"
    return Corpus(source.name, columns.names, read, digest, is_strict)


def _account_for_others(source: Source, found: Sequence[Table], ledger: Ledger) -> None:
    """Enter files in a ledger that are beside the tables: documents, data sets, empty tables."""
    names = {table.name for table in found}
    for path in (*source.data_sets, *source.files):
        if str(path) not in names:
            is_empty = extension(path) in tables.KINDS
            reason = NO_TEXT if is_empty else NO_ROWS
            ledger.skip_file(str(path), reason, is_loss=not is_empty)


def _tables(source: Source, wanted: Sequence[str]) -> list[Table]:
    """Open the files of a source, which must be of one kind, as tables."""
    if source.is_docstrings:
        return [_single_column(source.name, _docstring_lines)]
    if source.data_sets and not source.files:
        return [open_table(folder, str(folder), wanted) for folder in source.data_sets]
    kinds = collections.Counter(map(extension, source.of_kinds((*LINES, *tables.KINDS))))
    if len(kinds) > 1:
        found = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        raise DataError(
            f"{source.name}: files of several kinds ({found}). Name the files of one kind with a "
            f"pattern, such as '{source.name}/**/*{next(iter(kinds))}'"
        )
    if not kinds:
        remedy = "Do not name columns" if wanted else "Set data.pairs, for example to 'lead'"
        raise DataError(f"{source.name}: these files contain documents. {remedy}")
    if lines := source.of_kinds(LINES):
        return [_lines(file) for file in lines]
    opened = [open_table(file, str(file), wanted) for file in source.of_kinds(tables.KINDS)]
    if not any(table.columns for table in opened):
        raise NoSentencesError(f"{source.name}: no row with a column was found")
    return [table for table in opened if table.columns]


def _docstring_lines(_: Ledger) -> Iterable[tuple[int, str]]:
    return enumerate(docstrings.docstring_sentences(), 1)


def _lines(file: Path) -> Table:
    return _single_column(str(file), lambda ledger: read_lines(file, str(file), ledger))


def _single_column(name: str, lines: Callable[[Ledger], Iterable[tuple[int, str]]]) -> Table:
    """Return lines as a table of one column. Each pass calls `lines`."""

    def read(_: Sequence[str], ledger: Ledger) -> Iterator[tuple[int, dict[str, str]]]:
        return ((number, {"sentence": text}) for number, text in lines(ledger))

    column = ("sentence",)
    return Table(name, column, column, (), FileRows(column, read))


def _columns(name: str, found: Sequence[Table], wanted: Sequence[str]) -> _Columns:
    """Return the columns that the user named, the only one, or those with known names."""
    available = found[0].columns
    if wanted:
        return _Columns(tuple(wanted))
    if len(available) == 1:
        return _Columns(available)
    known = training_columns(available)
    if known is None:
        has = f"it has {len(available)} columns: {listed(available)} ({why_not(available)})"
        raise DataError(f"{name}: {has}. {ADVICE}")
    note = ""
    if known.unused:
        unused = listed(known.unused)
        note = f"{name}: read the columns {listed(known.names)}, not {unused} (see data.columns)"
    with_lists = {column for table in found for column in table.list_columns}
    if not known.lists and with_lists.isdisjoint((known.positive, *known.hard_negatives)):
        return _Columns(known.names, note)
    sample = itertools.islice(found[0].rows(known.names, Ledger(name)), SAMPLE_ROWS)
    negatives = common_negatives((values for _, values in sample), known)
    names = (known.sentence, known.positive, *known.hard_negatives[:1] * negatives)
    return _Columns(names, note, known, negatives)
