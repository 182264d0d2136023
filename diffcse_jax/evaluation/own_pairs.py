"""Tasks on files of one's own: find the second text of a pair by the first, tell duplicates from other pairs."""

import abc
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Int

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import sts
from diffcse_jax.evaluation.protocols import Encoder
from diffcse_jax.evaluation.retrieval import retrieval_scores
from diffcse_jax.io import expand_path

DOCSTRINGS = "docstrings"  # in place of a file: those of functions that training on `docstrings` holds out
LIMIT = 1000  # of their pairs


@dataclasses.dataclass(frozen=True)
class OwnTask(abc.ABC):
    """A task on the pairs of a file.

    Attributes:
        file: a path, as the user wrote it.
    """

    file: str

    kind: ClassVar[str]
    modes: ClassVar = ("test", "fasttest", "dev")

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        return f"{self.kind}:{self.file}"

    def files(self, mode: str) -> list[Path]:
        """The file that `run` reads."""
        return [expand_path(self.file)]

    @abc.abstractmethod
    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Named scores, x 100, and the number of pairs `n`."""


class PairsRetrieval(OwnTask):
    """From the first text of each pair find the second one, among the second texts of all."""

    kind = "pairs_retrieval"

    def files(self, mode: str) -> list[Path]:
        """The file that `run` reads."""
        return [] if self.file == DOCSTRINGS else super().files(mode)

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Mean reciprocal rank and recalls, x 100."""
        queries, targets = retrieval_pairs(self.file)
        vectors = encoder.encode(queries + targets, batch_size=batch_size)
        return retrieval_scores(vectors[: len(queries)], vectors[len(queries) :]) | {"n": len(queries)}


class Duplicates(OwnTask):
    """Tell the pairs that mean the same from the others by their cosine similarity."""

    kind = "duplicates"

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Average precision, x 100.

        Raises:
            DataError: a row that cannot be read, or all pairs have one label.
        """
        pairs = labelled_pairs(self.file)
        return {"average_precision": 100 * duplicates_precision(encoder, pairs, batch_size), "n": len(pairs.gold)}


KINDS: dict[str, type[OwnTask]] = {task.kind: task for task in (PairsRetrieval, Duplicates)}


def own_task(name: str) -> OwnTask | None:
    """The task that a name like `pairs_retrieval:FILE` asks for; None for another name."""
    kind, colon, file = name.partition(":")
    return KINDS[kind](file) if colon and file and kind in KINDS else None


def title(name: str) -> str:
    """A short name of a task on a file of one's own: its kind, folder and file; any other name as it is."""
    task = own_task(name)
    return f"{task.kind} {'/'.join(Path(task.file).with_suffix('').parts[-2:])}" if task else name


def retrieval_pairs(file: str) -> tuple[list[str], list[str]]:
    """Queries and targets of a file of two tab-separated texts, or of held-out docstrings.

    Raises:
        DataError: a file that cannot be read, a row of other than two columns, or fewer than two pairs.
    """
    if file == DOCSTRINGS:
        from diffcse_jax.data.docstrings import docstring_pairs

        rows = docstring_pairs(LIMIT)
    else:
        rows = _read(expand_path(file))
    return [query for query, _ in rows], [target for _, target in rows]


def _read(path: Path) -> list[tuple[str, str]]:
    rows = []
    for number, fields in sts.pair_rows(path):
        if len(fields) != 2:
            raise DataError(f"{path}, line {number}: expected two tab-separated sentences, found {len(fields)} columns")
        rows.append((fields[0], fields[1]))
    if len(rows) < 2:
        raise DataError(f"{path}: pairs_retrieval needs at least two sentence pairs")
    return rows


def labelled_pairs(file: str) -> sts.ScoredPairs:
    """The pairs of a file of two tab-separated texts and a label: 1, they mean the same, or 0.

    Raises:
        DataError: a row that cannot be read, or all pairs have one label.
    """
    path = expand_path(file)
    pairs = sts.read_pairs(path, columns=(2, 0, 1), scale=(0.0, 1.0))
    if not np.isin(pairs.gold, (0.0, 1.0)).all() or np.ptp(pairs.gold) == 0:
        raise DataError(f"{path}: {Duplicates.kind} needs labels of 1 (the same) and of 0, and no others")
    return pairs


def duplicates_precision(encoder: Encoder, pairs: sts.ScoredPairs, batch_size: int) -> float:
    """The average precision with which cosine similarity tells labelled pairs that mean the same from the others."""
    similarities = sts.similarities(encoder, {Duplicates.kind: pairs}, batch_size)[Duplicates.kind]
    return average_precision(similarities, pairs.gold.astype(int))


def average_precision(
    similarities: Float[np.ndarray, " pairs"] | Float32[np.ndarray, " pairs"], labels: Int[np.ndarray, " pairs"]
) -> float:
    """The mean over positives of the precision among all pairs that are at least as similar.

    Pairs of equal similarity come together, so that a constant gets the share of positives.
    """
    values, where = np.unique(-similarities, return_inverse=True)
    pairs = np.bincount(where, minlength=len(values))
    positives = np.bincount(where, weights=labels, minlength=len(values))
    precisions = np.cumsum(positives) / np.cumsum(pairs)
    return float((precisions * positives).sum() / positives.sum())
