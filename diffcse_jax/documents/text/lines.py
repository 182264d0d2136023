"""Lines and text of files, compressed or not, in any encoding: one pass, bounded memory.

Text is UTF-8 until bytes show that it is not. Then a library decides, by a sample of the bytes that
do not fit, and a note in the ledger says so. A file is never refused for its encoding: bytes that
nothing can decode become U+FFFD.

A line ends with a line feed, which may follow a carriage return. A carriage return alone ends a
line too if it is more frequent than the line feed at the start of the file, as on Macs before 2001;
in other files it is white space inside a line. No other character ends a line.
"""

import bz2
import contextlib
import dataclasses
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from diffcse_jax.documents.ledger import LONGEST_TEXT, Ledger, Place, usable
from diffcse_jax.documents.text.encodings import BLOCK, Bytes, Decoder, decoded
from diffcse_jax.errors import DataError
from diffcse_jax.io import why_unreadable

LONGEST_OWN = 1 << 24  # characters of a line of a file that a user wrote: a whole book

# Files


def extension(path: Path) -> str:
    """Return the extension in lower case, without that of a compressed file."""
    is_compressed = path.suffix.lower() in COMPRESSED
    return (path.with_suffix("") if is_compressed else path).suffix.lower()


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed.

    Raises `DataError` if the file cannot be read or is damaged, also while it is read in the block.
    """
    if problem := why_unreadable(path):
        raise DataError(problem)
    suffix = path.suffix.lower()
    try:
        with COMPRESSED.get(suffix, _open_plain)(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error})") from error
    except OSError as error:
        if suffix in COMPRESSED and error.errno is None:  # from the library, not from the system
            raise DataError(f"{path}: damaged archive ({error})") from error
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _open_plain(path: Path) -> Any:
    return path.open("rb")


def _open_zstandard(path: Path) -> Any:
    return pa.input_stream(str(path), compression="zstd")


class _Streams(io.RawIOBase):
    """A bz2 or xz file of one or more compressed streams, which NUL bytes may separate.

    Python's own readers end silently before a stream whose start is damaged.
    """

    def __init__(
        self, path: Path, start: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
    ) -> None:
        self.file = path.open("rb")
        self.start = start
        self.stream = start()

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        """Fill the start of a buffer. At the end, return 0."""
        while True:
            block = b""
            if self.stream.eof:
                block = self._next_stream()
                if not block:
                    return 0
                self.stream = self.start()
            elif self.stream.needs_input and not (block := self.file.read(BLOCK)):
                raise EOFError("it ends before the end of the stream")
            content = self.stream.decompress(block, len(target))
            if content:
                target[: len(content)] = content
                return len(content)

    def _next_stream(self) -> bytes:
        """Return the start of the next stream, or nothing at the end of the file."""
        start = self.stream.unused_data.lstrip(b"\0")
        while not start:
            block = self.file.read(BLOCK)
            if not block:
                return b""
            start = block.lstrip(b"\0")
        return start

    def close(self) -> None:
        """Close the file."""
        self.file.close()
        super().close()


def _open_bzip2(path: Path) -> Any:
    return io.BufferedReader(_Streams(path, bz2.BZ2Decompressor), BLOCK)


def _open_xz(path: Path) -> Any:
    return io.BufferedReader(_Streams(path, lzma.LZMADecompressor), BLOCK)


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": _open_xz,
    ".bz2": _open_bzip2,
    ".zst": _open_zstandard,
}


# Lines and text

Numbered = tuple[int, str]  # the number of a line, from 1, and its text


class LineBlock(NamedTuple):
    """Lines that have text, without white space around them."""

    numbers: Sequence[int]  # of the lines in the file, from 1
    texts: Sequence[str]


def read_blocks(path: Path, name: str, ledger: Ledger) -> Iterator[LineBlock]:
    """Yield the lines of a file that have text, in blocks; see `blocks_of`."""
    with open_bytes(path) as file:
        yield from blocks_of(file, name, ledger)


def blocks_of(stream: Bytes, name: str, ledger: Ledger) -> Iterator[LineBlock]:
    """Yield the lines of a stream that have text, in blocks.

    Other lines are entered in the ledger, and so is the number of those that are kept.
    """
    for first, lines in _line_batches(stream, name, ledger, longest=LONGEST_TEXT, keep_ends=False):
        texts = [line.strip() for line in lines]
        numbers: Sequence[int] = range(first, first + len(texts))
        if not all(texts) or "\0" in "".join(texts):
            numbers = [
                number
                for number, text in zip(numbers, texts, strict=True)
                if usable((text,), Place(name, number), ledger)
            ]
            texts = [texts[number - first] for number in numbers]
        ledger.keep(len(texts))
        yield LineBlock(numbers, texts)


def read_lines(
    path: Path, name: str, ledger: Ledger, *, longest: int = LONGEST_TEXT, keep_ends: bool = False
) -> Iterator[Numbered]:
    """Yield all lines of a file with their numbers; see `lines_of`."""
    with open_bytes(path) as file:
        yield from lines_of(file, name, ledger, longest=longest, keep_ends=keep_ends)


def lines_with_text(path: Path, ledger: Ledger) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file of the user's own that are not blank, with their numbers from 1.

    An odd line is read with a change or left out, and the ledger counts it.
    """
    for number, line in read_lines(path, str(path), ledger, longest=LONGEST_OWN):
        if line.strip():
            yield number, line


def lines_of(
    stream: Bytes,
    name: str,
    ledger: Ledger,
    *,
    longest: int = LONGEST_TEXT,
    keep_ends: bool = False,
) -> Iterator[Numbered]:
    """Yield all lines of a stream with their numbers from 1.

    A longer line than `longest` characters is skipped while it is read, and entered in the ledger.
    Blank lines are yielded, because they may separate paragraphs.

    Args:
        stream: Its bytes are read once, from the current place to the end.
        name: The source in the ledger, as the user named it.
        ledger: Receives the lines that are too long, and what was assumed about the encoding.
        longest: The limit in characters, without the end of the line.
        keep_ends: Yield lines with the characters that end them.
    """
    for first, lines in _line_batches(stream, name, ledger, longest=longest, keep_ends=keep_ends):
        yield from enumerate(lines, first)


def read_text(path: Path, name: str, ledger: Ledger) -> Iterator[str]:
    """Yield the text of a file in blocks, with its ends of lines, but without a byte-order mark."""
    with open_bytes(path) as file:
        yield from _decoded_blocks(file, name, ledger)


def _line_batches(
    stream: Bytes, name: str, ledger: Ledger, *, longest: int, keep_ends: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a stream in blocks, each with the number of its first line."""
    too_long = f"longer than {longest:,} characters"
    newline: str | None = None
    open_line = _OpenLine(longest)
    number = 1
    for text in _decoded_blocks(stream, name, ledger):
        if newline is None and ("\n" in text or "\r" in text):
            newline = _newline(text)
        if newline == "\n" and not open_line.size and text.endswith("\n"):
            lines = _simple_lines(text, keep_ends)
            if max(map(len, lines)) <= longest:
                yield number, lines
                number += len(lines)
                continue
        for piece in io.StringIO(text, newline="\n" if newline is None else newline):
            if not open_line.add(piece, may_end_in_return=newline == ""):
                continue
            if open_line.is_cut:
                ledger.leave_out(too_long, Place(name, number))
            else:
                yield number, [open_line.text(keep_ends)]
            open_line = _OpenLine(longest)
            number += 1
    if open_line.is_cut:
        ledger.leave_out(too_long, Place(name, number))
    elif open_line.size:
        yield number, [open_line.text(keep_ends)]


def _newline(text: str) -> str:
    """Return what `io.StringIO` takes as `newline`: only line feeds, or all ends of lines."""
    line_feeds = text.count("\n")
    alone = text.count("\r") - text.count("\r\n")
    return "" if alone > line_feeds else "\n"


def _simple_lines(text: str, keep_ends: bool) -> list[str]:
    """Return the lines of a text that ends with a line feed, as only line feeds do."""
    if keep_ends:
        return io.StringIO(text, newline="\n").readlines()
    lines = text.replace("\r\n", "\n").split("\n")
    lines.pop()
    return lines


@dataclasses.dataclass
class _OpenLine:
    """A line of which more may follow. Once it is too long, nothing of it is kept in memory."""

    longest: int
    size: int = 0  # characters without the end
    end: str = ""
    parts: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        return self.size > self.longest

    def add(self, piece: str, *, may_end_in_return: bool) -> bool:
        """Add characters, and return whether they end the line."""
        for end in ("\r\n", "\n", "\r") if may_end_in_return else ("\r\n", "\n"):
            if piece.endswith(end):
                self.end = end
                break
        self.parts.append(piece[: len(piece) - len(self.end)])
        self.size += len(self.parts[-1])
        if self.is_cut:
            self.parts.clear()
        return bool(self.end)

    def text(self, keep_end: bool) -> str:
        """Return the line."""
        return "".join([*self.parts, self.end] if keep_end else self.parts)


def _decoded_blocks(stream: Bytes, name: str, ledger: Ledger) -> Iterator[str]:
    """Yield decoded blocks, and note in the ledger what was assumed."""
    decoder = Decoder()
    for text in decoded(stream, decoder):
        if decoder.is_guessed:
            for note in decoder.assumed():
                ledger.note(f"{name}: {note}")
        yield text
    if decoder.in_fallback or decoder.broken:  # their numbers are known only now
        for note in decoder.exceptions():
            ledger.note(f"{name}: {note}")
