"""Lines and encodings: what is in a file is read, or stands in the ledger."""

import bz2
import gzip
import io
import lzma
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.documents.ledger import LONGEST_TEXT, TOO_LONG, Ledger
from diffcse_jax.documents.text import encodings
from diffcse_jax.documents.text.encodings import decode
from diffcse_jax.documents.text.lines import extension, lines_of, open_bytes, read_lines
from diffcse_jax.errors import DataError

COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


def numbered(content: bytes, ledger: Ledger | None = None, **options) -> list[tuple[int, str]]:
    return list(lines_of(io.BytesIO(content), "a.txt", ledger or Ledger("a.txt"), **options))


def texts(content: bytes, ledger: Ledger | None = None) -> list[str]:
    return [text for _, text in numbered(content, ledger)]


# Ends of lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"one\n\ntwo", ["one", "", "two"]),
        (
            b"\xef\xbb\xbfA man plays the guitar.\r\nIt rains.\r\n",
            ["A man plays the guitar.", "It rains."],
        ),
        (b"one\rtwo\rthree\r", ["one", "two", "three"]),  # of an old Mac
        (b"one\rtwo\r\rthree\n", ["one", "two", "", "three"]),
        (
            b"10 %\r20 %\nnext\nlast\n",
            ["10 %\r20 %", "next", "last"],
        ),  # a carriage return in a line
        (
            "one\u2028two\x85three\x0b\x0c\x1cfour\n".encode(),
            ["one\u2028two\x85three\x0b\x0c\x1cfour"],
        ),
    ],
)
def test_line_feeds_or_in_old_files_carriage_returns_end_lines(content, expected):
    ledger = Ledger("a.txt")
    assert texts(content, ledger) == expected
    assert not ledger.lines()


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\ufeff"))), st.data())
def test_lines_are_read_back_whatever_the_size_of_the_blocks(written, data):
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    content = "".join(f"{line}{end}" for line in written)
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
    before, encodings.BLOCK = encodings.BLOCK, data.draw(st.integers(40, 100))
    try:
        found = numbered(content.encode(encoding, "ignore"))
        kept = numbered(content.encode(encoding, "ignore"), keep_ends=True)
    finally:
        encodings.BLOCK = before
    assert found == list(enumerate(written, 1))
    assert "".join(text for _, text in kept) == content


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_long_lines_are_cut_off_while_they_are_read_and_entered_in_the_ledger(tmp_path, end):
    path = tmp_path / "a.txt.gz"
    long = b"\xc3\xa9" * LONGEST_TEXT
    path.write_bytes(
        gzip.compress(end.join([b"one", b"a" * 60_000_000, long, long + b"a", b"two"]))
    )
    ledger = Ledger("a.txt")
    tracemalloc.start()
    found = [(number, text[:9]) for number, text in read_lines(path, "a.txt.gz", ledger)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [(1, "one"), (3, "é" * 9), (5, "two")]
    assert ledger.lines() == [f"left out 2 texts: 2 {TOO_LONG} (a.txt.gz, lines 2, 4)"]
    assert peak < 24 * encodings.BLOCK


# Encodings

SENTENCES = {
    "windows-1252": "Schlüssel;Der Schlüssel liegt bei der Pförtnerin. „Danke“, sagt sie.\n",
    "windows-1250": "Zażółć gęślą jaźń. Biblioteka jest otwarta od dziewiątej.\n",
    "windows-1251": "Библиотека открывается в девять часов.\n",
    "koi8-r": "Кафе закрыто в понедельник.\n",
    "cp932": "図書館は九時に開きます。カフェは月曜日に休みです。\n",
    "iso2022_jp": "図書館は九時に開きます。\n",
    "gb18030": "图书馆九点开门。咖啡馆星期一关门。\n",
    "utf-16-le": "Библиотека opens в девять.\n",
    "utf-16-be": "图书馆九点开门。咖啡馆星期一关门。\n",
}  # fmt: skip


@pytest.mark.parametrize("encoding", SENTENCES)
def test_other_encodings_are_found_and_said(encoding):
    sentence = SENTENCES[encoding]
    ledger = Ledger("a.txt")
    assert texts((sentence * 2).encode(encoding), ledger) == [sentence[:-1]] * 2
    assert ledger.lines() == [f"a.txt: not UTF-8; read as {encoding}"]
    note = f"not UTF-8; read as {encoding}"
    assert decode(sentence.encode(encoding)) == (sentence, (note,))


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("It\u2019s a \u201csmart\u201d quote \u2013 really\u2026\nYes.\n", "windows-1252"),
        ("Er sagte \u201eHallo\u201c \u2013 und ging.\n" * 30, "windows-1252"),
        ("\u00bd cup of sugar \u00d7 3\n" * 30, "windows-1252"),
        ("Die T\u00fcr \u00f6ffnet sich f\u00fcr sch\u00f6ne G\u00e4ste.\n" * 3, "cp850"),
        ("Le caf\u00e9 est ferm\u00e9. La sant\u00e9 et la beaut\u00e9.\n" * 5, "cp850"),
        (
            "\u043a\u0430\u043a \u043d\u0430\u0439\u0442\u0438 \u0440\u0430\u0431\u043e\u0442\u0443\n"
            * 5,
            "koi8-r",
        ),
        (
            "Die T\u00fcr \u00f6ffnet sich f\u00fcr G\u00e4ste. It\u2019s \u201cso\u201d.\n" * 3,
            "mac-roman",
        ),
    ],
)
def test_typographic_marks_are_those_of_windows(text, encoding):
    note = f"not UTF-8; read as {encoding}"
    assert decode(text.encode(encoding.replace("windows-", "cp"))) == (text, (note,))


@pytest.mark.parametrize(
    ("content", "expected", "note"),
    [
        (b"The caf\xe9 is open.\n\nThe end.", ["The caf\xe9 is open.", "", "The end."],
         "not UTF-8; read as windows-1252"),
        ("Où êtes-vous né ? À côté du café fermé".encode("cp1252"),
         ["Où êtes-vous né ? À côté du café fermé"],
         "not UTF-8; read as windows-1252"),
        ("Café, “yes”\n".encode() + "café “no”\n".encode("cp1252"), ["Café, “yes”", "café “no”"],
         "not UTF-8 in 1 line; read there as windows-1252"),
        ("日本語\n日本".encode()[:-1], ["日本語", "日\ufffd"],
         "not utf-8 in 1 line; broken characters became U+FFFD"),
        (b"\x81\x8d\n", ["\ufffd\ufffd"],
         "not windows-1252 in 1 line; broken characters became U+FFFD"),
        ("a \ud83d b\n".encode("utf-16", "surrogatepass"), ["a \ufffd b"],
         "not utf-16-le in 1 line; broken characters became U+FFFD"),
        ("café\n".encode("cp1252") * 9 + "café\n".encode(), ["café"] * 10,
         "not UTF-8; read as windows-1252"),
    ],
)  # fmt: skip
def test_bytes_that_do_not_fit_cost_nothing_but_themselves(content, expected, note):
    ledger = Ledger("a.txt")
    assert texts(content, ledger) == expected
    assert f"a.txt: {note}" in ledger.notes
    assert note in decode(content).notes


def test_bytes_far_from_the_start_that_are_not_utf8_are_said(monkeypatch):
    monkeypatch.setattr(encodings, "BLOCK", 1000)
    plain = "A plain line, and a café.\n" * 100
    ledger = Ledger("a.txt")
    found = texts(plain.encode() + b"na\xefve\n" + plain.encode() + b"\xe9", ledger)
    assert found == [*plain.splitlines(), "na\u00efve", *plain.splitlines(), "é"]
    assert ledger.lines() == ["a.txt: not UTF-8 in 2 lines; read there as windows-1252"]
    (note,) = decode(plain.encode() + b"na\xefve\n").notes
    assert note == "not UTF-8 in 1 line; read there as windows-1252"


@pytest.mark.parametrize(
    "content", [b"abc\0def\n", b"caf\xe9 and a \0 in the middle of Latin text\n"]
)
def test_a_nul_byte_is_not_utf16(content):
    assert "\0" in decode(content).text


@given(
    st.binary(max_size=200)
    | st.lists(st.sampled_from([b"\n", b"\r", b"\xe9", b"a", b"\0", b"\x1b$B"])).map(b"".join)
)
def test_any_bytes_give_text_that_can_be_encoded(content):
    text = decode(content).text
    text.encode()
    ledger = Ledger("a.txt")
    kept = numbered(content, ledger, keep_ends=True, longest=3)
    left_out = sum(entry.count for entry in ledger.left_out.values())
    numbers = [number for number, _ in kept]
    assert numbers == sorted(set(numbers))
    everything = numbered(content, keep_ends=True)
    assert len(kept) + left_out == len(everything)
    assert "".join(line for _, line in everything) == text


# Files


def test_compressed_files_have_the_extension_of_what_is_in_them():
    names = ["a.txt", "a.TXT.GZ", "a.csv.xz", "a.jsonl.bz2", "a.json.zst", "a.b.gz", "a"]
    assert [extension(Path(name)) for name in names] == [
        ".txt", ".txt", ".csv", ".jsonl", ".json", ".b", ""
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_archives_are_named_and_several_parts_are_read(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    content = COMPRESS[suffix](b"one\n")
    path.write_bytes(content * 2)
    assert list(read_lines(path, "a.txt", Ledger("a"))) == [(1, "one"), (2, "one")]
    if suffix in (".xz", ".bz2"):
        path.write_bytes(content + bytes(3 * encodings.BLOCK) + content + bytes(8))
        assert list(read_lines(path, "a.txt", Ledger("a"))) == [(1, "one"), (2, "one")]
    for damaged in (content[:-6], b"not an archive", content + b"\xff" + content[1:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.txt\.\w+: damaged archive"):
            list(read_lines(path, "a.txt", Ledger("a")))


@pytest.mark.parametrize("name", ["missing.txt", "", "a\0b", "x" * 300, "\udcff"])
def test_files_that_cannot_be_read_are_named(tmp_path, name):
    with pytest.raises(DataError, match="cannot read"), open_bytes(tmp_path / name):
        pass


def test_an_account_has_plurals_and_no_marks_of_them():
    ledger = Ledger("a")
    ledger.leave_out("code block{s}", number=6)
    ledger.leave_out("part{s} with comments")
    assert ledger.lines() == ["left out 7 texts: 6 code blocks, 1 part with comments"]
