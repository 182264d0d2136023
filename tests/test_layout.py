"""The folders of the package import one another in one direction."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

from tiny_model import write_smallest_model

ROOT = Path(__file__).parents[1]
# Each room may import from the rooms before it. CONTRIBUTING.md shows the same order with a line on
# each.
ORDER = [
    *(
        "version",
        "errors",
        "options",
        "io",
        "documents",
        "hosts",
        "batch",
        "models",
        "losses",
        "config",
        "data",
        "run_folder",
        "search",
        "commands",
    ),
    *("encoder", "evaluation", "training", "export", "api", "apps", "cli"),
]


def imports(*folders: str) -> set[tuple[str, str]]:
    """Return pairs of a module and one that it imports, also inside functions and by its name in a string."""
    modules = {}
    folders = folders or ("diffcse_jax",)
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found = set()
    for module, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in _named(node):
                known = name if name in modules else name.rpartition(".")[0]
                if known in modules:
                    found.add((module, known))
    return found


def _named(node: ast.AST) -> list[str]:
    """Return the full names that a node imports, or names as `module:function`."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{name.name}" for name in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"^(diffcse_jax(?:\.\w+)+)(?::\w+)?$", node.value)
    return []


def test_no_modules_import_one_another_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, imported in imports("diffcse_jax", "benchmarks"):
        graph.setdefault(module, set()).add(imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    package = {
        name for module in graph if module.startswith("diffcse_jax") for name in graph[module]
    }
    assert [name for name in package if name.startswith("benchmarks")] == []


def test_rooms_import_only_from_rooms_before_them():
    rooms = {
        (module, imported): [name.split(".")[1:3] for name in (module, imported)]
        for module, imported in imports()
    }
    inside = {
        pair: (one, other)
        for pair, (one, other) in rooms.items()
        if one and other and one[0] in ORDER
    }
    # The package itself gives users all rooms, so no room imports it.
    assert {module for module, (one, other) in rooms.items() if one and not other} == set()
    order = {name: place for place, name in enumerate(ORDER)}
    upward = {
        pair for pair, (one, other) in inside.items() if order[one[0]] < order.get(other[0], 0)
    }
    assert upward == set()
    # Applications do not import one another, but a study runs fine-tunings.
    apps = {
        (one[1], other[1])
        for one, other in inside.values()
        if one[0] == other[0] == "apps" and one[1:] and other[1:]
    }
    assert {(one, other) for one, other in apps if one != other} == {("study", "finetune")}


def test_documents_know_only_errors_and_files():
    below = {
        imported
        for module, imported in imports()
        if module.startswith("diffcse_jax.documents")
        and not imported.startswith("diffcse_jax.documents")
    }
    assert below == {"diffcse_jax.errors", "diffcse_jax.io"}
    loaded = loaded_by("from diffcse_jax.documents import open")
    assert {"jax", "flax", "diffcse_jax.config"}.isdisjoint(loaded)


def test_documents_have_one_door():
    """Which reader opens a file is decided in `documents/open.py` alone."""
    readers = (
        "documents.files",
        "documents.tables.arrow",
        "documents.tables.delimited",
        "documents.tables.json",
        "documents.tables.records",
    )
    from_outside = {
        (module, imported)
        for module, imported in imports()
        if not module.startswith("diffcse_jax.documents")
        and imported.removeprefix("diffcse_jax.").startswith(readers)
    }
    assert from_outside == set()


# Only training needs these. Flax imports optax, but no file that encodes does.
OF_TRAINING = (
    "orbax",
    "grain",
    "tensorstore",
    "scipy.stats",
    "diffcse_jax.losses",
    "diffcse_jax.config",
)
# Seconds to import, and needed for few folders or texts.
SELDOM = (
    *("transformers", "torch", "pandas", "scipy", "huggingface_hub", "jinja2"),
    "sentence_transformers",
)
SEARCHES = """
from diffcse_jax import SentenceEncoder
from diffcse_jax.apps import embed, search
SentenceEncoder.from_pretrained({folder!r}, pooler="avg").encode(["a cat"])
"""


def loaded_by(statements: str) -> list[str]:
    """Return the names of the modules that a new process has after some statements."""
    result = subprocess.run(
        [sys.executable, "-c", f"{statements}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


def test_encoding_and_searching_import_nothing_of_training(tmp_path):
    folder = write_smallest_model(tmp_path, ["a", "cat"])
    loaded = loaded_by(SEARCHES.format(folder=str(folder)))
    assert [name for name in loaded if name.startswith(OF_TRAINING)] == []
    assert {*SELDOM}.isdisjoint(loaded)
    ours = {name for name in loaded if name.startswith("diffcse_jax.")}
    assert "diffcse_jax.encoder" in ours
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in ours]
    assert [
        file
        for file in files
        if file.is_file() and "import optax" in file.read_text(encoding="utf-8")
    ] == []


def test_the_train_step_imports_nothing_that_saves_it():
    loaded = loaded_by("import diffcse_jax.training.step")
    assert [name for name in loaded if name.startswith(("orbax", "tensorstore"))] == []
