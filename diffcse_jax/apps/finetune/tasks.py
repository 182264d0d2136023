"""Labelled tasks: their classes and rows, read from tables and split."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from diffcse_jax import io
from diffcse_jax.config import Config
from diffcse_jax.documents.document import digest, is_in_share
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.tables.formats import open_table
from diffcse_jax.documents.tables.layout import texts_of_row
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.hosts import log_line, report
from diffcse_jax.losses.finetune import LabelledTask

UNLABELLED = "without a label"


class LabelledRow(NamedTuple):
    """A row of a task."""

    line: int  # the first one of the row, from 1
    texts: tuple[str, ...]  # its sentence, or its two sentences
    id: str
    # The number of its class, or its value. Before the classes are known it is text, and in a test
    # row it is empty.
    label: Any


def labels_of(rows: Sequence[LabelledRow]) -> Shaped[np.ndarray, " rows"]:
    """Return the number of each row's class (int32), or its value (float32)."""
    labels = np.array([row.label for row in rows])
    return labels.astype(np.int32 if labels.dtype.kind == "i" else np.float32)


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task with known classes, and its rows."""

    name: str
    task: LabelledTask
    file: Path  # of the training rows
    train: list[LabelledRow]
    dev: list[LabelledRow]
    test: list[LabelledRow]  # without labels; empty if the task has no test_file


def read_tasks(config: Config) -> list[TaskData]:
    """Read all tasks of a configuration."""
    folder = io.expand_path(config.finetune.data_dir)
    bad = config.data.on_bad_line
    size = config.train.batch_size
    tasks = [read_task(name, task, folder, bad) for name, task in config.finetune.tasks.items()]
    if few := next((data for data in tasks if len(data.train) < size), None):
        rows = counted(len(few.train), "training row{s}")
        raise DataError(
            f"{few.file}: task {few.name} has {rows}, fewer than train.batch_size={size}. Lower it"
        )
    return tasks


def read_task(name: str, task: LabelledTask, folder: Path, on_bad_line: str) -> TaskData:
    """Read and split the files of a task, which are relative to a folder."""
    key = f"finetune.tasks.{name}"
    _check(task, key)
    file, dev_file, test_file = (
        folder / io.expand_path(name) for name in (task.file, task.dev_file, task.test_file)
    )
    read = partial(_read, task, key, on_bad_line)

    rows = read(file, "file")
    if task.kind == "classification":
        task = dataclasses.replace(
            task, labels=task.labels or _classes({row.label for row in rows})
        )
        if len({*task.labels}) < max(2, len(task.labels)):
            raise DataError(
                f"{file}: {key} has the classes {task.labels}. Give two or more different classes"
            )
    train = _numbered(task, key, file, rows)
    if task.dev_file:
        dev = _numbered(task, key, dev_file, read(dev_file, "dev_file"))
    else:
        sides: dict[bool, list[LabelledRow]] = {True: [], False: []}
        for row in train:
            # The order of a pair's texts does not matter.
            text = "\n".join(sorted(" ".join(text.casefold().split()) for text in row.texts))
            sides[is_in_share(digest(text), task.dev_share)].append(row)
        dev, train = sides[True], sides[False]
    if not (train and dev):
        raise DataError(
            f"{file}: {key} has no {'dev' if train else 'training'} rows. Give dev_file or "
            "dev_share"
        )
    trained = {row.label for row in train}
    if missing := [label for number, label in enumerate(task.labels) if number not in trained]:
        raise DataError(
            f"{file}: {key} has no training row of class {missing[0]!r}. Add rows of that class, "
            f"give {key} a dev_file or another dev_share, or remove the class"
        )
    test = read(test_file, "test_file") if task.test_file else []
    splits = {"training row{s}": train, "dev row{s}": dev, "row{s} to predict": test}
    sizes = ", ".join(counted(len(rows), what) for what, rows in splits.items() if rows)
    log_line(
        f"task {name}: {sizes}" + (f"; classes {', '.join(task.labels)}" if task.labels else "")
    )
    return TaskData(name, task, file, train, dev, test)


def _check(task: LabelledTask, key: str) -> None:
    """Raise `ConfigError` for settings that do not fit together."""
    if not task.file:
        raise ConfigError(f"{key}.file is empty. Name the file of this task, or correct its name")
    if len(task.texts) not in (1, 2):
        raise ConfigError(
            f"{key}.texts={task.texts}: give one column for single sentences, two for pairs"
        )
    if task.is_pair and not task.features:
        raise ConfigError(
            f"{key}.features is empty. Name what the head reads, such as ('difference', 'product')"
        )
    if task.kind == "regression" and task.labels:
        raise ConfigError(
            f"{key}.labels={task.labels}: a regression has numbers, not classes. Remove the "
            "labels, or give kind='classification'"
        )


def _read(
    task: LabelledTask, key: str, on_bad_line: str, file: Path, option: str
) -> list[LabelledRow]:
    """Return the rows of a file, with their labels as text."""
    source = f"{file} ({key}.{option})"
    if problem := io.why_unreadable(file):
        raise DataError(f"{key}.{option}: {problem}. Relative paths start at finetune.data_dir")
    label = "" if option == "test_file" else task.label
    columns = [*dict.fromkeys(filter(None, (*task.texts, label, task.id)))]
    table = open_table(file, source)
    if missing := next((column for column in columns if column not in table.columns), None):
        raise DataError(f"{source}: no column {missing!r}. It has: {listed(table.columns)}")
    ledger = Ledger(source, strict=on_bad_line == "error", refuse_empty=True)
    rows = []
    for line, values in table.rows(columns, ledger):
        place = Place(source, line)
        given = values.get(label, "")
        unlabelled = given is None or not str(given).strip()
        if label and unlabelled and any(values.get(column) for column in task.texts):
            ledger.leave_out(UNLABELLED, place)
            continue
        cells = texts_of_row(values, columns, place, ledger)
        if cells is None:
            continue
        fields = dict(zip(columns, cells, strict=True))
        texts = tuple(fields[column] for column in task.texts)
        rows.append(
            LabelledRow(
                line, texts, fields.get(task.id, str(line)), _canonical(fields.get(label, ""))
            )
        )
    if not rows:
        raise DataError(f"{source}: no usable row ({ledger.summary()})")
    report(ledger)
    return rows


def _canonical(label: str) -> str:
    """Return a whole number without decimals, `1` for `1.0`, and other labels as they are."""
    return re.sub(r"^(-?(?:0|[1-9][0-9]*))\.0*$", r"\1", label)


def _classes(labels: set[str]) -> tuple[str, ...]:
    """Return the labels in order. If all are numbers, they are ordered by value."""
    with contextlib.suppress(ValueError):
        return tuple(sorted(sorted(labels), key=float))
    return tuple(sorted(labels))


def _numbered(
    task: LabelledTask, key: str, file: Path, rows: Sequence[LabelledRow]
) -> list[LabelledRow]:
    """Return rows with the numbers of classes, or values, in place of labels as text."""
    numbers = {_canonical(label.strip()): number for number, label in enumerate(task.labels)}
    expected = f"a finite number for {key}"
    if numbers:
        expected = f"a class of {key}. Known: {', '.join(task.labels)}"
    numbered = []
    for row in rows:
        try:
            label = numbers[row.label] if numbers else float(row.label)
            if not math.isfinite(label):
                raise ValueError(row.label)
        except (KeyError, ValueError) as error:
            raise DataError(f"{file}, line {row.line}: {row.label!r} is not {expected}") from error
        numbered.append(row._replace(label=label))
    return numbered
