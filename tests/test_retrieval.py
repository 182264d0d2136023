import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from scipy import spatial
from test_search_collections import write_beir
from test_sts import TableEncoder

from diffcse_jax.documents.sentences import canonical
from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import EvaluationSettings, retrieval
from diffcse_jax.evaluation.answers import answers_of, groups_of
from diffcse_jax.evaluation.queries import choose_queries
from diffcse_jax.evaluation.results import task_title
from diffcse_jax.evaluation.retrieval import compare, measure, retrieval_scores
from diffcse_jax.evaluation.runner import expand_groups, find_task
from diffcse_jax.evaluation.search_collections import read_collection
from diffcse_jax.evaluation.trec_runs import read_ranking
from diffcse_jax.options import names_in


def test_scores_of_known_ranks():
    vectors = np.eye(4, dtype=np.float32)
    perfect = {"mrr": 100.0, "recall@1": 100.0, "recall@5": 100.0, "recall@10": 100.0}
    assert retrieval.retrieval_scores(vectors, 3 * vectors) == perfect
    # own targets are second
    scores = retrieval.retrieval_scores(vectors[:2], vectors[1::-1].copy())
    assert scores == pytest.approx(perfect | {"mrr": 50, "recall@1": 0})
    np.testing.assert_array_equal(
        retrieval.target_ranks(np.ones_like(vectors), np.ones_like(vectors)), 2.5
    )


def test_ranks_in_blocks_match_scipy(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 7)
    queries, targets = np.random.default_rng(0).normal(size=(2, 40, 3)).astype(np.float32)
    cosines = np.array(
        [[q @ t / np.linalg.norm(q) / np.linalg.norm(t) for t in targets] for q in queries]
    )
    expected = np.diagonal(scipy.stats.rankdata(-cosines, axis=1))
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets), expected)


@given(st.lists(st.tuples(*[st.sampled_from("abcdefghijkl")] * 2)), st.integers(1, 4), st.randoms())
def test_chosen_queries_depend_on_no_order_and_share_no_text(pairs, limit, random):
    order = {
        text: rank
        for rank, text in enumerate(f"{a} {b}" for a in "fedcbalkjihg" for b in "abcdefghijkl")
    }
    # each in a passage and document of its own
    queries = [(*pair, *2 * [order[" ".join(pair)]]) for pair in pairs]
    chosen = choose_queries(queries, limit, order.__getitem__)
    candidates = sorted(set(queries), key=lambda query: query[2])[: 2 * limit]
    texts = [text for query in candidates for text in query[:2]]
    assert (
        chosen
        == [query for query in candidates if texts.count(query[0]) == texts.count(query[1]) == 1][
            :limit
        ]
    )
    random.shuffle(queries)
    assert choose_queries(iter(queries), limit, order.__getitem__) == chosen


def test_texts_of_one_passage_do_not_compete():
    queries, targets = (
        np.eye(4, dtype=np.float32)[[0, 0, 1]],
        np.eye(4, dtype=np.float32)[[1, 0, 0]],
    )
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets), [3, 1.5, 2.5])
    answers = answers_of("abc", "def", [7, 7, 2])
    np.testing.assert_array_equal(retrieval.target_ranks(queries, targets, answers), [2, 1.5, 2])
    assert (
        len(
            choose_queries(
                [("a", "p", 0, 0), ("b", "p", 0, 0), ("c", "q", 1, 0), ("d", "q", 2, 0)], 4
            )
        )
        == 2
    )


# Letters that `canonical` maps to one another, wrapped and encoded in different ways.
WRITTEN = {
    "a": ["a", " A\n", "\uff21"],
    "b": ["b", "B"],
    "c": ["c"],
    "d e": ["d e", "D\te "],
    "f": ["f"],
}
TEXTS = st.sampled_from(sorted(WRITTEN)).flatmap(lambda text: st.sampled_from(WRITTEN[text]))


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=12), st.integers(1, 5))
def test_a_query_ranks_its_target_among_all_texts_that_are_wrong(pairs, block):
    vectors = dict(
        zip(WRITTEN, np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32), strict=True)
    )
    queries, targets = zip(*pairs, strict=True)
    asked, texts = ([canonical(text) for text in side] for side in (queries, targets))
    expected = []
    for own_query, own in zip(asked, texts, strict=True):
        right = {target for query, target in zip(asked, texts, strict=True) if query == own_query}
        others = {*texts} - right - {own_query}
        cosine = {
            each: 1 - spatial.distance.cosine(vectors[own_query], vectors[each])
            for each in {own, *others}
        }
        expected.append(1 + sum(cosine[each] > cosine[own] for each in others))
    embeddings = (np.stack([vectors[text] for text in side]) for side in (asked, texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "BLOCK", block)
        ranks = retrieval.target_ranks(*embeddings, answers_of(queries, targets))
    np.testing.assert_array_equal(ranks, expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcdef")), min_size=1))
def test_groups_are_what_rows_connect(rows):
    groups = groups_of(*zip(*rows, strict=True)).tolist()
    assert [*dict.fromkeys(groups)] == [*range(max(groups) + 1)]  # in the order of their first rows
    reached = {row: {row} for row in rows}
    for _ in rows:
        reached = {
            row: {end for near in found for end in rows if {*near} & {*end}}
            for row, found in reached.items()
        }
    for row, group in zip(rows, groups, strict=True):
        assert reached[row] == {
            other for other, its in zip(rows, groups, strict=True) if its == group
        }


def letters() -> TableEncoder:
    """Texts on a circle: the first letter decides on the direction."""
    angles = {letter: number / 20 for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}

    def vector_of(text) -> list[float]:
        angle = angles[text[0].lower()]
        return [np.cos(angle), np.sin(angle)]

    return TableEncoder(vector_of)


QUESTIONS = [f"{letter}{number}" for letter in "ajs" for number in range(4)]


def test_questions_that_share_an_answer_all_find_it(tmp_path):
    """And questions with two answers find each of them, apart from case and blanks."""
    rows = [(question, f"{question[0]}nswer in {question[0]} few words.") for question in QUESTIONS]
    rows += [("A0", "bn other answer"), ("S1", "SNSWER  in s few words."), ("k", "k")]
    (tmp_path / "faq.tsv").write_text(
        "".join(f"{question}\t{answer}\n" for question, answer in rows)
    )
    scores = find_task(f"pairs_retrieval:{tmp_path}/faq.tsv").run(letters(), tmp_path)
    assert scores == pytest.approx(
        {"mrr": 100, "recall@1": 100, "recall@5": 100, "recall@10": 100, "n": 15}
    )


def test_tasks_on_own_files(tmp_path):
    pairs = tmp_path / "a/test.tsv"
    pairs.parent.mkdir()
    pairs.write_text("a\tb\nd\tc\nk\tk\n")
    name = f"pairs_retrieval:{pairs}"
    assert expand_groups([name, name], "test") == [name]
    assert [task_title(each) for each in (name, "STS12")] == ["pairs_retrieval a/test", "STS12"]
    assert task_title("retrieval:a/faq-v1.1 + BM25") == "retrieval a/faq-v1.1 + BM25"
    assert task_title("documents:.") == f"documents {Path.cwd().name}"
    assert expand_groups(names_in(f"STS12, {name}"), "test") == ["STS12", name]
    scores = find_task(name).run(letters(), tmp_path)
    assert scores == pytest.approx(
        {"mrr": 100, "recall@1": 100, "recall@5": 100, "recall@10": 100, "n": 3}
    )


TABBED = b'\xef\xbb\xbfq \t a\r\n\r\n "q2\tb"\r\nno tab\r\na\tb\tc\r\n\tb\r\nr\xe9\tz'
ODD = r"left out 3 lines: 3 without two tab-separated texts \(.*pairs\.tsv, lines 4, 5, 6\)"
CSV = 'question,answer\nq,a\n"""q2","b"""\nq3\nr\ufffd,z\n'
JSON = '{"x": "q", "y": "a"}\n{"x": "\\"q2", "y": "b\\""}\n{}\n{"x": "r\ufffd", "y": "z"}\n'


@pytest.mark.parametrize(
    ("name", "content", "odd"),
    [
        ("tsv", TABBED, ODD),
        (
            "csv",
            CSV.encode(),
            r"left out 1 row: 1 with a wrong number of fields \(.*pairs\.csv, line 4\)",
        ),
        (
            "jsonl",
            JSON.encode(),
            r"left out 1 row: 1 without the column \(.*pairs\.jsonl, line 3\)",
        ),
    ],
)
def test_odd_lines_of_pairs_are_counted(name, content, odd, tmp_path, capsys):
    path = tmp_path / f"pairs.{name}"
    path.write_bytes(content)
    pairs = retrieval.read_retrieval_pairs(str(path))
    assert re.search(f"^warning: {odd}$", capsys.readouterr().err, re.MULTILINE)
    assert pairs == [("q", "a"), ('"q2', 'b"'), ("ré" if name == "tsv" else "r\ufffd", "z")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"answer": "b", "question": "a"}\n{"answer": "d", "question": "c"}\n'),
        ("a.csv", "positive,anchor\nb,a\nd,c\n"),
        ("a.csv", "anchor,positive\na,b\nc,d\n"),
        ("a.csv", "ask,find\na,b\nc,d\n"),
        ("a.tsv", "question\tanswer\na\tb\nc\td\n"),
        ("a.tsv", "Answer\tQuestion\nb\ta\nd\tc\n"),
        ("a.tsv", "id\tquestion\tanswer\tnote\n1\ta\tb\tx\n2\tc\td\t\n"),
        ("a.jsonl", '{"query": "a", "pos": ["b"]}\n{"query": "c", "pos": ["d"]}\n'),
        ("a.jsonl", '{"query": "a", "positive": ["b"]}\n{"query": "c", "positive": ["d"]}\n'),
    ],
)
def test_names_say_which_text_of_a_pair_is_the_query(name, content, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(content)
    assert retrieval.read_retrieval_pairs(str(path)) == [("a", "b"), ("c", "d")]
    # These may be the first pair of a file without a header.
    assert ("read the columns ask and find" in capsys.readouterr().err) == ("ask" in content)


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        (
            "pairs_retrieval:pairs.tsv",
            "a\tb\n",
            r"pairs\.tsv: pairs_retrieval needs at least two pairs",
        ),
        (
            "pairs_retrieval:pairs.tsv",
            "a\tb\nc\n",
            r"at least two .* 1 without two .* \(.*, line 2\)",
        ),
        (
            "pairs_retrieval:pairs.tsv",
            "a\tb\nc\tB \n",
            "at least two pairs with different second texts",
        ),
        ("retrieval:.", "", r"it has no corpus\.jsonl or collection\.tsv"),
    ],
)
def test_invalid_files_are_named(task, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text(content)
    with pytest.raises(DataError, match=message):
        find_task(task).run(letters(), tmp_path)


@pytest.mark.parametrize(("queries", "targets"), [(0, 0), (5, 3)])
def test_embeddings_that_cannot_be_ranked_are_refused(queries, targets):
    vectors = np.ones((5, 3), np.float32)
    with pytest.raises(DataError, match="give one for each"):  # types at run time would come first
        inspect.unwrap(retrieval_scores)(vectors[:queries], vectors[:targets])
    with pytest.raises(DataError, match="NaN or infinite"):
        retrieval_scores(vectors * np.nan, vectors)


# Search collections


@pytest.fixture
def beir(tmp_path):
    return write_beir(tmp_path / "tiny")


def test_measures_by_hand(beir):
    judgements = read_collection(beir).judgements
    # nothing is found for q2
    scores = measure(judgements, {"q1": {"d1": 3.0, "3": 2.0, "d2": 1.0}})
    ideal = 2 + 1 / np.log2(3)
    assert scores["ndcg@10"] == pytest.approx({"q1": 100 * (1 + 2 / np.log2(4)) / ideal, "q2": 0})
    assert scores["mrr@10"] == {"q1": 100, "q2": 0}
    assert scores["map"] == pytest.approx({"q1": 100 * (1 + 2 / 3) / 2, "q2": 0})
    assert scores["recall@100"] == {"q1": 100, "q2": 0}


def measured(folder, judgements, ranking) -> dict[str, dict[str, float]]:
    """Write judgements and a run in TREC's form, read both, and return measures by query, from 0 to 1."""
    folder.mkdir()
    documents = {line.split()[2] for line in [*judgements, *ranking]}
    (folder / "collection.tsv").write_text("".join(f"{each}\ttext\n" for each in documents))
    queries = dict.fromkeys(line.split()[0] for line in judgements)
    (folder / "topics.tsv").write_text("".join(f"{each}\ttext\n" for each in queries))
    (folder / "qrels.txt").write_text("\n".join(judgements))
    (folder / "run").write_text("\n".join(f"{line} name" for line in ranking))
    collection = read_collection(folder)
    found = measure(collection.judgements, read_ranking(folder / "run", collection))
    return {
        query: {name: scores[query] / 100 for name, scores in found.items()} for query in queries
    }


def test_measures_are_those_of_trec_eval_and_its_bindings(tmp_path, capsys):
    """The inputs and outcomes of their own documentation and tests, which are of trec_eval itself."""
    # README of pytrec_eval.
    judgements = ["q1 0 d1 0", "q1 0 d2 1", "q1 0 d3 0", "q2 0 d2 1", "q2 0 d3 1"]
    first = ["q1 Q0 d1 0 1.0", "q1 Q0 d2 0 0.0", "q1 Q0 d3 0 1.5"]
    found = measured(
        tmp_path / "a", judgements, [*first, "q2 Q0 d1 0 1.5", "q2 Q0 d2 0 0.2", "q2 Q0 d3 0 0.5"]
    )
    expected = {"ndcg@10": 0.5, "map": 0.3333333333333333, "mrr@10": 1 / 3, "recall@100": 1}
    assert found["q1"] == pytest.approx(expected)
    expected = {
        "ndcg@10": 0.6934264036172708,
        "map": 0.5833333333333333,
        "mrr@10": 1 / 2,
        "recall@100": 1,
    }
    assert found["q2"] == pytest.approx(expected)
    # Its tests: a query without hits.
    first = ["q1 Q0 d1 0 4.0", "q1 Q0 d2 0 2.0", "q1 Q0 d3 0 1.5"]
    found = measured(tmp_path / "b", judgements, first)
    assert "warning: 1 judged query without a hit: scored 0" in capsys.readouterr().err
    assert found["q1"]["ndcg@10"] == pytest.approx(0.6309297535714575)
    assert {*found["q2"].values()} == {0}
    # ir-measures, tests/test_pytrec_eval.py: grades, negative ones too. Scores decide, not the
    # ranks in the file.
    judgements = ["0 0 D0 1", "0 0 D1 -1", "0 0 D2 0", "0 0 D3 2", "0 0 D4 0"]
    judgements += ["1 0 D0 1", "1 0 D3 2", "1 0 D4 -1", "1 0 D5 0"]
    ranking = ["0 0 D0 1 0.8", "0 0 D2 2 0.7", "0 0 D1 3 0.3", "0 0 D3 4 0.4", "0 0 D4 5 0.1"]
    ranking += ["1 0 D1 1 0.8", "1 0 D4 2 0.7", "1 0 D3 3 0.3", "1 0 D2 4 0.4"]
    found = measured(tmp_path / "c", judgements, ranking)
    assert [found[query]["ndcg@10"] for query in "01"] == pytest.approx(
        [0.76018, 0.32739], abs=1e-5
    )
    # form_res_rels.c of trec_eval: of equal scores, the last id comes first. Ours is the rank 3 of
    # 3.
    found = measured(
        tmp_path / "d", ["q 0 a 1", "q 0 c 0"], ["q 0 b 1 0.5", "q 0 a 2 0.5", "q 0 c 3 0.5"]
    )
    assert found["q"] == pytest.approx(
        {"ndcg@10": 0.5, "map": 1 / 3, "mrr@10": 1 / 3, "recall@100": 1}
    )


def test_a_query_that_is_a_document_does_not_find_itself(tmp_path):
    """As in ArguAna and Quora. A document that is judged relevant has the query's number by chance."""
    texts = {"t0": "a", "t1": "k", "c0": "b", "c1": "l"}
    corpus, queries = (
        [{"_id": key, "text": texts[key]} for key in keys] for keys in (texts, ("t0", "t1"))
    )
    folder = write_beir(tmp_path / "self", corpus, queries, "t0\tc0\t1\nt1\tc1\t1\n")
    task, runs = (
        find_task(f"retrieval:{folder}"),
        EvaluationSettings(runs=tmp_path / "runs", model="m"),
    )
    found = task.run(letters(), tmp_path, runs)
    assert (found["ndcg@10"], found["mrr@10"], found["map"]) == (100, 100, 100)
    run = tmp_path / "runs/m.self.trec"
    assert not re.search("(t.) Q0 \\1 ", run.read_text())
    run.write_text(run.read_text() + "t0 Q0 t0 0 9 other\nt1 Q0 t1 0 9 other\n")
    compared = task.run(letters(), tmp_path, EvaluationSettings(against=run))["against"]
    assert (compared["ndcg@10"], compared["difference"]) == (100, 0)
    (folder / "qrels/test.tsv").write_text("t0\tt0\t1\nt1\tc1\t1\n")
    assert task.run(letters(), tmp_path)["ndcg@10"] == 100


def test_comparisons_by_hand():
    first = np.array([10.0, 20, 30, 40, 50, 60])
    for same in (first, np.mean([first] * 3, axis=0) + 1e-14):  # which may be rounded
        assert compare(first, same) == {"difference": 0, "low": 0, "high": 0, "p": 1}
    p = pytest.approx(2 / 2**6)  # only all signs alike give as large a mean
    assert compare(first, first + 6) == {"difference": 6, "low": 6, "high": 6, "p": p}
    with pytest.raises(DataError, match="two queries or more"):
        compare(first[:1], first[1:2])
