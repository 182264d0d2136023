"""Which files of the package a call passes through, traced at run time."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import diffcse_jax

PACKAGE = f"{Path(diffcse_jax.__file__).parent}/"


class Trace(NamedTuple):
    """The files of the package that called one another.

    Constructors that Python makes, of dataclasses and named tuples, belong to no file.

    Attributes:
        files: In the order in which they were first entered, below `diffcse_jax/`.
        returns: How often a file was entered again: a call from another file, or from outside, into
            one that the trace had entered before. Each resumption of a generator counts.
    """

    files: tuple[str, ...]
    returns: int


def trace(call: Callable[[], Any]) -> Trace:
    """Call a function and return its trace."""
    entered: list[str] = []

    def file_of(frame: FrameType | None) -> str:
        while frame and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        return frame.f_code.co_filename.removeprefix(PACKAGE) if frame else ""

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            file = file_of(frame)
            if file != file_of(frame.f_back):
                entered.append(file)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = tuple(dict.fromkeys(entered))
    return Trace(files, len(entered) - len(files))
