"""Semantic textual similarity as SentEval scores it: correlation of vector similarity with human scores, no training.

File formats and formulas are those of SimCSE's copy of SentEval (evaluation modes `test` and `dev`).
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.stats
from jaxtyping import Float, Float32

from diffcse_jax.data.lines import text_lines
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.protocols import Encoder


@dataclasses.dataclass(frozen=True)
class ScoredPairs:
    """Sentence pairs with their human scores."""

    first: list[str]
    second: list[str]
    gold: Float[np.ndarray, " pairs"]


@dataclasses.dataclass(frozen=True)
class StsTask:
    """One data set with a dev and a test split.

    Attributes:
        folder: SentEval's `downstream` folder.
        similarity: one of `SIMILARITIES`.
    """

    folder: Path
    similarity: str = "cosine"

    name: ClassVar[str]
    modes: ClassVar = ("test", "fasttest", "dev")
    splits: ClassVar[dict[str, str]]  # split to file below the folder
    columns: ClassVar[tuple[int, int, int]]  # score, first and second sentence
    header: ClassVar[bool]

    def files(self, mode: str) -> list[Path]:
        """The files that `run` reads in this mode."""
        return [self.folder / self.splits[split] for split in _SPLITS_OF_MODE[mode]]

    def load(self, split: str) -> ScoredPairs:
        """The pairs of `dev` or `test`.

        Raises:
            DataError: a row that cannot be read, with its file and line.
        """
        return read_pairs(self.folder / self.splits[split], self.columns, skip_header=self.header, scale=SCALE)

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Scores of the mode's split, x 100, with those of the dev split under `dev`."""
        splits = {split: self.load(split) for split in _SPLITS_OF_MODE[mode]}
        scores = score_pairs(encoder, splits, batch_size, self.similarity)
        return scores["dev" if mode == "dev" else "test"] | {"dev": scores["dev"]}


class STSBenchmark(StsTask):
    name = "STSBenchmark"
    splits: ClassVar = {split: f"STS/STSBenchmark/sts-{split}.csv" for split in ("dev", "test")}
    columns = (4, 5, 6)
    header = False


class SICKRelatedness(StsTask):
    name = "SICKRelatedness"
    splits: ClassVar = {"dev": "SICK/SICK_trial.txt", "test": "SICK/SICK_test_annotated.txt"}
    columns = (3, 1, 2)
    header = True


_SPLITS_OF_MODE = {"test": ("dev", "test"), "fasttest": ("dev", "test"), "dev": ("dev",)}


@dataclasses.dataclass(frozen=True)
class StsYear:
    """One of STS12 to STS16: subsets of pairs with a test split alone.

    Attributes:
        folder: SentEval's `downstream` folder.
        similarity: one of `SIMILARITIES`.
    """

    folder: Path
    similarity: str = "cosine"

    name: ClassVar[str]
    modes: ClassVar = ("test", "fasttest")
    subsets: ClassVar[tuple[str, ...]]

    def files(self, mode: str) -> list[Path]:
        """The files that `run` reads."""
        return [path for subset in self.subsets for path in self._files_of(subset)]

    def load(self, subset: str) -> ScoredPairs:
        """The scored pairs of a subset.

        Raises:
            DataError: files of different lengths, or a row that cannot be read, with its file and line.
        """
        return read_parallel_pairs(*self._files_of(subset))

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Scores of each subset, x 100, and of their aggregations."""
        sets = {subset: self.load(subset) for subset in self.subsets}
        return aggregated(sets, encoder, batch_size, self.similarity)

    def _files_of(self, subset: str) -> tuple[Path, Path]:
        folder = self.folder / "STS" / f"{self.name}-en-test"
        return folder / f"STS.input.{subset}.txt", folder / f"STS.gs.{subset}.txt"


class STS12(StsYear):
    name = "STS12"
    subsets = ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews")


class STS13(StsYear):
    name = "STS13"
    subsets = ("FNWN", "headlines", "OnWN")


class STS14(StsYear):
    name = "STS14"
    subsets = ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news")


class STS15(StsYear):
    name = "STS15"
    subsets = ("answers-forums", "answers-students", "belief", "headlines", "images")


class STS16(StsYear):
    name = "STS16"
    subsets = ("answer-answer", "headlines", "plagiarism", "postediting", "question-question")


def read_parallel_pairs(sentences: Path, scores: Path) -> ScoredPairs:
    """Reads a file of tab-separated sentence pairs beside a file of scores; pairs with an empty score are left out.

    Raises:
        DataError: a file that cannot be read, different numbers of lines, or a row that cannot be read.
    """
    pairs, golds = tab_separated(sentences), tab_separated(scores)
    if len(pairs) != len(golds):
        raise DataError(f"{sentences} has {len(pairs)} lines, {scores} has {len(golds)}: they must agree line by line")
    kept = []
    for (number, fields), (_, (gold, *_)) in zip(pairs, golds, strict=True):
        if not gold:
            continue
        if len(fields) != 2:
            raise DataError(f"{sentences}, line {number}: expected two tab-separated sentences, found {len(fields)}")
        first, second = (" ".join(sentence.split()) for sentence in fields)
        kept.append((first, second, _score(gold, scores, number, SCALE)))
    if not kept:
        raise DataError(f"{scores}: no scored pairs")
    firsts, seconds, numbers = zip(*kept, strict=True)
    return ScoredPairs(list(firsts), list(seconds), np.array(numbers))


def aggregated(
    sets: dict[str, ScoredPairs], encoder: Encoder, batch_size: int, similarity: str = "cosine"
) -> dict[str, Any]:
    """Scores of subsets, x 100, and one for all of them under each aggregation.

    `all` ranks the pairs of all subsets together (SimCSE, DiffCSE and later papers), `mean` averages the subsets'
    coefficients, `wmean` weights them by pairs (BERT-flow, whitening).
    """
    systems = similarities(encoder, sets, batch_size, similarity)
    subsets = {name: correlations(systems[name], pairs.gold) for name, pairs in sets.items()}
    sizes = np.array([len(pairs.gold) for pairs in sets.values()])
    together = correlations(np.concatenate(list(systems.values())), np.concatenate([s.gold for s in sets.values()]))
    aggregations = {"all": {name: together[name] for name in COEFFICIENTS}}
    for aggregation, weights in (("mean", None), ("wmean", sizes)):
        aggregations[aggregation] = {
            name: float(np.average([scores[name] for scores in subsets.values()], weights=weights))
            for name in COEFFICIENTS
        }
    return aggregations["all"] | {"n": int(sizes.sum()), "subsets": subsets, "aggregations": aggregations}


COEFFICIENTS = ("spearman", "pearson")
SCALE = (0.0, 5.0)  # of the scores in all data sets here
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_pairs(
    path: Path,
    columns: tuple[int, int, int],
    *,
    skip_header: bool = False,
    scale: tuple[float, float] = (-math.inf, math.inf),
) -> ScoredPairs:
    """Reads tab-separated scored pairs. Quotes are text; runs of white space become one space, as in SentEval.

    Args:
        path: a UTF-8 file.
        columns: where score, first and second sentence are, from 0.
        skip_header: the first line is no pair.
        scale: the least and the highest score there can be.

    Raises:
        DataError: the file cannot be read, a row has too few columns or no score on the scale, there is no row, or a
            pair in place of the header.
    """
    scores, first, second = [], [], []
    for number, fields in pair_rows(path):
        if skip_header and number == 1:
            if len(fields) > max(columns) and _NUMBER.fullmatch(fields[columns[0]]):
                raise DataError(f"{path}, line 1: expected a header, found a pair")
            continue
        if len(fields) <= max(columns):
            raise DataError(
                f"{path}, line {number}: expected at least {max(columns) + 1} tab-separated columns, "
                f"found {len(fields)}"
            )
        score, *sentences = (fields[column] for column in columns)
        scores.append(_score(score, path, number, scale))
        first.append(" ".join(sentences[0].split()))
        second.append(" ".join(sentences[1].split()))
    if not scores:
        raise DataError(f"{path}: no sentence pairs")
    return ScoredPairs(first, second, np.array(scores))


def pair_rows(path: Path) -> list[tuple[int, list[str]]]:
    """`tab_separated` without a byte-order mark and blank lines at the end, which editors leave in a file."""
    rows = tab_separated(path, encoding="utf-8-sig")
    while rows and rows[-1][1] == [""]:
        rows.pop()
    return rows


def tab_separated(path: Path, encoding: str = "utf-8") -> list[tuple[int, list[str]]]:
    """Line numbers, from 1, and fields of a UTF-8 file.

    Raises:
        DataError: the file cannot be read.
    """
    return [(number, line.strip().split("\t")) for number, line in text_lines(path, encoding)]


def score_pairs(
    encoder: Encoder, sets: dict[str, ScoredPairs], batch_size: int = 64, similarity: str = "cosine"
) -> dict[str, dict[str, Any]]:
    """Correlations, x 100, of each named set: `{"spearman": ..., "pearson": ..., "n": pairs}`.

    All sets are encoded in one go, so that a sentence they share is computed once.
    """
    systems = similarities(encoder, sets, batch_size, similarity)
    return {name: correlations(systems[name], pairs.gold) for name, pairs in sets.items()}


def similarities(
    encoder: Encoder, sets: dict[str, ScoredPairs], batch_size: int, similarity: str = "cosine"
) -> dict[str, Float32[np.ndarray, " pairs"]]:
    """Similarities of each set's pairs, by one of `SIMILARITIES`."""
    sentences = [side for pairs in sets.values() for side in (pairs.first, pairs.second)]
    vectors = encoder.encode([sentence for side in sentences for sentence in side], batch_size=batch_size)
    sides = iter(np.split(vectors, np.cumsum([len(side) for side in sentences])[:-1]))
    return {name: SIMILARITIES[similarity](next(sides), next(sides)) for name in sets}


def cosine(u: Float32[np.ndarray, "n dimension"], v: Float32[np.ndarray, "n dimension"]) -> Float32[np.ndarray, " n"]:
    """Cosine similarity row by row; 0 where a vector is zero (SentEval's nan_to_num)."""
    u, v = np.nan_to_num(u), np.nan_to_num(v)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((u * v).sum(axis=1) / (np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1)))


def dot(u: Float32[np.ndarray, "n dimension"], v: Float32[np.ndarray, "n dimension"]) -> Float32[np.ndarray, " n"]:
    """Inner product row by row."""
    return (u * v).sum(axis=1)


def euclidean(
    u: Float32[np.ndarray, "n dimension"], v: Float32[np.ndarray, "n dimension"]
) -> Float32[np.ndarray, " n"]:
    """Negative Euclidean distance row by row."""
    return -np.linalg.norm(u - v, axis=1)


def manhattan(
    u: Float32[np.ndarray, "n dimension"], v: Float32[np.ndarray, "n dimension"]
) -> Float32[np.ndarray, " n"]:
    """Negative Manhattan distance row by row."""
    return -np.abs(u - v).sum(axis=1)


SIMILARITIES = {"cosine": cosine, "dot": dot, "euclidean": euclidean, "manhattan": manhattan}


def correlations(system: Float[np.ndarray, " n"], gold: Float[np.ndarray, " n"]) -> dict[str, Any]:
    """Spearman's (average ranks for ties) and Pearson's coefficient, x 100; 0 for a constant, which orders nothing."""
    if np.ptp(system) == 0 or np.ptp(gold) == 0:
        return {"spearman": 0.0, "pearson": 0.0, "n": len(gold)}
    return {
        "spearman": 100 * float(scipy.stats.spearmanr(system, gold).statistic),
        "pearson": 100 * float(scipy.stats.pearsonr(system, gold).statistic),
        "n": len(gold),
    }


def _score(text: str, path: Path, line: int, scale: tuple[float, float]) -> float:
    # Python's own reading takes `1_0` and digits of any script.
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}, line {line}: expected a number as score, found {text[:60]!r}")
    low, high = scale
    if not low <= value <= high:
        raise DataError(f"{path}, line {line}: a score of {text[:60]} is not between {low:g} and {high:g}")
    return value
