"""Fine-tuning on labelled tasks: rows, the mixture of tasks, losses, stages and outputs."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import scipy.stats
from tiny_model import write_tiny_model
from tiny_run import stop_first_run

from diffcse_jax.apps.finetune import TaskModel, heads
from diffcse_jax.apps.finetune import train as finetune_train
from diffcse_jax.apps.finetune.metric import TasksMetric
from diffcse_jax.apps.finetune.mixture import by_ratio, resting
from diffcse_jax.apps.finetune.outputs import write_outputs
from diffcse_jax.apps.finetune.tasks import TaskData, labels_of, read_task
from diffcse_jax.apps.finetune.train import tune
from diffcse_jax.config import Config, OptimConfig, flat
from diffcse_jax.errors import ConfigError, DataError, Interrupted
from diffcse_jax.losses.finetune import LabelledTask, features
from diffcse_jax.run_folder.checkpoints import read_encoder, read_parameters
from diffcse_jax.run_folder.records import read_metrics
from diffcse_jax.run_folder.start import HEADS
from diffcse_jax.training import run as run_module
from diffcse_jax.training.loop import Run
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.step import make_train_step

RNG = np.random.default_rng(0)
U, V = (jnp.asarray(RNG.normal(size=(3, 4)).astype(np.float32)) for _ in range(2))
PAIR = ("first", "second")
STEPS = 4


def test_the_input_of_a_head():
    np.testing.assert_array_equal(features(LabelledTask(), (U,)), U)
    every = LabelledTask(
        texts=PAIR, features=("first", "second", "difference", "product", "cosine")
    )
    u, v = np.asarray(U), np.asarray(V)
    cosine = (u * v).sum(axis=1) / np.linalg.norm(u, axis=1) / np.linalg.norm(v, axis=1)
    expected = np.concatenate([u, v, np.abs(u - v), u * v, cosine[:, None]], axis=1)
    np.testing.assert_allclose(features(every, (U, V)), expected, rtol=1e-5, atol=1e-6)


def test_every_block_has_the_ratio():
    order = by_ratio([17, 4, 2], steps=100, seed=0)
    for block in order[:92].reshape(4, 23):
        assert np.bincount(block).tolist() == [17, 4, 2]
    assert (order[:23] != order[23:46]).any()
    np.testing.assert_array_equal(order[:50], by_ratio([17, 4, 2], steps=50, seed=0))


def test_a_resting_network_skips_the_steps_of_other_tasks():
    config = OptimConfig(learning_rate=0.1, weight_decay=0.1, clip_norm=0.0, schedule="constant")
    both, alone = make_optimizer(config, 9, around=resting), make_optimizer(config, 9)
    params, expected = {"a.kernel": U, "b.kernel": V}, {"b.kernel": V}
    state, expected_state = both.init(params), alone.init(expected)
    for step, gradient in enumerate([U, V, U + V, U - V]):
        of_b = gradient if step % 2 else jnp.zeros_like(gradient)
        updates, state = both.update(
            {"a.kernel": gradient, "b.kernel": of_b}, state, params, good=True
        )
        params = optax.apply_updates(params, updates)
        if step % 2:
            updates, expected_state = alone.update(
                {"b.kernel": gradient}, expected_state, expected, good=True
            )
            expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(params["b.kernel"], expected["b.kernel"], rtol=1e-6)


CLASSES = "text,class\n" + "".join(f"sentence {number},{number % 3}\n" for number in range(30))
NUMBERS = "first\tsecond\tscore\n" + "".join(f"one {n}\tother {n}\t{n / 7}\n" for n in range(30))


def read(
    folder: Path, content: str, name: str = "rows.csv", on_bad_line: str = "error", **options
) -> TaskData:
    (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    texts = ("text",) if "text" in content.partition("\n")[0] else PAIR
    task = LabelledTask(
        **({"file": name, "texts": texts, "label": "class", "dev_share": 0.2} | options)
    )
    return read_task("mine", task, folder, on_bad_line)


def test_rows_are_split_by_their_text(tmp_path):
    def numbers(rows) -> set[int]:
        return {int(row.texts[0].split()[1]) for row in rows}

    data = read(tmp_path, CLASSES)
    assert data.task.labels == ("0", "1", "2")
    assert numbers(data.train) | numbers(data.dev) == {*range(30)}
    assert 0 < len(data.dev) < 15
    assert labels_of(data.dev).tolist() == [int(row.texts[0].split()[1]) % 3 for row in data.dev]
    # other rows do not matter, and neither do case and white space
    header, *lines = CLASSES.splitlines(keepends=True)
    again = read(tmp_path, header + "".join(reversed(lines[5:])).replace("sentence ", "Sentence  "))
    assert numbers(again.dev) == numbers(data.dev) - {*range(5)}
    pairs = "".join(f"one {n}\tother {n}\t{n}\nother {n}\tone {n}\t{n}\n" for n in range(30))
    values = labels_of(read(tmp_path, f"first\tsecond\tclass\n{pairs}", kind="regression").dev)
    assert (values[::2] == values[1::2]).all()  # both orders of a pair


def test_tables_of_any_kind(tmp_path, capsys):
    data = read(tmp_path, NUMBERS, label="score", kind="regression")  # tabs in a .csv
    assert data.train[0].texts[0].startswith("one ")
    assert labels_of(data.train).dtype == np.float32
    rows = "".join(json.dumps({"text": f"{n}", "class": n % 2 == 0}) + "\n" for n in range(20))
    data = read(tmp_path, rows, name="rows.JSONL", texts=("text",))
    assert (data.task.labels, data.task.loss, data.task.outputs) == (
        ("False", "True"),
        "binary_cross_entropy",
        1,
    )
    assert all(row.texts == (str(int(row.id) - 1),) for row in data.train)  # names are line numbers
    data = read(
        tmp_path, CLASSES.replace(",2\n", ",10.0\n") + " ,1\nmore,\nmore,1,2\n", on_bad_line="skip"
    )
    # ordered as numbers
    assert (len(data.train) + len(data.dev), data.task.labels) == (30, ("0", "1", "10"))
    account = capsys.readouterr().err.partition("left out 3 texts: ")[2]
    assert "1 empty" in account
    assert "1 without a label" in account
    assert "1 with a wrong number of fields" in account


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            CLASSES,
            {"label": "x"},
            r"rows\.csv \(finetune\.tasks\.mine\.file\): no column 'x'\. It has: text, class",
        ),
        (
            "Here is one.\n",
            {},
            r"rows\.csv \(finetune\.tasks\.mine\.file\): no column 'first'\. It has: column 1",
        ),
        # of a name that is misspelt on the command line
        ("text\n", {"file": ""}, r"^finetune\.tasks\.mine\.file is empty\. Name the file"),
        (CLASSES, {"labels": ("low", "low", "high", "mid")}, "Give two or more different classes"),
        (
            CLASSES.replace("sentence 0,0", "sentence 0,rare"),
            {"dev_share": 0.5},
            "no training row of class 'rare'",
        ),
        (
            "text,class\na,1\n",
            {"kind": "regression", "dev_share": 0.99},
            "no training rows. Give dev_file",
        ),
        (
            CLASSES,
            {"test_file": "gone.csv"},
            r"^finetune\.tasks\.mine\.test_file: cannot read .*gone\.csv",
        ),
        (CLASSES + " ,1\n", {}, r"mine\.file\), line 32: empty\. Correct or remove it"),
        (
            "first,second,class\na,b,nan\n",
            {"kind": "regression"},
            "line 2: 'nan' is not a finite number",
        ),
        (CLASSES, {"kind": "regression", "labels": ("0", "1")}, "a regression has numbers, not"),
    ],
)
def test_what_cannot_be_used_is_named(content, options, message, tmp_path):
    with pytest.raises((ConfigError, DataError), match=message):
        read(tmp_path, content, **options)


def test_scores_and_their_interval(tmp_path):
    classes = read(tmp_path, CLASSES, dev_share=0.4)
    numbers = read(
        tmp_path, NUMBERS, name="numbers.tsv", label="score", kind="regression", dev_share=0.4
    )
    tasks = [
        dataclasses.replace(data, name=name)
        for name, data in (("classes", classes), ("numbers", numbers))
    ]
    right = np.arange(len(classes.dev)) % 2 == 0
    values = (labels_of(numbers.dev) + RNG.normal(size=len(numbers.dev))).astype(np.float32)

    class Given(TaskModel):
        def __init__(self, guesses):
            self.guesses = guesses

        def decide(self, name, texts, batch_size):
            return self.guesses if name == "classes" else values

    metric, labels = TasksMetric("average", 8, tasks), labels_of(classes.dev)
    worse, better = (
        metric.measure(Given(guesses)) for guesses in (np.where(right, labels, -1), labels)
    )
    pearson = 100 * scipy.stats.pearsonr(values, labels_of(numbers.dev)).statistic
    assert worse.scores["classes_accuracy"] == pytest.approx(100 * right.mean())
    assert better.scores["numbers_pearson"] == pytest.approx(pearson, rel=1e-4)
    assert better.scores["average"] == pytest.approx((100 + pearson) / 2, rel=1e-4)
    low, high = metric.interval(worse.outcomes, better.outcomes)
    assert 0 < low < better.scores["average"] - worse.scores["average"] < high


@pytest.fixture(scope="module")
def config(tmp_path_factory, minilm_dir) -> Config:
    """Return a configuration of two stages with a small encoder and two tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "classes.csv").write_text(
        "id,text,class\n"
        + "".join(f"r{n},The {'good' if n % 2 else 'bad'} film {n} .,{n % 2}\n" for n in range(60))
    )
    (folder / "numbers.tsv").write_text(NUMBERS)
    model = write_tiny_model(folder / "model", minilm_dir, blocks=1)
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"query": "ask: "}}')
    shared = {"dev_share": 0.2, "depth": 2}
    return Config.from_dict({
        "model": {"name_or_path": str(model), "pooler": "cls_before_pooler", "projector": "none"},
        "contrast": {"weight": 0.0}, "difference": {"weight": 0.0},
        "finetune": {
            "weight": 1.0, "data_dir": str(folder), "stages": "heads_first", "heads_steps": STEPS,
            "tasks": {
                "classes": {"file": "classes.csv", "texts": ("text",), "label": "class", "id": "id",
                            "test_file": "classes.csv", **shared},
                "numbers": {"file": "numbers.tsv", "texts": PAIR, "label": "score", "kind": "regression", **shared},
            },
        },
        "data": {"max_length": 16, "cache_dir": str(folder / "cache")},
        "train": {"batch_size": 8, "steps": 2, "log_every": 1, "packing": "off", "recompute": "off"},
        "optim": {"learning_rate": 1e-3}, "eval": {"every": 2}, "mesh": {"data": 1}, "precision": "float32",
    })  # fmt: skip


STEP: dict = {}


def shared_step(*arguments):
    """Make the train step, which all runs of this file share, because their networks and optimizers are equal."""
    return STEP.setdefault("step", make_train_step(*arguments))


@pytest.fixture(scope="module")
def tuned(config, tmp_path_factory) -> tuple[Path, list[TaskData]]:
    """Return the workdir of a run of both stages, and its tasks."""
    workdir, printed = tmp_path_factory.mktemp("tuned"), io.StringIO()
    with (
        jax.debug_nans(False),  # it keeps memory from being reused
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stderr(printed),
    ):
        patched.setattr(run_module, "make_train_step", shared_step)
        tasks, verdict = tune(config, workdir)
    assert "average" in verdict
    (workdir / "printed.txt").write_text(printed.getvalue())
    return workdir, tasks


@pytest.mark.slow
def test_the_heads_come_first(tuned):
    workdir, tasks = tuned
    lines = (workdir / "printed.txt").read_text()
    assert (
        f"task classes: embedding {len(tasks[0].train)} rows\nhead of classes: {STEPS} steps, "
        in lines
    )
    assert (
        lines.index("stage 1 of 2: ")
        < lines.index("head of numbers: ")
        < lines.index("stage 2 of 2: ")
    )
    scores = re.findall(r"head of \w+: .* (-?\d+\.\d+)\n", lines)
    baseline = next(row for row in read_metrics(workdir) if row["step"] == 0)
    assert baseline["dev/average"] == pytest.approx(np.mean([*map(float, scores)]), abs=0.01)


@pytest.mark.slow
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    tuned, config, tmp_path, monkeypatch, capsys
):
    workdir, _ = tuned
    stop_first_run(monkeypatch)
    monkeypatch.setattr(run_module, "make_train_step", shared_step)
    with jax.debug_nans(False):
        with pytest.raises(Interrupted, match="Stopped at step 1"):
            tune(config, tmp_path)
        capsys.readouterr()
        # the checkpoint has the heads
        (tmp_path / HEADS / "heads.safetensors").write_bytes(b"damaged")
        tune(config, tmp_path)
    assert "stage 1" not in capsys.readouterr().err
    expected, found = (
        read_parameters(folder / "checkpoints/2")[0] for folder in (workdir, tmp_path)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_heads_are_trained_again_if_the_rows_have_changed(config, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(config.finetune.data_dir, tmp_path / "tasks")
    config = Config.from_dict(
        flat(config.to_dict()) | {"finetune.data_dir": str(folder), "eval.every": 0}
    )
    runs = []

    def stopped(run: Run) -> str:
        runs.append(run)
        return "stopped before the first checkpoint"

    monkeypatch.setattr(finetune_train, "train_and_select", stopped)
    monkeypatch.setattr(
        heads, "train_task_head", lambda config, data, head, frozen: jax.device_get(head)
    )
    unknown = "ฐศฌฎ ฌฎฏฐศ ฐศฌฏฎ"  # to MiniLM
    new = "".join(f"r{n},{unknown} film {n} .,1\n" for n in range(60, 70))
    for added, is_trained in ("", True), ("", False), (new, True):
        (folder / "classes.csv").write_text((folder / "classes.csv").read_text() + added)
        tasks, _ = tune(config, tmp_path / "run")
        assert ("stage 1" in capsys.readouterr().err) == is_trained
    texts = [text for data in tasks for row in data.train for text in row.texts]
    share = np.mean([unknown in text for text in texts])
    assert runs[0].unknown == 0.0 < runs[-1].unknown == pytest.approx(share)


@pytest.mark.slow
def test_heads_and_predictions_are_written(tuned):
    workdir, tasks = tuned
    model = TaskModel.from_run(workdir)
    write_outputs(workdir, tasks, batch_size=8)
    assert {file.stem for file in (workdir / "predictions").iterdir()} == {
        "classes-dev",
        "classes-test",
        "numbers-dev",
    }
    assert read_encoder(workdir).prompts.query == "ask: "
    assert json.loads((workdir / "tasks/classes/task.json").read_text())["labels"] == ["0", "1"]
    for name, head in model.heads.items():
        saved = safetensors.numpy.load_file(workdir / "tasks" / name / "head.safetensors")
        jax.tree.map(np.testing.assert_array_equal, saved, dict(head))
    header, *lines = (workdir / "predictions" / "classes-test.csv").read_text().splitlines()
    assert header == "id,prediction"
    texts = [row.texts for row in tasks[0].test]
    assert lines == [f"r{n},{label}" for n, label in enumerate(model.predict("classes", texts))]
    values = model.predict("numbers", [("one man", "one man 3"), ("one man", "one man 4")])
    assert all(isinstance(value, float) for value in values)
    with pytest.raises(ConfigError, match="task numbers takes rows of 2"):
        model.predict("numbers", ["one man"])
    with pytest.raises(ConfigError, match=r"there is no task 'other'\. Known: classes, numbers"):
        model.predict("other", ["one man"])
    with pytest.raises(ConfigError, match="takes a list of rows, not one text: 'one man'"):
        model.predict("classes", "one man")
