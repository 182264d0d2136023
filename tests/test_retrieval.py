import re

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from test_search_collections import write_beir
from test_sts import TableEncoder

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import Settings, dev, retrieval
from diffcse_jax.evaluation.results import task_title
from diffcse_jax.evaluation.retrieval import compare, measure
from diffcse_jax.evaluation.runner import expand_groups, find_task
from diffcse_jax.evaluation.search_collections import read_collection


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
def test_chosen_queries_depend_on_no_order_and_share_no_text(pairs, limit, random):
    order = {text: rank for rank, text in enumerate(f"{a} {b}" for a in "fedcbalkjihg" for b in "abcdefghijkl")}
    queries = [(*pair, *2 * [order[" ".join(pair)]]) for pair in pairs]  # each in a passage and document of its own
    chosen = dev.choose_queries(queries, limit, order.__getitem__)
    candidates = sorted(set(queries), key=lambda query: query[2])[: 2 * limit]
    texts = [text for query in candidates for text in query[:2]]
    assert chosen == [query for query in candidates if texts.count(query[0]) == texts.count(query[1]) == 1][:limit]
    random.shuffle(queries)
    assert dev.choose_queries(iter(queries), limit, order.__getitem__) == chosen


def test_texts_of_one_passage_do_not_compete():
    queries, targets = np.eye(4, dtype=np.float32)[[0, 0, 1]], np.eye(4, dtype=np.float32)[[1, 0, 0]]
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets), [3, 1.5, 2.5])
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets, [7, 7, 2]), [2, 1.5, 2])
    assert len(dev.choose_queries([("a", "p", 0, 0), ("b", "p", 0, 0), ("c", "q", 1, 0), ("d", "q", 2, 0)], 4)) == 2


def letters() -> TableEncoder:
    """Texts on a circle: the first letter decides on the direction."""
    angles = {letter: number / 20 for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    return TableEncoder(lambda text: [np.cos(angles[text[0]]), np.sin(angles[text[0]])])


def test_tasks_on_own_files(tmp_path):
    pairs = tmp_path / "a/test.tsv"
    pairs.parent.mkdir()
    pairs.write_text("a\tb\nd\tc\nk\tk\n")
    name = f"pairs_retrieval:{pairs}"
    assert expand_groups([name, name], "test") == [name]
    assert [task_title(each) for each in (name, "STS12")] == ["pairs_retrieval a/test", "STS12"]
    scores = find_task(name).run(letters(), tmp_path)
    assert scores == pytest.approx({"mrr": 100, "recall@1": 100, "recall@5": 100, "recall@10": 100, "n": 3})


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("pairs_retrieval:pairs.tsv", "a\tb\n", r"pairs\.tsv: pairs_retrieval needs at least two pairs"),
        ("pairs_retrieval:pairs.tsv", "a\tb\nc\n", r"pairs\.tsv, line 2: expected two tab-separated texts, found 1"),
        ("retrieval:.", "", r"it has no corpus\.jsonl or collection\.tsv"),
    ],
)
def test_invalid_files_are_named(task, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text(content)
    with pytest.raises(DataError, match=message):
        find_task(task).run(letters(), tmp_path)


# Search collections


@pytest.fixture
def beir(tmp_path):
    return write_beir(tmp_path / "tiny")


def test_measures_by_hand(beir):
    judgements = read_collection(beir).judgements
    scores = measure(judgements, {"q1": {"d1": 3.0, "3": 2.0, "d2": 1.0}})  # nothing is found for q2
    ideal = 2 + 1 / np.log2(3)
    assert scores["ndcg@10"] == pytest.approx({"q1": 100 * (1 + 2 / np.log2(4)) / ideal, "q2": 0})
    assert scores["mrr@10"] == {"q1": 100, "q2": 0}
    assert scores["map"] == pytest.approx({"q1": 100 * (1 + 2 / 3) / 2, "q2": 0})
    assert scores["recall@100"] == {"q1": 100, "q2": 0}


def test_a_query_that_is_a_document_does_not_find_itself(tmp_path):
    """As in ArguAna and Quora. A document that is judged relevant has the query's number by chance."""
    texts = {"t0": "a", "t1": "k", "c0": "b", "c1": "l"}
    corpus, queries = ([{"_id": key, "text": texts[key]} for key in keys] for keys in (texts, ("t0", "t1")))
    folder = write_beir(tmp_path / "self", corpus, queries, "t0\tc0\t1\nt1\tc1\t1\n")
    task, runs = find_task(f"retrieval:{folder}"), Settings(runs=tmp_path / "runs", model="m")
    found = task.run(letters(), tmp_path, runs)
    assert (found["ndcg@10"], found["mrr@10"], found["map"]) == (100, 100, 100)
    run = tmp_path / "runs/m.self.trec"
    assert not re.search("(t.) Q0 \\1 ", run.read_text())
    run.write_text(run.read_text() + "t0 Q0 t0 0 9 other\nt1 Q0 t1 0 9 other\n")
    compared = task.run(letters(), tmp_path, Settings(against=run))["against"]
    assert (compared["ndcg@10"], compared["difference"]) == (100, 0)
    (folder / "qrels/test.tsv").write_text("t0\tt0\t1\nt1\tc1\t1\n")
    assert task.run(letters(), tmp_path)["ndcg@10"] == 100


def test_comparisons_by_hand():
    first = np.array([10.0, 20, 30, 40, 50, 60])
    assert compare(first, first) == {"difference": 0, "low": 0, "high": 0, "p": 1}
    p = pytest.approx(2 / 2**6)  # only all signs alike give as large a mean
    assert compare(first, first + 6) == {"difference": 6, "low": 6, "high": 6, "p": p}
    with pytest.raises(DataError, match="two queries or more"):
        compare(first[:1], first[1:2])
