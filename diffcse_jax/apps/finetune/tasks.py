"""The rows of labelled tasks: tables with named columns, split into training and dev rows."""

import collections
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from diffcse_jax.data.pair_builders import is_in_share
from diffcse_jax.data.readers import TABLES, Corpus, Fault, checked, extension, listed, open_file
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.io import expand_path
from diffcse_jax.losses.finetune import Task


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a task.

    Attributes:
        file: The file that holds them.
        lines: The first line of each row, from 1.
        texts: The sentence of each row, or its two sentences.
        labels: The number of each row's class, or its value. Empty if the rows have no labels.
        ids: The name of each row.
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

    def where(self, is_kept: Iterable[bool]) -> "Rows":
        """Return some of the rows."""
        kept = np.flatnonzero(list(is_kept)).tolist()
        return Rows(
            self.file,
            [self.lines[row] for row in kept],
            [self.texts[row] for row in kept],
            self.labels[kept],
            [self.ids[row] for row in kept],
        )

    def corpus(self, columns: tuple[str, ...]) -> Corpus:
        """Return the sentences as a corpus, from which token stores are built."""
        content = hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()
        return Corpus(str(self.file), columns, lambda: zip(self.lines, self.texts, strict=True), lambda: content)


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task with known classes, and its rows."""

    name: str
    task: Task
    train: Rows
    dev: Rows
    test: Rows | None

    def digest(self) -> str:
        """Return a hash of all training and dev rows."""
        parts = [(rows.texts, rows.labels.tolist()) for rows in (self.train, self.dev)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_task(name: str, task: Task, folder: Path, *, on_bad_line: str, report: Callable[[str], None]) -> TaskData:
    """Read and split the files of a task.

    Args:
        name: The name of the task.
        task: The options of the task.
        folder: File names are relative to this folder.
        on_bad_line: `skip` (and count) or `error`, for lines that give no row.
        report: Called with what was skipped, and with the number of rows.

    Raises:
        ConfigError: Options cannot be used.
        DataError: A file or line cannot be used, a label is unknown, or a class or split has no rows.
    """
    key = f"finetune.tasks.{name}"
    _check_options(key, task)

    def read(file: str, option: str) -> tuple[Rows, list[str]]:
        path = expand_path(folder / expand_path(file))
        return _read(key, task, path, option, on_bad_line=on_bad_line, report=report)

    rows, found = read(task.file, "file")
    is_named = bool(task.labels)
    task = dataclasses.replace(task, labels=task.labels or _classes(found) if task.kind == "classification" else ())
    if task.kind == "classification":
        _check_classes(key, task, rows, is_named)
    train = dataclasses.replace(rows, labels=_numbers(key, task, rows, found))
    if task.dev_file:
        rows, found = read(task.dev_file, "dev_file")
        dev = dataclasses.replace(rows, labels=_numbers(key, task, rows, found))
    else:
        is_dev = [is_dev_row(texts, task.dev_share) for texts in train.texts]
        train, dev = train.where(not each for each in is_dev), train.where(is_dev)
    for rows, split in ((train, "training"), (dev, "dev")):
        if not len(rows):
            raise DataError(f"{rows.file}: {key} has no {split} rows. Give a dev_file, or change dev_share")
    if task.labels and not (counts := np.bincount(train.labels, minlength=len(task.labels))).all():
        missing = f"{train.file}: {key} has no training row of class {task.labels[int(np.argmin(counts))]!r}"
        if is_named:
            raise DataError(f"{missing}, which {key}.labels names. Remove it there")
        raise DataError(
            f"{missing}, because its few rows are all dev rows. Give {key} a dev_file or another dev_share, add "
            "rows of that class, or remove its rows"
        )
    test = read(task.test_file, "test_file")[0] if task.test_file else None
    report(
        f"task {name}: {len(train):,} training rows, {len(dev):,} dev rows"
        + (f", {len(test):,} rows to predict" if test else "")
        + (f"; classes {', '.join(task.labels)}" if task.labels else "")
    )
    return TaskData(name, task, train, dev, test)


def is_dev_row(texts: Sequence[str], share: float) -> bool:
    """Decide by a hash of a row's text whether it belongs to this share of all rows.

    Equal rows, and pairs in either order, are always on the same side. Other rows do not matter.
    """
    return is_in_share("\n".join(sorted(" ".join(text.casefold().split()) for text in texts)), share)


def _check_options(key: str, task: Task) -> None:
    if not task.file:
        raise ConfigError(f"{key}.file is empty. Name the file of the training rows")
    if len(task.texts) not in (1, 2):
        raise ConfigError(f"{key}.texts={task.texts}: give one column for single sentences, two for pairs")
    if task.loss == "squared_error" and task.kind != "regression":
        raise ConfigError(f"{key}.loss='squared_error' needs kind='regression'")
    if task.loss not in ("auto", "squared_error") and task.kind != "classification":
        raise ConfigError(f"{key}.loss={task.loss!r} needs kind='classification'")
    if task.is_pair and not task.features:
        raise ConfigError(f"{key}.features is empty. Name what the head reads, such as ('difference', 'product')")
    if not task.dev_file and not task.dev_share:
        raise ConfigError(f"{key} has no dev rows. Name a dev_file, or give a dev_share above 0")


def _check_classes(key: str, task: Task, rows: Rows, is_named: bool) -> None:
    if twice := next((label for label, n in collections.Counter(task.labels).items() if n > 1), None):
        raise ConfigError(f"{key}.labels names the class {twice!r} twice. Remove one of them")
    if len(task.labels) < 2:
        where = f"{key}.labels" if is_named else f"{rows.file}: column {task.label!r} of {key}"
        raise DataError(f"{where} has only the class {task.labels[0]!r}. A classification needs at least two classes")
    if task.loss == "binary_cross_entropy" and len(task.labels) != 2:
        raise ConfigError(f"{key}.loss='binary_cross_entropy' needs two classes, not {len(task.labels)}")


def canonical(label: str) -> str:
    """Return a label without white space around it, and a whole number without decimals: `1` for `1.0`."""
    whole = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))\.0*", label.strip())
    return whole[1] if whole else label.strip()


def _classes(found: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct labels in order. If all are numbers, they are ordered by value."""
    distinct = sorted({*found})
    try:
        is_numeric = all(math.isfinite(float(label)) for label in distinct)
    except ValueError:
        is_numeric = False
    return tuple(sorted(distinct, key=float) if is_numeric else distinct)


def _numbers(key: str, task: Task, rows: Rows, found: Sequence[str]) -> Shaped[np.ndarray, " rows"]:
    """Return the numbers of classes, or the values.

    Raises:
        DataError: A label is not a class or a number. The message names the line.
    """
    values: list[float] = []
    numbers = {canonical(label): number for number, label in enumerate(task.labels)}
    for line, label in zip(rows.lines, found, strict=True):
        where = f"{rows.file}, line {line}: {label!r} is not"
        try:
            values.append(numbers[label] if task.labels else float(label))
        except KeyError as error:
            raise DataError(f"{where} a class of {key}. Known: {', '.join(task.labels)}") from error
        except ValueError as error:
            raise DataError(f"{where} a number, but {key} is a regression") from error
        if not math.isfinite(values[-1]):
            raise DataError(f"{where} finite, but {key} is a regression")
    return np.array(values, np.int32 if task.labels else np.float32)


def _read(
    key: str, task: Task, path: Path, option: str, *, on_bad_line: str, report: Callable[[str], None]
) -> tuple[Rows, list[str]]:
    """Return the rows of a file without labels, and their labels as text (empty for test files).

    Raises:
        DataError: The file has an unknown extension, lacks a column, has no usable row, or cannot be read.
    """
    if extension(path) not in TABLES:
        raise DataError(f"{path}: unknown extension. Known: {', '.join(TABLES)}; each except .parquet also .gz, .xz")
    label = task.label if option != "test_file" else ""
    options = dict.fromkeys(task.texts, "texts") | ({label: "label"} if label else {})
    options |= {task.id: "id"} if task.id else {}
    file = open_file(path, [*options])
    for column, of in options.items():
        if column not in file.columns:
            raise DataError(f"{path}: no column {column!r} ({key}.{of}). It has: {listed(file.columns)}")
    skipped: collections.Counter[str] = collections.Counter()
    rows, labels = Rows(path, [], [], np.zeros(0, np.float32), []), []
    for number, (line, entry) in enumerate(file.entries([*options])):
        values = _values(entry, options)
        if isinstance(values, str):
            if on_bad_line == "error":
                raise DataError(f"{path}, {file.unit} {line}: {values}. Correct it, or set data.on_bad_line=skip")
            skipped[values] += 1
            continue
        rows.lines.append(line)
        rows.texts.append(tuple(values[column] for column in task.texts))
        rows.ids.append(values[task.id] if task.id else str(number))
        labels.append(canonical(values[label]) if label else "")
    counts = ", ".join(f"{count:,} {problem}" for problem, count in skipped.items())
    if not len(rows):
        raise DataError(f"{path} ({key}.{option}): no usable row" + (f"; skipped: {counts}" if counts else ""))
    if skipped:
        report(f"{path}: skipped {skipped.total():,} {file.unit}s: {counts}")
    return rows, labels


def _values(entry: dict[str, Any] | Fault, columns: Iterable[str]) -> dict[str, str] | str:
    """Return the values of columns as text, or why the entry is not a row."""
    if isinstance(entry, Fault):
        return str(entry)
    values = {}
    for column in columns:
        if column not in entry:
            return str(Fault.MISSING_KEY)
        if not isinstance(entry[column], str | int | float):
            return f"{column} is not a text or number"
        value = checked((str(entry[column]),))
        if isinstance(value, Fault):
            return f"{column} is {value}" if value != Fault.NUL_BYTE else f"{column} has a NUL byte"
        (values[column],) = value
    return values
