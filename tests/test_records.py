"""Records of a run: metrics, the starting checkpoint's scores, the selection, and the environment of each start."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_networks import SIMCSE, config_of

from diffcse_jax.errors import CheckpointError, DiskError
from diffcse_jax.io import append_line
from diffcse_jax.run_folder import records
from diffcse_jax.run_folder.records import (
    MetricsWriter,
    Record,
    Selection,
    read_baseline,
    read_metrics,
    read_selection,
    read_starts,
    record_start,
    write_baseline,
    write_selection,
)

BASELINE = Record(0, "avg", {"mrr": 60.0}, "mrr", "text", [[60.0] * 20])
MIXED = Selection(dataclasses.replace(BASELINE, step=3, outcomes=[]), 0.5, "Better than minilm")
WEIGHTS = {"encoder.bias": np.arange(3, dtype=np.float32)}
BAD_LINES = [b'{"step": 2, "lo', b"\x00\x00\x00", b"\xff", b"[1]", b"{}", b'{"step": "2"}', b'{"step": 2, "loss": "x"}']


def row(step: int) -> dict[str, float]:
    return {"step": step, "loss": float(step)}


def lines(*rows: dict) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def test_unreadable_metrics_are_named_and_kept_aside(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    before = lines(row(1)) + b"\n".join(BAD_LINES) + b"\n\n" + lines(row(3))
    path.write_bytes(before)
    assert read_metrics(tmp_path) == [row(1), row(3)]
    assert f"{path}: skipped 8 unreadable lines, the first is line 2" in capsys.readouterr().err
    MetricsWriter(tmp_path, resumed_at=3)
    assert f"A copy of the file is kept in {tmp_path}/damaged/metrics.jsonl" in capsys.readouterr().err
    assert (tmp_path / "damaged/metrics.jsonl").read_bytes() == before
    assert path.read_bytes() == lines(row(1), row(3))
    MetricsWriter(tmp_path, resumed_at=3)
    assert not capsys.readouterr().err


def test_intact_metrics_are_only_appended_to(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_bytes(lines(row(1), row(2), row(3)))
    MetricsWriter(tmp_path, resumed_at=2)  # row 3 follows the checkpoint
    monkeypatch.setattr(records.io, "write_text", None)  # not called again
    MetricsWriter(tmp_path, resumed_at=2).write(3, {"loss": 4.0})
    assert read_metrics(tmp_path) == [row(1), row(2), {"step": 3, "loss": 4.0}]


def test_a_row_that_does_not_fit_on_the_disk_is_removed(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, resumed_at=0)
    writer.write(1, {"loss": 1.0})
    open_, path = Path.open, tmp_path / "metrics.jsonl"

    def half_a_line(line: bytes) -> None:
        with open_(path, "ab") as file:
            file.write(line[: len(line) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = mock.MagicMock()
    full.__enter__.return_value.write = half_a_line
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda self, *mode, **options: full)
        with pytest.raises(DiskError, match=r"No space left on device.* The earlier rows and the checkpoints"):
            writer.write(2, {"loss": 2.0})
    writer.write(2, {"loss": 2.0})
    assert read_metrics(tmp_path) == [row(1), row(2)]


def test_a_line_is_never_joined_to_a_truncated_one(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"whole\nhal")
    append_line(path, "next")
    append_line(path, "last")
    assert path.read_bytes() == b"whole\nhal\nnext\nlast\n"


def test_a_damaged_record_is_named_with_the_remedy(tmp_path):
    """The damage is one digit of a score, the last byte of the weights, or everything after 9 bytes."""
    assert read_baseline(tmp_path) is read_selection(tmp_path) is None
    write_baseline(tmp_path, BASELINE)
    write_selection(tmp_path, MIXED, WEIGHTS)
    np.testing.assert_array_equal(load_file(tmp_path / "selected.safetensors")["encoder.bias"], WEIGHTS["encoder.bias"])
    for name in ("selection.json", "selected.safetensors", "start_scores.json"):
        read = read_baseline if name == "start_scores.json" else read_selection
        path = tmp_path / name
        content = path.read_bytes()
        for damaged in (content.replace(b"60.0", b"60.5"), content[:-1] + b"\xff", content[:9]):
            path.write_bytes(damaged)
            if damaged != content:
                with pytest.raises(CheckpointError, match=rf"{name} .*\. .*run.* again: it"):
                    read(tmp_path)
        path.write_bytes(content)
        assert read(tmp_path) == (BASELINE if read is read_baseline else MIXED)


def test_a_selection_that_cannot_be_removed_is_reported(tmp_path, monkeypatch):
    write_selection(tmp_path, MIXED, WEIGHTS)
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(DiskError, match=r"selection\.json: Read-only file system\. The checkpoints"):
        write_selection(tmp_path, MIXED, WEIGHTS)


def test_every_start_is_recorded_and_changed_versions_are_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "start.json").write_text('{"model.name_or_path": "0123"}')
    config = config_of(SIMCSE)
    record_start(tmp_path, config, text="4567", step=0)
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"time": "202')  # truncated
    record_start(tmp_path, config, text="4567", step=20)
    assert not capsys.readouterr().err
    first, second = read_starts(tmp_path)
    assert (first["step"], second["step"]) == (0, 20)
    assert first["digests"] == {"text": "4567", "model.name_or_path": "0123"}
    assert first["configuration"]["train"]["seed"] == 42
    assert first["versions"]["jax"] == jax.__version__
    assert first["devices"]["count"] == jax.device_count()
    assert set(first) == {"time", "host", "versions", "devices", "git", "step", "configuration", "digests"}
    version = records.importlib.metadata.version
    monkeypatch.setattr(records.importlib.metadata, "version", lambda name: "9.9" if name == "jax" else version(name))
    record_start(tmp_path, config, text="4567", step=30)
    assert f"in their last digits from here on: jax was {jax.__version__}, now 9.9\n" in capsys.readouterr().err
