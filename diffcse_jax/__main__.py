"""The command `diffcse`, also `python -m diffcse_jax`."""

import argparse
import importlib
import sys

# Modules whose `main` reads `sys.argv`; imported when asked for, since some of them start JAX.
COMMANDS = {
    "train": ("diffcse_jax.commands.train", "train an encoder and export it"),
    "finetune": ("diffcse_jax.commands.finetune", "train heads of labelled tasks and the encoder"),
    "evaluate": ("diffcse_jax.commands.evaluate", "score encoders on SentEval's tasks"),
    "eval": ("diffcse_jax.commands.evaluate", "the same as evaluate"),
    "study": ("diffcse_jax.commands.study", "train variants with several seeds and compare them in a table"),
    "encode": ("diffcse_jax.commands.encode", "sentences to vectors: .npy, Parquet or JSONL"),
    "search": ("diffcse_jax.commands.search", "find the sentences of a corpus that are most similar to queries"),
    "embed": ("diffcse_jax.commands.embed", "embed files of sentences into Parquet"),
    "export": ("diffcse_jax.commands.export", "write a checkpoint as a Hugging Face folder"),
    "report": ("diffcse_jax.commands.report", "write what came of runs as one HTML page"),
    "demo": ("diffcse_jax.commands.demo", "search a text in the browser, with one model or two"),
}


def main() -> int | None:
    """Hands the arguments to a command.

    Returns:
        The command's exit code; None for 0.
    """
    command, arguments = parse_arguments()
    sys.argv = [f"diffcse {command}", *arguments]  # under this name it describes itself
    return importlib.import_module(COMMANDS[command][0]).main()


def parse_arguments() -> tuple[str, list[str]]:
    """The command's name and its arguments."""
    listing = "\n".join(f"  {name:10}{summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="diffcse",
        usage="diffcse COMMAND ...",
        description=f"commands:\n{listing}\n\n`diffcse COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return options.command, options.arguments


if __name__ == "__main__":
    sys.exit(main())
