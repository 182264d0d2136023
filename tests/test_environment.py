"""What a run records about its starts."""

import json
import os
import subprocess
from pathlib import Path

import jax
from tiny_networks import SIMCSE, config_of

from diffcse_jax.storage import environment
from diffcse_jax.storage.environment import commit, record_start


def lines(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "starts.jsonl").read_text().splitlines()]


def test_every_start_is_recorded_and_what_changed_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "start.json").write_text('{"model.name_or_path": "0123"}')
    config = config_of(SIMCSE)
    record_start(tmp_path, config, text="4567", step=0)
    record_start(tmp_path, config, text="4567", step=20)
    assert not capsys.readouterr().err
    first, second = lines(tmp_path)
    assert (first["step"], second["step"]) == (0, 20)
    assert first["digests"] == {"text": "4567", "model.name_or_path": "0123"}
    assert first["configuration"]["train"]["seed"] == 42
    assert first["versions"]["jax"] == jax.__version__
    assert first["devices"]["count"] == jax.device_count()
    assert set(first) == {"time", "host", "versions", "devices", "git", "step", "configuration", "digests"}
    version = environment.importlib.metadata.version
    monkeypatch.setattr(
        environment.importlib.metadata, "version", lambda name: "9.9" if name == "jax" else version(name)
    )
    record_start(tmp_path, config, text="4567", step=30)
    assert f"in their last digits from here on: jax {jax.__version__} then, 9.9 now\n" in capsys.readouterr().err


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    def git(*arguments: str) -> None:
        names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        command = ["git", "-C", tmp_path / "repository", "-c", "commit.gpgsign=false", *arguments]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | names)

    folder = tmp_path / "repository/package"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text("1")
    assert commit(folder) is None
    git("init")
    assert commit(folder) is None  # as an environment inside somebody's repository
    git("add", ".")
    git("commit", "-m", "first")
    found = commit(folder)
    assert len(found["commit"]) == 40
    assert not found["dirty"]
    (folder / "module.py").write_text("2")
    assert commit(folder) == found | {"dirty": True}
