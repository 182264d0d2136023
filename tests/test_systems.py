import numpy as np
import pytest
from test_retrieval import Angles

from diffcse_jax.errors import CheckpointError
from diffcse_jax.evaluation.metrics import (
    HYBRID,
    RetrievalMetric,
    System,
    compare_systems,
    describe_recommendation,
    recommend,
)
from diffcse_jax.evaluation.runner import find_task
from diffcse_jax.io import write_json
from diffcse_jax.search.index import recommended

# The letter gives the direction of a text, and the other words are for BM25.
WORDS = ["one", "two", "six", "ten", "cat", "dog", "sun", "sea", "red", "tea"]
TARGETS = [f"{letter} {word} text" for letter, word in zip("adgjmpsvyb", WORDS, strict=True)]


def system(name, ranks):
    return System(name, "dense", name, 0.0, 100 / np.array(ranks))


def metric_of(queries):
    return RetrievalMetric("lead_retrieval", 64, queries, TARGETS)


def test_each_half_finds_what_it_can():
    by_letter = [f"{text[0]} nothing" for text in TARGETS]
    bm25, dense, hybrid = compare_systems(
        {"angles": Angles()}, RetrievalMetric("lead_retrieval", 64, by_letter, TARGETS)
    )
    assert [each.name for each in (bm25, dense, hybrid)] == ["BM25", "angles", "angles + BM25"]
    assert (bm25.mode, dense.mode, hybrid.mode) == ("lexical", "dense", "hybrid")
    assert dense.score == 100
    assert bm25.reciprocal_ranks == pytest.approx(100 / 5.5)  # no word in common, so all texts tie
    assert hybrid.score == 100
    by_word = [f"k {text.split()[1]}" for text in TARGETS]
    bm25, dense, hybrid = compare_systems({"angles": Angles()}, metric_of(by_word))
    assert bm25.score == 100
    assert dense.score < 50 < hybrid.score


def test_simple_systems_are_recommended_unless_they_are_worse():
    start, adapted = system("start", [2] * 40), system("adapted", [1] * 40)
    assert recommend([start, adapted]) is adapted
    assert describe_recommendation([start, adapted], adapted) == "Recommended for search: adapted."
    hardly = system("hardly", [1] + [2] * 39)
    assert recommend([start, hardly]) is start
    assert "hardly is 1.25 higher, but this may be chance" in describe_recommendation([start, hardly], start)
    assert recommend([adapted, start]) is adapted
    low, high = hardly.interval()
    assert low < hardly.score < high
    assert start.interval(system("same", [2] * 40)) == (0, 0)


def test_search_uses_what_a_run_recommends(tmp_path):
    assert recommended("minilm") == recommended(None) == ("dense", None)
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 0.2})
    assert recommended(str(tmp_path)) == ("hybrid", 0.2)
    write_json(tmp_path / "search.json", {"mode": "hybrid", "weight": 2})
    with pytest.raises(CheckpointError, match=r"search.json: expected a `mode` of dense, lexical, hybrid"):
        recommended(str(tmp_path))


def test_documents_are_compared_without_labels(tmp_path):
    for number, (letter, word) in enumerate(zip("adgjmpsvyb", WORDS, strict=True)):
        (tmp_path / f"{number}.txt").write_text(f"{letter} {word} " * 20)
    scores = find_task(f"documents:{tmp_path}").run(Angles(), tmp_path)
    assert [each["mode"] for each in scores["systems"]] == ["lexical", "dense", "hybrid"]
    assert scores["n"] >= 20
    assert min(scores["mrr"], scores["BM25"], scores[HYBRID]) > 50
