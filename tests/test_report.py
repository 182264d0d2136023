"""The report, from run folders as training leaves them, with encoders that need no computing."""

import json
from pathlib import Path

import numpy as np
import pytest
from html_pages import checked
from matplotlib.figure import Figure
from tiny_model import write_tiny_model
from tiny_run import metrics_file

from diffcse_jax.apps.report import (
    SECTIONS,
    Sample,
    compare,
    encoders_of,
    render_report,
    sample_of,
    suggested_task,
    write_report,
)
from diffcse_jax.commands import ReportOptions
from diffcse_jax.config import Config
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import json_digest
from diffcse_jax.models.sentence_folder import NO_PROMPTS
from diffcse_jax.run_folder.records import Record, Selection, write_baseline, write_selection
from diffcse_jax.run_folder.summary import curves, read_summary

HOSTILE = (
    '</script><script>alert("1")</script><img src="https://x.example/p.png" onerror=alert(1)> &'
)
PAIRS = Sample(
    "pairs of a file", [(f"query {n} {HOSTILE}", f"answer {n}") for n in range(10)], symmetric=False
)


class Encoder:
    """Embeddings that are drawn by text."""

    pooler, truncate_dim, prompts, queries = "avg", None, NO_PROMPTS, None

    def __init__(self, seed: int = 0):
        self.seed = seed

    def encode(self, sentences, batch_size=64, *, prompt=None):
        seeds = [[self.seed, *each.encode(errors="replace")] for each in sentences]
        return np.stack([np.random.default_rng(seed).normal(size=8) for seed in seeds]).astype(
            np.float32
        )


def begin_run(folder, config):
    (folder / "checkpoints").mkdir(parents=True)
    content = json.loads(json.dumps(config.to_dict()))
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "start.json").write_text(json.dumps({"config.json": json_digest(content)}))


def write_run(folder, *, finished=True, **groups):
    """A run of six steps, finished or in progress."""
    values = {"train": {"steps": 6, "batch_size": 8}, "data": {"train_file": HOSTILE}, **groups}
    begin_run(folder, Config.from_dict(values))
    writer = metrics_file(folder)
    writer.write(0, {"dev/stsb_spearman": 50.0, "start/stsb_spearman": 60.0})
    steps = range(1, 7 if finished else 4)
    for step in steps:
        losses = {
            "loss": 1 / step,
            "loss_contrast": 0.9 / step,
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
        }
        others = {
            "rtd_accuracy": 0.9,
            "rtd_share_kept": 0.7,
            "rtd_accuracy_replaced": 0.1 * step,
            "new_measure": 1.0,
        }
        writer.write(
            step,
            losses
            | others
            | {"alignment": 0.5 / step, "sentences_per_second": 16.0, "bad_steps": 1.0},
        )
    for step in steps[1::2]:
        writer.write(step, {"dev/stsb_spearman": 50 + 5.0 * step})
    write_baseline(folder, Record(0, "avg", {"stsb_spearman": 60.0}, "stsb_spearman", "text"))
    start = {
        "time": "2026-01-02T03:04:05+00:00",
        "host": "here",
        "step": 0,
        "versions": {"jax": "0.10"},
        "git": None,
    }
    start |= {
        "digests": {"text": "0123", "files": {}},
        "devices": {"kind": "cpu", "count": 2, "hosts": 1},
    }
    (folder / "starts.jsonl").write_text(json.dumps(start) + '\n{"time": "202')
    if finished:
        record = Record(6, "cls", {"stsb_spearman": 80.0}, "stsb_spearman", "text")
        verdict = "Training helped: it is better.\n  80.50 after training, 60.50 before."
        write_selection(folder, Selection(record, 1.0, verdict, judged=(60.5, 80.5)), {})
    return folder


def compared(*names: str):
    return compare(
        {name: lambda seed=seed: Encoder(seed) for seed, name in enumerate(names)}, PAIRS
    )


def test_the_page_shows_the_records_of_a_finished_run_and_no_text_becomes_markup(
    tmp_path, monkeypatch
):
    workdir = write_run(tmp_path / "<b>bold")
    result = {
        "model": "moved/<b>bold",
        "pooler": "cls",
        "tasks": {"STS12": {"spearman": 81.23}},
        "averages": {"sts": None},
    }
    (workdir / "results.json").write_text(json.dumps(result | {"missing": {}}))
    monkeypatch.setattr(
        "diffcse_jax.apps.report.compare", lambda encoders, sample: compared("<i>start", '"mine')
    )
    with pytest.raises(CheckpointError, match="not a regular file"):
        write_report(ReportOptions(model=str(workdir), output=Path("/dev/null")))
    # refuses img and on... attributes
    shown = checked(write_report(ReportOptions(model=str(workdir))).read_text(encoding="utf-8"))
    run = read_summary(workdir / "export")
    assert not {"i", "b", "script"} & {tag for tag, _ in shown.tags}
    assert (run.before, run.best, run.label) == (60.5, (6, 80.5), "<b>bold")
    texts = (
        "Training helped: it is better.",
        "80.50 after training, 60.50 before.",
        "+20.00",
        "1 step skipped",
        HOSTILE.partition("<script>")[2],
    )
    for text in (
        *texts,
        "SimCSE-BERT-base (published)",
        "68.40",
        f"{workdir}cls81.23",
        "diffcse train --config",
    ):
        assert text in shown.text
    titles = {
        "dev metric stsb spearman",
        "contrast loss",
        "replaced-token detection",
        "new measure",
        "alignment",
    }
    assert titles | {"sentences per second", "learning rate"} <= set(shown.values("aria-label"))
    (dev,) = curves(run)["dev"]
    assert [*dev.levels.values()] == [60.0]
    assert SECTIONS.keys() <= {*shown.values("id")}


def test_a_run_that_keeps_the_start_shows_one_model_and_no_gain(tmp_path):
    workdir = write_run(tmp_path / "mine")
    record = Record(0, "avg", {"stsb_spearman": 60.0}, "stsb_spearman", "text")
    systems = [
        {
            "name": name,
            "mode": mode,
            "encoder": "it",
            "weight": 0.0,
            "score": 60,
            "low": 55,
            "high": 65,
        }
        for name, mode in (("it", "dense"), ("it + BM25", "hybrid"))
    ]
    verdict = "Training did not help, so you keep it.\n  59.51 after training, 60.00 before."
    selection = Selection(record, 0.0, verdict, judged=(60.0, 60.0), systems=systems)
    write_selection(workdir, selection, {"weight": np.zeros(1, np.float32)})
    run = read_summary(workdir)
    (label,) = encoders_of(run)
    assert label == f"{run.config.model.name_or_path} (avg), which the run keeps"
    shown = "".join(checked(render_report(run, compared(label))).text.splitlines())
    assert "Training did not help, so you keep it.stsb spearman60.00 unchanged59.51 after" in shown
    assert "+0.00" not in shown
    assert "it + BM2560.0055.00 to 65.000, which leaves BM25 out" in shown


@pytest.mark.parametrize(
    ("losses", "scale"), [(np.linspace(2.6, 2.2, 20), "linear"), (np.geomspace(2, 0.02, 6), "log")]
)
def test_curves_have_whole_steps_and_a_panel_for_the_metric_that_chooses(losses, scale, tmp_path):
    begin_run(tmp_path, Config())
    write_baseline(tmp_path, Record(0, "avg", {"mrr": 60.0}, "mrr", "text"))
    writer = metrics_file(tmp_path)
    writer.write(0, {"start/mrr": 60.0, "dev/mrr": 60.0, "dev/uniformity": -2.0})
    writer.write(0, {"start/our-dev/mrr": 30.0, "dev/our-dev/mrr": 31.0})
    for step, loss in enumerate(losses.tolist(), 1):
        writer.write(
            step, {"loss": loss, "loss_contrast": loss, "uniformity": -1.0, "rtd_accuracy": 0.9}
        )
    writer.write(len(losses), {"dev/mrr": 65.0, "dev/uniformity": -2.5})
    found = curves(read_summary(tmp_path))
    drawn = {chart.title: chart for chart in (*found["dev"], *found["losses"])}
    assert list(drawn) == [
        "dev metric mrr",
        "uniformity",
        "our-dev/mrr",
        "contrast loss",
        "replaced-token detection",
    ]
    assert [*drawn["our-dev/mrr"].levels.values()] == [30.0]
    # the two charts of uniformity have different names
    checked(render_report(read_summary(tmp_path), compared()))
    figure = Figure(layout="constrained")
    dev, _, _, loss, detection = panels = figure.subplots(1, 5)
    for axes, chart in zip(panels, drawn.values(), strict=True):
        chart.draw(axes)
    figure.draw_without_rendering()
    assert loss.get_yscale() == scale
    assert all(step == int(step) for axes in panels for step in axes.get_xticks())
    assert set(dev.lines[1].get_ydata()) == {60.0}
    # not the others yet
    assert [text.get_text() for text in detection.get_legend().get_texts()] == ["rtd accuracy"]


def test_a_run_in_progress_has_a_page(tmp_path):
    going = read_summary(write_run(tmp_path / "a/seed-1", finished=False))
    assert going.label == "a/seed-1"
    text = checked(render_report(going, compared())).text
    assert "in progress or stopped at step 3 of 6" in text
    assert (
        "The best checkpoint so far is step 2: stsb spearman 60.00 (before training: 60.00)."
        in text
    )
    drawn = {chart.title: chart.lines for chart in curves(going)["losses"]}
    assert [len(points) for points in drawn["replaced-token detection"].values()] == [3, 3, 3]
    begin_run(tmp_path / "new", Config())
    text = checked(render_report(read_summary(tmp_path / "new"), compared())).text
    assert all(shown in text for shown in ("started, nothing measured", "--tasks sts --output"))


def test_each_of_several_evaluated_models_keeps_its_name(tmp_path):
    workdir = write_run(tmp_path / "mine")
    models = [
        {
            "model": name,
            "pooler": "avg",
            "tasks": {"STS12": {"spearman": score}},
            "averages": {"sts": None},
        }
        for name, score in (("minilm", 61.5), (str(workdir), 72.5))
    ]
    (workdir / "results.json").write_text(json.dumps({"models": models}))
    text = checked(render_report(read_summary(workdir), compared())).text
    assert "minilmavg61.50" in text
    assert f"{workdir}avg72.50" in text


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("minilm", "minilm"),
        ("runs/other/export", "runs/other/export"),
        ("elsewhere/mine", "{}"),
        ("elsewhere/mine/export", "{}"),
        ("export", "{}"),
    ],
)
def test_scores_of_another_model_do_not_get_the_name_of_the_run(tmp_path, model, shown):
    workdir = write_run(tmp_path / "mine")
    scores = {"tasks": {"STS12": {"spearman": 61.5}}, "averages": {"sts": None}}
    found = {"model": model, "pooler": "avg", **scores}
    (workdir / "results.json").write_text(json.dumps(found))
    text = checked(render_report(read_summary(workdir), compared())).text
    assert f"{shown.format(workdir)}avg61.50" in text


def test_damaged_numbers_are_left_out(tmp_path):
    workdir = write_run(tmp_path / "mine")
    with (workdir / "metrics.jsonl").open("a") as file:
        for damage in ("NaN", "1e400", "null", "9" * 400):
            file.write(
                f'{{"step": 7, "loss": {damage}, "grad_norm": 2.0}}\n{{"step": {damage}, "loss": 1.0}}\n'
            )
    with (workdir / "starts.jsonl").open("a") as file:
        file.write('[1]\n{}\nnull\n{"git": 5}\n')
    checked(render_report(read_summary(workdir), compared()))
    (workdir / "results.json").write_text('{"models": [1]}')
    with pytest.raises(
        CheckpointError, match=r"results\.json: `models` is not a list of results\. Write the file"
    ):
        read_summary(workdir)


def test_a_search_finds_the_most_similar_texts():
    class Perfect(Encoder):
        def encode(self, sentences, batch_size=64, *, prompt=None):
            # `query 3` and `answer 3` alike
            return super().encode([each.split()[1] for each in sentences])

    for search in compare({"perfect": Perfect}, PAIRS).searches:
        hits = search.hits["perfect"]
        assert hits[0] == (search.wanted, pytest.approx(1))
        assert [score for _, score in hits] == sorted((score for _, score in hits), reverse=True)
    single = Sample("texts", [(text, text) for _, text in PAIRS.pairs])
    for search in compare({"any": Encoder}, single).searches:
        assert (search.wanted, len(search.hits["any"])) == ("", 3)
        assert search.query not in dict(search.hits["any"])


def test_the_sample_is_that_of_the_dev_metric(tmp_path):
    (tmp_path / "pairs.tsv").write_text("first\ta\nsecond\tb\n")
    sample = sample_of(
        Config.from_dict({"eval": {"metric": f"pairs_retrieval:{tmp_path}/pairs.tsv"}})
    )
    assert (sample.pairs, sample.symmetric) == ([("first", "a"), ("second", "b")], False)
    assert sample.about == "2 of the 2 pairs of the dev metric"
    assert "because the dev metric has no pairs" in sample_of(Config()).about


def test_encoders_that_cannot_be_loaded_are_named(tmp_path, minilm_dir):
    tiny = write_tiny_model(tmp_path / "tiny", minilm_dir, blocks=1)
    model = {"name_or_path": str(tiny), "pooler": "avg", "projector": "none"}
    run = read_summary(write_run(tmp_path / "mine", finished=False, model=model))
    comparison = compare(encoders_of(run), Sample("a pair", [("one text", "another one")]))
    assert comparison.problems[0].startswith("mine: ")
    encoder = SentenceEncoder.from_pretrained(tiny, pooler="avg")
    cosine = float(encoder.similarity("one text", "another one"))
    ((label, hits),) = comparison.searches[0].hits.items()
    assert (label, hits) == (
        f"{tiny} (avg) before training",
        [("another one", pytest.approx(cosine, abs=1e-6))],
    )


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({"data": {"pairs": "lead", "held_out": 0.1}}, "documents:FILE"),
        (
            {"eval": {"metric": "pairs_retrieval", "pairs_file": "pairs.tsv"}},
            "pairs_retrieval:FILE",
        ),
        ({}, "sts"),
    ],
)
def test_a_report_suggests_a_task_that_fits_the_text(settings, task):
    assert suggested_task(Config.from_dict(settings)) == task
