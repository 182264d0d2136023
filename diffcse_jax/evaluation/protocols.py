"""The two sides of an evaluation: an encoder, and a task that scores it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32


@runtime_checkable
class Encoder(Protocol):
    """Sentences to vectors, computed by any framework."""

    @property
    def pooler(self) -> str:
        """One of `diffcse_jax.groups.POOLERS`."""

    @property
    def truncate_dim(self) -> int | None:
        """The length that vectors are cut to; None: they are whole."""

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dimension"]:
        """One vector per sentence."""


@runtime_checkable
class Task(Protocol):
    """One data set with its score, on SentEval's `downstream` folder."""

    @property
    def name(self) -> str:
        """The name it is asked for by."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Of `test`, `fasttest` and `dev`."""

    def files(self, mode: str) -> list[Path]:
        """The files that `run` reads in this mode."""

    def run(self, encoder: Encoder, mode: str, batch_size: int = 64) -> dict[str, Any]:
        """Named scores, x 100."""
