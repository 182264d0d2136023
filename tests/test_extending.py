"""The worked example of docs/extending.md, as a loss of another package."""

import dataclasses
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from tiny_run import run_settings

from diffcse_jax import train
from diffcse_jax.config import (
    Config,
    configuration,
    installed_losses,
    read_overrides,
    settings_of_losses,
)
from diffcse_jax.errors import ConfigError
from diffcse_jax.export.card import command_of
from diffcse_jax.losses import Loss

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with the example."""
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    ((group, names),) = tomllib.loads(project)["project"]["entry-points"].items()
    folder = tmp_path / "packages"
    information = folder / "my_losses-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "my_losses.py").write_text(example)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    installed_losses.cache_clear()
    yield
    installed_losses.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_loss_of_another_package_has_keys_of_its_own():
    config = Config.from_dict({"uniformity.weight": 0.5, "contrast.weight": 0.0})
    assert list(config.losses) == ["difference", "uniformity"]
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again, hash(again)) == (config, hash(config))
    assert config.to_dict()["uniformity"] == {"weight": 0.5}
    assert read_overrides(["--config.uniformity.weight=2"]) == {"uniformity.weight": 2.0}
    with pytest.raises(ConfigError, match=r"^uniformity\.weight: -1.0 is below 0.0"):
        Config.from_dict({"uniformity.weight": -1.0})
    with pytest.raises(
        ConfigError, match=r"unknown key uniformity\.wight; did you mean uniformity\.weight\?"
    ):
        Config.from_dict({"uniformity.wight": 1.0})


@pytest.mark.usefixtures("package")
def test_a_broken_package_stops_only_configurations_with_its_keys(monkeypatch, tmp_path):
    (tmp_path / "packages/my_losses.py").write_text("import no_such_module")
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    assert Config.from_dict({"contrast.weight": 0.5}).losses
    with pytest.raises(
        ConfigError, match=r"^the loss uniformity \(.*\) cannot be imported: No module named"
    ):
        Config.from_dict({"uniformity.weight": 0.5})


@pytest.mark.usefixtures("package")
def test_a_loss_given_as_an_object_is_recorded_by_its_class():
    import my_losses

    given = settings_of_losses({"mine": my_losses.Uniformity(weight=0.5)})
    _, config = configuration({"contrast.weight": 0.0, "difference.weight": 0.0}, given)
    assert config.losses == {"mine": my_losses.Uniformity(weight=0.5)}
    recorded = json.loads(json.dumps(config.to_dict()))
    assert recorded["mine"] == {"class": "my_losses:Uniformity", "weight": 0.5}
    assert Config.from_dict(recorded) == config
    gone = recorded | {"mine": {"class": "gone:Uniformity", "weight": 0.5, "other": 1}}
    with pytest.raises(
        ConfigError, match=r"the loss mine of the class gone:Uniformity, which is not found here"
    ):
        Config.from_dict(gone)
    assert Config.from_dict(gone, for_reading=True).losses["mine"].weight == 0.5
    assert command_of(config).endswith("# from Python, with `losses` for mine")
    with pytest.raises(ConfigError, match="'contrast' is taken"):
        settings_of_losses({"contrast": my_losses.Uniformity()})
    with pytest.raises(ConfigError, match=r"losses\['mine'\] is off: its weight is 0"):
        settings_of_losses({"mine": my_losses.Uniformity()})
    with pytest.raises(ConfigError, match=r"expected an instance .* got <class"):
        settings_of_losses({"mine": my_losses.Uniformity})

    @dataclasses.dataclass(frozen=True)
    class Local(my_losses.Uniformity):
        pass

    with pytest.raises(ConfigError, match=r"<locals>.Local of a loss cannot be found by its name"):
        settings_of_losses({"mine": Local(weight=1.0)})
    my_losses.Plain = dataclasses.make_dataclass(
        "Plain", [("weight", float, 1.0)], bases=(Loss,), frozen=True
    )
    with pytest.raises(
        ConfigError, match=r"my_losses:Plain\): declare weight with diffcse_jax.losses.option"
    ):
        Config.from_dict({"mine.class": "my_losses:Plain"})


@pytest.mark.parametrize("key", ["uniformity.weight", "installed.weight", "installed"])
def test_without_the_package_its_keys_are_unknown(key):
    with pytest.raises(ConfigError, match=f"unknown key {key.partition('.')[0]}"):
        Config.from_dict({key: 1.0})


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
    losses = {"mine": my_losses.Uniformity(weight=1.0)}
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
