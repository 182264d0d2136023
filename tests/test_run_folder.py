"""A run's folder: who may write to it, what a resume may not change, and its records."""

import dataclasses
import errno
import json
import os
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
from safetensors.numpy import load_file
from test_checkpoints import HF_CONFIG
from tiny_networks import ENCODER, GENERATOR, SIMCSE, config_of
from tiny_run import full_disk, metrics_file
from transformers import PreTrainedTokenizerFast

from diffcse_jax.api import run
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError, DiskError, Interrupted
from diffcse_jax.io import append_line
from diffcse_jax.run_folder import records
from diffcse_jax.run_folder.finding import finished_export, model_of
from diffcse_jax.run_folder.records import Record, Selection
from diffcse_jax.run_folder.start import (
    BaseModel,
    describe_base_model,
    locked,
    open_run,
    read_base_model,
    read_config,
    read_start,
)

WITH_SIZES = dataclasses.replace(ENCODER, hf_config=HF_CONFIG)
HOLDER = """
import sys, time
from pathlib import Path
from diffcse_jax.io import lock
with lock(Path(sys.argv[1]) / "lock"):
    print("held", flush=True)
    time.sleep(600)
"""


def start(workdir: Path, *parts: Mapping, encoder=ENCODER, generator=GENERATOR) -> None:
    """Open a run, and leave a checkpoint in its folder."""
    config = config_of(
        {"model": {"name_or_path": "bert"}, "generator": {"name_or_path": "distilbert"}}, *parts
    )
    open_run(workdir, config, encoder, mock.Mock(spec=PreTrainedTokenizerFast), generator)
    (workdir / "checkpoints" / "1").mkdir(exist_ok=True, parents=True)


OTHER = dataclasses.replace(ENCODER, transformer=GENERATOR.transformer)
# one array differs
HEAD = {name: array + (name == "bias") for name, array in GENERATOR.mlm_head.items()}


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"encoder": OTHER}, r"model\.name_or_path='bert'"),
        (
            {"encoder": dataclasses.replace(ENCODER, hf_config={"hidden_size": 17})},
            r"model\.name_or_path='bert'",
        ),
        (
            {"generator": dataclasses.replace(GENERATOR, mlm_head=HEAD)},
            r"generator\.name_or_path='distilbert'",
        ),
    ],
)
def test_a_run_does_not_resume_with_other_weights_or_sizes(changed, key, tmp_path):
    start(tmp_path)
    start(tmp_path)
    with pytest.raises(ConfigError, match=f"of {key} have changed"):
        start(tmp_path, **changed)


def test_a_damaged_file_of_the_starting_checkpoint_is_rewritten(tmp_path, capsys):
    start(tmp_path, encoder=WITH_SIZES)
    path = tmp_path / "encoder/config.json"
    path.write_text(path.read_text().replace('"hidden_size": 16', '"hidden_size": 17'))
    with pytest.raises(
        CheckpointError, match=r"encoder/config\.json differs from its checksum in start\.json"
    ):
        read_start(tmp_path)
    start(tmp_path, encoder=WITH_SIZES)
    assert f"warning: {path} was damaged. It has been rewritten" in capsys.readouterr().err
    assert read_start(tmp_path)[0].folder == path.parent
    assert read_base_model(path.parent).hub_id == "bert"


def test_checkpoints_of_a_run_know_the_languages_of_the_start(tmp_path):
    card = tmp_path / "start/README.md"
    card.parent.mkdir()
    card.write_text("---\nlanguage: [de, en]\n---\n")
    start(tmp_path / "run", encoder=dataclasses.replace(WITH_SIZES, folder=card.parent))
    assert read_start(tmp_path / "run")[0].languages == ("de", "en")


@pytest.mark.parametrize("content", [None, '{"model":', "a changed key"])
def test_a_damaged_configuration_is_named(content, tmp_path):
    """The changed key is one on which no result depends: comparing configurations would not notice it."""
    start(tmp_path)
    path = tmp_path / "config.json"
    if content == "a changed key":
        content = path.read_text().replace('"every": 125', '"every": 121')
    path.write_text(content) if content else path.unlink()
    with pytest.raises(
        CheckpointError, match=r"config\.json.*\. Restore it from a copy, or from starts\.jsonl "
    ):
        start(tmp_path, {"train": {"seed": 1}})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
    assert (path.read_text() if path.exists() else None) == content


def test_a_run_without_a_checkpoint_may_be_replaced(tmp_path):
    start(tmp_path)
    (tmp_path / "checkpoints/1").rmdir()
    records.write_selection(tmp_path, MIXED, WEIGHTS)
    head = tmp_path / "generator"
    head.mkdir()
    start(tmp_path, {"mesh": {"data": 2}})
    assert head.is_dir()  # of the same run: it is kept
    assert records.read_selection(tmp_path) is None
    (tmp_path / "checkpoints/1").rmdir()
    (tmp_path / "config.json").unlink()  # it is written last: a start that was interrupted
    start(tmp_path)
    (tmp_path / "checkpoints/1").rmdir()
    start(tmp_path, {"train": {"seed": 1}}, encoder=OTHER)
    assert read_config(tmp_path).train.seed == 1
    assert not head.exists()


def test_a_folder_with_files_of_the_user_does_not_become_a_run(tmp_path):
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(CheckpointError, match=r"lock is needed as a lock, .* another folder"):
        locked(tmp_path).__enter__()
    (tmp_path / "config.json").write_text('{"model": "mine"}')
    with pytest.raises(ConfigError, match=r"config\.json is not of a run.* another --workdir"):
        start(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "mine.json")
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/config.json").symlink_to(tmp_path / "mine.json")
    with pytest.raises(ConfigError, match=r"/encoder is not of a run.* another --workdir"):
        start(tmp_path)
    assert (tmp_path / "lock").read_text() == "mine"
    assert (tmp_path / "mine.json").read_text() == '{"model": "mine"}'


def test_keys_that_do_not_change_results_may_change(tmp_path):
    start(tmp_path / "here")
    moved = (tmp_path / "here").rename(tmp_path / "there")
    train, evaluation = {"log_every": 7, "max_bad_steps": 9}, {"every": 50}
    start(moved, {"mesh": {"data": 2, "model": 4}, "train": train, "eval": evaluation})
    with pytest.raises(
        ConfigError, match=r"train\.seed: was 42, now 1\n  precision: was 'float32', now 'bfloat16'"
    ):
        start(moved, {"train": {"seed": 1}, "precision": "bfloat16"})


def test_interpolation_may_change_unless_it_decides_when_training_ends(tmp_path):
    halfway = {"eval": {"interpolate": (0.5,)}}
    start(tmp_path / "free")
    start(tmp_path / "free", halfway)
    limited = {"eval": {"max_drop": 1.0}}
    start(tmp_path / "limited", limited)
    with pytest.raises(ConfigError, match=r"eval\.interpolate: was \(\), now \(0\.5,\)"):
        start(tmp_path / "limited", limited, halfway)
    # So does how often it is measured.
    often = {"eval": {"every": 7}}
    start(tmp_path / "free", halfway, often)
    for number, ending in enumerate((limited, {"eval": {"patience": 3}})):
        start(tmp_path / f"{number}", ending)
        with pytest.raises(ConfigError, match=r"eval\.every: was \d+, now 7"):
            start(tmp_path / f"{number}", ending, often)


def test_a_workdir_is_held_by_one_run(tmp_path):
    workdir = tmp_path / "runs/mine"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, workdir], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        expected = rf"runs/mine is in use by process {holder.pid} on host {socket.gethostname()} since 20\d\d-"
        with pytest.raises(CheckpointError, match=expected):
            run(config_of(SIMCSE), workdir)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert [file.name for file in workdir.iterdir()] == ["lock"]
    with locked(workdir):  # the lock died with its process
        pass


def test_a_full_disk_is_one_paragraph_and_the_run_begins_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
        with pytest.raises(DiskError) as stopped:
            start(tmp_path)
    assert str(stopped.value) == (
        f"cannot write {tmp_path}: No space left on device. Complete files there are unchanged. Please make room on "
        "that disk, or give another --workdir; then try again"
    )
    start(tmp_path)
    start(tmp_path)


def test_a_lock_without_room_is_reported(tmp_path):
    with (
        full_disk(0),
        pytest.raises(DiskError, match=r"^cannot write .*/run: File too large\. Complete files"),
    ):
        locked(tmp_path / "run").__enter__()
    with locked(tmp_path / "run"):
        pass
    with pytest.raises(CheckpointError, match=r"cannot write .*/lock/run: Not a directory"):
        locked(tmp_path / "run/lock/run").__enter__()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_being_stopped_outside_the_loop_is_one_line(number, tmp_path, monkeypatch):
    """Before the first step, as after the last one: the lock is freed, the handler as before."""
    # which a shell's background processes do not have
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("diffcse_jax.api.train_in_folder", lambda *_: os.kill(os.getpid(), number))
    monkeypatch.setattr("diffcse_jax.hosts.keep_compiled", lambda: None)
    with pytest.raises(
        Interrupted, match=r"Stopped\. .* is intact; run the same command again"
    ) as stopped:
        run(config_of(SIMCSE), tmp_path)
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before
    with locked(tmp_path):
        pass


def test_the_true_name_of_a_base_model(tmp_path):
    def local(card: str = "", **recorded: str) -> BaseModel:
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text(card)
        return describe_base_model(str(folder), folder, recorded)

    packaged = "sentence-transformers/all-MiniLM-L6-v2"
    assert describe_base_model("minilm", tmp_path, {}) == BaseModel(packaged, packaged)
    for name in ("org/name", "org/name@v1.0"):
        assert describe_base_model(name, tmp_path, {}) == BaseModel("org/name", "org/name")
    assert local(_name_or_path="org/parent") == BaseModel("mine", "org/parent")
    for path in ("/home/ada/x", "~/x", "out/checkpoint-500", "a/b/c", "C:\\models\\x"):
        assert local(_name_or_path=path) == BaseModel("mine")
    card = "---\nbase_model: [org/parent]\nlicense: other\nlicense_name: own\nlanguage: [de, no]\n---\n# Mine\n"
    assert local(card) == BaseModel(
        "mine", "org/parent", {"license": "other", "license_name": "own"}, ("de", "no")
    )
    assert local("---\nlicense: [\n---\n") == BaseModel("mine")
    doubled = "".join(f"- &a{each} [*a{each - 1}, *a{each - 1}]\n" for each in range(1, 60))
    assert local(f"---\nlanguage:\n- &a0 [de]\n{doubled}---\n") == BaseModel("mine")
    (tmp_path / "mine/README.md").unlink()
    os.mkfifo(tmp_path / "mine/README.md")
    assert describe_base_model(str(tmp_path / "mine"), tmp_path / "mine", {}) == BaseModel("mine")


# Records: metrics, the starting checkpoint's scores, the selection, and the environment of each
# start

BASELINE = Record(0, "avg", {"mrr": 60.0}, "mrr", "text", [[60.0] * 20])
MIXED = Selection(dataclasses.replace(BASELINE, step=3, outcomes=[]), 0.5, "Better than minilm")
WEIGHTS = {"encoder.bias": np.arange(3, dtype=np.float32)}
BAD_LINES = [
    b'{"step": 2, "lo',
    b"\x00\x00\x00",
    b"\xff",
    b"[1]",
    b"{}",
    b'{"step": "2"}',
    b'{"step": 2, "loss": "x"}',
]


def row(step: int) -> dict[str, float]:
    return {"step": step, "loss": float(step)}


def lines(*rows: dict) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def test_unreadable_metrics_are_named_and_kept_aside(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    before = lines(row(1)) + b"\n".join(BAD_LINES) + b"\n\n" + lines(row(3))
    path.write_bytes(before)
    assert records.read_metrics(tmp_path) == [row(1), row(3)]
    assert f"{path}: skipped 8 unreadable lines, the first is line 2" in capsys.readouterr().err
    metrics_file(tmp_path, resumed_at=3)
    assert (
        f"A copy of the file is kept in {tmp_path}/damaged/metrics.jsonl" in capsys.readouterr().err
    )
    assert (tmp_path / "damaged/metrics.jsonl").read_bytes() == before
    assert path.read_bytes() == lines(row(1), row(3))
    metrics_file(tmp_path, resumed_at=3)
    assert not capsys.readouterr().err


def test_intact_metrics_are_only_appended_to(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_bytes(lines(row(1), row(2), row(3)))
    metrics_file(tmp_path, resumed_at=2)  # row 3 follows the checkpoint
    monkeypatch.setattr("diffcse_jax.training.callbacks.write_text", None)  # not called again
    metrics_file(tmp_path, resumed_at=2).write(3, {"loss": 4.0})
    assert records.read_metrics(tmp_path) == [row(1), row(2), {"step": 3, "loss": 4.0}]


def test_a_row_that_does_not_fit_on_the_disk_is_removed(tmp_path):
    writer, path = metrics_file(tmp_path), tmp_path / "metrics.jsonl"
    writer.write(1, {"loss": 1.0})
    with (
        full_disk(len(lines(row(1))) + 5),
        pytest.raises(DiskError, match=r"File too large.* The earlier rows and"),
    ):
        writer.write(2, {"loss": 2.0})
    assert path.read_bytes() == lines(row(1))
    writer.write(2, {"loss": 2.0})
    assert path.read_bytes() == lines(row(1), row(2))


def test_a_line_is_never_joined_to_a_truncated_one(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"whole\nhal")
    append_line(path, "next")
    append_line(path, "last")
    assert path.read_bytes() == b"whole\nhal\nnext\nlast\n"


def test_a_damaged_record_is_named_with_the_remedy(tmp_path):
    """The damage is one digit of a score, the last byte of the weights, or everything after 9 bytes."""
    assert records.read_baseline(tmp_path) is records.read_selection(tmp_path) is None
    records.write_baseline(tmp_path, BASELINE)
    records.write_selection(tmp_path, MIXED, WEIGHTS)
    np.testing.assert_array_equal(
        load_file(tmp_path / "selected.safetensors")["encoder.bias"], WEIGHTS["encoder.bias"]
    )
    for name in ("selection.json", "selected.safetensors", "start_scores.json"):
        read = records.read_baseline if name == "start_scores.json" else records.read_selection
        path = tmp_path / name
        content = path.read_bytes()
        for damaged in (content.replace(b"60.0", b"60.5"), content[:-1] + b"\xff", content[:9]):
            path.write_bytes(damaged)
            if damaged != content:
                with pytest.raises(CheckpointError, match=rf"{name} .*\. .*run.* again: it"):
                    read(tmp_path)
        path.write_bytes(content)
        assert read(tmp_path) == (BASELINE if read is records.read_baseline else MIXED)


def test_a_selection_that_cannot_be_removed_is_reported(tmp_path, monkeypatch):
    records.write_selection(tmp_path, MIXED, WEIGHTS)
    monkeypatch.setattr(
        Path, "unlink", mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    )
    with pytest.raises(
        DiskError, match=r"selection\.json: Read-only file system\. The checkpoints"
    ):
        records.write_selection(tmp_path, MIXED, WEIGHTS)


def test_every_start_is_recorded_and_changed_versions_are_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "start.json").write_text('{"model.name_or_path": "0123"}')
    config = config_of(SIMCSE)
    records.record_start(tmp_path, config, text="4567", step=0)
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"time": "202')  # truncated
    records.record_start(tmp_path, config, text="4567", step=20)
    assert not capsys.readouterr().err
    first, second = records.read_starts(tmp_path)
    assert (first["step"], second["step"]) == (0, 20)
    assert first["digests"] == {"text": "4567", "model.name_or_path": "0123"}
    assert first["configuration"]["train"]["seed"] == 42
    assert first["versions"]["jax"] == jax.__version__
    assert first["devices"]["count"] == jax.device_count()
    assert set(first) == {
        "time",
        "host",
        "versions",
        "devices",
        "git",
        "step",
        "configuration",
        "digests",
    }
    version = records.importlib.metadata.version
    monkeypatch.setattr(
        records.importlib.metadata,
        "version",
        lambda name: "9.9" if name == "jax" else version(name),
    )
    count = jax.device_count()
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    records.record_start(tmp_path, config, text="4567", step=30, chunk_size=64)
    assert (
        f"in their last digits from here on: jax was {jax.__version__}, now 9.9, the number of "
        f"devices was {count}, now 2, the size of chunks (0: whole batches) was 0, now 64\n"
        in capsys.readouterr().err
    )
    # Nothing is resumed: this may be another run in place of one without a checkpoint.
    records.record_start(tmp_path, config, text="89", step=0)
    assert not capsys.readouterr().err
    assert [line["digests"]["text"] for line in records.read_starts(tmp_path)] == ["89"]


def test_a_run_is_read_from_its_export(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/7").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(Config().to_dict()))
    for name, kind in (
        (run, "the folder of a run that has no export yet"),
        (run / "checkpoints/7", "a checkpoint of"),
    ):
        with pytest.raises(
            CheckpointError,
            match=f"^{name} is {kind}.* `diffcse export --model {name} --output DIR`",
        ):
            model_of(str(name))
    (run / "export").mkdir()
    assert finished_export(run) is None  # an export of before, while the run trains
    with pytest.raises(CheckpointError, match="the folder of a run that has no export yet"):
        model_of(str(run))
    (run / "selection.json").touch()
    assert finished_export(run) == run / "export"
    assert model_of(str(run)) == str(run / "export")
    assert model_of("minilm") == "minilm"
