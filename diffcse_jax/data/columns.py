"""Which columns of training rows hold the sentence, its positive and its hard negatives.

People who come from SimCSE, sentence-transformers or FlagEmbedding have files with the names of
these projects. `training_columns` recognises them. FlagEmbedding's rows hold lists of texts, which
`expand` turns into rows of one width. Nothing here reads a file.
"""

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from diffcse_jax.documents.tables.names import LIST_NAMES, NAMES, PAIR_NAMES, is_grade, named
from diffcse_jax.documents.tables.values import text_of, without_missing

ADVICE = "Name the columns in data.columns"
CURES = (
    "Use graded pairs with the metric pairs_spearman (eval.pairs_file reads such a file) or "
    "`diffcse finetune`. If all pairs are positives, drop the column or name the others in "
    "data.columns"
)
MOST_NEGATIVES = 7  # of a row: FlagEmbedding's groups have eight texts by default
NO_POSITIVE = "of a query without a positive"
NO_QUERY = "of a row without a query"
NO_NEGATIVE = "of a query without a hard negative"
NOT_TEXT = "empty or not text"
REPEATED = "repeated in the row"
TOO_MANY = "more hard negatives than columns"
FURTHER = "of a second query"


@dataclasses.dataclass(frozen=True)
class TrainingColumns:
    """The columns of training rows by their part."""

    sentence: str
    positive: str
    hard_negatives: tuple[str, ...] = ()  # in the order of their numbers
    lists: bool = False  # the positive and the hard negative are lists of texts
    unused: tuple[str, ...] = ()  # all other columns

    @property
    def names(self) -> tuple[str, ...]:
        """The columns in the order of a training row."""
        return (self.sentence, self.positive, *self.hard_negatives)


def training_columns(
    available: Sequence[str], scales: Collection[str] = ()
) -> TrainingColumns | None:
    """Return the parts of columns with known names, such as those of SimCSE's files.

    The order of the columns and further columns do not matter. None is returned if no names fit, if
    those of several projects do, or if the pairs have grades: `why_not` says which. The caller
    accounts for `unused`.

    Args:
        available: All columns.
        scales: Those of few numbers or truth values, which may be grades whatever their names.
    """
    return None if why_not(available, scales) else _fitting(available)[0]


def why_not(available: Sequence[str], scales: Collection[str] = ()) -> str:
    """Return why `training_columns` does not recognise these columns, and what to do.

    The text is empty if it does.
    """
    fitting = _fitting(available)
    if not fitting:
        return f"no known names of a sentence and its positive. {ADVICE}"
    first = fitting[0]
    if rivals := sorted(filter(_has_a_part, first.unused)):
        names = f"{', '.join(first.names)} and {', '.join(rivals)}"
        return f"{names} are names of several kinds of pairs. {ADVICE}"
    if _is_called_positive(first):
        return ""
    grades = sorted(filter(is_grade, first.unused))
    if grades:
        return (
            f"{', '.join(grades)} grades the pairs, so that not all of them are positives. {CURES}"
        )
    if possible := sorted(name for name in first.unused if name in scales):
        return (
            f"{', '.join(possible)} holds few numbers or truth values, or similarities: if it "
            f"grades the pairs, not all of them are positives. {CURES}"
        )
    return ""


def why_not_documents(available: Sequence[str]) -> str:
    """Return why rows with these columns are not documents, but hard negatives or graded pairs.

    The text is empty if they may be.
    """
    fitting = _fitting(available)
    if not fitting:
        return ""
    first = fitting[0]
    if first.hard_negatives:
        return f"{', '.join(first.names)} are pairs with hard negatives"
    if _is_called_positive(first):
        return ""
    grades = [name for name in first.unused if is_grade(name)]
    return f"{', '.join(grades)} grades pairs of {', '.join(first.names)}" if grades else ""


def _is_called_positive(columns: TrainingColumns) -> bool:
    """Return whether the name of the positive says that it is one, whatever grades it."""
    return columns.positive.casefold() in ("positive", "pos")


def _fitting(available: Sequence[str]) -> list[TrainingColumns]:
    """Return the parts by each set of known names whose sentence and positive are there."""
    fitting = []
    for names in (*PAIR_NAMES, LIST_NAMES):
        negative = names[2]
        has_lists = names == LIST_NAMES
        sentence, positive = (named(name, available) for name in names[:2])
        if sentence is None or positive is None:
            continue
        numbered = {name: _number(name, negative) for name in available if negative}
        negatives = [name for name in numbered if numbered[name] is not None]
        if has_lists:
            negatives = [name for name in negatives if name.casefold() == negative]
        negatives.sort(key=lambda name: (numbered[name], name))
        used = (sentence, positive, *negatives)
        unused = tuple(name for name in available if name not in used)
        fitting.append(TrainingColumns(sentence, positive, tuple(negatives), has_lists, unused))
    return fitting


def _has_a_part(name: str) -> bool:
    """Return whether a column has one of the known names."""
    negatives = filter(None, (negative for *_, negative in PAIR_NAMES))
    return name.casefold() in NAMES or any(
        _number(name, negative) is not None for negative in negatives
    )


def _number(name: str, negative: str) -> int | None:
    """Return the number in the name of a hard negative, 0 without one; None for other columns."""
    match = re.fullmatch(rf"{negative}(?:_?(\d+))?", name.casefold(), flags=re.ASCII)
    return int(match[1] or 0) if match else None


def column_names(count: int) -> tuple[str, ...]:
    """Return the names of a sentence, its positive and hard negatives, for rows without names."""
    sentence, positive, negative = PAIR_NAMES[0]
    return (sentence, positive, negative, *(f"{negative}_{n}" for n in range(2, count - 1)))[:count]


# Rows with lists


class Expanded(NamedTuple):
    """The training rows of a row with lists."""

    rows: list[tuple[str, ...]]  # sentence, positive, hard negatives
    left_out: collections.Counter[str]  # numbers of the row's texts that no row contains, by reason


def common_negatives(rows: Iterable[Mapping[str, Any]], columns: TrainingColumns) -> int:
    """Return how many hard negatives suit rows with lists: the median, at most `MOST_NEGATIVES`.

    Give it the first rows of a file: all rows of a file need one width.
    """
    counts = sorted(len(_texts(row, columns.hard_negatives)[0]) for row in rows)
    return min(counts[(len(counts) - 1) // 2], MOST_NEGATIVES) if counts else 0


def expand(row: Mapping[str, Any], columns: TrainingColumns, negatives: int) -> Expanded:
    """Return the training rows of a row with lists, each with `negatives` hard negatives.

    Each positive gets a row of its own with the query. The rows share the hard negatives out in
    turn, so that as many as possible are used. If there are too few, they are repeated, as in
    FlagEmbedding's training. A text that is also the query or a positive of the row is not used as
    a hard negative. Each text is in a row, or it is counted in `left_out`: if there are more hard
    negatives than places, if a text is repeated, empty or not a string, or if the row has no query,
    no positive or, with `negatives`, no hard negative.
    """
    left_out: collections.Counter[str] = collections.Counter()
    parts = [(columns.sentence,), (columns.positive,), columns.hard_negatives]
    known: set[str] = set()
    texts: list[list[str]] = []
    for names in parts:
        texts_of_part, unusable = _texts(row, names)
        left_out[NOT_TEXT] += unusable
        new = [text for text in dict.fromkeys(texts_of_part) if text not in known]
        left_out[REPEATED] += len(texts_of_part) - len(new)
        known |= {*new}
        texts.append(new)
    query, positives, hard = texts
    left_out[FURTHER] += max(0, len(query) - 1)
    missing = {NO_QUERY: not query, NO_POSITIVE: not positives, NO_NEGATIVE: negatives and not hard}
    for reason in (reason for reason, applies in missing.items() if applies):
        left_out[reason] += len(query[:1]) + len(positives) + len(hard)
        return Expanded([], +left_out)
    places = len(positives) * negatives
    left_out[TOO_MANY] += max(0, len(hard) - places)
    rows = []
    for number, positive in enumerate(positives):
        start = number * negatives
        chosen = [hard[place % len(hard)] for place in range(start, start + negatives)]
        rows.append((query[0], positive, *chosen))
    return Expanded(rows, +left_out)


def _texts(row: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], int]:
    """Return the texts of columns, each a list or one text, and how many values are not texts."""
    values: list[Any] = []
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        is_single = isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable)
        values.extend([value] if is_single else value)
    read = [text_of(without_missing(value)) for value in values]
    texts = [text for text in read if text and text.strip()]
    return texts, len(values) - len(texts)
