"""A killed run resumes where it stopped and ends where an uninterrupted one ends, bit for bit."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_run import environment, metrics_file, overrides, run_settings

from diffcse_jax import api
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.errors import DiskError, UserError
from diffcse_jax.run_folder.records import read_metrics
from diffcse_jax.run_folder.start import read_config

REPOSITORY = Path(__file__).parents[1]
STEPS = 20
EVERY = 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> dict[str, Any]:
    """What differs from `configs/diffcse_minilm.py`."""
    groups = {"train": {"steps": STEPS}, "eval": {"every": EVERY}, "optim": {"learning_rate": 1e-3}}
    return run_settings(tmp_path_factory.mktemp("resume"), minilm_dir, **groups)


@pytest.fixture(scope="module")
def command(settings: dict[str, Any]) -> list[str]:
    """`python train.py` of the run; it lacks only its workdir."""
    return [
        sys.executable,
        "train.py",
        "--config",
        "configs/diffcse_minilm.py",
        *overrides(settings),
    ]


@pytest.fixture(scope="module")
def uninterrupted(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    run(command, workdir)
    return workdir


@pytest.fixture
def resume(settings: dict[str, Any]) -> Callable[..., None]:
    """The same run in this process, with other values of some keys: a refusal needs no process of its own."""

    def resume(workdir: Path, **groups: dict[str, Any]) -> None:
        config = shipped_config("diffcse_minilm")
        config.update_from_flattened_dict(settings)
        config.update(groups)
        api.run(Config.from_dict(config.to_dict()), workdir)

    return resume


@pytest.mark.slow
def test_a_batch_that_shrank_is_recorded_and_resumes(resume: Callable[..., None], tmp_path: Path):
    for _ in range(2):
        resume(tmp_path, train={"steps": 2, "batch_size": 104}, difference={"weight": 0.0})
    assert read_config(tmp_path).train.batch_size == 56  # of 60 sentences, on 8 devices
    assert "--config.train.batch_size=56" in (tmp_path / "export/README.md").read_text()


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
    arrays, expected = final(tmp_path), final(uninterrupted)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert without_times(read_metrics(tmp_path)) == without_times(read_metrics(uninterrupted))


@pytest.mark.slow
def test_finished_run_is_not_trained_again_and_refuses_another_configuration_or_text(
    resume: Callable[..., None], settings: dict[str, Any], uninterrupted: Path, capfd
):
    before = (uninterrupted / "metrics.jsonl").read_text()
    resume(uninterrupted)
    assert f"resumed at step {STEPS} of {STEPS}" in capfd.readouterr().err
    assert (uninterrupted / "metrics.jsonl").read_text() == before
    with pytest.raises(UserError, match=r"optim\.learning_rate: was 0\.001, now 0\.5"):
        resume(uninterrupted, optim={"learning_rate": 0.5})
    text = Path(settings["data.train_file"])
    kept = text.read_text()
    text.write_text("".join(f"Another sentence, number {i} of them.\n" for i in range(60)))
    try:
        with pytest.raises(UserError, match="has changed since the run in"):
            resume(uninterrupted)
    finally:
        text.write_text(kept)


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_neither_evaluated_nor_saved(
    resume: Callable[..., None], tmp_path: Path
):
    """The first update makes the weights huge, so that steps 2, 3 and 4 are skipped. Short runs log every step."""
    message = (
        "3 steps were skipped .* at step 4 .* At step 4 the loss is .* The last checkpoint is kept"
    )
    groups = {"optim": {"learning_rate": 1e30, "clip_norm": 0.0}, "difference": {"weight": 0.0}}
    with jax.debug_nans(False), pytest.raises(UserError, match=message):
        resume(tmp_path, **groups, train={"log_every": 1000, "max_bad_steps": 2})
    rows = read_metrics(tmp_path)
    assert [row["bad_steps"] for row in rows if "loss" in row] == [0]
    assert [row["step"] for row in rows if "dev/halves_retrieval" in row] == [0]


def test_a_disk_that_is_full_costs_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = "".join(json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(rows)
    monkeypatch.setattr(
        os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(DiskError, match="No space left"):
        metrics_file(tmp_path, resumed_at=3)
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


def final(workdir: Path) -> dict[str, np.ndarray]:
    """Return all arrays of the last checkpoint by their paths."""
    items = {item: ocp.args.StandardRestore() for item in ("params", "opt_state")}
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        assert manager.latest_step() == STEPS
        restored = manager.restore(STEPS, args=ocp.args.Composite(**items))
    leaves = jax.tree_util.tree_leaves_with_path({item: restored[item] for item in items})
    return {jax.tree_util.keystr(path): np.asarray(array) for path, array in leaves}


def without_times(rows: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in row.items() if name != "sentences_per_second"}
        for row in rows
    ]
