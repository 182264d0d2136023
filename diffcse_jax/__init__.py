"""DiffCSE, SimCSE and SimCSE++ sentence embeddings in JAX and Flax NNX."""

import os
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it found no PyTorch is no news here

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports `SentenceEncoder` when it is first asked for, so that reading a configuration does not start JAX."""
    if name == "SentenceEncoder":
        from diffcse_jax.encoder import SentenceEncoder

        return SentenceEncoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
