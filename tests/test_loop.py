"""The checks before training, and the loop between steps. Whole runs are in test_resume.py."""

import json
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, VOCABULARY, config_of, random_batch, views_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.data.batches import BatchSource
from diffcse_jax.errors import DataError, UserError
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.run_folder.checkpoints import Checkpoints, TrainState
from diffcse_jax.run_folder.records import Measured, MetricsWriter, Record, read_metrics
from diffcse_jax.training import loop as loop_module
from diffcse_jax.training.loop import Run, loop
from diffcse_jax.training.networks import Built, StartingCheckpoint
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.step import make_optimizer
from diffcse_jax.training.train import with_fitting_batch

BASELINE = Record(0, "avg", {"score": 1.0, "guard": 1.0}, "score", "text")


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that runs as many steps as there are losses. It returns the run and its events in order."""
    events = []
    monkeypatch.setattr(loop_module, "SHORT_RUN", 0)  # short runs log as long ones do
    monkeypatch.setattr(loop_module, "show_baseline", lambda *_: None)
    monkeypatch.setattr(loop_module, "shard_batch", lambda batch, mesh: batch)
    write, ready = MetricsWriter.write, jax.block_until_ready
    monkeypatch.setattr(MetricsWriter, "write", lambda *row: events.append(f"row {row[1]}") or write(*row))

    def wait(metrics):
        if metrics:
            events.append(f"waited for {int(metrics['number'])}")
        return ready(metrics)

    monkeypatch.setattr(loop_module.jax, "block_until_ready", wait)

    def start(losses, scores=None, options=None, grad_norm=1.0, **train):
        def train_step(state, frozen, batch):
            step, loss = state.step + 1, jnp.float32(losses[int(state.step)])
            events.append(f"step {step}")
            bad_steps = state.bad_steps + (~jnp.isfinite(loss)).astype(jnp.int32)
            metrics = {"loss": loss, "loss_contrast": loss, "grad_norm": jnp.float32(grad_norm), "number": step}
            metrics |= {"bad_steps": bad_steps, "bad_gradient": jnp.int32(0)}
            return state._replace(step=step, params={"step": step}, bad_steps=bad_steps), metrics

        def measure(step):
            events.append(f"evaluated {step}")
            return Measured((scores or {}).get(step, BASELINE.dev), [])

        evaluated = {"every": 0} | (options or {})
        config = config_of({"train": {"steps": len(losses), **train}, "mesh": {"data": 1}, "eval": evaluated})
        checkpoints = mock.Mock(spec=Checkpoints)
        checkpoints.save.side_effect = lambda state, *_, eligible: events.append(f"saved {state.step}" + "!" * eligible)
        source = mock.MagicMock(spec=BatchSource)
        source.__len__.return_value = len(losses)
        batches = mock.MagicMock(spec=grain.DatasetIterator)
        batches.__next__.return_value = views_of(random_batch())
        run = Run(
            config,
            tmp_path,
            mesh=make_mesh(config),
            base=StartingCheckpoint("tiny", ENCODER, mock.Mock(spec=PreTrainedTokenizerFast), RecordedPooler()),
            built=Built(Networks(VOCABULARY, {}), {}, {}),
            optimizer=make_optimizer(config.optim, len(losses)),
            source=source,
            text="text",
            evaluation=mock.Mock(spec=DevEvaluation, metric="score", drift_metric="guard", measure=measure),
            sentences=lambda step: [f"sentence of {step}"],
            model_of=lambda params: int(params["step"]),
        )
        state = TrainState(jnp.int32(0), {"step": jnp.int32(0)}, (), jnp.int32(0))
        with jax.debug_nans(False):
            loop(run, BASELINE, checkpoints, train_step, state, {}, batches)
        return run, events

    return start


def rows_of(workdir) -> list[dict]:
    return [row for row in read_metrics(workdir) if "loss" in row]


def saved(events) -> str:
    return " ".join(event.removeprefix("saved ") for event in events if event.startswith("saved"))


def test_a_row_is_read_while_the_next_step_runs(start, tmp_path):
    """At most two steps are in flight: before a third one starts, the first one has ended."""
    _, events = start([5.0, 4.0, 3.0, 2.0, 1.0], log_every=2)
    expected = (
        "step 1, step 2, waited for 1, row 1, step 3, waited for 2, row 2, step 4, waited for 3, step 5, waited for 4, "
        "row 4, row 5, evaluated 5, row 5, saved 5!"
    )
    assert events == expected.split(", ")
    assert [(row["step"], row["loss"]) for row in rows_of(tmp_path)] == [(1, 5.0), (2, 4.0), (4, 2.0), (5, 1.0)]


def test_rates_are_those_of_the_device_at_every_row_but_the_first(start, tmp_path, monkeypatch):
    """Step N ends after N seconds, and the clock shows when the loop last waited for a step."""
    clock, read = mock.Mock(**{"perf_counter.return_value": 0}), loop_module._numbers

    def wait(metrics):
        clock.perf_counter.return_value = max(clock.perf_counter.return_value, int(metrics.get("number", 0)))
        return metrics

    monkeypatch.setattr(loop_module, "time", clock)
    monkeypatch.setattr(loop_module.jax, "block_until_ready", wait)
    monkeypatch.setattr(loop_module, "_numbers", lambda metrics: read(wait(metrics)))
    start([1.0] * 7, options={"every": 3}, log_every=2, batch_size=32)
    rates = {row["step"]: row.get("sentences_per_second") for row in rows_of(tmp_path)}
    assert rates == {1: None, 2: 32, 3: 32, 4: 32, 6: 32, 7: 32}


def test_a_short_run_logs_every_step_and_warns_once_of_a_gradient_of_0(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop_module, "SHORT_RUN", 100)
    start([5.0, 4.0, 3.0], log_every=10, grad_norm=0.0)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err.count("warning: the gradient is 0 at step 1, so nothing is learned") == 1


@pytest.mark.parametrize(
    ("options", "last", "expected"),
    [
        ({}, 6, "1! 2! 3! 4! 5! 6!"),
        ({"patience": 2}, 4, "1! 2! 3! 4!"),
        ({"guard": True, "max_drop": 0.5}, 3, "1! 2! 3"),
        ({"guard": True, "max_drop": 0.5, "interpolate": 5}, 6, "1! 2! 3! 4! 5! 6!"),
    ],
)
def test_training_ends_early_and_stays_ended(options, last, expected, start):
    scores = {step: {"score": min(step, 2.0), "guard": 0.5 if step < 3 else 0.4} for step in range(1, 7)}
    run, events = start([1.0] * 6, scores, {"every": 1, **options})
    assert saved(events) == expected
    as_a_resumed_run_sees_it = [run.ends_at(step, BASELINE) for step in range(last + 1)]
    assert as_a_resumed_run_sees_it == [False] * last + [True]


@pytest.mark.parametrize(("log_every", "seen_at"), [(2, 4), (10, 5)])
def test_too_many_losses_that_are_no_numbers_end_the_run_before_anything_is_saved(start, tmp_path, log_every, seen_at):
    message = (
        rf"steps were skipped so far.*loss_contrast is nan at step {seen_at}.*more than train\.max_bad_steps=2.*"
        rf"At step {seen_at} the loss is nan and the gradient norm 1\.0\. The last checkpoint is kept"
    )
    with pytest.raises(UserError, match=message):
        start([5.0] + [float("nan")] * 4, log_every=log_every, max_bad_steps=2)
    assert [row["step"] for row in read_metrics(tmp_path) if "dev/score" in row] == []


def test_skipped_steps_are_reported_and_their_sentences_written(start, tmp_path, capsys):
    nan = float("nan")
    _, events = start([5.0, nan, 3.0, nan, 1.0, 1.0], log_every=3)
    assert saved(events) == "6!"
    first, second = (line for line in capsys.readouterr().err.splitlines() if "skipped so far" in line)
    assert "1 step was skipped so far because" in first
    assert "loss_contrast is nan at step 2" in first
    assert "2 steps were skipped so far" in second
    found = [json.loads(line) for line in (tmp_path / "report/bad_steps.jsonl").read_text().splitlines()]
    assert [(each["step"], each["sentences"]) for each in found] == [(2, ["sentence of 2"]), (4, ["sentence of 4"])]
    rows = rows_of(tmp_path)
    assert [(row["step"], row["bad_steps"]) for row in rows] == [(1, 0), (3, 1), (6, 2)]
    rates = [row["learning_rate"] for row in rows]
    np.testing.assert_allclose(rates, [7e-6, 7e-6 * 5 / 6, 7e-6 * 3 / 6])  # of the updates made


@pytest.mark.parametrize(
    ("examples", "devices", "chunk_size", "expected"), [(300, 1, 0, 256), (101, 8, 0, 96), (201, 1, 64, 192)]
)
def test_few_texts_shrink_the_batch(examples, devices, chunk_size, expected, capsys):
    config = config_of({"train": {"batch_size": 256, "chunk_size": chunk_size}, "mesh": {"data": devices}})
    with pytest.raises(DataError, match="gives 1 training example, too few"):
        with_fitting_batch(config, 1, make_mesh(config))
    fitting = with_fitting_batch(config, examples, make_mesh(config))
    assert fitting.train.batch_size == expected
    make_mesh(fitting)  # splits evenly
    assert fitting.train.chunks <= config.train.chunks
    assert (f"Training with batches of {expected}" in capsys.readouterr().err) == (expected != 256)
