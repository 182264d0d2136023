"""Text in memory: as a file to train on, and as documents to search."""

import datetime
import functools
import json
import math
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.config import DataConfig
from diffcse_jax.data.given import write_held_out, write_sentences
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.memory import as_texts, documents_in_memory
from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation.retrieval import read_retrieval_pairs
from diffcse_jax.search.index import Index
from diffcse_jax.search.texts import checked_sentences


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows_of(path) -> list[tuple[str, ...]]:
    return [row.texts for row in open_corpus(DataConfig(str(path))).rows()]


def documents_of(given, **options):
    return list(documents_in_memory(given, **options).read(Ledger("given")))


# For training


def test_text_is_a_file_named_by_its_content():
    sentences = [
        "One line.",
        "Two\nlines, \u2028 and “quotes”.",
        'A "third"\t\\ one. It is the last.',
    ]
    path = write_sentences(sentences)
    assert path == write_sentences(iter(sentences)) != write_sentences(sentences[::-1])
    assert open_corpus(DataConfig(train_file=str(path))).name == "the text given to train"
    assert [row for (row,) in rows_of(path)] == sentences
    files = sorted(file.suffix for file in path.parent.iterdir())
    assert files == [".jsonl", ".jsonl"]  # nothing partial


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the list of texts to train on is empty"),
        ([("a", "b"), ("c",)], "text 2 is ('c',). Give a list of strings"),
        ([("a", "b"), ("c", "d", "e")], "text 2 has 3 columns (sentence, positive, hard_negative)"),
        (["a", 2], "text 2 is 2. Give a list of strings"),
    ],
)
def test_what_is_not_text_is_named(texts, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        write_sentences(iter(texts))  # of which types are not checked


def test_tables_are_converted():
    columns = {"sentence": ["a b", "c d", "i j"], "positive": ["e f", "g h", None]}
    frame = pd.DataFrame(columns | {"positive": ["e f", "g h", math.nan]})
    for table in (frame, pa.table(columns)):
        assert rows_of(write_sentences(as_texts(table))) == [("a b", "e f"), ("c d", "g h")]
    with pytest.raises(
        DataError, match=r"type dict, with the keys sentence, positive\. Give a list of strings"
    ):
        as_texts(columns)


def test_lists_that_pandas_gives_as_arrays_are_lists(tmp_path):
    lists = pa.table({"query": ["a", "d"], "pos": [["b", "c"], ["e"]]})
    pq.write_table(lists, tmp_path / "a.parquet")
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert rows_of(write_sentences(as_texts(frame))) == [("a", "b"), ("a", "c"), ("d", "e")]
    long = pd.DataFrame({"text": [np.array(["word"] * 2000), np.array(["a", "b"])]})
    first, second = documents_of(long)
    assert [len(each.sections[0].lines) for each in (first, second)] == [2000, 2]


def test_pairs_that_share_an_answer_are_held_out_together(capsys):
    pairs = [
        (f"Question {number} on {answer}?", f"This is answer {answer}.")
        for answer in range(40)
        for number in range(10)
    ]
    trained, held_out = write_held_out(pairs, 0.1)
    trained_rows = [tuple(json.loads(line).values()) for line in trained.read_text().splitlines()]
    held_rows = [tuple(line.split("\t")) for line in held_out.read_text().splitlines()]
    assert sorted([*trained_rows, *held_rows]) == sorted(pairs)  # nothing disappears
    assert {answer for _, answer in trained_rows}.isdisjoint(answer for _, answer in held_rows)
    assert 10 <= len(held_rows) <= 120
    read_retrieval_pairs(str(held_out))
    assert f"read the text given to train: {len(held_rows)} pairs" in capsys.readouterr().err


def test_pairs_that_all_share_a_text_train():
    with pytest.raises(
        DataError, match=r"of 30 rows for training and 0 for evaluation.*stay together"
    ):
        write_held_out([(f"Question {number}?", "Yes.") for number in range(30)], 0.2)


# For search

plain = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip)


def test_dicts_keep_their_columns():
    rows = [
        {"file": "a.pdf", "start": 3, "sentence": "One.", "tags": ["x"]},
        {"file": "a.pdf", "start": 9, "sentence": "Two.", "extra": 1.5},
    ]
    first, second = documents_of(rows)
    assert (first.id, second.id) == ("0", "1")
    assert json.loads(first.columns) == {"file": "a.pdf", "start": 3, "tags": ["x"]}
    assert json.loads(second.columns) == {"file": "a.pdf", "start": 9, "extra": 1.5}
    assert first.place == Place(row=1)
    assert [document.id for document in documents_of(rows, id_column="start")] == ["3", "9"]


def test_each_row_has_the_first_id_that_it_has(tmp_path):
    """In memory as in files: one row may have `_id`, and another `id`."""
    rows = [{"_id": "x", "text": "a"}, {"id": "y", "text": "b"}, {"_id": "z", "id": 1, "text": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    in_file = open_documents_to_search(str(tmp_path / "rows.jsonl")).read(Ledger("rows"))
    for documents in (documents_of(rows), [*in_file]):
        assert [document.id for document in documents] == ["x", "y", "z"]
        assert [document.columns for document in documents] == ["", "", '{"id": 1}']


def nested(depth):
    return functools.reduce(lambda value, _: {"in": value}, range(depth), "x")


def test_keys_that_json_does_not_have_become_text():
    day = datetime.date(2024, 1, 2)
    (document,) = documents_of([{"text": "One.", "at": {day: [{(1, 2): 3}]}}])
    assert json.loads(document.columns) == {"at": {"2024-01-02": [{"(1, 2)": 3}]}}


@pytest.mark.parametrize(
    ("value", "why"),
    [(nested(100_000), "is nested too deeply"), ([10**5000], "cannot be stored as JSON")],
    ids=["deep", "digits"],
)
def test_a_column_that_json_cannot_hold_is_named_with_its_row(value, why):
    with pytest.raises(DataError, match=rf"^line 2: one of the columns at, odd {why}"):
        documents_of([{"text": "One."}, {"text": "Two.", "at": 3, "odd": value}])


@pytest.mark.parametrize("value", [nested(100_000), 10**5000], ids=["deep", "digits"])
def test_a_value_that_python_cannot_write_is_refused_or_left_out(value):
    index = Index(None, ["One."], mode="lexical")
    row = {"text": "Two.", "odd": value}
    kind = type(value).__name__
    for call, message in (
        (lambda: index.add([row]), "line 2: one of the columns odd "),
        (lambda: index.add([[value]]), "text 2 is too large to show (type list)"),
        (lambda: checked_sentences([value]), f"sentence 1 is too large to show (type {kind})"),
        (lambda: index.remove([[value]]), "the index has no document with the id too large"),
        (lambda: write_sentences([row, row]), "text 1: a value cannot be written as JSON"),
        (lambda: documents_in_memory([row]).fingerprint(), "the given texts: a value cannot"),
    ):
        with pytest.raises(DataError, match=f"^{re.escape(message)}"):
            call()
    ledger = Ledger("given")
    assert not [*documents_in_memory([{"text": value}, row | {"odd": 1}]).read(ledger)][1:]
    assert ledger.left_out["with a value that is not text"].count == 1
    with pytest.raises(
        DataError, match=r"^line 1: an id has thousands of digits|^line 1: one of the columns id"
    ):
        documents_of([{"id": value, "text": "One."}])


def test_columns_are_text_and_long_ones_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    lists = ",".join(["[]"] * 50_000)  # as objects, they would take 60 bytes each
    path.write_text(f'{{"text": "One.", "odd": [{lists}]}}\n{{"text": "Two.", "odd": [[], NaN]}}\n')
    ledger = Ledger("rows")
    one, two = open_documents_to_search(path).read(ledger)
    assert (one.columns, two.columns) == ("", '{"odd": [[], "nan"]}')
    (warning,) = [line for line in ledger.account() if "columns" in line]
    assert (
        f"1 row whose other columns have more than 131,072 characters as JSON ({path}, line 1)"
        in warning
    )


def test_known_keys_are_id_title_and_text():
    rows = [
        {"_id": 7, "title": "A  clock", "text": "It ticks.\nIt strikes."},
        {"_id": "b", "text": "x"},
    ]
    first, second = documents_of(pd.DataFrame(rows))
    assert (first.id, second.id) == ("7", "b")
    (section,) = first.sections
    assert (section.title, list(section.lines)) == ("A clock", ["It ticks.", "It strikes."])
    assert second.sections[0].title == ""
    (odd,) = documents_of([{"id": {"a": 1}, "title": [{"de": "Uhr"}], "text": "x", "n": None}])
    assert (odd.id, odd.sections[0].title) == ("0", "")
    assert json.loads(odd.columns) == {
        "id": {"a": 1},
        "title": [{"de": "Uhr"}],
    }  # neither id nor text


def test_columns_of_dicts_are_text_by_all_their_values(tmp_path):
    """A file with the same rows has the same text."""
    rows = {
        "headline": [None, "Zebra crossing opened", "Tunnel closed"],
        "body": ["The mayor came today.", math.nan, "Traffic stopped for hours."],
        "url": ["https://example.org/a", "https://example.org/b", None],
    }
    frame = pd.DataFrame(rows)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    of_file = open_documents_to_search(tmp_path / "a.jsonl").read(Ledger("a"))
    for found in (documents_of(frame), of_file):
        assert [" ".join(each.text().split()) for each in found] == [
            "The mayor came today.",
            "Zebra crossing opened",
            "Tunnel closed Traffic stopped for hours.",
        ]
    (code,) = documents_of([{"code": "ERR-4711", "n": 1}])  # better than nothing
    assert code.text().strip() == "ERR-4711"


def test_texts_without_ids_get_numbers_that_are_not_ids():
    rows = [{"id": "1", "text": "a"}, {"text": "b"}, {"id": None, "text": "c"}, {"text": "d"}]
    rows += ["e", {"id": " 4\t", "text": "f"}, {"id": " ", "text": "g"}, {"id": 7, "text": "h"}]
    ids = [document.id for document in documents_of(iter(rows))]
    assert ids == ["1", "8", "2", "3", "9", "4", "6", "7"]
    ids = [document.id for document in documents_of(["a", {"id": 5, "text": "b"}, "c"], first=5)]
    assert ids == ["8", "5", "7"]


@given(st.lists(plain | st.sampled_from(["", " \n", "nul\0"]), max_size=6))
def test_all_strings_are_documents_or_in_the_ledger(texts):
    ledger = Ledger("given")
    found = list(documents_in_memory(texts).read(ledger))
    assert ledger.texts == len(found)
    assert ledger.texts + sum(entry.count for entry in ledger.left_out.values()) == len(texts)
    for document in found:
        assert document.sections[0].lines == (texts[int(document.id)].strip(),)


@pytest.mark.parametrize("given", ["one string", {"text": ["a"]}, 7, [1], [["a", "b"]]])
def test_other_things_are_refused(given):
    with pytest.raises(DataError, match="Give a list of strings"):
        documents_of(given)


def test_an_id_column_must_exist():
    with pytest.raises(DataError, match=r"the given dicts: no column 'key'\. It has: text, n"):
        documents_of([{"text": "a", "n": 1}], id_column="key")


def test_a_key_without_letters_is_neither_id_nor_title():
    rows = [{"": 7, "sentence": "One text."}, {"": 8, "sentence": "Two texts."}]
    assert [(each.id, each.text()) for each in documents_of(rows)] == [
        ("0", " One text."),
        ("1", " Two texts."),
    ]
