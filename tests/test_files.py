"""Paths, atomic writes and locks."""

import errno
import inspect
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from jax.errors import JaxRuntimeError
from safetensors.numpy import save_file
from tiny_run import full_disk

from diffcse_jax import io as files
from diffcse_jax.errors import CheckpointError, ConfigError, DiskError, InUseError


@pytest.fixture
def folder(tmp_path) -> Path:
    """One that is there, in a folder of its own."""
    replace(tmp_path / "runs/[mine]", "earlier")
    return tmp_path / "runs/[mine]"


def replace(folder: Path, content: str) -> None:
    with files.replace_dir(folder) as new:
        (new / "content").write_text(content)


def test_a_folder_takes_the_place_of_another(folder, tmp_path):
    left, others = (
        folder.with_name(f"{folder.name}.{'0f' * 16}.old"),
        folder.with_name(f"m.{'0f' * 16}.old"),
    )
    left.mkdir()
    others.mkdir()
    (tmp_path / "link").symlink_to(folder)
    replace(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (folder / "content").read_text() == "new"
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, others.name}


def test_partial_folders_of_dead_processes_are_removed(folder):
    """A process number of another host, or of another container on a host of the same name, says nothing for a day."""
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    name = socket.gethostname().replace(".", "-")
    gone = [f"a.{files._HOST}.{dead}.01234567.tmp", "old.other.7.01234567.tmp"]
    kept = [f"b.{files._HOST}.{os.getpid()}.01234567.tmp", "c.other.7.01234567.tmp", "mine.tmp"]
    kept += [f"a.{host}.{dead}.01234567.tmp" for host in {name, f"{name}-1"} - {files._HOST}]
    for left in (*gone, *kept):
        folder.with_name(left).mkdir()
        if left in (gone[1], "mine.tmp"):
            os.utime(folder.with_name(left), (0, 0))
    with files.replace_dir(folder) as new:
        assert f".{files._HOST}.{os.getpid()}." in new.name
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, *kept}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fails", ["content", "folder", "name", "name on disk"])
def test_what_fails_while_a_folder_is_replaced_leaves_the_earlier_one(
    fails, there, folder, tmp_path, monkeypatch
):
    """Its content, itself, its new name, and that name on disk, one after the other."""
    sync, rename, target = files.sync, Path.rename, folder if there else folder.with_name("other")

    def failing_sync(path: Path) -> None:
        at = {
            "content": path.name == "content",
            "folder": path.suffix == ".tmp",
            "name on disk": path == folder.parent,
        }
        if at.get(fails):
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    def failing_rename(path: Path, new: Path) -> Path:
        if fails == "name" and path.suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, new)

    monkeypatch.setattr(files, "sync", failing_sync)
    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match=r"Input/output|No space"):
        replace(target, "new")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "content").read_text() == "earlier"


def test_partial_files_of_dead_processes_are_removed(tmp_path):
    """One that a kill has left blocks nothing."""
    code = "import os, sys; from diffcse_jax import io; from pathlib import Path\n"
    code += "with io.replace_file(Path(sys.argv[1])) as file: os.kill(os.getpid(), 9)"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.json")], check=False)
        assert len([*tmp_path.glob("a.json.*.tmp")]) == 1
    (tmp_path / "a.json.tmp").write_text("mine")
    files.write_text(tmp_path / "a.json", "new")
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"a.json": "new", "a.json.tmp": "mine"}


@pytest.mark.parametrize("write", [files.write_text, files.append_line])
def test_nothing_is_written_through_a_link(write, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    for link, target in (("a", mine), ("b", tmp_path / "nothing")):
        (tmp_path / link).symlink_to(target)
        if write is files.append_line:
            with pytest.raises(CheckpointError, match=rf"/{link} is .* a link.* Rename or remove"):
                write(tmp_path / link, "ours")
        else:
            write(tmp_path / link, "ours")
            assert not (tmp_path / link).is_symlink()
    assert mine.read_text() == "mine\n"
    assert not (tmp_path / "nothing").exists()


def test_no_other_file_becomes_a_lock(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("process the rows\n")
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.link(mine, tmp_path / "second name")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("mine", "link", "dangling", "second name", "folder", "pipe"):
        with pytest.raises(CheckpointError, match=f"/{name} is needed .*Rename or remove it"):
            files.lock(tmp_path / name)
    assert mine.read_text() == "process the rows\n"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "content", ["", "\0" * 40, "process 7 on host a since 2026-11-28 10:00+00:00\n"]
)
def test_a_lock_that_a_kill_has_left_is_taken(content, tmp_path):
    (tmp_path / "lock").write_text(content)
    with files.lock(tmp_path / "lock"):
        owner = f"process {os.getpid()} on host {socket.gethostname()} since"
        with pytest.raises(InUseError, match=f"is in use by {re.escape(owner)}"):
            files.lock(tmp_path / "lock")


def test_addresses_are_refused_with_advice():
    for path in ("gs://bucket/run", Path("gs://bucket/run"), "s3://bucket", "https://host/file"):
        with pytest.raises(
            ConfigError,
            match=r"addresses with \w+:// are not supported.*mount it first.* File locks do",
        ):
            files.expand_path(path)
    for path in ("runs/a:b", "C:/runs", "org/name"):
        assert files.expand_path(path) == Path(path)


@pytest.mark.parametrize("given", [5, None, ["runs"], b"runs"])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(ConfigError, match="is not a path"):
        inspect.unwrap(files.expand_path)(given)  # without the tests' own check of types


def test_the_error_of_a_sealed_document_names_what_is_wrong_and_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "data").write_text("text")
    files.write_sealed(tmp_path / "seal.json", {"a": 1}, [tmp_path / "data"])
    assert files.read_sealed(tmp_path / "seal.json", "Try again") == {"a": 1}
    with monkeypatch.context() as unreadable:
        unreadable.setattr(
            files, "sha256", mock.Mock(side_effect=PermissionError(13, "Permission denied", "data"))
        )
        with pytest.raises(CheckpointError, match=r"Permission denied: 'data'\. Try again"):
            files.read_sealed(tmp_path / "seal.json", "Try again")
    (tmp_path / "data").unlink()
    with pytest.raises(
        CheckpointError, match=r"/data is missing or differs from its checksum\. Try again"
    ):
        files.read_sealed(tmp_path / "seal.json", "Try again")


def write_arrow(path: Path) -> None:
    table = pa.table({"a": pa.array(np.random.default_rng(0).random(30_000))})
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table)


def write_array_by_blocks(path: Path) -> None:
    with files.replace_file(path) as file:
        np.save(file, np.zeros(30_000))


def test_an_error_of_a_computation_is_not_one_of_the_disk(tmp_path):
    """Such as a lost process of a job, which is noticed while a checkpoint is written."""
    lost = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"
    with (
        pytest.raises(JaxRuntimeError, match="Gloo"),
        files.disk_errors(tmp_path, safe="Nothing is lost.", any_error=True),
    ):
        raise JaxRuntimeError(lost)
    with (
        pytest.raises(DiskError, match=r"cannot write .*: the library's own words"),
        files.disk_errors(tmp_path, safe="Nothing is lost.", any_error=True),
    ):
        raise ValueError("the library's own words")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: np.save(path, np.zeros(30_000)),
        lambda path: save_file({"a": np.zeros(30_000)}, path),
        lambda path: files.write_text(path, "x" * 200_000),
        write_array_by_blocks,
        write_arrow,
    ],
)
def test_a_full_disk_is_called_so_whatever_library_writes(write, tmp_path):
    """NumPy tells how many numbers were written, and not why there were no more."""
    expected = (
        r"^cannot write .*/a: (No space left on device|File too large)\. .* make room on that"
    )
    with (
        full_disk(1 << 16),
        pytest.raises(DiskError, match=expected),
        files.disk_errors(tmp_path / "a", safe="Nothing is lost."),
    ):
        write(tmp_path / "a")


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    unsupported = mock.Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    monkeypatch.setattr(files.filelock, "lock_descriptor", unsupported)
    with files.lock(tmp_path / "lock"), files.lock(tmp_path / "lock"):
        pass
