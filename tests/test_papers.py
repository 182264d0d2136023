"""The table of the papers' rows names every study and every configuration of a paper, and its commands are valid."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from diffcse_jax.commands.evaluate import parse_arguments
from diffcse_jax.config import Config, read_overrides, shipped_config
from diffcse_jax.evaluation.tasks import expand_groups

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
OF_NO_PAPER = {"quickstart", "diffcse_minilm", "adapt"}


def commands(script: str) -> list[str]:
    """The arguments of a script's commands on the page, each once."""
    found = dict.fromkeys(re.findall(rf"`python {re.escape(script)} ([^`]*)`", PAGE))
    return [arguments for arguments in found if "NAME.py" not in arguments]


@pytest.mark.parametrize(
    ("folder", "pattern", "elsewhere"), [("studies", r"`studies/(\w+)\.py`", set()), ("", r"`(\w+)\.py`", OF_NO_PAPER)]
)
def test_every_file_is_named(folder, pattern, elsewhere):
    shipped = {file.stem for file in (ROOT / "configs" / folder).glob("*.py")}
    assert set(re.findall(pattern, PAGE)) - {"eval"} == shipped - elsewhere


@pytest.mark.parametrize("arguments", commands("train.py"))
def test_training_commands_are_valid(arguments):
    option, file, *overrides = shlex.split(arguments)
    assert option == "--config"
    base = shipped_config(Path(file).stem)
    values = base.to_dict()
    for key, value in read_overrides(overrides).items():
        group, _, leaf = key.rpartition(".")
        values[group][leaf] = value
    assert Config.from_dict(values) != Config.from_dict(base.to_dict())


@pytest.mark.parametrize("arguments", commands("eval.py"))
def test_evaluation_commands_are_valid(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval.py", *shlex.split(arguments)])
    options = parse_arguments()
    assert expand_groups(options.tasks.split(","), options.mode)


def test_there_are_commands():
    assert len(commands("train.py")) > 3
    assert len(commands("eval.py")) > 3
