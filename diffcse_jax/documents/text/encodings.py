"""Text of bytes in any encoding.

Text is UTF-8 until bytes show that it is not. Then a library decides, by a sample of the bytes that
do not fit. Bytes that nothing can decode become U+FFFD. Processes that only read documents import
this file, so it imports little.
"""

import codecs
import contextlib
import dataclasses
import io
import itertools
import re
import string
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from diffcse_jax.errors import counted

BLOCK = 1 << 20  # bytes that are read at once
SAMPLE = 1 << 16  # bytes from which an encoding is guessed
REPLACEMENT = "\ufffd"  # stands for what cannot be decoded
# Escapes in JSON, and characters of damaged strings.
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")

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
# Encodings of old systems. Text with few characters beyond ASCII, such as English with typographic
# quotes, is often taken for one of them, and is windows-1252.
OLD = ("cp850", "cp866", "mac-roman", "koi8-r", "koi8-u")
SEVERAL_BYTES = ("cp932", "cp949", "shift", "euc", "iso2022", "gb", "big5")  # how names begin
# Bytes beyond ASCII from which an encoding is guessed. With fewer, it is windows-1252.
FEWEST_BYTES = 3
ASCII = bytes(range(128))
LATIN = string.ascii_letters.encode() + b" "
CONTROLS = bytes([*range(1, 9), *range(14, 32)])  # those that text does not have, without NUL
OTHER_SCRIPT = "[\u0370-\u0eff]"  # Greek to Lao
# Marks of Western Europe: quotes, dashes, currencies and fractions.
MARKS = (
    "\u00a0\u00a3\u00a7\u00a9\u00ae\u00b0\u00b7\u00ab\u00bb\u00bc\u00bd\u00be\u00b9\u00b2"
    "\u00b3\u00bf\u00a1\u00d7\u2013\u2014\u2018\u2019\u201a\u201c\u201d\u201e\u2022\u2026"
    "\u20ac\u2122"
)
# In words of Western Europe, no quote or the like stands between letters, and no low quote after
# one. Russian in KOI8 looks like capitals with accents.
NOT_WESTERN = re.compile(
    r"[^\W\d_][\u00a0-\u00bb\u00bf\u2018\u201a-\u201e\u2026\u2122][^\W\d_]"
    r"|[^\W\d_][\u201a\u201e]"
    r"|[\u00c0-\u00d6\u00d8-\u00de]{3}"
)
LETTERS = re.compile(r"[^\W\d_\u00bc-\u00be\u00b9\u00b2\u00b3]+")
# Capitals, or small letters, of which the first may be a capital.
WESTERN_CAPITAL = "[A-Z\u00c0-\u00d6\u00d8-\u00de\u0152]"
WESTERN_WORD = re.compile(
    rf"{WESTERN_CAPITAL}+|{WESTERN_CAPITAL}?[a-z\u00df-\u00f6\u00f8-\u00ff\u0153]*"
)
MIXED = re.compile(f"[A-Za-z]{OTHER_SCRIPT}|{OTHER_SCRIPT}[A-Za-z]")  # such words are misread


@runtime_checkable
class Bytes(Protocol):
    """A file or stream, compressed or not."""

    def read(self, size: int = -1, /) -> bytes: ...


class Decoded(NamedTuple):
    """The text of a whole file."""

    text: str
    notes: tuple[str, ...]  # what was assumed, for people: `not UTF-8; read as windows-1252`


def decode(content: bytes) -> Decoded:
    """Decode a whole file. Its ends of lines stay, a byte-order mark does not."""
    decoder = Decoder()
    text = "".join(decoded(io.BytesIO(content), decoder))
    return Decoded(text, (*decoder.assumed(), *decoder.exceptions()))


def encodable(text: str) -> str:
    """Return a text with U+FFFD in place of halves of characters, which no encoding has."""
    return text if text.isascii() else HALF_A_CHARACTER.sub(REPLACEMENT, text)


def readable(text: str, mark: str = r"\u") -> str:
    """Return a text in which a byte that is not UTF-8, as in names of files, is spelled out."""
    return HALF_A_CHARACTER.sub(lambda byte: f"{mark}{ord(byte[0]):x}", text)


def decoded(stream: Bytes, decoder: "Decoder") -> Iterator[str]:
    """Yield the text of a stream in blocks, which end with a line if one ends in them."""
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
    end = max(block.rfind(mark) for mark in (b" ", b",", b'"')) + 1
    return end or len(block.removesuffix(b"\r"))


@dataclasses.dataclass
class Decoder:
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
            if REPLACEMENT in text[:end]:
                self.broken += sum(REPLACEMENT in line for line in text[:end].split("\n"))
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

    def exceptions(self) -> list[str]:
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
    lost = text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
    return len(text) - _count(content, ASCII) - lost, lost


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

    if len(sample) - _count(sample, ASCII) < FEWEST_BYTES and b"\x1b" not in sample:
        return WINDOWS
    guess = chardet.detect(sample, include_encodings=(WINDOWS, *EAST_ASIAN, *OTHERS))["encoding"]
    encoding = codecs.lookup(guess or WINDOWS).name
    text = sample.decode(encoding, errors="replace")
    is_misread = 2 * len(MIXED.findall(text)) > len(re.findall(OTHER_SCRIPT, text))
    in_windows = sample.decode(WINDOWS, errors="replace")
    is_western = encoding in OLD and _is_western(in_windows)
    return WINDOWS if is_misread or is_western or text == in_windows else encoding


def _is_western(text: str) -> bool:
    """Return whether all characters beyond ASCII stand where Western European text has them."""
    words = LETTERS.findall(text)
    others = set(LETTERS.sub("", text)) - set(MARKS)
    has_known_marks = all(map(str.isascii, others))
    has_words = all(word.isascii() or WESTERN_WORD.fullmatch(word) for word in words)
    return has_known_marks and has_words and not NOT_WESTERN.search(text)


def _wide_encoding(start: bytes) -> str:
    """Return `utf-16-le` or `utf-16-be` if bytes are that without a mark, else an empty string.

    Each other byte of Latin text is NUL then. Of text in other scripts, at least each space and
    line feed has one.
    """
    nuls = start.count(0)
    if 100 * nuls < max(len(start), 1):
        return ""
    is_mostly_latin = 10 * _count(start, LATIN) > 6 * len(start)
    if 4 * nuls < len(start) and (is_mostly_latin or _is_plain(start)):
        return ""  # text with a few NUL bytes
    encoding = min("utf-16-le", "utf-16-be", key=lambda each: _strangeness(start, each))
    strange, _ = _strangeness(start, encoding)
    return encoding if 40 * strange <= len(start) else ""


def _count(content: bytes, of: bytes) -> int:
    """Count the bytes of `content` that occur in `of`."""
    return len(content) - len(content.translate(None, of))


def _strangeness(start: bytes, encoding: str) -> tuple[int, int]:
    """Return how many characters are not text, and how many blocks of 256 they come from."""
    text = start[: SAMPLE & ~1].decode(encoding, errors="replace")
    strange = sum(
        not (each.isprintable() or each.isspace()) or each == REPLACEMENT for each in text
    )
    return strange, len({ord(each) >> 8 for each in text})


def _is_plain(start: bytes) -> bool:
    """Return whether bytes are UTF-8 with few control characters. The last character may be cut."""
    try:
        codecs.getincrementaldecoder(UTF8)().decode(start)
    except UnicodeDecodeError:
        return False
    return 20 * _count(start, CONTROLS) <= len(start)


def _label(encoding: str) -> str:
    """Return the name of an encoding as it stands in web pages, and as `iconv` knows it."""
    return re.sub(r"^cp(125\d)$", r"windows-\1", encoding)
