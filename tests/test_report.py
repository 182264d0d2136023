"""The report of runs, from workdirs as training leaves them, with encoders that need no computing."""

import dataclasses
import json
import math
import statistics
import sys

import numpy as np
import pytest
import scipy.stats
from html_pages import checked, in_browser
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import HIDDEN, write_tiny_model

from diffcse_jax.commands import report as command
from diffcse_jax.config import SHIPPED, Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation.results import PUBLISHED
from diffcse_jax.report import charts, curves, page, tables, vectors, words
from diffcse_jax.report.charts import Axis, Chart, Line, draw, short, thinned
from diffcse_jax.report.runs import labels, read_runs
from diffcse_jax.report.sample import Sample, evenly_spaced, sample_of
from diffcse_jax.run_folder.records import MetricsWriter, Record, Selection, write_baseline, write_selection

HOSTILE = '</script><script>alert("1")</script><img src="https://x.example/p.png" onerror=alert(1)> & \x00\ud800'
PAIRS = Sample(
    "pairs of a file", [f"query {index} {HOSTILE}" for index in range(10)], [f"answer {index}" for index in range(10)]
)


class Encoder:
    """Vectors of so many directions, drawn by text."""

    pooler, truncate_dim = "avg", None

    def __init__(self, seed: int = 0, rank: int = 6):
        self.seed, self.basis = seed, np.random.default_rng(seed).normal(size=(rank, 8))

    def encode(self, sentences, batch_size=64):
        rows = [
            np.random.default_rng([self.seed, *each.encode(errors="replace")]).normal(size=len(self.basis))
            for each in sentences
        ]
        return (np.stack(rows) @ self.basis).astype(np.float32)


def write_run(folder, *, finished=True, old=False, **groups):
    """A workdir of six steps, as it is written while it trains or once it is finished, or by an earlier version."""
    (folder / "checkpoints").mkdir(parents=True)
    values = {"train": {"steps": 6, "batch_size": 8}, "data": {"train_file": HOSTILE.replace("\ud800", "")}, **groups}
    config = Config.from_dict(values)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    writer = MetricsWriter(folder, resumed_at=0)
    before = {} if old else {"start/stsb_spearman": 60.0}
    writer.write(0, {"dev/stsb_spearman": 50.0, **before})
    steps = range(1, 7 if finished else 4)
    for step in steps:
        losses = {"loss": 1 / step, "loss_contrast": 0.9 / step, "loss_difference": 10.0**-step, "grad_norm": 1.0}
        others = {"rtd_accuracy": 0.9, "rtd_share_kept": 0.7, "rtd_accuracy_replaced": 0.1 * step, "new_measure": 1.0}
        space = {"alignment": 0.5 / step, "uniformity": -step / 2, "sentences_per_second": 16.0, "bad_steps": 1.0}
        writer.write(step, losses | others | space)
    for step in steps[1::2]:
        writer.write(step, {"dev/stsb_spearman": 50 + 5.0 * step})
    if not old:
        write_baseline(folder, Record(0, "avg", {"stsb_spearman": 60.0}, "stsb_spearman", "text"))
        start = {"time": "2026-01-02T03:04:05+00:00", "step": 0, "versions": {"jax": "0.10"}, "git": None}
        devices = {"kind": "cpu", "count": 2, "hosts": 1}
        (folder / "starts.jsonl").write_text(json.dumps(start | {"devices": devices}) + '\n{"time": "202')
    if finished and not old:
        record = Record(6, "cls", {"stsb_spearman": 80.0}, "stsb_spearman", "text")
        write_selection(folder, Selection(record, 1.0, "better than the start: 80.00 against 60.00"), {})
    return folder


def compared(*names: str, sample: Sample = PAIRS) -> page.Compared:
    loads = {name: (f"c{index}", lambda index=index: Encoder(index)) for index, name in enumerate(names)}
    return page.Compared(sample, *vectors.placed(loads, sample))


def test_a_finished_run_in_words_and_pictures(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "mine")])
    shown = checked(page.report([run], compared("start", "mine"), now="today"))
    assert "Better than the start: 80.00 against 60.00." in shown.text
    assert "1 step not applied" in shown.text
    assert (run.before, run.best, run.label) == (60.0, (6, 80.0), "mine")
    assert words.duration(run) == "0:00:02"  # five steps of 8 sentences, 16 in a second
    described = [label for label in shown.values("aria-label") if "Horizontal axis" in label]
    titles = {label.partition(". Horizontal")[0] for label in described}
    assert {"dev score: stsb spearman", "loss of contrast", "new measure", "replaced-token detection"} <= titles
    assert {"loss of difference, weight 0.005", "alignment and uniformity on the way", "sentences per second"} <= titles
    (dev,) = (label for label in described if label.startswith("dev score"))
    assert "50 at 0, 80 at 6. Dashed, the start: 60. Marked: chosen: 80.00." in dev
    for section in ("outcome", "curves", "space", "searches", "scores", "configuration", "environment"):
        assert section in shown.values("id")
    assert "cpu" in shown.text
    assert "diffcse evaluate --model" in shown.text  # no scores yet, and how to get them


def test_text_is_shown_and_never_becomes_markup(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "<b>bold")])
    shown = checked(page.report([run], compared("<i>start", '"mine')))  # `checked` refuses img and on... attributes
    assert (
        'alert("1")</script><img src="https://x.example/p.png" onerror=alert(1)> & \N{REPLACEMENT CHARACTER}'
        in shown.text
    )
    assert "i" not in {tag for tag, _ in shown.tags}
    assert "<b>bold" in shown.text
    assert [tag for tag, _ in shown.tags].count("script") == 1


def test_runs_in_progress_and_of_earlier_versions_beside_one_another(tmp_path):
    going = write_run(tmp_path / "a/seed-1", finished=False, optim={"learning_rate": 3e-6})
    old = write_run(tmp_path / "b/seed-1", old=True)
    empty = tmp_path / "new/seed-2"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.json").write_text(json.dumps(Config().to_dict()))
    (old / "export").mkdir()
    runs = read_runs([going, old / "export", empty])
    assert [run.label for run in runs] == ["a/seed-1", "b/seed-1", "new/seed-2"]
    shown = checked(page.report(runs))
    assert "in progress or stopped, at step 3 of 6" in shown.text
    assert "The best evaluation so far is that of step 2: stsb spearman 60.00, where the start has 60.00." in shown.text
    assert "exported, at step 6 of 6" in shown.text
    assert "begun, nothing measured yet" in shown.text
    assert "no model was loaded" in shown.text
    assert "They differ in 4 keys." in shown.text  # learning rate, text, steps, batch size
    described = [label for label in shown.values("aria-label") if label.startswith("dev score")]
    assert len(described) == 1  # one chart for all runs
    assert "a/seed-1: 50 at 0, 60 at 2. b/seed-1: 50 at 0, 80 at 6." in described[0]
    checked(page.report([runs[2]], page.Compared(PAIRS, (), ["new/seed-2: no complete checkpoint"])))


@pytest.mark.parametrize(
    ("step", "share", "score", "words_of_it", "mark"),
    [
        (0, 0.0, 60.0, "the starting checkpoint, unchanged", None),
        (4, 0.5, 75.0, "0.5 x step 4 + 0.5 x the starting checkpoint", "chosen, nearer to the start: 75.00"),
    ],
)
def test_what_a_run_gives_may_be_no_checkpoint(tmp_path, step, share, score, words_of_it, mark):
    workdir = write_run(tmp_path / "mine")
    record = Record(step, "cls", {"stsb_spearman": score}, "stsb_spearman", "text")
    write_selection(workdir, Selection(record, share, "said"), {"weight": np.zeros(1, np.float32)})
    (run,) = read_runs([workdir])
    assert words.chosen(run) == words_of_it
    marks = curves.of_dev([run])[0].marks
    assert [each.label for each in marks] == ([mark] if mark else [])
    checked(page.report([run]))


def test_what_is_no_run(tmp_path):
    run = write_run(tmp_path / "study/variant/seed-1")
    with pytest.raises(CheckpointError, match=r"no run's folder .* it holds runs, name some of them: .*seed-1"):
        read_runs([tmp_path / "study"])
    with pytest.raises(ConfigError, match="named twice"):
        read_runs([run, run / "export"])


def test_labels_are_the_shortest_that_differ(tmp_path):
    assert labels([tmp_path / "x/one", tmp_path / "y/two"]) == ["one", "two"]
    assert labels([tmp_path / "x/run", tmp_path / "y/run"]) == ["x/run", "y/run"]


def test_an_axis_is_linear_or_logarithmic():
    assert Axis(0, 10, 100, 200).pixel(2.5) == 125
    assert Axis(1, 100, 100, 200, log=True).pixel(10) == pytest.approx(150)
    assert Axis(1e-6, 1, 200, 0, log=True).ticks() == pytest.approx([10.0**power for power in range(-6, 1)])


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_ticks_are_few_and_within_bounds(low, width, log):
    axis = Axis(abs(low) + 1e-9 if log else low, (abs(low) if log else low) + width, 0, 100, log)
    assert 1 <= len(axis.ticks()) <= 10
    assert all(-1e-3 <= axis.pixel(tick) <= 100.001 for tick in axis.ticks())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012345, "0.0001234"),
        (-2.5, "\N{MINUS SIGN}2.5"),
        (1234.6, "1,235"),
        (7e-6, "7e\N{MINUS SIGN}6"),
        (float(np.float32(1e-4)), "0.0001"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text


def test_many_points_become_means_of_neighbours():
    points = [(float(x), math.sin(x)) for x in range(2 * charts.MOST_POINTS)]
    chart = Chart("t", "x", [Line("", points)])
    kept = thinned(points, chart)
    assert len(kept) == charts.MOST_POINTS
    assert kept[0] == (0.5, pytest.approx((math.sin(0) + math.sin(1)) / 2))
    assert statistics.mean(y for _, y in kept) == pytest.approx(statistics.mean(y for _, y in points))


def test_a_line_of_many_sizes_is_drawn_on_a_logarithmic_axis():
    drawn = draw(Chart("loss", "step", [Line("", [(1.0, 1.0), (2.0, 1e-3)])]))
    assert ">logarithmic<" in drawn
    assert ">logarithmic<" not in draw(Chart("loss", "step", [Line("", [(1.0, 1.0), (2.0, -1e-3)])]))
    draw(Chart("one point", "step", [Line("", [(1.0, 0.0)])]))


def test_the_density_is_that_of_gaussian_kernels():
    values = np.random.default_rng(0).normal(0.3, 0.1, 500)
    x, y = np.array(vectors.density(values)).T
    np.testing.assert_allclose(y, scipy.stats.gaussian_kde(values)(x), atol=0.02)
    assert np.trapezoid(y, x) == pytest.approx(1, abs=1e-3)
    assert max(vectors.density(np.full(5, 0.5)), key=lambda point: point[1])[0] == pytest.approx(0.5)  # all the same


def test_the_spectrum_is_cut():
    models = compared("start").models
    model = dataclasses.replace(models[0], raw=np.diag([4, 2, 4e-5, 2e-6, 0]).astype(np.float32))
    (line,) = vectors.spectrum([model]).lines
    assert [(x, pytest.approx(y)) for x, y in line.points] == [(1.0, 1.0), (2.0, 0.5), (3.0, 1e-5)]


def test_measures_of_a_perfect_and_of_a_chance_encoder():
    class Perfect(Encoder):
        def encode(self, sentences, batch_size=64):
            return super().encode([each.split()[1] for each in sentences])  # `query 3` and `answer 3` alike

    (model,), problems = vectors.placed({"perfect": ("c1", Perfect)}, PAIRS)
    assert not problems
    found = vectors.measures(model, PAIRS)
    assert found["alignment"] == pytest.approx(0, abs=1e-6)
    assert found["found first, %"] == 100
    rated = dataclasses.replace(PAIRS, gold=[float(index) for index in range(10)])
    assert rated.related == [8, 9]
    groups = vectors.similarities(model, rated)
    assert [len(group) for group in groups.values()] == [2, 2, 2, 2, 2]
    assert next(iter(groups)) == "rated 0 to 1.8"
    assert {name: len(group) for name, group in vectors.similarities(model, PAIRS).items()} == {
        "other pairs": 90, "pairs that belong together": 10,
    }  # fmt: skip


def test_queries_are_chosen_by_position_and_hits_are_the_nearest():
    models = compared("start", "mine").models
    found = vectors.searches(models, PAIRS)
    assert [search.query for search in found] == [PAIRS.first[index] for index in (0, 2, 5, 7)]
    for search in found:
        for model, hits in search.hits:
            cosines = {text: float(model.vectors[text] @ model.vectors[search.query]) for text in PAIRS.second}
            best = sorted(cosines, key=cosines.get, reverse=True)[: vectors.HITS]
            assert [text for text, _ in hits] == best
    texts = Sample("texts", [f"text {index}" for index in range(7)])
    for search in vectors.searches(compared("start", sample=texts).models, texts):
        assert search.query not in [text for text, _ in search.hits[0][1]]
        assert search.wanted == ""
    assert evenly_spaced(list(range(10)), 4) == [0, 2, 5, 7]


def test_the_sample_is_dev_text_or_else_general_sentences(tmp_path, monkeypatch):
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"query {index}\tanswer {index}\n" for index in range(450)))
    values = {"eval": {"metric": "pairs_retrieval", "pairs_file": str(file)}}
    sample = sample_of(Config.from_dict(values))
    assert len(sample.first) == len(sample.second) == 200
    assert (sample.first[0], sample.second[1]) == ("query 0", "answer 2")
    rated = tmp_path / "rated.tsv"
    rated.write_text("".join(f"{index}\tone {index}\tother {index}\n" for index in range(20)))
    sample = sample_of(Config.from_dict({"eval": {"metric": "pairs_spearman", "pairs_file": str(rated)}}))
    assert sample.related == [16, 17, 18, 19]
    file.unlink()
    sample = sample_of(Config.from_dict(values))
    assert len(sample.first) == 200
    assert "pairs.tsv" in sample.about
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)
    assert "eval.data_dir" in sample_of(Config()).about  # and nothing is fetched


def test_shipped_configurations_are_their_own_nearest(tmp_path):
    for path in SHIPPED.glob("*.py"):
        name, differences = tables.of_shipped(tables.shipped(path.stem))
        assert not differences, (path.stem, name)
    values = tables.shipped("simcse_base").to_dict()
    values["optim"]["learning_rate"] = 1e-3
    assert tables.of_shipped(Config.from_dict(values)) == ("simcse_base", [("optim.learning_rate", "3e-05", "0.001")])


def test_scores_stand_beside_published_ones(tmp_path):
    workdirs = [write_run(tmp_path / f"seed-{seed}", train={"seed": seed, "steps": 6}) for seed in (1, 2)]
    for score, workdir in zip((80.0, 82.0), workdirs, strict=True):
        result = {"model": "m", "pooler": "cls", "tasks": {"STS12": {"spearman": score}}, "averages": {"sts": None}}
        (workdir / "results.json").write_text(json.dumps(result | {"missing": {}}))
    runs = read_runs(workdirs)
    (shown,) = tables.of_scores(runs, [])
    for text in ("SimCSE-BERT-base (published)", "68.40", "mean of the seeds", "81.00 ± 1.41"):
        assert text in shown
    assert shown.count("(published)") == sum("STS12" in scores for _, scores in PUBLISHED)
    checked(page.report(runs, compared("start", "seed-1", "seed-2")))


def test_curves_of_several_metrics_are_one_panel_or_one_each(tmp_path):
    runs = read_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two")])
    together = {chart.title: len(chart.lines) for chart in curves.of_objectives(runs[:1])}
    assert together == {"replaced-token detection": 3}
    apart = {chart.title: len(chart.lines) for chart in curves.of_objectives(runs)}
    assert apart == {"rtd accuracy": 2, "rtd share kept": 2, "rtd accuracy replaced": 2}


def test_encoders_that_are_there_are_loaded_and_others_are_named(tmp_path, minilm_dir):
    tiny = write_tiny_model(tmp_path / "tiny", minilm_dir, blocks=1)
    model = {"name_or_path": str(tiny), "pooler": "avg", "projector": "none"}
    (run,) = read_runs([write_run(tmp_path / "mine", finished=False, model=model)])
    sample = Sample("two texts", ["one text", "another one"])
    (start,), problems = vectors.placed(vectors.loaders([run]), sample)
    assert start.label == "start (tiny, avg)"
    assert problems == [f"mine: cannot read {run.workdir}/start.json: no such file"]
    expected = SentenceEncoder.from_pretrained(tiny, pooler="avg").encode(list(sample.first))
    assert start.raw.shape == (2, HIDDEN)
    np.testing.assert_allclose(start.raw, expected, atol=1e-6)


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    workdir = write_run(tmp_path / "mine")
    monkeypatch.setattr(sys, "argv", ["diffcse report", str(workdir), "--skip_models"])
    command.main()
    written = workdir / "report/index.html"
    assert capsys.readouterr().out == f"{written}\n"
    checked(written.read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", ["diffcse report", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "is no run's folder" in capsys.readouterr().err


def test_in_a_browser_on_a_phone(tmp_path):
    runs = read_runs([write_run(tmp_path / "one"), write_run(tmp_path / "two")])
    script = """
    const chart = document.querySelector("figure[data-axis]"), picture = chart.querySelector(":scope > svg");
    const box = picture.getBoundingClientRect();
    picture.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 0.05 * box.width, clientY: box.top}));
    document.body.dataset.values = [...chart.querySelectorAll("output")].map((each) => each.textContent).join("; ");
    document.body.dataset.tooWide = document.documentElement.scrollWidth - window.innerWidth;
    """
    shown = in_browser(page.report(runs, compared("start", "one", "two")), tmp_path, width=390, script=script)
    (body,) = (attributes for tag, attributes in shown.tags if tag == "body")
    assert body["data-values"] == "80 at 6; 80 at 6"
    assert int(body["data-too-wide"]) <= 0
