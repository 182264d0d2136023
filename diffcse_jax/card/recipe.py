"""A run's configuration for others to repeat it: without paths of this machine, as a command, and what it changes."""

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from diffcse_jax.config import SHIPPED, Config, flat, shipped_config
from diffcse_jax.run_folder.folder import is_local

# Keys that say where and how a run is computed, and on which its result does not depend.
OF_THE_MACHINE = (
    "data.cache_dir",
    "eval.data_dir",
    "eval.batch_size",
    "train.packing",
    "train.recompute",
    "train.log_every",
    "mesh.data",
    "mesh.model",
    "mesh.fully_sharded",
    "distributed",
)


class Recipe(NamedTuple):
    """A run as its difference from a shipped configuration.

    Attributes:
        config: name of the configuration: of all that are shipped, the one that differs in the fewest keys.
        changed: the keys that differ, with the run's values.
        subcommand: of `diffcse`, that makes such runs.
    """

    config: str
    changed: Mapping[str, Any]
    subcommand: str = "train"

    @property
    def command(self) -> str:
        """The command that trains with the same configuration, one override a line."""
        overrides = (f"--config.{key}={shlex.quote(str(value))}" for key, value in self.changed.items())
        return " \\\n    ".join([f"diffcse {self.subcommand} --config {self.config}", *overrides])


def recipe_of(config: Config) -> Recipe:
    """The recipe of a run; keys that depend on the machine are left out."""
    values = flat(portable(config))
    subcommand = "finetune" if config.needs("labels") else "train"
    found = [Recipe(name, _changed(values, name), subcommand) for name in shipped_names()]
    return min(found, key=lambda recipe: (len(recipe.changed), recipe.config))


def shipped_names() -> list[str]:
    """The names of shipped configurations that are runs."""
    return sorted(path.stem for path in SHIPPED.glob("*.py"))


def training_text(config: Config) -> str:
    """The training data: the name of the text, or the data of objectives that have their own."""
    own = "; ".join(filter(None, (objective.own_text for objective in config.objectives.values())))
    return own or portable(config)["data"]["train_file"]


def portable(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, with the last names of files and folders in place of their paths."""
    return {key: _without_folder(key, value) for key, value in config.to_dict().items()}


def _without_folder(key: str, value: Any) -> Any:
    """A value without the folders of a path in it."""
    if isinstance(value, dict):
        return {name: _without_folder(name, each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_folder(key, item) for item in value)
    if not isinstance(value, str):
        return value
    if key.endswith("_dir"):
        return ""
    return PurePath(value.replace("\\", "/")).name if key.endswith("file") or is_local(value) else value


def _changed(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys whose values are not those of a shipped configuration."""
    shipped = flat(Config.from_dict(shipped_config(name).to_dict()).to_dict())
    return {key: value for key, value in values.items() if key not in OF_THE_MACHINE and shipped.get(key) != value}
