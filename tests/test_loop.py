"""The loop between steps. Whole runs are in test_cli.py and test_resume.py."""

import json
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import pytest
from tiny_networks import ENCODER, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.errors import UserError
from diffcse_jax.storage.checkpoint import Checkpoints, TrainState
from diffcse_jax.storage.selection import Measured, Record
from diffcse_jax.training import loop as loop_module
from diffcse_jax.training.loop import Run, loop
from diffcse_jax.training.start import Start


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """The events, in order."""
    events = []
    monkeypatch.setattr(
        loop_module, "show_baseline", lambda run, state, write: events.append(f"evaluated {state.step}")
    )
    monkeypatch.setattr(
        loop_module, "_encoder", lambda run, state: events.append(f"evaluated {state.step}") or int(state.step)
    )
    write = loop_module.MetricsWriter.write
    monkeypatch.setattr(loop_module.MetricsWriter, "write", lambda *row: events.append(f"row {row[1]}") or write(*row))
    return events


def start(events, tmp_path, losses, scores=None, options=None, **train) -> Run:
    """Runs as many steps as there are losses; `scores` are those of evaluations, by step."""

    def train_step(state, batch):
        events.append(f"step {state.step + 1}")
        metrics = {"loss": jnp.float32(losses[int(state.step)]), "grad_norm": jnp.float32(1.0)}
        return state._replace(step=state.step + 1), metrics

    config = config_of({"train": {"steps": len(losses), **train}, "eval": {"every": 0} | (options or {})})
    checkpoints = mock.Mock(spec=Checkpoints, latest_step=None)
    checkpoints.save.side_effect = lambda state, *_, eligible: events.append(f"saved {state.step}" + "!" * eligible)
    evaluation = mock.Mock(metric="score", guard_metric="guard")
    evaluation.measure.side_effect = lambda step: Measured((scores or {}).get(step, {"score": 1.0, "guard": 1.0}), [])
    baseline = Record(0, "avg", {"score": 1.0, "guard": 1.0}, "score", "text")
    begun = Start("tiny", ENCODER, mock.Mock(spec=PreTrainedTokenizerFast), None)
    run = Run(config, tmp_path, len(losses), evaluation, checkpoints, begun, baseline)
    loop(run, train_step, TrainState(jnp.int32(0), {}, {}, ()), mock.MagicMock(spec=grain.DatasetIterator))
    return run


def test_a_row_is_read_when_the_next_step_is_on_its_way(events, tmp_path):
    start(events, tmp_path, [5.0, 4.0, 3.0, 2.0, 1.0], log_every=2)
    expected = (
        "evaluated 0, step 1, step 2, row 1, step 3, row 2, step 4, step 5, row 4, row 5, evaluated 5, row 5, saved 5!"
    )
    assert events == expected.split(", ")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(1, 5.0), (2, 4.0), (4, 2.0), (5, 1.0)]


@pytest.mark.parametrize(
    ("options", "last", "saved"),
    [
        ({}, 6, "saved 1! saved 2! saved 3! saved 4! saved 5! saved 6!"),
        ({"patience": 2}, 4, "saved 1! saved 2! saved 3! saved 4!"),
        ({"guard": True, "max_drop": 0.5}, 3, "saved 1! saved 2! saved 3"),
        (
            {"guard": True, "max_drop": 0.5, "interpolate": 5},
            6,
            "saved 1! saved 2! saved 3! saved 4! saved 5! saved 6!",
        ),
    ],
)
def test_training_ends_early_and_stays_ended(options, last, saved, events, tmp_path):
    scores = {step: {"score": min(step, 2.0), "guard": 0.5 if step < 3 else 0.4} for step in range(1, 7)}
    run = start(events, tmp_path, [1.0] * 6, scores, {"every": 1, **options})
    assert " ".join(event for event in events if event.startswith("saved")) == saved
    assert events[-1] == saved.rpartition(" saved ")[2].join(("saved ", ""))
    assert [run.ends_at(step) for step in range(last + 1)] == [False] * last + [True]  # as a resumed run sees it


@pytest.mark.parametrize(("log_every", "seen_at"), [(2, 2), (10, 4)])
def test_a_loss_that_is_no_number_ends_the_run_before_anything_is_saved(events, tmp_path, log_every, seen_at):
    losses = [5.0] + [float("nan")] * 3
    with jax.debug_nans(False), pytest.raises(UserError, match=rf"loss nan and gradient norm 1\.0 at step {seen_at}"):
        start(events, tmp_path, losses, log_every=log_every)
    assert "row 1" in events
    assert not [event for event in events if event.startswith("saved")]
