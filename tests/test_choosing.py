import json
import sys

import pytest

from diffcse_jax.commands import choosing as command
from diffcse_jax.study import choosing

START = {"true": 60.0, "good": 6.0, "wrong": -6.0, "flat": 1.0, "uniformity": -1.0}


def write_run(folder, *evaluations, start=START):
    """A run's `metrics.jsonl`; another vector than the start's is trained, which at step 0 is worse."""
    rows = [{"step": 0, **{f"start/{name}": score for name, score in start.items()}, "dev/true": 1.0, "dev/good": 0.1}]
    for step, scores in enumerate(evaluations, 1):
        rows += [{"step": step, "loss": 1.0}, {"step": step, **{f"dev/{name}": scores[name] for name in scores}}]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(true, **others):
    return {"true": true, "good": true / 10, "wrong": -true / 10, "flat": 1.0, "uniformity": -true, **others}


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "study/a/seed-1", evaluation(62.0), evaluation(65.0, good=6.3), evaluation(64.0))
    write_run(tmp_path / "study/b/seed-1", evaluation(58.0), evaluation(59.0))
    return tmp_path / "study"


def test_each_metric_is_compared_with_the_labelled_one(runs):
    models = choosing.read_models([runs])
    assert [len(run) for run in models.values()] == [4, 3]
    assert choosing.metrics_beside(models.values(), "true") == ["good", "wrong", "flat", "uniformity"]
    found = {metric: choosing.compared(models.values(), "true", metric) for metric in ("good", "wrong", "flat")}
    good, wrong, flat = found.values()
    assert [(each.runs, each.models) for each in found.values()] == [(2, 6)] * 3  # the start is shared
    # Ranks 1 2 3 4 5 6 against 1 2 3 4 6 5: two differ by 1. Within the runs 1 2 4 3 and 1 2 3.
    assert good.correlation == pytest.approx(1 - 6 * 2 / (6 * 35))
    assert good.within == pytest.approx((1 - 6 * 2 / (4 * 15) + 1) / 2)
    assert good.losses == [1.0, 0.0]  # chooses 64 of 65, and the start, which is best
    assert good.loss_of_all == 1.0
    assert (wrong.correlation, wrong.within) == pytest.approx((-1, -1))
    assert wrong.losses == [5.0, 2.0]
    assert wrong.loss_of_all == 7.0
    assert (flat.correlation, flat.within) == (None, None)
    assert flat.losses == [5.0, 0.0]  # of equal ones the first, the start


def test_what_lies_in_a_run_is_no_run(runs):
    (runs / "a/seed-1/config.json").write_text('{"model": {"name_or_path": "minilm"}}')
    for name in ("damaged", "heads"):
        write_run(runs / "a/seed-1" / name, evaluation(99.0))
    assert list(choosing.read_models([runs])) == [runs / "a/seed-1", runs / "b/seed-1"]


def test_of_uniformity_the_lower_one_is_chosen():
    models = [[{"true": 60.0, "uniformity": -2.0}, {"true": 70.0, "uniformity": -3.0}]]
    found = choosing.compared(models, "true", "uniformity")
    assert found.correlation == pytest.approx(1)
    assert found.losses == [0.0]


def test_models_without_both_scores_do_not_count():
    models = [[{"true": 60.0}, {"true": 61.0, "some": 1.0}], [{"true": 1.0, "some": 1.0}, {"true": 2.0, "some": 2.0}]]
    assert choosing.compared(models, "true", "some").runs == 1
    assert choosing.compared(models[:1], "true", "some") is None


def test_the_command_prints_a_table(runs, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["choosing", *map(str, arguments)])
        command.main()
        return capsys.readouterr().out.splitlines()

    title, *lines = call(runs / "a", runs / "b", "--labelled", "true")
    assert title.split()[0] == "metric"
    assert [line.split() for line in lines[:4]] == [
        ["good", "2", "6", "0.94", "0.90", "0.50", "1.00", "1.00"],
        ["uniformity", "2", "6", "0.83", "0.25", "0.50", "1.00", "0.00"],
        ["flat", "2", "6", "-", "-", "2.50", "5.00", "5.00"],
        ["wrong", "2", "6", "-1.00", "-1.00", "3.50", "5.00", "7.00"],
    ]
    assert max(map(len, [title, *lines])) <= 80
    for arguments, message in (
        ((runs, "--labelled", "else"), "no run has the dev score 'else'; there are: true, good"),
        ((runs.parent / "none", "--labelled", "true"), "no run's folder"),
    ):
        with pytest.raises(SystemExit):
            call(*arguments)
        assert message in capsys.readouterr().err
