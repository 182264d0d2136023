"""Errors that tell users what happened and what to do.

Any function that reads a file, a configuration or a model may raise a `UserError`. Docstrings name
special cases only.
"""

import contextlib
import importlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(Exception):
    """An error that the user can fix.

    The message names the file, line, key or value, and the fix.
    """

    exit_code = 2


class MissingPackageError(UserError):
    """A package that is not installed, and that only an optional feature needs."""


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class DataError(UserError):
    """A text, pair or data-set file that cannot be used."""


class NotDownloadedError(DataError):
    """A data set that cannot be downloaded now."""


class CheckpointError(UserError):
    """A pretrained checkpoint, run folder or export that cannot be read or written."""


class InUseError(CheckpointError):
    """A folder that another process is using."""


class DiskError(CheckpointError):
    """A file or folder that cannot be written: no space, no permission or a failing device."""


class Interrupted(KeyboardInterrupt):
    """Work that was asked to stop, and has saved what it had done.

    `except Exception` does not catch it.
    """

    exit_code = 130  # what shells report for a program that Ctrl-C ended


# Control characters, separators of lines, marks that turn the direction of writing around, and
# halves of surrogate pairs: what can change how a terminal shows the rest.
_NOT_PRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a name as a terminal can show it in one line, with Python's escapes.

    Names of files and columns may contain what moves the cursor, or a line end that would begin a
    message of its own.
    """
    return _NOT_PRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def shown(value: object) -> str:
    """Return the start of a value as Python writes it, or its type if Python cannot write it."""
    try:
        return f"{value!r:.60}"
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return f"too large to show (type {type(value).__name__})"


def printable_message(message: object) -> str:
    """Return a message as a terminal can show it.

    Lines after the first are indented, so that no name in it passes for another message.
    """
    first, *others = str(message).rstrip("\n").split("\n")
    indented = (line if line.startswith("  ") else f"  {line}" for line in others)
    return "\n".join(map(printable, (first, *indented)))


@contextlib.contextmanager
def reported_to_user() -> Iterator[None]:
    """Print a `UserError` or `Interrupted` of the block without a traceback, and exit.

    The exit code is the error's own. Each warning for the user is printed once, without its place
    in the code.
    """
    usual = warnings.formatwarning
    printed = set()

    def plain(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        if not issubclass(category, UserWarning):
            return usual(message, category, *place, **line)
        is_new = str(message) not in printed
        printed.add(str(message))
        return f"warning: {printable_message(message)}\n" if is_new else ""

    warnings.formatwarning = plain
    try:
        with no_interruption_lost():
            yield
    except UserError as error:
        print(f"error: {printable_message(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as stopped:
        how = stopped if isinstance(stopped, Interrupted) else "interrupted"
        print(printable_message(how), file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    finally:
        warnings.formatwarning = usual


@contextlib.contextmanager
def no_interruption_lost() -> Iterator[None]:
    """If Python drops an interruption inside the block, send it again.

    Python prints and drops exceptions that are raised during garbage collection, where JAX has a
    callback.
    """
    main = threading.main_thread()
    usual = sys.unraisablehook
    if threading.current_thread() is not main:
        yield
        return
    timers: list[threading.Timer] = []

    def hook(unraisable: "sys.UnraisableHookArgs", /) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            usual(unraisable)
            return
        # A shell's background processes ignore SIGINT.
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        number = signal.SIGTERM if is_ignored else signal.SIGINT
        timers.append(threading.Timer(0.1, signal.pthread_kill, (main.ident, number)))
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        unsent = [timer for timer in timers if timer.is_alive()]
        for timer in unsent:
            timer.cancel()
    if unsent:
        raise KeyboardInterrupt


@contextlib.contextmanager
def handled(signals: Iterable[int], handler: Any) -> Iterator[None]:
    """Handle signals in the block.

    Only the main thread can do this. In another one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, before in previous.items():
            # None stands for a handler that was set outside Python.
            signal.signal(number, signal.SIG_DFL if before is None else before)


def ctrl_c_ends_process() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C end the process at once in the block.

    Some packages swallow its exception while they are imported.
    """
    return handled([signal.SIGINT], signal.SIG_DFL)


def counted(count: int, what: str) -> str:
    """Return a number with its noun, whose ending is marked.

    `line{s}` becomes `1 line` or `3,200 lines`, and `quer{y}` becomes `1 query` or `2 queries`.
    """
    endings = {"{s}": "", "{y}": "y"} if count == 1 else {"{s}": "s", "{y}": "ies"}
    for mark, ending in endings.items():
        what = what.replace(mark, ending)
    return f"{count:,} {what}"


def require_extra(module: str, extra: str) -> Any:
    """Import a module that only an optional feature needs.

    Raises:
        MissingPackageError: Its package is not installed. The error names the package's extra.
        UserError: Python cannot import it. The error names the reason, which may be any package
            that this one imports.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation raises OSError, AttributeError and others
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise MissingPackageError(
                f"this needs the package {package}, which is not installed. Install the extra "
                f"{extra!r}: pip install 'diffcse_jax[{extra}]'"
            ) from error
        raise UserError(
            f"the package {package} is installed, but Python cannot import it: {error}. Install, "
            "update or uninstall the package that this names"
        ) from error


def warn_user(message: str) -> None:
    """Warn at the line of the caller outside this package, whatever the depth of the call."""
    level = 2
    frame = sys._getframe(1)
    # The last two only check types in tests.
    passed = ("diffcse_jax", "contextlib", "jaxtyping", "beartype")
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in passed
    ):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, stacklevel=level)
