"""Options: keys of the configuration and options of commands, each declared once.

An option is a field of a frozen dataclass. Its type is the type of the values, `None` as the
default stands for "not given", and `option` gives it a description and a range.
"""

import ast
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin

from diffcse_jax.errors import ConfigError

REQUIRED = dataclasses.MISSING  # as a default: the option must be given


def option(
    default: Any,
    doc: str,
    *,
    choices: Collection[str] = (),
    also: Callable[[str], bool] = lambda value: False,
    aliases: Mapping[str, str] = MappingProxyType({}),
    low: float | None = None,
    high: float | None = None,
    changes: Literal["training", "selection", "nothing"] = "training",
    flag: str = "",
    metavar: str = "",
    read: Callable[[str], Any] | None = None,
) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: The default value, in the type of the field; or `REQUIRED`.
        doc: The description, for the reference of keys and for `--help`.
        choices: The accepted values. Empty: any value of the type. A table may still grow.
        also: Returns whether a value is accepted although it is not one of the choices.
        aliases: Other names of choices.
        low: The smallest accepted number.
        high: The largest accepted number.
        changes: For a key of the configuration, what depends on it: `training` (the trained
            parameters), `selection` (only which of the trained checkpoints is exported) or
            `nothing` (only where and how fast a run is computed, and what it logs).
        flag: For an option of a command, its name if that is not `--NAME`. Without hyphens, it is
            the place for values that have no name.
        metavar: For an option of a command, what `--help` calls the value.
        read: For an option of a command, returns the value of a text, or raises a `ConfigError`.
    """
    metadata = {"doc": doc, "choices": choices, "also": also, "aliases": aliases}
    metadata |= {"low": low, "high": high, "changes": changes}
    metadata |= {"flag": flag, "metavar": metavar, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


def item_type(field: dataclasses.Field) -> tuple[type, bool]:
    """Return the type of a field, or of the items of a tuple, and whether the field is a tuple."""
    kinds = [kind for kind in get_args(field.type) if kind not in (type(None), Ellipsis)]
    item = cast(type, kinds[0] if kinds else field.type)
    return item, get_origin(field.type) is tuple


def check_value(name: str, value: Any, field: dataclasses.Field) -> Any:
    """Return a value in the type of its field, or raise a `ConfigError` that begins with a name."""
    kind, is_tuple = item_type(field)
    if is_tuple and not isinstance(value, (tuple, list)):
        raise ConfigError(
            f"{name}: expected a tuple of {kind.__name__} such as (0.1,), got {value!r}"
        )
    checked = [_check_item(name, item, field) for item in (value if is_tuple else (value,))]
    return tuple(checked) if is_tuple else checked[0]


def _check_item(name: str, item: Any, field: dataclasses.Field) -> Any:
    kind, _ = item_type(field)
    choices, aliases, low, high = (
        field.metadata[each] for each in ("choices", "aliases", "low", "high")
    )
    if kind is float and type(item) is int and abs(item) <= sys.float_info.max:
        item = float(item)
    if type(item) is not kind:
        raise ConfigError(f"{name}: expected {kind.__name__}, got {item!r}")
    item = aliases.get(item, item)
    if choices and item not in choices and not field.metadata["also"](item):
        raise ConfigError(f"{name}: {item!r} is not one of {', '.join(choices)}")
    if low is not None and not item >= low:
        raise ConfigError(f"{name}: {item} is below {low}")
    if high is not None and not item <= high:
        raise ConfigError(f"{name}: {item} is above {high}")
    return item


def read_value(name: str, text: str, field: dataclasses.Field) -> Any:
    """Return the value that a text on the command line stands for.

    Examples are `3e-5`, `true`, `(0.1,)` and `0.1`.
    """
    if read := field.metadata["read"]:
        return read(text)
    kind, is_tuple = item_type(field)
    value: Any = text
    if kind is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif kind is not str or (is_tuple and text.startswith(("(", "["))):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(text)
    if is_tuple and not isinstance(value, (tuple, list)):
        value = names_in(text) if kind is str else (value,)
    return check_value(name, value, field)


def names_in(text: str) -> list[str]:
    """Return the names in a text such as `sts, transfer`."""
    return [name.strip() for name in text.split(",") if name.strip()]
