"""The rows of labelled tasks: tables with named columns, split into training and dev rows."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from diffcse_jax.data.pairs import is_in_share
from diffcse_jax.data.readers import TABLES, Corpus, Fault, extension, listed, open_file
from diffcse_jax.data.readers import Row as TextRow
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.hosts import log_line
from diffcse_jax.io import expand_path, json_digest
from diffcse_jax.losses.finetune import Task


class Row(NamedTuple):
    """A row of a task."""

    line: int  # the first one of the row, from 1
    texts: tuple[str, ...]  # its sentence, or its two sentences
    id: str
    label: Any  # the number of its class, or its value; text before the classes are known; empty for a test row


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training, dev or test rows of a task, and the file that holds them."""

    file: Path
    rows: list[Row]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The sentence of each row, or its two sentences."""
        return [row.texts for row in self.rows]

    @property
    def labels(self) -> Shaped[np.ndarray, " rows"]:
        """The number of each row's class (int32), or its value (float32)."""
        labels = np.array([row.label for row in self.rows])
        return labels.astype(np.int32 if labels.dtype.kind == "i" else np.float32)

    def corpus(self, columns: tuple[str, ...]) -> Corpus:
        """Return the sentences as a corpus, from which token stores are built."""
        content = json_digest(self.texts)
        return Corpus(str(self.file), columns, lambda: [(row.line, row.texts) for row in self.rows], lambda: content)


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
        return json_digest([(rows.texts, rows.labels.tolist()) for rows in (self.train, self.dev)])


def read_task(name: str, task: Task, folder: Path, on_bad_line: str) -> TaskData:
    """Read and split the files of a task, which are relative to a folder."""
    key = f"finetune.tasks.{name}"
    _check_options(key, task)

    def read(option: str) -> Rows:
        path = expand_path(folder / expand_path(getattr(task, option)))
        return _read(task, path, f"{key}.{option}", on_bad_line)

    rows = read("file")
    if task.kind == "classification":
        task = dataclasses.replace(task, labels=task.labels or _classes({row.label for row in rows.rows}))
        if len({*task.labels}) < max(2, len(task.labels)):
            raise DataError(f"{rows.file}: {key} has the classes {task.labels}. Give two or more different classes")
    train = _numbered(key, task, rows)
    if task.dev_file:
        dev = _numbered(key, task, read("dev_file"))
    else:
        is_dev = [is_dev_row(row.texts, task.dev_share) for row in train.rows]
        dev = Rows(train.file, [row for row, chosen in zip(train.rows, is_dev, strict=True) if chosen])
        train = Rows(train.file, [row for row, chosen in zip(train.rows, is_dev, strict=True) if not chosen])
    for rows, split in ((train, "training"), (dev, "dev")):
        if not len(rows):
            raise DataError(f"{rows.file}: {key} has no {split} rows. Give a dev_file, or change dev_share")
    trained = {row.label for row in train.rows}
    if missing := [label for number, label in enumerate(task.labels) if number not in trained]:
        raise DataError(
            f"{train.file}: {key} has no training row of class {missing[0]!r}. Add rows of that class, give {key} a "
            "dev_file or another dev_share, or remove the class"
        )
    test = read("test_file") if task.test_file else None
    log_line(
        f"task {name}: {counted(len(train), 'training row{s}')}, {counted(len(dev), 'dev row{s}')}"
        + (f", {counted(len(test), 'row{s}')} to predict" if test else "")
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
    if task.is_pair and not task.features:
        raise ConfigError(f"{key}.features is empty. Name what the head reads, such as ('difference', 'product')")


def canonical(label: str) -> str:
    """Return a whole number without decimals, `1` for `1.0`, and other labels as they are."""
    return re.sub(r"^(-?(?:0|[1-9][0-9]*))\.0*$", r"\1", label)


def _classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the labels in order. If all are numbers, they are ordered by value."""
    ordered = sorted(labels)
    with contextlib.suppress(ValueError):
        if all(math.isfinite(float(label)) for label in ordered):
            ordered.sort(key=float)
    return tuple(ordered)


def _numbered(key: str, task: Task, rows: Rows) -> Rows:
    """Return rows with the numbers of classes, or values, in place of labels as text."""
    numbers = {canonical(label.strip()): number for number, label in enumerate(task.labels)}
    expected = f"a class of {key}. Known: {', '.join(task.labels)}" if numbers else f"a finite number for {key}"
    found = []
    for row in rows.rows:
        try:
            found.append(row._replace(label=numbers[row.label] if numbers else float(row.label)))
            if not math.isfinite(found[-1].label):
                raise ValueError(row.label)
        except (KeyError, ValueError) as error:
            raise DataError(f"{rows.file}, line {row.line}: {row.label!r} is not {expected}") from error
    return Rows(rows.file, found)


def _read(task: Task, path: Path, option: str, on_bad_line: str) -> Rows:
    """Return the rows of a file, with their labels as text."""
    if extension(path) not in TABLES:
        raise DataError(f"{path}: unknown extension. Known: {', '.join(TABLES)}; each except .parquet also .gz, .xz")
    label = "" if option.endswith("test_file") else task.label
    columns = [*dict.fromkeys(filter(None, (*task.texts, label, task.id)))]
    file = open_file(path, columns)
    if missing := next((column for column in columns if column not in file.columns), None):
        raise DataError(f"{path} ({option}): no column {missing!r}. It has: {listed(file.columns)}")

    def records() -> Iterator[tuple[int, TextRow | Fault]]:
        for line, entry in file.entries(columns):
            if isinstance(entry, Fault):
                yield line, entry
            elif any(column not in entry for column in columns):
                yield line, Fault.MISSING_KEY
            elif any(not isinstance(entry[column], str | int | float) for column in columns):
                yield line, Fault.NOT_STRING
            else:
                yield line, tuple(str(entry[column]) for column in columns)

    corpus = Corpus(f"{path} ({option})", (), records, str, on_bad_line=on_bad_line)
    rows = []
    for line, texts in corpus.numbered():
        values = dict(zip(columns, texts, strict=True))
        sentences = tuple(values[column] for column in task.texts)
        rows.append(Row(int(line), sentences, values.get(task.id, str(line)), canonical(values.get(label, ""))))
    if skipped := corpus.skipped_summary():
        log_line(f"{path}: {skipped}")
    return Rows(path, rows)
