"""The folders of the package import one another in one direction."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each room may import from the rooms before it. CONTRIBUTING.md shows the same order with a line on each.
ORDER = [
    *("errors", "io", "hosts", "batch", "models", "losses", "config", "data", "run_folder", "search"),
    *("encoder", "evaluation", "training", "export", "api", "apps", "cli"),
]


def imports() -> set[tuple[str, str]]:
    """Return pairs of a module and one that it imports, also inside functions."""
    modules = {}
    for file in (ROOT / "diffcse_jax").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {
        (module, f"{node.module}.{name.name}" if f"{node.module}.{name.name}" in modules else node.module)
        for module, file in modules.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("diffcse_jax")
        for name in node.names
    }


def test_no_modules_import_one_another_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, imported in imports():
        graph.setdefault(module, set()).add(imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_rooms_import_only_from_rooms_before_them():
    rooms = {
        (module, imported): [name.split(".")[1:3] for name in (module, imported)] for module, imported in imports()
    }
    inside = {pair: (one, other) for pair, (one, other) in rooms.items() if one and other and one[0] in ORDER}
    order = {name: place for place, name in enumerate(ORDER)}
    upward = {pair for pair, (one, other) in inside.items() if order[one[0]] < order.get(other[0], 0)}
    assert upward == set()
    # Applications do not import one another, but a study runs fine-tunings.
    apps = {
        (one[1], other[1]) for one, other in inside.values() if one[0] == other[0] == "apps" and one[1:] and other[1:]
    }
    assert {(one, other) for one, other in apps if one != other} == {("study", "finetune")}
