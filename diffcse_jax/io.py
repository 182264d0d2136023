"""Files and folders: paths, checksums, JSON, atomic writes, and the cache.

A reader never sees half of a file or folder that this module writes.
"""

import contextlib
import datetime
import errno
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import filelock

from diffcse_jax.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    InUseError,
    NotDownloadedError,
    UserError,
)

IDLE_SECONDS = 24 * 3600  # partial folders idle for this long count as abandoned
HUB_REPOSITORY = "princeton-nlp/datasets-for-simcse"
# The configurations of the package: a link in the repository, real files in the wheel.
SHIPPED = Path(__file__).parent / "configs"
INDEX_MANIFEST = "index.json"  # in the folder of an index; see `search.folder`
INDEX_FORMAT = "diffcse_jax index 2"

_HOST = socket.gethostname().replace(".", "-")
# On Linux, the container: containers can share a host name, and count their own processes.
with contextlib.suppress(OSError):
    _HOST += f"-{os.stat('/proc/self/ns/pid').st_ino}"
_PARTIAL = re.compile(r".+\.(?P<host>[^.]+)\.(?P<process>\d+)\.[0-9a-f]{8}\.tmp", re.DOTALL)
_HOLDER = re.compile(r"process \d+ on host .* since .*")  # the content of a lock
_LONGEST_HOLDER = 1000  # characters


# Paths


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Replace a leading `~` or `~user`.

    Raises `ConfigError` for a value that is not a path, for addresses such as `gs://bucket/run`,
    and for paths that the system cannot look up: a name that is too long, a loop of links, a folder
    above it that may not be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{str(path)[:200]} is not a path. Give a string or a Path")
    if address := re.match(r"([a-z][a-z0-9+-]+):/", str(path)):  # a Path has lost the second slash
        raise ConfigError(
            f"{path}: addresses with {address[1]}:// are not supported. Give a local folder. To "
            "use a bucket, mount it first, for example with gcsfuse. File locks do not work there "
            "across hosts: write from one host at a time"
        )
    expanded = Path(os.path.expanduser(path))
    try:
        str(path).encode()
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UnicodeEncodeError as error:
        raise ConfigError(f"{str(path)[:200]!r} is not UTF-8. Rename the file or folder") from error
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{str(path)[:200]!r} cannot be used as a path: {reason}. Give another path"
        ) from error
    return expanded


def why_unreadable(path: Path) -> str:
    """Return why the path is not a readable regular file, or an empty string if it is one."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"cannot read {path}: no such file"
    except (OSError, ValueError) as error:  # for example a name that is too long or contains NUL
        return f"cannot read {str(path)[:200]!r}: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return f"cannot read {path}: it is a folder"
    if not stat.S_ISREG(mode):
        return f"cannot read {path}: it is a pipe or a device. Copy its content to a file first"
    return "" if os.access(path, os.R_OK) else f"cannot read {path}: permission denied"


def cache_folder(name: str) -> Path:
    """Return `~/.cache/diffcse_jax/NAME` (or below `$XDG_CACHE_HOME`), which may not exist yet."""
    return expand_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "diffcse_jax" / name


def hub_file(name: str, advice: str) -> Path:
    """Return a file of SimCSE's data set from the hub's cache, or download it.

    Raises `NotDownloadedError`, which ends with `advice`.
    """
    import huggingface_hub

    download = functools.partial(
        huggingface_hub.hf_hub_download, HUB_REPOSITORY, name, repo_type="dataset"
    )
    with contextlib.suppress(OSError):
        return Path(download(local_files_only=True))
    print(f"downloading {name} from the hub", file=sys.stderr)
    try:
        # Without a network, this fails at once. The download would try five times.
        url = huggingface_hub.hf_hub_url(HUB_REPOSITORY, name, repo_type="dataset")
        huggingface_hub.get_hf_file_metadata(url)
        return Path(download())
    except Exception as error:  # the hub client passes on whatever its transport raises
        raise NotDownloadedError(
            f"{name} could not be downloaded ({type(error).__name__}) from "
            f"https://huggingface.co/datasets/{HUB_REPOSITORY}. {advice}"
        ) from error


# Checksums


def sha256(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of the files' bytes, one file after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def json_digest(content: Any) -> str:
    """Return the SHA-256 of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digests(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of those paths that are files, by their path relative to the folder."""
    files = [path for path in sorted(paths) if path.is_file()]
    return {path.relative_to(folder).as_posix(): sha256([path]) for path in files}


def first_changed(folder: Path, digests: Mapping[str, str]) -> str:
    """Return the first recorded file that is missing or has changed, or an empty string."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or sha256([path]) != digest:
            return name
    return ""


# Errors of the disk


@contextlib.contextmanager
def disk_errors(
    path: Path, *, safe: str, instead: str = "", any_error: bool = False
) -> Iterator[None]:
    """Turn an operating system error inside the block, which writes `path`, into a `DiskError`.

    `safe` is a sentence that says what is not lost, and `instead` an alternative to making room on
    the disk. Set `any_error` if libraries in the block may hide what the operating system reported.
    An error of JAX is not one of the disk: a process was lost, or memory did not suffice.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = _reported_by_system(error)
        if cause is None and any_error and not _is_of_jax(error):
            cause = OSError(errno.EIO, str(error).partition("\n")[0])
        if cause is None:
            raise
        is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = ("make room on that disk" if is_full else "fix the problem") + (
            f", or {instead}" if instead else ""
        )
        at = f" ({cause.filename})" if cause.filename and str(cause.filename) != str(path) else ""
        raise DiskError(
            f"cannot write {path}: {cause.strerror or cause}{at}. {safe} Please {remedy}; then try "
            "again"
        ) from error


def _is_of_jax(error: Exception) -> bool:
    """Return whether JAX raised the error, perhaps because another process is lost.

    A computation that starts raises a `ValueError` for a lost process, and one that is under way a
    `JaxRuntimeError`.
    """
    from jax.errors import JaxRuntimeError

    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    return isinstance(error, JaxRuntimeError) or module.partition(".")[0] == "jax"


def _reported_by_system(error: Exception) -> OSError | None:
    """Return the operating system's error, which libraries may hide in the text of their own."""
    # The forms of Rust, of tensorstore and of Arrow.
    forms = r"\(os error (\d+)\)|os_error_code='(\d+)'|\[errno (\d+)\]"
    if quoted := re.search(forms, str(error)):
        number = int(quoted[quoted.lastindex or 1])
        return OSError(number, os.strerror(number))
    # NumPy drops the reason when the system takes a part of an array only.
    if re.search(r"\d+ requested and \d+ written", str(error)):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return error if isinstance(error, OSError) else None


# Files


def write_text(path: Path, text: str) -> None:
    """Write or replace a file atomically; see `replace_file`."""
    write_bytes(path, text.encode())


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write arrays of NumPy to a safetensors file, atomically."""
    import numpy as np
    import safetensors.numpy

    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    write_bytes(path, safetensors.numpy.save(contiguous, metadata={"format": "pt"}))


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file atomically; see `replace_file`."""
    with replace_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def replace_file(path: Path, *, beside: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a new file, which gets the name `path` once it is on disk, if the block succeeds.

    If the process or the machine stops, the earlier file stays intact. A link is replaced, and what
    it leads to stays as it is: resolve a path that the user named. Until then the file has a name
    that nothing else has, next to `path` or to the path `beside`, on the same disk.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"cannot write {path}: it is not a regular file. Name a file")
    partial = _partial(beside or path)
    _remove_abandoned_once(partial.parent)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise the new name can reach the disk before the content
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """Return the name of what is being written: it names the process, and cannot be guessed."""
    return path.with_name(f"{path.name[:32]}.{_HOST}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def is_partial(path: Path) -> bool:
    """Return whether a file or folder is one that this program began to write."""
    return bool(_PARTIAL.fullmatch(path.name))


def _remove_abandoned(folder: Path) -> None:
    """Remove the files and folders that processes which have ended began to write in a folder."""
    for path in folder.glob("*.tmp"):
        if _is_abandoned(path):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds. What cannot be removed stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


@functools.cache
def _remove_abandoned_once(folder: Path) -> None:
    """Remove these at most once in this process: a folder to which it writes much is large."""
    _remove_abandoned(folder)


def _is_abandoned(path: Path) -> bool:
    """Return whether the process that began to write a file or folder has ended.

    If that is unknown, return whether the file or folder has long been idle.
    """
    owner = _PARTIAL.fullmatch(path.name)
    if owner and owner["host"] == _HOST:
        try:
            os.kill(int(owner["process"]), 0)
        except ProcessLookupError:
            return True
        except OSError:  # the process of another user
            pass
    with contextlib.suppress(OSError):  # its owner has just removed it
        inside = path.iterdir() if path.is_dir() else ()
        newest = max(each.stat().st_mtime for each in (path, *inside))
        return bool(owner) and time.time() - newest > IDLE_SECONDS
    return False


def open_regular(path: Path) -> int:
    """Open or create a file of ours for appending and reading, and return its descriptor.

    Anything else of that name is refused: a link could lead to any file of the user.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(
                f"{path} is needed for a file of this program, and is a link, a folder, a pipe or "
                "a device. Rename or remove it, or name another folder"
            )
    # The system refuses a link that has just been put there, and does not wait for a pipe.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | flags, 0o666)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON document atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def has_index_manifest(folder: Path) -> bool:
    """Return whether a folder holds the manifest of an index.

    Only its first bytes are read, which name the format.
    """
    path = folder / INDEX_MANIFEST
    start = json.dumps({"format": INDEX_FORMAT}, indent=2).removesuffix("\n}").encode()
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(start)) == start
    return False


def append_line(path: Path, line: str) -> None:
    """Append a whole line or nothing. If the last line is truncated, start a new one.

    A link is refused; see `open_regular`.
    """
    size = path.stat().st_size if path.is_file() else 0
    try:
        with os.fdopen(open_regular(path), "a+b") as file:
            if size:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(f"{line}\n".encode())
    except OSError:
        with contextlib.suppress(OSError):  # nothing can be written at all
            os.truncate(path, size)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk, if the system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Read a JSON document.

    Raise a `CheckpointError` if the file is missing, unreadable or not valid JSON.
    """
    if problem := why_unreadable(path):
        raise CheckpointError(problem)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # includes JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON document that is an object; raises like `read_json`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: {str(content)[:60]}")
    return content


def write_sealed(path: Path, content: Mapping[str, Any], files: Iterable[Path] = ()) -> None:
    """Write a JSON object with its checksum and those of files, which are in the same folder."""
    content = {**content, "files": file_digests(path.parent, files)}
    write_json(path, content | {"sha256": json_digest(content)})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Read what `write_sealed` has written.

    The error of a damaged document or file ends with the remedy.
    """
    try:
        content = read_json_object(path)
        if content.pop("sha256", None) != json_digest(content):
            raise CheckpointError(f"{path} differs from its checksum")
        if name := first_changed(path.parent, content.pop("files")):
            raise CheckpointError(f"{path.parent / name} is missing or differs from its checksum")
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{error}. {remedy}") from error
    return content


# Locks


def lock(path: Path, *, wait: bool = False) -> TextIO:
    """Open and lock a file.

    Closing it frees the lock, and so does the end of the processes that have it open. The file is
    created with its folder, and it stays. Without `wait`, a lock that is taken raises `InUseError`,
    which names the folder and the process. On a file system without locks, nothing is locked.
    A file of that name that this program has not written raises `CheckpointError`.
    """
    safe, instead = "Complete files there are unchanged.", "give another folder"
    with disk_errors(path.parent, safe=safe, instead=instead), contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(
            os.fdopen(open_regular(path), "a+", encoding="utf-8", errors="replace")
        )
        try:
            is_locked = filelock.lock_descriptor(file.fileno(), blocking=wait)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                raise
            is_locked = True
        file.seek(0)
        holder = file.read(_LONGEST_HOLDER).strip("\0\n")  # zeros: the machine has stopped
        if holder and not _HOLDER.fullmatch(holder):
            raise CheckpointError(
                f"{path} is needed as a lock, and is a file of another program. Rename or remove "
                "it, or name another folder"
            )
        if not is_locked:
            raise InUseError(f"{path.parent} is in use by {holder or 'another process'}")
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()} since {now}\n")
        file.flush()
        stack.pop_all()  # keep the file open
    return file


# Folders


@contextlib.contextmanager
def replace_dir(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets the name `path` if the block succeeds.

    It replaces an earlier folder. The old folder gives up its name once the new one is on disk, and
    gets it back if the new one cannot take it. A process killed between the two renames leaves the
    old folder as `NAME.*.old` until the next replacement. The name of the temporary folder contains
    the host and process that write to it. Those of dead processes are removed first.
    """
    path = path.resolve()  # a symbolic link stays a link
    _remove_abandoned(path.parent)
    old = path.with_name(f"{path.name}.{uuid.uuid4().hex}.old")
    new = _partial(path)
    new.mkdir(parents=True)
    try:
        yield new
        for each in (*new.rglob("*"), new):
            sync(each)
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # report the first error
                if not new.exists():
                    path.rename(new)
                if old.exists():
                    old.rename(path)
            raise
        for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 32}.old"):
            shutil.rmtree(left, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
