import statistics

import pytest

from diffcse_jax.evaluation import results
from diffcse_jax.evaluation.results import GROUPS


def results_of(model, **spearman):
    return {
        "model": model,
        "pooler": "avg",
        "truncate_dim": None,
        "tasks": {name: {"spearman": score, "pearson": score, "n": 10} for name, score in spearman.items()},
        "averages": {"sts": None, "transfer": None},
    }


def text_table(models, style="text", *, with_published=False):
    return results.compare(models, with_published=with_published, style=style)


def test_a_table_has_a_row_a_model_and_a_column_a_task():
    models = [results_of("a", STS12=70.123, STSBenchmark=80), results_of("long_name", STS12=9.5)]
    tables = {style: text_table(models, style).splitlines() for style in ("text", "markdown", "latex")}
    assert tables["text"] == ["model      STS12  STS-B", "a          70.12  80.00", "long_name   9.50      -"]
    rule, last = "| --------- | ----: | ----: |", "| long_name |  9.50 |     - |"
    assert tables["markdown"] == ["| model     | STS12 | STS-B |", rule, "| a         | 70.12 | 80.00 |", last]
    rows = [r"model & STS12 & STS-B \\", r"\midrule", r"a & 70.12 & 80.00 \\", r"long\_name & 9.50 & - \\"]
    assert tables["latex"] == [r"\begin{tabular}{lrr}", r"\toprule", *rows, r"\bottomrule", r"\end{tabular}"]


def test_details_say_how_scores_were_measured():
    model = results_of("a", STS12=70.0) | {"not_official": {}, "missing": {}}
    model |= {"backend": "torch", "mode": "test", "aggregation": "all", "post": "dcl:a.txt"}
    assert results.details(model).splitlines()[0] == "a, pooler avg, backend torch, post dcl:a.txt"


def test_groups_have_tables_of_their_own_with_averages():
    model = results_of("a", STSBenchmark=80) | {"averages": {"sts": 80.0, "transfer": 70.0}, "truncate_dim": 64}
    model["tasks"] |= {"CR": {"acc": 85.0, "devacc": 86.0}, "pairs_retrieval:a/b.tsv": {"mrr": 40.0}}
    model["tasks"] |= {"geometry": {"alignment": 0.12345, "uniformity": -2.0}}
    tables = [table.splitlines() for table in text_table([model]).split("\n\n")]
    assert [head.split() for head, _ in tables] == [
        ["model", "STS-B", "average"],
        ["model", "CR", "average"],
        ["model", "pairs_retrieval", "a/b", "alignment", "uniformity"],
    ]
    rows = [row.removeprefix("a, 64 dimensions").split() for _, row in tables]
    assert rows == [["80.00", "80.00"], ["85.00", "70.00"], ["40.00", "0.123", "-2.000"]]


def test_published_rows_come_first_and_only_where_they_have_a_column():
    table = text_table([results_of("mine", STSBenchmark=80)], with_published=True).splitlines()
    assert table[-1].split() == ["mine", "80.00"]
    (diffcse,) = [line for line in table if line.startswith("DiffCSE-BERT-base (published)")]
    assert diffcse.split()[-1] == "80.59"
    assert not any("with MLM" in line for line in table)


def test_published_averages_are_means_of_their_row():
    for scores in results.PUBLISHED.values():
        for group, names in GROUPS.items():
            if f"average {group}" in scores:
                mean = statistics.mean(scores[name] for name in names)
                assert scores[f"average {group}"] == pytest.approx(mean, abs=0.011)
