"""The commands `encode` and `search` with an encoder whose vectors are known."""

import gzip
import io
import json
import re
import sys
import zlib

import numpy as np
import pyarrow.parquet as pq
import pytest

from diffcse_jax import cli
from diffcse_jax.apps.embed import FORMATS
from diffcse_jax.apps.search import LINES_PER_HIT
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError
from diffcse_jax.hosts import Progress
from diffcse_jax.models import pooling
from diffcse_jax.search.records import in_chunks
from diffcse_jax.search.vector_store import EncoderRecord, find_store

DIMENSION = 8
LINES = ["the cat sleeps", "a dog runs", "caf\u00e9", "a dog runs"]


class HashEncoder(SentenceEncoder):
    """Vectors are functions of the text."""

    dimension = DIMENSION

    def __init__(self, name="hash"):
        self.name = name

    def encode(self, sentences, batch_size=64, normalize=False, show_progress=False):
        rows = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=DIMENSION) for text in sentences]
        vectors = np.array(rows, np.float32)
        return pooling.normalize(vectors) if normalize else vectors

    def record(self):
        return EncoderRecord(self.name, "avg", "float32", DIMENSION, self.name)


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """Loads the encoder of `--model` or of the record."""

    def load_encoder(options, **defaults):
        name = options.model or defaults["model"]
        if name == "missing":
            raise CheckpointError("missing: no such model")
        return HashEncoder(name)

    monkeypatch.setattr(cli, "_load_encoder", load_encoder)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return str(path)


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def objects(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def error_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_lines_of_standard_input_become_lines_of_json(monkeypatch, capsys):
    stdin(monkeypatch, "the cat sleeps\n\n caf\u00e9 \n".encode() + b"\xff\n")
    cli.main(["encode", "--model", "hash"])
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [(row["line"], row["sentence"]) for row in rows] == [(1, "the cat sleeps"), (3, "caf\u00e9")]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    np.testing.assert_array_equal(vectors, HashEncoder().encode(["the cat sleeps", "caf\u00e9"]))
    assert "standard input: skipped 2 lines: 1 empty, 1 not UTF-8" in printed.err


def test_the_suffix_says_what_is_written(tmp_path, text, capsys):
    expected = HashEncoder().encode(LINES, normalize=True)
    for suffix in FORMATS:
        cli.main(["encode", "--model", "hash", "--input", text, "--normalize", "--output", f"{tmp_path}/out{suffix}"])
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    store = find_store(f"{tmp_path}/out.parquet")
    assert store.record() == HashEncoder().record()
    ((sentences, vectors),) = store.blocks()
    assert sentences == LINES
    np.testing.assert_array_equal(vectors, expected)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["sentence"] for row in rows] == LINES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.npy", "out.parquet", "text.txt"]
    assert "--output x.csv: the suffix chooses the format. Use one of: .jsonl, .npy, .parquet" in error_of(
        capsys, "encode", "--model", "hash", "--input", text, "--output", "x.csv"
    )


def test_rows_of_an_array_are_those_of_the_lines(tmp_path, monkeypatch, capsys):
    file = tmp_path / "gap.txt"
    file.write_text("one\n\nthree\n")
    message = error_of(capsys, "encode", "--model", "hash", "--input", str(file), "--output", f"{tmp_path}/out.npy")
    assert "gap.txt, line 2: empty" in message
    assert [path.name for path in tmp_path.iterdir()] == ["gap.txt"]


def test_columns_ids_and_files_are_told(tmp_path, text, capsys):
    table = tmp_path / "table.csv"
    table.write_text("doi,title,abstract\nx1,a,b\nx2,c,d\n")
    arguments = ["--model", "hash", "--columns", "abstract", "title", "--id_column", "doi"]
    cli.main(["encode", "--input", str(table), *arguments])
    rows = [" ".join(map(str, [*row.values()][:-1])) for row in objects(capsys)]
    assert rows == ["2 x1 abstract b", "2 x1 title a", "3 x2 abstract d", "3 x2 title c"]
    cli.main(["encode", "--input", text, text, "--model", "hash"])
    assert [(row["file"], row["line"]) for row in objects(capsys)] == [(text, line) for line in (1, 2, 3, 4)] * 2
    assert "no column 'none' (--columns). It has: doi, title, abstract" in error_of(
        capsys, "encode", "--input", str(table), "--model", "hash", "--columns", "none"
    )


@pytest.mark.parametrize("name", ["", "/*.jsonl", "/b.jsonl", "/list.JSON.GZ"])
def test_ids_of_objects_may_be_numbers(name, tmp_path, capsys):
    shards = tmp_path / "shards"
    shards.mkdir()
    objects_of = {"a": [{"text": "one", "id": 7}], "b": [{"text": "two", "id": "x8"}, {"text": "three", "id": True}]}
    for file, entries in objects_of.items():
        (shards / f"{file}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    if name.endswith("GZ"):
        (shards / name[1:]).write_bytes(gzip.compress(json.dumps([*objects_of["a"], *objects_of["b"]]).encode()))
    cli.main(["encode", "--input", f"{shards}{name}", "--columns", "text", "--id_column", "id", "--model", "hash"])
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    found = [(row["line"], row["id"], row["sentence"]) for row in rows]
    assert found == ([(1, "x8", "two")] if name == "/b.jsonl" else [(1, "7", "one"), (2, "x8", "two")])
    assert "1 value not a string" in printed.err


def test_a_corpus_is_searched_as_text_as_vectors_and_as_an_index(tmp_path, text, monkeypatch, capsys):
    model, vectors, index = ("--model", "hash"), str(tmp_path / "vectors.parquet"), str(tmp_path / "index")
    cli.main(["encode", "--input", text, *model, "--output", vectors])
    encoder, queries = HashEncoder(), ["a dog runs", "caf\u00e9"]
    similar = encoder.encode(queries, normalize=True) @ encoder.encode(LINES, normalize=True).T
    for arguments in (["--input", text, *model, "--output", index], ["--input", vectors], ["--input", index]):
        cli.main(["search", *arguments, *queries, "--top_k", "3", "--json"])
        found = objects(capsys)
        assert [hits["query"] for hits in found] == queries
        assert [hit["line"] for hit in found[0]["hits"]][:2] == [2, 4]  # equally similar, in the order of the text
        for row, hits in zip(similar, found, strict=True):
            np.testing.assert_allclose([hit["score"] for hit in hits["hits"]], np.sort(row)[:-4:-1], atol=1e-6)
            assert [row[hit["line"] - 1] for hit in hits["hits"]] == pytest.approx(np.sort(row)[:-4:-1])
    stdin(monkeypatch, b"a dog runs\n")
    cli.main(["search", "--input", index, "--threshold", "0.99", "--json"])
    ((hits),) = objects(capsys)
    assert [hit["line"] for hit in hits["hits"]] == [2, 4]
    message = error_of(capsys, "search", "--input", index, "--model", "other", "x")
    assert "index holds embeddings of hash, but the encoder is other: their weights differ" in message
    message = error_of(capsys, "search", "--input", vectors, "--model", "missing", "x")
    assert "vectors.parquet holds embeddings of hash (avg, 8 dimensions), and missing cannot be loaded" in message
    assert "Name the encoder with --model" in error_of(capsys, "search", "--input", text, "x")
    assert pq.read_metadata(vectors).num_rows == 4


def test_hits_are_read_at_the_width_of_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    file = tmp_path / "long.txt"
    file.write_text("word " * 60 + "\n\x1b[31mred\x1b[0m text\n")
    cli.main(["search", "--input", str(file), "--model", "hash", "what"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "what"
    assert max(map(len, lines)) <= 60
    assert sum("word" in line for line in lines) == LINES_PER_HIT
    assert any(line.endswith("word ...") for line in lines)
    assert any(line.endswith("[31mred [0m text") for line in lines)
    assert "\x1b" not in "".join(lines)
    cli.main(["search", "--input", str(file), "--model", "hash", "what", "--threshold", "2"])
    assert "nothing with a similarity of 2 or more" in capsys.readouterr().out


def test_without_a_terminal_a_line_tells_now_and_then(monkeypatch, capsys):
    with Progress("encoding", "sentences", 2000) as progress:
        progress.update(1000)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("diffcse_jax.hosts.SECONDS_BETWEEN_LINES", 0)
        progress.update(500)
    assert re.fullmatch(r"encoding: 1,500 of 2,000 sentences, [\d,]+ per second\n", capsys.readouterr().err)


def test_chunks_end_after_rows_or_characters():
    entries = [{"line": line, "sentence": "x" * length} for line, length in enumerate((3, 3, 5, 4, 9, 1, 1, 1), 1)]
    lines = [[entry["line"] for entry in chunk] for chunk in in_chunks(entries, 3, 10)]
    assert lines == [[1, 2, 3], [4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top_k", "-1", "x"], "--top_k: expected at least 1, got -1"),
        (["--threshold", "nan", "x"], "--threshold nan: expected a number"),
        (["caf\udce9"], "is not valid UTF-8. Check the terminal's encoding"),
        ([" "], "QUERY: the text is empty"),
    ],
)
def test_queries_that_cannot_be_searched_are_refused(arguments, message, text, capsys):
    assert message in error_of(capsys, "search", "--input", text, "--model", "hash", *arguments)


def test_a_folder_of_documents_is_searched_and_embedded(tmp_path, capsys):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "cats.md").write_text("# Cats\n\nThe cat sleeps all day on the warm roof.\n")
    (folder / "dogs.html").write_text("<h1>Dogs</h1><p>A dog runs through the park every morning.</p>")
    cli.main(["search", "--input", str(folder), "--model", "hash", "--json", "x"])
    assert {hit["file"] for hit in objects(capsys)[0]["hits"]} == {"cats.md", "dogs.html"}
    cli.main(["embed", "--input", str(folder), "--model", "hash", "--output", str(tmp_path / "vectors")])
    cli.main(["search", "--input", str(tmp_path / "vectors"), "--json", "x"])
    assert {hit["file"] for hit in objects(capsys)[0]["hits"]} == {"cats.md", "dogs.html"}
