"""The loop between steps. Whole runs are in test_cli.py and test_resume.py."""

import json
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, VOCABULARY, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.config import DataConfig
from diffcse_jax.data.batches import Batches, BatchSource, Shards
from diffcse_jax.data.sampling import Neighbours
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import build_or_open
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.errors import UserError
from diffcse_jax.models.forward import Networks
from diffcse_jax.run_folder.checkpoints import Checkpoints, TrainState
from diffcse_jax.run_folder.records import Measured, MetricsWriter, Record
from diffcse_jax.training import loop as loop_module
from diffcse_jax.training.loop import Run, loop
from diffcse_jax.training.networks import Built, StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.sharding import make_mesh
from diffcse_jax.training.train import _sentences_of_step

BASELINE = Record(0, "avg", {"score": 1.0, "guard": 1.0}, "score", "text")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """The events, in order. Runs are as short as can be, and log as long ones do."""
    events = []
    monkeypatch.setattr(loop_module, "SHORT_RUN", 0)
    monkeypatch.setattr(loop_module, "show_baseline", lambda *_: events.append("evaluated 0"))
    write = MetricsWriter.write
    monkeypatch.setattr(MetricsWriter, "write", lambda *row: events.append(f"row {row[1]}") or write(*row))
    return events


def start(events, tmp_path, losses, scores=None, options=None, grad_norm=1.0, **train) -> Run:
    """Runs as many steps as there are losses; `scores` are those of evaluations, by step."""

    def train_step(state, batch):
        events.append(f"step {state.step + 1}")
        loss = jnp.float32(losses[int(state.step)])
        step, bad_steps = state.step + 1, state.bad_steps + (~jnp.isfinite(loss)).astype(jnp.int32)
        state = state._replace(step=step, params={"step": step}, bad_steps=bad_steps)
        metrics = {"loss": loss, "loss_contrast": loss, "grad_norm": jnp.float32(grad_norm)}
        return state, metrics | {"bad_steps": state.bad_steps, "bad_gradient": jnp.int32(0)}

    evaluated = {"every": 0} | (options or {})
    config = config_of({"train": {"steps": len(losses), **train}, "mesh": {"data": 1}, "eval": evaluated})
    checkpoints = mock.Mock(spec=Checkpoints, latest_step=None)
    checkpoints.save.side_effect = lambda state, *_, eligible: events.append(f"saved {state.step}" + "!" * eligible)
    evaluation = mock.Mock(metric="score", drift_metric="guard")

    def measure(step):
        events.append(f"evaluated {step}")
        return Measured((scores or {}).get(step, {"score": 1.0, "guard": 1.0}), [])

    evaluation.measure.side_effect = measure
    sentences_of = lambda step: [f"sentence of {step}"]  # noqa: E731
    begun = StartingCheckpoint("tiny", ENCODER, mock.Mock(spec=PreTrainedTokenizerFast), None)
    source = mock.MagicMock(spec=Batches)
    source.__len__.return_value = len(losses)
    built = Built(Networks(VOCABULARY, {}), {}, {})
    run = Run(
        config,
        tmp_path,
        make_mesh(config),
        begun,
        built,
        make_optimizer(config.optim, len(losses)),
        source,
        "text",
        evaluation,
        sentences_of,
        model=lambda params: int(params["step"]),
    )
    state = TrainState(jnp.int32(0), {"step": jnp.int32(0)}, (), jnp.int32(0))
    loop(run, BASELINE, checkpoints, train_step, state, mock.MagicMock(spec=grain.DatasetIterator))
    return run


def test_a_row_is_read_when_the_next_step_is_on_its_way(events, tmp_path):
    start(events, tmp_path, [5.0, 4.0, 3.0, 2.0, 1.0], log_every=2)
    expected = (
        "evaluated 0, step 1, step 2, row 1, step 3, row 2, step 4, step 5, row 4, row 5, evaluated 5, row 5, saved 5!"
    )
    assert events == expected.split(", ")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(1, 5.0), (2, 4.0), (4, 2.0), (5, 1.0)]


def test_at_most_two_steps_are_in_flight(events, tmp_path, monkeypatch):
    ready = jax.block_until_ready

    def wait(metrics):
        events.append(f"waited for {int(metrics['loss'])}" if metrics else "waited for nothing")
        return ready(metrics)

    monkeypatch.setattr(loop_module.jax, "block_until_ready", wait)
    start(events, tmp_path, [1.0, 2.0, 3.0], log_every=10)
    steps = [event for event in events if event.startswith(("step", "waited"))]
    assert steps == ["step 1", "waited for nothing", "step 2", "waited for 1", "step 3", "waited for 2"]


def test_a_short_run_logs_every_step(events, tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "SHORT_RUN", 100)
    start(events, tmp_path, [5.0, 4.0, 3.0], log_every=10)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


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
    as_a_resumed_run_sees_it = [run.ends_at(step, BASELINE) for step in range(last + 1)]
    assert as_a_resumed_run_sees_it == [False] * last + [True]


@pytest.mark.parametrize(("log_every", "seen_at"), [(2, 4), (10, 5)])
def test_too_many_losses_that_are_no_numbers_end_the_run_before_anything_is_saved(events, tmp_path, log_every, seen_at):
    losses = [5.0] + [float("nan")] * 4
    message = (
        rf"steps were skipped so far.*loss_contrast is nan at step {seen_at}.*more than train\.max_bad_steps=2.*"
        rf"At step {seen_at} the loss is nan and the gradient norm 1\.0\. The last checkpoint, of step None, is kept"
    )
    with jax.debug_nans(False), pytest.raises(UserError, match=message):
        start(events, tmp_path, losses, log_every=log_every, max_bad_steps=2)
    assert "row 1" in events
    assert not [event for event in events if event.startswith("saved")]


def test_bad_steps_that_a_run_bears_are_told_and_their_sentences_written(events, tmp_path, capsys):
    nan = float("nan")
    with jax.debug_nans(False):
        start(events, tmp_path, [5.0, nan, 3.0, nan, 1.0, 1.0], log_every=3)
    assert events[-1] == "saved 6!"
    warnings = [line for line in capsys.readouterr().err.splitlines() if "skipped so far" in line]
    assert len(warnings) == 2
    assert "1 step was skipped so far because" in warnings[0]
    assert "loss_contrast is nan at step 2" in warnings[0]
    assert "2 steps were skipped so far" in warnings[1]
    found = [json.loads(line) for line in (tmp_path / "report/bad_steps.jsonl").read_text().splitlines()]
    assert [(each["step"], each["sentences"]) for each in found] == [(2, ["sentence of 2"]), (4, ["sentence of 4"])]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert [(row["step"], row["bad_steps"]) for row in rows] == [(1, 0), (3, 1), (6, 2)]
    rates = [row["learning_rate"] for row in rows]
    np.testing.assert_allclose(rates, [7e-6, 7e-6 * 5 / 6, 7e-6 * 3 / 6])  # of the updates made


def test_a_gradient_of_nothing_is_told_once(events, tmp_path, capsys):
    start(events, tmp_path, [1.0] * 4, grad_norm=0.0, log_every=1)
    assert capsys.readouterr().err.count("warning: the gradient is 0 at step 1, so nothing is learned") == 1


@pytest.mark.parametrize("documents", ["none", "blank_lines"])
def test_the_sentences_of_a_batch_have_their_lines(documents, tmp_path, minilm_dir):
    lines = ["" if row % 4 == 0 else f"number {row}" for row in range(40)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    corpus = open_corpus(DataConfig(train_file=str(tmp_path / "text.txt"), documents=documents))
    tokenizer = load_tokenizer(minilm_dir)
    store = build_or_open(corpus, tokenizer, 16, tmp_path / "cache")
    examples = store if documents == "none" else Neighbours(store)
    source = BatchSource(examples, batch_size=8, steps=4, seed=0, pad_token_id=0, shards=Shards(range(1, 2), 2))
    for step in (1, 4):
        found = _sentences_of_step(corpus, source, tokenizer, step)
        assert [lines[each["line"] - 1] for each in found] == [each["sentence"] for each in found]
        assert len({each["line"] for each in found}) == 4
    (tmp_path / "text.txt").unlink()
    assert _sentences_of_step(corpus, source, tokenizer, 1)[0]["line"] is None
