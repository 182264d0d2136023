import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import dev, retrieval
from diffcse_jax.evaluation.results import task_title
from diffcse_jax.evaluation.runner import expand_groups, find_task
from diffcse_jax.models.sentence_folder import NO_PROMPTS


def test_scores_of_known_ranks():
    vectors = np.eye(4, dtype=np.float32)
    perfect = {"mrr": 100.0, "recall@1": 100.0, "recall@5": 100.0, "recall@10": 100.0}
    assert retrieval.retrieval_scores(vectors, 3 * vectors) == perfect
    scores = retrieval.retrieval_scores(vectors[:2], vectors[1::-1].copy())  # own targets are second
    assert scores == pytest.approx(perfect | {"mrr": 50, "recall@1": 0})
    np.testing.assert_array_equal(retrieval.target_ranks(np.ones_like(vectors), np.ones_like(vectors)), 2.5)


def test_ranks_in_blocks_match_scipy(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 7)
    queries, targets = np.random.default_rng(0).normal(size=(2, 40, 3)).astype(np.float32)
    cosines = np.array([[q @ t / np.linalg.norm(q) / np.linalg.norm(t) for t in targets] for q in queries])
    expected = np.diagonal(scipy.stats.rankdata(-cosines, axis=1))
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets), expected)


@given(st.lists(st.tuples(*[st.sampled_from("abcdefghijkl")] * 2)), st.integers(1, 4), st.randoms())
def test_chosen_pairs_depend_on_no_order_and_share_no_text(pairs, limit, random):
    order = {text: rank for rank, text in enumerate(f"{a} {b}" for a in "fedcbalkjihg" for b in "abcdefghijkl")}
    chosen = dev.choose_pairs(pairs, limit, order.__getitem__)
    candidates = sorted(set(pairs), key=lambda pair: order[" ".join(pair)])[: 2 * limit]
    texts = [text for pair in candidates for text in pair]
    assert chosen == [pair for pair in candidates if texts.count(pair[0]) == texts.count(pair[1]) == 1][:limit]
    random.shuffle(pairs)
    assert dev.choose_pairs(iter(pairs), limit, order.__getitem__) == chosen


def test_texts_of_one_passage_do_not_compete():
    queries, targets = np.eye(4, dtype=np.float32)[[0, 0, 1]], np.eye(4, dtype=np.float32)[[1, 0, 0]]
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets), [3, 1.5, 2.5])
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets, [7, 7, 2]), [2, 1.5, 2])
    assert len(dev.choose_pairs([("a", "p", 0), ("b", "p", 0), ("c", "q", 1), ("d", "q", 2)], 4, hash)) == 2


class Angles:
    """Words on a circle: the first letter decides on the direction."""

    pooler, truncate_dim, prompts = "avg", None, NO_PROMPTS

    def encode(self, sentences, batch_size=64, *, prompt=None):
        angles = np.array([ord(sentence[0]) - ord("a") for sentence in sentences], np.float32) / 20
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_tasks_on_own_files(tmp_path):
    pairs = tmp_path / "a/test.tsv"
    pairs.parent.mkdir()
    pairs.write_text("a\tb\nd\tc\nk\tk\n")
    name = f"pairs_retrieval:{pairs}"
    assert expand_groups([name, name], "test") == [name]
    assert [task_title(each) for each in (name, "STS12")] == ["pairs_retrieval a/test", "STS12"]
    scores = find_task(name).run(Angles(), tmp_path)
    assert scores == pytest.approx({"mrr": 100, "recall@1": 100, "recall@5": 100, "recall@10": 100, "n": 3})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\n", r"pairs\.tsv: pairs_retrieval needs at least two pairs"),
        ("a\tb\nc\n", r"pairs\.tsv, line 2: expected two tab-separated texts, found 1"),
    ],
)
def test_invalid_files_are_named(content, message, tmp_path):
    (tmp_path / "pairs.tsv").write_text(content)
    with pytest.raises(DataError, match=message):
        find_task(f"pairs_retrieval:{tmp_path}/pairs.tsv").run(Angles(), tmp_path)
