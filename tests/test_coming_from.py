"""The pages for people who come from sentence-transformers or FlaxBertModel.

Both sides of their tables run.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from journeys.pages import blocks_of

from diffcse_jax.encoder import _THEIR_NAMES

DOCS = Path(__file__).parents[1] / "docs"
SENTENCE_TRANSFORMERS = "from_sentence_transformers.md"
FLAX = "from_flax.md"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, with code as it is run."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    _, _, *rows = (
        line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")
    )
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]


def names_of(page: str, folder: Path) -> dict[str, Any]:
    """Return the variables that the first block of a page sets, with the model in a folder."""
    names: dict[str, Any] = {}
    exec(blocks_of(f"docs/{page}")[0].text, names)
    return names | {"name": str(folder)}


def run(code: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its expression, or of what it assigns."""
    if assigned := re.match(r"(\w+) = ", code):
        exec(code, names)
        return names[assigned[1]]
    return eval(code, names)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_both_sides_of_the_ten_tasks_of_sentence_transformers_agree(minilm_dir):
    rows = rows_of(SENTENCE_TRANSFORMERS, "Ten tasks")
    assert len(rows) == 10
    theirs, ours = (
        names_of(SENTENCE_TRANSFORMERS, minilm_dir),
        names_of(SENTENCE_TRANSFORMERS, minilm_dir),
    )
    for task, their_code, our_code in rows:
        their_result, our_result = run(their_code, theirs), run(our_code, ours)
        if task != "load":
            np.testing.assert_allclose(
                np.asarray(our_result), np.asarray(their_result), atol=1e-5, err_msg=task
            )
    assert (
        ours["model"].get_sentence_embedding_dimension()
        == theirs["model"].get_embedding_dimension()
    )


def test_the_page_names_the_arguments_of_sentence_transformers():
    cells = [
        cell for row in rows_of(SENTENCE_TRANSFORMERS, "Arguments of `encode`") for cell in row[:1]
    ]
    named = set(re.findall(r"\w+", " ".join(cells)))
    others = {"batch_size", "prompt", "prompt_name", "normalize_embeddings", "show_progress_bar"}
    assert named == _THEIR_NAMES.keys() | others


def test_accepted_values_of_the_page_are_those_of_the_code():
    for argument, accepted, _ in rows_of(SENTENCE_TRANSFORMERS, "Arguments of `encode`"):
        for name in re.findall(r"\w+", argument):
            if name in _THEIR_NAMES:
                assert _THEIR_NAMES[name][0] == eval(accepted), name


@pytest.mark.slow
def test_our_side_of_the_ten_tasks_of_flax_runs_and_agrees_with_pytorch(minilm_dir):
    rows = rows_of(FLAX, "Ten tasks")
    assert len(rows) == 10
    names = names_of(FLAX, minilm_dir)
    results = {task: run(our_code, names) for task, _, our_code in rows}
    reference = transformers.BertModel.from_pretrained(minilm_dir)
    inputs = {
        name: torch.from_numpy(np.asarray(values)) for name, values in names["inputs"].items()
    }
    with torch.no_grad():
        computed = reference(**inputs, output_hidden_states=True)
    real = np.asarray(names["inputs"]["attention_mask"], bool)
    assert results["read a size"] == reference.config.hidden_size
    for ours, theirs in zip(results["all hidden states"], computed.hidden_states, strict=True):
        np.testing.assert_allclose(np.asarray(ours)[real], theirs.numpy()[real], atol=1e-4)
    np.testing.assert_array_equal(results["last hidden states"], results["all hidden states"][-1])
    assert results["compute in bfloat16"].dtype.name == "bfloat16"
    assert not np.allclose(results["apply dropout"], results["last hidden states"], atol=0.1)
    weights = results["name arrays for PyTorch"]
    np.testing.assert_array_equal(
        weights["embeddings.word_embeddings.weight"],
        reference.embeddings.word_embeddings.weight.detach().numpy(),
    )
    assert "blocks.0.attention.query.kernel" in results["get parameters"]
