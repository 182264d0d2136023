"""The worked example of docs/extending.md, as a loss of this package and of another one."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import environment, run_settings

import diffcse_jax.losses
from diffcse_jax import train
from diffcse_jax.config import (
    Config,
    configuration,
    installed_losses,
    machine_keys,
    read_overrides,
    resume_keys,
    settings_of_losses,
)
from diffcse_jax.errors import ConfigError
from diffcse_jax.export.card import command_of
from diffcse_jax.losses import Loss
from diffcse_jax.losses.total import checked, named_apart
from diffcse_jax.run_folder.summary import shared_panels

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text(encoding="utf-8")
EXAMPLE, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with the example."""
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    ((group, names),) = tomllib.loads(project)["project"]["entry-points"].items()
    folder = tmp_path / "packages"
    information = folder / "my_losses-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "my_losses.py").write_text(EXAMPLE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    installed_losses.cache_clear()
    yield
    installed_losses.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_loss_of_another_package_has_keys_of_its_own():
    config = Config.from_dict({"spread.weight": 0.5, "contrast.weight": 0.0})
    assert list(config.losses) == ["difference", "spread"]
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again, hash(again)) == (config, hash(config))
    assert config.to_dict()["spread"] == {"weight": 0.5}
    assert read_overrides(["--config.spread.weight=2"]) == {"spread.weight": 2.0}
    with pytest.raises(ConfigError, match=r"^spread\.weight: -1.0 is below 0.0"):
        Config.from_dict({"spread.weight": -1.0})
    with pytest.raises(
        ConfigError, match=r"unknown key spread\.wight; did you mean spread\.weight\?"
    ):
        Config.from_dict({"spread.wight": 1.0})


@pytest.mark.usefixtures("package")
def test_a_broken_package_stops_only_configurations_with_its_keys(monkeypatch, tmp_path):
    (tmp_path / "packages/my_losses.py").write_text("import no_such_module")
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    config = Config.from_dict({"contrast.weight": 0.5})
    assert config.losses
    assert "mesh.data" in resume_keys(config) & machine_keys()
    with pytest.raises(
        ConfigError, match=r"^the loss spread \(.*\) cannot be imported: No module named"
    ):
        Config.from_dict({"spread.weight": 0.5})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "contrast = my_losses:Spread",
            r"^the loss contrast \(my_losses:Spread\): the name 'contrast' is taken by a key of the",
        ),
        ("spread = elsewhere:Spread", "'spread' is taken by the loss my_losses:Spread"),
        ("my-spread = my_losses:Spread", "'my-spread' is not a valid name. Use lower-case letters"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_package_cannot_take_a_name(line, message, tmp_path):
    (entry_points,) = (tmp_path / "packages").rglob("entry_points.txt")
    entry_points.write_text(f"{entry_points.read_text()}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        Config.from_dict({"spread.weight": 0.5})


@pytest.mark.usefixtures("package")
def test_a_loss_given_as_an_object_is_recorded_by_its_class():
    import my_losses

    given = settings_of_losses({"mine": my_losses.Spread(weight=0.5)})
    _, config = configuration({"contrast.weight": 0.0, "difference.weight": 0.0}, given)
    assert config.losses == {"mine": my_losses.Spread(weight=0.5)}
    recorded = json.loads(json.dumps(config.to_dict()))
    assert recorded["mine"] == {"class": "my_losses:Spread", "weight": 0.5}
    assert Config.from_dict(recorded) == config
    gone = recorded | {"mine": {"class": "gone:Spread", "weight": 0.5, "other": 1}}
    with pytest.raises(
        ConfigError, match=r"the loss mine of the class gone:Spread, which is not found here"
    ):
        Config.from_dict(gone)
    assert Config.from_dict(gone, for_reading=True).losses["mine"].weight == 0.5
    assert command_of(config).endswith("# from Python, with `losses` for mine")
    with pytest.raises(ConfigError, match=r"^losses\['contrast'\]: the name 'contrast' is taken"):
        settings_of_losses({"contrast": my_losses.Spread()})
    assert settings_of_losses({"spread": my_losses.Spread(weight=0.5)}) == {"spread.weight": 0.5}
    with pytest.raises(ConfigError, match=r"losses\['mine'\] is off: its weight is 0"):
        settings_of_losses({"mine": my_losses.Spread()})
    with pytest.raises(ConfigError, match=r"^mine\.weight: -1.0 is below 0.0"):
        settings_of_losses({"mine": my_losses.Spread(weight=-1.0)})
    shortened = settings_of_losses({"contrast_8": my_losses.Spread(weight=0.1)})
    with pytest.raises(ConfigError, match="the metric loss_contrast_8 would be that of contrast"):
        configuration("adapt", {"matryoshka.sizes": (8,)} | shortened)
    with pytest.raises(ConfigError, match=r"expected an instance .* got <class"):
        settings_of_losses({"mine": my_losses.Spread})

    @dataclasses.dataclass(frozen=True)
    class Local(my_losses.Spread):
        pass

    with pytest.raises(ConfigError, match=r"<locals>.Local of a loss cannot be found by its name"):
        settings_of_losses({"mine": Local(weight=1.0)})
    with pytest.raises(ConfigError, match="'spread' is taken by an installed loss"):
        settings_of_losses({"spread": Local(weight=1.0)})
    my_losses.Needy = type("Needy", (my_losses.Spread,), {"needs": frozenset({"vectors"})})
    with pytest.raises(ConfigError, match="mine: the loss needs vectors, which is unknown"):
        Config.from_dict({"mine.class": "my_losses:Needy", "mine.weight": 1.0})
    my_losses.Plain = dataclasses.make_dataclass(
        "Plain", [("weight", float, 1.0)], bases=(Loss,), frozen=True
    )
    with pytest.raises(
        ConfigError, match=r"my_losses:Plain\): declare weight with diffcse_jax.options.option"
    ):
        Config.from_dict({"mine.class": "my_losses:Plain"})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.float32(1), "the loss mine must return two things: its value and a dict of metrics"),
        (
            (np.ones(3), {}),
            r"the loss mine: its value has the shape \(3,\), but must be one number",
        ),
        ((1.0, {"norm": np.ones(3)}), r"the loss mine: its metric norm has the shape \(3,\)"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(returned, message):
    with pytest.raises(ConfigError, match=message):
        checked("mine", returned)


def test_metrics_of_one_name_are_all_kept():
    a, b, c, d = map(jnp.asarray, range(4))
    own = {"mine": {"norm": a, "share": b}, "other": {"norm": c, "grad_norm": d}}
    kept = named_apart(own, taken=("loss", "grad_norm"))
    assert kept == {"mine.norm": a, "share": b, "other.norm": c, "other.grad_norm": d}
    panels = {"norms": ("norm",)}
    shared = shared_panels({"mine": panels, "other": panels}, kept)
    assert shared == {"norms": ("mine.norm", "other.norm")}
    assert shared_panels({"mine": panels}, {"norm"}) == panels


@pytest.mark.parametrize("key", ["spread.weight", "installed.weight", "installed"])
def test_without_the_package_its_keys_are_unknown(key):
    with pytest.raises(ConfigError, match=f"unknown key {key.partition('.')[0]}"):
        Config.from_dict({key: 1.0})


def test_no_file_of_losses_replaces_a_function():
    """A module becomes an attribute of its package, in place of a function with its name."""
    names = {
        name
        for name, value in vars(diffcse_jax.losses).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert "Loss" in names
    assert [name for name in names if name == name.lower()] == []


TRAINS = """
import pathlib, sys
import diffcse_jax
assert pathlib.Path(diffcse_jax.__file__).parents[1] == pathlib.Path(sys.argv[1])
diffcse_jax.train(None, "diffcse_minilm", workdir="run", overrides=%r)
"""


@pytest.mark.slow
def test_the_worked_example_trains_in_this_package(tmp_path, minilm_dir):
    package = tmp_path / "diffcse_jax"
    shutil.copytree(
        Path(diffcse_jax.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (lines,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    imported, field = lines.strip().split("\n\n")
    configuration = package / "config/__init__.py"
    text = configuration.read_text()
    # Also by the name of a function that the package itself calls.
    for name in ("spread", "uniformity"):
        (package / f"losses/{name}.py").write_text(EXAMPLE)
        line = field.replace("spread", name)
        text = text.replace("    # Losses from elsewhere", f"{line}\n    # Losses from elsewhere")
        assert line in text
    beside = "from diffcse_jax.losses.finetune"
    configuration.write_text(text.replace(beside, f"{imported}\n{beside}"))
    groups = {name: {"weight": 0.0} for name in ("contrast", "difference")}
    groups |= {"train": {"steps": 1}, "eval": {"every": 0}}
    settings = run_settings(tmp_path, minilm_dir, **groups)
    settings |= {"spread.weight": 1.0, "uniformity.weight": 0.5}
    result = subprocess.run(
        [sys.executable, "-c", TRAINS % settings, str(tmp_path)],
        cwd=tmp_path,
        env=environment(tmp_path / "compiled", PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    (row,) = (row for row in rows if "loss" in row)
    assert row["loss_spread"] == row["loss_uniformity"] == pytest.approx(row["uniformity"])
    assert row["loss"] == pytest.approx(1.5 * row["uniformity"])


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_the_worked_example_trains(tmp_path, minilm_dir, monkeypatch):
    # PyTorch's check of the export
    monkeypatch.setattr("diffcse_jax.export._installed", lambda module: False)
    import my_losses

    groups = {"contrast": {"weight": 0.0}, "difference": {"weight": 0.0}}
    groups |= {
        "train": {"steps": 3, "chunk_size": 4, "packing": "off"},
        "eval": {"every": 0},
        "mesh": {"data": 1},
    }
    settings = run_settings(tmp_path, minilm_dir, **groups)
    losses = {"mine": my_losses.Spread(weight=1.0)}
    train(None, "diffcse_minilm", workdir=tmp_path / "run", overrides=settings, losses=losses)
    # resumes
    trained = train(
        None, "diffcse_minilm", workdir=tmp_path / "run", overrides=settings, losses=losses
    )
    steps = [row for row in trained.history if "loss" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["loss"] == row["loss_mine"] == pytest.approx(row["uniformity"])
        assert row["grad_norm"] > 0
    assert "1 mine" in (tmp_path / "run/export/README.md").read_text()
    assert (tmp_path / "run/report/curves.png").is_file()
