"""Configuration files, and overrides on the command line."""

import difflib
import os
import runpy
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from diffcse_jax.config.tree import Config, field_of, flat, nearest_key, nested, unknown_key_message
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.options import read_value

if TYPE_CHECKING:
    import ml_collections

SHIPPED = Path(__file__).parents[1] / "configs"  # a link in the repository, real files in the wheel


@runtime_checkable
class ConvertsToDict(Protocol):
    """A `Config`, or a ConfigDict of ml_collections."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values in nested groups."""


def default_config() -> "ml_collections.ConfigDict":
    """Return the defaults as a ConfigDict, for files in `configs/`."""
    import ml_collections  # only configuration files need it

    return ml_collections.ConfigDict(Config().to_dict())


def shipped_config(name: str) -> "ml_collections.ConfigDict":
    """Return the configuration of `configs/NAME.py`, for files that change a few keys of another one."""
    return runpy.run_path(str(SHIPPED / f"{name}.py"))["get_config"]()


def configuration(
    given: str | os.PathLike[str] | Mapping[str, Any] | ConvertsToDict, changes: Mapping[str, Any]
) -> tuple[str, Config]:
    """Return the name of a configuration and the checked configuration.

    Args:
        given: The name of a file in configs/, the path of a configuration file, the values that differ from the
            defaults, a `Config`, or a ConfigDict.
        changes: Values that override those, by key or in groups.

    Raises:
        ConfigError: If there is no such file, if it cannot be used, or if a value is invalid.
    """
    if isinstance(given, Mapping | ConvertsToDict):
        name, values = "custom", given if isinstance(given, Mapping) else given.to_dict()
    else:
        path = Path(given)
        path = path if path.suffix == ".py" else SHIPPED / f"{path}.py"
        name, values = path.stem, _read(path, str(given))
    return name, Config.from_dict(nested(flat(values) | flat(changes)))


def _read(path: Path, given: str) -> dict[str, Any]:
    if not path.is_file():
        known = sorted(file.relative_to(SHIPPED).with_suffix("").as_posix() for file in SHIPPED.glob("*.py"))
        near = difflib.get_close_matches(Path(given).stem, known, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--config: {given!r} is neither a file nor the name of a configuration.{meant} Known names: "
            f"{', '.join(known)}."
        )
    try:
        functions = runpy.run_path(str(path))
        if "get_config" not in functions:
            raise ConfigError(f"--config: {path} does not define get_config(), which returns the configuration")
        return functions["get_config"]().to_dict()
    except UserError:
        raise
    except Exception as error:  # whatever the code of the file raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"--config: {where}: {type(error).__name__}: {error}") from error


def read_overrides(arguments: Iterable[str], flag: str = "config", others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of arguments `--FLAG.KEY=VALUE`, by key.

    Args:
        arguments: The arguments that are not options of the command.
        flag: What keys begin with.
        others: The options of the command, for advice.

    Raises:
        ConfigError: If an argument has another form, if a key is unknown, or if a value cannot be read.
    """
    values: dict[str, Any] = {}
    following = iter(arguments)
    for argument in following:
        name, equals, text = argument.partition("=")
        bare = name.lstrip("-")
        key = bare.removeprefix(f"{flag}.")
        if key == bare or not name.startswith("-"):
            raise ConfigError(f"{argument!r} is not an option. {_advice(bare, text, flag, others)}")
        field = field_of(key)
        if field is None:
            raise ConfigError(unknown_key_message(key))
        value = text if equals else next(following, None)
        if value is None:
            raise ConfigError(f"{argument}: the value is missing. Write {argument}=VALUE.")
        values[key] = read_value(key, value, field)
    return values


def _advice(name: str, text: str, flag: str, others: Sequence[str]) -> str:
    """Return what to write instead of an argument that is not an option."""
    if near := difflib.get_close_matches(name, others, n=1, cutoff=0.7):
        return f"Did you mean --{near[0]}?"
    if key := name if field_of(name) else nearest_key(name):
        return f"Write --{flag}.{key}={text or 'VALUE'}."
    return f"Overrides are written --{flag}.KEY=VALUE."
