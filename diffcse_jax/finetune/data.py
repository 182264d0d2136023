"""The rows of labelled tasks: files with named columns, checked line by line, and their split into training and dev."""

import collections
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from diffcse_jax.data.corpus import Corpus, Fault, OptionNames, listed
from diffcse_jax.data.pair_builders import is_in_share
from diffcse_jax.data.readers import TABLES, extension, open_file
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.io import expand_path
from diffcse_jax.losses.finetune import Task

Entry = tuple[int, dict[str, str] | Fault]  # a line, from 1, and its values by column


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a task.

    Attributes:
        file: where they are from.
        lines: where each begins, from 1.
        texts: of each its sentence, or both.
        labels: the number of its class, or its value; empty where rows have no labels.
        ids: its name.
    """

    file: Path
    lines: list[int]
    texts: list[tuple[str, ...]]
    labels: Shaped[np.ndarray, " rows"]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sentences(self) -> list[str]:
        """All sentences, row by row."""
        return [text for texts in self.texts for text in texts]

    def where(self, chosen: Sequence[bool]) -> "Rows":
        """Some of the rows."""
        kept = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        return Rows(
            self.file,
            [self.lines[row] for row in kept],
            [self.texts[row] for row in kept],
            self.labels[np.array(kept, int)],
            [self.ids[row] for row in kept],
        )

    def corpus(self, columns: tuple[str, ...]) -> Corpus:
        """Their sentences, with the names of their columns, as what token stores are built of."""
        content = hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()
        return Corpus(str(self.file), columns, lambda: zip(self.lines, self.texts, strict=True), lambda: content)


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task, its classes known, with its rows."""

    name: str
    task: Task
    train: Rows
    dev: Rows
    test: Rows | None

    def digest(self) -> str:
        """A hash of all training and dev rows."""
        parts = [(rows.texts, rows.labels.tolist()) for rows in (self.train, self.dev)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_task(name: str, task: Task, folder: Path, *, on_bad_line: str, report: Callable[[str], None]) -> TaskData:
    """Reads and splits the files of a task.

    Args:
        name: of the task.
        task: its options.
        folder: that names of files are relative to.
        on_bad_line: `skip` (and count) or `error`, for lines that give no row.
        report: receives what was skipped, and the sizes.

    Raises:
        ConfigError: options that cannot be used.
        DataError: a file or line that cannot be used, a label that is no class, a class or a split without rows.
    """
    key = f"finetune.tasks.{name}"
    _check(key, task)
    read = functools.partial(_read, key, task, folder, on_bad_line=on_bad_line, report=report)
    rows, found = read(task.file, "file")
    named = task.labels
    task = dataclasses.replace(task, labels=task.labels or _classes(found) if task.kind == "classification" else ())
    if task.kind == "classification":
        _check_classes(key, task, rows)
    train = dataclasses.replace(rows, labels=_labels(key, task, rows, found))
    if task.dev_file:
        rows, found = read(task.dev_file, "dev_file")
        dev = dataclasses.replace(rows, labels=_labels(key, task, rows, found))
    else:
        is_dev = [is_dev_row(texts, task.dev_share) for texts in train.texts]
        train, dev = train.where([not each for each in is_dev]), train.where(is_dev)
    for rows, split in ((train, "training"), (dev, "dev")):
        if not len(rows):
            raise DataError(f"{rows.file}: no {split} rows for {key} (dev_share={task.dev_share:g})")
    _check_every_class(key, task, train, named=bool(named))
    test = read(task.test_file, "test_file")[0] if task.test_file else None
    report(
        f"task {name}: {len(train):,} training rows, {len(dev):,} dev rows"
        + (f", {len(test):,} rows to predict" if test else "")
        + (f"; classes {', '.join(task.labels)}" if task.labels else "")
    )
    return TaskData(name, task, train, dev, test)


def is_dev_row(texts: Sequence[str], share: float) -> bool:
    """True for about this share of all rows, by a hash of their text; the order of a pair does not matter.

    So equal rows are on the same side, and neither order nor other rows change anything.
    """
    return is_in_share("\n".join(sorted(" ".join(text.casefold().split()) for text in texts)), share)


def canonical(label: str) -> str:
    """A label without white space around it; a whole number without the zeros after its point: `1` for `1.0`."""
    label = label.strip()
    whole = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))\.0*", label)
    return whole[1] if whole else label


def _check(key: str, task: Task) -> None:
    if not task.file:
        raise ConfigError(f"{key}.file is empty; it names the file of the training rows")
    if len(task.texts) not in (1, 2):
        raise ConfigError(f"{key}.texts={task.texts}: give one column for single sentences, two for pairs")
    if task.loss == "squared_error" and task.kind != "regression":
        raise ConfigError(f"{key}.loss='squared_error' needs kind='regression'")
    if task.loss not in ("auto", "squared_error") and task.kind != "classification":
        raise ConfigError(f"{key}.loss={task.loss!r} needs kind='classification'")
    if task.is_pair and not task.features:
        raise ConfigError(
            f"{key}.features is empty; name what a head reads of a pair, such as ('difference', 'product')"
        )
    if not task.dev_file and not task.dev_share:
        raise ConfigError(f"{key} has no dev rows: name a dev_file, or give a dev_share above 0")


def _check_classes(key: str, task: Task, rows: Rows) -> None:
    """Refuses classes that cannot be told apart."""
    if len({*task.labels}) < max(2, len(task.labels)):
        raise DataError(f"{rows.file}: {key} needs at least two different classes, and has: {', '.join(task.labels)}")
    if task.loss == "binary_cross_entropy" and len(task.labels) != 2:
        raise ConfigError(f"{key}.loss='binary_cross_entropy' is for two classes, not {len(task.labels)}")


def _check_every_class(key: str, task: Task, train: Rows, *, named: bool) -> None:
    """Refuses a class that nothing is learnt of: `named` in the options, or found in rows that are dev ones."""
    counts = np.bincount(train.labels, minlength=len(task.labels)) if task.labels else np.ones(1)
    if counts.all():
        return
    problem = f"{train.file}: no training row of class {task.labels[int(np.argmin(counts))]!r}"
    if named:
        raise DataError(f"{problem}, which {key}.labels names; remove it there")
    raise DataError(
        f"{problem}: its few rows are all among the dev rows. Give {key} a dev_file or another dev_share, or more rows "
        "of that class, or leave its rows out"
    )


def _classes(found: Sequence[str]) -> tuple[str, ...]:
    """The labels, in order: as numbers where all are."""
    distinct = sorted({*found})
    try:
        numbers = [float(label) for label in distinct]
    except ValueError:
        return tuple(distinct)
    return tuple(sorted(distinct, key=float)) if all(map(math.isfinite, numbers)) else tuple(distinct)


def _labels(key: str, task: Task, rows: Rows, found: Sequence[str]) -> Shaped[np.ndarray, " rows"]:
    """Numbers of classes, or values.

    Raises:
        DataError: a label that is none, with its line.
    """
    values: list[float] = []
    numbers = {canonical(label): number for number, label in enumerate(task.labels)}
    for line, label in zip(rows.lines, found, strict=True):
        try:
            values.append(numbers[label] if task.labels else float(label))
        except KeyError as error:
            raise DataError(
                f"{rows.file}, line {line}: {label!r} is no class of {key}; known: {', '.join(task.labels)}"
            ) from error
        except ValueError as error:
            raise DataError(f"{rows.file}, line {line}: {label!r} is no number, and {key} is a regression") from error
        if not math.isfinite(values[-1]):
            raise DataError(f"{rows.file}, line {line}: {label!r} is no finite number, and {key} is a regression")
    return np.array(values, np.int32 if task.labels else np.float32)


def _read(
    key: str,
    task: Task,
    folder: Path,
    name: str,
    option: str,
    *,
    on_bad_line: str,
    report: Callable[[str], None],
) -> tuple[Rows, list[str]]:
    """The rows of a file without labels, and their labels as text (empty for test files)."""
    path = expand_path(folder / expand_path(name))
    is_labelled = option != "test_file"
    named = {column: f"{key}.texts" for column in task.texts}
    named |= {task.label: f"{key}.label"} if is_labelled else {}
    named |= {task.id: f"{key}.id"} if task.id else {}
    skipped: collections.Counter[str] = collections.Counter()
    lines: list[int] = []
    texts: list[tuple[str, ...]] = []
    labels: list[str] = []
    ids: list[str] = []
    for number, (line, entry) in enumerate(_entries(path, named)):
        problem = entry.value if isinstance(entry, Fault) else _problem(task, entry, is_labelled)
        if problem and on_bad_line == "error":
            raise DataError(f"{path}, line {line}: {problem}; correct it, or set data.on_bad_line=skip")
        if problem or isinstance(entry, Fault):
            skipped[problem] += 1
            continue
        lines.append(line)
        texts.append(tuple(entry[column].strip() for column in task.texts))
        ids.append(entry[task.id] if task.id else str(number))
        labels.append(canonical(entry[task.label]) if is_labelled else "")
    told = ", ".join(f"{count:,} {problem}" for problem, count in skipped.items())
    if not lines:
        raise DataError(f"{path} ({key}.{option}): no usable row" + (f"; skipped: {told}" if told else ""))
    if skipped:
        report(f"{path}: skipped {skipped.total():,} lines: {told}")
    return Rows(path, lines, texts, np.zeros(0, np.float32), ids), labels


def _problem(task: Task, entry: dict[str, str], is_labelled: bool) -> str:
    """The reason why an entry is no row; empty if it is one."""
    for column in task.texts:
        text = entry[column]
        if not text.strip():
            return f"{column} is empty" + (", one side of a pair" if task.is_pair else "")
    for column, text in entry.items():
        if "\0" in text:
            return f"{column} has a NUL byte"
        if any("\ud800" <= character <= "\udfff" for character in text):
            return f"{column} is not UTF-8"
    if is_labelled and not entry[task.label].strip():
        return f"{task.label} is empty"
    return ""


def _entries(path: Path, named: dict[str, str]) -> Iterator[Entry]:
    """Lines with the values of the named columns.

    Raises:
        DataError: a file that cannot be read, of an unknown kind, or without one of the columns.
    """
    if extension(path) not in TABLES:
        raise DataError(f"{path}: unknown extension; known: {', '.join(TABLES)}")
    file = open_file(path, [*named], OptionNames(columns="the task's `texts`"))
    _require_columns(path, file.columns, named)
    for number, entry in file.entries([*named]):
        yield number, entry if isinstance(entry, Fault) else _values(entry, named)


def _values(entry: dict[str, Any], named: dict[str, str]) -> dict[str, str] | Fault:
    if any(column not in entry for column in named):
        return Fault.MISSING_KEY
    values = {column: entry[column] for column in named}
    if not all(isinstance(value, str | int | float) for value in values.values()):
        return Fault.NOT_STRING
    return {column: str(value) for column, value in values.items()}


def _require_columns(path: Path, available: Sequence[str], named: dict[str, str]) -> None:
    for column, option in named.items():
        if column not in available:
            has = listed([name for name in available if name]) or "none with a name"
            raise DataError(f"{path}: no column {column!r} ({option}); it has: {has}")
