import collections
import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import tracemalloc
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffcse_jax.data import json_files, lines
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.lines import LONGEST_LINE
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import DataError
from diffcse_jax.groups import DataConfig


def corpus_of(path: Path, content: bytes, **options) -> Corpus:
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix.lower(), bytes)(content))
    return open_corpus(DataConfig(train_file=str(path), **options))


def written(extension: str, rows: list[tuple[str, ...]], columns: tuple[str, ...]) -> bytes:
    """The rows in a file format, as Python's own writers write it."""
    if extension == ".txt":
        return "".join(f"{row[0]}\n" for row in rows).encode()
    objects = [dict(zip(columns, row, strict=True)) for row in rows]
    if extension == ".jsonl":
        return "".join(json.dumps(entry) + "\n" for entry in objects).encode()
    if extension == ".json":
        return json.dumps(objects, indent=1).encode()
    if extension == ".parquet":
        binary = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(objects), binary)
        return binary.getvalue()
    file = io.StringIO()
    csv.writer(file, delimiter="\t" if extension == ".tsv" else ",").writerows([columns, *rows])
    return file.getvalue().encode()


# Everything that text may hold, Unicode's line separators included, but the bytes that end a line or a file.
sentences = st.text(st.characters(codec="utf-8", exclude_characters="\n\0\ufeff"), min_size=1).filter(str.strip)


FORMATS = [
    *itertools.product([".txt", ".csv", ".tsv", ".jsonl", ".json"], ["", ".gz", ".xz"]),
    *[(".parquet", ""), (".txt", ".GZ"), (".csv", ".XZ")],
]


@pytest.mark.parametrize(("extension", "compression"), FORMATS)
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
    with pytest.raises(
        DataError, match=rf"a\.csv: name one or more of its \d columns in data\.columns: {listed} \(as in"
    ):
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


# --- tables whose fields are separated by something else, and what looks like no table ---


@pytest.mark.parametrize("extension", [".csv", ".tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(tmp_path, extension, delimiter):
    """Fields hold the other delimiters, in quotes where they must be."""
    rows = [("sent0", "sent1"), ("The onset, of: 1,5; then", "a|b"), ('say "no"', "two\nlines\t"), ("9;8;7", "x, y")]
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows(rows)
    corpus = corpus_of(tmp_path / f"a{extension}", file.getvalue().encode(), on_bad_line="error")
    assert list(corpus) == [tuple(text.strip() for text in row) for row in rows[1:]]
    assert corpus.first_row() == "sent0 'The onset, of: 1,5; then', sent1 'a|b'"


@pytest.mark.parametrize(
    ("content", "columns", "rows"),
    [
        (
            "id;text;org\n9;The onset, it seems;ACME\n8;No, not now;\n",
            ("text",),
            ["The onset, it seems", "No, not now"],
        ),
        ("a,b;text\nx,y;one\n", ("text",), ["one"]),  # both fit; the one that has the column is meant
        ("text\none; two\nthree; four\n", (), ["one; two", "three; four"]),
        ('sentence\n"one, two"\nthree | four\n', (), ["one, two", "three | four"]),
        ("question, or not?\nIs it\n", ("question, or not?",), ["Is it"]),
        ("What do you think of it?\nGood\n", ("What do you think of it?",), ["Good"]),
    ],
)
def test_what_a_single_column_or_a_named_one_tells(tmp_path, content, columns, rows):
    assert [text for (text,) in corpus_of(tmp_path / "a.csv", content.encode(), columns=columns)] == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "sentence\nHello, world.\nOne, two, three.\nfour\n",
            r"by commas, the first line has 1 field \(sentence\), .* such as \['Hello', ' world\.'\]\. .*\.txt$",
        ),
        (
            "A man plays the guitar.\nSomeone sings.\n",
            r"names of the columns, and 'A man plays the guitar\.' looks like",
        ),
        ("id;text\none\ntwo\nthree;four\n", r"'id;text' looks like text.* or name this column in data\.columns"),
        ("we do not end this sentence\nbut go on\n", r"looks like text"),
    ],
)
def test_what_looks_like_no_table_is_refused(tmp_path, content, message):
    with pytest.raises(DataError, match=message) as raised:
        corpus_of(tmp_path / "a.csv", content.encode())
    assert "\n" not in str(raised.value)


# --- json, Parquet, several files ---


def test_json_may_be_a_list_or_an_object_a_line(tmp_path):
    path = tmp_path / "a.json"
    assert list(corpus_of(path, b'\xef\xbb\xbf ["one", "two\\nlines"]')) == [("one",), ("two\nlines",)]
    assert list(corpus_of(path, b'\n{"x": "one"}\n{"x": "two"}\n')) == [("one",), ("two",)]
    long = json.dumps([{"x": "one"}, {"x": "y" * LONGEST_LINE * 5}, {"x": 2}, "three"]).encode()
    corpus = corpus_of(path, long)
    assert list(corpus) == [("one",)]
    assert corpus.skipped_summary() == (
        "skipped 3 items: 1 longer than 131,072 characters, 1 value not a string, 1 missing key"
    )
    with pytest.raises(DataError, match=r"a\.json, item 2: longer than"):
        list(corpus_of(path, long, on_bad_line="error"))
    for content, message in [
        (b'{\n "x": "one"\n}', "neither a list of strings or objects nor an object a line"),
        (b"[1, 2]", "neither a list of strings"),
        (b"[]", "neither a list of strings"),
        (b'["one"', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ]:
        with pytest.raises(DataError, match=message):
            list(corpus_of(path, content))


def test_a_list_that_is_too_large_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MOST_BYTES", 10)
    with pytest.raises(DataError, match=r"a\.json\.gz: more than 10 bytes.* write one object a line and .*\.jsonl"):
        corpus_of(tmp_path / "a.json.gz", b'["one", "two"]')


def test_parquet_whose_names_are_no_text_cannot_be_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"é": ["one"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xa9"))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        open_corpus(DataConfig(train_file=str(path)))


def test_parquet_has_columns_of_strings(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array(["one", None, " ", "two"])
    columns = {"id": pa.array([1, 2, 3, 4]), "text": texts, "vector": pa.array([[1.0]] * 4)}
    pq.write_table(pa.table(columns), path)
    corpus = open_corpus(DataConfig(train_file=str(path)))
    assert list(corpus) == [("one",), ("two",)]
    assert corpus.skipped_summary() == "skipped 2 rows: 2 empty"
    with pytest.raises(DataError, match=r"no column 'id' \(data\.columns\); it has: text"):
        open_corpus(DataConfig(train_file=str(path), columns=("id",)))
    kinds = {"large": pa.large_string(), "view": pa.string_view(), "dictionary": pa.dictionary(pa.int8(), pa.string())}
    table = pa.table({name: pa.array(["one", "two"]).cast(kind) for name, kind in kinds.items()})
    pq.write_table(table, path, row_group_size=1)
    for wanted in (("view", "large"), ("dictionary",)):
        corpus = open_corpus(DataConfig(train_file=str(path), columns=wanted))
        assert list(corpus) == [("one",) * len(wanted), ("two",) * len(wanted)]
    pq.write_table(pa.table({"id": [1]}), path)
    with pytest.raises(DataError, match="no column of strings; it has: id"):
        open_corpus(DataConfig(train_file=str(path)))
    path.write_bytes(b"one\n")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        open_corpus(DataConfig(train_file=str(path)))


def write_shards(folder: Path) -> None:
    """Rows of two columns in three files of a folder, one of them empty, among files of other kinds."""
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1, "text": "one"}\n\n{"n": 2, "text": "two"}\n'))
    (folder / "b.jsonl").write_text("")
    (folder / "more/a.jsonl").write_text('{"text": "three", "other": "x"}\n{"text": 4}\n{"text": "five"}\n')
    for name in ("README.md", "LICENSE", "_meta.json", ".hidden.jsonl"):
        (folder / name).write_text('{"text": "not this"}\n')


def test_the_message_about_many_columns_is_short(tmp_path):
    names = [f"column_{number}" for number in range(5000)]
    with pytest.raises(DataError, match=r"name one or more of its 5000 columns .*\.\.\. \(as in") as told:
        corpus_of(tmp_path / "a.csv", f"{','.join(names)}\n".encode())
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("content", ["{}\n", "{}\n" + '{"text": "one"}\n'])
def test_a_first_row_without_keys_is_named(content, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"a\.jsonl: its first row names no column"):
        open_corpus(DataConfig(train_file=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("name", ["", "/", "/**/*.jsonl*", "/**/[ab].json*"])
def test_folders_and_patterns_stand_for_their_files(tmp_path, name):
    write_shards(tmp_path / "shards")
    corpus = open_corpus(DataConfig(train_file=str(tmp_path / "shards") + name, columns=("text",)))
    rows = [("one",), ("two",), ("three",), ("five",)]
    for _ in range(2):
        assert list(corpus) == rows
        assert corpus.skipped_summary() == "skipped 2 lines: 1 empty, 1 value not a string"
    assert [number for number, _ in corpus.numbered()] == [1, 3, 4, 6]
    strict = open_corpus(
        DataConfig(train_file=str(tmp_path / "shards/more*/*"), columns=("text",), on_bad_line="error")
    )
    with pytest.raises(DataError, match=r"more/a\.jsonl, line 2: value not a string"):
        list(strict)
    before = corpus.fingerprint()
    (tmp_path / "shards/b.jsonl").write_text('{"text": "new"}')
    changed = open_corpus(DataConfig(train_file=str(tmp_path / "shards") + name, columns=("text",)))
    assert changed.fingerprint() != before


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.csv").write_text("text\none\n")
    with pytest.raises(DataError, match=r"files of several kinds \(1 \.txt, 1 \.csv\); name those of one by a pattern"):
        open_corpus(DataConfig(train_file=str(tmp_path)))
    assert list(open_corpus(DataConfig(train_file=f"{tmp_path}/*.txt"))) == [("one",)]
    (tmp_path / "c.csv").write_text("body\ttitle\none\ttwo\n")
    with pytest.raises(DataError, match=r"c\.csv: no column 'text', which b\.csv has; it has: body, title"):
        open_corpus(DataConfig(train_file=f"{tmp_path}/*.csv"))
    (tmp_path / "d.sh").write_text("one\n")
    for pattern, message in [("*.pdf", "no file matches .*known names: wiki1m"), ("*.sh", "unknown extension")]:
        with pytest.raises(DataError, match=message):
            open_corpus(DataConfig(train_file=f"{tmp_path}/{pattern}"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no ArrayRecord data set"):
        open_corpus(DataConfig(train_file=str(tmp_path / "empty")))
    os.mkfifo(tmp_path / "e.txt")
    with pytest.raises(DataError, match=r"e\.txt: it is a pipe or a device"):
        open_corpus(DataConfig(train_file=f"{tmp_path}/*.txt"))


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("one\n")
    (tmp_path / "a1.txt").write_text("two\n")
    assert list(open_corpus(DataConfig(train_file=f"{tmp_path}/a[1].txt"))) == [("one",)]


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
        ("a.pdf", b"one\n", "unknown extension; known: .txt, .csv, .tsv, .jsonl, .json, .parquet, each"),
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
