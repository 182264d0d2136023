"""Being asked to stop where nothing listens for it: before the first step and after the last one."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM in the block raises `KeyboardInterrupt`, as Ctrl-C does, so that what is partial is cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
