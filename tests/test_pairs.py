"""The rows that are made of documents, and what each of them is."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from diffcse_jax.config import DataConfig
from diffcse_jax.data.sampling import examples_of
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.data.token_store import Corpus, Kind, Row, build_or_open
from diffcse_jax.documents.document import digest
from diffcse_jax.documents.ledger import Ledger


def opened(train_file: Path, pairs: str, **options) -> Corpus:
    return open_corpus(DataConfig(train_file=str(train_file), pairs=pairs, **options))


def texts_of(corpus: Corpus, ledger: Ledger | None = None) -> list[tuple[str, ...]]:
    return [row.texts for row in corpus.rows(ledger)]


def test_a_text_that_begins_with_its_title_stays_a_pair(tmp_path, minilm_dir):
    """Such texts are usual in encyclopaedias and glossaries. They were taken for passages once."""
    etna = "Mount Etna is an active stratovolcano on the east coast of Sicily, Italy, " * 4
    rows = [
        {"title": "Mount Etna", "text": f"{etna.strip()}."},
        {"title": "", "text": "One two three four five six seven eight nine ten"},
        {"title": "Stromboli", "text": "Stromboli is an island. It lies north of Sicily."},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(str(tmp_path / "a.jsonl"), pairs="lead", cloze=1.0, max_length=16)
    corpus = open_corpus(data)
    found = list(corpus.rows())
    kinds = {row.texts[0].split()[0]: row.kind for row in found}
    assert kinds["One"] == Kind.PASSAGE
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    store = build_or_open(corpus, tokenizer, 16, tmp_path / "cache")
    np.testing.assert_array_equal(store.kinds, [row.kind for row in found])
    np.testing.assert_array_equal(store.documents, [row.document for row in found])
    examples = examples_of(store, data, tokenizer, next_sentence=False)
    order = examples.order(np.random.default_rng(0))
    token_ids, lengths = examples.gather(order, 16, 0)
    decoded = {}
    for ids, (first, second) in zip(token_ids, lengths, strict=True):
        query, text = tokenizer.decode(ids[0, :first]), tokenizer.decode(ids[1, :second])
        decoded[query] = text
    pair = next(text for query, text in decoded.items() if query == "[CLS] mount etna [SEP]")
    assert pair.startswith("[CLS] mount etna is an active")


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ("lead", "in sections too short for a pair"),
        ("dropout", "in sections with a title alone"),
        ("crops", "in sections with a title alone"),
    ],
)
def test_titles_without_text_do_not_train_and_are_counted(tmp_path, pairs, reason):
    """They have no text in common, so they are not held out together."""
    rows = [{"title": f"Title {i}", "text": ""} for i in range(300)]
    text = f"It is a mountain. {'It is the highest one of the island. ' * 4}"
    rows.append({"title": "Mount Etna", "text": text})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = opened(tmp_path / "a.jsonl", pairs, held_out=0.1)
    ledger = corpus.new_ledger()
    found = texts_of(corpus, ledger)
    assert found
    assert all(text and "Title" not in text for texts in found for text in texts)
    made = ledger.made
    assert made["document{s}"] == 301
    assert 15 < made["of them held out"] < 50
    assert ledger.left_out[reason].count == 300 - made["of them held out"]
    assert not ledger.has_losses


def test_every_document_of_ten_words_gives_a_row(tmp_path):
    ten = "one two three four five six seven eight nine ten"
    nine = "one two three four five six seven eight nine"
    long = " ".join(f"{number} is a word" for number in range(200))
    last = "This is a first sentence. That is its second sentence."
    (tmp_path / "a.txt").write_text(f"{ten}\n{nine}\n{long}\n{last}")
    corpus = opened(tmp_path / "a.txt", "lead", cloze=1.0, max_length=64)
    ledger = corpus.new_ledger()
    first, *passages, pair = corpus.rows(ledger)
    assert (first.texts, first.kind) == ((ten, ten), Kind.PASSAGE)
    assert pair.texts == ("This is a first sentence.", "That is its second sentence.")
    assert pair.kind == Kind.TEXTS
    assert all(row.kind == Kind.PASSAGE and len(row.texts[0]) <= 4 * 64 for row in passages)
    assert " ".join(row.texts[1] for row in passages) == long
    assert ledger.left_out["in sections too short for a pair"].count == 1
    assert texts_of(opened(tmp_path / "a.txt", "lead")) == [pair.texts]


def test_every_second_title_is_not_a_lead(tmp_path):
    rows = [
        {"title": f"Title {i}", "text": f"Subject {i} is told here. More of it is told there."}
        for i in range(200)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = texts_of(opened(tmp_path / "a.jsonl", "lead"))
    titled = [lead.startswith("Title") for lead, _ in found]
    assert 70 < sum(titled) < 130  # of 200, with a standard deviation of 7
    for row, (lead, rest), has_title in zip(rows, found, titled, strict=True):
        assert f"{lead} {rest}" == (f"{row['title']} {row['text']}" if has_title else row["text"])


@pytest.mark.parametrize(("pairs", "follows"), [("dropout", [0, 1, 1, 0]), ("passages", [0, 0])])
def test_rows_know_their_document_and_whether_they_follow(tmp_path, pairs, follows):
    text = (
        "This is one sentence. This is another sentence. Here is the third.\n\nA second document."
    )
    (tmp_path / "a.txt").write_text(text)
    rows = list(opened(tmp_path / "a.txt", pairs).rows())
    assert [row.follows for row in rows] == [bool(each) for each in follows]
    assert [row.document for row in rows] == [0] * (len(rows) - 1) + [1]
    assert [row.place.row for row in rows] == [1] * (len(rows) - 1) + [3]


def test_a_text_that_is_left_out_divides_what_follows(tmp_path):
    share = 0.5
    numbers = (
        number for number in range(100) if digest(f"Shared sentence {number}.") < share * 2**64
    )
    shared = f"Shared sentence {next(numbers)}."
    starts = (f"First sentence {number}." for number in range(100))
    first = next(
        each for each in starts if digest(f"{each} {shared} The last one.") > share * 2**64
    )
    (tmp_path / "a.txt").write_text(f"{first}\n{shared}\nThe last one.\n\n{shared}\n")
    whole = list(opened(tmp_path / "a.txt", "dropout").rows())
    assert [row.follows for row in whole] == [False, True, True, False]
    rows: list[Row] = list(opened(tmp_path / "a.txt", "dropout", held_out=share).rows())
    assert [row.texts for row in rows] == [(first,), ("The last one.",)]
    assert [row.follows for row in rows] == [False, False]
