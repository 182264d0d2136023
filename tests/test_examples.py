"""The examples run as they stand, on a small encoder and for fewer steps."""

import runpy
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from tiny_model import write_tiny_model

from diffcse_jax import SentenceEncoder

EXAMPLES = Path(__file__).parents[1] / "examples"
# A warning does not end a notebook.
pytestmark = pytest.mark.filterwarnings("default")


def text_of(notebook: nbformat.NotebookNode) -> str:
    """What its cells printed."""
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize(
    ("name", "shown"),
    {
        "adapt": ("before training", "step 0: mean reciprocal rank", "after"),
        "paper_row": ("SimCSE ", "DiffCSE ", "before, "),
        "vector_store": ("documents, such as ", "TimeoutExpired: subprocess.TimeoutExpired, "),
    }.items(),
)
def test_it_was_executed_in_order_without_an_error(name, shown):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert len([line for cell in cells for line in cell.source.splitlines() if line]) <= 48
    assert not [
        output for cell in cells for output in cell.outputs if output.output_type == "error"
    ]
    text = text_of(notebook)
    assert all(part in text for part in shown)
    assert str(Path.home()) not in text


@pytest.fixture
def run_cells(monkeypatch) -> Callable[[str, dict[str, str]], dict[str, Any]]:
    """Runs a notebook's cells here, which takes less than a kernel, and gives its variables."""

    def run(name: str, replaced: dict[str, str]) -> dict[str, Any]:
        cells = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        for old, new in replaced.items():
            assert old in code
            code = code.replace(old, new)
        # Where a loss of the notebook is found by its name.
        notebook = types.ModuleType(f"notebook_{name}")
        monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
        exec(code, vars(notebook))
        return vars(notebook)

    return run


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """Return an empty folder, in which the test works; exports are not compared with PyTorch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("diffcse_jax.export._installed", lambda module: False)
    return tmp_path


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory, minilm_dir) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", minilm_dir, blocks=1)


@pytest.mark.slow
def test_documents_are_adapted(run_cells, tiny_model, workspace):
    smaller = (
        f'settings |= {{"train.steps": 2, "model.name_or_path": "{tiny_model}", '
        '"data.max_length": 16, "mesh.data": 1}\nencoder, '
    )
    run_cells("adapt", {"\nencoder, ": f"\n{smaller}", '"minilm"': f'"{tiny_model}", pooler="avg"'})
    assert (workspace / "runs/notebook/export/model.safetensors").is_file()


@pytest.mark.slow
def test_a_row_of_a_paper_runs(run_cells, tiny_model, workspace):
    model = f'settings = {{"model.name_or_path": "{tiny_model}", "mesh.data": 1, "train.packing": "off", "eval.guard": False,'
    smaller = {
        "settings = {": model,
        ": 40,": ": 2,",
        ": 20,": ": 2,",
        '"train.batch_size": 32,': '"train.batch_size": 8,',
        '"SimCSE": {"difference.weight": 0.0}, ': "",
    }
    runs = run_cells("paper_row", smaller)["runs"]
    assert [*runs] == ["DiffCSE"]  # the other row takes as long and no other way
    assert runs["DiffCSE"].verdict


def test_a_vector_store_is_searched_beside_an_index(run_cells, tiny_model):
    pytest.importorskip("faiss")
    names = run_cells("vector_store", {'"minilm"': f'"{tiny_model}", pooler="avg"'})
    assert names["by_words"]("BadZipFile", 1) == ["zipfile.BadZipFile"]
    (name,) = names["by_meaning"](names["texts"][3], 1)
    assert name == names["ids"][3]
    assert "shutil.disk_usage" not in names["search"]("shutil.disk_usage")


def test_the_service_answers(tiny_model, tmp_path, monkeypatch):
    """`scripts/release_check.py` asks three workers."""
    pytest.importorskip("fastapi")
    load = partial(SentenceEncoder.from_pretrained, pooler="avg")
    monkeypatch.setattr(SentenceEncoder, "from_pretrained", load)
    encoder = load(tiny_model)
    encoder.build_index(["a man plays the guitar", "nobody sings"])
    encoder.save_index(tmp_path / "index")
    monkeypatch.setenv("DIFFCSE_INDEX", str(tmp_path / "index"))
    monkeypatch.setenv("DIFFCSE_MODEL", str(tiny_model))
    answer = runpy.run_path(str(EXAMPLES / "service.py"))["search"]("nobody sings", 1)
    assert [hit.snippet for hit in answer.hits] == ["nobody sings"]
