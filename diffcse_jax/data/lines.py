"""Lines of files that anybody may have written: memory stays the same, whatever a file holds.

Only regular files are opened, since reading a pipe or a device may never end, and no line is held beyond a limit.
"""

import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcse_jax.errors import DataError
from diffcse_jax.io import why_unreadable

LONGEST_LINE = 1 << 17  # characters; the csv module's limit of a field, too
MEMORY_OF_XZ = 1 << 27  # bytes that decompressing may take; what `xz -9` writes needs half of it
_LONGEST_IN_BYTES = 4 * LONGEST_LINE  # in UTF-8, at most
_BLOCK = 1 << 16


def byte_lines(path: Path) -> Iterator[bytes | None]:
    """Lines with their line feeds, decompressed (.gz, .xz); None in place of one that is too long to be held.

    Raises:
        DataError: the file cannot be read, or it is a damaged archive.
    """
    with _opened(path) as file:
        yield from lines_of(file)


def lines_of(file: Any) -> Iterator[bytes | None]:
    """`byte_lines` of an open binary file, such as `sys.stdin.buffer`."""
    while line := file.readline(_LONGEST_IN_BYTES):
        if len(line) < _LONGEST_IN_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_IN_BYTES)
        yield None


def whole(path: Path, most: int, *, instead: str) -> bytes:
    """The content of a file, decompressed (.gz, .xz).

    Args:
        path: the file.
        most: bytes that it may have.
        instead: what to do with a larger one.

    Raises:
        DataError: it cannot be read, is a damaged archive, or too large.
    """
    with _opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path}: more than {most:,} bytes, which are too many to be held at once; {instead}")
    return content


def text_lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and lines of a text file, whose ends may be those of any platform.

    Raises:
        DataError: the file cannot be read, is not in this encoding or holds NUL, or a line is too long.
    """
    if problem := why_unreadable(path):
        raise DataError(problem)
    try:
        with path.open(encoding=encoding) as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path}, line {number}: longer than {LONGEST_LINE:,} characters")
                if "\0" in line:
                    raise DataError(f"{path}, line {number}: holds NUL; is it text?")
                yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    if problem := why_unreadable(path):
        raise DataError(problem)
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb", buffering=0))
            raw: io.RawIOBase | gzip.GzipFile = file
            if path.suffix.lower() == ".gz":
                raw = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif path.suffix.lower() == ".xz":
                raw = stack.enter_context(_XzFile(file))
            yield stack.enter_context(io.BufferedReader(raw, _BLOCK))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


class _XzFile(io.RawIOBase):
    """The content of an .xz file. Unlike `lzma.LZMAFile` it refuses one that asks for much memory."""

    def __init__(self, file: io.RawIOBase):
        self._file = file
        self._decompressor = lzma.LZMADecompressor(memlimit=MEMORY_OF_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            compressed = b""
            if self._decompressor.eof:  # another stream may follow, after padding
                compressed = self._decompressor.unused_data.lstrip(b"\0")
                while not compressed:
                    block = self._file.read(_BLOCK)
                    if not block:
                        return 0
                    compressed = block.lstrip(b"\0")
                self._decompressor = lzma.LZMADecompressor(memlimit=MEMORY_OF_XZ)
            elif self._decompressor.needs_input:
                compressed = self._file.read(_BLOCK) or b""
                if not compressed:
                    raise EOFError("the file ends before its end marker")
            content = self._decompressor.decompress(compressed, len(buffer))
        buffer[: len(content)] = content
        return len(content)
