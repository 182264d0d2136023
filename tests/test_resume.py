"""A killed run goes on where it stopped and ends where an uninterrupted one ends, bit for bit."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_run import environment, overrides, run_settings

from diffcse_jax import api
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.errors import DiskError, UserError
from diffcse_jax.run_folder.records import MetricsWriter, read_metrics

REPOSITORY = Path(__file__).parents[1]
STEPS = 40
EVERY = 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> dict[str, Any]:
    """What the run has other than `configs/diffcse_minilm.py`."""
    return run_settings(
        tmp_path_factory.mktemp("resume"),
        minilm_dir,
        train={"steps": STEPS},
        eval={"every": EVERY},
        optim={"learning_rate": 1e-3},
    )


@pytest.fixture(scope="module")
def command(settings: dict[str, Any]) -> list[str]:
    """`python train.py` of the run; it lacks only its workdir."""
    return [sys.executable, "train.py", "--config", "configs/diffcse_minilm.py", *overrides(settings)]


@pytest.fixture(scope="module")
def uninterrupted(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    run(command, workdir)
    return workdir


@pytest.fixture
def go_on(settings: dict[str, Any]) -> Callable[..., None]:
    """`train.py` in this process, by keys that differ from the run's: a refusal needs no process of its own."""

    def go_on(workdir: Path, **groups: dict[str, Any]) -> None:
        config = shipped_config("diffcse_minilm")
        config.update_from_flattened_dict(settings)
        config.update(groups)
        api.run(Config.from_dict(config.to_dict()), workdir)

    return go_on


@pytest.mark.slow
def test_interrupted_and_killed_run_ends_like_an_uninterrupted_one(
    command: list[str], uninterrupted: Path, tmp_path: Path
):
    process = start(command, tmp_path)
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "run the same command again to resume" in output
    saved = steps_of(tmp_path)[-1]
    assert saved < STEPS

    process = start(command, tmp_path)
    wait_for_checkpoint(tmp_path, process, after=saved)
    process.kill()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == -signal.SIGKILL, output
    assert f"resumed at step {saved} of {STEPS}" in output
    assert saved < steps_of(tmp_path)[-1] < STEPS

    output = run(command, tmp_path)

    assert "resumed at step" in output
    assert steps_of(tmp_path) == steps_of(uninterrupted)
    for item in ("params", "opt_state"):
        assert_same_arrays(final(tmp_path, item), final(uninterrupted, item))
    assert without_times(read_metrics(tmp_path)) == without_times(read_metrics(uninterrupted))


@pytest.mark.slow
def test_finished_run_is_not_trained_again(go_on: Callable[..., None], uninterrupted: Path, capfd):
    before = (uninterrupted / "metrics.jsonl").read_text()
    go_on(uninterrupted)
    assert f"resumed at step {STEPS} of {STEPS}" in capfd.readouterr().err
    assert (uninterrupted / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_another_text_is_refused_in_the_same_workdir(
    go_on: Callable[..., None], settings: dict[str, Any], uninterrupted: Path
):
    path = Path(settings["data.train_file"])
    kept = path.read_text()
    path.write_text("".join(f"Another sentence, number {i} of them.\n" for i in range(60)))
    try:
        with pytest.raises(UserError, match="has changed since the run in"):
            go_on(uninterrupted)
    finally:
        path.write_text(kept)


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_neither_evaluated_nor_saved(command: list[str], tmp_path: Path):
    endless = overrides(
        {"optim.learning_rate": 1e30, "optim.clip_norm": 0.0, "train.log_every": 1000, "train.max_bad_steps": 2}
    )
    process = start([*command, *endless], tmp_path)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    assert re.search(r"[Aa]t step [2-5] .* The last checkpoint, of step None, is kept", output)
    assert not any(row["step"] for row in read_metrics(tmp_path) if "dev/halves_retrieval" in row)


@pytest.mark.slow
def test_another_configuration_is_refused_in_the_same_workdir(go_on: Callable[..., None], uninterrupted: Path):
    with pytest.raises(UserError, match=r"optim\.learning_rate: was 0\.001, now 0\.5"):
        go_on(uninterrupted, optim={"learning_rate": 0.5})


def test_metrics_after_the_checkpoint_and_a_cut_off_row_are_dropped(tmp_path: Path):
    rows = [{"step": step, "loss": float(step)} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo')
    writer = MetricsWriter(tmp_path, resumed_at=3)
    writer.write(4, {"loss": 40.0})
    assert read_metrics(tmp_path) == [*rows[:3], {"step": 4, "loss": 40.0}]


def test_a_disk_that_is_full_costs_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = "".join(json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(rows)
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DiskError, match="No space left"):
        MetricsWriter(tmp_path, resumed_at=3)
    assert (tmp_path / "metrics.jsonl").read_text() == rows


def run(command: list[str], workdir: Path) -> str:
    process = start(command, workdir)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def start(command: list[str], workdir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [*command, "--workdir", str(workdir)],
        cwd=REPOSITORY, env=environment(workdir.parent / "xla"), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_checkpoint(workdir: Path, process: subprocess.Popen, after: int = 0) -> None:
    """Waits until a dev evaluation of a later step is saved."""
    deadline = time.monotonic() + 240
    saved = workdir / "checkpoints" / str(EVERY * (after // EVERY + 1))
    while not saved.is_dir():
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
