"""SentEval's data: where it is, how its files are read, and whether they are the official ones.

It is a folder on disk, or the archive that SimCSE put on the Hugging Face hub.
"""

import os
import re
import tarfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diffcse_jax.errors import DataError
from diffcse_jax.io import cache_folder, expand_path, hub_file, replace_dir, why_unreadable

# Folders of SentEval's data.
DATA_SETS = ("STS", "SICK", "MR", "CR", "SUBJ", "MPQA", "SST", "TREC", "MRPC")
OFFICIAL_SIZES: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_name("official.toml").read_text(encoding="utf-8")
)
PLACES = (
    "senteval",
    "downstream",
    "senteval/downstream",
    "data/downstream",
    "SentEval/data/downstream",
)
# float() also accepts 1_0 and nan.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def is_local(data_dir: str) -> bool:
    """Return whether SentEval's data is looked for on this machine, not on the hub."""
    return bool(data_dir) or "DIFFCSE_DATA_DIR" in os.environ


def senteval_folder(data_dir: str) -> Path:
    """Find SentEval's `downstream` folder.

    It is the named one, `$DIFFCSE_DATA_DIR/senteval`, or the hub's. If the named folder contains it
    in one of `PLACES`, that one is returned.
    """
    if not is_local(data_dir):
        return _hub_folder()
    folder = (
        expand_path(data_dir) if data_dir else Path(os.environ["DIFFCSE_DATA_DIR"]) / "senteval"
    )
    if not folder.is_dir():
        raise DataError(
            f"no evaluation data: there is no folder {folder}. Name SentEval's `downstream` folder"
        )
    candidates = (folder, *(folder / place for place in PLACES))
    return next((c for c in candidates if any((c / name).is_dir() for name in DATA_SETS)), folder)


def _hub_folder() -> Path:
    archive = hub_file(
        "senteval.tar",
        "Extract that file and name the folder that contains STS, SICK, MR, ... with --data_dir "
        "(for training: eval.data_dir). Or name a folder that contains it as `senteval` in "
        "DIFFCSE_DATA_DIR",
    )
    folder = cache_folder(f"senteval-{archive.parent.name[:12]}")
    extract(archive, folder)
    parents = sorted(path.parent for path in folder.rglob("STS") if path.is_dir())
    if not parents:
        raise DataError(
            f"{folder} does not contain a folder STS. Delete it to download SentEval's data again"
        )
    return parents[0]


def extract(archive: Path, folder: Path) -> None:
    """Extract an archive, unless the folder exists."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace_dir(folder) as new, tarfile.open(archive) as tar:
            tar.extractall(str(new), filter="data")
    except (OSError, tarfile.TarError, RecursionError) as error:
        raise DataError(f"cannot extract {archive} to {folder}: {error}") from error


class LabelledColumns(NamedTuple):
    """The columns of a file: of a label or rating, and of a sentence or two."""

    label: int  # the column of the label, from 0
    sentences: tuple[int, ...]  # the columns of the sentences
    # Numbers of classes by their names, or the scale of ratings.
    labels: Mapping[str, int] | tuple[float, float]
    encoding: str = "utf-8-sig"  # a byte-order mark is allowed
    # Separators of the first columns, instead of tabs. Each counts where it occurs first in a line.
    separators: str = ""
    header: bool = False

    def value(self, text: str) -> float | None:
        """Return the class or rating that a text names, or None if it is invalid."""
        if isinstance(self.labels, Mapping):
            return self.labels.get(text)
        low, high = self.labels
        return float(text) if _NUMBER.fullmatch(text) and low <= float(text) <= high else None

    @property
    def expected(self) -> str:
        """What `value` accepts, in words."""
        if isinstance(self.labels, Mapping):
            return f"one of {', '.join(self.labels)} as label"
        return "a number from {:g} to {:g}".format(*self.labels)


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """Read the lines of a text file."""
    if problem := why_unreadable(path):
        raise DataError(problem)
    try:
        text = path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return text.removesuffix("\n").split("\n") if text else []


def numbered_lines(path: Path, encoding: str = "utf-8-sig") -> list[tuple[int, str]]:
    """Read the lines that are not blank, with their numbers."""
    return [
        (number, line) for number, line in enumerate(read_lines(path, encoding), 1) if line.strip()
    ]


def parse_rows(
    lines: Iterable[tuple[int, str]], columns: LabelledColumns, source: Path | str
) -> list[tuple[Any, tuple[str, ...]]]:
    """Return the class or rating and the sentences of numbered lines. Quotes are text.

    A header is skipped, and refused if it is a valid row. Errors name the source.
    """
    least = 1 + max(columns.label, *columns.sentences)
    rows = []
    for position, (number, line) in enumerate(lines):
        row = line.strip()
        for separator in columns.separators:
            row = row.replace(separator, "\t", 1)
        fields = row.split("\t")
        value = columns.value(fields[columns.label]) if len(fields) >= least else None
        if columns.header and position == 0:
            if value is not None:
                raise DataError(f"{source}, line {number}: expected a header, found data")
        elif value is not None:
            rows.append(
                (value, tuple(single_spaced(fields[column]) for column in columns.sentences))
            )
        elif len(fields) < least:
            kind = "columns"
            if columns.separators:
                kind += f" separated by {' and '.join(map(repr, columns.separators))}"
            raise DataError(
                f"{source}, line {number}: expected {least} {kind}, found {len(fields)} in "
                f"{line[:60]!r}"
            )
        else:
            label = fields[columns.label][:60]
            raise DataError(
                f"{source}, line {number}: expected {columns.expected}, found {label!r}"
            )
    if not rows:
        raise DataError(f"{source}: no sentences")
    return rows


def single_spaced(text: str) -> str:
    """Return the text with runs of white space replaced by one space, as in SentEval."""
    return " ".join(text.split())


def size_problem(task: str, scores: Mapping[str, Any], mode: str) -> str:
    """Say which splits differ in size from the official data, or return an empty string."""
    official = OFFICIAL_SIZES.get(task, {})
    counts = {subset: values["n"] for subset, values in scores.get("subsets", {}).items()}
    counts |= {
        split: scores[f"n{split}"] for split in ("train", "dev", "test") if f"n{split}" in scores
    }
    counts |= {"dev" if mode == "dev" else "test": scores["n"]} if "n" in scores else {}
    counts |= {"dev": scores["dev"]["n"]} if "dev" in scores else {}
    return ", ".join(
        f"{split} has {count:,} instead of {official[split]:,} examples"
        for split, count in counts.items()
        if split in official and count != official[split]
    )
