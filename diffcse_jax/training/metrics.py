"""Lines on the terminal."""

from collections.abc import Mapping

import jax

from diffcse_jax.hosts import log_line

report = log_line


def shown(scores: Mapping[str, float]) -> str:
    """Scores for people."""
    return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


def no_bar() -> bool | None:
    """The value of tqdm's `disable`: None on the first host (a bar if there is a terminal), True on the others."""
    return True if jax.process_index() else None
