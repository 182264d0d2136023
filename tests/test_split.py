"""Documents are read once and divided; what shares a text stays together."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.config import DataConfig
from diffcse_jax.data.pairs import corpus_of
from diffcse_jax.data.sources import open_split
from diffcse_jax.data.split import REPEATED, SHARED, Split, held_out_together
from diffcse_jax.data.token_store import Corpus
from diffcse_jax.documents.document import Document, Documents, Section, digest
from diffcse_jax.documents.ledger import Ledger

words = st.sampled_from(["Alpha", "beta", "gamma", "delta"])
sentences = st.lists(words, min_size=3, max_size=6).map(
    lambda each: " ".join(each).capitalize() + "."
)
texts = st.lists(sentences, min_size=1, max_size=4)


def documents(contents: list[list[str]], passes: list[int] | None = None) -> Documents:
    def read(ledger: Ledger):
        if passes is not None:
            passes.append(len(contents))
        for number, lines in enumerate(contents):
            ledger.keep()
            yield Document(str(number), (Section("", lines, sentence_a_line=True),))

    return Documents("texts", read, str)


@given(st.lists(texts, min_size=2, max_size=9, unique_by=tuple), st.randoms())
def test_no_text_is_on_both_sides_whatever_the_order(contents, random):
    data = DataConfig(pairs="dropout", held_out=0.4)
    # So many that none is held out beyond the share, which would depend on the others.
    others = [[f"This is number {number}."] for number in range(100)]

    def held_out() -> set[str]:
        every = contents + others
        split = Split(documents(every), data.held_out)
        found = {document.text() for _, document in split.held_out()}
        kept = [text for text in every if not found & {f" {' '.join(text)}", " ".join(["", *text])}]
        kept_out = {sentence for text in every if text not in kept for sentence in text}
        expected = [sentence for text in kept for sentence in text if sentence not in kept_out]
        rows = [row.texts[0] for row in corpus_of(split, data).rows(Ledger("texts"))]
        assert rows == expected
        return found

    before = held_out()
    random.shuffle(contents)
    contents += [*contents[:3], ["Something else entirely."]]
    assert held_out() - {" Something else entirely."} == before


def test_the_source_is_read_once():
    passes: list[int] = []
    contents = [
        [f"This is text {number}.", f"It is the number {number} of sixty."] for number in range(60)
    ]
    split = Split(documents(contents, passes), 0.2)
    corpus = corpus_of(split, DataConfig(pairs="lead", held_out=0.2))
    rows = list(corpus.rows())
    held_out = list(split.held_out())
    assert len(rows) + len(held_out) == 60
    assert {row.document for row in rows}.isdisjoint(number for number, _ in held_out)
    assert list(corpus.first_texts())
    assert passes == [60]


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(200, 0.05, 25), (50, 0.05, 25), (49, 0.05, 0), (49, 0.0, 0), (400, 0.1, 0)],
)
def test_small_sets_hold_out_enough_for_a_verdict_or_what_the_share_says(count, share, expected):
    """Of 49 documents, 25 would be more than half. 0: those in the share."""
    own = [digest(f"document {number}") for number in range(count)]
    in_share = [each < share * 2**64 for each in own]
    chosen, by_share, _ = held_out_together(own, [[]] * count, share)
    assert by_share == sum(in_share)
    assert chosen.sum() == (expected or sum(in_share))
    assert chosen[in_share].all()
    lowest = np.argsort(own)[: chosen.sum()]
    assert chosen[lowest].all()


def test_groups_and_not_documents_are_counted():
    own = [digest(f"document {number}") for number in range(300)]
    keys = [[number // 3] for number in range(300)]
    chosen, by_share, tied = held_out_together(own, keys, 0.05)
    assert tied == 300
    assert by_share < 25 * 3 == chosen.sum()
    np.testing.assert_array_equal(chosen[::3], chosen[1::3])


def test_a_set_that_is_too_small_for_a_verdict_is_said():
    contents = [
        [f"This is text {number}.", f"It is the number {number} of thirty."] for number in range(30)
    ]
    split = Split(documents(contents), 0.2)
    count = len(list(split.held_out()))
    expected = f"would hold out {count} documents, too few for a verdict that says better. Give at least 50 documents"
    assert split.ledger.lines()[-1] == f"data.held_out=0.2 {expected}"


def test_what_is_held_out_beyond_the_share_is_said():
    contents = [
        [f"This is text {number}.", f"It is the number {number} of sixty."] for number in range(60)
    ]
    split = Split(documents(contents), 0.05)
    assert len(list(split.held_out())) == 25
    (said,) = (line for line in split.ledger.lines() if "too few" in line)
    assert re.fullmatch(
        r"data\.held_out=0\.05 would hold out \d documents?, too few for a verdict: 25 are held out \(42% of 60 documents\)",
        said,
    )


def test_documents_that_share_texts_are_not_held_out_to_reach_a_number():
    keys = [[number // 8] if number < 80 else [1000 + number] for number in range(146)]
    own = [digest(f"document {number}") for number in range(146)]
    found = held_out_together(own, keys, 0.1)
    assert found.tied == 80
    assert found.chosen[80:].sum() >= 25 > found.chosen[:80].sum() // 8
    assert "80 of the 146 documents share a text" in found.describe(0.1, "document{s}")


@given(st.lists(st.lists(st.integers(0, 12), max_size=3), max_size=30), st.floats(0, 1))
def test_what_shares_a_key_is_held_out_together(keys, share):
    own = [digest(str(number)) for number in range(len(keys))]
    held_out, *_ = held_out_together(own, keys, share)
    for key in range(13):
        sides = {bool(out) for out, each in zip(held_out, keys, strict=True) if key in each}
        assert len(sides) < 2
    if share == 1:
        assert held_out.all()
    alone = [number for number, each in enumerate(keys) if not each]
    np.testing.assert_array_equal(held_out[alone], [own[i] < share * 2**64 for i in alone])


def test_rows_with_the_same_answer_are_held_out_together(tmp_path):
    rows = [
        {
            "title": f"Question {i} on {i % 40}?",
            "text": f"This is the answer to {i % 40}. It is long.",
        }
        for i in range(400)
    ]
    (tmp_path / "faq.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(str(tmp_path / "faq.jsonl"), pairs="lead", held_out=0.1)
    split = open_split(data)
    held_out = list(split.held_out())
    trained = list(corpus_of(split, data).rows())
    assert 10 <= len(held_out) <= 120
    assert len(held_out) + len(trained) == 400
    answers = {document.sections[0].lines[0] for _, document in held_out}
    assert len(held_out) == 10 * len(answers)


def test_boilerplate_is_left_out_of_both_sides(tmp_path):
    licence = " ".join(f"Licence sentence {i} is the same everywhere." for i in range(10))
    rows = [
        {"title": f"Title {i}", "text": f"This is subject {i}. It has number {i}. {licence}"}
        for i in range(580)
    ]
    twins = [
        {"title": f"Twin {i}", "text": f"These are twins, {i % 20}. Only {i} has this."}
        for i in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows + twins)))
    data = DataConfig(str(tmp_path / "a.jsonl"), pairs="lead", held_out=0.1)
    split = open_split(data)
    corpus: Corpus = corpus_of(split, data)
    ledger = corpus.new_ledger()
    trained = list(corpus.rows(ledger))
    held_out = list(split.held_out())
    assert 30 < len(held_out) < 95
    assert "Licence" not in str(trained) + str(held_out)
    subjects = sum("subject" in " ".join(row.texts) for row in trained)
    assert ledger.left_out[REPEATED].count == 10 * subjects
    assert ledger.left_out[SHARED].count < 20  # texts of twins
