"""Studies: what a file may say, which runs are done and which are skipped, the table of their scores."""

import ast
import dataclasses
import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from ml_collections import ConfigDict
from test_sts import write_stsb
from tiny_model import write_tiny_model
from tiny_run import environment, overrides, run_settings

from diffcse_jax.commands import study as command
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.errors import ConfigError, DiskError, InUseError
from diffcse_jax.evaluation.results import FORMATS
from diffcse_jax.io import lock
from diffcse_jax.study import Study, devices, runs, score, settings_of, table
from diffcse_jax.study.plan import SHIPPED_STUDIES, Plan, differences, make_plan, parse_overrides, read_study

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(file.stem for file in SHIPPED_STUDIES.glob("*.py"))
STEPS_2 = ("--config.train.steps=2",)
TWO = {"plain": {}, "with DCL": {"dcl.weight": 0.1}}


def plan_of(workdir: Path, overrides=(), **fields) -> Plan:
    return make_plan(
        "mine", Study(**{"base": "simcse_base", "variants": TWO, "seeds": (1, 2)} | fields), overrides, workdir
    )


def finish(run, dev: float, dev_text: str = "", **scores: float) -> None:
    """Writes the files of a run that is done."""
    (run.folder / "export").mkdir(parents=True, exist_ok=True)
    (run.folder / runs.RUN).write_text(json.dumps(run.record | {"overrides": {}}))
    metric = "average" if run.start else "stsb_spearman"
    results = {
        "asked": list(run.tasks),
        "pooler": "avg",
        "metric": metric,
        "dev": dev,
        "dev_text": dev_text,
        "scores": scores,
    }
    (run.folder / runs.RESULTS).write_text(json.dumps(results | {"missing": {}}))


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """Calls the command; returns exit code and what it printed. Its first argument may be the fields of a study."""

    def call(file: str, *arguments: str):
        if "(" in file:
            text = f"from diffcse_jax.study import Study\ndef get_study():\n    return {file}\n"
            (tmp_path / "mine.py").write_text(text)
            file = str(tmp_path / "mine.py")
        monkeypatch.setattr(sys, "argv", ["study", file, "--workdir", str(tmp_path / "runs"), *arguments])
        try:
            code = command.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("Study(base='simcse_base')", "mine: a study needs variants or a grid"),
        (
            "Study(base='simcse_base', variants={'A': {'optim.lerning_rate': 1.0}})",
            "mine: variant 'A': unknown key optim.lerning_rate; did you mean optim.learning_rate?",
        ),
        (
            "Study(base='simcse_base', variants={'A': {'train.steps': 'many'}})",
            "mine: variant 'A': train.steps: expected int, got 'many'",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}, 'B': {'contrast.weight': 0.0}})",
            "mine: variant 'B': nothing to train: ",
        ),
        (
            "Study(base='simcse_base', variants={'A': {'train.seed': 1}})",
            "mine: variant 'A': train.seed: seeds belong to `seeds` and `seeds_of`",
        ),
        (
            "Study(base='simcse_base', variants={'A': {'distributed': True}})",
            "mine: variant 'A': distributed=True: a study gives each run to one host; hosts may share a study",
        ),
        ("Study(base='simsce_base', variants={'A': {}})", "mine: base 'simsce_base' is no file in configs/; known: "),
        (
            "Study(base='simcse_base', variants={'A': {'dcl.weight': 1.0}}, grid={'dcl.weight': (1.0,)})",
            "mine: variant 'A': sets dcl.weight, which the grid varies",
        ),
        ("Study(base='simcse_base', grid={'dcl.weight': (1.0, 1.0)})", "mine: variant 'dcl.weight=1.0' is there twice"),
        (
            "Study(base='simcse_base', variants={'A': {}, 'B': {'dcl.weight': 0.0}})",
            "mine: variants 'A' and 'B' have the same configuration",
        ),
        (
            "Study(base='simcse_base', variants={'A b': {}, 'a/b': {'dcl.weight': 1.0}, 'a-b': {}})",
            "mine: variants 'A b' and 'a/b' would share a folder; rename one",
        ),
        (
            "Study(base='simcse_base', variants={'start': {}}, start=('own',))",
            "mine: variants 'start' and 'start' would share a folder",
        ),
        ("Study(base='simcse_base', variants={'a|b': {}})", "mine: 'a|b' is no name for a variant"),
        ("Study(base='simcse_base', variants={'..': {}})", "mine: '..' is no name for a variant"),
        (
            "Study(base='simcse_base', variants={'A': {}}, seeds_of={'B': (1,)})",
            "mine: seeds_of names 'B'; the study has: A",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}}, seeds=(1, 1))",
            "mine: variant 'A': seeds are different numbers from 0, at least one; got [1, 1]",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}}, published={'A': {'STSB': 80.0}})",
            "mine: published: 'A' has the unknown column 'STSB'",
        ),
        ("Study(base='simcse_base', variants={'A': {}}, tasks=('STSX',))", "mine: tasks: unknown task 'STSX'. Did you"),
        ("Study(base='simcse_base', variants={'A': {}}, start=('max',))", "mine: start: 'max' is not one of own, cls"),
        (
            "Study(base='simcse_base', variants={'A': {}}, finetunings={'f': {'finetune.stage': 'together'}})",
            "mine: fine-tuning 'f': unknown key finetune.stage; did you mean finetune.stages?",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}}, finetunings={'f': {'finetune.tasks.sst.colour': 1}})",
            "mine: fine-tuning 'f': unknown key finetune.tasks.sst.colour",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}}, finetunings={'f': {}}, finetune_base='simcse_base')",
            "mine: fine-tuning 'f': no labelled tasks: finetune_base='simcse_base' has none",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}}, finetunings={'f': {}}, finetune_base='own.py')",
            "mine: finetune_base: config: there is no 'own.py'",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}, 'A, f': {'dcl.weight': 1.0}}, finetunings={'f': {}})",
            "mine: variants 'A, f' and 'A, f' would share a folder",
        ),
        (
            "Study(base='simcse_base', variants={'A': {}}, finetunings={'f': {}}, published={'A, f': {'sst': 50.0}})",
            "mine: published: 'A, f' has the unknown column 'sst'",
        ),
        ("Study(base='simcse_base', variant={'A': {}})", "mine.py: TypeError: "),
        ("Study(base='simcse_base', grid={'model.pooler': 'avg'})", "mine: grid: model.pooler: expected a tuple such"),
        ("dict(base='simcse_base')", "mine.py: get_study gives no Study, but dict"),
        ("nowhere", f"no study file nowhere; known by name: {', '.join(SHIPPED)}"),
    ],
)
def test_a_mistake_in_a_study_is_named_before_anything_runs(file, message, study, tmp_path):
    code, printed = study(file)
    assert code == 2
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "grid",
            {"optim.learning_rate": 3e-5},
            r"grid: optim\.learning_rate: expected a tuple such as \(3e-05,\), got",
        ),
        ("seeds", 3, r"seeds: expected a tuple such as \(3,\), got 3"),
        ("seeds_of", {"plain": 3}, "seeds_of: 'plain': expected a tuple"),
        ("variants", ["A"], r"variants: expected a dict, got \['A'\]"),
        ("variants", {"A": None}, "variants: 'A': expected a dict, got None"),
        ("published", {"A": 80.0}, r"published: 'A': expected a dict, got 80\.0"),
        ("finetunings", ("together",), r"finetunings: expected a dict, got \('together',\)"),
    ],
)
def test_values_of_other_types_are_named(field, value, message, tmp_path):
    study = Study(base="simcse_base", variants=TWO)
    object.__setattr__(study, field, value)  # making it so is refused by the type checks of tests, which users lack
    with pytest.raises(ConfigError, match=f"^mine: {message}"):
        make_plan("mine", study, (), tmp_path)


def test_a_file_without_get_study_is_named(study, tmp_path):
    (tmp_path / "empty.py").write_text("")
    code, printed = study(str(tmp_path / "empty.py"))
    assert (code, printed.err) == (2, f"error: {tmp_path}/empty.py: it has no function get_study\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.train.stpes=2"], "error: unknown key train.stpes; did you mean train.steps?"),
        (["--config.train.steps=few"], "error: flag --config.train.steps=few"),
        (["--config.train.steps", "2"], "overrides are written --config.KEY=VALUE"),
        (["--config.train.seed=1"], "error: train.seed: seeds are those of the study; choose among them with --seeds"),
        (
            ["--config.dcl.weight=0.2"],
            "error: mine: variants 'A' and 'B' have the same configuration; by the overrides: choose one of them with",
        ),
        (["--seeds", "1", "9"], "error: --seeds: mine has no 9; it has: 1, 2, 3"),
        (["--variants", "C"], "error: --variants: mine has no 'C'; it has: A, B"),
        (["--workers", "0"], "error: --workers: expected at least 1, got 0"),
        (["--workdir", "{seed}"], "error: --workdir={seed}: braces stand for a run's values"),
        (["--wrokers=2"], "unknown argument '--wrokers=2'"),
        (["--finetune.train.steps=2"], "error: --finetune.train.steps=2: mine has no fine-tunings"),
        (
            ["--config.finetune.tasks.x.ratio=3"],
            "error: --config: there is no 'x' (in --config.finetune.tasks.x.ratio=3)",
        ),
        (["--encoders", "earlier"], "error: --encoders: no study has trained A, seed 1 in earlier/A/seed-1"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_before_anything_runs(arguments, message, study, tmp_path):
    code, printed = study("Study(base='simcse_base', variants={'A': {}, 'B': {'dcl.weight': 0.1}})", *arguments)
    assert code == 2
    assert message in printed.err
    assert not (tmp_path / "runs").exists()


def test_a_grid_gives_every_variant_every_point(tmp_path):
    plan = plan_of(tmp_path, grid={"contrast.temperature": (0.05, 1), "train.batch_size": (32,)}, seeds_of={})
    assert list(plan.rows) == [
        f"{variant}, contrast.temperature={temperature}, train.batch_size=32"
        for variant in ("plain", "with DCL")
        for temperature in ("0.05", "1")
    ]
    *_, last = plan.rows.values()
    assert [run.config.train.seed for run in last] == [1, 2]
    assert (last[0].config.contrast.temperature, last[0].config.dcl.weight) == (1.0, 0.1)
    assert last[0].folder == tmp_path / "with-DCL,-contrast.temperature=1,-train.batch_size=32" / "seed-1"


def test_first_seeds_come_first_and_variants_may_have_their_own(tmp_path):
    plan = plan_of(tmp_path, start=("own", "avg"), seeds=(5, 3), seeds_of={"with DCL": (7,)})
    assert [run.label for run in plan.runs] == [
        "start", "start (avg)", "plain, seed 5", "with DCL, seed 7", "plain, seed 3",
    ]  # fmt: skip
    assert [run.label for run in plan.selected(["plain"], [])] == ["plain, seed 5", "plain, seed 3"]
    assert [run.label for run in plan.selected([], [7])] == ["start", "start (avg)", "with DCL, seed 7"]


def test_the_command_line_wins_over_variants(tmp_path):
    overrides = ["--config.dcl.temperature=2", "--config.data.columns=('a','b')"]
    plan = plan_of(tmp_path, overrides, variants={"A": {"dcl.temperature": 3.0}, "B": {"dcl.weight": 1.0}})
    assert {run.config.dcl.temperature for run in plan.runs} == {2.0}
    assert plan.overrides == {"dcl.temperature": 2.0, "data.columns": ("a", "b")}


def test_a_base_may_be_a_configuration(tmp_path):
    base = shipped_config("simcse_base")
    base.train.steps = 7
    assert {run.config.train.steps for run in plan_of(tmp_path, base=base).runs} == {7}
    base = ConfigDict({"contrast": {"weight": 1.0}})
    plan = plan_of(tmp_path, ["--config.train.steps=3"], base=base, variants={"A": {"optim.learning_rate": 0.5}})
    assert {(run.config.train.steps, run.config.optim.learning_rate) for run in plan.runs} == {(3, 0.5)}
    assert plan.base == Config.from_dict({"contrast.weight": 1.0, "train.steps": 3})
    for base, message in (({"contrast": {"wieght": 1.0}}, "unknown key contrast.wieght"), ({"optim": 3}, "optim: exp")):
        with pytest.raises(ConfigError, match=f"^mine: base: {message}"):
            plan_of(tmp_path, base=ConfigDict(base))


def test_settings_of_a_configuration_replace_the_base(tmp_path):
    plan = plan_of(tmp_path, variants={"A": {}, "B": settings_of("diffcse_minilm")})
    config = plan.rows["B"][0].config
    assert differences(Config.from_dict(shipped_config("diffcse_minilm").to_dict()), config) == {"train.seed": 1}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_studies_are_valid_and_their_commands_give_their_configurations(name, tmp_path):
    plan = make_plan(*read_study(name), [], tmp_path)
    base_config = functools.cache(shipped_config)
    for run, *_ in plan.rows.values():  # seeds do not matter
        option, base, *settings = plan.command_settings(run)
        assert option == "--config"
        settings = [setting for setting in settings if not setting.startswith("--config.train.seed=")]
        parsed = parse_overrides(base_config(base), settings)
        changes = differences(Config.from_dict(base_config(base).to_dict()), run.config)
        changes.pop("train.seed", None)
        assert parsed == changes
    docstring = ast.get_docstring(ast.parse((SHIPPED_STUDIES / f"{name}.py").read_text(encoding="utf-8")))
    shown = re.search(rf"python -m diffcse_jax\.study configs/studies/{name}\.py(.*)", docstring)
    assert make_plan(*read_study(name), shown[1].split(), tmp_path).rows.keys() == plan.rows.keys()
    if plan.study.published:
        assert plan.study.source


def test_the_example_of_the_documentation_is_valid(tmp_path):
    page = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    plan = make_plan(*read_study(str(tmp_path / "example.py")), [], tmp_path)
    assert [len(plan.rows[row]) for row in ("start (avg)", "DiffCSE", "SimCSE")] == [1, 3, 1]


class Recorder:
    """Work that notes its runs and finishes them, or does with one of them something else."""

    def __init__(self, **instead):
        self.labels, self.environments = [], set()
        self._instead = instead

    def __call__(self, run, environment, held):
        self.labels.append(run.label)
        self.environments.add(environment.get("worker"))
        self._instead.get(run.row, lambda run: finish(run, 80.0))(run)


def fail(run):
    raise runs.RunFailed("ValueError: no (exit code 1)")


def work_through(plan, work, stopped=lambda: False, environments=({},)):
    runs.work_through(plan.runs, environments, work, stopped)


def test_runs_that_are_done_are_skipped_and_a_failure_ends_its_run_alone(tmp_path):
    plan = plan_of(tmp_path)
    finish(plan.runs[0], 80.0)
    work = Recorder(**{"with DCL": fail})
    work_through(plan, work)
    assert work.labels == ["with DCL, seed 1", "plain, seed 2", "with DCL, seed 2"]
    assert [runs.has_failed(run) for run in plan.runs] == [False, True, False, True]
    assert runs.state_of(plan.runs[1]) == (
        f"failed: ValueError: no (exit code 1) (see {tmp_path}/with-DCL/seed-1/log.txt)"
    )
    again = Recorder()
    work_through(plan, again)
    assert again.labels == ["with DCL, seed 1", "with DCL, seed 2"]
    assert not any(runs.has_failed(run) for run in plan.runs)


def test_other_tasks_are_scored_anew(tmp_path):
    work_through(plan_of(tmp_path), Recorder())
    work = Recorder()
    work_through(plan_of(tmp_path, tasks=("transfer",)), work)
    assert len(work.labels) == 4


def test_a_run_that_another_process_works_on_is_left_out(tmp_path):
    plan = plan_of(tmp_path)
    work = Recorder()
    with lock(plan.runs[1].folder / runs.LOCK):
        work_through(plan, work)
        assert runs.state_of(plan.runs[1]).startswith(f"in progress: {plan.runs[1].folder} is in use by process")
    assert work.labels == ["plain, seed 1", "plain, seed 2", "with DCL, seed 2"]
    assert runs.results_of(plan.runs[1]) is None
    assert runs.state_of(plan.runs[1]) == "not begun"


def test_a_run_that_becomes_free_is_done_in_the_end(tmp_path):
    plan = plan_of(tmp_path)
    held = lock(plan.runs[0].folder / runs.LOCK)
    work = Recorder(**{"with DCL": lambda run: (held.close(), finish(run, 80.0))})
    work_through(plan, work)
    assert work.labels[-1] == "plain, seed 1"
    assert all(runs.results_of(run) for run in plan.runs)


def test_workers_share_the_runs(tmp_path):
    plan = plan_of(tmp_path)
    both = threading.Barrier(2, timeout=20)  # passed only by two at a time
    work = Recorder(**{row: lambda run: (both.wait(), finish(run, 80.0)) for row in TWO})
    work_through(plan, work, environments=({"worker": "0"}, {"worker": "1"}))
    assert sorted(work.labels) == sorted(run.label for run in plan.runs)
    assert work.environments == {"0", "1"}


def test_nothing_begins_after_a_stop(tmp_path):
    plan = plan_of(tmp_path)

    def stop(run):
        raise runs.Stopped

    work = Recorder(plain=stop)
    work_through(plan, work, stopped=lambda: bool(work.labels))
    assert work.labels == ["plain, seed 1"]
    assert runs.state_of(plan.runs[0]) == "begun"


def test_a_folder_with_another_configuration_is_refused(tmp_path):
    plan = plan_of(tmp_path, start=("own",))
    work_through(plan, Recorder())
    runs.check_same(plan.runs)
    runs.check_same(plan_of(tmp_path, ["--config.eval.data_dir=elsewhere"]).runs)
    message = r"plain/seed-1 holds plain, seed 1 with another configuration(.|\n)*  train\.steps: 0 then, 2 now$"
    with pytest.raises(ConfigError, match=message):
        runs.check_same(plan_of(tmp_path, STEPS_2).runs)
    start = dataclasses.replace(plan.runs[0], pooler="avg")
    with pytest.raises(ConfigError, match="pooler: 'own' then, 'avg' now"):
        runs.check_same([start])


TUNED = {"base": "simcse_base", "variants": {"plain": {}}, "start": ("own", "cls"), "seeds": (1, 2)}
TOGETHER = {"together": {"finetune.stages": "together", "train.steps": 5}}


def test_fine_tunings_begin_with_the_encoder_of_every_row(tmp_path):
    plan = make_plan(
        "mine",
        Study(**TUNED, finetunings={**TOGETHER, "heads first": {}}),
        ["--config.train.steps=7"],
        tmp_path,
        ["--finetune.finetune.tasks.sst.weight=0.5", "--finetune.train.batch_size=8"],
    )
    tuned = [f"{row}, {how}" for row in ("start", "start (cls)", "plain") for how in ("together", "heads first")]
    assert list(plan.rows) == ["start", "start (cls)", "plain", *tuned]
    assert [list(group) for group in plan.groups] == [["start", "start (cls)", "plain"], tuned]
    assert [run.label for run in plan.runs if run.seed != 2] == [
        "start", "start (cls)", *(f"{row}, seed 1" for row in ("plain", *tuned)),
    ]  # fmt: skip
    (trained, _), (first, second) = plan.rows["plain"], plan.rows["plain, together"]
    assert (trained.config.train.steps, trained.config.finetune.tasks) == (7, {})
    assert (first.start, second.config.train.seed) == (trained, 2)
    assert first.config.model.name_or_path == str(tmp_path / "plain" / "seed-1")
    assert (first.config.train.steps, first.config.train.batch_size) == (5, 8)
    assert (first.config.finetune.stages, first.config.finetune.tasks["sst"].weight) == ("together", 0.5)
    of_start = [plan.rows[f"{row}, heads first"][0].config for row in ("start", "start (cls)")]
    assert [config.model.name_or_path for config in of_start] == ["bert-base-uncased"] * 2
    assert [config.model.pooler for config in of_start] == ["own", "cls"]
    assert differences(plan.base_of(first), first.config).keys() == {
        "finetune.stages", "train.steps", "train.seed", "model.name_or_path",
    }  # fmt: skip


class Called(runs.Commands):
    """Commands that do nothing but note how they were called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, command, log, environment, held):
        self.calls.append(command[2:])


def test_the_commands_of_a_run(tmp_path):
    study = Study(**TUNED, finetunings=TOGETHER)
    plan = make_plan("mine", study, [], tmp_path / "new", earlier=tmp_path / "old")
    (trained, _), (tuned, _) = plan.rows["plain"], plan.rows["plain, together"]
    with pytest.raises(ConfigError, match=r"--encoders: no study has trained plain, seed 1 in .*old/plain/seed-1"):
        runs.check_earlier([tuned])
    commands = Called()
    work = runs.train_and_score(plan, commands)
    held = lock(tmp_path / "lock")
    work(trained, {}, held)
    assert commands.calls[0][1] == "train"
    finish(dataclasses.replace(trained, folder=trained.workdir), 80.0)
    runs.check_earlier([trained, tuned])
    other = make_plan("mine", study, STEPS_2, tmp_path / "new", earlier=tmp_path / "old")
    with pytest.raises(ConfigError, match=r"old/plain/seed-1 holds .*\n  train\.steps: 0 then, 2 now"):
        runs.check_earlier(other.rows["plain, together"][:1])
    commands.calls.clear()
    work(trained, {}, held)  # its encoder is there
    work(tuned, {}, held)
    held.close()
    score, (_, command, *arguments), score_tuned = commands.calls
    assert score == ["diffcse_jax.study.score", str(trained.folder), "sts"]
    assert score_tuned == ["diffcse_jax.study.score", str(tuned.folder)]
    assert command == "finetune"
    assert arguments[:2] == ["--config", "finetune_multitask"]
    assert arguments[-2:] == ["--workdir", str(tuned.folder)]
    assert f"--config.model.name_or_path={tmp_path}/old/plain/seed-1" in arguments


def test_a_fine_tuning_waits_for_its_start(tmp_path):
    plan = make_plan("mine", Study(**TUNED, finetunings=TOGETHER), [], tmp_path)
    broken = Recorder(plain=fail)
    work_through(plan, broken)
    assert not any(label.startswith("plain, together") for label in broken.labels)
    assert runs.results_of(plan.rows["start, together"][1]) is not None
    work = Recorder()
    work_through(plan, work)
    assert work.labels == ["plain, seed 1", "plain, together, seed 1", "plain, seed 2", "plain, together, seed 2"]
    again = make_plan("mine", Study(**TUNED, finetunings=TOGETHER), [], tmp_path)
    both = Recorder()
    work_through(again, both, environments=({}, {}))
    assert both.labels == []
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    runs.check_same(make_plan("mine", Study(**TUNED, finetunings=TOGETHER), [], moved).runs)
    other = make_plan("mine", Study(**TUNED, finetunings=TOGETHER), [], moved, ["--finetune.train.steps=6"])
    with pytest.raises(ConfigError, match="start, together, seed 1 with another configuration"):
        runs.check_same(other.runs)


def test_a_fine_tuning_whose_encoders_were_elsewhere_says_so(tmp_path, capsys):
    study, old = Study(**TUNED | {"start": ()}, finetunings=TOGETHER), tmp_path / "old"
    work_through(make_plan("mine", study, [], old), Recorder(**{"plain, together": fail}))
    work = Recorder(**{"plain": lambda run: None, "plain, together": fail})
    work_through(make_plan("mine", study, [], tmp_path / "new", earlier=old), work)
    capsys.readouterr()
    tunings = make_plan("mine", study, [], tmp_path / "new").rows["plain, together"]
    runs.work_through(tunings, [{}], Recorder(), lambda: False)
    hint = f"since plain, seed 1 is not trained; its encoder was in {old}/plain/seed-1: give --encoders again"
    assert hint in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_ends_in_a_paragraph(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, seeds=(1,))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs, "write_text", full)
    with pytest.raises(DiskError, match=r"cannot write .*/plain/seed-1: No space left.*saved stays as it is"):
        work_through(plan, Recorder(plain=fail))


def test_a_slow_start_is_waited_for(tmp_path):
    """One worker trains; the other one leaves what must wait for that, and comes back to it."""
    plan = make_plan("mine", Study(**TUNED | {"start": ()}, finetunings=TOGETHER), [], tmp_path)
    begun = threading.Event()

    def train(run):
        if run.seed == 2:
            begun.set()
        assert begun.wait(timeout=20)
        finish(run, 80.0)

    work = Recorder(plain=train)
    work_through(plan, work, environments=({}, {}))
    assert sorted(work.labels[:2]) == ["plain, seed 1", "plain, seed 2"]
    assert all(runs.results_of(run) for run in plan.runs)


@pytest.mark.parametrize("trained", ["", "checkpoints/125", "heads/checkpoints/1150"])
def test_settings_may_be_corrected_until_something_is_trained(trained, tmp_path):
    def fail_midway(run):
        (run.folder / "generator").mkdir()
        (run.folder / "config.json").write_text("{}")
        (run.folder / "heads/checkpoints").mkdir(parents=True)
        (run.folder / trained).mkdir(parents=True, exist_ok=True)
        fail(run)

    wrong, right = (
        plan_of(tmp_path, [f"--config.data.train_file={name}"], variants={"A": {}}, seeds=(1,))
        for name in ("typo.txt", "text.txt")
    )
    work_through(wrong, Recorder(A=fail_midway))
    if trained:
        with pytest.raises(ConfigError, match=r"data\.train_file: 'typo.txt' then, 'text.txt' now"):
            runs.check_same(right.runs)
        return
    runs.check_same(right.runs)
    seen = []
    work_through(right, Recorder(A=lambda run: seen.extend(path.name for path in run.folder.iterdir())))
    assert sorted(seen) == [runs.RUN, runs.LOCK]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("starting\nerror: no file x\n\n", "error: no file x"),
        ("Traceback\nValueError: no\n-----\nJAX removed frames\n", "ValueError: no"),
        ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED\nbye", "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED"),
        ("step 1\nstep 2\n", "step 2"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failure_is_the_last_error_of_the_attempt(printed, expected, tmp_path):
    (tmp_path / "log").write_text("error: of an earlier attempt\n" + printed)
    assert runs.last_line(tmp_path / "log", len("error: of an earlier attempt\n")) == expected


def test_a_command_writes_to_the_log_and_its_end_is_told(tmp_path):
    commands, log = runs.Commands(), tmp_path / "log"
    script = "import os; print('worker', os.environ['worker']); raise ValueError('wrong')"
    with (
        lock(tmp_path / "lock") as held,
        pytest.raises(runs.RunFailed, match=r"^ValueError: wrong \(exit code 1\)$"),
    ):
        commands.call([sys.executable, "-c", script], log, os.environ | {"worker": "7"}, held)
    assert "worker 7" in log.read_text().splitlines()
    with lock(tmp_path / "lock") as held:
        commands.call([sys.executable, "-c", ""], log, os.environ, held)
        with pytest.raises(runs.RunFailed, match=r"\(killed by signal 9\)$"):
            commands.call([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log, os.environ, held)


def test_a_command_keeps_the_lock_until_it_is_stopped(tmp_path):
    """Also after the end of the study that started it, which frees its own hold of the lock."""
    commands = runs.Commands()
    held = lock(tmp_path / "lock")
    ended = []

    def call():
        with pytest.raises(runs.Stopped):
            commands.call(["sleep", "60"], tmp_path / "log", os.environ, held)
        ended.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    while not commands._running:
        time.sleep(0.01)
    held.close()
    with pytest.raises(InUseError, match="is in use by process"):
        lock(tmp_path / "lock")
    commands.stop(signal.SIGTERM)
    thread.join(timeout=20)
    assert ended
    lock(tmp_path / "lock").close()
    with pytest.raises(runs.Stopped), lock(tmp_path / "lock") as free:
        commands.call(["sleep", "60"], tmp_path / "log", os.environ, free)


@pytest.mark.parametrize(
    ("variables", "workers", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,5,7"}, 2, ["2", "5,7"]),
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, 1, ["2,5"]),
        ({"CUDA_VISIBLE_DEVICES": "2", "JAX_PLATFORMS": "cpu"}, 2, ["2", "2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, ["", ""]),
        ({}, 3, ["0", "1", "2"]),
    ],
)
def test_workers_have_gpus_of_their_own(variables, workers, expected, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in devices.environments(workers)] == expected


def test_more_workers_than_gpus_are_refused(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="--workers 3: each worker needs a GPU of its own, and there are 2"):
        devices.environments(3)


DEV = {"plain": (80.0, 81.0, 82.5), "with DCL": (81.0, 81.5, 84.0)}


@pytest.fixture
def outcome(tmp_path):
    """Three seeds of two variants, all done but one, and the start."""
    plan = plan_of(
        tmp_path,
        seeds=(1, 2, 3),
        start=("own",),
        published={"plain": {"STS-B dev": 82.5, "STS12": 68.4}},
        source="Paper",
    )
    finish(plan.rows["start"][0], 70.25, STS12=60.0)
    for row, dev in DEV.items():
        for run, best in zip(plan.rows[row], dev, strict=True):
            finish(run, best, **{"STS12": best - 10, "STSBenchmark": 75.0})
    (plan.rows["with DCL"][2].folder / runs.RESULTS).unlink()
    return table.read_outcome(plan)


def test_means_deviations_and_differences_are_those_of_numpy_and_scipy(outcome):
    start, plain, other = table.document(outcome)["rows"]
    assert plain["mean"]["STS-B dev"] == pytest.approx(np.mean(DEV["plain"]))
    assert plain["std"]["STS12"] == pytest.approx(np.std(DEV["plain"], ddof=1))
    assert other["n"] == 2
    assert other["settings"] == {"dcl.weight": 0.1}
    shared = DEV["plain"][:2], DEV["with DCL"][:2]
    assert other["difference"]["STS-B dev"] == {
        "mean": pytest.approx(0.75),
        "n": 2,
        "p": pytest.approx(scipy.stats.ttest_rel(*shared).pvalue),
    }
    assert other["difference"]["STSBenchmark"] == {"mean": 0.0, "n": 2, "p": None}
    assert start["scores"] == {"-": {"STS-B dev": 70.25, "STS12": 60.0}}
    assert (start["std"], start["difference"], plain["difference"]) == ({}, {}, {})
    json.loads(json.dumps(table.document(outcome), allow_nan=False))


@pytest.mark.parametrize("seed", range(3))
def test_the_paired_test_is_that_of_scipy(seed):
    before, after = np.random.default_rng(seed).normal(80, 1, (2, 5))
    rows = [{i: {"STS12": float(score)} for i, score in enumerate(scores)} for scores in (before, after)]
    found = table.difference(*rows, "STS12")
    assert found.mean == pytest.approx(np.mean(after - before))
    assert found.p == pytest.approx(scipy.stats.ttest_rel(after, before).pvalue)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([80.0], [81.0], "+1.00"),
        ([80.0, 81.0], [80.5, 81.5], "+0.50"),
        ([80.0, 81.0], [80.0, 81.0], "+0.00"),
        ([80.1, 80.2, 80.3], [80.1 + 1 / 3, 80.2 + 1 / 3, 80.3 + 1 / 3], "+0.33"),  # equal but for rounding
        ([80.0, 81.0, 80.0], [79.0, 79.9, 79.1], "-1.00 (p 0.003)"),
        ([80.0] * 3, [90.0, 90.1, 90.2], "+10.10 (p < 0.001)"),
    ],
)
def test_no_significance_is_shown_where_there_is_none(before, after, text):
    rows = [{i: {"STS12": score} for i, score in enumerate(scores)} for scores in (before, after)]
    assert str(table.difference(*rows, "STS12")) == text
    assert table.difference({1: {"STS12": 1.0}}, {2: {"STS12": 1.0}}, "STS12") is None


def test_the_table_says_what_is_measured_published_and_missing(outcome):
    lines = table.show(outcome, "text").splitlines()
    assert lines == [
        "mine (Paper)",
        "",
        "model              n     STS-B dev         STS12         STS-B",
        "start              1         70.25         60.00             -",
        "plain              3  81.17 ± 1.26  71.17 ± 1.26  75.00 ± 0.00",
        "plain (published)  -         82.50         68.40             -",
        "with DCL           2  81.25 ± 0.35  71.25 ± 0.35  75.00 ± 0.00",
        "",
        "difference to plain over shared seeds; p: paired t-test, two-sided",
        "",
        "model     pairs        STS-B dev            STS12  STS-B",
        f"with DCL      2  +0.75 (p {0.205:.3f})  +0.75 (p {0.205:.3f})  +0.00",
        "",
        "n: seeds; mean ± standard deviation (of a sample) where there are several",
        "start: bert-base-uncased before training, pooler avg",
        "published: Paper, with its own checkpoints, text and number of steps",
        "with DCL, seed 3: begun",
    ]
    assert "| plain (published) | - |" in table.show(outcome, "markdown")
    latex = table.show(outcome, "latex")
    assert latex.count(r"\toprule") == 2
    assert all(
        line.startswith(("%", "\\")) or line.endswith(r"\\") for line in latex.splitlines() if line
    )  # text between tables is a comment


def test_the_table_says_what_is_not_the_official_data_and_no_checkpoint(tmp_path):
    plan = plan_of(tmp_path, seeds=(1,))
    for run in plan.runs:
        finish(run, 80.0, STS12=60.0)
    path = plan.runs[0].folder / runs.RESULTS
    noted = {"not_official": {"STS12": "test 137 instead of 3,108"}, "origin": "the start, unchanged"}
    path.write_text(json.dumps(json.loads(path.read_text()) | noted))
    outcome = table.read_outcome(plan)
    assert f"\n{plan.runs[0].label}: the start, unchanged\n" in table.show(outcome, "text")
    for style in table.FILES:
        assert "STS12: not the official data: test 137 instead of 3,108" in table.show(outcome, style)
    assert table.document(outcome)["not_official"] == {"STS12": "test 137 instead of 3,108"}


def test_dev_scores_on_different_text_are_not_compared(tmp_path):
    plan = plan_of(tmp_path, seeds=(1,), start=("own",))
    for run, text in zip(plan.runs, ("a", "a", "b"), strict=True):
        finish(run, 80.0, text, STS12=60.0)
    outcome = table.read_outcome(plan)
    start, plain, other = table.document(outcome)["rows"]
    assert start["mean"].keys() == plain["mean"].keys() == {"STS-B dev", "STS12"}
    assert other["mean"] == {"STS-B dev, text of with DCL": 80.0, "STS12": 60.0}
    assert other["difference"].keys() == {"STS12"}
    assert "STS-B dev, text of with DCL" in table.show(outcome, "text")


@pytest.mark.parametrize("texts", [("", "", "a"), ("", "a", "")])
def test_dev_scores_on_text_that_was_not_recorded_stay_in_one_column(tmp_path, texts):
    plan = plan_of(tmp_path, seeds=(1,), start=("own",))
    for run, text in zip(plan.runs, texts, strict=True):
        finish(run, 80.0, text, STS12=60.0)
    rows = table.document(table.read_outcome(plan))["rows"]
    assert all(row["mean"].keys() == {"STS-B dev", "STS12"} for row in rows)


def test_fine_tunings_have_a_table_of_their_own(tmp_path):
    fields = TUNED | {"start": ("own",), "tasks": ("geometry",)}
    published = {"start, together": {"sst_accuracy": 50.0}}
    study = Study(**fields, finetunings=TOGETHER, published=published, source="Report")
    plan = make_plan("mine", study, STEPS_2, tmp_path, ["--finetune.optim.learning_rate=0.1"])
    for number, run in enumerate(plan.runs):
        if run.start:
            finish(run, 60.0 + number, sst_accuracy=50.0 + number, sts_pearson=70.0)
        elif run.seed != 2:
            finish(run, 80.0, alignment=0.2, uniformity=-2.5)
    outcome = table.write(plan, tmp_path)
    assert table.show(outcome, "text").splitlines() == [
        "mine (Report)",
        "",
        "model  n  STS-B dev  alignment  uniformity",
        "start  1      80.00      0.200      -2.500",
        "plain  1      80.00      0.200      -2.500",
        "",
        "model                        n  sst_accuracy   sts_pearson       average",
        "start, together              2  53.50 ± 2.12  70.00 ± 0.00  63.50 ± 2.12",
        "start, together (published)  -         50.00             -             -",
        "plain, together              2  54.50 ± 2.12  70.00 ± 0.00  64.50 ± 2.12",
        "",
        "difference to start, together over shared seeds; p: paired t-test, two-sided",
        "",
        "model            pairs  sst_accuracy  sts_pearson  average",
        "plain, together      2         +1.00        +0.00    +1.00",
        "",
        "n: seeds; mean ± standard deviation (of a sample) where there are several",
        "start: bert-base-uncased before training, pooler avg",
        "together: fine-tuned from the row's encoder; scores x 100 on dev rows of the tasks",
        "all trainings with train.steps=2",
        "all fine-tunings with optim.learning_rate=0.1",
        "published: Report, with its own checkpoints, text and number of steps",
        "not begun: plain, seed 2",
    ]
    rows = {row["row"]: row for row in table.document(outcome)["rows"]}
    assert rows["plain, together"]["difference"]["average"]["mean"] == pytest.approx(1.0)
    assert rows["plain"]["difference"] == {}
    assert rows["start, together"]["settings"].keys() >= {"finetune.stages", "train.steps"}
    written = {path.name for path in tmp_path.glob("*.png")}
    assert written == {"study.png", "finetuning.png", "alignment_uniformity.png"}


def test_scores_of_a_fine_tuning_are_those_of_its_best_checkpoint(tmp_path, monkeypatch):
    run = make_plan("mine", Study(**TUNED, finetunings=TOGETHER), [], tmp_path).rows["plain, together"][0]
    run.folder.mkdir(parents=True)
    (run.folder / runs.RUN).write_text(json.dumps(run.record))
    dev = {"sst_accuracy": 50.0, "quora_accuracy": 70.0, "sts_pearson": 60.0, "average": 60.0}
    saved = types.SimpleNamespace(
        pooler="avg", dev_metric="average", dev_text="", dev=dev | {"guard": 1.0}, interpolation=0.5, step=3
    )
    monkeypatch.setattr(score, "read_encoder", {run.folder: saved}.__getitem__)
    score.score(run.folder, [])
    outcome = table.read_outcome(make_plan("mine", Study(**TUNED, finetunings=TOGETHER), [], tmp_path))
    assert outcome.scores == {"plain, together": {1: dev}}
    assert outcome.origins == {run.label: "0.5 x step 3 + 0.5 x the starting checkpoint"}


def test_nothing_done_is_a_table_too(tmp_path):
    text = table.show(table.write(plan_of(tmp_path), tmp_path), "text")
    assert "plain     0" in text
    assert text.endswith("\n\nnot begun: plain, seed 1; plain, seed 2; with DCL, seed 1; with DCL, seed 2\n")


@pytest.mark.parametrize("style", FORMATS)
def test_the_report_is_written_and_printed_without_running(style, study, outcome, tmp_path):
    (tmp_path / "runs").mkdir()
    for folder in [*tmp_path.iterdir()]:
        if folder.name != "runs":
            folder.rename(tmp_path / "runs" / folder.name)
    fields = "Study(base='simcse_base', variants={'plain': {}, 'with DCL': {'dcl.weight': 0.1}}, seeds=(1, 2, 3))"
    code, printed = study(fields, "--report", "--start", "--format", style)
    assert code == 3
    assert printed.out == (tmp_path / "runs" / table.FILES[style]).read_text()
    assert "70.25" in printed.out
    assert json.loads((tmp_path / "runs/study.json").read_text())["rows"][1]["n"] == 3
    assert (tmp_path / "runs/study.png").read_bytes().startswith(b"\x89PNG")
    assert study(fields, "--report", "--seeds", "1", "2")[0] == 0
    (tmp_path / "runs/with-DCL/seed-3" / runs.FAILURE).write_text("error: no\n")
    assert study(fields, "--report")[0] == 1


def test_of_variants_that_overrides_make_equal_one_is_enough(tmp_path):
    both = Study(base="simcse_base", variants={"A": {}, "B": {"dcl.weight": 0.1}}, seeds=(1, 2))
    plan = make_plan("mine", both, ["--config.dcl.weight=0.2"], tmp_path)
    assert [run.label for run in plan.selected(["B"], [])] == ["B, seed 1", "B, seed 2"]


def test_the_folder_of_a_study_may_be_at_home(study, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert study("Study(base='simcse_base', variants={'A': {}})", "--workdir", "~/mine", "--report")[0] == 3
    assert (tmp_path / "mine/study.txt").is_file()


def test_overrides_that_change_results_are_told(tmp_path):
    plan = plan_of(tmp_path, [*STEPS_2, "--config.eval.data_dir=here", "--config.eval.interpolate=4"])
    work_through(plan, Recorder(**{row: lambda run: finish_keeping_record(run) for row in TWO}))
    for shown in (plan, plan_of(tmp_path)):  # of runs, or of the command line
        assert "all runs with train.steps=2, eval.interpolate=4\n" in table.show(table.read_outcome(shown), "text")


def finish_keeping_record(run):
    record = (run.folder / runs.RUN).read_text()
    finish(run, 80.0)
    (run.folder / runs.RUN).write_text(record)


@pytest.mark.parametrize(
    ("asked", "expected"), [("own", {True: "avg", False: "cls_before_pooler"}), ("cls", {True: "cls", False: "cls"})]
)
def test_the_start_has_its_own_pooler_or_that_of_training(asked, expected, tmp_path, minilm_dir):
    bare = write_tiny_model(tmp_path, minilm_dir)
    for recorded, model in ((True, "minilm"), (False, str(bare))):
        config = Config.from_dict({"model": {"name_or_path": model, "pooler": "cls"}})
        assert score.pooler_of_start(asked, config) == expected[recorded]


@pytest.mark.slow
def test_a_study_is_killed_and_continued_and_nothing_is_trained_twice(tmp_path, minilm_dir):
    for split in ("dev", "test"):
        rows = [f"-\t-\t-\t-\t{i % 6}\tthe dog number {i}\t{i % 5} dogs run\n" for i in range(20)]
        write_stsb(tmp_path / "senteval", split, rows)
    (tmp_path / "tiny.py").write_text(
        "from diffcse_jax.study import Study\n"
        "def get_study():\n"
        "    return Study(base='simcse_base', variants={'with DCL + 1': {'dcl.weight': 0.1}},\n"
        "                 seeds=(1, 2), tasks=('STSBenchmark',), start=('avg',))\n"
    )
    evaluation = {"every": 1, "data_dir": tmp_path / "senteval", "metric": "stsb_spearman"}
    settings = run_settings(tmp_path, minilm_dir, train={"steps": 2}, eval=evaluation)
    workdir = tmp_path / "study=1"
    call = [sys.executable, "-m", "diffcse_jax.study", str(tmp_path / "tiny.py"), "--workdir", str(workdir)]
    call += overrides(settings)
    variables = environment(tmp_path / "compiled")

    first = subprocess.Popen(call, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)
    training = workdir / "with-DCL-+-1/seed-2/lock"
    while not (training.is_file() and training.read_text()):
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.1)
    first.kill()
    trainer = int(re.search(r"process (\d+)", training.read_text())[1])
    os.kill(trainer, signal.SIGKILL)
    first.communicate()
    done = sorted(path.parent for path in workdir.rglob("results.json"))
    assert [str(path.relative_to(workdir)) for path in done] == ["start-avg", "with-DCL-+-1/seed-1"]
    times = {path: (path / "results.json").stat().st_mtime_ns for path in done}

    second = subprocess.run(call, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)

    assert second.returncode == 0, second.stderr + second.stdout
    assert times == {path: (path / "results.json").stat().st_mtime_ns for path in done}
    for folder in (path.parent for path in workdir.rglob("checkpoints")):
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert sorted(set(steps)) == [0, 1, 2]
        trainings = re.findall(r"^\$ .* train ", (folder / "log.txt").read_text(), re.MULTILINE)
        assert len(trainings) == (2 if folder == training.parent else 1)
    document = json.loads((workdir / "study.json").read_text())
    assert [row["n"] for row in document["rows"]] == [1, 2]
    assert all(row["mean"].keys() == {"STS-B dev", "STSBenchmark"} for row in document["rows"])
    assert document["open"] == {}
    trained = json.loads((workdir / "with-DCL-+-1/seed-1/evaluation.json").read_text())
    assert document["rows"][1]["scores"]["1"]["STSBenchmark"] == pytest.approx(
        trained["tasks"]["STSBenchmark"]["spearman"], abs=0.01
    )
    # The best checkpoint, which is scored, is that of the dev score in the table.
    assert document["rows"][1]["scores"]["1"]["STS-B dev"] == pytest.approx(
        trained["tasks"]["STSBenchmark"]["dev"]["spearman"], abs=0.01
    )
    assert "with DCL + 1" in second.stdout
    assert second.stdout == (workdir / "study.txt").read_text()
