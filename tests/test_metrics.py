"""Rows of metrics: none is lost, and lines that cannot be read are named and do not block."""

import errno
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from diffcse_jax.config import Config
from diffcse_jax.errors import DiskError
from diffcse_jax.io import append_line
from diffcse_jax.training import metrics
from diffcse_jax.training.callbacks import TensorBoard, Training
from diffcse_jax.training.metrics import MetricsWriter, read_metrics


def row(step: int) -> dict[str, float]:
    return {"step": step, "loss": float(step)}


def written(workdir: Path, *lines: bytes) -> Path:
    path = workdir / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


BAD_LINES = [b'{"step": 2, "lo', b"\x00\x00\x00", b"\xff", b"[1]", b"{}", b'{"step": "2"}', b'{"step": 2, "loss": "x"}']


def test_unreadable_lines_are_named_and_kept_aside(tmp_path, capsys):
    path = written(tmp_path, json.dumps(row(1)).encode(), *BAD_LINES, b"", json.dumps(row(3)).encode())
    before = path.read_bytes()
    assert read_metrics(tmp_path) == [row(1), row(3)]
    assert f"{path}: left out what cannot be read, 8 lines: 2, 3, 4, 5, 6 ..." in capsys.readouterr().err
    MetricsWriter(tmp_path, resumed_at=3)
    assert f"the file as it was is kept as {tmp_path}/damaged/metrics.jsonl" in capsys.readouterr().err
    assert (tmp_path / "damaged/metrics.jsonl").read_bytes() == before
    assert path.read_text() == "".join(json.dumps(each) + "\n" for each in (row(1), row(3)))
    MetricsWriter(tmp_path, resumed_at=3)
    assert not capsys.readouterr().err


def test_a_file_that_is_as_it_should_be_is_not_written_again(tmp_path, monkeypatch):
    written(tmp_path, json.dumps(row(1)).encode(), json.dumps(row(2)).encode())
    monkeypatch.setattr(metrics, "write_text", None)  # not called
    writer = MetricsWriter(tmp_path, resumed_at=2)
    writer.write(3, {"loss": 3.0})
    assert read_metrics(tmp_path) == [row(1), row(2), row(3)]


def test_half_a_row_on_a_full_disk_is_taken_back(tmp_path, monkeypatch):
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
        with pytest.raises(DiskError, match=r"No space left on device.* The rows written before and the checkpoints"):
            writer.write(2, {"loss": 2.0})
    writer.write(2, {"loss": 2.0})
    assert read_metrics(tmp_path) == [row(1), row(2)]


@pytest.mark.parametrize("before", [None, b"", b"whole\n", b"whole\nhal"])
def test_a_line_is_never_joined_to_half_of_one(before, tmp_path):
    path = tmp_path / "lines"
    if before is not None:
        path.write_bytes(before)
    append_line(path, "next")
    expected = (before or b"") + (b"\n" if (before or b"\n")[-1:] != b"\n" else b"") + b"next\n"
    assert path.read_bytes() == expected


def test_tensorboard_reads_the_rows(tmp_path):
    """After a resumption, those of later steps are told to be void."""
    from tensorboardX.proto.event_pb2 import Event

    for resumed_at in (0, 1):
        writer = TensorBoard()
        writer.on_start(Training(Config(), tmp_path, resumed_at, 9, {}, lambda: None))
        writer.on_step(resumed_at + 1, {"loss": 5.0})
        writer.on_step(resumed_at + 2, {})  # is not logged
        writer.on_evaluation(resumed_at + 1, {"stsb": 81.0})
        writer.on_end()
        file = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        events, content = [], file.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            events.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
        assert events[0].file_version == "brain.Event:2"
        assert [event.step for event in events[1:]] == ([1, 1] if resumed_at == 0 else [2, 2, 2])
        values = [value for event in events for value in event.summary.value]
        assert {value.tag: value.simple_value for value in values} == {"loss": 5.0, "dev/stsb": 81.0}
        file.unlink()
