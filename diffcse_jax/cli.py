"""The command `diffcse`: it reads the options of a command and calls what does the work.

The options are in `commands.py`. What does the work is imported only to do it, so that `--help` and
mistakes are answered at once.
"""

import argparse
import contextlib
import dataclasses
import difflib
import gc
import importlib
import inspect
import io
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diffcse_jax import commands
from diffcse_jax.commands import Options, RunOptions
from diffcse_jax.errors import ConfigError, ctrl_c_ends_process, printable, reported_to_user
from diffcse_jax.io import expand_path
from diffcse_jax.options import REQUIRED, check_value, item_type, read_value
from diffcse_jax.version import __version__

if TYPE_CHECKING:
    from diffcse_jax.config import Config

ABOUT = "Train, evaluate and use sentence embeddings. To begin: diffcse train --config quickstart"
KEYS = """
Any key of the configuration is an option, such as --config.train.steps=100.
docs/keys.md lists all keys with their meaning, default and range.
"""

Work = Callable[[], object]


class Command(NamedTuple):
    """A command.

    Attributes:
        options: The type of its options.
        function: Does the work, with the options: `module:function`. Or a function that imports
            what does the work. If the work returns a path, the path is printed. A number is the
            exit code.
    """

    options: type[Options]
    function: str | Callable[[Any], Work]

    def work(self, options: Options) -> Work:
        """Import what does the work, and return the work."""
        if not isinstance(self.function, str):
            return self.function(options)
        module, _, name = self.function.partition(":")
        return partial(getattr(importlib.import_module(module), name), options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, without the name of the program, and return the exit code.

    By default it is the command line of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every encoding has all characters
            stream.reconfigure(errors="backslashreplace")
    with reported_to_user():
        name, options = read_options(list(sys.argv[1:] if arguments is None else arguments))
        # Only in a process of one command. In a longer one, what is imported may become garbage.
        imports = _imported_uncollected() if arguments is None else contextlib.nullcontext()
        with ctrl_c_ends_process(), imports:
            from diffcse_jax.hosts import keep_compiled, set_verbosity

            keep_compiled()
            set_verbosity("quiet" if options.quiet else "verbose" if options.verbose else "normal")
            # Orbax logs each step of each save, and its errors several times.
            if not options.verbose:
                logging.getLogger("absl").setLevel(logging.CRITICAL)
            work = COMMANDS[name].work(options)
        try:
            result = work()
            if isinstance(result, Path):
                print(printable(str(result)))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of the output, such as `head`, has ended
            # Python flushes once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            result = 141
        return result if isinstance(result, int) else 0
    raise AssertionError("`reported_to_user` exits on errors")


@contextlib.contextmanager
def _imported_uncollected() -> Iterator[None]:
    """Keep the garbage collector from what is imported, which it would walk through in vain.

    It does so many times while modules are imported, and whenever much is made later. That is a
    tenth of the processor time of `diffcse encode`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# From arguments to options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Print the message and exit. It may repeat what the user has typed or pasted."""
        super().error(printable(message))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It gives the name of the command as `name`."""
    parser = _Parser(prog="diffcse", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"diffcse_jax {__version__}")
    parsers = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, (kind, _) in COMMANDS.items():
        description = inspect.getdoc(kind) or ""
        command = parsers.add_parser(
            name,
            help=description.splitlines()[0].rstrip("."),
            description=description,
            epilog=KEYS if issubclass(kind, RunOptions) else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for field in options_of(kind):
            command.add_argument(flag_of(field), **_settings(field))
    return parser


def options_of(kind: type[Options]) -> list[dataclasses.Field]:
    """Return the options of a command: the required ones, its own, and those of its groups."""
    fields = {field.name: field for field in dataclasses.fields(kind) if "doc" in field.metadata}
    names = dict.fromkeys(name for each in kind.__mro__ for name in inspect.get_annotations(each))
    in_order = [fields[name] for name in names if name in fields]
    return sorted(in_order, key=lambda field: field.default is not REQUIRED)


def flag_of(field: dataclasses.Field) -> str:
    """Return how an option is written. Without hyphens, its values are written alone."""
    return field.metadata["flag"] or f"--{field.name}"


def _settings(field: dataclasses.Field) -> dict[str, Any]:
    """Return an option for argparse. It reads texts only, and what is not given has no value."""
    kind, is_tuple = item_type(field)
    choices, metavar = field.metadata["choices"], field.metadata["metavar"]
    flag = flag_of(field)
    is_named = flag.startswith("--")
    settings: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
    if is_named:
        settings |= {"dest": field.name, "required": field.default is REQUIRED}
    if kind is bool:
        action = argparse.BooleanOptionalAction if _can_be_negated(field) else "store_true"
        return settings | {"action": action}
    shown_choices = f"{{{','.join(choices)}}}" if choices else ""
    settings["metavar"] = metavar or shown_choices or flag.removeprefix("--").upper()
    if is_tuple:
        settings |= {"nargs": "+" if is_named else "*", "action": "extend"}
    return settings


def _can_be_negated(field: dataclasses.Field) -> bool:
    """Return whether an option is a switch with a second form, such as `--no-passages`."""
    return item_type(field)[0] is bool and field.default is None


def _help(field: dataclasses.Field) -> str:
    """Return the description of an option, with its default if it has one."""
    default = field.default
    shown = " ".join(default) if isinstance(default, tuple) else str(default)
    is_shown = default not in (None, REQUIRED) and not isinstance(default, bool) and shown
    text = field.metadata["doc"] + (f" (default: {shown})" if is_shown else "")
    return text.replace("%", "%%")


def read_options(arguments: Sequence[str]) -> tuple[str, Options]:
    """Return the name of a command and its options, or print what is wrong with them and exit."""
    parser = build_parser()
    namespace, rest = parser.parse_known_args(arguments)
    texts = vars(namespace)
    name = texts.pop("name")
    kind = COMMANDS[name].options
    fields = {field.name: field for field in options_of(kind)}
    flags = [flag_of(field) for field in fields.values()]
    flags += [f"--no-{each}" for each, field in fields.items() if _can_be_negated(field)]
    _refuse_misspelt(rest, flags)
    if rest and not issubclass(kind, RunOptions):  # the others are read with the configuration
        parser.error(f"unrecognized arguments: {' '.join(rest)}. See diffcse {name} --help")
    values = {each: _read(fields[each], text) for each, text in texts.items()}
    options = kind(**values, command=shlex.join(["diffcse", *arguments]))
    if isinstance(options, RunOptions):
        # --strict is a short form of a key, after the others, so that the run records the key.
        strict = ["--config.data.on_bad_line=error"] if options.strict else []
        options = dataclasses.replace(options, overrides=(*rest, *strict))
    return name, options


def _read(field: dataclasses.Field, text: str | bool | list[str]) -> Any:
    """Return the value of an option: of a switch, of several texts, or of one."""
    flag = flag_of(field)
    if isinstance(text, bool):
        return text
    if isinstance(text, list):
        return check_value(flag, text, field)
    return expand_path(text) if item_type(field)[0] is Path else read_value(flag, text, field)


def _refuse_misspelt(arguments: Iterable[str], flags: Iterable[str]) -> None:
    """Raise `ConfigError` for an argument that is almost an option.

    Keys of the configuration take seconds to import, so they are read later.
    """
    names = [flag.removeprefix("--") for flag in flags]
    for argument in arguments:
        if not argument.startswith("--") or re.match(r"--(config|finetune)\.", argument):
            continue
        bare = argument.partition("=")[0].removeprefix("--")
        if near := difflib.get_close_matches(bare, names, n=1, cutoff=0.7):
            raise ConfigError(f"{argument!r} is not an option. Did you mean --{near[0]}?")


# From options to work, where that takes more than a call


def _train(options: commands.TrainOptions) -> Work:
    config, workdir = _configuration(options)
    from diffcse_jax.api import run

    callbacks = []
    if project := os.environ.get("WANDB_PROJECT"):
        from diffcse_jax.training.callbacks import WandB

        callbacks.append(WandB(project))
    return partial(run, config, workdir, callbacks)


def _finetune(options: commands.FinetuneOptions) -> Work:
    config, workdir = _configuration(options)
    from diffcse_jax.apps.finetune import run_finetune

    return partial(run_finetune, config, workdir)


def _configuration(
    options: commands.TrainOptions | commands.FinetuneOptions,
) -> tuple["Config", Path]:
    """Return the chosen configuration with its overrides, and the run folder."""
    from diffcse_jax.config import configuration, read_overrides

    overrides = [
        re.sub(r"^--config\.init(?=$|=)", "--config.model.name_or_path", each)
        for each in options.overrides
    ]
    name, config = configuration(options.config, read_overrides(overrides))
    from diffcse_jax.api import named_workdir

    return config, named_workdir(options.workdir, name, config)


def _export(options: commands.ExportOptions) -> Work:
    from diffcse_jax.export import export

    settings = options.given(
        "truncate_dim", "onnx", "text", "pooler", "hub_id", "license", "language"
    )
    return partial(export, options.model, options.output, **settings)


COMMANDS = {
    "train": Command(commands.TrainOptions, _train),
    "evaluate": Command(commands.EvaluateOptions, "diffcse_jax.evaluation.runner:run"),
    "encode": Command(commands.EncodeOptions, "diffcse_jax.apps.embed:encode"),
    "embed": Command(commands.EmbedOptions, "diffcse_jax.apps.embed:embed"),
    "search": Command(commands.SearchOptions, "diffcse_jax.apps.search:search"),
    "export": Command(commands.ExportOptions, _export),
    "init": Command(commands.InitOptions, "diffcse_jax.apps.init:init"),
    "finetune": Command(commands.FinetuneOptions, _finetune),
    "study": Command(commands.StudyOptions, "diffcse_jax.apps.study:run_study"),
    "report": Command(commands.ReportOptions, "diffcse_jax.apps.report:write_report"),
    "demo": Command(commands.DemoOptions, "diffcse_jax.apps.demo:serve"),
}

if __name__ == "__main__":
    sys.exit(main())
