"""The tasks' names and data, and the tables of their results."""

import io
import statistics
import tarfile

import pytest

from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation import results, senteval_data
from diffcse_jax.evaluation.runner import TASKS, expand_groups
from diffcse_jax.evaluation.senteval_data import (
    OFFICIAL_SIZES,
    extract,
    senteval_folder,
    size_problem,
)


def test_groups_expand_once_and_unknown_tasks_are_refused_with_the_nearest_one(tmp_path):
    years = ["STS12", "STS13", "STS14", "STS15", "STS16"]
    assert expand_groups(["STSBenchmark", "sts"], "test") == [
        "STSBenchmark",
        *years,
        "SICKRelatedness",
    ]
    assert expand_groups(["sts"], "dev") == ["STSBenchmark", "SICKRelatedness"]
    folder = tmp_path / "STS/STSBenchmark"
    assert TASKS["STSBenchmark"].missing(tmp_path, "dev") == [folder / "sts-dev.csv"]
    assert TASKS["STSBenchmark"].missing(tmp_path, "test") == [
        folder / "sts-dev.csv",
        folder / "sts-test.csv",
    ]
    with pytest.raises(ConfigError, match="STS14 has no dev split"):
        expand_groups(["STS14"], "dev")
    with pytest.raises(
        ConfigError,
        match=r"unknown task 'STS17'\. Did you mean STS16\? Known .* pairs_retrieval:FILE, retrieval:FOLDER$",
    ):
        expand_groups(["STS17"], "test")


def test_every_task_has_its_official_sizes():
    assert OFFICIAL_SIZES.keys() == TASKS.keys()
    totals = {"STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186}
    assert {name: sum(OFFICIAL_SIZES[name].values()) for name in totals} == totals


@pytest.mark.parametrize(
    ("task", "scores", "mode", "reason"),
    [
        (
            "STSBenchmark",
            {"n": 137, "dev": {"n": 1500}},
            "test",
            "test has 137 instead of 1,379 examples",
        ),
        (
            "STSBenchmark",
            {"n": 1500, "dev": {"n": 1379}},
            "dev",
            "dev has 1,379 instead of 1,500 examples",
        ),
        (
            "STS13",
            {"n": 1, "subsets": {"FNWN": {"n": 1}}},
            "test",
            "FNWN has 1 instead of 189 examples",
        ),
        (
            "CR",
            {"acc": 90.0, "ndev": 3775, "ntest": 3774},
            "test",
            "test has 3,774 instead of 3,775 examples",
        ),
    ],
)
def test_other_sizes_are_described(task, scores, mode, reason):
    assert size_problem(task, scores, mode) == reason


def write_archive(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname, content = tarfile.SYMTYPE, content, b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_the_folder_comes_from_the_argument_the_environment_or_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFCSE_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"there is no folder .*senteval"):
        senteval_folder("")
    (tmp_path / "senteval/SICK").mkdir(parents=True)
    assert senteval_folder("") == senteval_folder(str(tmp_path)) == tmp_path / "senteval"
    (tmp_path / "STS").mkdir()
    assert senteval_folder(str(tmp_path)) == tmp_path

    (tmp_path / "0123456789abcdef").mkdir()
    file = "SentEval/data/downstream/STS/STSBenchmark/sts-dev.csv"
    archive = write_archive(tmp_path / "0123456789abcdef/senteval.tar", {file: b"a row"})
    monkeypatch.delenv("DIFFCSE_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(senteval_data, "hub_file", lambda *_: archive)
    folder = senteval_folder("")
    assert folder.is_relative_to(tmp_path / "cache/diffcse_jax/senteval-0123456789ab")
    assert (folder / "STS/STSBenchmark/sts-dev.csv").read_bytes() == b"a row"
    write_archive(archive, {"README": b"nothing"})
    assert senteval_folder("") == folder  # it is extracted once
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.raises(DataError, match="does not contain a folder STS"):
        senteval_folder("")


@pytest.mark.parametrize(
    "members",
    [
        {"../outside": b"x"},
        {"STS": "/etc"},
        {"STS": "../../.."},
        {"/".join(["a"] * 10_000): b"x"},
        None,
    ],
    ids=["outside", "link", "relative link", "deep", "damaged"],
)
def test_unsafe_and_damaged_archives_are_refused(members, tmp_path):
    archive = write_archive(tmp_path / "senteval.tar", members or {})
    if members is None:
        archive.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cannot extract .*senteval\.tar"):
        extract(archive, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [archive]


def results_of(model, **spearman):
    tasks = {
        name: {"spearman": score, "pearson": score, "n": 10} for name, score in spearman.items()
    }
    found = {"model": model, "pooler": "avg", "truncate_dim": None, "tasks": tasks}
    return found | {"averages": {"sts": None, "transfer": None}}


def test_a_table_has_a_row_a_model_and_a_column_a_task():
    models = [results_of("a", STS12=70.123, STSBenchmark=80), results_of("long_name", STS12=9.5)]
    assert r"\textasciitilde{}/m\#1 & - \\" in results.table(
        ["MR"], [results.TableRow("~/m#1", {})], "latex"
    )
    text, markdown, latex = (
        results.compare(models, with_published=False, style=style).splitlines()
        for style in ("text", "markdown", "latex")
    )
    assert text == [
        "model      pooler  STS12  STS-B",
        "a             avg  70.12  80.00",
        "long_name     avg   9.50      -",
    ]
    assert markdown == [
        "| model     | pooler | STS12 | STS-B |",
        "| --------- | -----: | ----: | ----: |",
        "| a         |    avg | 70.12 | 80.00 |",
        "| long_name |    avg |  9.50 |     - |",
    ]
    narrow = results.table(["n"], [results.TableRow("a|b", {"n": "3"})], "markdown")
    assert narrow.splitlines() == ["| model |  n |", "| ----- | -: |", r"| a\|b  |  3 |"]
    rows = [r"model & pooler & STS12 & STS-B \\", r"\midrule", r"a & avg & 70.12 & 80.00 \\"]
    rows.append(r"long\_name & avg & 9.50 & - \\")
    assert latex == [r"\begin{tabular}{lrrr}", r"\toprule", *rows, r"\bottomrule", r"\end{tabular}"]


def test_groups_have_tables_of_their_own_with_averages():
    model = results_of("a", STSBenchmark=80) | {
        "averages": {"sts": 80.0, "transfer": 70.0},
        "truncate_dim": 64,
    }
    model["tasks"] |= {
        "CR": {"acc": 85.0, "devacc": 86.0},
        "pairs_retrieval:a/b.tsv": {"mrr": 40.0},
    }
    model["tasks"] |= {"geometry": {"alignment": 0.12345, "uniformity": -2.0}}
    text = results.compare([model], with_published=False, style="text")
    tables = [table.splitlines() for table in text.split("\n\n")]
    last = "model pooler pairs_retrieval a/b alignment uniformity"
    heads = ["model pooler STS-B average", "model pooler CR average", last]
    assert [" ".join(head.split()) for head, _ in tables] == heads
    rows = [row.removeprefix("a, 64 dimensions").split() for _, row in tables]
    scores = [["80.00", "80.00"], ["85.00", "70.00"], ["40.00", "0.123", "-2.000"]]
    assert rows == [["avg", *each] for each in scores]


def test_published_averages_are_means_of_their_row():
    for scores in results.PUBLISHED.values():
        for group, names in results.GROUPS.items():
            if f"average {group}" in scores:
                mean = statistics.mean(scores[name] for name in names)
                assert scores[f"average {group}"] == pytest.approx(mean, abs=0.011)
