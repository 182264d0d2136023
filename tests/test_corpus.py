import collections
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import tracemalloc
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffcse_jax.data import lines
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.lines import LONGEST_LINE
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig


def corpus_of(path: Path, content: bytes, **options) -> Corpus:
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return open_corpus(DataConfig(train_file=str(path), **options))


def written(extension: str, rows: list[tuple[str, ...]], columns: tuple[str, ...]) -> bytes:
    """The rows in a file format, as Python's own writers write it."""
    if extension == ".txt":
        return "".join(f"{row[0]}\n" for row in rows).encode()
    if extension == ".jsonl":
        return "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows).encode()
    file = io.StringIO()
    csv.writer(file, delimiter="\t" if extension == ".tsv" else ",").writerows([columns, *rows])
    return file.getvalue().encode()


# Everything that text may hold, Unicode's line separators included, but the bytes that end a line or a file.
sentences = st.text(st.characters(codec="utf-8", exclude_characters="\n\0\ufeff"), min_size=1).filter(str.strip)


@pytest.mark.parametrize("compression", ["", ".gz", ".xz"])
@pytest.mark.parametrize("extension", [".txt", ".csv", ".tsv", ".jsonl"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_written_is_read(tmp_path, extension, compression, data):
    width = 1 if extension == ".txt" else data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.tuples(*[sentences] * width), min_size=1, max_size=5))
    columns = ("sentence",) if extension == ".txt" else ("sentence", "positive", "hard_negative")[:width]
    corpus = corpus_of(tmp_path / f"rows{extension}{compression}", written(extension, rows, columns))
    assert corpus.columns == columns
    assert list(corpus) == [tuple(text.strip() for text in row) for row in rows]
    assert corpus.skipped_summary() == ""


def test_bad_lines_are_skipped_and_counted(tmp_path):
    content = b"\xef\xbb\xbfone\r\n\n \t\ntwo\xff\nthr\0ee\n\xe2\x80\xa8four\xe2\x80\xa8five\nsix"
    corpus = corpus_of(tmp_path / "a.txt", content)
    for _ in range(2):  # counts are those of one pass
        assert list(corpus) == [("one",), ("four\u2028five",), ("six",)]
        assert corpus.skipped == collections.Counter({"empty": 2, "not UTF-8": 1, "NUL byte": 1})
        assert corpus.skipped_summary() == "skipped 4 lines: 2 empty, 1 not UTF-8, 1 NUL byte"


@pytest.mark.parametrize(
    ("name", "content", "line", "fault"),
    [
        ("a.txt", b"one\n\ntwo\n", 2, "empty"),
        ("a.txt", b"one\ntwo\n\xfe\n", 3, "not UTF-8"),
        ("a.txt", b"\0\n", 1, "NUL byte"),
        ("a.csv", b'sent0,sent1\n"two\nlines",b\nonly\n', 4, "wrong number of fields"),
        ("a.csv", b"sent0,sent1\na,b\n\n", 3, "empty"),
        ("a.csv", b"sent0,sent1\na,\n", 2, "empty"),
        ("a.csv", b"sent0,sent1\na,b\nc,d\re,f\n", 3, "invalid CSV"),
        ("a.jsonl", b'{"x": "a"}\n{"x": \n', 2, "not a JSON object"),
        ("a.jsonl", b'{"x": "a"}\n["b"]\n', 2, "not a JSON object"),
        ("a.jsonl", b'{"x": "a"}\n{"y": "b"}\n', 2, "missing key"),
        ("a.jsonl", b'{"x": "a"}\n{"x": 1}\n', 2, "value not a string"),
        ("a.jsonl", b'{"x": "a"}\n{"x": "\\ud800"}\n', 2, "not UTF-8"),
        ("a.jsonl", b'{"x": "a"}\n' + b"[" * 10_000 + b"\n", 2, "not a JSON object"),
        ("a.csv", b'x\n"' + b"a\n" * LONGEST_LINE + b"\n", 2, "longer than 131,072 characters"),
        ("a.csv", b"sent0,sent1\n" + b'a","\n' * LONGEST_LINE, 2, "longer than 131,072 characters"),
    ],
)
def test_error_policy_names_file_line_and_fault(tmp_path, name, content, line, fault):
    corpus = corpus_of(tmp_path / name, content, on_bad_line="error")
    with pytest.raises(DataError, match=rf"{name}, line {line}: {fault}; .*data.on_bad_line=skip"):
        list(corpus)


def test_reading_goes_on_after_a_bad_row(tmp_path):
    corpus = corpus_of(tmp_path / "a.tsv", b"sent0\tsent1\na\tb\nonly\nc\rd\te\nf\tg\n")
    assert list(corpus) == [("a", "b"), ("f", "g")]
    assert corpus.skipped == collections.Counter({"wrong number of fields": 1, "invalid CSV": 1})


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "a.tsv", "a.jsonl"])
def test_memory_does_not_grow_with_a_line(tmp_path, name):
    """Of one file the compressed content is a thousandth as large."""
    rows = ('{"x": "one"}', '{"x": "two"}') if name == "a.jsonl" else ("one", "two")
    header = b"x\n" if name == "a.tsv" else b""
    long = b"x" * 20_000_000
    corpus = corpus_of(tmp_path / name, header + rows[0].encode() + b"\n" + long + b"\n" + rows[1].encode() + b"\n")
    tracemalloc.start()
    assert list(corpus) == [("one",), ("two",)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6
    assert corpus.skipped_summary() == "skipped 1 line: 1 longer than 131,072 characters"


def test_the_longest_lines_are_read(tmp_path):
    rows = ["x" * (LONGEST_LINE - 1), "\U0001f600" * (LONGEST_LINE - 1), "x" * LONGEST_LINE]  # and a line feed
    corpus = corpus_of(tmp_path / "a.txt", "\n".join(rows).encode() + b"\n")
    assert list(corpus) == [(rows[0],), (rows[1],)]


def test_an_archive_that_asks_for_much_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MEMORY_OF_XZ", 1 << 20)
    with pytest.raises(DataError, match=r"damaged archive .*[Mm]emory"):
        list(corpus_of(tmp_path / "a.txt.xz", b"one\n"))


def test_archives_of_several_parts_are_read(tmp_path):
    path = tmp_path / "a.txt.xz"
    corpus = corpus_of(path, b"one\n")
    path.write_bytes(path.read_bytes() + bytes(8) + lzma.compress(b"two\n") + bytes(1 << 18))
    assert list(corpus) == [("one",), ("two",)]
    path.write_bytes(path.read_bytes() + b"rest")
    with pytest.raises(DataError, match="damaged archive"):
        list(corpus)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--input is empty; it must name a file"),
        (
            "/dev/zero",
            "--input: cannot read /dev/zero: it is a pipe or a device; copy what it gives into a file",
        ),
        ("{}/pipe.txt", "pipe.txt: it is a pipe or a device"),
        ("x" * 300 + ".txt", "File name too long; known names"),
        ("~nobody-of-this-name/a.txt", "cannot read ~nobody-of-this-name/a.txt: no such file; known names"),
        ("{}/a\0b.txt", "embedded null byte"),
    ],
)
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, name, message):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=re.escape(message)):
        open_corpus(DataConfig(train_file=name.format(tmp_path)), "--input")


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", b"id,x,n,y\n1,a,2,b\n"), ("a.jsonl", b'{"id": 1, "x": "a", "n": 2, "y": "b"}\n')]
)
def test_columns_are_chosen_by_name_and_order(tmp_path, name, content):
    assert list(corpus_of(tmp_path / name, content, columns=("y", "x"))) == [("b", "a")]
    with pytest.raises(DataError, match=r"no column 'z' \(data.columns\); it has: id, x, n, y"):
        corpus_of(tmp_path / name, content, columns=("x", "z"))


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("anything", ("anything",)),
        ("sentence,positive", ("sentence", "positive")),
        ("hard_negative,sentence,positive", ("sentence", "positive", "hard_negative")),
        ("sent1,sent0", ("sent0", "sent1")),
        ("sent0,sent1,hard_neg", ("sent0", "sent1", "hard_neg")),
        (
            "hard_negative_2,hard_negative_3,hard_negative,positive,sentence",
            ("sentence", "positive", "hard_negative", "hard_negative_2", "hard_negative_3"),
        ),
        ("sent0,sent1,hard_neg,hard_neg_2", ("sent0", "sent1", "hard_neg", "hard_neg_2")),
    ],
)
def test_known_names_need_no_choice(tmp_path, header, columns):
    names = header.split(",")
    for name, content in (
        ("a.csv", f"{header}\n{header}\n"),
        ("a.jsonl", json.dumps(dict(zip(names, names, strict=True)))),
    ):
        corpus = corpus_of(tmp_path / name, content.encode())
        assert corpus.columns == columns
        assert list(corpus) == [columns]


@pytest.mark.parametrize("header", ["id,text", "id,text,label", "sentence,label", "sent0,positive", "a,b,c,d"])
def test_other_columns_are_never_guessed(tmp_path, header):
    listed = header.replace(",", ", ")
    with pytest.raises(DataError, match=rf"a\.csv: name one or more of its \d columns in data\.columns: {listed}$"):
        corpus_of(tmp_path / "a.csv", f"{header}\n".encode())


@pytest.mark.parametrize("policy", [("contradiction",), ("neutral",), ("contradiction", "neutral"), ("neutral", "b")])
def test_hard_negatives_are_the_columns_that_are_named(tmp_path, data_dir, policy):
    with (data_dir / "nli" / "nli_triples.csv").open(newline="") as file:
        triples = [next(reader) for reader in [csv.reader(file)] for _ in range(4)][1:]
    columns = ("b", "premise", "neutral", "contradiction", "entailment")
    rows = [
        dict(zip(columns, (str(number), triple[0], f"Not {triple[1]}", triple[2], triple[1]), strict=True))
        for number, triple in enumerate(triples)
    ]
    content = written(".csv", [tuple(row[column] for column in columns) for row in rows], columns)
    wanted = ("premise", "entailment", *policy)
    corpus = corpus_of(tmp_path / "nli.csv", content, columns=wanted)
    assert list(corpus) == [tuple(row[column] for column in wanted) for row in rows]


def test_text_has_no_columns_to_choose(tmp_path):
    with pytest.raises(DataError, match=r"a\.txt.*leave data.columns empty"):
        corpus_of(tmp_path / "a.txt", b"one\n", columns=("x",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "no usable line$"),
        ("a.txt", b"\n\xff\n", "no usable line .skipped 2 lines: 1 empty, 1 not UTF-8.$"),
        ("a.csv", b"", "the first line is empty"),
        ("a.csv", b"x\n", "no usable line"),
        ("a.csv", b"x\ry\n", "line 1: new-line character"),
        ("a.jsonl", b"", "no line holds a JSON object"),
        ("a.pdf", b"one\n", "unknown extension; known: .txt, .csv, .tsv, .jsonl"),
        ("gz", b"one\n", "unknown extension"),
    ],
)
def test_files_that_hold_nothing_are_refused(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        list(corpus_of(tmp_path / name, content))


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    (tmp_path / "sentences.txt").write_text("one\n")
    with pytest.raises(
        DataError, match=r"cannot read .*sentence\.txt: no such file \(did you mean .*sentences\.txt\?\)"
    ):
        open_corpus(DataConfig(train_file=str(tmp_path / "sentence.txt")))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_damaged_archive_is_reported(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    corpus = corpus_of(path, b"".join(b"line %d\n" % number for number in range(1000)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged archive"):
        list(corpus)


def test_fingerprint_is_the_sha256_of_the_file(tmp_path):
    corpus = corpus_of(tmp_path / "a.txt", b"one\n\xff\n")
    assert corpus.fingerprint() == hashlib.sha256(b"one\n\xff\n").hexdigest()


def test_memory_does_not_grow_with_the_file(tmp_path):
    corpus = corpus_of(tmp_path / "a.txt", b"a sentence of eleven words, again and again and again\n" * 30_000)
    tracemalloc.start()
    assert sum(1 for _ in corpus) == 30_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e5  # the file has 1.6e6 bytes


def test_wiki1m_comes_from_the_hub(tmp_path, monkeypatch):
    (tmp_path / "wiki1m_for_simcse.txt").write_text("one\ntwo\n")

    def download(repo_id: str, filename: str, *, repo_type: str, local_files_only: bool = False) -> str:
        assert (repo_id, repo_type) == ("princeton-nlp/datasets-for-simcse", "dataset")
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert list(open_corpus(DataConfig(train_file="wiki1m"))) == [("one",), ("two",)]


def test_without_the_hub_wiki1m_says_what_to_do(monkeypatch):
    def download(*_, **__) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(
        DataError,
        match=r"wiki1m_for_simcse\.txt could not be downloaded .*data\.train_file=/path/wiki1m_for_simcse\.txt",
    ):
        open_corpus(DataConfig(train_file="wiki1m"))


def test_real_files(data_dir):
    triples = open_corpus(DataConfig(train_file=str(data_dir / "nli" / "nli_triples.csv"), on_bad_line="error"))
    assert triples.columns == ("sent0", "sent1", "hard_neg")
    assert sum(1 for _ in triples) == 7835
    sentences = open_corpus(DataConfig(train_file=str(data_dir / "corpus" / "wiki_200k.txt"), on_bad_line="error"))
    assert sum(1 for _ in sentences) == 200_000
