import ast
import re
import runpy
from pathlib import Path

import pytest

from diffcse_jax.config import Config, default_config

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "configs").glob("*.py"), *(ROOT / "configs/base").glob("*.py")])


def test_there_are_configs():
    assert ROOT / "configs" / "quickstart.py" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_is_valid_and_changes_something(file):
    config = Config.from_dict(runpy.run_path(str(file))["get_config"]().to_dict())
    # The published DiffCSE run is the default itself.
    assert (config == Config.from_dict(default_config().to_dict())) == (file.stem == "diffcse_base")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_docstring_gives_the_command(file):
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring
    files = re.findall(r"python train\.py --config configs/(\S+)\.py\b", docstring)
    names = re.findall(r"diffcse \w+ --config (\S+)", docstring)
    assert {*files, *names} == {file.relative_to(ROOT / "configs").with_suffix("").as_posix()}
