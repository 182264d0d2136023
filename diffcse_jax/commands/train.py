"""Train sentence embeddings and export them.

The same command again resumes where an earlier run stopped. When training ends, the selected model is exported to
WORKDIR/export, a folder that transformers and sentence-transformers load.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from diffcse_jax.config import SHIPPED, Config, configuration, read_overrides
from diffcse_jax.errors import ConfigError, reported_to_user

EPILOG = """
Any key of the configuration is an option: --config.train.steps=100, --config.optim.learning_rate=3e-5.
docs/reference.md lists all keys with their meaning, default and range.
"""


def main() -> None:
    """Run `diffcse train`, also as `python train.py`."""

    def run(config: Config, workdir: Path) -> str:
        from diffcse_jax import api  # starts JAX, so a mistyped key is reported before

        return api.run(config, workdir)

    run_configured(__doc__, run)


def run_configured(description: str | None, run: Callable[[Config, Path], str]) -> None:
    """Run a command that takes a configuration and a run folder.

    Args:
        description: The text of `--help`.
        run: Does the work.
    """
    with reported_to_user():
        name, config, workdir = parse(sys.argv[1:], description)
        from diffcse_jax.api import named_workdir

        run(config, named_workdir(workdir, name, config))


def parse(arguments: Sequence[str], description: str | None) -> tuple[str, Config, str | None]:
    """Read the command line of a command that takes a configuration and a run folder.

    Args:
        arguments: The command line without the name of the command.
        description: The text of `--help`.

    Returns:
        The name of the configuration, the configuration, and the run folder as given.

    Raises:
        ConfigError: The configuration, a key or a value is invalid. The message names the nearest known one.
    """
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else sys.argv[0],
        usage="%(prog)s --config NAME_OR_FILE [--workdir DIR] [--config.KEY=VALUE ...]",
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py")))
    parser.add_argument("--config", metavar="NAME_OR_FILE", help=f"a file with get_config(), or one of: {names}")
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="run folder; {name}, {seed} and keys such as {optim.learning_rate} stand for values "
        "(default: runs/NAME of the configuration)",
    )
    parser.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    parser.add_argument("--verbose", action="store_true", help="also print the log messages of libraries")
    options, overrides = parser.parse_known_args(arguments)
    if options.config is None:
        raise ConfigError("--config is missing. Example: --config quickstart")
    name, config = configuration(
        options.config, read_overrides(overrides, others=("config", "workdir", "quiet", "verbose"))
    )
    _set_verbosity("quiet" if options.quiet else "verbose" if options.verbose else "normal")
    return name, config, options.workdir


def _set_verbosity(verbosity: Literal["quiet", "normal", "verbose"]) -> None:
    from diffcse_jax import hosts  # imports JAX

    hosts.set_verbosity(verbosity)
    if verbosity != "verbose":  # Orbax logs every step of every save, and its errors several times
        logging.getLogger("absl").setLevel(logging.CRITICAL)
