"""Evaluation of sentence encoders: STS, transfer, retrieval and geometry, and the dev metrics of training."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32


@runtime_checkable
class Encoder(Protocol):
    """Turns sentences into embeddings, with any framework."""

    @property
    def pooler(self) -> str: ...

    @property
    def truncate_dim(self) -> int | None: ...

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dim"]: ...


class CachedEncoder:
    """Computes each sentence once, however many tasks ask for it.

    Args:
        encoder: Computes the embeddings. They are kept as long as this object lives.
    """

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._embeddings: dict[str, np.ndarray] = {}

    @property
    def pooler(self) -> str:
        return self._encoder.pooler

    @property
    def truncate_dim(self) -> int | None:
        return self._encoder.truncate_dim

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dim"]:
        """Return one embedding per sentence."""
        new = [sentence for sentence in dict.fromkeys(sentences) if sentence not in self._embeddings]
        if new:
            self._embeddings.update(zip(new, self._encoder.encode(new, batch_size=batch_size), strict=True))
        return np.stack([self._embeddings[sentence] for sentence in sentences])


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of tasks. A task uses those that it knows.

    Attributes:
        similarity: Similarity of STS pairs, one of `sts.SIMILARITIES`.
        queries: Sentences whose nearest STS-B sentences the task `retrieval` lists. Empty: those of the first pairs.
        top_k: How many sentences it lists for each query.
        batch_size: Sentences per encoding batch.
    """

    similarity: str = "cosine"
    queries: tuple[str, ...] = ()
    top_k: int = 3
    batch_size: int = 64


DEFAULTS = TaskOptions()


@runtime_checkable
class Task(Protocol):
    """A data set and how it is scored, in the modes that it has data for (`test`, `fasttest`, `dev`)."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]: ...

    def files(self, folder: Path, mode: str) -> list[Path]:
        """Return the files that `run` reads from SentEval's `downstream` folder."""

    def run(self, encoder: Encoder, folder: Path, mode: str, options: TaskOptions = DEFAULTS) -> dict[str, Any]:
        """Return named scores, x 100."""
