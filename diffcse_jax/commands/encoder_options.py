"""Options of the commands that encode sentences."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from diffcse_jax.errors import ConfigError
from diffcse_jax.models.pooling import POOLERS

if TYPE_CHECKING:
    from diffcse_jax.encoder import SentenceEncoder


def add_encoder_options(parser: argparse.ArgumentParser, recorded: str = "") -> None:
    """Add `--model` and the options of encoding.

    Args:
        parser: The parser of the command.
        recorded: Where defaults come from, for help; `--model` may then be left out.
    """
    default = recorded or "the model's"
    models = "run folder, checkpoint, Hugging Face or sentence-transformers folder, hub id, or `minilm`"
    add = parser.add_argument
    add("--model", required=not recorded, help=models + (f" (default: {recorded})" if recorded else ""))
    add("--pooler", choices=POOLERS, help=f"replaces the recorded pooler (default: {default})")
    add("--truncate_dim", type=int, help=f"keep only the first dimensions of each embedding (default: {default})")
    precision = f"of the computation (default: {recorded or 'float32'})"
    add("--precision", choices=("float32", "bfloat16"), default=None if recorded else "float32", help=precision)
    add("--batch_size", type=int, default=64, help="sentences per step on this host (default: 64)")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add `--columns` and `--id_column`."""
    columns = "columns of text (default: the only one, or the first with a known name)"
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help=columns)
    parser.add_argument("--id_column", default="", metavar="NAME", help="a column whose values are kept as `id`")


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1.

    Raises:
        ConfigError: The value of an option is below 1.
    """
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(options, name)}")


def load_encoder(options: argparse.Namespace, **defaults: Any) -> "SentenceEncoder":
    """Load the encoder that the options of `add_encoder_options` name.

    Args:
        options: The parsed options.
        **defaults: Values for `model`, `pooler`, `precision` and `truncate_dim`, if they were not given.

    Raises:
        CheckpointError: The model cannot be read.
        ConfigError: `truncate_dim` is larger than the embedding size.
    """
    from diffcse_jax.encoder import SentenceEncoder
    from diffcse_jax.hosts import keep_compiled

    keep_compiled()
    names = ("model", "pooler", "precision", "truncate_dim")
    chosen = {name: defaults.get(name) if getattr(options, name) is None else getattr(options, name) for name in names}
    return SentenceEncoder.from_pretrained(
        str(chosen["model"]),
        pooler=chosen["pooler"],
        dtype=chosen["precision"] or "float32",
        truncate_dim=chosen["truncate_dim"],
    )


@contextlib.contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """End the command quietly if the reader of its output, such as `head`, has gone."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end goes there
        sys.exit(141)
