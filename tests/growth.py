"""Whether the work of a function grows with a text, and not with the square of its size."""

import sys
import time
from collections.abc import Callable


def seconds(call: Callable[[str], object], text: str) -> float:
    """Return the least processor time of two calls."""
    times = []
    for _ in range(2):
        start = time.process_time()
        call(text)
        times.append(time.process_time() - start)
    return min(times)


def assert_small(call: Callable[[str], object], make: Callable[[int], str], number: int) -> None:
    """Assert that texts with some parts and with four times as many take little time.

    What took the square of the number would take many seconds.
    """
    before = seconds(call, make(number))
    assert seconds(call, make(4 * number)) < 8 * before + 1


def assert_linear(call: Callable[[str], object], part: str) -> None:
    """Assert that four times the text takes about four times as long. The square would take 16 times.

    Other work on the machine may lengthen one measurement, and hardly three.
    """
    number = 250
    while (before := seconds(call, part * number)) < 0.01 and number < 64_000:
        number *= 2
    assert any(seconds(call, part * 4 * number) < 8 * before + 0.05 for _ in range(3))


def calls(call: Callable[[str], object], text: str) -> int:
    """Return how many functions, of Python and of C, are called. It is the same in each run."""
    count = 0

    def enter(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(enter)
    try:
        call(text)
    finally:
        sys.setprofile(None)
    return count


def assert_linear_calls(call: Callable[[str], object], make: Callable[[int], str]) -> None:
    """Assert that four times the parts take about four times the calls, and not 16 times."""
    call(make(1))  # what is done once
    assert calls(call, make(200)) < 5 * calls(call, make(50))
