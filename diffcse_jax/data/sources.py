"""Open the text that `data.train_file` names: rows to train on, or documents to make rows of.

Rows are lines, or rows of tables with a column for each text. Documents are for training, or are
held out.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffcse_jax.config import DataConfig
from diffcse_jax.data.columns import (
    TrainingColumns,
    common_negatives,
    expand,
    training_columns,
    why_not,
    why_not_documents,
)
from diffcse_jax.data.pairs import corpus_of
from diffcse_jax.data.split import Split
from diffcse_jax.data.token_store import Corpus, Row
from diffcse_jax.documents.docstrings import docstring_sentences
from diffcse_jax.documents.find import LINES, enter_skipped, fingerprint
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.open import Opened, documents_to_train, open_source
from diffcse_jax.documents.tables import formats as tables
from diffcse_jax.documents.tables.layout import texts_of_row
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.tables.values import SAMPLE_ROWS, listed
from diffcse_jax.documents.text.lines import LineBlock, read_blocks
from diffcse_jax.errors import DataError, counted

OPTION = "data.train_file"
GIVEN = "given_to_train"  # the cache folder of text that was given in memory (`given.py`)
NO_ROWS = "without rows to train on (data.pairs makes some of documents)"
SENTENCE = ("sentence",)  # the column of a line


def open_corpus(data: DataConfig, split: Split | None = None) -> Corpus:
    """Open the rows that `data.train_file` names, or the rows made of its documents.

    Documents of a `split` that is open already are not read again.
    """
    if data.pairs != "columns":
        return corpus_of(split or open_split(data), data)
    opened = _opened(data, of_rows=True)
    _require_one_kind(opened, data.columns)
    is_of_lines = bool(opened.lines) or opened.source.is_docstrings
    corpus = (_corpus_of_lines if is_of_lines else _corpus_of_tables)(opened, data)
    _require_width(corpus, data.min_columns)
    return corpus


def open_split(data: DataConfig) -> Split:
    """Open the documents that `data.train_file` names, to train on and held out."""
    if len(data.columns) > 2:
        raise DataError(
            f"{data.train_file}, data.columns={data.columns}: name a title and a text, or set "
            "data.pairs='columns'"
        )
    opened = _opened(data)
    if not data.columns and data.held_out < 1:  # otherwise nothing trains
        _require_documents(opened)
    documents = documents_to_train(opened, data.columns)
    return Split(documents, data.held_out, strict=data.on_bad_line == "error")


def _require_documents(opened: Opened) -> None:
    """Raise `DataError` for tables of pairs that would be wrong as documents.

    A hard negative would become a part of the positive, and each pair one, whatever its grade.
    """
    for table in opened.tables:
        if reason := why_not_documents(table.columns):
            raise DataError(
                f"{table.name}: {reason}, so its rows are not documents. To train on pairs, use "
                "the configuration base/sentence_encoder, or set data.pairs='columns'. To read "
                "columns as documents, name them in data.columns"
            )


def _opened(data: DataConfig, *, of_rows: bool = False) -> Opened:
    """Open the text, and name it as messages shall."""
    opened = open_source(
        data.train_file,
        OPTION,
        columns=data.columns,
        of_rows=of_rows,
        follow_links=data.follow_links,
    )
    source = opened.source._replace(name=shown_name(data.train_file))
    return dataclasses.replace(opened, source=source)


def shown_name(train_file: str) -> str:
    """Return how messages name a run's text. What `train` was given has no name."""
    is_given = Path(train_file).parent.name == GIVEN
    return "the text given to train" if is_given else train_file


def _require_one_kind(opened: Opened, columns: Sequence[str]) -> None:
    """Raise `DataError` unless the rows are those of files of one kind."""
    source = opened.source
    if source.is_docstrings or (source.data_sets and not source.files):
        return
    of_rows = [kind for kind in source.files.values() if kind in (*LINES, *tables.KINDS)]
    kinds = collections.Counter(of_rows)
    if len(kinds) > 1:
        numbers = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        raise DataError(
            f"{source.name}: files of several kinds ({numbers}). Name the files of one kind with a "
            f"pattern, such as '{source.name}/**/*{next(iter(kinds))}'"
        )
    if not kinds:
        remedy = "Do not name columns" if columns else "Set data.pairs, for example to 'lead'"
        raise DataError(f"{source.name}: these files contain documents. {remedy}")


def _require_width(corpus: Corpus, least: int) -> None:
    """Raise `DataError` if rows have fewer texts than `data.min_columns`.

    A sentence alone would be its own positive, and pairs would train without hard negatives.
    """
    count = len(corpus.columns)
    if count < least:
        raise DataError(
            f"{corpus.name}: each row has {counted(count, 'text{s}')} "
            f"({listed(corpus.columns)}), but data.min_columns={least}. Give rows of a sentence, "
            "its positive and perhaps hard negatives, such as a csv file with the columns sent0, "
            f"sent1, hard_neg. Or set data.min_columns={count} to train without what is missing."
        )


# Lines


def _corpus_of_lines(opened: Opened, data: DataConfig) -> Corpus:
    """Return the lines of txt files, or the sentences of docstrings, as rows of one text."""
    source = opened.source
    if missing := [column for column in data.columns if column not in SENTENCE]:
        raise DataError(
            f"{source.name}: no column {missing[0]!r}, because each line is a sentence. Leave "
            "data.columns out"
        )

    def read(ledger: Ledger) -> Iterator[Iterator[Row]]:
        _account_for_others(opened, ledger)
        documents = itertools.count()
        for name, block in _lines(opened, ledger):
            places = map(Place, itertools.repeat(name), block.numbers)
            # The texts come first: where they end, `map` asks for no further document number.
            yield map(Row, zip(block.texts), documents, places)

    is_strict = data.on_bad_line == "error"
    return Corpus(source.name, SENTENCE, read, functools.partial(fingerprint, source), is_strict)


def _lines(opened: Opened, ledger: Ledger) -> Iterator[tuple[str, LineBlock]]:
    """Yield the lines of each file in blocks, with the name of the file."""
    if opened.source.is_docstrings:
        sentences = tuple(docstring_sentences())
        ledger.count_file()
        ledger.keep(len(sentences))
        yield opened.source.name, LineBlock(range(1, len(sentences) + 1), sentences)
    for file in opened.lines:
        name = str(file)
        ledger.count_file()
        for block in read_blocks(file, name, ledger):
            yield name, block


# Tables


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
            for row in expanded.rows:
                if texts := usable(row, place, ledger):
                    yield texts
        elif texts := texts_of_row(values, self.names, place, ledger):
            several = (
                values[name] for name in self.names if isinstance(values[name], list | tuple)
            )
            if any(len(value) > 1 for value in several):
                ledger.change("row{s} with a list of texts", "each list read as one text", place)
            yield texts


def _corpus_of_tables(opened: Opened, data: DataConfig) -> Corpus:
    """Return the rows of tables."""
    if not opened.tables:
        raise DataError(f"{opened.source.name}: no row with a column was found")
    columns = _columns(opened.source.name, opened.tables, data.columns)
    for table in opened.tables:
        table.require(columns.read, "data.columns")

    def read(ledger: Ledger) -> Iterator[list[Row]]:
        _account_for_others(opened, ledger)
        if columns.note:
            ledger.note(columns.note)
        documents = itertools.count()
        for table in opened.tables:
            ledger.count_file()
            rows = table.rows(columns.read, ledger, notes_late_text=not data.columns)
            for number, values in rows:
                place = Place(table.name, number)
                texts = list(columns.texts(values, place, ledger))
                ledger.keep(len(texts))
                yield [Row(each, next(documents), place) for each in texts]

    def digest() -> str:
        return fingerprint(opened.source, ("lists",) if columns.lists else ())

    is_strict = data.on_bad_line == "error"
    return Corpus(opened.source.name, columns.names, read, digest, is_strict)


def _account_for_others(opened: Opened, ledger: Ledger) -> None:
    """Enter files in a ledger that are not read as rows."""
    if opened.unread:
        enter_skipped(opened.unread, ledger)
    for file in opened.prose:
        ledger.skip_file(str(file), NO_ROWS)


def _columns(name: str, tables: Sequence[Table], wanted: Sequence[str]) -> _Columns:
    """Return the columns that the user named, the only one, or those with known names."""
    available = tables[0].columns
    if wanted:
        return _Columns(tuple(wanted))
    if len(available) == 1:
        return _Columns(available)
    scales = {column for table in tables for column in table.scale_columns}
    if known := training_columns(available, scales):
        for table in tables:
            scales.update(table.late_scales(known.unused))
    known = training_columns(available, scales)
    if known is None:
        reason = why_not(available, scales)
        raise DataError(f"{name}: it has {len(available)} columns: {listed(available)}; {reason}")
    note = ""
    if known.unused:
        unused = listed(known.unused)
        note = f"{name}: read the columns {listed(known.names)}, not {unused} (see data.columns)"
    with_lists = {column for table in tables for column in table.list_columns}
    if not known.lists and with_lists.isdisjoint((known.positive, *known.hard_negatives)):
        return _Columns(known.names, note)
    sample = itertools.islice(tables[0].rows(known.names, Ledger(name)), SAMPLE_ROWS)
    negatives = common_negatives((values for _, values in sample), known)
    names = (known.sentence, known.positive, *known.hard_negatives[:1] * negatives)
    return _Columns(names, note, known, negatives)
