"""Which columns of training rows are which, and rows with lists of texts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.data import columns as module
from diffcse_jax.data.columns import REPEATED, common_negatives, expand, training_columns, why_not

PAIRS = ("query", "pos", "neg")


@pytest.mark.parametrize(
    ("available", "names", "unused"),
    [
        (("positive", "sentence"), ("sentence", "positive"), ()),
        (("sent0", "sent1", "hard_neg"), ("sent0", "sent1", "hard_neg"), ()),
        (("anchor", "positive", "negative"), ("anchor", "positive", "negative"), ()),
        (
            ("negative_10", "id", "negative_2", "query", "positive", "negative_1"),
            ("query", "positive", "negative_1", "negative_2", "negative_10"),
            ("id",),
        ),
        (("hard_negative_2", "sentence", "positive"), ("sentence", "positive"), ()),
        (("sentence1", "sentence2"), ("sentence1", "sentence2"), ()),
        (("question", "answer", "source"), ("question", "answer"), ("source",)),
        (("answer", "query"), ("query", "answer"), ()),
        (
            ("question", "answer", "target_lang", "label_text"),
            ("question", "answer"),
            ("target_lang", "label_text"),
        ),
        (("anchor", "positive", "score"), ("anchor", "positive"), ("score",)),
    ],
)
def test_known_names_have_their_parts(available, names, unused):
    found = training_columns(available)
    assert found.names[: len(names)] == names
    assert {*found.names, *found.unused} == {*available}
    assert (found.unused, found.lists, why_not(available)) == (unused, False, "")


@pytest.mark.parametrize(
    ("available", "reason"),
    [
        (("title", "text"), "no known names of a sentence and its positive"),
        (("sentence",), "no known names"),
        (("sentence1", "sentence2", "score"), "score grades the pairs"),
        (("question", "answer", "label"), "label grades the pairs"),
        (("sentence1", "sentence2", "relatedness_score"), "relatedness_score grades the pairs"),
        (("question", "answer", "isCorrect"), "isCorrect grades the pairs"),
        (("sentence1", "sentence2", "Is Duplicate"), "Is Duplicate grades the pairs"),
        (("sentence1", "sentence2", "humanScore"), "humanScore grades the pairs"),
        (("sentence1", "sentence2", "cos_sim"), "cos_sim grades the pairs"),
        (("sentence1", "sentence2", "label 2", "grade_1"), "grade_1, label 2 grades the pairs"),
        (("query", "positive", "answer"), "query, positive and answer are names of several kinds"),
        (("sentence", "positive", "negative_1"), "sentence, positive and negative_1 are names of"),
    ],
)
def test_other_names_have_a_reason(available, reason):
    assert training_columns(available) is None
    assert why_not(available).startswith(reason)


def test_lists_are_recognised():
    found = training_columns(("query", "pos", "neg", "pos_scores", "neg_scores", "prompt"))
    assert (found.names, found.lists) == (PAIRS, True)
    assert found.unused == ("pos_scores", "neg_scores", "prompt")
    assert training_columns(("pos", "query")).hard_negatives == ()


ROW = {"query": "q", "pos": ["a", "b"], "neg": ["1", "2", "3", "4", "5"]}


@pytest.mark.parametrize(
    ("change", "negatives", "rows", "left_out"),
    [
        ({}, 2, [("q", "a", "1", "2"), ("q", "b", "3", "4")], {module.TOO_MANY: 1}),
        ({}, 0, [("q", "a"), ("q", "b")], {module.TOO_MANY: 5}),
        ({"neg": ["1"]}, 2, [("q", "a", "1", "1"), ("q", "b", "1", "1")], {}),
        ({"neg": ["a", "q", "1", "1"]}, 1, [("q", "a", "1"), ("q", "b", "1")], {REPEATED: 3}),
        ({"pos": "a", "neg": ["", None, {}, 7]}, 1, [("q", "a", "7")], {module.NOT_TEXT: 3}),
        ({"pos": []}, 1, [], {module.NO_POSITIVE: 6}),
        ({"query": " "}, 1, [], {module.NOT_TEXT: 1, module.NO_QUERY: 7}),
        ({"neg": None}, 1, [], {module.NO_NEGATIVE: 3}),
        ({"neg": None}, 0, [("q", "a"), ("q", "b")], {}),
        ({"pos": np.array(["a"]), "neg": np.array(["1"])}, 1, [("q", "a", "1")], {}),
        ({"query": ["q", "r"], "neg": []}, 0, [("q", "a"), ("q", "b")], {module.FURTHER: 1}),
    ],
)
def test_a_row_with_lists_becomes_rows_of_one_width(change, negatives, rows, left_out):
    assert expand(ROW | change, training_columns(PAIRS), negatives) == (rows, Counter(left_out))


texts = st.lists(st.sampled_from(["a", "b", "c", "d", "", "q"]), max_size=6)


@given(query=st.sampled_from(["q", ""]), positives=texts, negatives=texts, count=st.integers(0, 3))
def test_each_text_is_in_a_row_or_counted(query, positives, negatives, count):
    row = {"query": query, "pos": positives, "neg": negatives}
    rows, left_out = expand(row, training_columns(PAIRS), count)
    assert {len(row) for row in rows} <= {2 + count}
    used = {text for row in rows for text in row}
    assert len(used) + left_out.total() == 1 + len(positives) + len(negatives)
    for _, positive, *hard in rows:
        assert not {query, positive} & {*hard}


def test_the_number_of_hard_negatives_is_the_median_at_most_seven():
    found = training_columns(PAIRS)
    assert common_negatives([], found) == 0
    assert common_negatives([{"neg": ["a"] * count} for count in (0, 1, 5)], found) == 1
    assert common_negatives([{"neg": ["a"] * 50}], found) == module.MOST_NEGATIVES
