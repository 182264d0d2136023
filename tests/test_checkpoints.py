"""Which checkpoints are kept, which is the best one, and how damage is detected.

Whole runs are in test_resume.py.
"""

import dataclasses
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import hf_config_of
from tiny_networks import ENCODER, SIMCSE, config_of
from tiny_run import full_disk
from transformers import PreTrainedTokenizerFast

from diffcse_jax.errors import CheckpointError, ConfigError, DiskError
from diffcse_jax.models import layers
from diffcse_jax.run_folder.checkpoints import (
    Checkpoints,
    array_digests,
    read_arrays,
    read_encoder,
)
from diffcse_jax.run_folder.records import Measured, Record
from diffcse_jax.run_folder.start import open_run
from diffcse_jax.run_folder.state import TrainState

CONFIG = config_of(SIMCSE, {"model": {"projector": "none", "pooler": "avg"}})
HF_CONFIG = hf_config_of("bert", 1) | {"vocab_size": 60, "max_position_embeddings": 16}


def opened(workdir: Path, **others: str) -> Checkpoints:
    return Checkpoints(
        workdir, dataclasses.replace(Record(0, "avg", {}, "stsb", "text", dev_text="dev"), **others)
    )


def state_of(step: int) -> TrainState:
    params = {name: jnp.full_like(array, step) for name, array in ENCODER.transformer.items()}
    moments = ({}, {"count": jnp.int32(step), "mu": {"encoder.bias": jnp.linspace(0.0, step, 300)}})
    return TrainState(jnp.int32(step), layers.prefixed(params, "encoder"), moments, jnp.int32(step))


def saved(workdir: Path, scores: dict[int, float | None]) -> Path:
    """The workdir of a run that was started anew for every one of its checkpoints."""
    encoder = dataclasses.replace(ENCODER, hf_config=HF_CONFIG)
    open_run(workdir, CONFIG, encoder, mock.Mock(spec=PreTrainedTokenizerFast), None)
    for step, score in scores.items():
        with opened(workdir) as checkpoints:
            checkpoints.save(
                state_of(step),
                {"next": step},
                Measured({} if score is None else {"stsb": score}, []),
            )
    return workdir


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("two"), {1: 80.0, 2: 79.0})


def kept(workdir: Path) -> set[int]:
    return {int(folder.name) for folder in (workdir / "checkpoints").iterdir()}


def test_of_equal_scores_the_earliest_checkpoint_is_the_best(tmp_path):
    saved(tmp_path, {1: math.nan, 2: 79.0, 3: 80.0, 4: 80.0, 5: math.nan, 6: None, 7: 79.5})
    assert kept(tmp_path) == {3, 6, 7}
    encoder = read_encoder(tmp_path)
    assert encoder.step == encoder.checkpoint.transformer["embeddings.word.embedding"][0, 0] == 3


def test_within_one_process_an_ineligible_checkpoint_is_not_the_best(tmp_path):
    with opened(tmp_path) as checkpoints:
        for step in (1, 2, 3, 4, 5):
            checkpoints.save(
                state_of(step), {}, Measured({"stsb": 80.0 + (step > 1)}, []), eligible=step < 4
            )
    assert kept(tmp_path) == {2, 4, 5}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"text": "other"}, r"the text of data\.train_file or finetune\.tasks, or its tokenizer,"),
        (
            {"dev_text": "shorter"},
            r"the data that stsb is measured on \(eval\.pairs_file, eval\.data_dir\)",
        ),
        (
            {"dev_metric": "mrr"},
            r"the metric that chooses the best checkpoint \(now mrr, was stsb\)",
        ),
    ],
)
def test_scores_on_other_data_are_not_compared(changed, what, two_checkpoints):
    with (
        pytest.raises(ConfigError, match=f"{what} has changed since"),
        opened(two_checkpoints, **changed) as opened_,
    ):
        opened_.restore(state_of(0))


def flip_bits(step: Path, item: str) -> None:
    """Flips a bit in the middle of every file with data of an item's arrays."""
    data = [file for file in (step / item).rglob("d/*") if file.stat().st_size > 300]
    assert data
    for file in data:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        file.write_bytes(content)


def improve_score(record: Path) -> None:
    record.write_text(record.read_text().replace("79.0", "99.0"))


DAMAGE = {
    "bits of parameters": lambda step: flip_bits(step, "params"),
    "bits of moments": lambda step: flip_bits(step, "opt_state"),
    "a score": lambda step: improve_score(step / "record/metadata"),
    "no record": lambda step: shutil.rmtree(step / "record"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_training_resumes_from_the_newest_intact_checkpoint(
    damage, two_checkpoints, tmp_path, capsys
):
    workdir = shutil.copytree(two_checkpoints, tmp_path / "run")
    DAMAGE[damage](workdir / "checkpoints/2")
    with opened(workdir) as checkpoints:
        state, data_state = checkpoints.restore(state_of(0))
        # training comes there again
        checkpoints.save(state_of(2), {"next": 2}, Measured({"stsb": 79.0}, []))
    assert data_state == {"next": 1}
    jax.tree.map(np.testing.assert_array_equal, state, state_of(1))
    warning = capsys.readouterr().err
    assert f"warning: cannot read the checkpoint {workdir}/checkpoints/2 (" in warning
    assert f"Moved it to {workdir}/damaged/2. Training resumes from step 1" in warning
    assert kept(workdir) == {1, 2}
    with opened(workdir) as checkpoints:
        assert checkpoints.restore(state_of(0))[1] == {"next": 2}
    assert not capsys.readouterr().err


def test_moments_come_back_with_the_rows_that_the_devices_need(two_checkpoints, tmp_path):
    def padded(step: int, rows: int) -> TrainState:
        state = state_of(step)
        mu = state.opt_state[1]["mu"]
        mu["encoder.bias"] = jnp.pad(mu["encoder.bias"], (0, rows - 300))
        return state

    workdir = shutil.copytree(two_checkpoints, tmp_path / "run")
    with opened(workdir) as checkpoints:
        state, _ = checkpoints.restore(padded(0, 304))
        jax.tree.map(np.testing.assert_array_equal, state, padded(2, 304))
        checkpoints.save(padded(3, 304), {}, Measured({"stsb": 70.0}, []))
    with opened(workdir) as checkpoints:
        for rows in (300, 302):
            state, _ = checkpoints.restore(padded(0, rows))
            jax.tree.map(np.testing.assert_array_equal, state, padded(3, rows))


def test_importing_the_package_leaves_logging_and_hooks_alone():
    """Defects of an earlier version: the host application's absl errors were silenced."""
    program = """
import logging, sys
before = sys.unraisablehook
import absl.logging, orbax.checkpoint, huggingface_hub, transformers
names = ("", "absl", "huggingface_hub", "transformers", "jax", "orbax")
def state():
    return [(n, logging.getLogger(n).level, logging.getLogger(n).handlers, logging.getLogger(n).filters) for n in names]
earlier = state()
from diffcse_jax import SentenceEncoder, train
import diffcse_jax.run_folder.checkpoints, diffcse_jax.export, diffcse_jax.training.train
assert state() == earlier, (earlier, state())
assert sys.unraisablehook is before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_using_checkpoints_leaves_logging_and_hooks_alone(two_checkpoints, monkeypatch):
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", before := lambda unraisable: None)
    with opened(two_checkpoints):
        assert logging.getLogger("absl").filters
    read_arrays(two_checkpoints / "checkpoints" / "1", "params")
    assert sys.unraisablehook is before
    assert not logging.getLogger("absl").filters


def test_changed_metrics_are_reported(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 0.25}\n')
    saved(tmp_path, {1: 80.0})
    with metrics.open("a") as file:
        file.write('{"step": 2, "lo')  # what follows the checkpoint may be anything
    for content in (metrics.read_text(), metrics.read_text().replace("0.25", "0.75"), ""):
        metrics.write_text(content)
        with opened(tmp_path) as checkpoints:
            checkpoints.restore(state_of(0))
        told = f"warning: {metrics} is damaged: rows up to step 1 have changed"
        assert (told in capsys.readouterr().err) == ("0.25" not in content)


def test_a_checkpoint_loses_its_name_before_it_is_removed(tmp_path, monkeypatch):
    """Killed while it is removed, a run leaves nothing that looks like a checkpoint."""
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        saved(tmp_path, {1: 79.0, 2: 80.0, 3: 80.0})
    assert {folder.name for folder in (tmp_path / "checkpoints").iterdir()} == {
        "2",
        "3",
        "discarded",
    }
    assert [folder.name for folder in (tmp_path / "checkpoints/discarded").iterdir()] == ["1"]
    with opened(tmp_path):
        pass
    assert kept(tmp_path) == {2, 3}


def test_without_an_intact_checkpoint_nothing_is_changed(two_checkpoints, tmp_path):
    workdir = shutil.copytree(two_checkpoints, tmp_path / "run")
    for step in ("1", "2"):
        DAMAGE["no record"](workdir / "checkpoints" / step)
    message = r"no checkpoint of .* is readable\. Nothing was changed(.|\n)*checkpoints/2(.|\n)*checkpoints/1"
    with pytest.raises(CheckpointError, match=message), opened(workdir) as checkpoints:
        checkpoints.restore(state_of(0))
    assert kept(workdir) == {1, 2}


@pytest.mark.parametrize("damage", ["bits of parameters", "no record"])
def test_no_encoder_is_read_from_a_damaged_checkpoint(damage, two_checkpoints, tmp_path):
    """Not from the best one, and not from another one in its place."""
    workdir = shutil.copytree(two_checkpoints, tmp_path / "run")
    DAMAGE[damage](workdir / "checkpoints/1")
    for path in (workdir, workdir / "checkpoints/1"):
        with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*/checkpoints/1"):
            read_encoder(path)
    assert read_encoder(workdir / "checkpoints/2").step == 2
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint .*/checkpoints/7\. There are: 1, 2"
    ):
        read_encoder(workdir / "checkpoints/7")
    with opened(workdir) as checkpoints:
        for step in (3, 4):
            checkpoints.save(state_of(step), {}, Measured({"stsb": 70.0}, []))
    assert 1 in kept(workdir)  # not deleted as one that is not the best


def test_a_full_disk_costs_no_checkpoint(two_checkpoints, tmp_path, capfd):
    workdir = shutil.copytree(two_checkpoints, tmp_path / "run")
    noise = state_of(3)._replace(
        opt_state={"mu": {"encoder.bias": jax.random.normal(jax.random.key(0), (30_000,))}}
    )
    with full_disk(50_000), pytest.raises(DiskError) as full, opened(workdir) as checkpoints:
        # fails in the background, seen at the end
        checkpoints.save(noise, {}, Measured({"stsb": 81.0}, []))
    assert str(full.value) == (
        f"cannot write {workdir}/checkpoints: File too large. Its checkpoints of steps 1, 2 are complete. Please make "
        "room on that disk; then try again"
    )
    assert "Traceback" not in capfd.readouterr().err
    # In this process, writing may still be ending there.
    workdir = shutil.copytree(workdir, tmp_path / "later", ignore=shutil.ignore_patterns("3.*"))
    with opened(workdir) as checkpoints:
        assert checkpoints.restore(state_of(0))[0].step == 2
        checkpoints.save(state_of(3), {}, Measured({"stsb": 81.0}, []))
    assert kept(workdir) == {2, 3}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_])
def test_digests_do_not_depend_on_sharding(dtype):
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, (16, 24)), dtype)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b", "a"))
    )
    expected = array_digests({"x": array})
    assert expected == array_digests({"x": np.asarray(array)}) == array_digests({"x": spread})
    assert array_digests({"x": array.at[3, 5].set(jnp.asarray(not array[3, 5], dtype))}) != expected
    assert array_digests({"x": array[::-1]}) != expected
