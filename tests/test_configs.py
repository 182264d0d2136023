import ast
import re
import runpy
from pathlib import Path

import pytest

from diffcse_jax.config import Config, default_config

FOLDER = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("file", sorted([*FOLDER.glob("*.py"), *FOLDER.glob("base/*.py")]), ids=lambda file: file.stem)
def test_a_shipped_configuration_is_valid_and_gives_its_command(file):
    config = Config.from_dict(runpy.run_path(str(file))["get_config"]().to_dict())
    # The published DiffCSE run is the default itself.
    assert (config == Config.from_dict(default_config().to_dict())) == (file.stem == "diffcse_base")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    files = re.findall(r"python train\.py --config configs/(\S+)\.py\b", docstring)
    names = re.findall(r"diffcse \w+ --config (\S+)", docstring)
    assert {*files, *names} == {file.relative_to(FOLDER).with_suffix("").as_posix()}
