"""Semantic textual similarity (STS): how cosine similarities of embeddings correlate with human ratings.

File formats and formulas are those of SimCSE's copy of SentEval. Nothing is trained.
"""

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import DEFAULTS, Encoder, TaskOptions
from diffcse_jax.io import why_unreadable

OFFICIAL_SIZES: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_name("official.toml").read_text(encoding="utf-8")
)
RATINGS = (0.0, 5.0)  # the scale of the ratings in all STS data sets
COEFFICIENTS = ("spearman", "pearson")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # float() also accepts 1_0 and nan
_NOT_TEXT = {"latin-1": re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")}  # Latin-1 decodes any bytes


@dataclasses.dataclass(frozen=True)
class ScoredPairs:
    """Sentence pairs with human ratings or labels."""

    first: list[str]
    second: list[str]
    gold: Float[np.ndarray, " pairs"]


@dataclasses.dataclass(frozen=True)
class StsTask:
    """STS-B or SICK-R: one file per split.

    Attributes:
        name: The task's name.
        splits: File of each split, relative to SentEval's `downstream` folder.
        columns: Columns of rating, first and second sentence, from 0.
        header: Whether files start with a header.
    """

    name: str
    splits: Mapping[str, str]
    columns: tuple[int, int, int]
    header: bool = False
    modes: ClassVar = ("test", "fasttest", "dev")

    def files(self, folder: Path, mode: str) -> list[Path]:
        return [folder / self.splits[split] for split in _splits(mode)]

    def load(self, folder: Path, split: str) -> ScoredPairs:
        """Read the pairs of a split.

        Raises:
            DataError: A row is invalid; the message names file and line.
        """
        return read_pairs(folder / self.splits[split], self.columns, header=self.header, scale=RATINGS)

    def run(self, encoder: Encoder, folder: Path, mode: str, options: TaskOptions = DEFAULTS) -> dict[str, Any]:
        """Return the scores of the mode's split, x 100, and those of the dev split under `dev`."""
        splits = {split: self.load(folder, split) for split in _splits(mode)}
        scores = score_pairs(encoder, splits, options.batch_size, options.similarity)
        return scores["dev" if mode == "dev" else "test"] | {"dev": scores["dev"]}


@dataclasses.dataclass(frozen=True)
class StsYear:
    """STS12 to STS16: several subsets, test data only."""

    name: str
    modes: ClassVar = ("test", "fasttest")

    @property
    def subsets(self) -> list[str]:
        return list(OFFICIAL_SIZES[self.name])

    def files(self, folder: Path, mode: str = "test") -> list[Path]:
        return [path for subset in self.subsets for path in self._files_of(folder, subset)]

    def load(self, folder: Path, subset: str) -> ScoredPairs:
        """Read the rated pairs of a subset.

        Raises:
            DataError: The files differ in length, or a row is invalid; the message names file and line.
        """
        return read_parallel_pairs(*self._files_of(folder, subset))

    def run(self, encoder: Encoder, folder: Path, mode: str, options: TaskOptions = DEFAULTS) -> dict[str, Any]:
        """Return scores of all subsets together, of each subset, and under each aggregation, x 100.

        `all` ranks the pairs of all subsets together (SimCSE, DiffCSE and later papers), `mean` averages the subsets'
        coefficients, and `wmean` weights them by pairs (BERT-flow, whitening).
        """
        sets = {subset: self.load(folder, subset) for subset in self.subsets}
        systems = similarities(encoder, sets, options.batch_size, options.similarity)
        subsets = {name: correlations(systems[name], pairs.gold) for name, pairs in sets.items()}
        sizes = [len(pairs.gold) for pairs in sets.values()]
        together = correlations(np.concatenate([*systems.values()]), np.concatenate([p.gold for p in sets.values()]))
        aggregations = {"all": {name: together[name] for name in COEFFICIENTS}}
        for aggregation, weights in (("mean", None), ("wmean", sizes)):
            aggregations[aggregation] = {
                name: float(np.average([scores[name] for scores in subsets.values()], weights=weights))
                for name in COEFFICIENTS
            }
        return aggregations["all"] | {"n": sum(sizes), "subsets": subsets, "aggregations": aggregations}

    def _files_of(self, folder: Path, subset: str) -> tuple[Path, Path]:
        year = folder / "STS" / f"{self.name}-en-test"
        return year / f"STS.input.{subset}.txt", year / f"STS.gs.{subset}.txt"


STSB = StsTask("STSBenchmark", {s: f"STS/STSBenchmark/sts-{s}.csv" for s in ("train", "dev", "test")}, (4, 5, 6))
SICK_FILES = {"train": "SICK/SICK_train.txt", "dev": "SICK/SICK_trial.txt", "test": "SICK/SICK_test_annotated.txt"}
SICKR = StsTask("SICKRelatedness", SICK_FILES, (3, 1, 2), header=True)
YEARS = tuple(StsYear(f"STS{year}") for year in range(12, 17))


def _splits(mode: str) -> tuple[str, ...]:
    return ("dev",) if mode == "dev" else ("dev", "test")


# Scores


def score_pairs(
    encoder: Encoder, sets: Mapping[str, ScoredPairs], batch_size: int = 64, similarity: str = "cosine"
) -> dict[str, dict[str, Any]]:
    """Return the correlations of each set of pairs, as `correlations` does."""
    systems = similarities(encoder, sets, batch_size, similarity)
    return {name: correlations(systems[name], pairs.gold) for name, pairs in sets.items()}


def similarities(
    encoder: Encoder, sets: Mapping[str, ScoredPairs], batch_size: int, similarity: str = "cosine"
) -> dict[str, Float32[np.ndarray, " pairs"]]:
    """Return the similarity of each pair by set. All sets are encoded in one call."""
    embeddings = iter(encode_groups(encoder, [side for p in sets.values() for side in (p.first, p.second)], batch_size))
    return {name: SIMILARITIES[similarity](next(embeddings), next(embeddings)) for name in sets}


def encode_groups(encoder: Encoder, groups: Iterable[list[str]], batch_size: int) -> list[Float32[np.ndarray, "_ dim"]]:
    """Return the embeddings of each group of sentences, from one call of the encoder."""
    groups = list(groups)
    embeddings = encoder.encode([sentence for group in groups for sentence in group], batch_size=batch_size)
    return np.split(embeddings, np.cumsum([len(group) for group in groups])[:-1])


def cosine(u: Float32[np.ndarray, "n dim"], v: Float32[np.ndarray, "n dim"]) -> Float32[np.ndarray, " n"]:
    """Return the cosine similarity of each row; 0 if an embedding is zero, as in SentEval."""
    u, v = np.nan_to_num(u), np.nan_to_num(v)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((u * v).sum(axis=1) / (np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1)))


SIMILARITIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": cosine,
    "dot": lambda u, v: (u * v).sum(axis=1),
    "euclidean": lambda u, v: -np.linalg.norm(u - v, axis=1),
    "manhattan": lambda u, v: -np.abs(u - v).sum(axis=1),
}


def correlations(system: Float[np.ndarray, " n"], gold: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """Return `spearman` (average ranks for ties) and `pearson`, x 100, and the number of pairs `n`.

    Both coefficients are 0 if all similarities or all ratings are equal.
    """
    if np.ptp(system) == 0 or np.ptp(gold) == 0:
        return {"spearman": 0.0, "pearson": 0.0, "n": len(gold)}
    return {
        "spearman": 100 * float(scipy.stats.spearmanr(system, gold).statistic),
        "pearson": 100 * float(scipy.stats.pearsonr(system, gold).statistic),
        "n": len(gold),
    }


# Files


def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """Read the lines of a text file.

    Raises:
        DataError: The file cannot be read, or it is not text in this encoding.
    """
    if problem := why_unreadable(path):
        raise DataError(problem)
    try:
        text = path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    not_text = _NOT_TEXT.get(encoding, re.compile("\0"))
    for number, line in enumerate(lines, 1):
        if found := not_text.search(line):
            raise DataError(f"{path}, line {number}: contains the control character {found[0]!r}. Is this a text file?")
    return lines


def read_table(
    path: Path, columns: int, is_value: Callable[[list[str]], bool] | None = None
) -> list[tuple[int, list[str]]]:
    """Read the rows of a tab-separated UTF-8 file. Quotes are text; blank lines at the end are ignored.

    Args:
        path: The file. A byte-order mark is allowed.
        columns: The least number of columns.
        is_value: Skip the first line, a header, and refuse it if this is true of its columns. None: no header.

    Returns:
        Line numbers, from 1, and fields.

    Raises:
        DataError: The file cannot be read, or a row has too few columns, or a header is missing.
    """
    rows = list(enumerate((line.strip().split("\t") for line in read_lines(path, "utf-8-sig")), 1))
    while rows and rows[-1][1] == [""]:
        rows.pop()
    if is_value and rows:
        _, fields = rows.pop(0)
        if len(fields) >= columns and is_value(fields):
            raise DataError(f"{path}, line 1: expected a header, found data")
    for number, fields in rows:
        if len(fields) < columns:
            raise DataError(f"{path}, line {number}: expected {columns} tab-separated columns, found {len(fields)}")
    return rows


def read_pairs(
    path: Path,
    columns: tuple[int, int, int],
    *,
    header: bool = False,
    scale: tuple[float, float] = (-math.inf, math.inf),
) -> ScoredPairs:
    """Read rated sentence pairs from a tab-separated file. Runs of white space become one space, as in SentEval.

    Args:
        path: A UTF-8 file.
        columns: Columns of rating, first and second sentence, from 0.
        header: Whether the first line is a header.
        scale: The least and the highest rating.

    Raises:
        DataError: The file cannot be read, has no pairs, or has an invalid row.
    """
    rating, *sentences = columns
    has_rating = (lambda fields: bool(_NUMBER.fullmatch(fields[rating]))) if header else None
    rows = read_table(path, 1 + max(columns), has_rating)
    if not rows:
        raise DataError(f"{path}: no sentence pairs")
    gold = [_rating(fields[rating], path, number, scale) for number, fields in rows]
    first, second = ([single_spaced(fields[column]) for _, fields in rows] for column in sentences)
    return ScoredPairs(first, second, np.array(gold))


def read_parallel_pairs(sentences: Path, ratings: Path) -> ScoredPairs:
    """Read a file of tab-separated pairs and a file of their ratings, line by line. Unrated pairs are skipped.

    Raises:
        DataError: A file cannot be read, the files differ in length, or a row is invalid.
    """
    pairs, golds = ([line.strip().split("\t") for line in read_lines(path)] for path in (sentences, ratings))
    if len(pairs) != len(golds):
        raise DataError(f"{sentences} has {len(pairs)} lines, but {ratings} has {len(golds)}. They must match")
    kept = []
    for number, (fields, (gold, *_)) in enumerate(zip(pairs, golds, strict=True), 1):
        if not gold:
            continue
        if len(fields) != 2:
            raise DataError(f"{sentences}, line {number}: expected two tab-separated sentences, found {len(fields)}")
        kept.append((*map(single_spaced, fields), _rating(gold, ratings, number, RATINGS)))
    if not kept:
        raise DataError(f"{ratings}: no rated pairs")
    first, second, numbers = (list(column) for column in zip(*kept, strict=True))
    return ScoredPairs(first, second, np.array(numbers))


def single_spaced(text: str) -> str:
    """Return the text with runs of white space replaced by one space."""
    return " ".join(text.split())


def _rating(text: str, path: Path, line: int, scale: tuple[float, float]) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}, line {line}: expected a number as score, found {text[:60]!r}")
    if not scale[0] <= value <= scale[1]:
        raise DataError(f"{path}, line {line}: the score {text[:60]} is not between {scale[0]:g} and {scale[1]:g}")
    return value
