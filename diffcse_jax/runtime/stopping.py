"""Being asked to stop, by a signal or by a program.

Signals can be handled in a program's main thread only. In any other the blocks here leave them to whoever has them.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

PAUSE = 0.1  # seconds until an interruption that was dropped is sent again


class StopRequest:
    """Whether work was asked to stop."""

    def __init__(self) -> None:
        self.made = False

    def make(self) -> None:
        """Asks it to stop as soon as what it has done is saved; from any thread."""
        self.made = True


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM in the block raises `KeyboardInterrupt`, as Ctrl-C does, so that what is partial is cleaned up.

    Python drops what is raised while it collects garbage, where JAX has a callback: such an interruption comes again.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled([signal.SIGTERM], interrupt), _dropped_interruptions_sent_again():
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
def _dropped_interruptions_sent_again() -> Iterator[None]:
    """Each as SIGTERM, which the block handles, unlike SIGINT where a shell has it ignored."""
    main, usual = threading.main_thread(), sys.unraisablehook
    if threading.current_thread() is not main or main.ident is None:
        yield
        return
    timers: list[threading.Timer] = []

    def hook(unraisable: "sys.UnraisableHookArgs", /) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            timers.append(threading.Timer(PAUSE, signal.pthread_kill, (main.ident, signal.SIGTERM)))
            timers[-1].start()
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()


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
