import pytest

from diffcse_jax.evaluation import TASKS, official
from diffcse_jax.evaluation.sts import StsTask, StsYear


def test_every_task_has_its_official_sizes():
    assert official.SIZES.keys() == TASKS.keys()
    for name, task in TASKS.items():
        if issubclass(task, StsYear):
            assert tuple(official.SIZES[name]) == task.subsets
    totals = {"STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186}
    assert {name: sum(official.SIZES[name].values()) for name in totals} == totals


@pytest.mark.parametrize(
    ("task", "scores", "mode", "reason"),
    [
        ("STSBenchmark", {"n": 1379, "dev": {"n": 1500}}, "test", ""),
        ("STSBenchmark", {"n": 137, "dev": {"n": 1500}}, "test", "test 137 instead of 1,379"),
        ("STSBenchmark", {"n": 1500, "dev": {"n": 1500}}, "dev", ""),
        ("STSBenchmark", {"n": 1379, "dev": {"n": 1379}}, "dev", "dev 1,379 instead of 1,500"),
        (
            "STSBenchmark-finetune",
            {"n": 1379, "ntrain": 5000, "dev": {"n": 1500}},
            "test",
            "train 5,000 instead of 5,749",
        ),
        (
            "STS13",
            {"n": 1500, "subsets": {"FNWN": {"n": 189}, "headlines": {"n": 750}, "OnWN": {"n": 561}}},
            "test",
            "",
        ),
        ("STS13", {"n": 1500, "subsets": {"FNWN": {"n": 561}, "OnWN": {"n": 561}}}, "test", "FNWN 561 instead of 189"),
        ("CR", {"acc": 90.0, "ndev": 3775, "ntest": 3775}, "test", ""),
        ("CR", {"acc": 90.0, "ndev": 3775, "ntest": 3774}, "test", "test 3,774 instead of 3,775"),
        ("TREC", {"devacc": 90.0, "ndev": 5452}, "dev", ""),
        ("retrieval", {"n": 97}, "test", ""),
    ],
)
def test_other_numbers_are_told(task, scores, mode, reason):
    assert official.deviation(task, scores, mode) == reason


def test_the_files_here_are_official(data_dir):
    for name in ("STSBenchmark", "STS12", "STS14"):
        task = TASKS[name](data_dir / "senteval")
        splits = ("dev", "test") if isinstance(task, StsTask) else task.subsets
        counts = {split: len(task.load(split).gold) for split in splits}
        assert counts.items() <= official.SIZES[name].items()
