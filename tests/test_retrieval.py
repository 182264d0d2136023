import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.evaluation import retrieval


def test_own_targets_first_is_perfect():
    vectors = np.eye(4, dtype=np.float32)
    assert retrieval.retrieval_scores(vectors, 3 * vectors) == {
        "mrr": 100.0, "recall@1": 100.0, "recall@5": 100.0, "recall@10": 100.0,
    }  # fmt: skip


def test_rank_two_counts_half():
    queries = np.array([[1, 0], [0, 1]], np.float32)
    scores = retrieval.retrieval_scores(queries, queries[::-1].copy())
    assert scores["mrr"] == pytest.approx(50)
    assert scores["recall@1"] == 0
    assert scores["recall@5"] == 100


def test_a_constant_encoder_gains_nothing():
    vectors = np.ones((9, 4), np.float32)
    np.testing.assert_array_equal(retrieval.target_ranks(vectors, vectors), 5.0)


def test_ranks_in_blocks_match_scipy(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 7)
    queries, targets = np.random.default_rng(0).normal(size=(2, 40, 3)).astype(np.float32)
    cosines = np.array([[q @ t / np.linalg.norm(q) / np.linalg.norm(t) for t in targets] for q in queries])
    expected = np.diagonal(scipy.stats.rankdata(-cosines, axis=1))
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets), expected)


@given(
    st.lists(st.lists(st.sampled_from(["a", "bc", "d"]), max_size=12).map(" ".join)),
    st.integers(0, 5),
    st.integers(2, 7),
)
def test_halves_hold_all_words(sentences, limit, fewest_words):
    first, second = retrieval.halves(sentences, limit, fewest_words)
    usable = [sentence for sentence in dict.fromkeys(sentences) if len(sentence.split()) >= fewest_words]
    assert [f"{a} {b}" for a, b in zip(first, second, strict=True)] == usable[:limit]
    assert all(0 <= len(b.split()) - len(a.split()) <= 1 for a, b in zip(first, second, strict=True))


def test_halves_read_no_more_than_needed():
    def endless():
        number = 0
        while True:
            number += 1
            yield f"{number} is a number in a long row"

    assert len(retrieval.halves(endless(), 3, fewest_words=6)[0]) == 3


@given(st.lists(st.tuples(*[st.sampled_from("abcdefghijkl")] * 2)), st.integers(1, 4), st.randoms())
def test_chosen_pairs_know_no_order_and_share_no_text(pairs, limit, random):
    order = {text: rank for rank, text in enumerate(f"{a} {b}" for a in "fedcbalkjihg" for b in "abcdefghijkl")}
    chosen = retrieval.chosen_pairs(pairs, limit, order.__getitem__)
    candidates = sorted(set(pairs), key=lambda pair: order[" ".join(pair)])[: 2 * limit]
    texts = [text for pair in candidates for text in pair]
    assert chosen == [pair for pair in candidates if texts.count(pair[0]) == texts.count(pair[1]) == 1][:limit]
    random.shuffle(pairs)
    assert retrieval.chosen_pairs(iter(pairs), limit, order.__getitem__) == chosen
