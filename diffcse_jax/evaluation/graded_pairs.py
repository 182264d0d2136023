"""Pairs of the user's own that somebody graded, for the metric pairs_spearman."""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.data.columns import training_columns
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.open import open_pairs
from diffcse_jax.documents.tables.names import is_grade
from diffcse_jax.documents.tables.table import Table
from diffcse_jax.documents.tables.values import listed, number_of, text_of
from diffcse_jax.documents.text.lines import lines_with_text
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.senteval_data import single_spaced
from diffcse_jax.evaluation.sts import ScoredPairs
from diffcse_jax.hosts import report

ADVICE = (
    "Name the columns score, sentence1 and sentence2; or write a score and two sentences in each "
    "line, separated by tabs, in a file .tsv"
)
NO_PAIR = "without a score and two sentences"

PlacedRow = tuple[Place, Sequence[Any]]  # a score and two sentences, or fewer values


def read_graded_pairs(path: Path, *, strict: bool = False) -> ScoredPairs:
    """Read pairs with scores of any scale, and warn of rows without them.

    Args:
        path: A score and two sentences in each line, separated by tabs, in which quotes are text;
            or a csv, json, jsonl or Parquet file in any order of the columns. The score has a
            name of grades, or is the only column of few numbers; the sentences have names that
            training knows, or are the only other columns of text. A first line of tab-separated
            text may also hold such names.
        strict: Raise `DataError` at the first row without a score and two sentences.
    """
    table = open_pairs(path)
    ledger = Ledger(str(path), strict=strict, noun="row{s}" if table else "line{s}")
    pairs = ScoredPairs([], [], [])
    for place, values in _of_table(table, ledger) if table else _of_lines(path, ledger):
        score = number_of(values[0]) if len(values) == 3 else None
        texts = [single_spaced(text_of(value) or "") for value in values[1:]]
        if score is None or not math.isfinite(score) or not all(texts):
            ledger.leave_out(NO_PAIR, place)
            continue
        pairs.first.append(texts[0])
        pairs.second.append(texts[1])
        pairs.gold.append(score)
    ledger.count_file()
    if not pairs.gold:
        raise DataError(". ".join([f"{path}: no score with two sentences", *ledger.oddities()]))
    ledger.make("pair{s}", len(pairs.gold))
    report(ledger)
    return pairs


def _of_table(table: Table, ledger: Ledger) -> Iterator[PlacedRow]:
    columns = _graded_columns(table.columns, table.text_columns, table.scale_columns)
    if columns is None:
        raise DataError(
            f"{table.name}: pairs_spearman needs a column of scores and two of sentences. It has: "
            f"{listed(table.columns)}. {ADVICE}"
        )
    ledger.note(f"{table.name}: read the columns {listed(columns)}")
    for number, row in table.rows(columns, ledger):
        yield Place(table.name, number), [row.get(column) for column in columns]


def _of_lines(path: Path, ledger: Ledger) -> Iterator[PlacedRow]:
    order = [0, 1, 2]
    for position, (number, line) in enumerate(lines_with_text(path, ledger)):
        fields = [field.strip() for field in line.split("\t")]
        if position == 0 and not any(number_of(field) is not None for field in fields):
            columns = _graded_columns(fields, fields)
            if columns is None:
                raise DataError(
                    f"{path}, line {number}: {NO_PAIR}: {line.strip()[:60]!r}. {ADVICE}"
                )
            ledger.note(f"{path}: the first line names the columns: {listed(fields)}")
            order = [fields.index(column) for column in columns]
        else:
            yield Place(str(path), number), [fields[at] for at in order if at < len(fields)]


def _graded_columns(
    columns: Sequence[str], of_text: Collection[str], scales: Collection[str] = ()
) -> tuple[str, str, str] | None:
    """Return the columns of the score and of the two sentences; None if others may be meant."""
    grades = [*filter(is_grade, columns)] or [name for name in columns if name in scales]
    others = [name for name in columns if name not in grades]
    if len(grades) != 1:
        return None
    if known := training_columns(others):
        return grades[0], known.sentence, known.positive
    texts = others if len(others) == 2 else [name for name in others if name in of_text]
    return (grades[0], texts[0], texts[1]) if len(texts) == 2 else None
