"""The folders of the package import one another in one direction."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffcse_jax"
# Each room may import from the rooms before it. CONTRIBUTING.md shows the same order with a line on each.
ORDER = [
    "errors",
    "options",
    "io",
    "hosts",
    "batch",
    "models",
    "losses",
    "config",
    "data",
    "run_folder",
    "search",
    "encoder",
    "evaluation",
    "training",
    "export",
    "api",
    "apps",
    "cli",
]


def module_files() -> dict[str, Path]:
    """Return the files of the package by module name."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports() -> set[tuple[str, str]]:
    """Return pairs of a module and one that it imports, also inside functions."""
    files = module_files()
    return {
        (module, f"{node.module}.{name.name}" if f"{node.module}.{name.name}" in files else node.module)
        for module, file in files.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("diffcse_jax")
        for name in node.names
    }


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_modules_import_one_another_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, imported in imports():
        graph.setdefault(module, set()).add(imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_rooms_import_only_from_rooms_before_them():
    place = {name: index for index, name in enumerate(ORDER)}
    upward = {
        (module, imported)
        for module, imported in imports()
        if room(module) in place and room(imported) in place and place[room(module)] < place[room(imported)]
    }
    assert upward == set()


def test_applications_do_not_import_one_another():
    across = {
        (module, imported)
        for module, imported in imports()
        if room(module) == room(imported) == "apps" and imported.split(".")[2:3] not in ([], module.split(".")[2:3])
    }
    assert across == set()
