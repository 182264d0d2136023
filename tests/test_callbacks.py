"""What users see of a run, and what their callbacks are told."""

import io
import json
import sys
import types
from pathlib import Path
from unittest import mock

import pytest

from diffcse_jax import Callback, Config, WandB
from diffcse_jax.errors import ConfigError
from diffcse_jax.training import callbacks
from diffcse_jax.training.callbacks import Progress, Training, started

ROW = {"loss": 0.12345, "sentences_per_second": 578.2}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def training(workdir: Path, step: int = 0, total: int = 15625) -> Training:
    return Training(Config(), workdir, step, total, {"score": 50.0}, lambda: None)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    now = [1000.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_a_line_every_30_seconds_at_most(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress()
    progress.on_start(training(tmp_path, step=10, total=110))
    clock[0] += 100  # to compile
    progress.on_step(11, ROW)
    for step in range(12, 62):
        clock[0] += 10
        progress.on_step(step, ROW if step % 10 == 0 else {})
    progress.on_evaluation_start(61)
    clock[0] += 31
    progress.on_evaluation_start(61)
    progress.on_end()
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0] == "step 11 of 110: loss 0.1235"
    assert lines[1:3] == ["step 14 of 110", "step 17 of 110"]  # not the loss of an earlier step
    assert lines[3] == "step 20 of 110: loss 0.1235, 578 sentences/s, about 15:00 left"  # 90 of 10 s, without compiling
    assert lines[4] == "step 23 of 110: about 14:30 left"
    assert lines[-1] == "step 61 of 110: scoring, about 08:10 left"
    assert len(lines) == 18


def test_a_bar_is_readable_in_80_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    progress = Progress()
    progress.on_start(training(tmp_path))
    for step in range(1, 7032):
        progress.on_step(step, ROW if step in (1, 7030) else {})
    progress.on_evaluation_start(7031)
    progress.on_end()
    drawn = sys.stderr.getvalue().replace("\n", "\r").split("\r")
    assert max(map(len, drawn)) <= 80
    last = [each for each in drawn if "scoring" in each][-1]
    assert last.startswith("scoring   45%|█")
    assert "| 7031/15625 [" in last
    assert last.rstrip().endswith(", loss 0.1235, 578 sentences/s]")


@pytest.fixture
def wandb(monkeypatch):
    """A module of this name that remembers."""
    module = types.ModuleType("wandb")
    module.init = mock.Mock(side_effect=lambda **options: mock.Mock(id=options.get("id", "new")))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_gets_the_rows_and_the_same_run_when_it_goes_on(tmp_path, wandb):
    follower = WandB("mine", tags=["a"])
    with started([follower], training(tmp_path)) as tell:
        tell.on_evaluation(0, {"score": 50.0})
        tell.on_step(1, ROW)
        tell.on_step(2, {})
        tell.on_evaluation(2, {"score": 51.0})
        run = follower._run
    options = wandb.init.call_args.kwargs
    assert {name: options[name] for name in ("project", "name", "tags")} == {
        "project": "mine",
        "name": tmp_path.name,
        "tags": ["a"],
    }
    assert options["config"]["optim.learning_rate"] == 7e-6
    assert run.log.call_args_list == [
        mock.call({"start/score": 50.0, "dev/score": 50.0}, step=0),
        mock.call(ROW, step=1),
        mock.call({"dev/score": 51.0}, step=2),
    ]
    run.finish.assert_called_once()
    with started([WandB("mine")], training(tmp_path, step=2)):
        pass
    assert wandb.init.call_args.kwargs["id"] == "new"
    assert wandb.init.call_args.kwargs["resume"] == "allow"


def test_weights_and_biases_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[wandb\]' in the repository"):
        WandB()


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
    with started([Failing()], training(tmp_path)) as tell:
        tell.on_step(1, ROW)


def test_rows_are_json(tmp_path):
    with started([callbacks.MetricsFile()], training(tmp_path)) as tell:
        tell.on_evaluation(0, {"score": 49.0})
        tell.on_step(1, ROW)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 0, "start/score": 50.0, "dev/score": 49.0}, {"step": 1, **ROW}]
