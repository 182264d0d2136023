"""Studies: study files, which runs are done, progress, damaged records, and the tables."""

import ast
import codecs
import dataclasses
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import scipy.stats
from ml_collections import ConfigDict
from test_sts import write_stsb
from tiny_run import overrides, run_settings, stop_first_run

from diffcse_jax import cli
from diffcse_jax.apps.study import Study, estimate, settings_of, table
from diffcse_jax.apps.study.definition import SHIPPED_STUDIES, read_study
from diffcse_jax.apps.study.plan import Plan, make_plan
from diffcse_jax.apps.study.record import StudyRecord
from diffcse_jax.apps.study.run import FAILURE, LOCK, RESULTS
from diffcse_jax.apps.study.score import means_at_end
from diffcse_jax.apps.study.summary import summarize
from diffcse_jax.apps.study.table import difference, seeds_needed
from diffcse_jax.apps.study.work import do_runs
from diffcse_jax.config import configuration, read_overrides
from diffcse_jax.data.sources import open_corpus
from diffcse_jax.errors import ConfigError, DataError, MissingPackageError
from diffcse_jax.io import lock, read_sealed, write_sealed
from diffcse_jax.training import generator

TWO = {"plain": {}, "with DCL": {"dcl.weight": 0.1}}
VARIANTS = f"variants={TWO}, seeds=(1, 2)"
TUNED = {"variants": {"plain": {}}, "start": ("own", "cls"), "finetunings": {
    "together": {"finetune.stages": "together", "train.steps": 5}}}  # fmt: skip


def plan_of(workdir: Path, *overrides: str, **fields) -> Plan:
    study = Study(**{"base": "simcse_base", "variants": TWO, "seeds": (1, 2)} | fields)
    return make_plan("mine", study, overrides, workdir)


def finish(
    run, dev=80.0, dev_text: str = "", notes=(), training=None, inputs=None, **scores
) -> None:
    """Write the files of a run that is done."""
    (run.folder / "export").mkdir(parents=True, exist_ok=True)
    metric = "average" if run.start else "stsb_spearman"
    results = {
        "asked": run.asked,
        "config": run.config.to_dict(),
        "metric": metric,
        "dev": dev,
        "dev_text": dev_text,
        "training": training or {},
        "inputs": inputs or {},
    }
    write_sealed(run.folder / RESULTS, results | {"scores": scores, "notes": notes})


@pytest.fixture
def study(tmp_path, capsys):
    """Call the command with a study, given as Python. Return the exit code and the output."""

    def call(study: str, *arguments: str):
        text = f"from diffcse_jax.apps.study import Study\ndef get_study():\n    return {study}\n"
        (tmp_path / "mine.py").write_text(text)
        workdir = ["--workdir", str(tmp_path / "runs")]
        try:
            code = cli.main(["study", "--config", str(tmp_path / "mine.py"), *workdir, *arguments])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ("variants={}", [], "mine: a study needs variants"),
        (
            "variants={'A': {'optim.lerning_rate': 1.0}}",
            [],
            "variant 'A': unknown key optim.lerning_rate; did you",
        ),
        (
            "variants={'A': {'train.seed': 1}}",
            [],
            "mine: variant 'A': train.seed: a study file sets `seeds`",
        ),
        (
            "variants={'A b': {}, 'a/b': {'dcl.weight': 1.0}}",
            [],
            "'a/b, seed 1' would share a folder. Rename one",
        ),
        (
            "variants={'A': {}}, seeds_of={'B': (1,)}",
            [],
            "mine: seeds_of names 'B'. The study has: A",
        ),
        (
            "variants={'A': {}}, comparisons=[('A', 'B')]",
            [],
            "mine: comparisons names 'B'. The study has: A",
        ),
        (
            "variants={}).seeds or dict(",
            [],
            "mine.py: define a function get_study() that returns a Study, got ",
        ),
        (
            "variants={'A': {'model.name_or_path': '/nowhere/start'}}",
            [],
            "error: /nowhere/start does not exist. A needs it as model.name_or_path.",
        ),
        (
            "variants={'A': {}}, dev_tasks=('STS12',)",
            [],
            "mine: dev_tasks: STS12 has no dev split",
        ),
        (
            VARIANTS,
            ["--tasks", "sts,STS17"],
            "error: mine: tasks: unknown task 'STS17'. Did you mean STS16?",
        ),
        (
            VARIANTS,
            ["--tasks", "sts,pairs_retrieval:/nowhere/pairs.tsv"],
            "error: pairs_retrieval:/nowhere/pairs.tsv: no such file or folder: /nowhere/pairs.tsv",
        ),
        (
            VARIANTS,
            ["--variants", "C"],
            "error: --variants: mine has no 'C'. It has: plain, with DCL",
        ),
        (
            VARIANTS,
            ["--finetune.train.steps=2"],
            "error: --finetune.train.steps=2: mine has no fine-tunings",
        ),
    ],
)
def test_mistakes_are_named_before_anything_runs(fields, arguments, message, study, tmp_path):
    code, printed = study(f"Study(base='simcse_base', {fields})", *arguments)
    assert (code, message in printed.err) == (2, True), printed.err
    assert not (tmp_path / "runs").exists()


def test_a_report_refuses_results_of_another_configuration(study, tmp_path):
    fields = "seeds=(1,), start=(), variants={'plain': {'train.batch_size': 8}}"
    (made,) = plan_of(tmp_path / "runs", variants={"plain": {}}, seeds=(1,)).runs
    finish(made)
    code, printed = study(f"Study(base='simcse_base', {fields})", "--report")
    assert (code, "train.batch_size: 64 then, 8 now" in printed.err) == (2, True), printed.err


def test_a_study_without_matplotlib_prints_its_table(study, tmp_path, monkeypatch):
    missing = mock.Mock(side_effect=MissingPackageError("matplotlib is not installed"))
    monkeypatch.setattr(table, "require_extra", missing)
    fields = "seeds=(1,), start=(), variants={'plain': {}}"
    finish(plan_of(tmp_path / "runs", variants={"plain": {}}, seeds=(1,)).runs[0])
    code, printed = study(f"Study(base='simcse_base', {fields})", "--report")
    assert code == 0, printed.err
    assert "plain" in printed.out
    assert "notice: no pictures: " in printed.err


@pytest.mark.parametrize("pair", ["AB", ("A",), ("A", "B", "A")])
def test_a_comparison_is_a_pair_of_rows(pair, tmp_path):
    made = Study(base="simcse_base", variants={"A": {}, "B": {}})
    object.__setattr__(made, "comparisons", [pair])  # tests check the types of arguments
    with pytest.raises(
        ConfigError, match=re.escape(f"write each as a pair of rows, ('A', 'B'), not {pair!r}")
    ):
        make_plan("mine", made, [], tmp_path)


# The plan


def test_overrides_win_over_variants_and_variants_over_the_base(tmp_path):
    base, changed = (
        ConfigDict({"contrast": {"weight": 0.5}}),
        ["--config.dcl.temperature=2", "--config.train.steps=3"],
    )
    variants = {"A": {"dcl.temperature": 3.0}, "B": settings_of("diffcse_minilm")}
    made = plan_of(tmp_path, *changed, base=base, variants=variants)
    assert {(run.config.dcl.temperature, run.config.train.steps) for run in made.runs} == {(2.0, 3)}
    assert [run.config.contrast.weight for run in made.runs] == [0.5, 0.5, 1.0, 1.0]
    assert made.runs[-1].folder == tmp_path / "B" / "seed-2"
    study = Study(base=base, variants=variants, seeds_of={"B": (7, 8, 9)})
    assert [run.seed for run in make_plan("mine", study.with_seeds(2), [], tmp_path).runs] == [
        1,
        2,
        7,
        8,
    ]
    assert [run.label for run in made.selected(["B"])] == ["B, seed 1", "B, seed 2"]
    assert [run.label for run in made.selected([])] == [
        "A, seed 1",
        "B, seed 1",
        "A, seed 2",
        "B, seed 2",
    ]


@pytest.mark.parametrize("file", sorted(SHIPPED_STUDIES.glob("*.py")), ids=lambda file: file.stem)
def test_shipped_studies_are_valid(file, tmp_path):
    made = make_plan(*read_study(file.stem), [], tmp_path)
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    shown = re.search(rf"diffcse study --config {file.stem}\b(.*)", docstring)
    read_overrides(shown[1].split())
    assert made.study.source or not made.study.published


@pytest.mark.parametrize("name", ["diffcse_objectives", "simcse_objectives"])
def test_rows_with_and_without_next_sentences_read_the_same_sentences(name, tmp_path):
    (tmp_path / "a.txt").write_text(
        "This is one. It has two.\nThis is\n\nAnother document is here.\nIt has two.\n"
    )
    made = make_plan(*read_study(name), [f"--config.data.train_file={tmp_path}/a.txt"], tmp_path)
    assert len({tuple(open_corpus(run.config.data).rows()) for run in made.runs}) == 1


def test_fine_tunings_start_from_the_encoder_of_every_row(tmp_path):
    changed = [
        "--finetune.finetune.tasks.sst.weight=0.5",
        "--finetune.train.batch_size=8",
        "--config.train.steps=7",
    ]
    made = plan_of(tmp_path, *changed, **TUNED)
    encoders = ["start", "start (cls)", "plain"]
    assert list(made.rows) == [*encoders, *(f"{row}, together" for row in encoders)]
    (trained, _), (first, second) = made.rows["plain"], made.rows["plain, together"]
    assert (trained.config.train.steps, trained.config.finetune.tasks) == (7, {})
    assert (first.start, second.config.train.seed) == (trained, 2)
    assert first.config.model.name_or_path == str(tmp_path / "plain" / "seed-1")
    assert (first.config.train.steps, first.config.train.batch_size) == (5, 8)
    assert (first.config.finetune.stages, first.config.finetune.tasks["sst"].weight) == (
        "together",
        0.5,
    )
    of_start = [made.rows[f"{row}, together"][0].config.model for row in ("start", "start (cls)")]
    assert [(model.name_or_path, model.pooler) for model in of_start] == [
        ("bert-base-uncased", "own"), ("bert-base-uncased", "cls"),
    ]  # fmt: skip


# The runs


@pytest.fixture
def do(monkeypatch):
    """Do the runs of a plan without training: finish them, or do something else with the runs of a row."""

    def call(made, **instead) -> list[str]:
        labels = []

        def work(run):
            labels.append(run.label)
            instead.get(run.row, finish)(run)
            return read_sealed(run.folder / RESULTS, "")

        monkeypatch.setattr("diffcse_jax.apps.study.work.train_and_score", work)
        do_runs(made.selected([]))
        return labels

    return call


def test_done_runs_are_skipped_and_a_failure_ends_its_run_alone(tmp_path, capsys, do):
    made, fail = plan_of(tmp_path), mock.Mock(side_effect=ValueError("no"))
    finish(made.runs[0])
    assert do(made, **{"with DCL": fail}) == [
        "with DCL, seed 1",
        "plain, seed 2",
        "with DCL, seed 2",
    ]
    assert [run.look()[1] for run in made.rows["with DCL"]] == ["failed: ValueError: no"] * 2
    assert "Traceback" in (made.rows["with DCL"][0].folder / FAILURE).read_text()
    printed = capsys.readouterr().err
    assert "done already: 1 of 4 runs" in printed
    assert "run 2 of 4: with DCL, seed 1: failed: ValueError: no" in printed
    assert do(made) == ["with DCL, seed 1", "with DCL, seed 2"]
    assert len(do(plan_of(tmp_path, tasks=("transfer",)))) == 4  # other tasks


def test_several_processes_share_a_study(tmp_path, capsys, do):
    variants = {"plain": {}, "other": {}, "last": {}}
    made = plan_of(tmp_path, variants=variants, seeds=(1,), finetunings=TUNED["finetunings"])
    held = lock(made.runs[0].folder / LOCK)
    assert (
        made.runs[0]
        .look()[1]
        .startswith(f"in progress: {made.runs[0].folder} is in use by process")
    )
    labels = do(made, other=lambda run: (finish(run), finish(made.runs[2]), held.close()))
    # plain is looked at once more
    rows = ("other", "other, together", "last, together", "plain", "plain, together")
    assert labels == [f"{row}, seed 1" for row in rows]
    assert "run 3 of 6: last, seed 1: done by another process" in capsys.readouterr().err


def test_a_fine_tuning_waits_for_its_encoder_and_the_study_may_be_moved(tmp_path, capsys, do):
    made = plan_of(tmp_path, **TUNED)
    assert not any(
        label.startswith("plain, together")
        for label in do(made, plain=mock.Mock(side_effect=ValueError))
    )
    assert made.rows["start, together"][1].look()[0]
    assert (
        "plain, together, seed 1: skipped: plain, seed 1 is not trained" in capsys.readouterr().err
    )
    rest = ["plain, seed 1", "plain, together, seed 1", "plain, seed 2", "plain, together, seed 2"]
    assert do(made) == rest
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    for run in plan_of(moved, **TUNED).runs:
        run.require_same()
    other = plan_of(moved, "--finetune.train.steps=6", **TUNED)
    with pytest.raises(ConfigError, match=r"seed 1 with another .*\n  train\.steps: 5 then, 6 now"):
        other.rows["start, together"][0].require_same()


def test_a_damaged_record_is_named_and_scored_again(tmp_path, do):
    made = plan_of(tmp_path)
    for run in made.runs:
        finish(run, STS12=70.0)
    path = made.rows["with DCL"][0].folder / RESULTS
    path.write_text(path.read_text().replace("0", "1", 1))
    (state,) = summarize(made)["open"].values()
    assert (
        state
        == f"{path} differs from its checksum. Run the study without --report to score the run again"
    )
    assert do(made) == ["with DCL, seed 1"]


def test_runs_from_different_weights_of_one_name_are_reported(tmp_path):
    made = plan_of(tmp_path)
    for number, run in enumerate(run for run in made.runs if run.seed):
        digests = {"model.name_or_path": "12"[number > 0], "text": "3"}
        finish(run, STS12=70.0, inputs=digests)
    (note,) = (note for note in summarize(made)["notes"] if note.startswith("warning"))
    assert note.startswith("warning: 2 different starting checkpoints are called ")
    assert "plain, seed 1 | plain, seed 2, with DCL, seed 1" in note


def test_a_text_has_other_tokens_where_a_row_reads_it_differently(tmp_path):
    rows = {"plain": {}, "longer": {"data.max_length": 48}}
    made = plan_of(tmp_path, variants=rows, seeds_of={})
    for run in (run for run in made.runs if run.seed):
        finish(run, inputs={"model.name_or_path": "1", "text": run.row})
    assert not any(note.startswith("warning") for note in summarize(made)["notes"])


def test_a_record_outlives_the_folders(tmp_path, do):
    file = tmp_path / "record.jsonl"
    here = plan_of(tmp_path / "here").with_record(StudyRecord(file))
    assert len(do(here)) == 4
    recorded = [json.loads(line)["settings"] for line in file.read_text().splitlines()]
    assert len(recorded) == 4
    # A key at its default is not recorded, so a later version may add keys.
    assert "optim.weight_decay" not in set().union(*recorded)
    there = plan_of(tmp_path / "there").with_record(StudyRecord(file))
    assert do(there) == []
    assert summarize(there)["encoders"] == summarize(here)["encoders"]
    changed = plan_of(tmp_path / "there", "--config.optim.learning_rate=1e-3").with_record(
        StudyRecord(file)
    )
    warning = f"{file} has plain with other settings: optim.learning_rate is "
    assert any(warning in note for note in summarize(changed)["notes"])
    assert len(do(changed)) == 4  # other settings
    assert not any(warning in note for note in summarize(changed)["notes"])
    where = plan_of(tmp_path / "there", "--config.data.cache_dir=elsewhere").with_record(
        StudyRecord(file)
    )
    assert do(where) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [*lines, b"{}"], r"line 5: not an entry"),
        (lambda lines: [lines[0].replace(b'"seed"', b'"s\xff"'), *lines[1:]], r"line 1: not an"),
        (lambda lines: [lines[0].replace(b'"metric"', b'"other"')], r"line 1: not an entry"),
        (lambda lines: [re.sub(rb'"dev": [^,]*', b'"dev": NaN', lines[0])], r"line 1: not an entry"),
        (lambda lines: [lines[0].decode().encode("utf-16")], r"is UTF-16\. Save it as UTF-8"),
    ],
)  # fmt: skip
def test_lines_of_a_record_that_are_no_entries_are_named(tmp_path, do, spoil, message):
    file = tmp_path / "record.jsonl"
    do(plan_of(tmp_path / "here").with_record(StudyRecord(file)))
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join(spoil(lines)) + b"\n")
    with pytest.raises(DataError, match=message):
        StudyRecord(file)


def test_a_record_is_found_by_other_names_of_tasks_and_repeats_are_said(tmp_path, do):
    file = tmp_path / "record.jsonl"
    do(plan_of(tmp_path / "here", tasks=("STSBenchmark", "STS12")).with_record(StudyRecord(file)))
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    same = plan_of(tmp_path / "there", tasks=("STS12", "STS-B")).with_record(StudyRecord(file))
    assert do(same) == []
    fewer = plan_of(tmp_path / "there", tasks=("STS12",)).with_record(StudyRecord(file))
    assert any(
        "the tasks are STS12, STSBenchmark there and STS12 here" in note
        for note in summarize(fewer)["notes"]
    )
    first = json.loads(file.read_text(encoding="utf-8-sig").splitlines()[0])
    first["results"]["scores"] = {"STS12": 10.0}
    with file.open("a") as opened:
        opened.write(json.dumps(first) + "\n")
    again = plan_of(tmp_path / "there", tasks=("STS12", "STS-B")).with_record(StudyRecord(file))
    label = f"{first['row']}, seed {first['seed']}"
    assert any(
        f"several lines with different scores for {label}" in note
        for note in summarize(again)["notes"]
    )


def test_the_number_of_seeds_is_that_of_simulated_studies():
    rng = np.random.default_rng(0)
    for mean, deviation in ((2.0, 1.2), (1.0, 1.2)):
        count = seeds_needed(mean, deviation)
        for seeds, is_enough in ((count, True), (count - 1, False)):
            p = scipy.stats.ttest_1samp(
                rng.normal(mean, deviation, (20_000, seeds)), 0.0, axis=1
            ).pvalue
            assert (np.mean(p < 0.05) > 0.795) == is_enough
    assert seeds_needed(0.001, 1.0) is None


def test_few_pairs_do_not_tell_how_many_seeds_are_needed():
    first = {str(seed): {"STS-B": 70.0} for seed in range(5)}
    other = {seed: {"STS-B": 71.0 + 0.1 * int(seed)} for seed in first}
    assert difference(first, other, "STS-B")["needed"] == 3
    del other["4"]
    assert "needed" not in difference(first, other, "STS-B")


def test_runs_that_are_too_short_to_time_are_not_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("diffcse_jax.api.run", None)
    runs = plan_of(tmp_path, f"--config.train.steps={estimate.STEPS - 1}").runs
    assert estimate.probe(runs[0].config, tmp_path) is None
    estimate.log_needs(runs, tmp_path)
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in printed] == [f"{row} is not timed" for row in TWO]


def test_the_cost_of_a_study_adds_up():
    cost = estimate.Cost(
        1000,
        step_seconds=0.5,
        evaluation_seconds=10.0,
        other_seconds=60.0,
        checkpoint_bytes=3 * 10**9,
    )
    assert cost.seconds(every=125) == 1000 * 0.5 + 8 * 10 + 60
    assert cost.seconds(every=0) == 1000 * 0.5 + 10 + 60
    lines = [*estimate.describe({"A": cost}, [("A", 125)] * 10, free=50 * 10**9)]
    assert lines == [
        "A: 10 runs of 1,000 steps, 0.5 s a step and 10 s a dev evaluation: 1 h 47 min",
        "together 1 h 47 min and 100.0 GB, without the scoring of tasks and fine-tunings",
        "warning: 50.0 GB are free. Name a --workdir with more room, or remove folders of done runs",
    ]


# The tables


def test_the_table_shows_what_is_measured_published_and_missing(study, tmp_path):
    fields = {
        "start": ("own",),
        "published": {"plain": {"STS-B dev": 82.5, "STSBenchmark": 68.4}},
        "source": "Paper",
    }
    made = plan_of(tmp_path / "runs", seeds=(1, 2, 3), **fields)
    finish(
        made.rows["start"][0],
        70.25,
        notes=["start: bert-base-uncased before training, pooler avg"],
        STS12=60.0,
    )
    scores = {"plain": (80.0, 81.0, 82.5), "with DCL": (81.0, 81.5)}
    for row, dev in scores.items():
        for run, best in zip(made.rows[row], dev, strict=False):
            finish(run, best, STS12=75.0, STSBenchmark=best - 10)
    begun = made.rows["with DCL"][2].folder
    begun.mkdir()
    (begun / "config.json").touch()
    means = {row: f"{np.mean(dev):.2f} ± {np.std(dev, ddof=1):.2f}" for row, dev in scores.items()}
    interval = scipy.stats.ttest_rel(scores["with DCL"], scores["plain"][:2]).confidence_interval()
    gain = f"+0.75 ({interval.low:+.2f} to {interval.high:+.2f})"
    call = f"Study(base='simcse_base', variants={TWO}, **{fields})"
    code, printed = study(call, "--report")
    assert printed.out.splitlines() == [
        "mine (Paper)",
        "",
        "model              n     STS-B dev         STS12         STS-B",
        "start              1         70.25         60.00             -",
        f"plain              3  {means['plain']}  75.00 ± 0.00  71.17 ± 1.26",
        "plain (published)  -         82.50             -         68.40",
        f"with DCL           2  {means['with DCL']}  75.00 ± 0.00  71.25 ± 0.35",
        "",
        "mean difference to plain, or to the row that is named, over shared seeds, with its 95% interval (paired "
        "t-test); needed, from 5 shared seeds on: the number of seeds with which 80% of studies would find the "
        "difference in the last column significant",
        "",
        f"model     pairs  needed  {'STS-B dev':>{len(gain)}}  STS12  {'STS-B':>{len(gain)}}",
        f"with DCL      2       -  {gain}  +0.00  {gain}",
        "",
        "n: seeds; mean ± standard deviation (of a sample) over several seeds",
        "start: bert-base-uncased before training, pooler avg",
        "published: Paper, with its own checkpoints, text and number of steps",
        "with DCL, seed 3: started",
    ]
    assert printed.out == (tmp_path / "runs/study.txt").read_text()
    assert "| plain (published) |  - |" in (tmp_path / "runs/study.md").read_text()
    assert (tmp_path / "runs/study.tex").read_text().count(r"\toprule") == 2
    assert json.loads((tmp_path / "runs/study.json").read_text())["encoders"][1]["n"] == 3
    assert (code, study(call, "--report", "--seeds", "2")[0]) == (3, 0)
    (begun / FAILURE).write_text("error: no\n")
    assert study(call, "--report")[0] == 1


def test_last_checkpoints_dev_splits_and_accuracies_have_their_own_columns(tmp_path):
    variants = {"SimCSE": {}, "DiffCSE": {}}
    made = plan_of(
        tmp_path,
        variants=variants,
        comparisons=[("DiffCSE", "SimCSE")],
        dev_tasks=("SICKRelatedness",),
        scores_last=True,
    )
    assert made.runs[0].asked == ("sts", "SICKRelatedness dev", "last checkpoint")
    rows = [{"step": step, "loss": 1.0, "rtd_accuracy": step / 200} for step in range(1, 201)]
    for run in made.runs:
        scores = {"STSBenchmark": 70.0, "SICKRelatedness dev": 60.0, "STSBenchmark (last)": 69.0}
        is_difference = run.row == "DiffCSE"
        scores["alignment"] = 0.125 if is_difference else 0.185
        training = means_at_end([*rows, {"step": 200, "dev/stsb_spearman": 80.0}])
        finish(run, **scores, training=training if is_difference else {"loss": 1.0})
    shown = table.show(summarize(made), "text")
    tables = [part.splitlines() for part in shown.split("\n\n")]
    assert [" ".join(part[0].split()) for part in tables if part[0].startswith("model")] == [
        "model n STS-B dev STS-B",
        "model n SICK-R dev alignment",
        "model n STS-B (last)",
        "model pairs needed STS-B dev STS-B",
        "model pairs SICK-R dev alignment",
        "model pairs STS-B (last)",
        "model rtd_accuracy",
    ]
    assert tables[-2][-1].split() == ["DiffCSE", "75.25", "±", "0.00"]  # steps 101 to 200
    differences, others, _ = (part for part in tables if "pairs" in part[0])
    assert [line.split("  ")[0] for line in differences[1:]] == [
        "DiffCSE",
        "SimCSE, against DiffCSE",
    ]
    assert [line.split()[-1] for line in others[1:]] == ["-0.060", "+0.060"]


def test_dev_scores_on_different_text_are_not_compared(tmp_path):
    made = plan_of(tmp_path, seeds=(1,), start=("own",))
    for run, text in zip(made.runs, ("a", "a", "b"), strict=True):
        finish(run, 80.0, text, STS12=60.0)
    summary = summarize(made)
    *_, other = summary["encoders"]
    assert other["scores"] == {"1": {"STS-B dev, text of with DCL": 80.0, "STS12": 60.0}}
    assert other["difference"].keys() == {"STS12"}


def test_fine_tunings_have_their_own_table(tmp_path):
    published = {"start, together": {"sst_accuracy": 50.0}}
    made = plan_of(tmp_path, published=published, source="Report", **TUNED | {"start": ("own",)})
    for number, run in enumerate(made.runs):
        if run.start:
            finish(run, 60.0 + number, sst_accuracy=50.0 + number)
        elif run.seed != 2:
            finish(run, 80.0, alignment=0.2)
    table.write(summarize(made), tmp_path)
    lines = (tmp_path / "study.txt").read_text().splitlines()
    assert lines[2:10] == [
        "model  n  STS-B dev  alignment",
        "start  1      80.00      0.200",
        "plain  1      80.00      0.200",
        "",
        "model                        n  sst_accuracy       average",
        "start, together              2  53.50 ± 0.71  63.50 ± 0.71",
        "start, together (published)  -         50.00             -",
        "plain, together              2  55.50 ± 0.71  65.50 ± 0.71",
    ]
    assert "not started: plain, seed 2" in lines
    assert {path.name for path in tmp_path.glob("*.png")} == {"study.png", "finetuning.png"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_few_steps_are_timed_without_a_trace(tmp_path, minilm_dir, monkeypatch, capfd):
    settings = run_settings(
        tmp_path, minilm_dir, train={"steps": 40, "packing": "off"}, mesh={"data": 1}
    )
    monkeypatch.setattr(generator, "WORTH_TIMING", 2)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    cost = estimate.probe(configuration("diffcse_minilm", settings)[1], tmp_path)
    assert cost.steps == 40
    assert min(dataclasses.astuple(cost)) > 0
    # Of the three steps of the generator's head, those that are needed to time one.
    assert "trains a masked-LM head, for 2 steps" in capfd.readouterr().err
    added = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert not [path for path in added if "checkpoints" in path.parts or "export" in path.parts]
    # One epoch has seven steps, which only the run itself can count.
    short = settings | {"train.steps": 0, "train.epochs": 1}
    monkeypatch.setattr("diffcse_jax.api.export_with_curves", None)
    assert estimate.probe(configuration("simcse_base", short)[1], tmp_path) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # a warning does not end a command of a user
def test_a_study_that_is_stopped_continues_and_trains_nothing_twice(
    tmp_path, minilm_dir, study, monkeypatch
):
    for split in ("dev", "test"):
        rows = [f"-\t-\t-\t-\t{i % 6}\tthe dog number {i}\t{i % 5} dogs run\n" for i in range(20)]
        write_stsb(tmp_path / "senteval", split, rows)
    evaluation = {"every": 1, "data_dir": tmp_path / "senteval", "metric": "stsb_spearman"}
    train = {"steps": 2, "packing": "off"}
    settings = overrides(
        run_settings(tmp_path, minilm_dir, train=train, eval=evaluation, mesh={"data": 1})
    )
    variants = "variants={'with DCL + 1': {'dcl.weight': 0.1}}, seeds=(1,), tasks=('STSBenchmark',), start=('own',)"
    workdir = tmp_path / "runs"
    stop_first_run(monkeypatch)
    code, printed = study(f"Study(base='simcse_base', {variants})", *settings)
    assert (code, "Stopped at step 1" in printed.err) == (130, True), printed.err
    (done,) = workdir.rglob("results.json")
    assert done == workdir / "start/results.json"
    time_done = done.stat().st_mtime_ns
    code, printed = study(f"Study(base='simcse_base', {variants})", *settings)
    assert code == 0, printed.err
    assert "done already: 1 of 2 runs\nrun 2 of 2: with DCL + 1, seed 1: started in" in printed.err
    assert time_done == done.stat().st_mtime_ns
    trained = workdir / "with-DCL-+-1/seed-1"
    steps = [
        json.loads(line)["step"] for line in (trained / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [0, 1, 2]
    document = json.loads((workdir / "study.json").read_text())
    assert ([row["n"] for row in document["encoders"]], document["open"]) == ([1, 1], {})
    # as in training
    assert any("before training, pooler cls_before_pooler" in note for note in document["notes"])
    evaluated = json.loads((trained / "evaluation.json").read_text())["tasks"]["STSBenchmark"]
    scores = document["encoders"][1]["scores"]["1"]
    assert scores["STSBenchmark"] == pytest.approx(evaluated["spearman"], abs=0.01)
    # of the scored checkpoint
    assert scores["STS-B dev"] == pytest.approx(evaluated["dev"]["spearman"], abs=0.01)
    assert printed.out == (workdir / "study.txt").read_text()
