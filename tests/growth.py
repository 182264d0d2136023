"""Whether the time that a function takes grows with the size of a text, and not with its square."""

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


def assert_linear(call: Callable[[str], object], part: str) -> None:
    """Assert that four times the text takes about four times as long. The square would take 16 times."""
    number = 250
    while (before := seconds(call, part * number)) < 0.01 and number < 64_000:
        number *= 2
    assert seconds(call, part * 4 * number) < 8 * before + 0.05
