"""The notebook runs as it stands, on a small encoder and for fewer steps."""

from pathlib import Path

import nbclient
import nbformat
import pytest
from tiny_model import write_tiny_model
from tiny_run import environment

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "adapt.ipynb"


def text_of(notebook: nbformat.NotebookNode) -> str:
    """What its cells printed."""
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    return "".join(output.get("text", "") for output in outputs)


def test_it_was_executed_in_order_without_an_error():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert len([line for cell in cells for line in cell.source.splitlines() if line]) <= 48
    assert not [
        output for cell in cells for output in cell.outputs if output.output_type == "error"
    ]
    text = text_of(notebook)
    for shown in ("before training", "step 0: mean reciprocal rank", "after"):
        assert shown in text
    assert str(Path.home()) not in text


@pytest.mark.slow
def test_it_runs(tmp_path, minilm_dir, monkeypatch):
    variables = environment(
        tmp_path / "xla", PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = write_tiny_model(tmp_path / "model", minilm_dir, blocks=1)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    smaller = f'settings |= {{"train.steps": 2, "model.name_or_path": "{model}", "data.max_length": 16}}\nencoder, '
    for cell in notebook.cells:
        cell.source = cell.source.replace("\nencoder, ", f"\n{smaller}").replace(
            '"minilm"', f'"{model}", pooler="avg"'
        )
    resources = {"metadata": {"path": str(tmp_path)}}
    patience = {"timeout": 600, "startup_timeout": 300}  # seconds, on a busy machine
    nbclient.NotebookClient(
        notebook, kernel_name="python3", resources=resources, **patience
    ).execute()
    assert "before training" in text_of(notebook)
    assert (tmp_path / "runs/notebook/export/model.safetensors").is_file()
