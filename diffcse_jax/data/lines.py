"""Lines and text of files, compressed or not, in any encoding: one pass, bounded memory.

Text is UTF-8 until bytes show that it is not. Then a library decides, by a sample of the bytes that
do not fit, and a note in the ledger says so. A file is never refused for its encoding: bytes that
nothing can decode become U+FFFD.

A line ends with a line feed, which may follow a carriage return. A carriage return alone ends a
line too if it is more frequent than the line feed at the start of the file, as on Macs before 2001;
in other files it is white space inside a line. No other character ends a line.
"""

import bz2
import codecs
import contextlib
import dataclasses
import gzip
import io
import itertools
import lzma
import re
import string
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from diffcse_jax.data.ledger import Ledger, Place
from diffcse_jax.errors import DataError, counted
from diffcse_jax.io import why_unreadable

LONGEST_TEXT = 1 << 17  # characters of a line or of another text; `ledger.TOO_LONG` names the limit
BLOCK = 1 << 20  # bytes that are read at once
SAMPLE = 1 << 16  # bytes from which an encoding is guessed
BROKEN = "\ufffd"  # stands for what cannot be decoded

UTF8 = "utf-8"
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}

# What text that is not UTF-8 may be. With all encodings that the library knows, short texts are
# often taken for one that nobody uses.
WINDOWS = "cp1252"
EAST_ASIAN = ("cp932", "euc-jp", "iso2022_jp_2", "gb18030", "big5", "cp949")
OTHERS = (
    *("cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("koi8-r", "koi8-u", "iso8859-2", "mac-roman", "cp850", "cp866"),
)
SEVERAL_BYTES = ("cp932", "cp949", "shift", "euc", "iso2022", "gb", "big5")  # how names begin
FEWEST = 3  # bytes beyond ASCII from which an encoding is guessed; with fewer, it is windows-1252
ASCII = bytes(range(128))
LATIN = string.ascii_letters.encode() + b" "
CONTROLS = bytes([*range(1, 9), *range(14, 32)])  # those that text does not have, without NUL
OTHER_SCRIPT = "[\u0370-\u0eff]"  # Greek to Lao
MIXED = re.compile(f"[A-Za-z]{OTHER_SCRIPT}|{OTHER_SCRIPT}[A-Za-z]")  # such words are misread


# Files


def extension(path: Path) -> str:
    """Return the extension in lower case, without that of a compressed file."""
    is_compressed = path.suffix.lower() in COMPRESSED
    return (path.with_suffix("") if is_compressed else path).suffix.lower()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
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


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zstandard,
}


# Lines and text


@runtime_checkable
class Bytes(Protocol):
    """A file or stream, compressed or not."""

    def read(self, size: int = -1, /) -> bytes: ...


def read_lines(
    path: Path, name: str, ledger: Ledger, *, longest: int = LONGEST_TEXT, keep_ends: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; see `lines_of`."""
    with opened(path) as file:
        yield from lines_of(file, name, ledger, longest=longest, keep_ends=keep_ends)


def lines_of(
    stream: Bytes,
    name: str,
    ledger: Ledger,
    *,
    longest: int = LONGEST_TEXT,
    keep_ends: bool = False,
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a stream, such as the standard input, with their numbers from 1.

    A longer line than `longest` characters is skipped while it is read, and entered in the ledger.
    Blank lines are yielded, because they may separate paragraphs.

    Args:
        stream: Its bytes are read once, from the current place to the end.
        name: The source in the ledger, as the user named it.
        ledger: Receives the lines that are too long, and what was assumed about the encoding.
        longest: The limit in characters, without the end of the line.
        keep_ends: Yield lines with the characters that end them.
    """
    reason = f"longer than {longest:,} characters"
    newline: str | None = None
    open_line = _OpenLine(longest)
    number = 1
    for text in _texts(stream, name, ledger):
        if newline is None and ("\n" in text or "\r" in text):
            newline = _newline(text)
        if newline == "\n" and not open_line.size and text.endswith("\n"):
            lines = _simple_lines(text, keep_ends)
            if max(map(len, lines)) <= longest:
                yield from enumerate(lines, number)
                number += len(lines)
                continue
        for piece in io.StringIO(text, newline="\n" if newline is None else newline):
            if not open_line.add(piece, may_end_in_return=newline == ""):
                continue
            if open_line.is_cut:
                ledger.leave_out(reason, Place(name, number))
            else:
                yield number, open_line.text(keep_ends)
            open_line = _OpenLine(longest)
            number += 1
    if open_line.is_cut:
        ledger.leave_out(reason, Place(name, number))
    elif open_line.size:
        yield number, open_line.text(keep_ends)


def read_text(path: Path, name: str, ledger: Ledger) -> Iterator[str]:
    """Yield the text of a file in blocks, with its ends of lines, but without a byte-order mark."""
    with opened(path) as file:
        yield from _texts(file, name, ledger)


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


# Encodings


class Decoded(NamedTuple):
    """The text of a whole file."""

    text: str
    encoding: str  # of most lines, such as `utf-8`, `windows-1252` or `utf-16-le`
    replaced: int  # lines that are not in it, and were read in another one or with U+FFFD
    notes: tuple[str, ...]  # what was assumed, for people: `not UTF-8; read as windows-1252`


def decode(content: bytes) -> Decoded:
    """Decode a whole file. Its ends of lines stay, a byte-order mark does not."""
    decoder = _Decoder()
    text = "".join(_decoded(io.BytesIO(content), decoder))
    number = decoder.in_fallback + decoder.broken
    return Decoded(text, _label(decoder.encoding), number, (*decoder.assumed(), *decoder.found()))


def _texts(stream: Bytes, name: str, ledger: Ledger) -> Iterator[str]:
    """Yield decoded blocks, and note in the ledger what was assumed."""
    decoder = _Decoder()
    for text in _decoded(stream, decoder):
        for note in decoder.assumed():
            ledger.note(f"{name}: {note}")
        yield text
    for note in decoder.found():  # the numbers are known only now
        ledger.note(f"{name}: {note}")


def _decoded(stream: Bytes, decoder: "_Decoder") -> Iterator[str]:
    start = stream.read(BLOCK)
    rest = start[decoder.begin(start) :]
    parts = itertools.chain([rest], iter(lambda: stream.read(BLOCK), b""))
    yield from decoder.wide(parts) if decoder.is_wide else map(decoder.block, _blocks(parts))


def _blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield bytes in blocks that end with a line, or at least not inside a character."""
    rest = b""
    for part in parts:
        block = rest + part
        end = _safe_end(block)
        rest = block[end:]
        if end:
            yield block[:end]
    if rest:
        yield rest


def _safe_end(block: bytes) -> int:
    """Return the end of the last line, else a place that is not inside a character."""
    if end := block.rfind(b"\n") + 1:
        return end
    if end := block.rfind(b"\r", 0, -1) + 1:  # after the last byte, a line feed may follow
        return end
    # In no encoding do these bytes stand inside another character.
    return max(block.rfind(mark) for mark in (b" ", b",", b'"')) + 1 or len(
        block.removesuffix(b"\r")
    )


@dataclasses.dataclass
class _Decoder:
    """Decode the blocks of one text, and remember what was assumed."""

    encoding: str = UTF8
    fallback: str = ""  # the encoding of lines that are not UTF-8, once there are some
    is_guessed: bool = False
    in_fallback: int = 0  # lines
    broken: int = 0  # lines with U+FFFD for what cannot be decoded
    beyond_ascii: int = 0  # bytes that show that text is UTF-8

    @property
    def is_wide(self) -> bool:
        """Return whether a character has two or four bytes."""
        return self.encoding.startswith(("utf-16", "utf-32"))

    @property
    def has_several_bytes(self) -> bool:
        """Return whether some characters have several bytes, but not those of UTF-8."""
        return self.encoding.startswith(SEVERAL_BYTES)

    def begin(self, start: bytes) -> int:
        """Look at the first bytes, and return the length of a byte-order mark."""
        for mark, encoding in BYTE_ORDER_MARKS.items():
            if start.startswith(mark):
                self.encoding = encoding
                return len(mark)
        if wide := _wide_encoding(start):
            self.encoding = wide
            self.is_guessed = True
        elif b"\x1b$" in start and start.isascii():  # the only encoding that looks like ASCII
            guessed = _guess(start[:SAMPLE])
            if guessed.startswith("iso2022"):
                self.encoding = self.fallback = guessed
                self.is_guessed = True
        return 0

    def wide(self, parts: Iterable[bytes]) -> Iterator[str]:
        """Decode UTF-16 or UTF-32, in blocks that end with a line if one ends in them."""
        decoder = codecs.getincrementaldecoder(self.encoding)("replace")
        rest = ""
        for part in itertools.chain(parts, [b""]):
            text = rest + decoder.decode(part, final=not part)
            end = text.rfind("\n") + 1 or len(text.removesuffix("\r"))  # a line feed may follow
            end = end if part else len(text)
            rest = text[end:]
            if BROKEN in text[:end]:
                self.broken += sum(BROKEN in line for line in text[:end].split("\n"))
            yield text[:end]

    def block(self, block: bytes) -> str:
        """Decode whole lines."""
        try:
            text = block.decode(self.encoding if self.has_several_bytes else UTF8)
        except UnicodeDecodeError:
            if not self.fallback:
                self._choose(block)
            return "".join(map(self._line, block.splitlines(keepends=True)))
        self.beyond_ascii += len(block) - len(text)
        return text

    def _choose(self, block: bytes) -> None:
        """Decide what the text is, by the first block that is not UTF-8."""
        kept, lost = _as_utf8(block)
        self.fallback = _guess(b"".join(_not_utf8(block)))
        if kept + self.beyond_ascii < lost:
            self.encoding = self.fallback
            self.is_guessed = True

    def _line(self, line: bytes) -> str:
        # A line with one Chinese word may be valid UTF-8 by chance. In other encodings that does
        # not happen, so that lines in UTF-8 among others are read as what they are.
        for encoding in (self.encoding, UTF8) if self.has_several_bytes else (UTF8,):
            with contextlib.suppress(UnicodeDecodeError):
                return line.decode(encoding)
        kept, lost = _as_utf8(line)
        if self.encoding != UTF8 or kept < lost:
            with contextlib.suppress(UnicodeDecodeError):
                text = line.decode(self.fallback)
                self.in_fallback += self.encoding == UTF8
                return text
        self.broken += 1
        return line.decode(self.encoding, errors="replace")

    def assumed(self) -> list[str]:
        """Return the encoding for people, if it was guessed."""
        return [f"not UTF-8; read as {_label(self.encoding)}"] if self.is_guessed else []

    def found(self) -> list[str]:
        """Return for people how many lines were not in the encoding of the text."""
        notes = []
        if self.in_fallback:
            lines = counted(self.in_fallback, "line{s}")
            notes.append(f"not UTF-8 in {lines}; read there as {_label(self.fallback)}")
        if self.broken:
            lines = counted(self.broken, "line{s}")
            notes.append(f"not {_label(self.encoding)} in {lines}; broken characters became U+FFFD")
        return notes


def _as_utf8(content: bytes) -> tuple[int, int]:
    """Return how many characters beyond ASCII are valid in UTF-8, and how many are not."""
    text = content.decode(UTF8, errors="replace")
    lost = text.count(BROKEN) - content.count(BROKEN.encode())
    return len(text) - _number(content, ASCII) - lost, lost


def _not_utf8(block: bytes) -> Iterator[bytes]:
    """Yield the lines that are in another encoding than UTF-8, up to the size of a sample."""
    size = 0
    for line in block.splitlines(keepends=True):
        if line.isascii():
            continue
        kept, lost = _as_utf8(line)
        if kept < lost:
            yield line[: SAMPLE - size]
            size += len(line)
        if size >= SAMPLE:
            return


def _guess(sample: bytes) -> str:
    """Return the encoding of bytes that are not UTF-8, as Python names it."""
    import chardet  # takes a tenth of a second, which few texts need

    if len(sample) - _number(sample, ASCII) < FEWEST and b"\x1b" not in sample:
        return WINDOWS
    found = chardet.detect(sample, include_encodings=(WINDOWS, *EAST_ASIAN, *OTHERS))["encoding"]
    encoding = codecs.lookup(found or WINDOWS).name
    text = sample.decode(encoding, errors="replace")
    is_misread = 2 * len(MIXED.findall(text)) > len(re.findall(OTHER_SCRIPT, text))
    is_same = text == sample.decode(WINDOWS, errors="replace")
    return WINDOWS if is_misread or is_same else encoding


def _wide_encoding(start: bytes) -> str:
    """Return `utf-16-le` or `utf-16-be` if bytes are that without a mark, else an empty string.

    Each other byte of Latin text is NUL then. Of text in other scripts, at least each space and
    line feed has one.
    """
    nuls = start.count(0)
    if 100 * nuls < max(len(start), 1):
        return ""
    is_mostly_latin = 10 * _number(start, LATIN) > 6 * len(start)
    if 4 * nuls < len(start) and (is_mostly_latin or _is_plain(start)):
        return ""  # text with a few NUL bytes
    encoding = min("utf-16-le", "utf-16-be", key=lambda each: _strangeness(start, each))
    strange, _ = _strangeness(start, encoding)
    return encoding if 40 * strange <= len(start) else ""


def _number(content: bytes, of: bytes) -> int:
    """Return how many bytes are one of some bytes."""
    return len(content) - len(content.translate(None, of))


def _strangeness(start: bytes, encoding: str) -> tuple[int, int]:
    """Return how many characters are not text, and how many blocks of 256 they come from."""
    text = start[: SAMPLE & ~1].decode(encoding, errors="replace")
    strange = sum(not (each.isprintable() or each.isspace()) or each == BROKEN for each in text)
    return strange, len({ord(each) >> 8 for each in text})


def _is_plain(start: bytes) -> bool:
    """Return whether bytes are UTF-8 with few control characters. The last character may be cut."""
    try:
        codecs.getincrementaldecoder(UTF8)().decode(start)
    except UnicodeDecodeError:
        return False
    return 20 * _number(start, CONTROLS) <= len(start)


def _label(encoding: str) -> str:
    """Return the name of an encoding as it stands in web pages, and as `iconv` knows it."""
    return re.sub(r"^cp(125\d)$", r"windows-\1", encoding)
