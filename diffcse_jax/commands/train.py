"""Trains sentence embeddings: `python train.py --config configs/diffcse_base.py [--workdir DIR] [--config.KEY=VALUE]`.

Without the repository: `diffcse train --config diffcse_base ...`; the files of configs/ are known by their names.

Started again with the same workdir it goes on where it stopped. At its end the best checkpoint is exported to
`WORKDIR/export`, a folder that transformers and sentence-transformers load.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from diffcse_jax.config import SHIPPED, Config, check_override_names
from diffcse_jax.errors import ConfigError, reported_to_user
from diffcse_jax.original_names import key_for
from diffcse_jax.run import named_workdir, run

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A file such as those in configs/, or the name of one of them; --config.KEY=VALUE overrides a key."
)
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Where the run lives, such as 'runs/{name}_{seed}', in which keys stand for their values, as {optim.learning_rate} "
    "does; default: runs/NAME of the config file.",
)


def main() -> None:
    """The command line."""
    main_of(__doc__, run)


def main_of(about: str | None, run: Callable[[Config, Path], str]) -> None:
    """The command line of a command with a configuration and a workdir.

    Args:
        about: its help.
        run: what it does.
    """
    sys.modules["__main__"].__doc__ = about  # absl's help shows that module's text and flags
    for flag in (CONFIG, WORKDIR):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    app.run(partial(run_as_configured, run), flags_parser=parse_flags)


def parse_flags(argv: list[str]) -> list[str]:
    """Absl's flag parsing of this command."""
    with reported_to_user():
        return parsed(flags.FLAGS, CONFIG, argv)


def parsed(values: flags.FlagValues, config: flags.FlagHolder, argv: list[str]) -> list[str]:
    """Absl's flag parsing, with errors for people.

    Args:
        values: the flags.
        config: of these, the one that names a configuration.
        argv: the command line.

    Returns:
        What are no flags.

    Raises:
        ConfigError: a file that cannot be read, a value of a wrong type, a mistyped key, with its nearest neighbour.
    """
    check_override_names(argv)
    try:
        rest = values(with_shipped_config(argv))
        if config.value is None:
            raise ConfigError("--config is missing; for example --config configs/quickstart.py")
        config.value.to_dict()  # ml_collections keeps a failure to read the file for the first use
    except flags.UnrecognizedFlagError as error:
        key = key_for(error.flagname)
        raise ConfigError(f"--{error.flagname} is --config.{key}=VALUE here" if key else str(error)) from error
    except OSError as error:
        raise ConfigError(f"--config: {str(error).splitlines()[-1].strip()}") from error
    except (flags.Error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(str(error)) from error
    return rest


def with_shipped_config(argv: list[str]) -> list[str]:
    """The arguments, where `--config NAME` of a file in configs/ became `--config PATH`."""

    def path(name: str) -> str:
        file = SHIPPED / f"{name}.py"
        return str(file) if file.is_file() else name

    arguments = []
    for before, argument in itertools.pairwise(["", *argv]):
        option, equals, value = argument.partition("=")
        if before == "--config":
            arguments.append(path(argument))
        elif equals and option == "--config":
            arguments.append(f"{option}={path(value)}")
        else:
            arguments.append(argument)
    return arguments


def run_as_configured(run: Callable[[Config, Path], str], argv: list[str]) -> None:
    """Runs a command with the configuration and the workdir that flags give."""
    with reported_to_user():
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}; overrides are written --config.KEY=VALUE")
        config = Config.from_dict(CONFIG.value.to_dict())
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.FATAL)  # Orbax reports every step of every save, and errors several times
        name = Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
        run(config, named_workdir(WORKDIR.value, name, config))
