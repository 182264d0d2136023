"""Training from Python, as the command line does it."""

import concurrent.futures
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import run_settings

import diffcse_jax
from diffcse_jax import Callback, Config, Interrupted, train
from diffcse_jax.api import _text_settings, named_workdir
from diffcse_jax.config import SHIPPED, configuration, shipped_config
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.evaluation.retrieval import read_retrieval_pairs

ROOT = Path(__file__).parents[1]
SENTENCES = [f"Sentence {i} has the number {i * i} and {i % 7} words more." for i in range(60)]


class Recorder(Callback):
    """Remembers what it is told, and may ask to stop."""

    def __init__(self, stop_at: int = 0):
        self.events, self.stop_at = [], stop_at

    def on_start(self, training):
        self.training = training
        self.events.append(f"start {training.step} of {training.total_steps}")

    def on_step(self, step, metrics):
        self.events.append(f"step {step}" + ", loss" * ("loss" in metrics))
        if step == self.stop_at:
            self.training.stop()

    def on_evaluation(self, step, scores):
        self.events.append(f"evaluation {step}")

    def on_save(self, step, checkpoint):
        self.events.append(f"save {step}" * checkpoint.is_dir())

    def on_end(self):
        self.events.append("end")


@pytest.mark.slow
def test_a_list_is_trained_on_stopped_in_another_thread_and_resumed(
    minilm_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # PyTorch's check of the export
    monkeypatch.setattr("diffcse_jax.export._installed", lambda module: False)
    monkeypatch.chdir(tmp_path)
    settings = run_settings(
        tmp_path, minilm_dir, train={"steps": 6, "log_every": 2, "packing": "off"}, eval={"every": 3},
        model={"projector": "none"}, difference={"weight": 0.0}, mesh={"data": 1},
    )  # fmt: skip
    stopping, resuming = Recorder(stop_at=3), Recorder()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        interrupted = thread.submit(
            train, SENTENCES, settings, workdir="mine_{seed}", callbacks=[stopping]
        ).exception()
    assert isinstance(interrupted, Interrupted)
    assert (
        str(interrupted)
        == "Stopped at step 4. Everything is saved; run the same command again to resume."
    )
    first = "; ".join(event for event in stopping.events if not event.startswith("save"))
    expected = "start 0 of 6; evaluation 0; step 1, loss; step 2, loss; step 3, loss; evaluation 3; step 4, loss; end"
    assert first == expected
    assert [event for event in stopping.events if event.startswith("save")] == ["save 3", "save 4"]

    trained = train(iter(SENTENCES), settings, workdir=tmp_path / "mine_42", callbacks=[resuming])
    expected = "start 4 of 6; step 5, loss; step 6, loss; evaluation 6; save 6; end"
    assert "; ".join(resuming.events) == expected
    encoder, history = trained
    assert encoder is trained.encoder
    assert encoder.encode(SENTENCES[:2]).shape == (2, 16)
    assert [row["step"] for row in history if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert trained.start_scores["halves_retrieval"] == history[0]["start/halves_retrieval"]
    scores = {
        row["step"]: row["dev/halves_retrieval"] for row in history if "dev/halves_retrieval" in row
    }
    assert [*scores] == [0, 3, 6]
    assert trained.scores["halves_retrieval"] == max(scores[3], scores[6])
    assert "Exported " in trained.verdict
    assert trained.verdict in capsys.readouterr().out
    assert (trained.workdir / "export" / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"new run, give another --workdir"):
        train(SENTENCES, settings, workdir=trained.workdir, overrides={"train.seed": 1})


def test_importing_the_package_starts_nothing():
    script = "import sys, diffcse_jax; assert not {'jax', 'numpy', 'absl', 'ml_collections'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    assert {*diffcse_jax.__all__} <= {*dir(diffcse_jax)}
    for name in diffcse_jax.__all__:
        assert getattr(diffcse_jax, name).__name__ == name


def test_every_form_of_a_configuration_is_the_same(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text((SHIPPED / "adapt.py").read_text())
    name, expected = configuration("adapt", {})
    assert name == "adapt"
    assert expected == Config.from_dict(runpy.run_path(str(file))["get_config"]().to_dict())
    assert configuration(file, {}) == configuration(str(file), {}) == ("mine", expected)
    assert (
        configuration(shipped_config("adapt"), {})
        == configuration(expected, {})
        == ("custom", expected)
    )
    dotted = {
        "train.steps": 3,
        "optim": {"learning_rate": 1},
        "data.train_file": tmp_path,
        "distributed": True,
    }
    nested = {
        "train": {"steps": 3},
        "optim.learning_rate": 1.0,
        "data": {"train_file": f"{tmp_path}"},
    }
    assert configuration(dotted, {}) == configuration({}, nested | {"distributed": True})
    _, changed = configuration(expected, {"train.steps": 3})
    assert (changed.train.steps, changed.data) == (3, expected.data)


def test_pairs_in_memory_are_pairs_whatever_the_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pairs = [(f"question {i}", f"answer {i}") for i in range(100)]
    _, adapt = configuration("adapt", {})
    settings = _text_settings(iter(pairs), adapt)
    _, config = configuration(adapt, settings)
    assert (config.data.pairs, config.data.held_out, config.eval.metric) == (
        "columns",
        0.0,
        "pairs_retrieval",
    )
    held_out = read_retrieval_pairs(config.eval.pairs_file)
    trained_on = [
        tuple(json.loads(line).values())
        for line in Path(config.data.train_file).read_text().splitlines()
    ]
    assert len(held_out) == 25  # a tenth of 100 would be too few for a verdict
    assert len({*held_out, *trained_on}) == len(held_out) + len(trained_on) == 100
    assert (
        "used as pairs, some of them to select a checkpoint (data.pairs='columns'"
        in capsys.readouterr().err
    )
    with pytest.raises(
        DataError, match=r"data.held_out=0\.1 leaves . of 2 rows for training and . for evaluation"
    ):
        _text_settings(pairs[:2], adapt)
    _, own = configuration(adapt, {"eval.metric": "pairs_retrieval", "eval.pairs_file": "mine.tsv"})
    assert _text_settings(pairs, own).keys() == {"data.train_file", "data.pairs", "data.held_out"}
    _, supervised = configuration("supervised_simcse_base", {})
    assert [*_text_settings(pairs, supervised)] == ["data.train_file"]
    assert [*_text_settings(["a", "b"], adapt)] == ["data.train_file"]
    assert _text_settings("docstrings", adapt) == {"data.train_file": "docstrings"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, "runs/adapt"),
        (
            Path("a/{name}_{seed}_{optim.learning_rate}-{model.name_or_path}"),
            "a/adapt_42_0.0003-minilm",
        ),
        ("~/{data.train_file}", "/home/me/documents.txt"),
    ],
)
def test_a_workdir_has_the_values_of_its_run(pattern, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    named = configuration("adapt", {"optim.learning_rate": 3e-4})
    assert named_workdir(pattern, *named) == Path(expected)
    message = r"workdir runs/\{train\.sed\}: unknown key train\.sed.*train\.seed.* Use \{seed\}, \{name\} or"
    with pytest.raises(ConfigError, match=message):
        named_workdir("runs/{train.sed}", *named)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"epochs": 3}, r"'epochs'\. Write overrides=\{'train\.epochs': 3\}$"),
        ({"lr": 1e-5}, r"'lr'\. Write overrides=\{'optim\.learning_rate': 1e-05\}$"),
        ({"zzz": 1}, r"'zzz'$"),
    ],
)
def test_keys_given_as_arguments_are_named(arguments, advice):
    with pytest.raises(ConfigError, match=rf"^train has no argument {advice}"):
        train(SENTENCES, **arguments)
