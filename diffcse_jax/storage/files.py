"""Files that are there as a whole or not at all."""

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from diffcse_jax.data.lines import unreadable
from diffcse_jax.errors import CheckpointError, DiskError, UserError

IDLE_SECONDS = 24 * 3600  # a partial folder that nobody has written to for so long is nobody's


def _host() -> str:
    """The host as names of folders tell it, with what tells containers of one host name apart: who lives in them."""
    name = socket.gethostname().replace(".", "-")
    try:
        return f"{name}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no Linux
        return name


_HOST = _host()
# NAME.HOST.PROCESS.RANDOM.tmp; token stores of earlier versions named no owner.
_PARTIAL = re.compile(r".+\.(?P<host>[^.]+)\.(?P<process>\d+)\.[0-9a-f]{8}\.tmp|[0-9a-f]{32}\.[0-9a-f]{32}\.tmp")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def writing(path: Path, *, safe: str, instead: str = "") -> Iterator[None]:
    """Turns an error of the system in the block into a `DiskError` of one paragraph.

    Args:
        path: what is written; the message names it.
        safe: a sentence about what is not lost.
        instead: what else can be done, as an alternative to making room.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries have types of their own for errors of the system
        cause = system_error(error)
        if cause is None:
            raise
        raise disk_error(path, cause, safe=safe, instead=instead) from error


def system_error(error: Exception) -> OSError | None:
    """The error of the system: itself, or the one whose number a library quotes; None where it is another one."""
    if isinstance(error, OSError):
        return error
    quoted = re.search(r"\(os error (\d+)\)|os_error_code='(\d+)'", str(error))  # Rust's, tensorstore's
    if not quoted:
        return None
    number = int(quoted[1] or quoted[2])
    return OSError(number, os.strerror(number))


def disk_error(path: Path, error: OSError, *, safe: str, instead: str = "") -> DiskError:
    """The `DiskError` of `writing`."""
    remedy = "make room on that disk" if error.errno in _FULL else "put that right"
    remedy = "make it writable" if error.errno in _FORBIDDEN else remedy
    alternative = f", or {instead}" if instead else ""
    at = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    return DiskError(
        f"cannot write {path}: {error.strerror or error}{at}. {safe} Please {remedy}{alternative}; then the same "
        "command goes on"
    )


LONGEST_JSON = 1 << 24  # characters


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a file at once: a process or machine that stops in here leaves the earlier one, whole.

    Of two processes that write the same file at the same time one may fail.
    """
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the new name can be on disk before the content is
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of a JSON document."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file as a whole or not at all, and never to half a line that a killed process left."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a+b") as file:
            if size:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())
    except OSError:
        with contextlib.suppress(OSError):  # nothing can be written at all
            os.truncate(path, size)
        raise


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file at once, with the permissions of any new file (the library's own are 0600)."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.touch()
    mode = partial.stat().st_mode
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, partial, metadata={"format": "pt"})
    partial.chmod(mode)
    sync(partial)
    partial.replace(path)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk, where the system can be asked for that."""
    if sys.platform != "win32":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that does not do so for folders
                raise
        finally:
            os.close(descriptor)


def read_json(path: Path) -> Any:
    """The content of a JSON document.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    if problem := unreadable(path):
        raise CheckpointError(problem)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_JSON + 1)
        if len(text) > LONGEST_JSON:
            raise ValueError(f"longer than {LONGEST_JSON:,} characters")
        return json.loads(text)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # of the first: JSONDecodeError or UnicodeDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON document that is an object.

    Raises:
        CheckpointError: as `read_json`; it is something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: {str(content)[:60]}")
    return content


@contextlib.contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, for content that gets that name once it is whole; gone when the block ends.

    Its own name tells the host (and there the container) and process that write to it. Those that dead processes left
    beside `path`, for content of whatever name, are removed first.
    """
    for left in path.parent.glob("*.tmp"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = path.with_name(f"{path.name}.{_HOST}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_name(folder: Path, path: Path) -> None:
    """Renames a partial folder once all of its content is on disk: else a name could outlive what it stands for."""
    _sync_content(folder)
    folder.rename(path)
    sync(path.parent)


def _sync_content(folder: Path) -> None:
    for each in (*folder.rglob("*"), folder):
        sync(each)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A partial folder that takes the place of the folder `path`, if there is one, where the block ends well.

    The earlier folder gives up its name once all of the new one is on disk, and gets it back where the new one cannot
    take it. A process killed between the two renames leaves it as `NAME.*.old`, until a new one has the name.
    """
    path = path.resolve()  # a link stays one
    old = path.with_name(f"{path.name}.{uuid.uuid4().hex}.old")
    with partial_folder(path) as new:
        yield new
        _sync_content(new)
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is told
                if not new.exists():
                    path.rename(new)
                if old.exists():
                    old.rename(path)
            raise
        for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 32}.old"):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """A partial folder that takes the name `path` if the block ends without an exception.

    Where another process was faster, with the same content, its folder stays.
    """
    with partial_folder(path) as new:
        yield new
        try:
            give_name(new, path)
        except OSError:
            if not path.exists():
                raise


def _is_abandoned(folder: Path) -> bool:
    """True for a partial folder whose process has ended, or, where that cannot be known, that is idle for long."""
    owner = _PARTIAL.fullmatch(folder.name)
    if not owner or not folder.is_dir():
        return False
    if owner["host"] == _HOST and not _lives(int(owner["process"])):
        return True
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # its owner has removed it meanwhile
        return False
    return time.time() - newest > IDLE_SECONDS


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True
