"""Options of the commands that encode sentences."""

import argparse
from typing import TYPE_CHECKING, Any

from diffcse_jax.errors import ConfigError
from diffcse_jax.groups import POOLERS

if TYPE_CHECKING:
    from diffcse_jax.encoder import SentenceEncoder


def add_encoder_options(parser: argparse.ArgumentParser, recorded: str = "") -> None:
    """Adds `--model` and what says how it encodes.

    Args:
        parser: of the command.
        recorded: in help, where defaults come from if not from the model; `--model` may then be left out.
    """
    default = recorded or "the model's"
    models = "workdir, checkpoint of it, Hugging Face or sentence-transformers folder, hub id, `minilm`"
    add = parser.add_argument
    add("--model", required=not recorded, help=models + (f" (default: {recorded})" if recorded else ""))
    add("--pooler", choices=POOLERS, help=f"in place of the recorded pooler (default: {default})")
    add("--truncate_dim", type=int, help=f"keep the first so many numbers of each vector (default: {default})")
    precision = f"of the computation (default: {recorded or 'float32'})"
    add("--precision", choices=("float32", "bfloat16"), default=None if recorded else "float32", help=precision)
    add("--batch_size", type=int, default=64, help="sentences per step on this host (default: 64)")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--columns` and `--id_column`."""
    columns = "those of text, in files that have some (default: the only one, or the first whose name tells its role)"
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help=columns)
    parser.add_argument("--id_column", default="", metavar="NAME", help="its values are kept, as `id` of the rows")


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Refuses numbers below 1.

    Raises:
        ConfigError: an option's value is one.
    """
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(options, name)}")


def load_encoder(options: argparse.Namespace, **defaults: Any) -> "SentenceEncoder":
    """The encoder of the options of `add_encoder_options`.

    Args:
        options: the parsed options.
        **defaults: of `model`, `pooler`, `precision` and `truncate_dim`, where they were not given.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: vectors do not have so many numbers.
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
