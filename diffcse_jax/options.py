"""Typed options: dataclass fields that carry their documentation and the values that they accept."""

import ast
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from diffcse_jax.errors import ConfigError

EFFECTS = ("training", "selection", "nothing")


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    low: float | None = None,
    high: float | None = None,
    changes: str = "training",
) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: The default value. Its type is that of the field.
        doc: The description, for the reference of keys.
        choices: All accepted values. Empty: any value of the type.
        aliases: Other names of choices.
        low: The smallest accepted number.
        high: The largest accepted number.
        changes: What depends on the option: `training` (the trained parameters), `selection` (only which of the trained
            checkpoints is exported) or `nothing` (only where and how fast a run is computed, and what it logs).
    """
    assert changes in EFFECTS
    metadata = {"doc": doc, "choices": choices, "aliases": aliases or {}, "low": low, "high": high, "changes": changes}
    return dataclasses.field(default=default, metadata=metadata)


class Table(dict[str, Any]):
    """Groups of options under names that the user chooses. Hashable, because a configuration is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def table(of: type, doc: str) -> Any:
    """Return a dataclass field for a `Table`.

    Args:
        of: The dataclass of each group.
        doc: The description, for the reference of keys.
    """
    return dataclasses.field(default=Table(), metadata={"doc": doc, "of": of})


def is_group(kind: Any) -> bool:
    """Return True if the type of a field is a dataclass of options."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def build_options(cls: type, values: Mapping[str, Any], unknown: Callable[[str], str], prefix: str = "") -> Any:
    """Build a dataclass of options, and the groups inside it, from nested mappings.

    Args:
        cls: The dataclass.
        values: The values that differ from the defaults.
        unknown: Returns the error message for an unknown key.
        prefix: Stands before the keys in messages.

    Raises:
        ConfigError: If a key is unknown, or if a value has the wrong type or is out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    built = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(unknown(prefix + name))
        kind = fields[name].type
        if kind is Table:
            built[name] = _build_table(prefix + name, value, fields[name].metadata["of"], unknown)
        elif is_group(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name}: expected a group of keys, got {value!r}")
            built[name] = build_options(typing.cast(type, kind), value, unknown, f"{prefix}{name}.")
        else:
            built[name] = check_value(prefix + name, value, fields[name])
    return cls(**built)


def _build_table(key: str, groups: Any, of: type, unknown: Callable[[str], str]) -> Table:
    if not isinstance(groups, Mapping):
        raise ConfigError(f"{key}: expected groups of keys by name, got {groups!r}")
    for name, values in groups.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)):
            raise ConfigError(
                f"{key}: {name!r} is not a valid name. Use lower-case letters, digits and _, starting with a letter."
            )
        if not isinstance(values, Mapping):
            raise ConfigError(f"{key}.{name}: expected a group of keys, got {values!r}")
    return Table({name: build_options(of, groups[name], unknown, f"{key}.{name}.") for name in sorted(groups)})


def check_value(key: str, value: Any, field: dataclasses.Field) -> Any:
    """Return a value in the type of its field.

    Raises:
        ConfigError: If the type is wrong, or if the value is not among the choices or is out of range.
    """
    value = _typed(key, value, field.type)
    choices, aliases, low, high = (field.metadata[name] for name in ("choices", "aliases", "low", "high"))
    if aliases:
        named = tuple(aliases.get(item, item) for item in (value if isinstance(value, tuple) else (value,)))
        value = named if isinstance(value, tuple) else named[0]
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item not in choices:
            raise ConfigError(f"{key}: {item!r} is not one of {', '.join(choices)}")
        if low is not None and not item >= low:
            raise ConfigError(f"{key}: {item} is below {low}")
        if high is not None and not item <= high:
            raise ConfigError(f"{key}: {item} is above {high}")
    return value


def _typed(key: str, value: Any, expected: Any) -> Any:
    if isinstance(expected, types.GenericAlias):
        (item_type, *_) = typing.get_args(expected)
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{key}: expected a tuple of {item_type.__name__} such as (0.1,), got {value!r}")
        return tuple(_typed(key, item, item_type) for item in value)
    if expected is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{key}: the number is too large") from error
    if type(value) is not expected:
        raise ConfigError(f"{key}: expected {expected.__name__}, got {value!r}")
    return value


def read_value(key: str, text: str, field: dataclasses.Field) -> Any:
    """Return the value that a text on the command line stands for.

    Args:
        key: The key, for messages.
        text: The text, such as `3e-5`, `true` or `(0.1,)`. A tuple of one needs no brackets.
        field: The field of the key.

    Raises:
        ConfigError: If the text does not stand for a value of the field.
    """
    expected = field.type
    if isinstance(expected, types.GenericAlias):
        (item_type, *_) = typing.get_args(expected)
        items = _literal(text)
        if not isinstance(items, (tuple, list)):
            items = [item.strip() for item in text.split(",") if item.strip()] if item_type is str else (items,)
        return check_value(key, tuple(items), field)
    if expected is str:
        return check_value(key, text, field)
    if expected is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    else:
        value = _number(text, typing.cast(type, expected))
    if value is None:
        example = {bool: "True or False", int: "a whole number such as 60", float: "a number such as 3e-5"}
        raise ConfigError(f"{key}: expected {example[typing.cast(type, expected)]}, got {text!r}")
    return check_value(key, value, field)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None
