"""Losses, and their weighted sum.

Each module of this folder is about one idea. `docs/extending.md` adds a loss. This file has classes
and types only. Python gives a package its modules as attributes, so a module would replace a
function of the same name here.
"""

from diffcse_jax.losses.loss import (
    GeneratorOptions,
    Loss,
    Metrics,
    PretrainedCheckpoints,
    RunInfo,
    Table,
    View,
)
from diffcse_jax.models.layers import Network

__all__ = [
    "GeneratorOptions",
    "Loss",
    "Metrics",
    "Network",
    "PretrainedCheckpoints",
    "RunInfo",
    "Table",
    "View",
]
