"""Signals, and errors as a command reports them."""

import signal
import time
import warnings

import pytest

from diffcse_jax.errors import reported_to_user
from diffcse_jax.hosts import stop_requested, terminated_like_interrupted


def test_signals_make_a_request_and_a_second_one_ends_at_once(capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_requested() as request:
        assert not request.made
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert request.made
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "stopping after the steps already started; saving first" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_python_drops_comes_again(number):
    class Garbage:
        def __del__(self):
            signal.raise_signal(number)

    def work():
        Garbage()
        time.sleep(20)

    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        work()
    if number == signal.SIGINT:  # in commands that do not train
        with pytest.raises(SystemExit), reported_to_user():
            work()


def test_warnings_of_a_command_are_lines_printed_once():
    warning = (UserWarning("1 of 9 sentences was cut"), UserWarning, "encoder.py", 3)
    with reported_to_user():
        assert [warnings.formatwarning(*warning) for _ in range(2)] == ["warning: 1 of 9 sentences was cut\n", ""]
    assert warnings.formatwarning(*warning).startswith("encoder.py:3: UserWarning: ")
