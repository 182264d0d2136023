"""What users see of a run: progress, rows, what their callbacks get, and how signals and errors end it."""

import io
import signal
import sys
import time
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
from tensorboardX.proto.event_pb2 import Event

from diffcse_jax import Callback, Config, WandB, hosts
from diffcse_jax.errors import reported_to_user
from diffcse_jax.hosts import stop_requested, terminated_like_interrupted
from diffcse_jax.training import callbacks
from diffcse_jax.training.callbacks import TensorBoard, Training, started

ROW = {"loss": 0.12345, "sentences_per_second": 578.2}


def training(workdir: Path, step: int = 0) -> Training:
    return Training(Config(), workdir, step, 15625, {"score": 50.0}, lambda: None)


def test_a_pipe_gets_a_line_every_30_seconds_at_most(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with hosts.Progress("training", "steps", 110, done_before=10) as progress:
        for step in range(11, 62):
            now[0] += 10
            progress.update(1, "loss 0.1235" if step % 10 == 0 else "")
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0] == "training:  12% 13/110 [00:30<16:10, 10.00s/ steps]"  # not the loss of another step
    assert lines[5] == "training:  25% 28/110 [03:00<13:40, 10.00s/ steps]"
    assert "training:  36% 40/110 [05:00<11:40, 10.00s/ steps, loss 0.1235]" in lines
    assert len(lines) == 17


def test_weights_and_biases_gets_the_rows_and_resumes_the_same_run(tmp_path, monkeypatch):
    wandb = types.ModuleType("wandb")
    wandb.init = mock.Mock(side_effect=lambda **options: mock.Mock(id=options.get("id", "new")))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    follower = WandB("mine", tags=["a"])
    with started([follower], training(tmp_path)) as observer:
        observer.on_evaluation(0, {"score": 50.0})
        observer.on_step(1, ROW)
        observer.on_step(2, {})
        observer.on_evaluation(2, {"score": 51.0})
    options = wandb.init.call_args.kwargs
    assert (options["project"], options["name"], options["tags"]) == ("mine", tmp_path.name, ["a"])
    assert options["config"]["optim.learning_rate"] == 7e-6
    rows = [mock.call({"start/score": 50.0, "dev/score": 50.0}, step=0), mock.call(ROW, step=1)]
    assert follower._run.log.call_args_list == [*rows, mock.call({"dev/score": 51.0}, step=2)]
    follower._run.finish.assert_called_once()
    with started([WandB("mine")], training(tmp_path, step=2)):
        pass
    assert (wandb.init.call_args.kwargs["id"], wandb.init.call_args.kwargs["resume"]) == ("new", "allow")


def test_callbacks_that_began_are_ended_and_other_processes_have_none(tmp_path, monkeypatch):
    ended = []

    class Mine(Callback):
        def on_end(self):
            ended.append(self)

    class Failing(Callback):
        def on_start(self, training):
            raise ValueError("no")

    first, last = Mine(), Mine()
    with pytest.raises(ValueError, match="no"), started([first, Failing(), last], training(tmp_path)):
        pass
    assert ended == [first]
    monkeypatch.setattr(callbacks.jax, "process_index", lambda: 1)
    with started([Failing()], training(tmp_path)) as observer:
        observer.on_step(1, ROW)


def test_tensorboard_reads_the_rows(tmp_path):
    """When a run resumes, TensorBoard drops the earlier rows of later steps."""
    for resumed_at in (0, 1):
        with started([TensorBoard()], training(tmp_path, step=resumed_at)) as observer:
            observer.on_step(resumed_at + 1, {"loss": 5.0})
            observer.on_step(resumed_at + 2, {})  # is not logged
            observer.on_evaluation(resumed_at + 1, {"stsb": 81.0})
        (file,) = (tmp_path / "tensorboard").iterdir()
        events, content = [], file.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            events.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
        assert events[0].file_version == "brain.Event:2"
        assert [event.step for event in events[1:]] == ([1, 1] if resumed_at == 0 else [2, 2, 2])
        values = [value for event in events for value in event.summary.value]
        assert {value.tag: value.simple_value for value in values} == {"loss": 5.0, "dev/stsb": 81.0}
        file.unlink()


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
