"""The worked example of docs/extending.md, as a loss of another package."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tiny_run import environment, overrides, run_settings

from diffcse_jax.config import Config, installed_losses, read_overrides
from diffcse_jax.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder that holds an installed package with the example."""
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    ((group, names),) = tomllib.loads(project)["project"]["entry-points"].items()
    folder = tmp_path / "packages"
    (folder / "my_losses-1.0.dist-info").mkdir(parents=True)
    (folder / "my_losses.py").write_text(example)
    (folder / "my_losses-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (folder / "my_losses-1.0.dist-info/entry_points.txt").write_text("\n".join(lines))
    return folder


def test_a_loss_of_another_package_has_keys_of_its_own(package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    installed_losses.cache_clear()
    try:
        config = Config.from_dict({"uniformity.weight": 0.5, "contrast.weight": 0.0})
        assert list(config.losses) == ["difference", "uniformity"]
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert hash(Config.from_dict(config.to_dict())) == hash(config)
        assert config.to_dict()["uniformity"] == {"weight": 0.5}
        assert read_overrides(["--config.uniformity.weight=2"]) == {"uniformity.weight": 2.0}
        with pytest.raises(ConfigError, match=r"^uniformity\.weight: -1.0 is below 0.0"):
            Config.from_dict({"uniformity.weight": -1.0})
        with pytest.raises(ConfigError, match=r"unknown key uniformity\.wight; did you mean uniformity\.weight\?"):
            Config.from_dict({"uniformity.wight": 1.0})
    finally:
        installed_losses.cache_clear()


@pytest.mark.parametrize("key", ["uniformity.weight", "installed.weight", "installed"])
def test_without_the_package_its_keys_are_unknown(key):
    with pytest.raises(ConfigError, match=f"unknown key {key.partition('.')[0]}"):
        Config.from_dict({key: 1.0})


@pytest.mark.slow
def test_the_worked_example_trains(package, tmp_path, minilm_dir):
    settings = run_settings(
        tmp_path,
        minilm_dir,
        contrast={"weight": 0.0},
        difference={"weight": 0.0},
        train={"steps": 6, "chunk_size": 4},
        eval={"every": 0},
    )
    run = subprocess.run(
        [sys.executable, "train.py", "--config", "configs/diffcse_minilm.py", "--workdir", tmp_path / "run",
         *overrides(settings), "--config.uniformity.weight=1.0"],
        cwd=ROOT, env=environment(tmp_path / "xla", PYTHONPATH=f"{ROOT}:{package}"),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 6
    for row in steps:
        assert row["loss"] == row["loss_uniformity"] == pytest.approx(row["uniformity"])
        assert row["grad_norm"] > 0
    assert "1 uniformity" in (tmp_path / "run/export/README.md").read_text()
    assert (tmp_path / "run/report/curves.png").is_file()
