"""The commands `encode`, `embed` and `search`, mostly with an encoder of known embeddings."""

import errno
import gzip
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tiny_model import MAX_LENGTH, write_tiny_model

from diffcse_jax import cli
from diffcse_jax.apps import embed as app
from diffcse_jax.apps.search import LINES_PER_HIT
from diffcse_jax.commands import EmbedOptions
from diffcse_jax.documents.files.formats import Unreadable
from diffcse_jax.documents.files.pool import parse_files
from diffcse_jax.documents.language import detector
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, DataError, InUseError
from diffcse_jax.models import pooling
from diffcse_jax.models.sentence_folder import NO_PROMPTS
from diffcse_jax.search.folder import writing
from diffcse_jax.search.index import find_index
from diffcse_jax.search.vector_store import EncoderRecord, find_store

DIMENSION = 8
LINES = ["the cat sleeps", "a dog runs", "caf\u00e9", "a dog runs"]


class HashEncoder(SentenceEncoder):
    """Embeddings are functions of the text. The last part of the name stands for the weights."""

    dimension, max_length, training, prompts = DIMENSION, 128, "", NO_PROMPTS
    languages = ()
    before = None  # is called before a batch is encoded

    def __init__(self, name="hash", pooler="avg"):
        self.name = name
        self.pooler = pooler

    def encode(
        self,
        sentences,
        batch_size=64,
        normalize=False,
        show_progress=False,
        prompt=None,
        prompt_name=None,
    ):
        if type(self).before:
            type(self).before()
        rows = [
            np.random.default_rng(zlib.crc32(text.encode())).normal(size=DIMENSION)
            for text in sentences
        ]
        vectors = np.array(rows, np.float32)
        return pooling.normalize(vectors) if normalize else vectors

    def encode_document(self, texts, **options):
        return self.encode(texts, **options)

    encode_query = encode_document

    def largely_unknown(self, texts):
        return np.zeros(len(texts), bool)

    def split(self, passages, prompt=""):
        return list(passages)

    def record(self, prompt=""):
        weights = f"{Path(self.name).name} {self.pooler}{self.training}"
        return EncoderRecord(self.name, self.pooler, "float32", DIMENSION, weights, prompt)


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """Loads the encoder of `--model` or of the record."""

    def from_pretrained(name, *, dtype, pooler="avg", truncate_dim=DIMENSION, backend="jax"):
        assert (dtype, truncate_dim) == ("float32", DIMENSION)
        if name == "missing":
            raise CheckpointError("missing: no such model")
        return HashEncoder(name, pooler)

    monkeypatch.setattr(SentenceEncoder, "from_pretrained", from_pretrained)
    for module in ("embed", "search"):
        monkeypatch.setattr(f"diffcse_jax.apps.{module}.require_model", lambda name: None)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return str(path)


@pytest.fixture
def shards(tmp_path) -> dict[str, list[str]]:
    """Four files of different sizes; their sentences by name."""
    sizes = {"shard-0.txt": 7, "shard-1.txt": 25, "shard-2.txt": 1, "shard-3.txt": 12}
    files = {
        name: [f"sentence {row} of {name}" for row in range(rows)] for name, rows in sizes.items()
    }
    (tmp_path / "shards").mkdir()
    for name, sentences in files.items():
        (tmp_path / "shards" / name).write_text("\n".join(sentences) + "\n")
    return files


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def objects(capsys, *arguments: str) -> list[dict]:
    """The JSON objects that a command prints."""
    cli.main([*arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def error_of(capsys, *arguments: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments])
    assert stopped.value.code == code
    return capsys.readouterr().err


def arguments(tmp_path, *more: str, **changed: str) -> list[str]:
    options = {"model": "hash", "input": f"{tmp_path}/shards/shard-*", "output": f"{tmp_path}/out"}
    options |= {"rows_per_file": "10"} | changed
    return [
        "embed",
        *more,
        *(text for name, value in options.items() for text in (f"--{name}", value)),
    ]


def read(output: Path) -> dict[str, list[dict]]:
    """Rows by input file, from all its output files in order."""
    rows: dict[str, list[dict]] = {}
    for path in sorted(output.glob("*.parquet")):
        rows.setdefault(path.name.rsplit(".", 2)[0], []).extend(pq.read_table(path).to_pylist())
    return rows


def check(output: Path, shards: dict[str, list[str]]) -> None:
    """Every sentence is there once, under its line, with its embedding."""
    rows = read(output)
    numbered = {name: [*enumerate(sentences, 1)] for name, sentences in shards.items()}
    assert {
        name: [(row["line"], row["sentence"]) for row in found] for name, found in rows.items()
    } == numbered
    for name, sentences in shards.items():
        vectors = np.array([row["embedding"] for row in rows[name]], np.float32)
        np.testing.assert_array_equal(vectors, HashEncoder().encode(sentences))


# encode


def test_the_folder_of_the_output_is_created(tmp_path, text):
    output = tmp_path / "new/folder/a.npy"
    assert cli.main(["encode", "--model", "hash", "--input", text, "--output", str(output)]) == 0
    assert len(np.load(output)) == 4


def test_the_suffix_says_what_is_written(tmp_path, text, monkeypatch, capsys):
    stdin(monkeypatch, "the cat sleeps\n\n caf\u00e9 \n".encode())
    cli.main(["encode", "--model", "hash"])
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [(row["line"], row["sentence"]) for row in rows] == [
        (1, "the cat sleeps"),
        (3, "caf\u00e9"),
    ]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    np.testing.assert_array_equal(vectors, HashEncoder().encode(["the cat sleeps", "caf\u00e9"]))
    assert "left out 1 text: 1 empty" in printed.err

    options = ["encode", "--model", "hash", "--input", text, "--normalize", "--output"]
    for suffix in app.FORMATS:
        cli.main([*options, f"{tmp_path}/out{suffix}"])
    np.testing.assert_array_equal(
        np.load(tmp_path / "out.npy"), HashEncoder().encode(LINES, normalize=True)
    )
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["sentence"] for line in lines] == LINES
    message = error_of(capsys, *options, "x.csv")
    assert "--output x.csv: the suffix chooses the format. Use one of: .jsonl, .npy" in message
    Path(text).write_text("one\n\nthree\n")
    assert "text.txt, line 2: empty" in error_of(capsys, *options, f"{tmp_path}/gap.npy")
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.npy", "text.txt"}


def test_an_array_of_a_folder_leaves_out_files_that_are_no_text(tmp_path, capsys):
    """No row is shifted by a file. With --strict it is an error, which says so."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/README").write_text("Read me.")
    (tmp_path / "text/a.txt").write_text("one\n")
    encode = ["encode", "--model", "hash", "--input", f"{tmp_path}/text", "--output"]
    cli.main([*encode, f"{tmp_path}/a.npy"])
    assert len(np.load(tmp_path / "a.npy")) == 1
    assert "skipped 1 file: 1 without extension" in capsys.readouterr().err
    message = error_of(capsys, *encode, f"{tmp_path}/b.npy", "--strict")
    assert "README was not read: without extension. Repair or remove it, or leave out" in message


def test_an_array_has_a_row_for_each_row(tmp_path, capsys):
    long = " ".join(f"This is sentence number {number} of a long text." for number in range(25))
    table, page, output = (tmp_path / name for name in ("rows.csv", "page.md", "out.npy"))
    table.write_text(f"id,text\n1,short\n2,{long}\n3,???\n4,last\n")
    page.write_text(f"# Guide\n\nFirst.\n\n## Use\n\n{long}\n")
    encode = ["encode", "--model", "hash", "--output", str(output), "--input"]
    cli.main([*encode, str(table), str(page)])
    texts = ["short", long, "???", "last", f"Guide First. Guide: Use {long}"]
    np.testing.assert_array_equal(np.load(output), HashEncoder().encode(texts))
    table.write_text("title,text\na,b\nc,\n")
    message = error_of(capsys, *encode, str(table), "--columns", "title", "text")
    assert "rows.csv, line 3: the column 'text' has no text" in message
    for content in ("id,text\n1,a\n2,\n", "id,text\n1,a\n2,b,c\n"):
        table.write_text(content)
        assert "rows.csv, line 3: " in error_of(capsys, *encode, str(table))


def test_json_lines_are_utf8_whatever_the_terminal_shows(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("\u043a\u043e\u0448\u043a\u0430\n", encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="cp1252"))
    cli.main(["encode", "--model", "hash", "--input", str(path)])
    assert json.loads(printed.getvalue())["sentence"] == "\u043a\u043e\u0448\u043a\u0430"


def test_columns_ids_and_files_are_kept(tmp_path, text, capsys):
    table = tmp_path / "table.csv"
    table.write_text("doi,title,abstract,year\nx1,a,b,1999\nx2,c,d,2000\n")
    options = ["encode", "--input", str(table), "--model", "hash"]
    rows = objects(capsys, *options, "--columns", "abstract", "title", "--id_column", "doi")
    assert [(row["id"], row["line"], row["column"], row["sentence"]) for row in rows] == [
        ("x1", 2, "abstract", "b"), ("x1", 2, "title", "a"), ("x2", 3, "abstract", "d"), ("x2", 3, "title", "c")
    ]  # fmt: skip
    assert rows[0]["columns"] == {"year": "1999"}
    rows = objects(capsys, "encode", "--input", text, text, "--model", "hash")
    assert [(row["file"], row["line"]) for row in rows] == [
        (text, line) for line in (1, 2, 3, 4)
    ] * 2
    message = error_of(capsys, *options, "--columns", "none")
    assert "no column 'none'. It has: doi, title, abstract, year" in message


# search


def search(tmp_path, capsys, *options: str, source: str = "") -> tuple[list, str]:
    """The hits of each query, as JSON, and what was said."""
    cli.main(["search", "--input", source or f"{tmp_path}/text.txt", "--json", *options])
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


def test_a_corpus_is_searched_as_text_as_vectors_and_as_an_index(
    tmp_path, text, monkeypatch, capsys
):
    model, vectors, index = ("--model", "hash"), str(tmp_path / "vectors"), str(tmp_path / "index")
    cli.main(["embed", "--input", text, *model, "--output", vectors])
    encoder, queries = HashEncoder(), ["a dog runs", "caf\u00e9"]
    similar = encoder.encode(queries, normalize=True) @ encoder.encode(LINES, normalize=True).T
    for source in (
        ["--input", text, *model, "--output", index],
        ["--input", vectors],
        ["--input", index],
    ):
        found = objects(capsys, "search", *source, *queries, "--top_k", "3", "--json")
        assert [hits["query"] for hits in found] == queries
        assert [hit["line"] for hit in found[0]["hits"]][:2] == [
            2,
            4,
        ]  # equally similar, in the order of the text
        assert [hit["rank"] for hit in found[0]["hits"]] == [1, 2, 3]
        assert {hit["file"] for hit in found[0]["hits"]} == {text}
        for row, hits in zip(similar, found, strict=True):
            np.testing.assert_allclose(
                [hit["score"] for hit in hits["hits"]], np.sort(row)[:-4:-1], atol=1e-6
            )
    stdin(monkeypatch, b"a dog runs\n")
    (found,) = objects(capsys, "search", "--input", index, "--threshold", "0.99", "--json")
    assert [hit["line"] for hit in found["hits"]] == [2, 4]

    def error(source: str, *options: str) -> str:
        return error_of(capsys, "search", "--input", source, *options)

    message = error(index, "--model", "other", "x")
    assert (
        "index holds embeddings of hash (avg, float32, 8 dimensions, jax, weights hash avg), but the encoder"
        in message
    )
    message = error(vectors, "--model", "missing", "x")
    assert "dimensions, jax, weights hash avg), and missing cannot be loaded" in message
    for options in (["--weight", "0.1"], ["--storage", "bits"], ["--no-passages"]):
        assert f"{options[0]}: {index} is already built. Leave this out" in error(
            index, *options, "x"
        )
    assert "--weight needs --mode hybrid" in error(vectors, "--weight", "0.1", "x")
    assert "--language needs --mode lexical or hybrid" in error(
        vectors, "--language", "english", "x"
    )
    assert "--storage: --mode lexical reads no embeddings" in error(
        text, "--mode", "lexical", "--storage", "bits", "x"
    )
    assert "--threshold 0.5: hybrid scores" in error(
        text, *model, "--mode", "hybrid", "--threshold", "0.5", "x"
    )
    assert "give QUERY or --queries, not both" in error(text, *model, "--queries", text, "x")
    assert f"--add: --input {index} is an index already" in error(
        index, "--output", index, "--add", "x"
    )
    assert "Name the encoder with --model" in error(text, "x")
    assert "cannot read missing.txt: no such file" in error("missing.txt", "x")
    assert "--top_k: -1 is below 1" in error(text, *model, "--top_k", "-1", "x")
    assert "QUERY: the text is empty" in error(text, *model, " ")
    monkeypatch.setattr(
        tempfile, "gettempdir", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
    )
    message = "cannot write a temporary file in TMPDIR or /tmp: No space left. Nothing was changed"
    assert message in error(vectors, "x")
    detector.cache_clear()
    assert message in error(text, "--mode", "lexical", "x")
    named = ("--mode", "lexical", "--language", "english", "--json", "dogs run")
    for source in (text, vectors):  # words are searched without a model and without embeddings
        (found,) = objects(capsys, "search", "--input", source, *named)
        assert [hit["line"] for hit in found["hits"]] == [2, 4]


def test_an_index_of_the_words_of_embeddings_is_kept(tmp_path, text, capsys):
    vectors, index = str(tmp_path / "vectors"), str(tmp_path / "index")
    cli.main(["embed", "--input", text, "--model", "hash", "--output", vectors])
    command = [
        "search",
        "--input",
        vectors,
        "--mode",
        "lexical",
        "--output",
        index,
        "--json",
        "dogs run",
    ]
    first, second = (objects(capsys, *command) for _ in range(2))
    assert first == second
    # What is added later replaces nothing. In a fault, it took the place of the embeddings.
    (tmp_path / "more.txt").write_text("a dog walks\n")
    find_index(Path(vectors)).save(tmp_path / "other")
    for folder in ("index", "other"):
        more = ["--output", str(tmp_path / folder), "--add", "dogs"]
        _, said = search(tmp_path, capsys, *more, source=f"{tmp_path}/more.txt")
        assert "1 document new, 0 changed, 0 removed" in said


def test_mistakes_are_named_before_texts_are_encoded(tmp_path, text, capsys):
    model, index = ("--model", "hash"), str(tmp_path / "index")
    search(tmp_path, capsys, *model, "--mode", "hybrid", "--output", index, "dogs")

    def error(*options: str) -> str:
        with mock.patch.object(HashEncoder, "before", mock.Mock(side_effect=AssertionError)):
            return error_of(capsys, "search", "--input", text, *model, *options)

    assert "missing.txt: no such file" in error("--queries", "missing.txt")
    assert "prompt_name='nosuch': the model has no such prompt" in error(
        "--prompt_name", "nosuch", "x"
    )
    assert "--threshold 0.5: hybrid scores" in error("--output", index, "--threshold", "0.5", "x")
    assert "--threshold inf: expected a number" in error("--threshold", "1e999", "x")
    assert "contains a lone surrogate" in error("a\udcff")
    assert "--no-passages needs --mode dense" in error("--mode", "lexical", "--no-passages", "x")
    assert "--prompt_name: --mode lexical reads no" in error(
        "--mode", "lexical", "--prompt_name", "query", "x"
    )
    with writing(tmp_path / "other", wait=False):
        message = error_of(capsys, "search", "--input", index, "--output", f"{tmp_path}/other", "x")
    assert "is in use by process" in message


def test_an_index_keeps_the_documents_behind_links(tmp_path, text, capsys):
    """A fault: the second command removed them."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link.txt").symlink_to(text)
    (tmp_path / "folder/own.txt").write_text("my own text\n")
    index = ["--output", f"{tmp_path}/index", "one"]
    folder = str(tmp_path / "folder")
    first, _ = search(tmp_path, capsys, "--model", "hash", "--follow_links", *index, source=folder)
    again, err = search(tmp_path, capsys, *index, source=folder)
    assert again == first
    assert "0 removed" in err
    shutil.rmtree(tmp_path / "index")
    search(tmp_path, capsys, "--model", "hash", *index, source=folder)
    message = error_of(capsys, "search", "--input", folder, "--follow_links", *index)
    assert "--follow_links: " in message
    assert "was built without it" in message


def test_invisible_characters_do_not_divide_words_on_the_terminal(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(
        "Die Donau\u00addampf\u00adschiff\u00adfahrt ruht.\n", encoding="utf-8"
    )
    cli.main(
        [
            "search",
            "--input",
            str(tmp_path / "a.txt"),
            "--mode",
            "lexical",
            "Donaudampfschiffahrt ruht",
        ]
    )
    assert "Donaudampfschifffahrt ruht." in capsys.readouterr().out


def test_words_are_searched_with_embeddings(tmp_path, text, capsys):
    model, vectors, index = ("--model", "hash"), str(tmp_path / "vectors"), str(tmp_path / "index")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/birds.md").write_text("# Birds\n\nAn owl hunts at night.\n")
    cli.main(["embed", "--input", str(tmp_path / "pages"), text, *model, "--output", vectors])
    for source in (
        ["--input", text, *model],
        ["--input", vectors, "--output", index, "--storage", "int8"],
    ):
        options = ["--mode", "hybrid", "--language", "english", "--json"]
        (found,) = objects(capsys, "search", *source, *options, "dogs run")
        ranks = {hit["text"]: hit["ranks"].get("lexical") for hit in found["hits"]}
        assert ranks.items() >= {"the cat sleeps": None, "a dog runs": 2, "caf\u00e9": None}.items()
    queries = ["Birds An owl hunts at night.", LINES[0]]
    found = objects(capsys, "search", "--input", index, "--mode", "dense", "--json", *queries)
    page, line = (each["hits"][0] for each in found)
    assert (page["file"], page["line"], page["title"]) == (
        f"{tmp_path}/pages/birds.md",
        None,
        "Birds",
    )
    assert (line["text"], line["line"], line["file"]) == (LINES[0], 1, text)
    assert line["score"] == pytest.approx(1, abs=0.01)
    cli.main(["search", "--input", index, "An owl hunts at night."])  # in its own mode
    shown = capsys.readouterr().out
    assert f"{tmp_path}/pages/birds.md" in shown
    assert "by meaning: " in shown
    assert "An owl hunts at night." in shown


@pytest.mark.parametrize(
    ("content", "queries", "note"),
    [
        ("question,answer\nA dog?,No cat.\n???,Yes.\n", ["A dog?", "???"], "column question, not ans"),
        ("query,text\nA dog?,It runs.\n", ["A dog?"], "read the column query, not text"),
        ("topic,more\nA dog.,It runs.\n", ["A dog. It runs."], "the columns topic, more as one query"),
        ("title,text\nA dog.,It runs.\n", ["A dog. It runs."], "the columns title, text as one"),
        ("id,text\n1,a dog\n2,\n", ["a dog"], "left out 1 query: 1 empty"),
    ],
)  # fmt: skip
def test_what_is_read_of_queries_is_said(tmp_path, text, capsys, content, queries, note):
    file = tmp_path / "q.csv"
    file.write_text(content)
    found, said = search(tmp_path, capsys, "--model", "hash", "--queries", str(file))
    assert [hits["query"] for hits in found] == queries
    assert note in said.partition(f"read {file}: {len(queries)} quer")[2]


def test_an_index_is_kept_up_to_date(tmp_path, text, monkeypatch, capsys):
    index, encoded = str(tmp_path / "index"), []
    encode = HashEncoder.encode
    monkeypatch.setattr(
        HashEncoder,
        "encode",
        lambda self, texts, *args, **kw: encoded.extend(texts) or encode(self, texts, *args, **kw),
    )

    def keep(*options: str, source: str = "", queries=("dogs run",)) -> tuple[list, str]:
        encoded.clear()
        found, said = search(tmp_path, capsys, "--output", index, *options, *queries, source=source)
        for query in queries:
            if query in encoded:
                encoded.remove(query)
        return [hit["text"] for hits in found for hit in hits["hits"]], said

    texts, said = keep("--model", "hash", "--mode", "hybrid", "--top_k", "9")
    assert sorted(texts) == sorted(LINES)
    assert f"read {text}: 4 documents" in said
    manifest = (tmp_path / "index/index.json").read_bytes()
    _, said = keep("--top_k", "9")  # with the same model and the same options
    assert "index: 0 documents new, 0 changed, 0 removed, 4 unchanged" in said
    assert (encoded, (tmp_path / "index/index.json").read_bytes()) == ([], manifest)

    Path(text).write_text("a new line\n" + "".join(f"{line}\n" for line in (*LINES[:2], "changed")))
    texts, said = keep("--top_k", "9")
    assert sorted(texts) == sorted(["a new line", *LINES[:2], "changed"])
    assert sorted(encoded) == [
        "a new line",
        "changed",
    ]  # although the numbers of all lines have changed
    assert "1 document new, 1 changed, 1 removed, 2 unchanged" in said
    (tmp_path / "notes.md").write_text("# Notes\n\nAn owl hunts at night.\n")

    def refused(*options: str) -> str:
        return error_of(capsys, "search", "--output", index, *options, "x")

    notes = ["--input", f"{tmp_path}/notes.md"]
    message = refused(*notes)
    assert (
        f"is an index of {text}, not of --input {tmp_path}/notes.md. To search both, give --add"
        in message
    )
    for options in (
        ["--mode", "dense"],
        ["--storage", "int8"],
        ["--no-passages"],
        ["--weight", "0.9"],
    ):
        message = refused("--input", text, *options)
        assert "Leave this out, or give --replace" in message
    assert "but the encoder is other" in refused("--input", text, "--model", "other")
    assert "--add and --replace exclude" in refused(*notes, "--add", "--replace")
    texts, said = keep("--add", "--top_k", "9", source=f"{tmp_path}/notes.md")
    assert (len(texts), encoded) == (5, ["Notes An owl hunts at night."])
    Path(text).write_text("a new line\n")
    texts, said = keep("--top_k", "9")  # the other input stays
    assert sorted(texts) == ["An owl hunts at night.", "a new line"]
    texts, said = keep(
        "--replace", "--model", "hash", "--top_k", "9", source=f"{tmp_path}/notes.md"
    )
    assert (texts, "index:" in said) == (["An owl hunts at night."], False)
    assert "--add and --replace need --output" in error_of(capsys, "search", *notes, "--add", "x")


def test_an_index_of_embeddings_is_kept_up_to_date(tmp_path, text, capsys):
    vectors, index = f"{tmp_path}/vectors", f"{tmp_path}/index"
    cli.main(["embed", "--input", text, "--model", "hash", "--output", vectors])
    for said in ("", "index: 0 documents new, 0 changed, 0 removed, 4 unchanged"):
        found, err = search(tmp_path, capsys, "--output", index, "a dog runs", source=vectors)
        assert said in err
    (tmp_path / "more.txt").write_text("one more\n")
    cli.main(
        ["embed", "--input", text, f"{tmp_path}/more.txt", "--model", "hash", "--output", vectors]
    )
    found, err = search(tmp_path, capsys, "--output", index, "one more", source=vectors)
    assert "index: 1 document new, 0 changed, 0 removed, 4 unchanged" in err
    assert found[0]["hits"][0]["text"] == "one more"
    message = error_of(capsys, "search", "--input", text, "--output", index, "--add", "one more")
    assert "already has documents with the ids" in message


def test_the_folder_here_is_embedded_under_its_name(tmp_path, monkeypatch):
    """A fault: its Parquet files began with a dot, which other programs do not read."""
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "folder/a.txt").write_text("a text\n")
    for here, name in (("folder", "."), ("folder/below", "..")):
        monkeypatch.chdir(tmp_path / here)
        output = tmp_path / f"out{name}"
        assert cli.main(["embed", "--input", name, "--model", "hash", "--output", str(output)]) == 0
        assert [path.name for path in output.iterdir()] == ["folder.000000.parquet"]


@pytest.mark.parametrize("command", ["search", "embed", "encode"])
def test_outputs_and_inputs_that_cannot_be_used_are_errors(command, tmp_path, text, capsys):
    (tmp_path / "file.npy").write_text("mine")
    (tmp_path / "loop.npy").symlink_to(tmp_path / "loop.npy")
    os.mkfifo(tmp_path / "pipe.npy")
    theirs = tmp_path / "theirs.npy"  # a folder with an index of another program
    theirs.mkdir()
    (theirs / "index.json").write_text('{"mode": "dense"}')

    def error(source: str, output: str) -> str:
        query = ["x"] if command == "search" else []
        return error_of(
            capsys, command, "--model", "hash", "--input", source, "--output", output, *query
        )

    not_utf8 = os.fsdecode(b"caf\xe9.npy")
    for name in (
        "loop.npy",
        "pipe.npy",
        "x" * 300,
        "y\0.npy",
        not_utf8,
        "file.npy/below.npy",
        "/dev/null",
    ):
        message = error(text, str(tmp_path / name))
        assert message.splitlines()[-1].startswith("error: ")
    if command != "encode":
        assert "is not a folder" in error(text, str(tmp_path / "file.npy"))
    if command != "embed":
        assert "theirs.npy" in error(text, str(theirs))
    if command != "encode":
        assert "is inside --input" in error(str(tmp_path), f"{tmp_path}/index")
    if command == "embed":
        assert "reads its inputs twice" in error("-", f"{tmp_path}/new")
    assert "is inside --input" in error(f"{tmp_path}/*", f"{tmp_path}/new.npy")
    if command == "encode":
        assert "is inside --input" in error(str(tmp_path), f"{tmp_path}/new.npy")
    for name in ("x" * 300, not_utf8):
        assert error(name, f"{tmp_path}/new.npy").splitlines()[-1].startswith("error: ")
    assert (tmp_path / "file.npy").read_text() == "mine"
    assert [path.name for path in theirs.iterdir()] == ["index.json"]


def test_hits_are_read_at_the_width_of_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("word " * 60 + "\n\x1b[31mred\x1b[0m text\n")
    command = ["search", "--input", "long.txt", "--model", "hash", "what"]
    cli.main(command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "what"
    assert max(map(len, lines)) <= 60
    assert 1 <= sum("word word" in line for line in lines) <= LINES_PER_HIT + 1
    assert any(line.endswith("  long.txt:2") for line in lines)
    assert any(line.endswith("word ...") for line in lines)
    # what colours a terminal is removed
    assert any(line.endswith(" [31mred [0m text") for line in lines)
    cli.main([*command, "--threshold", "2"])
    assert "Nothing has a score of 2 or more." in capsys.readouterr().out


# embed


def test_every_sentence_is_embedded_once_into_a_folder_of_parquet_files(
    tmp_path, shards, capsys, monkeypatch
):
    """Polars and Hugging Face's data sets take whatever is in the folder; each file names its encoder."""
    assert cli.main(arguments(tmp_path)) == 0
    check(out := tmp_path / "out", shards)
    assert "embedded 45 texts into" in capsys.readouterr().err
    assert {path.suffix for path in out.iterdir()} == {".parquet"}
    assert pyarrow.dataset.dataset(out).count_rows() == 45
    assert find_store(out).encoder == HashEncoder().record()
    cli.main(arguments(tmp_path, model="models/hash"))  # the same model under another path
    assert (
        f"resuming {out}: 4 of 4 inputs are complete, 7 Parquet files exist"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(app.hosts, "_verbosity", "normal")  # for later tests
    cli.main([*arguments(tmp_path), "--quiet"])
    assert capsys.readouterr().err == ""


def test_processes_share_the_files(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setattr(app.jax, "process_index", lambda: 1)  # each process reports its own work
    done = []  # files, where a process waits for the others
    monkeypatch.setattr(
        app.hosts, "decided_by_first", lambda _: done.append(len(read(tmp_path / "out")))
    )
    for index, unfinished in enumerate((2, 1, 0)):
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))
        cli.main(arguments(tmp_path))
        with (
            pytest.warns(UserWarning, match=f"not finished {unfinished} of")
            if unfinished
            else nullcontext()
        ):
            find_store(tmp_path / "out")
    assert (done, capsys.readouterr().err.count(" of 3: embedded")) == ([2, 3, 4], 3)
    check(tmp_path / "out", shards)


def test_files_and_lines_without_text_are_skipped(tmp_path, shards, capsys):
    (tmp_path / "shards/shard-0.txt").write_bytes(b"")
    (tmp_path / "shards/shard-00.txt").write_bytes(b"\n \n")
    with gzip.open(tmp_path / "shards/shard-4.txt.gz", "wb") as file:
        file.write(b"one\n\nfour\n")
    for _ in range(2):
        cli.main(arguments(tmp_path, "--normalize", dtype="float16"))
        sizes = {name: len(found) for name, found in read(tmp_path / "out").items()}
        assert sizes == {
            "shard-1.txt": 25,
            "shard-2.txt": 1,
            "shard-3.txt": 12,
            "shard-4.txt.gz": 2,
        }
    err = capsys.readouterr().err
    assert "shard-4.txt.gz: 2 passages\nleft out 1 text: 1 empty\n" in err
    assert "shard-0.txt: it contains no text" in err
    assert err.count("shard-00.txt: it contains no text") == 1  # then it is complete
    vectors = np.array(
        [row["embedding"] for rows in read(tmp_path / "out").values() for row in rows]
    )
    np.testing.assert_array_equal(vectors, vectors.astype(np.float16))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-3)


def test_a_file_beyond_a_limit_is_named_again_by_later_commands(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for name in ("a.md", "b.md"):
        (tmp_path / "texts" / name).write_text("A text.")
    late = Unreadable("took longer than 60 seconds", is_limit=True)

    def limited(files, *, with_code):
        yield from (late, *itertools.islice(parse_files(files, with_code=with_code), 1, None))

    monkeypatch.setattr("diffcse_jax.documents.open.parse_files", limited)
    cli.main(arguments(tmp_path, input=f"{tmp_path}/texts"))
    assert [row["file"] for row in read(tmp_path / "out")["texts"]] == [f"{tmp_path}/texts/b.md"]
    with pytest.warns(UserWarning, match="out lacks what took too long .*/a.md. To try again, rem"):
        cli.main(arguments(tmp_path, input=f"{tmp_path}/texts"))


@pytest.mark.parametrize("is_late_first", [True, False])
def test_parts_that_an_earlier_try_read_otherwise_are_embedded_again(
    tmp_path, monkeypatch, capsys, is_late_first
):
    (tmp_path / "texts").mkdir()
    for name in "abcde":
        (tmp_path / f"texts/{name}.md").write_text(f"A text {name}.")
    late = Unreadable("took longer than 60 seconds of processor time", is_limit=True)
    again = arguments(tmp_path, input=f"{tmp_path}/texts", rows_per_file="2")

    def without_first(files, *, with_code):
        yield from (late, *itertools.islice(parse_files(files, with_code=with_code), 1, None))

    with monkeypatch.context() as patched:
        if is_late_first:
            patched.setattr("diffcse_jax.documents.open.parse_files", without_first)
        # The first try ends after all of its two or three parts, and before it is recorded.
        interrupted = mock.Mock(side_effect=KeyboardInterrupt)
        patched.setattr(app._Job, "remove_parts_after", interrupted)
        error_of(capsys, *again, code=130)
    if not is_late_first:
        monkeypatch.setattr("diffcse_jax.documents.open.parse_files", without_first)
    cli.main(again)
    assert "texts.000000.parquet has other texts than are read now" in capsys.readouterr().err
    files = [Path(row["file"]).stem for row in itertools.chain(*read(tmp_path / "out").values())]
    assert files == [*("abcde" if is_late_first else "bcde")]


def test_what_has_changed_since_the_folder_was_begun_is_refused(
    tmp_path, shards, monkeypatch, capsys
):
    cli.main(arguments(tmp_path))
    message = error_of(capsys, *arguments(tmp_path, dtype="float16", rows_per_file="7"))
    assert (
        "settings: dtype: 'float32' then, 'float16' now; rows_per_file: 10 then, 7 now. Use the earlier"
        in message
    )
    # the path says nothing about the weights: a run's best checkpoint changes
    with monkeypatch.context() as trained:
        trained.setattr(HashEncoder, "training", "one step more")
        assert "weights: 'hash avg' then, 'hash avgone step more' now" in error_of(
            capsys, *arguments(tmp_path)
        )
    file = tmp_path / "shards/shard-1.txt"
    text = file.read_text()
    file.write_text(text.replace("sentence 7", "sentence 8"))  # of the same size
    assert "shard-1.txt is not the text that was embedded into" in error_of(
        capsys, *arguments(tmp_path)
    )
    file.write_text(text)
    state = tmp_path / "out.state/shard-1.txt.json"
    state.write_text("{")
    message = error_of(capsys, *arguments(tmp_path))
    assert all(
        part in message
        for part in ("shard-1.txt.json is not valid JSON", "Remove that file and run the same")
    )
    for damaged in ("{", '{"parts": 5}'):
        state.write_text(damaged)
        with pytest.warns(
            UserWarning, match=r"has not finished 1 of its inputs, for example shard-1\.txt"
        ):
            find_store(tmp_path / "out")
    state.unlink()
    cli.main(arguments(tmp_path))
    check(tmp_path / "out", shards)
    file.write_text("")  # an input that was empty may get text, which from then on may not change
    again = arguments(tmp_path, input=str(file), output=f"{tmp_path}/again", rows_per_file="2")
    cli.main(again)
    file.write_text("A1\nA2\nA3\nA4\n")
    with monkeypatch.context() as patched:
        patched.setattr(HashEncoder, "before", mock.Mock(side_effect=[None, KeyboardInterrupt]))
        error_of(capsys, *again, code=130)
    file.write_text("B1\nB2\nB3\nB4\n")
    assert "shard-1.txt is not the text that was embedded" in error_of(capsys, *again)


def test_a_renamed_file_does_not_keep_its_old_name_without_a_word(tmp_path, shards, capsys):
    folder, moved = tmp_path / "shards", tmp_path / "moved/shards"
    as_one, as_several = (
        arguments(tmp_path, input=source, output=f"{tmp_path}/{name}")
        for name, source in (("one", f"{folder}"), ("several", f"{folder}/shard-*"))
    )
    cli.main(as_one)
    cli.main(as_several)
    (folder / "shard-2.txt").rename(folder / "shard-9.txt")
    assert "which includes the names of files in a folder, has" in error_of(capsys, *as_one)
    cli.main(as_several)
    notice = "several also holds 1 input of earlier commands, for example shard-2.txt"
    assert notice in capsys.readouterr().err
    (folder / "shard-9.txt").rename(folder / "shard-2.txt")
    moved.parent.mkdir()
    folder.rename(moved)
    cli.main(arguments(tmp_path, input=f"{moved}", output=f"{tmp_path}/one"))
    assert "1 of 1 inputs are complete" in capsys.readouterr().err


def test_texts_that_are_cut_are_counted_once(tmp_path, minilm_dir, monkeypatch):
    monkeypatch.undo()  # the encoder
    model = write_tiny_model(tmp_path / "model", minilm_dir, blocks=1)
    (tmp_path / "text.txt").write_text(f"a\n{'dog ' * 50}\nb\n{'dog ' * 50}\n{'cat ' * 50}\n")
    options = {
        "model": str(model),
        "pooler": "avg",
        "input": f"{tmp_path}/text.txt",
        "rows_per_file": "2",
    }
    with pytest.warns(
        UserWarning, match=f"truncated 3 of 5 texts to {MAX_LENGTH} tokens, the most"
    ) as caught:
        cli.main(arguments(tmp_path, **options))
    assert len(caught) == 1


def test_inputs_that_cannot_be_told_apart_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing matches .*none-\*"):
        app.find_inputs([f"{tmp_path}/none-*"])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text("x\n")
    with pytest.raises(DataError, match="have the same name"):
        app.find_inputs([f"{tmp_path}/*/same.txt"])
    assert app.find_inputs([f"{tmp_path}/a/*", f"{tmp_path}/a/same.txt"]) == [
        f"{tmp_path}/a/same.txt"
    ]
    for name in ("data1.txt", "data[1].txt"):  # a file whose name is a pattern is that file
        (tmp_path / name).write_text("x\n")
        assert app.find_inputs([f"{tmp_path}/data[1].txt"]) == [f"{tmp_path}/{name}"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", "x/z/d.txt x/m.txt t.txt"),
        ("**", "x/z/d.txt x/m.txt t.txt"),
        ("*", "t.txt x"),
        ("**/[tz]*", "t.txt x/z"),
    ],
)
def test_a_pattern_finds_what_it_finds_for_search(tmp_path, capsys, pattern, expected):
    for name in ("t.txt", "x/m.txt", "x/p.png", "x/z/d.txt"):
        path = tmp_path / "pages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    found = app.find_inputs([f"{tmp_path}/pages/{pattern}"])
    assert found == [f"{tmp_path}/pages/{name}" for name in expected.split()]
    # A picture in a folder that is an input is listed when the folder is read.
    assert ("skipped 1 file: 1 of the kind .png" in capsys.readouterr().err) == (pattern == "**")


def test_a_full_disk_loses_nothing(tmp_path, shards, monkeypatch, capsys):
    def write_table(table, path, *, write=pq.write_table, **options):
        if "shard-3" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(table, path, **options)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(pq, "write_table", write_table)
        message = error_of(capsys, *arguments(tmp_path))
    assert "No space left on device. Complete Parquet files are kept. Please make room" in message
    cli.main(arguments(tmp_path))
    assert "embedded 12 texts into" in capsys.readouterr().err
    check(tmp_path / "out", shards)


def test_links_and_files_of_the_user_beside_embeddings_stay(tmp_path, shards, capsys):
    mine, state = tmp_path / "mine", tmp_path / "out.state"
    mine.write_text("mine")
    state.mkdir()
    for name in ("shard-0.txt.json", "shard-1.txt.000000.parquet.tmp"):
        (state / name).symlink_to(tmp_path / "nothing")
    (state / "shard-2.txt.json.tmp").symlink_to(mine)
    (state / "out.other.7.01234567.tmp").write_text("left by a process that was killed")
    os.utime(state / "out.other.7.01234567.tmp", (0, 0))
    cli.main(arguments(tmp_path))
    check(tmp_path / "out", shards)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
    assert {path.name for path in state.glob("*.tmp")} == {
        "shard-1.txt.000000.parquet.tmp",
        "shard-2.txt.json.tmp",
    }
    (state / ".lock").unlink()
    (state / ".lock").symlink_to(mine)
    assert f"{state}/.lock is needed for a file" in error_of(capsys, *arguments(tmp_path))
    assert mine.read_text() == "mine"


def test_a_second_process_on_the_same_files_is_refused(tmp_path, shards, monkeypatch):
    refused = []
    options = EmbedOptions(
        model="hash", inputs=(f"{tmp_path}/shards/*",), output=tmp_path / "out", rows_per_file=10
    )

    def embed_again():
        monkeypatch.setattr(HashEncoder, "before", None)
        with pytest.raises(
            InUseError,
            match=r"is in use by process .* divide the inputs: give each process JAX_PROC",
        ):
            app.embed(options)
        refused.append(True)

    monkeypatch.setattr(HashEncoder, "before", embed_again)
    app.embed(options)
    assert refused
    check(tmp_path / "out", shards)


def test_an_interrupted_search_says_what_its_output_holds(tmp_path, text, monkeypatch, capsys):
    command = [
        "search",
        "--model",
        "model",
        "--input",
        text,
        "--output",
        f"{tmp_path}/index",
        "a dog",
    ]
    for left in ("is not an index yet", "is the index as it was before"):
        with monkeypatch.context() as patched:
            patched.setattr(HashEncoder, "before", mock.Mock(side_effect=KeyboardInterrupt))
            message = error_of(capsys, *command, code=130)
        assert (
            f"interrupted: {tmp_path}/index {left}. To start again, run diffcse search" in message
        )
        cli.main(command)
        Path(text).write_text("A new line.\n")


def test_an_interruption_names_the_command_and_search_warns(tmp_path, shards, monkeypatch, capsys):
    out = str(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(
            HashEncoder, "before", mock.Mock(side_effect=[None, None, KeyboardInterrupt])
        )
        message = error_of(capsys, *arguments(tmp_path), code=130)
    expected = "interrupted after 17 texts; complete Parquet files are kept. To resume, run diffcse embed --model"
    assert expected in message
    message = f"{out} is incomplete: `diffcse embed` has not finished 3 of its inputs, for example shard-1.txt"
    with pytest.warns(UserWarning, match=message):
        cli.main(["search", "--input", out, "a query"])
    cli.main(arguments(tmp_path))
    Path(out, "shard-3.txt.000001.parquet").unlink()
    with pytest.raises(DataError, match=r"shard-3\.txt\.000001\.parquet is missing"):
        HashEncoder().load_index(out)
    cli.main(arguments(tmp_path))  # makes it again
    check(tmp_path / "out", shards)


def test_a_flipped_bit_of_an_embedding_is_noticed(tmp_path, text):
    # Parquet files of other programs may have such names
    text = Path(text).rename(tmp_path / "_text.txt")
    cli.main(["embed", "--model", "hash", "--input", f"{text}", "--output", f"{tmp_path}/out"])
    (part,) = (tmp_path / "out").glob("*.parquet")
    group = pq.ParquetFile(part).metadata.row_group(0)
    column = group.column(group.num_columns - 1)
    content = bytearray(part.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    part.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"{part.name} cannot be read .*(CRC|crc|[Cc]hecksum)"):
        find_store(tmp_path / "out").mapped()
