"""Typed options: dataclass fields that carry their documentation and the values they accept."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from diffcse_jax.errors import ConfigError


def option(default: Any, doc: str, *, choices: tuple = (), low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its documentation and the values it accepts (`low` and `high` included)."""
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "high": high})


class Table(dict):
    """Groups of the same keys by names that users give; hashable, as the configuration is that holds it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def table(of: type, doc: str) -> Any:
    """A dataclass field, a `Table`, with its documentation.

    Args:
        of: the dataclass of a group.
        doc: the documentation.
    """
    return dataclasses.field(default=Table(), metadata={"doc": doc, "of": of})


def tables_of(cls: type, prefix: str = "") -> dict[str, type]:
    """The dotted keys of all tables in a dataclass of options, with the dataclasses of their groups."""
    found: dict[str, type] = {}
    for field in dataclasses.fields(cls):
        if field.type is Table:
            found[prefix + field.name] = field.metadata["of"]
        elif isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            found |= tables_of(field.type, f"{prefix}{field.name}.")
    return found


def build_options(cls: type, values: Mapping[str, Any], unknown: Callable[[str], str], prefix: str = "") -> Any:
    """A dataclass of options, groups of them included, from nested mappings.

    Args:
        cls: the dataclass.
        values: what differs from its defaults.
        unknown: the message for a key that it does not have.
        prefix: of its keys in messages.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value outside its choices or range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ConfigError(unknown(prefix + name))
    built = {}
    for name, value in values.items():
        field = fields[name]
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name}: expected a group of keys, got {value!r}")
            built[name] = build_options(field.type, value, unknown, f"{prefix}{name}.")
        elif field.type is Table:
            built[name] = _build_table(prefix + name, value, field.metadata["of"], unknown)
        else:
            built[name] = _checked_value(prefix + name, value, field)
    return cls(**built)


def _build_table(key: str, groups: Any, of: type, unknown: Callable[[str], str]) -> Table:
    if not isinstance(groups, Mapping):
        raise ConfigError(f"{key}: expected groups of keys by name, got {groups!r}")
    for name, values in groups.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)):
            raise ConfigError(f"{key}: {name!r} is no name: a lower-case letter, then letters, digits and _")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{key}.{name}: expected a group of keys, got {values!r}")
    return Table({name: build_options(of, groups[name], unknown, f"{key}.{name}.") for name in sorted(groups)})


def _checked_value(key: str, value: Any, field: dataclasses.Field) -> Any:
    value = _typed_value(key, value, field.type)
    choices, low, high = (field.metadata[name] for name in ("choices", "low", "high"))
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item not in choices:
            raise ConfigError(f"{key}: {item!r} is not one of {', '.join(choices)}")
        if low is not None and not item >= low:
            raise ConfigError(f"{key}: {item} is below {low}")
        if high is not None and not item <= high:
            raise ConfigError(f"{key}: {item} is above {high}")
    return value


def _typed_value(key: str, value: Any, expected: Any) -> Any:
    if isinstance(expected, types.GenericAlias):
        item_type = typing.get_args(expected)[0]
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{key}: expected a tuple of {item_type.__name__} such as (0.1,), got {value!r}")
        return tuple(_typed_value(key, item, item_type) for item in value)
    if expected is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{key}: the number is too large") from error
    if type(value) is not expected:
        raise ConfigError(f"{key}: expected {expected.__name__}, got {value!r}")
    return value
