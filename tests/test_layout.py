"""The house: its modules depend on one another in one direction."""

import ast
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffcse_jax"


def module_files() -> dict[str, Path]:
    """The files of the package by module name."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside functions count, too: they delay a circle and do not break it."""
    files = module_files()
    imported = {
        module: {
            f"{node.module}.{name.name}" if f"{node.module}.{name.name}" in files else node.module
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        for module, file in files.items()
    }
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


def test_the_picture_of_the_house_has_its_folders_and_no_file_that_is_gone():
    page = (ROOT / "docs/development.md").read_text(encoding="utf-8")
    picture = re.search(r"## The house.*?```\n(.*?)```", page, re.DOTALL)[1]
    folders = {file.parent.name for file in PACKAGE.rglob("__init__.py")}
    assert folders - set(re.findall(r"(\w+)/", picture)) == set()
    files = {file.name for folder in (ROOT, PACKAGE) for file in folder.glob("*.py")}
    files |= {file.name for file in PACKAGE.rglob("*.py")}
    assert set(re.findall(r"\w+\.py", picture)) - files == set()
