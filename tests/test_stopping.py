import concurrent.futures
import signal
import time
import warnings

import pytest

from diffcse_jax.config import EvalConfig
from diffcse_jax.errors import Interrupted, UserError, reported_to_user
from diffcse_jax.hosts import stop_requested, terminated_like_interrupted
from diffcse_jax.training.loop import keeps_quality, reason_to_stop

START = {"mrr": 60.0, "guard": 80.0}


def of(*scores, guard=80.0):
    return [{"mrr": score, "guard": guard} for score in scores]


@pytest.mark.parametrize(
    ("options", "evaluations", "reason"),
    [
        ({"patience": 2}, [], ""),
        ({"patience": 2}, of(50.0), ""),
        ({"patience": 2}, of(50.0, 49.0), ""),
        ({"patience": 2}, of(50.0, 49.0, 50.0), "mrr has not improved in 2 evaluations"),  # an equal score is no rise
        ({"patience": 2}, of(50.0, 49.0, 51.0, 50.0), ""),
        ({"patience": 0}, of(*range(50, 0, -1)), ""),
        ({"max_drop": 1.0}, of(70.0, guard=79.0), ""),
        ({"max_drop": 1.0}, of(70.0, guard=78.9), "guard fell from 80.00 to 78.90, by more than eval.max_drop=1"),
        ({"max_drop": 1.0, "interpolate": 5}, of(70.0, guard=10.0), ""),
        ({"max_drop": 0.0}, of(70.0, guard=10.0), ""),
    ],
)
def test_reasons_to_stop(options, evaluations, reason):
    found = reason_to_stop(EvalConfig(guard=True, **options), "mrr", "guard", START, evaluations)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_without_a_guard_everything_holds_it():
    assert keeps_quality(EvalConfig(), "", START, {"mrr": 0.0})


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


def test_other_threads_leave_signals_alone():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def work():
        with terminated_like_interrupted(), stop_requested() as request:
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
            request.make()
            return request.made

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result()


@pytest.mark.parametrize(
    ("error", "printed", "code"),
    [
        (Interrupted("stopped at step 3; everything is saved"), "stopped at step 3; everything is saved\n", 130),
        (KeyboardInterrupt(), "interrupted\n", 130),
        (UserError("no such file"), "error: no such file\n", 2),
    ],
)
def test_being_stopped_is_no_error(error, printed, code, capsys):
    with pytest.raises(SystemExit) as stopped, reported_to_user():
        raise error
    assert (capsys.readouterr().err, stopped.value.code) == (printed, code)


def test_warnings_of_a_command_are_lines_told_once():
    warning = (UserWarning("1 of 9 sentences was cut"), UserWarning, "encoder.py", 3)
    with reported_to_user():
        assert [warnings.formatwarning(*warning) for _ in range(2)] == ["warning: 1 of 9 sentences was cut\n", ""]
    assert warnings.formatwarning(*warning).startswith("encoder.py:3: UserWarning: ")
