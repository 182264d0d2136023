"""The worked example of docs/extending.md: an objective is added in one file, and nothing else is touched."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import environment, overrides, run_settings

ROOT = Path(__file__).parents[1]
# `python train.py` in a package that has one module more.
SCRIPT = """
import sys
import diffcse_jax.objectives
diffcse_jax.objectives.__path__.append(sys.argv.pop(1))
from diffcse_jax.commands.train import main
main()
"""


@pytest.mark.slow
def test_the_worked_example_trains(tmp_path, minilm_dir):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line and not line.startswith('"""')]) <= 20
    (tmp_path / "objectives").mkdir()
    (tmp_path / "objectives" / "uniformity.py").write_text(example)
    settings = run_settings(
        tmp_path,
        minilm_dir,
        contrast={"weight": 0.0},
        difference={"weight": 0.0},
        train={"steps": 6, "chunk_size": 4},
        eval={"every": 0},
    )
    arguments = [*overrides(settings), "--config.uniformity.weight=1.0"]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "objectives", "--config", "configs/diffcse_minilm.py",
         "--workdir", tmp_path / "run", *arguments],
        cwd=ROOT, env=environment(tmp_path / "xla"), capture_output=True, text=True, timeout=300,
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
