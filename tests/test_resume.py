"""A killed run goes on where it stopped and ends where an uninterrupted one ends, bit for bit."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_model import write_tiny_model

from diffcse_jax.training.metrics import MetricsWriter, read_metrics

REPOSITORY = Path(__file__).parents[1]
STEPS = 100
EVERY = 10


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> list[str]:
    """`python train.py` of a small DiffCSE run that lacks only its workdir."""
    folder = tmp_path_factory.mktemp("resume")
    model = write_tiny_model(folder / "model", minilm_dir)
    text = folder / "text.txt"
    text.write_text("".join(f"Sentence {i} has the number {i * i} and {i % 7} words more.\n" for i in range(60)))
    overrides = {
        "model.name_or_path": model, "generator.name_or_path": "", "generator.head_steps": 3,
        "generator.head_batch_size": 8, "data.train_file": text, "data.max_length": 16,
        "data.cache_dir": folder / "cache", "train.batch_size": 8, "train.steps": STEPS, "train.log_every": 1,
        "eval.every": EVERY, "eval.metric": "halves_retrieval", "optim.learning_rate": 1e-3,
    }  # fmt: skip
    arguments = [f"--config.{key}={value}" for key, value in overrides.items()]
    return [sys.executable, "train.py", "--config", "configs/diffcse_minilm.py", *arguments]


@pytest.fixture(scope="module")
def uninterrupted(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    run(command, workdir)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_run_ends_like_an_uninterrupted_one(
    number: signal.Signals, command: list[str], uninterrupted: Path, tmp_path: Path
):
    process = start(command, tmp_path)
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), output
    assert steps_of(tmp_path)[-1] < STEPS
    if number == signal.SIGINT:
        assert "the same command goes on from there" in output

    output = run(command, tmp_path)

    assert "resumed at step" in output
    assert steps_of(tmp_path) == steps_of(uninterrupted)
    for item in ("params", "opt_state", "batch_stats"):
        assert_same_arrays(final(tmp_path, item), final(uninterrupted, item))
    assert without_times(read_metrics(tmp_path)) == without_times(read_metrics(uninterrupted))


@pytest.mark.slow
def test_finished_run_is_not_trained_again(command: list[str], uninterrupted: Path):
    before = (uninterrupted / "metrics.jsonl").read_text()
    assert f"resumed at step {STEPS} of {STEPS}" in run(command, uninterrupted)
    assert (uninterrupted / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_another_text_is_refused_in_the_same_workdir(command: list[str], uninterrupted: Path, tmp_path: Path):
    text = tmp_path / "other.txt"
    text.write_text("".join(f"Another sentence, number {i} of them.\n" for i in range(60)))
    original = next(argument for argument in command if argument.startswith("--config.data.train_file="))
    path = Path(original.partition("=")[2])
    kept = path.read_text()
    path.write_text(text.read_text())
    try:
        process = start(command, uninterrupted)
        output = process.communicate(timeout=120)[0]
    finally:
        path.write_text(kept)
    assert process.returncode == 2
    assert "is not the one that the run in" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named(command: list[str], uninterrupted: Path, tmp_path: Path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / str(STEPS) / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    process = start(command, tmp_path / "run")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert f"cannot read the checkpoint {tmp_path}/run/checkpoints/{STEPS}" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_neither_evaluated_nor_saved(command: list[str], tmp_path: Path):
    overrides = ["--config.optim.learning_rate=1e30", "--config.optim.clip_norm=0.0", "--config.train.log_every=1000"]
    process = start([*command, *overrides], tmp_path)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert f"at step {EVERY}; the last checkpoint, of step None, is kept" in output
    assert not any(row["step"] for row in read_metrics(tmp_path) if "dev/halves_retrieval" in row)


@pytest.mark.slow
def test_another_configuration_is_refused_in_the_same_workdir(command: list[str], uninterrupted: Path):
    process = start([*command, "--config.optim.learning_rate=0.5"], uninterrupted)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert "optim.learning_rate: 0.001 then, 0.5 now" in output
    assert "Traceback" not in output


def test_metrics_after_the_checkpoint_and_a_cut_off_row_are_dropped(tmp_path: Path):
    rows = [{"step": step, "loss": float(step)} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo')
    writer = MetricsWriter(tmp_path, resumed_at=3)
    writer.write(4, {"loss": 40.0})
    writer.close()
    assert read_metrics(tmp_path) == [*rows[:3], {"step": 4, "loss": 40.0}]


def test_a_disk_that_is_full_costs_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = "".join(json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(rows)
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(tmp_path, resumed_at=3)
    assert (tmp_path / "metrics.jsonl").read_text() == rows


def run(command: list[str], workdir: Path) -> str:
    process = start(command, workdir)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def start(command: list[str], workdir: Path) -> subprocess.Popen:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = os.environ | cache | {"PYTHONUNBUFFERED": "1", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [*command, "--workdir", str(workdir)],
        cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_checkpoint(workdir: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not (workdir / "checkpoints" / str(EVERY)).is_dir():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "training did not come that far"
        time.sleep(0.01)


def steps_of(workdir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(workdir) if "loss" in row]


def final(workdir: Path, item: str) -> dict:
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        assert manager.latest_step() == STEPS
        return manager.restore(STEPS, args=ocp.args.Composite(**{item: ocp.args.StandardRestore()}))[item]


def assert_same_arrays(left: dict, right: dict) -> None:
    left, right = (dict(flat(tree)) for tree in (left, right))
    assert left.keys() == right.keys()
    assert len(left) > 0
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def flat(tree, prefix=""):
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(value, f"{prefix}/{key}")
    elif tree is not None:
        yield prefix, np.asarray(tree)


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "sentences_per_second"} for row in rows]
