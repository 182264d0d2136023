import dataclasses
import re

import pytest

from diffcse_jax.config import Config
from diffcse_jax.data.in_memory import as_texts, write_held_out, write_sentences
from diffcse_jax.data.sources import open_corpus, open_documents
from diffcse_jax.errors import DataError


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def corpus(path, **data):
    return open_corpus(dataclasses.replace(Config().data, train_file=str(path), **data))


def test_text_is_a_file_named_by_its_content():
    sentences = ["One line.", "Two\nlines, \u2028 and “quotes”.", 'A "third"\t\\ one.']
    path = write_sentences(sentences)
    assert path == write_sentences(iter(sentences)) != write_sentences(sentences[::-1])
    assert [row for (row,) in corpus(path)] == sentences
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".jsonl", ".jsonl"]  # nothing partial


def test_a_string_is_a_document_where_documents_are_asked_for():
    path = write_sentences(["A first sentence here. And a second one of it.", "Another document, of one sentence."])
    data = dataclasses.replace(Config().data, train_file=str(path), pairs="lead")
    (first,), (second,) = open_documents(data)
    assert first.sentences() == ["A first sentence here.", "And a second one of it."]
    assert second.sentences() == ["Another document, of one sentence."]


def test_rows_have_columns():
    triples = [("a premise", "its entailment", "a contradiction"), ["second", "row", "here"]]
    found = corpus(write_sentences(triples))
    assert found.columns == ("sentence", "positive", "hard_negative")
    assert list(found) == [tuple(row) for row in triples]
    named = [{"query": "q1", "label": 3, "document": "d1"}, {"query": "q2", "label": None, "document": "d2"}]
    assert list(corpus(write_sentences(named), columns=("query", "document"))) == [("q1", "d1"), ("q2", "d2")]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the list of texts to train on is empty"),
        (["a", float("nan")], "text 2 is nan. Give strings; tuples of strings"),
        ([("a", "b"), ("c",)], "text 2 is ('c',). Give strings"),
        (
            [("a", "b"), ("c", "d", "e")],
            "text 2 has 3 columns (sentence, positive, hard_negative), but the first text has 2",
        ),
        ([("a", 1)], "text 1 is ('a', 1)"),
    ],
)
def test_what_is_no_text_is_named(texts, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        write_sentences(iter(texts))  # of which types are not checked


@pytest.mark.parametrize("table", ["pandas", "pyarrow", "dict", "string"])
def test_tables_are_converted_or_refused_with_advice(table):
    """Before, the names of the columns were taken for the texts."""
    columns = {"sentence": ["a b", "c d"], "positive": ["e f", "g h"]}
    if table in ("dict", "string"):
        given = columns if table == "dict" else "one sentence"
        message = "with the keys sentence, positive. Choose one" if table == "dict" else "cannot train on a str. Give"
        with pytest.raises(DataError, match=message):
            as_texts(given)
        return
    given = pytest.importorskip(table)
    given = given.DataFrame(columns) if table == "pandas" else given.table(columns)
    assert list(corpus(write_sentences(as_texts(given)))) == [("a b", "e f"), ("c d", "g h")]


def test_held_out_rows_share_no_text_with_the_others():
    rows = [(f"question {i // 2}", f"{'answer' if i % 60 < 30 else ' Answer '}\t{i % 30}") for i in range(200)]
    train_file, pairs_file = write_held_out(rows, 0.1)
    pairs = [tuple(line.split("\t")) for line in pairs_file.read_text().splitlines()]
    trained_on = [(first, " ".join(second.lower().split())) for first, second in corpus(train_file)]
    assert 4 <= len(pairs) <= 40
    assert trained_on
    assert not {text for row in trained_on for text in row} & {text.lower() for row in pairs for text in row}
    assert (train_file, pairs_file) == write_held_out(iter(rows), 0.1)
    unusable = [(f"asked {i}", ["", " \t", "\0"][i % 3]) for i in range(30)] + [(" ", f"said {i}") for i in range(3)]
    with_unusable, same_pairs_file = write_held_out([*rows, *unusable], 0.1)
    assert same_pairs_file == pairs_file
    found = corpus(with_unusable)
    assert list(found) == list(corpus(train_file))
    assert found.skipped.total() == 33
    with pytest.raises(DataError, match="leaves 2 of 2 rows for training and 0 for evaluation"):
        write_held_out([("a", "b"), ("c", "d")], 0.01)
