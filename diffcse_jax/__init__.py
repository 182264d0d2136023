"""Train and adapt sentence embeddings with DiffCSE, SimCSE and SimCSE++ in JAX."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from diffcse_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from diffcse_jax.api import Trained, train
    from diffcse_jax.config import Config
    from diffcse_jax.encoder import SentenceEncoder
    from diffcse_jax.errors import Interrupted, UserError
    from diffcse_jax.training.callbacks import Callback, WandB

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch is not needed here

__all__ = [
    "Callback",
    "Config",
    "Interrupted",
    "SentenceEncoder",
    "Trained",
    "UserError",
    "WandB",
    "train",
]

_MODULES = {
    "Callback": "diffcse_jax.training.callbacks",
    "Config": "diffcse_jax.config",
    "Interrupted": "diffcse_jax.errors",
    "SentenceEncoder": "diffcse_jax.encoder",
    "Trained": "diffcse_jax.api",
    "UserError": "diffcse_jax.errors",
    "WandB": "diffcse_jax.training.callbacks",
    "train": "diffcse_jax.api",
}


def __getattr__(name: str) -> Any:
    """Import a member at its first use.

    Importing the package is then fast and does not start JAX.
    """
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
