"""The vectors of a frozen encoder, computed once and kept in a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from diffcse_jax import hosts
from diffcse_jax.data.stored_vectors import SentenceVectors, make_vectors
from diffcse_jax.io import disk_errors

Encode = Callable[[list[str]], np.ndarray]


def kept(folder: Path, sentences: Sequence[str], encode: Encode) -> SentenceVectors:
    """The vectors of sentences by their numbers: those in the folder, or computed now, each distinct one once.

    Of several processes the first computes them.

    Args:
        folder: where they are; its name tells what they are of.
        sentences: in the order of their numbers.
        encode: computes vectors.
    """
    distinct = {sentence: row for row, sentence in enumerate(dict.fromkeys(sentences))}

    def make(new: Path) -> None:
        np.save(new / "vectors.npy", encode([*distinct]))
        np.save(new / "rows.npy", np.array([distinct[sentence] for sentence in sentences], np.int64))

    def make_or_find() -> None:
        with disk_errors(folder, safe="The checkpoints are whole."):
            make_vectors(folder, make)

    hosts.decided_by_first(make_or_find)
    return SentenceVectors(folder)


class Looking:
    """An encoder that looks vectors up.

    Args:
        vectors: of known sentences.
        pooler: that made them.
    """

    truncate_dim = None

    def __init__(self, vectors: dict[str, Float32[np.ndarray, " dimension"]], pooler: str):
        self._vectors, self.pooler = vectors, pooler

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dimension"]:
        """One vector per sentence, of known ones alone."""
        del batch_size
        return np.stack([self._vectors[sentence] for sentence in sentences])
