"""An encoder that computes each sentence once, however many scores ask for it."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from diffcse_jax.evaluation.protocols import Encoder


class Remembering:
    """The same vectors as the encoder's; those that were computed are kept as long as this lives."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._vectors: dict[str, np.ndarray] = {}

    @property
    def pooler(self) -> str:
        """The encoder's."""
        return self._encoder.pooler

    @property
    def truncate_dim(self) -> int | None:
        """The encoder's."""
        return self._encoder.truncate_dim

    def encode(self, sentences: Sequence[str], batch_size: int = 64) -> Float32[np.ndarray, "sentences dimension"]:
        """One vector per sentence."""
        new = [sentence for sentence in dict.fromkeys(sentences) if sentence not in self._vectors]
        if new:
            self._vectors.update(zip(new, self._encoder.encode(new, batch_size=batch_size), strict=True))
        return np.stack([self._vectors[sentence] for sentence in sentences])
