"""The house: its modules depend on one another in one direction."""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "diffcse_jax"


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
