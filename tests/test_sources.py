"""Rows of files in each format, of ArrayRecord data sets and of text in memory, and what a name can stand for."""

import gzip
import itertools
import json
import lzma
import math
import os
import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_golden import PAIRS, Prepared

from diffcse_jax.config import DataConfig
from diffcse_jax.data import readers
from diffcse_jax.data.readers import LONGEST_TEXT, Corpus
from diffcse_jax.data.sources import as_texts, open_corpus, open_documents, open_text, write_sentences
from diffcse_jax.errors import DataError


def opened(path: Path, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(path), **options))


def corpus_of(path: Path, content: bytes, **options) -> Corpus:
    compress = {".gz": gzip.compress, ".xz": lambda content: lzma.compress(content, preset=0)}
    path.write_bytes(compress.get(path.suffix.lower(), bytes)(content))
    return opened(path, **options)


def written(extension: str, rows: list[tuple[str, ...]], columns: tuple[str, ...]) -> bytes:
    """Return the rows in a file format, as pandas writes it."""
    if extension == ".txt":
        return "".join(f"{row[0]}\n" for row in rows).encode()
    table = pd.DataFrame(rows, columns=columns)
    if extension == ".parquet":
        return table.to_parquet()
    if extension in (".json", ".jsonl"):
        return table.to_json(orient="records", lines=extension == ".jsonl").encode()
    return table.to_csv(index=False, sep="\t" if extension == ".tsv" else ",").encode()


# All of Unicode, including line separators, except the characters that end a line or a file.
sentences = st.text(st.characters(codec="utf-8", exclude_characters="\n\0\ufeff"), min_size=1).filter(str.strip)
FORMATS = [
    *itertools.product([".txt", ".csv", ".tsv", ".jsonl", ".json", ".parquet"], [""]),
    (".txt", ".gz"), (".jsonl", ".xz"), (".csv", ".XZ"),
]  # fmt: skip


@pytest.mark.parametrize(("extension", "compression"), FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(data=st.data())
def test_written_rows_are_read_back(tmp_path, extension, compression, data):
    width = 1 if extension == ".txt" else data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.tuples(*[sentences] * width), min_size=1, max_size=5))
    columns = ("sentence",) if extension == ".txt" else ("sentence", "positive", "hard_negative")[:width]
    corpus = corpus_of(tmp_path / f"rows{extension}{compression}", written(extension, rows, columns))
    assert corpus.columns == columns
    assert list(corpus) == [tuple(text.strip() for text in row) for row in rows]
    assert corpus.summary() == ""


def test_bad_lines_are_skipped_and_counted(tmp_path):
    content = b"\xef\xbb\xbfone\r\n\n \t\ntwo\xff\nthr\0ee\n\xe2\x80\xa8four\xe2\x80\xa8five\nsix"
    corpus = corpus_of(tmp_path / "a.txt", content)
    for _ in range(2):  # counts are those of one pass
        assert list(corpus) == [("one",), ("four\u2028five",), ("six",)]
        utf8 = "not UTF-8 (to convert a file, run: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW_FILE)"
        assert corpus.summary() == f"skipped 4 lines: 2 empty, 1 {utf8}, 1 NUL byte, as in UTF-16"


@pytest.mark.parametrize(
    ("name", "content", "line", "fault"),
    [
        ("a.txt", b"one\n\ntwo\n", 2, "empty"),
        ("a.txt", b"one\ntwo\n\xfe\n", 3, r"not UTF-8 \(to convert a file, run: iconv"),
        ("a.txt", b"x" * (LONGEST_TEXT + 1), 1, "longer than 131,072 characters"),
        ("a.csv", b'sent0,sent1\n"two\nlines",b\nonly\n', 4, "wrong number of fields"),
        ("a.csv", b"sent0,sent1\na,b\nc,d\re,f\n", 3, "invalid CSV"),
        ("a.csv", b'x\n"' + b"a\n" * LONGEST_TEXT + b"\n", 2, "longer than 131,072 characters"),
        ("a.jsonl", b'{"x": "a"}\n{"y": "b"}\n', 2, "missing key"),
        ("a.jsonl", b'{"x": "a"}\n{"x": []}\n', 2, "value not a string"),
        ("a.jsonl", b'{"x": "a"}\n{"x": "\\ud800"}\n', 2, "not UTF-8"),
        ("a.jsonl", b'{"x": "a"}\n' + b"[" * 10_000 + b"\n", 2, "not a JSON object"),
    ],
)
def test_errors_name_file_line_and_fault(tmp_path, name, content, line, fault):
    corpus = corpus_of(tmp_path / name, content, on_bad_line="error")
    with pytest.raises(DataError, match=rf"{name}, line {line}: {fault}.* Correct or remove it$"):
        list(corpus)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--input is empty. Name a file"),
        ("/dev/zero", "--input: cannot read /dev/zero: it is a pipe or a device."),
        ("{}/pipe.txt", "pipe.txt: it is a pipe or a device"),
        ("{}/a\0b.txt", "embedded null byte"),
        ("{}/sentence.txt", "no such file. Known names: wiki1m, docstrings"),
        ("{}/empty", "empty: no file of a known kind (none found)"),
        ("{}/empty.txt", "empty.txt: no usable line"),
        ("{}/empty.csv", "empty.csv: the first line must contain the names of the columns, separated by commas (csv)"),
        ("{}/text.csv", "text.csv: the first line must contain the names of the columns"),
        ("{}/ids.csv", "ids.csv: the first line must contain the names of the columns"),
        ("{}/a.odt", "a.odt: no file of a known kind (skipped files: 1 .odt). Known: .txt, .csv"),
    ],
)
def test_errors_name_the_users_option_and_the_fix(tmp_path, name, message):
    """Also of a pipe or device, which is never waited for."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "empty").mkdir()
    files = {"a.odt": "", "empty.txt": "", "empty.csv": "", "text.csv": "A man plays.\n", "ids.csv": "a;b\n"}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=re.escape(message.format(tmp_path))) as raised:
        list(open_text(name.format(tmp_path)))
    assert "data." not in str(raised.value)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize(
    ("header", "wanted", "columns"),
    [
        ("anything", (), ("anything",)),
        ("a;b", ("a;b",), ("a;b",)),  # refused only if it is not asked for
        ("hard_negative,positive,sentence", (), ("sentence", "positive", "hard_negative")),
        ("hard_neg,sent1,sent0,hard_neg_2", (), ("sent0", "sent1", "hard_neg", "hard_neg_2")),
        ("x,label,y", ("y", "x"), ("y", "x")),
        ("x,label,y", ("x", "z"), r"a\.\w+: no column 'z'\. It has: x, label, y\. Name the columns in data\.columns"),
        ("sentence,label", (), r"it has 2 columns: sentence, label\. Name the columns in data\.columns"),
        ("sent0,positive", (), r"it has 2 columns: sent0, positive\. Name the columns in data\.columns"),
    ],
)
def test_columns_are_known_by_their_names_or_chosen_and_never_guessed(tmp_path, name, header, wanted, columns):
    rows = {"a.csv": f"{header}\n{header}\n", "a.jsonl": json.dumps({each: each for each in header.split(",")})}
    if isinstance(columns, tuple):
        assert list(corpus_of(tmp_path / name, rows[name].encode(), columns=wanted)) == [columns]
        return
    with pytest.raises(DataError, match=columns):
        corpus_of(tmp_path / name, rows[name].encode(), columns=wanted)
    with pytest.raises(DataError, match="Give a file with one column"):
        open_text(tmp_path / name, "--post", columns=wanted)


def test_json_is_a_list_or_has_an_object_per_line(tmp_path):
    path = tmp_path / "a.json"
    assert list(corpus_of(path, b'\xef\xbb\xbf ["one", "two\\nlines"]')) == [("one",), ("two\nlines",)]
    assert list(corpus_of(path, b'\n{"x": "one"}\n{"x": "two"}\n')) == [("one",), ("two",)]
    assert list(corpus := corpus_of(path, b'{}\n{"x": "one"}\n')) == [("one",)]
    assert corpus.summary() == "skipped 1 line: 1 missing key"
    for content, message in [
        (b'{\n "x": "one"\n}', "no JSON object found. A line has one object"),
        (b"[1, 2]", "no JSON object found"),
        (b'["one"', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ]:
        with pytest.raises(DataError, match=message):
            list(corpus_of(path, content))


def test_parquet_has_columns_of_strings(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array(["one", None, " ", "two"])
    pq.write_table(pa.table({"id": pa.array([1, 2, 3, 4]), "text": texts}), path)
    corpus = opened(path, columns=("text",))
    assert list(corpus) == [("one",), ("two",)]
    assert corpus.summary() == "skipped 2 lines: 2 empty"
    with pytest.raises(DataError, match=r"it has 2 columns: id, text"):
        opened(path)
    kinds = {"large": pa.large_string(), "view": pa.string_view(), "dictionary": pa.dictionary(pa.int8(), pa.string())}
    table = pa.table({name: pa.array(["one", "two"]).cast(kind) for name, kind in kinds.items()})
    pq.write_table(table, path, row_group_size=1)
    assert list(opened(path, columns=tuple(kinds))) == [("one",) * 3, ("two",) * 3]
    path.write_bytes(b"one\n")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        opened(path)


@pytest.mark.parametrize("name", ["", "/**/[ab].json*"])
def test_folders_and_patterns_stand_for_their_files(tmp_path, name):
    folder = tmp_path / "shards"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1, "text": "one"}\n\n{"n": 2, "text": "two"}\n'))
    (folder / "b.jsonl").write_text("")
    (folder / "more/a.jsonl").write_text('{"text": "three", "other": "x"}\n{"text": []}\n{"text": "five"}\n')
    for other in ("LICENSE", ".hidden.jsonl", "_meta.json"):
        (folder / other).write_text('{"text": "not this"}\n')
    for link in ("0.csv", "more/b.jsonl"):
        (folder / link).symlink_to(folder / "more/a.jsonl")
    assert list(opened(folder / "_meta.json")) == [("not this",)]
    corpus = opened(f"{folder}{name}", columns=("text",))
    places, _, rows = zip(*corpus.in_documents(), strict=True)
    assert [row for (row,) in rows] == ["one", "two", "three", "five"]
    assert [place.rpartition("/")[2] for place in places[1:3]] == ["a.jsonl.gz, line 3", "a.jsonl, line 1"]
    note = "" if name else "; skipped files: 1 without extension, 1 named _*"
    assert corpus.summary() == f"skipped 2 lines: 1 empty, 1 value not a string{note}"
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, line 2: empty"):
        list(opened(f"{folder}{name}", columns=("text",), on_bad_line="error"))
    before = corpus.fingerprint()
    (folder / "b.jsonl").write_text('{"text": "new"}')
    assert opened(f"{folder}{name}", columns=("text",)).fingerprint() != before


def test_rows_of_files_of_several_kinds_are_refused(tmp_path):
    (tmp_path / "a[1].txt").write_text("one\n")
    (tmp_path / "b.csv").write_text("text\none\n")
    (tmp_path / "c.csv").write_text("body,title\none,two\n")
    with pytest.raises(DataError, match=r"files of several kinds \(2 \.csv, 1 \.txt\)\. Name the files of one"):
        opened(tmp_path)
    assert list(opened(f"{tmp_path}/a[1].txt")) == [("one",)]  # the name of a file, not a pattern
    with pytest.raises(DataError, match=r"c\.csv: no column 'text'\. It has: body, title"):
        opened(f"{tmp_path}/*.csv")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_archives_are_reported_and_several_parts_are_read(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    corpus = corpus_of(path, b"one\n")
    path.write_bytes(path.read_bytes() * 2)
    assert list(corpus) == [("one",), ("one",)]
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match="damaged archive"):
        list(corpus)


# ArrayRecord data sets


def prepare(folder: Path, shards: int = 1) -> Path:
    """Write `PAIRS` as a data set, and return its folder."""
    builder = Prepared(data_dir=str(folder), file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=shards, try_download_gcs=False)
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_path)


def test_prepared_data_sets_are_read_in_order_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_RECORDS", 3)
    folder, rows = prepare(tmp_path / "out", shards=3), [tuple(row.values()) for row in PAIRS]
    assert len(list(folder.glob("*.array_record-*"))) == 3
    assert list(opened(tmp_path / "out")) == rows
    assert list(opened(folder, columns=("positive",))) == [row[1:2] for row in rows]
    with pytest.raises(DataError, match=r"no column 'text'.*It has: hard_negative, positive, sentence"):
        opened(folder, columns=("text",))
    with pytest.raises(DataError, match="has rows, not documents"):
        opened(folder, pairs="lead")
    (shard,) = prepare(tmp_path / "other").glob("*.array_record-*")
    assert opened(folder).fingerprint() == opened(folder).fingerprint() != opened(tmp_path / "other").fingerprint()
    with pytest.raises(DataError, match="2 data sets"):
        opened(tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + b"\xff" * 50 + content[150:])
    with pytest.raises(DataError, match=r"damaged|cannot read the split"):
        list(opened(tmp_path / "other"))


# Text in memory


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_text_is_a_file_named_by_its_content():
    sentences = ["One line.", "Two\nlines, \u2028 and “quotes”.", 'A "third"\t\\ one. It is also a document.']
    path = write_sentences(sentences)
    assert path == write_sentences(iter(sentences)) != write_sentences(sentences[::-1])
    assert [row for (row,) in opened(path)] == sentences
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".jsonl", ".jsonl"]  # nothing partial
    *_, (last,) = open_documents(DataConfig(str(path), pairs="lead"))
    assert last.sentences() == ['A "third"\t\\ one.', "It is also a document."]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the list of texts to train on is empty"),
        ([("a", "b"), ("c",)], "text 2 is ('c',). Give strings"),
        ([("a", "b"), ("c", "d", "e")], "text 2 has 3 columns (sentence, positive, hard_negative), but the first"),
    ],
)
def test_what_is_no_text_is_named(texts, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        write_sentences(iter(texts))  # of which types are not checked


def test_tables_are_converted():
    columns = {"sentence": ["a b", "c d", "i j"], "positive": ["e f", "g h", None]}
    frame = pd.DataFrame(columns | {"positive": ["e f", "g h", math.nan]})
    for table in (frame, pa.table(columns)):
        assert list(opened(write_sentences(as_texts(table)))) == [("a b", "e f"), ("c d", "g h")]
    with pytest.raises(DataError, match=r"cannot train on a dict with the keys sentence, positive\. Give strings"):
        as_texts(columns)
