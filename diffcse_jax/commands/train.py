"""Train sentence embeddings: `diffcse train --config diffcse_base [--workdir DIR] [--config.KEY=VALUE ...]`.

The same command resumes a run that was stopped. At the end the selected checkpoint is exported to `WORKDIR/export`, a
folder that transformers and sentence-transformers load.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from absl import logging

from diffcse_jax.config import Config, configuration, read_overrides
from diffcse_jax.errors import ConfigError, reported_to_user
from diffcse_jax.run import named_workdir, run


def main() -> None:
    """Run the command."""
    run_configured(__doc__, run)


def run_configured(about: str | None, run: Callable[[Config, Path], str]) -> None:
    """Run a command that takes a configuration and a workdir.

    Args:
        about: The description for `--help`.
        run: The work.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--config", help="a configuration file, or the name of a file in configs/; --config.KEY=VALUE overrides a key"
    )
    parser.add_argument(
        "--workdir",
        help="the run folder. Keys in braces stand for their values, as in 'runs/{name}_{seed}' or "
        "'runs/{optim.learning_rate}' (default: runs/NAME of the configuration)",
    )
    options, rest = parser.parse_known_args()
    with reported_to_user():
        overrides = read_overrides(rest, others=("config", "workdir"))
        if options.config is None:
            raise ConfigError("--config is missing, for example: --config quickstart")
        name, config = configuration(options.config, overrides)
        logging.set_verbosity(logging.FATAL)  # Orbax logs every step of every save, and some errors several times
        run(config, named_workdir(options.workdir, name, config))
