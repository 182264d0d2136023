"""How an index is built, and what it was read from. Both stay the same when documents change."""

import dataclasses
import math
import numbers
import os
from pathlib import Path
from typing import Any

from diffcse_jax.documents.find import NOT_PATHS
from diffcse_jax.documents.language import detector
from diffcse_jax.errors import ConfigError
from diffcse_jax.io import expand_path
from diffcse_jax.search.embeddings import check_storage
from diffcse_jax.search.modes import DEFAULT_WEIGHT, MODES
from diffcse_jax.search.words import Words


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """How an index is built. This stays the same when documents change.

    Attributes:
        mode: `dense`, `lexical` or `hybrid`.
        language: Of BM25's words, as the user named it; empty: detected.
        weight: The weight of BM25 in a hybrid search, from 0 to 1.
        storage: How embeddings are stored.
        passages: Whether texts that are longer than the model reads are split.
        id_column: The column of the documents' ids, as the user named it.
    """

    mode: str = "dense"
    language: str = ""
    weight: float = DEFAULT_WEIGHT
    storage: str = "float32"
    passages: bool = True
    id_column: str = ""

    def check(self) -> None:
        """Raise `UserError` before texts are encoded, which may take hours."""
        check_mode(self.mode)
        if not (is_number(self.weight) and 0 <= self.weight <= 1):
            raise ConfigError(
                f"weight={self.weight!r}: expected a number from 0 (embeddings only) to 1 (BM25 "
                "only)"
            )
        check_storage(self.storage)
        if self.mode != "dense":
            # This needs packages, and a language that they know.
            Words(self.language or "english")
            if not self.language:
                detector()


def is_number(value: Any) -> bool:
    """Return whether a value is a number. NaN and truth values are not."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and not math.isnan(value)


def check_mode(mode: str) -> str:
    """Return the mode, or raise `ConfigError` if there is no such mode."""
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: use one of: {', '.join(MODES)}")
    return mode


@dataclasses.dataclass(frozen=True)
class Input:
    """What documents were read from."""

    # An absolute path or pattern, `wiki1m`, `docstrings` or `-`; empty for texts in Python.
    name: str
    columns: tuple[str, ...] = ()
    id_column: str = ""
    follow_links: bool = False


def input_of(
    texts: Any, id_column: str = "", columns: tuple[str, ...] = (), *, follow_links: bool = False
) -> Input:
    """Return how an index records what it was given: a name, or texts."""
    if not isinstance(texts, str | Path):
        return Input("", columns, id_column)
    name = str(texts)
    if name not in NOT_PATHS:
        name = os.path.abspath(expand_path(texts))
    return Input(name, columns, id_column, follow_links)
