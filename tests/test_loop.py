"""The checks before training, and the loop between steps. Whole runs are in test_resume.py."""

import contextlib
import io
import json
import re
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tiny_networks import ENCODER, VOCABULARY, config_of, random_batch, views_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax import Callback, Config, WandB, hosts
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.errors import DataError, UserError, reported_to_user
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.hosts import Progress, stop_requested, terminated_like_interrupted
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.run_folder.checkpoints import Checkpoints
from diffcse_jax.run_folder.records import Measured, Record, read_metrics
from diffcse_jax.run_folder.state import TrainState
from diffcse_jax.training import callbacks
from diffcse_jax.training import loop as loop_module
from diffcse_jax.training.callbacks import MetricsFile, TensorBoard, Training, started
from diffcse_jax.training.loop import CompiledShapes, Run, loop
from diffcse_jax.training.networks import Built, StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.run import _compiled_meanwhile
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.train import with_fitting_batch

STATE = TrainState(jnp.int32(0), {"step": jnp.int32(0)}, (), jnp.int32(0))
BASELINE = Record(0, "avg", {"score": 1.0, "guard": 1.0}, "score", "text")


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that runs as many steps as there are losses. It returns the run and its events in order."""
    events = []
    monkeypatch.setattr(loop_module, "SHORT_RUN", 0)  # short runs log as long ones do
    monkeypatch.setattr(loop_module, "shard_batch", lambda batch, mesh: batch)
    write, ready = MetricsFile.write, jax.block_until_ready
    monkeypatch.setattr(
        MetricsFile, "write", lambda *row: events.append(f"row {row[1]}") or write(*row)
    )

    def wait(metrics):
        if metrics:
            events.append(f"waited for {int(metrics['number'])}")
        return ready(metrics)

    monkeypatch.setattr(loop_module.jax, "block_until_ready", wait)

    def start(losses, scores=None, options=None, grad_norm=1.0, **train):
        def train_step(state, frozen, batch, root):
            step, loss = state.step + 1, jnp.float32(losses[int(state.step)])
            events.append(f"step {step}")
            bad_steps = state.bad_steps + (~jnp.isfinite(loss)).astype(jnp.int32)
            metrics = {
                "loss": loss,
                "loss_contrast": loss,
                "grad_norm": jnp.float32(grad_norm),
                "number": step,
            }
            metrics |= {"bad_steps": bad_steps, "bad_gradient": jnp.int32(0)}
            return state._replace(step=step, params={"step": step}, bad_steps=bad_steps), metrics

        def measure(step):
            events.append(f"evaluated {step}")
            return Measured((scores or {}).get(step, BASELINE.dev), [])

        evaluated = {"every": 0} | (options or {})
        config = config_of(
            {"train": {"steps": len(losses), **train}, "mesh": {"data": 1}, "eval": evaluated}
        )
        checkpoints = mock.Mock(spec=Checkpoints)
        checkpoints.save.side_effect = lambda state, *_, eligible: events.append(
            f"saved {state.step}" + "!" * eligible
        )
        source = mock.MagicMock(spec=BatchSource)
        source.__len__.return_value = len(losses)
        batches = mock.MagicMock(spec=grain.DatasetIterator)
        batches.__next__.return_value = views_of(random_batch())
        run = Run(
            config=config,
            workdir=tmp_path,
            mesh=make_mesh(config),
            base=StartingCheckpoint(
                "tiny", ENCODER, mock.Mock(spec=PreTrainedTokenizerFast), RecordedPooler()
            ),
            built=Built(Networks(VOCABULARY, {}), {}, {}),
            optimizer=make_optimizer(config.optim, len(losses)),
            source=source,
            text="text",
            evaluation=mock.Mock(
                spec=DevEvaluation, metric="score", drift_metric="guard", measure=measure
            ),
            sentences=lambda step: [f"sentence of {step}"],
            model_of=lambda params: int(params["step"]),
        )
        with jax.debug_nans(False):
            loop(
                run,
                BASELINE,
                checkpoints,
                train_step,
                STATE,
                frozen={},
                root=jax.random.key(0),
                batches=batches,
                compiled=CompiledShapes(),
            )
        return run, events

    return start


def rows_of(workdir) -> list[dict]:
    return [row for row in read_metrics(workdir) if "loss" in row]


def saved(events) -> str:
    return " ".join(event.removeprefix("saved ") for event in events if event.startswith("saved"))


def test_a_row_is_read_while_the_next_step_runs(start, tmp_path, monkeypatch):
    """At most two steps are in flight: before a third one starts, the first one has ended."""
    monkeypatch.setattr(CompiledShapes, "announce", lambda *_: False)  # it has been compiled
    leave_out = mock.Mock()
    monkeypatch.setattr(Progress, "leave_out", leave_out)
    _, events = start([5.0, 4.0, 3.0, 2.0, 1.0], log_every=2)
    expected = (
        "row 0, step 1, step 2, waited for 1, row 1, step 3, waited for 2, row 2, step 4, waited for 3, step 5, "
        "waited for 4, row 4, row 5, evaluated 5, row 5, saved 5!"
    )
    assert events == expected.split(", ")
    leave_out.assert_called_once()  # the first step, from the rate
    rows = rows_of(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 5.0), (2, 4.0), (4, 2.0), (5, 1.0)]
    assert ["sentences_per_second" in row for row in rows] == [False, True, True, True]


def test_a_short_run_logs_every_step_and_warns_once_of_a_gradient_of_0(
    start, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loop_module, "SHORT_RUN", 100)
    start([5.0, 4.0, 3.0], log_every=10, grad_norm=0.0)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert (
        capsys.readouterr().err.count("warning: the gradient is 0 at step 1, so nothing is learned")
        == 1
    )


@pytest.mark.parametrize(
    ("options", "last", "expected"),
    [
        ({}, 6, "1! 2! 3! 4! 5! 6!"),
        ({"patience": 2}, 4, "1! 2! 3! 4!"),
        ({"guard": True, "max_drop": 0.5}, 3, "1! 2! 3"),
        ({"guard": True, "max_drop": 0.5, "interpolate": (0.5,)}, 6, "1! 2! 3! 4! 5! 6!"),
    ],
)
def test_training_ends_early_and_stays_ended(options, last, expected, start):
    scores = {
        step: {"score": min(step, 2.0), "guard": 0.5 if step < 3 else 0.4} for step in range(1, 7)
    }
    run, events = start([1.0] * 6, scores, {"every": 1, **options})
    assert saved(events) == expected
    # as seen on resuming
    assert [run.ends_at(step, BASELINE) for step in range(last + 1)] == [False] * last + [True]


def test_too_many_losses_that_are_no_numbers_end_the_run_before_anything_is_saved(start, tmp_path):
    message = (
        r"steps were skipped so far.*loss_contrast is nan at step 5.*more than train\.max_bad_steps=2.*"
        r"At step 5 the loss is nan and the gradient norm 1\.0\. The last checkpoint is kept"
    )
    with pytest.raises(UserError, match=message):
        start([5.0] + [np.nan] * 4, log_every=10, max_bad_steps=2)
    assert [row["step"] for row in read_metrics(tmp_path) if "dev/score" in row] == [0]


def test_skipped_steps_are_reported_and_their_sentences_written(start, tmp_path, capsys):
    _, events = start([5.0, np.nan, 3.0, np.nan, 1.0, 1.0], log_every=3)
    assert saved(events) == "6!"
    first, second = (
        line for line in capsys.readouterr().err.splitlines() if "skipped so far" in line
    )
    assert re.search("1 step was skipped so far because.*loss_contrast is nan at step 2", first)
    assert "2 steps were skipped so far" in second
    found = [
        json.loads(line) for line in (tmp_path / "report/bad_steps.jsonl").read_text().splitlines()
    ]
    assert [(each["step"], each["sentences"]) for each in found] == [
        (2, ["sentence of 2"]),
        (4, ["sentence of 4"]),
    ]
    rows = rows_of(tmp_path)
    assert [(row["step"], row["bad_steps"]) for row in rows] == [(1, 0), (3, 1), (6, 2)]
    rates = [row["learning_rate"] for row in rows]
    np.testing.assert_allclose(rates, [7e-6, 7e-6 * 5 / 6, 7e-6 * 3 / 6])  # of the updates made


@pytest.mark.parametrize(
    ("examples", "devices", "chunk_size", "expected"),
    [(300, 1, 0, 256), (101, 8, 0, 96), (201, 1, 64, 192), (180, 8, 31, 176)],
)
def test_few_texts_shrink_the_batch(examples, devices, chunk_size, expected, capsys):
    config = config_of(
        {"train": {"batch_size": 256, "chunk_size": chunk_size}, "mesh": {"data": devices}}
    )
    with pytest.raises(DataError, match="1 training example, too few"):
        with_fitting_batch(config, 1, make_mesh(config))
    fitting = with_fitting_batch(config, examples, make_mesh(config))
    assert fitting.train.batch_size == expected
    make_mesh(fitting)  # splits evenly
    assert fitting.train.chunks <= config.train.chunks
    assert (f"Training with batches of {expected}" in capsys.readouterr().err) == (expected != 256)


@pytest.mark.parametrize("problem", [None, RuntimeError("too large"), KeyboardInterrupt()])
def test_a_new_run_compiles_its_step_while_the_start_is_scored(problem, capsys):
    """The first step reports an error of the compiler. An error of the block waits for the thread."""
    begun, scored = threading.Event(), threading.Event()
    threads = []

    def lower(*arguments):
        threads.append(threading.current_thread())
        begun.set()
        assert scored.wait(60)
        if isinstance(problem, Exception):
            raise problem
        return mock.DEFAULT

    def score():
        assert begun.wait(60)
        scored.set()
        if isinstance(problem, KeyboardInterrupt):
            raise problem

    train_step = mock.Mock(spec=jax.stages.Wrapped, lower=mock.Mock(side_effect=lower))
    mesh = make_mesh(config_of({"mesh": {"data": 1}}))
    run = mock.Mock(spec=Run, source=[views_of(random_batch())], mesh=mesh)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _compiled_meanwhile(run, train_step, STATE, {}, jax.random.key(0)) as compiled,
    ):
        score()
    assert [thread.is_alive() for thread in threads] == [False]
    assert "compiling the train step" in capsys.readouterr().err
    assert not compiled.announce(run.source[0])


def test_a_resumed_run_compiles_at_its_first_step():
    """It may have ended already, so that there is none."""
    train_step = mock.Mock(spec=jax.stages.Wrapped)
    resumed = STATE._replace(step=jnp.int32(2))
    with _compiled_meanwhile(mock.Mock(spec=Run), train_step, resumed, {}, jax.random.key(0)):
        pass
    train_step.lower.assert_not_called()


# What users see: progress, rows, what their callbacks get, and how signals and errors end a run


def training(workdir: Path, step: int = 0) -> Training:
    return Training(Config(), workdir, step, 15625, {"score": 50.0}, lambda: None)


def test_a_pipe_gets_a_line_every_30_seconds_at_most(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hosts, "SECONDS_BEFORE_FIRST_LINE", 30.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with hosts.Progress("training", "steps", 110, done_before=10) as progress:
        for step in range(11, 62):
            now[0] += 10
            progress.update(1, "loss 0.1235" if step % 10 == 0 else "")
    lines = sys.stderr.getvalue().splitlines()
    # not the loss of another step
    assert lines[0] == "training:  12% 13/110 [00:30<16:10, 10.00 s/step]"
    assert lines[5] == "training:  25% 28/110 [03:00<13:40, 10.00 s/step]"
    assert "training:  36% 40/110 [05:00<11:40, 10.00 s/step, loss 0.1235]" in lines
    assert len(lines) == 17


@pytest.mark.parametrize("terminal", [True, False])
def test_compilation_is_left_out_of_the_time_that_is_left(terminal, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(hosts, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    shown = []
    with hosts.Progress("training", "steps", 8) as progress:
        progress._bar.mininterval = 0.0
        for seconds in (55.0, 2.0, 2.0, 30.0, 2.0):
            if seconds > 2:
                progress.leave_out()
            now[0] += seconds
            progress.update(1)
            shown.append(sys.stderr.getvalue().splitlines()[-1].rpartition("<")[2])
    assert [each.rstrip() for each in shown] == [
        "?]", "00:12, 2.00 s/step]", "00:10, 2.00 s/step]", "00:08, 2.00 s/step]", "00:06, 2.00 s/step]",
    ]  # fmt: skip


def test_progress_without_a_known_end(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with hosts.Progress("tokenising text", "rows") as progress:
        now[0] += 100
        progress.update(250)
    assert sys.stderr.getvalue() == "tokenising text: 250 rows [01:40, 2.50 rows/s]\n"


def test_weights_and_biases_gets_the_rows_and_resumes_the_same_run(tmp_path, monkeypatch):
    wandb = types.ModuleType("wandb")
    wandb.init = mock.Mock(side_effect=lambda **options: mock.Mock(id=options.get("id", "new")))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    follower = WandB("mine", tags=["a"])
    with started([follower], training(tmp_path)) as observer:
        observer.on_evaluation(0, {"score": 50.0})
        observer.on_step(1, {"loss": 0.5})
        observer.on_step(2, {})
        observer.on_evaluation(2, {"score": 51.0})
    options = wandb.init.call_args.kwargs
    assert (options["project"], options["name"], options["tags"]) == ("mine", tmp_path.name, ["a"])
    assert options["config"]["optim.learning_rate"] == 7e-6
    rows = [
        mock.call({"start/score": 50.0, "dev/score": 50.0}, step=0),
        mock.call({"loss": 0.5}, step=1),
    ]
    assert follower._run.log.call_args_list == [*rows, mock.call({"dev/score": 51.0}, step=2)]
    follower._run.finish.assert_called_once()
    with started([WandB("mine")], training(tmp_path, step=2)):
        pass
    assert (wandb.init.call_args.kwargs["id"], wandb.init.call_args.kwargs["resume"]) == (
        "new",
        "allow",
    )


def test_callbacks_that_began_are_ended_and_other_processes_have_none(tmp_path, monkeypatch):
    ended = []

    class Mine(Callback):
        def on_end(self):
            ended.append(self)

    class Failing(Callback):
        def on_start(self, training):
            raise ValueError("no")

    first, last = Mine(), Mine()
    with (
        pytest.raises(ValueError, match="no"),
        started([first, Failing(), last], training(tmp_path)),
    ):
        pass
    assert ended == [first]
    monkeypatch.setattr(callbacks.jax, "process_index", lambda: 1)
    with started([Failing()], training(tmp_path)) as observer:
        observer.on_step(1, {"loss": 0.5})


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
        assert {value.tag: value.simple_value for value in values} == {
            "loss": 5.0,
            "dev/stsb": 81.0,
        }
        file.unlink()


def test_signals_make_a_request_and_a_second_one_ends_at_once(capsys):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_requested() as request:
        assert not request.made
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert request.made
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert "stopping after the steps already started; saving first" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_python_drops_comes_again(number):
    class Garbage:
        def __del__(self):
            signal.raise_signal(number)

    def work():
        Garbage()
        time.sleep(20)

    # which a shell's background processes do not have
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        work()
    if number == signal.SIGINT:  # in commands that do not train
        with pytest.raises(SystemExit), reported_to_user():
            work()


def test_warnings_of_a_command_are_lines_printed_once():
    warning = (UserWarning("1 of 9 sentences was cut"), UserWarning, "encoder.py", 3)
    with reported_to_user():
        assert [warnings.formatwarning(*warning) for _ in range(2)] == [
            "warning: 1 of 9 sentences was cut\n",
            "",
        ]
    assert warnings.formatwarning(*warning).startswith("encoder.py:3: UserWarning: ")
