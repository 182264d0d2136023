"""Typed options: dataclass fields that carry their documentation and the values that they accept."""

import ast
import contextlib
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from diffcse_jax.errors import ConfigError


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    also: Callable[[str], bool] = lambda value: False,
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    low: float | None = None,
    high: float | None = None,
    changes: typing.Literal["training", "selection", "nothing"] = "training",
) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: The default value. Its type is that of the field.
        doc: The description, for the reference of keys.
        choices: The accepted values. Empty: any value of the type.
        also: Whether a value that is not one of the choices is accepted.
        aliases: Other names of choices.
        low: The smallest accepted number.
        high: The largest accepted number.
        changes: What depends on the option: `training` (the trained parameters), `selection` (only which of the trained
            checkpoints is exported) or `nothing` (only where and how fast a run is computed, and what it logs).
    """
    metadata = {"doc": doc, "choices": choices, "also": also, "aliases": aliases, "low": low, "high": high}
    metadata["changes"] = changes
    return dataclasses.field(default=default, metadata=metadata)


class Table(dict[str, Any]):
    """Groups of options under names that the user chooses. Hashable, because a configuration is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _item_type(field: dataclasses.Field) -> tuple[type, bool]:
    """Return the type of a field, or of the items of a tuple, and whether the field is a tuple."""
    items = typing.get_args(field.type)
    return (items or (field.type,))[0], bool(items)


def check_value(key: str, value: Any, field: dataclasses.Field) -> Any:
    """Return a value in the type of its field, or raise a `ConfigError` if the field does not accept it."""
    kind, is_tuple = _item_type(field)
    if is_tuple and not isinstance(value, (tuple, list)):
        raise ConfigError(f"{key}: expected a tuple of {kind.__name__} such as (0.1,), got {value!r}")
    choices, aliases, low, high = (field.metadata[name] for name in ("choices", "aliases", "low", "high"))
    checked = []
    for item in value if is_tuple else (value,):
        if kind is float and type(item) is int and abs(item) <= sys.float_info.max:
            item = float(item)
        if type(item) is not kind:
            raise ConfigError(f"{key}: expected {kind.__name__}, got {item!r}")
        item = aliases.get(item, item)
        if choices and item not in choices and not field.metadata["also"](item):
            raise ConfigError(f"{key}: {item!r} is not one of {', '.join(choices)}")
        if low is not None and not item >= low:
            raise ConfigError(f"{key}: {item} is below {low}")
        if high is not None and not item <= high:
            raise ConfigError(f"{key}: {item} is above {high}")
        checked.append(item)
    return tuple(checked) if is_tuple else checked[0]


def read_value(key: str, text: str, field: dataclasses.Field) -> Any:
    """Return the value that a text on the command line stands for, such as `3e-5`, `true`, `(0.1,)` or `0.1`."""
    kind, is_tuple = _item_type(field)
    value: Any = text
    if kind is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif kind is not str or (is_tuple and text.startswith(("(", "["))):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
    if is_tuple and not isinstance(value, (tuple, list)):
        value = [item.strip() for item in text.split(",") if item.strip()] if kind is str else (value,)
    return check_value(key, value, field)
