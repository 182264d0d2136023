"""Being asked to stop, by a signal or by a program.

Signals can be handled in a program's main thread only. In any other the blocks here leave them to whoever has them.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType


class StopRequest:
    """Whether work was asked to stop."""

    def __init__(self) -> None:
        self.made = False

    def make(self) -> None:
        """Asks it to stop as soon as what it has done is saved; from any thread."""
        self.made = True


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM in the block raises `KeyboardInterrupt`, as Ctrl-C does, so that what is partial is cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled([signal.SIGTERM], interrupt):
        yield


@contextlib.contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """A request that SIGINT or SIGTERM in the block makes; a second Ctrl-C stops at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.make()
        print("\nstopping soon; saving first", file=sys.stderr)

    with _handled([signal.SIGINT, signal.SIGTERM], on_signal):
        yield request


@contextlib.contextmanager
def _handled(signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)  # None: not of Python
