"""The other columns of a row, which hits repeat, as JSON text.

As text they take memory in proportion to the file. As objects, a nested value may take fifty times
as much.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from diffcse_jax.documents.ledger import LONGEST_TEXT, Ledger, Place
from diffcse_jax.documents.tables.values import listed
from diffcse_jax.documents.text.encodings import readable
from diffcse_jax.errors import DataError

TOO_LONG = f"row{{s}} whose other columns have more than {LONGEST_TEXT:,} characters as JSON"


def columns_text(columns: Mapping[str, Any], place: Place, ledger: Ledger) -> str:
    """Return the other columns of a row as JSON. Missing values are left out; dates become text.

    Columns that are too long are left out, with an entry in the ledger: each passage of the row
    repeats them. Raises `DataError` for a value that JSON cannot hold.
    """
    present = {name: value for name, value in columns.items() if not _is_missing(value)}
    if not present:
        return ""
    try:
        text = readable(_as_json(present), mark=r"\\u")  # JSON writes a backslash twice
    except (RecursionError, ValueError) as error:
        names = listed(present)
        deep = isinstance(error, RecursionError)
        why = "is nested too deeply" if deep else f"cannot be stored as JSON ({error})"
        raise DataError(f"{place}: one of the columns {names} {why}. Leave it out") from error
    if len(text) <= LONGEST_TEXT:
        return text
    ledger.change(TOO_LONG, "kept without these columns", place)
    return ""


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, or pandas' NaT or NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _as_json(values: Mapping[str, Any]) -> str:
    """Return JSON, in which numbers that it does not have, such as infinity, are text."""
    try:
        text = ENCODER.encode(values)
    except TypeError:  # about keys, which the encoder does not convert
        text = ENCODER.encode(_with_text_keys(values))
    if "NaN" in text or "Infinity" in text:
        text = ENCODER.encode(json.loads(text, parse_constant=_spelled))
    return text


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(each) for each in value]
    return value


def _spelled(constant: str) -> str:
    return str(float(constant))


def _of_known_type(value: Any) -> Any:
    """Return a value of another type as a list, dict, number or text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return [*value] if isinstance(value, set | frozenset) else str(value)


ENCODER = json.JSONEncoder(ensure_ascii=False, default=_of_known_type)
