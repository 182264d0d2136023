"""Who may write to a run's folder, and what must be the same when a run is resumed."""

import dataclasses
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from safetensors import SafetensorError
from tiny_networks import ENCODER, GENERATOR, SIMCSE, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax import hosts
from diffcse_jax.commands.train import run
from diffcse_jax.errors import CheckpointError, ConfigError, DiskError, Interrupted
from diffcse_jax.io import system_error
from diffcse_jax.models.pretrained import Pretrained
from diffcse_jax.storage import base_model
from diffcse_jax.storage.workdir import encoder_folder, held, read_config, start_workdir

REPOSITORY = Path(__file__).parents[1]
WITH_SIZES = dataclasses.replace(ENCODER, hf_config={"hidden_size": 16})
HOLDER = """
import sys, time
from pathlib import Path
from diffcse_jax.storage.workdir import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def start(
    workdir: Path,
    *parts: Mapping[str, Mapping],
    precision: str = "float32",
    encoder: Pretrained = ENCODER,
    generator: Pretrained = GENERATOR,
) -> None:
    config = config_of({"model": {"name_or_path": "bert"}, "generator": {"name_or_path": "distilbert"}}, *parts)
    config = dataclasses.replace(config, precision=precision)
    start_workdir(workdir, config, encoder, mock.Mock(spec=PreTrainedTokenizerFast), generator)
    (workdir / "checkpoints" / "1").mkdir(exist_ok=True, parents=True)


def other(pretrained: Pretrained, part: str) -> Pretrained:
    """The same checkpoint with one number of one array changed."""
    params = dict(getattr(pretrained, part))
    name = sorted(params)[-1]
    params[name] = params[name].copy()
    params[name].flat[-1] += 1
    return dataclasses.replace(pretrained, **{part: params})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder": other(ENCODER, "transformer")}, "of model.name_or_path='bert' have changed"),
        (
            {"generator": other(GENERATOR, "mlm_head")},
            "of generator.name_or_path='distilbert' have changed",
        ),
    ],
)
def test_a_run_does_not_go_on_with_other_weights(changed, message, tmp_path):
    start(tmp_path)
    start(tmp_path)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, **changed)


def test_weights_of_a_run_that_recorded_none_are_recorded(tmp_path):
    start(tmp_path)
    recorded = (tmp_path / "start.json").read_text()
    (tmp_path / "start.json").unlink()
    start(tmp_path)
    assert (tmp_path / "start.json").read_text() == recorded
    assert set(json.loads(recorded)) == {"model.name_or_path", "generator.name_or_path", "files"}


def test_a_damaged_file_of_the_start_is_written_anew(tmp_path, capsys):
    start(tmp_path, encoder=WITH_SIZES)
    path = tmp_path / "encoder/config.json"
    path.write_text(path.read_text().replace("16", "17"))
    with pytest.raises(CheckpointError, match=r"encoder/config\.json is not what start\.json says was written"):
        encoder_folder(tmp_path)
    start(tmp_path, encoder=WITH_SIZES)
    assert f"warning: {path} was damaged and is written anew" in capsys.readouterr().err
    assert encoder_folder(tmp_path) == path.parent


def test_a_start_whose_sizes_have_changed_is_refused(tmp_path):
    start(tmp_path, encoder=WITH_SIZES)
    with pytest.raises(ConfigError, match=r"config\.json or the tokenizer of model\.name_or_path='bert' has changed"):
        start(tmp_path, encoder=dataclasses.replace(ENCODER, hf_config={"hidden_size": 17}))


def test_a_configuration_that_is_damaged_is_named(tmp_path):
    """A key on which no result depends: no comparison with the command's own would notice it."""
    start(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"every": 125', '"every": 121'))
    with pytest.raises(CheckpointError, match=r"config\.json is not what start\.json beside it says was written"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [None, '{"model":'])
def test_a_run_whose_configuration_is_lost_does_not_take_on_another(content, tmp_path):
    start(tmp_path)
    path = tmp_path / "config.json"
    path.unlink()
    if content:
        path.write_text(content)
    remedy = r"config\.json.*; restore it from a copy, or from starts\.jsonl .* in another --workdir$"
    with pytest.raises(CheckpointError, match=remedy):
        start(tmp_path, {"train": {"seed": 1}})
    assert (path.read_text() if path.exists() else None) == content


def test_the_name_of_the_start_is_kept_for_the_model_card(tmp_path):
    start(tmp_path)
    assert base_model.read(tmp_path / "encoder", "a name given later", {}).hub_id == "bert"


def test_a_start_that_was_cut_off_is_begun_again(tmp_path):
    start(tmp_path)
    (tmp_path / "config.json").unlink()  # it is written last
    (tmp_path / "checkpoints/1").rmdir()
    start(tmp_path, encoder=other(ENCODER, "transformer"))
    with pytest.raises(ConfigError, match=r"model\.name_or_path"):
        start(tmp_path)


def test_a_run_without_a_checkpoint_gives_way_to_another(tmp_path):
    start(tmp_path)
    (tmp_path / "checkpoints/1").rmdir()
    trained_or_computed = [tmp_path / "generator", tmp_path / "vectors"]
    for folder in trained_or_computed:
        folder.mkdir()
    start(tmp_path, {"mesh": {"data": 2}})
    (tmp_path / "checkpoints/1").rmdir()
    assert all(folder.is_dir() for folder in trained_or_computed)  # of the same run: they are kept
    start(tmp_path, {"train": {"seed": 1}}, encoder=other(ENCODER, "transformer"))
    assert read_config(tmp_path).train.seed == 1
    assert not any(folder.exists() for folder in trained_or_computed)
    start(tmp_path, {"train": {"seed": 1}}, encoder=other(ENCODER, "transformer"))


@pytest.mark.parametrize(
    "differs",
    [
        lambda params: {name + "x": array for name, array in params.items()},
        lambda params: {name: array.reshape(1, *array.shape) for name, array in params.items()},
        lambda params: {name: np.nextafter(array, np.float32(9)) for name, array in params.items()},
    ],
)
def test_digests_see_names_shapes_and_bytes(differs):
    assert dataclasses.replace(ENCODER, transformer=dict(ENCODER.transformer)).digest() == ENCODER.digest()
    assert dataclasses.replace(ENCODER, transformer=differs(ENCODER.transformer)).digest() != ENCODER.digest()
    assert dataclasses.replace(ENCODER, pooler={}, mlm_head=ENCODER.transformer).digest() != ENCODER.digest()


def test_another_precision_is_refused_with_the_way_to_go_on(tmp_path):
    start(tmp_path)
    message = r"precision: 'float32' then, 'bfloat16' now \(.*--config\.precision=float32 goes on"
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, precision="bfloat16")


def test_a_precision_that_was_not_resolved_is_accepted_and_left(tmp_path):
    start(tmp_path, precision="auto")
    start(tmp_path, precision="bfloat16")
    assert read_config(tmp_path).precision == "auto"


def test_what_results_do_not_depend_on_may_change(tmp_path):
    start(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    tmp_path /= "there"
    train, evaluation = {"log_every": 7, "max_bad_steps": 9}, {"every": 50}
    start(tmp_path, {"mesh": {"data": 2, "model": 4}, "train": train, "eval": evaluation})
    with pytest.raises(ConfigError, match=r"train\.seed: 42 then, 1 now"):
        start(tmp_path, {"train": {"seed": 1}})


def test_processes_that_see_different_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "decided_by_first", lambda decide: decide())
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda seen: np.array([seen, 0]))
    with pytest.raises(CheckpointError, match="is not the same folder for all processes"):
        start(tmp_path)


def test_a_workdir_is_held_by_one_run(tmp_path):
    workdir = tmp_path / "runs/mine"
    with held(workdir):
        expected = rf"runs/mine is in use by process {os.getpid()} on host {socket.gethostname()} since 20\d\d-"
        with pytest.raises(CheckpointError, match=expected), held(workdir):
            pass
    with held(workdir):
        pass


def test_a_workdir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*/file/run: Not a directory"),
        held(tmp_path / "file/run"),
    ):
        pass


def test_a_full_disk_is_one_paragraph_and_the_same_start_goes_on(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DiskError) as stopped:
            start(tmp_path)
    assert str(stopped.value) == (
        f"cannot write {tmp_path}: No space left on device. What is complete there stays as it is. Please make room on "
        "that disk, or give another --workdir; then run the same command again to resume"
    )
    start(tmp_path)
    start(tmp_path)


def test_a_lock_without_room_is_told(tmp_path):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        with pytest.raises(DiskError, match=r"^cannot write .*/run: File too large\. What is complete"):
            held(tmp_path / "run").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with held(tmp_path / "run"):
        pass


def test_errors_of_the_system_that_libraries_quote_are_recognised():
    for error in (
        ValueError("OUT_OF_RANGE: Failed to write 9 bytes to file 13: No space left [os_error_code='28']"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "No space left on device"),
    ):
        assert system_error(error).errno == errno.ENOSPC
    assert system_error(ValueError("28")) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_being_stopped_where_no_loop_listens_is_one_line(number, tmp_path, monkeypatch):
    """Before the first step, as after the last one: the lock is freed, the handler as before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background processes do not have
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("diffcse_jax.training.train.train", lambda *_: os.kill(os.getpid(), number))
    monkeypatch.setattr("diffcse_jax.hosts.keep_compiled", lambda: None)
    with pytest.raises(Interrupted, match=r"what .* holds is whole: the same command goes on") as stopped:
        run(config_of(SIMCSE), tmp_path)
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before
    with held(tmp_path):
        pass


@pytest.mark.slow
def test_a_second_training_is_refused_until_the_first_has_ended(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        command = [sys.executable, "train.py", "--config", "configs/quickstart.py", "--workdir", tmp_path]
        second = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert second.returncode == 2
    assert f"error: {tmp_path} is in use by process {holder.pid} on host" in second.stderr
    assert "Traceback" not in second.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    with held(tmp_path):  # the lock died with its process
        pass
