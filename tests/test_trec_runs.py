import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_retrieval import letters
from test_search_collections import write_beir

from diffcse_jax.errors import ConfigError, DataError, DiskError
from diffcse_jax.evaluation import EvaluationSettings
from diffcse_jax.evaluation.results import details
from diffcse_jax.evaluation.runner import find_task
from diffcse_jax.evaluation.search_collections import Collection, read_collection
from diffcse_jax.evaluation.trec_runs import (
    check_run_files,
    distinct_names,
    read_ranking,
    run_file,
    write_run,
)

# White space, also that of Unicode, and what percent-encoding uses.
IDS = st.text(st.sampled_from("ab%205\t\n\r #\u00a0\u2028\x1c\ufeff\u4e2d"), min_size=1, max_size=6)


@given(st.sets(IDS, min_size=1), st.sets(IDS, min_size=1), st.data())
def test_any_ids_are_read_back(tmp_path_factory, documents, queries, data):
    scores = st.integers(-9, 9).map(float)
    hits = st.dictionaries(st.sampled_from(sorted(documents)), scores, min_size=1)
    ranking = data.draw(st.dictionaries(st.sampled_from(sorted(queries)), hits, min_size=1))
    collection = Collection(dict.fromkeys(documents, ""), dict.fromkeys(queries, ""), {})
    path = tmp_path_factory.mktemp("run") / "run.trec"
    write_run(path, ranking, "name", collection)
    assert read_ranking(path, collection) == ranking
    assert all(
        len(line.split()) == 6 for line in path.read_text(encoding="utf-8").splitlines() if line
    )


def test_distances_in_place_of_scores_are_noticed(tmp_path, capsys):
    collection = Collection({"d": "", "e": ""}, {"q": ""}, {"q": {"d": 1}})
    (tmp_path / "run").write_text("q Q0 d 1 0.1 it\nq Q0 e 2 0.5 it\n")
    read_ranking(tmp_path / "run", collection)
    message = "warning: 1 query whose scores rise with the ranks: ranked by"
    assert message in capsys.readouterr().err


def test_judged_queries_without_a_hit_are_counted(tmp_path, capsys):
    collection = Collection({"d": ""}, {"q1": "", "q2": ""}, {"q1": {"d": 1}, "q2": {"d": 1}})
    (tmp_path / "run").write_text("q1 Q0 d 1 0.5 it\n")
    read_ranking(tmp_path / "run", collection)
    assert "warning: 1 judged query without a hit: scored 0\n" in capsys.readouterr().err


def test_runs_of_other_programs_are_read_as_they_are(tmp_path, capsys):
    ids = ["a%20b", "a b", "http://x/S%C3%A3o", "d1"]
    collection = Collection(dict.fromkeys(ids, ""), {"q1": "", "q 2": ""}, {})
    (tmp_path / "run").write_text(
        f"\ufeffq1 Q0 a%20b {'1' * 5000} 0.5 it\r\n\n# a comment\nq1\t0\thttp://x/S%C3%A3o  2 -1e-3 it\nother Q0 d1 1 9 it\n"
        "q 2\tQ0\ta b\t1\t7\tits name\nq1 Q0 d9 9 0 it\nq1 Q0 a%20b 9 0.25 it\n",
        encoding="utf-8",
    )
    found = read_ranking(tmp_path / "run", collection)
    assert found == {"q1": {"a%20b": 0.5, "http://x/S%C3%A3o": -0.001, "d9": 0}, "q 2": {"a b": 7}}
    assert capsys.readouterr().err.splitlines()[1:] == [
        "warning: left out 1 hit: 1 of other queries",
        f"warning: 1 hit whose document is not in the corpus ({tmp_path}/run, line 7): kept",
        f"warning: 1 repeated hit ({tmp_path}/run, line 8): the highest score counts",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("q1 Q0 d1 1 0.5", "line 2: expected `query Q0 document rank score name`"),
        ("q1 Q0 French Open 1 0.5 x", "line 2: expected .* If ids contain blanks, use tabs"),
        ("q1 Q0 d1 1 nan x", "line 2: the score 'nan' is not a finite number"),
    ],
)
def test_invalid_runs_are_refused_with_file_and_line(tmp_path, line, problem):
    collection = read_collection(write_beir(tmp_path / "tiny"))
    (tmp_path / "run.trec").write_text(f"q2 Q0 d1 1 0.5 x\n{line}\n")
    with pytest.raises(DataError, match=problem):
        read_ranking(tmp_path / "run.trec", collection)
    (tmp_path / "run.trec").write_text("q2 Q0 d9 1 0.5 x\n")
    with pytest.raises(DataError, match="ranks no document for a query of the collection"):
        read_ranking(tmp_path / "run.trec", collection)


def test_a_task_writes_its_run_and_compares_with_one(tmp_path):
    beir = write_beir(tmp_path / "tiny")
    task = find_task(f"retrieval:{beir}")
    first = task.run(
        letters(), tmp_path, EvaluationSettings(runs=tmp_path / "runs", model="angles")
    )
    assert first["n"] == 2
    path = tmp_path / "runs/angles.tiny.trec"
    assert first.pop("run") == str(path)
    ranking = read_ranking(path, read_collection(beir))
    assert {query: [*found] for query, found in ranking.items()} == {
        "q1": ["d2", "d1", "3"],
        "q2": ["3", "d2", "d1"],
    }
    second = task.run(letters(), tmp_path, EvaluationSettings(against=path))
    found = {
        "model": "it",
        "pooler": "avg",
        "tasks": {task.name: second},
        "not_official": {},
        "missing": {},
    }
    assert "95% interval +0.00 to +0.00, p = 1.0000 (randomisation test)" in details(found)
    assert second.pop("against")["difference"] == 0
    assert second == first
    (beir / "qrels/test.tsv").write_text("q1\td1\t1")
    encoder = letters()
    with pytest.raises(DataError, match="two systems can only be compared by two queries or more"):
        task.run(encoder, tmp_path, EvaluationSettings(against=path))
    assert not encoder.asked  # the search takes long


def test_runs_of_equal_names_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = "STS12,retrieval:a/test,retrieval:b/test/,retrieval:./a/test"
    settings = EvaluationSettings(
        tasks, runs=tmp_path / "runs", compared=("runs/mine", "x/runs/mine", "minilm", ".")
    )
    names = []
    for model in settings.compared:
        for folder in ("a/test", "b/test/"):
            path, name = run_file(EvaluationSettings(**vars(settings) | {"model": model}), folder)
            names.append((path.name, name.rpartition("-")[0]))
    here = tmp_path.name
    models = [f"{here}-runs-mine", "x-runs-mine", "minilm", here]
    assert names == [(f"{model}.{each}-test.trec", model) for model in models for each in "ab"]
    for model, folder, expected in (
        ("minilm", "a/test", "minilm.test"),
        ("org/name", ".", f"org-name.{here}"),
        (f"{tmp_path}/runs/mine", str(tmp_path), f"runs-mine.{here}"),
    ):
        assert (
            run_file(EvaluationSettings(runs=tmp_path, model=model), folder)[0].name
            == f"{expected}.trec"
        )
    with pytest.raises(ConfigError, match="of a-b/c and a/b-c would be written to one file"):
        distinct_names(["a-b/c", "a/b-c"], 2)


def test_another_run_is_not_overwritten(tmp_path):
    folders = [str(write_beir(tmp_path / name / "tiny")) for name in "ab"]
    runs = tmp_path / "runs"

    def settings(folder, model="m", **options):
        return EvaluationSettings(f"retrieval:{folder}", runs=runs, model=model, **options)

    check_run_files(settings(folders[0]))
    for _ in range(2):
        found = find_task(f"retrieval:{folders[0]}").run(letters(), tmp_path, settings(folders[0]))
        check_run_files(settings(folders[0]))
    for other in (
        settings(folders[1]),
        settings(folders[0], truncate_dim=8),
        settings(folders[0], pooler="cls"),
    ):
        with pytest.raises(
            ConfigError,
            match=r"m\.tiny\.trec contains another run, m-.* Remove it, or name another",
        ):
            check_run_files(dataclasses.replace(other, compared=("other", "m")))
    (runs / "m.tiny.trec").unlink()
    (runs / "m.tiny.trec").touch()
    check_run_files(settings(folders[1]))
    assert found["run"] == str(runs / "m.tiny.trec")
    runs = tmp_path / "a/tiny/corpus.jsonl"
    with pytest.raises(
        DiskError, match=r"cannot write .*corpus\.jsonl.* name another folder with --runs"
    ):
        check_run_files(settings(folders[1]))
