"""The short form of `make faults`: faults of commands that train nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="faults are injected by a library in C")
def test_faults_end_as_without_them_or_in_one_paragraph(tmp_path):
    command = [sys.executable, "tests/faults.py", "--untrained", "--count", "32", "--workdir", tmp_path / "runs"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_COMPILATION_CACHE_DIR": ""}
    finished = subprocess.run(
        [*command, "--output", tmp_path / "faults.json"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr
    found = json.loads((tmp_path / "faults.json").read_text())
    assert found["faults"] >= 20
    assert set(found["problems"].values()) == {0}
    assert {each["kind"] for each in found["counts"]} >= {"SIGKILL", "Ctrl-C", "disk full", "read-only", "flipped bit"}
