"""The pages for people who come from sentence-transformers or FlaxBertModel.

Both sides of their tables run.
"""

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from journeys.pages import blocks_of
from sentence_transformers import SentenceTransformer
from tiny_model import write_smallest_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.batch import TokenRows
from diffcse_jax.errors import ConfigError
from diffcse_jax.models.their_names import ATTRIBUTES, OF_ENCODE, OF_LOADING

DOCS = Path(__file__).parents[1] / "docs"
SENTENCE_TRANSFORMERS = "from_sentence_transformers.md"
FLAX = "from_flax.md"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, with code as it is run."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    _, _, *rows = (
        line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")
    )
    cells = [row.strip("|").split(" | ") for row in rows]
    return [[cell.strip().strip("`").replace("\\|", "|") for cell in row] for row in cells]


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
def test_both_sides_of_the_tasks_of_sentence_transformers_agree(minilm_dir):
    rows = rows_of(SENTENCE_TRANSFORMERS, "Eleven tasks")
    assert len(rows) == 11
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
    for code in ("get_embedding_dimension()", "get_sentence_embedding_dimension()"):
        assert run(f"model.{code}", ours) == theirs["model"].get_embedding_dimension()
    long = "a man plays the guitar " * 50
    for names in (theirs, ours):
        names["model"].max_seq_length = 16
    np.testing.assert_allclose(ours["model"].encode(long), theirs["model"].encode(long), atol=1e-5)
    prompts = {"prompts": {"a": "query: "}, "default_prompt_name": "a"}
    theirs["model"] = SentenceTransformer(str(minilm_dir), device="cpu", **prompts)
    ours["model"] = SentenceEncoder.from_pretrained(minilm_dir, **prompts)
    np.testing.assert_allclose(
        ours["model"].encode("a man"), theirs["model"].encode("a man"), atol=1e-5
    )


TABLES = {"Arguments of `encode`": OF_ENCODE, "Arguments of `SentenceTransformer`": OF_LOADING}


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_names_the_arguments_and_the_values_that_the_code_accepts(heading):
    known = TABLES[heading]
    listed = set()
    for argument, accepted, _ in rows_of(SENTENCE_TRANSFORMERS, heading):
        for name in re.findall(r"\w+", argument):
            listed.add(name)
            if name in known:
                assert known[name][0] == eval(accepted), name
    ours = SentenceEncoder.encode if known is OF_ENCODE else SentenceEncoder.from_pretrained
    accepted = {*inspect.signature(ours).parameters, "normalize_embeddings", "show_progress_bar"}
    assert known.keys() <= listed <= known.keys() | accepted
    theirs = SentenceTransformer.encode if known is OF_ENCODE else SentenceTransformer
    first = {"self", "inputs", "kwargs", "model_name_or_path"}
    assert {*inspect.signature(theirs).parameters} - first <= listed | {"tokenizer_kwargs"}


def test_every_public_name_of_sentence_transformers_works_or_names_ours():
    of_modules = {*dir(torch.nn.Module)}
    public = {name for name in dir(SentenceTransformer) if name[0] != "_" and name.islower()}
    constants = {"default_huggingface_organization", "model_card_data_class", "model_type"}
    ours = {*dir(SentenceEncoder), "tokenizer", "dtype", "config"}
    assert public - of_modules - constants <= ATTRIBUTES.keys() | ours
    assert not ATTRIBUTES.keys() & ours
    listed = [row[0] for row in rows_of(SENTENCE_TRANSFORMERS, "Other names")]
    assert set(re.findall(r"\w+", " ".join(listed))) <= ATTRIBUTES.keys()


def test_names_without_a_meaning_here_say_what_to_use(tmp_path):
    encoder = SentenceEncoder.from_pretrained(write_smallest_model(tmp_path, ["a"]), pooler="avg")
    with pytest.raises(AttributeError, match=r"no attribute 'save_pretrained': .* copy it"):
        encoder.save_pretrained("folder")
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        encoder.nothing()
    with pytest.raises(
        ConfigError, match=r"loaded with SentenceEncoder.from_pretrained\('minilm'\)"
    ):
        SentenceEncoder("minilm")
    with pytest.raises(ConfigError, match="trust_remote_code=True: code in a folder never runs"):
        SentenceEncoder.from_pretrained(tmp_path, trust_remote_code=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        SentenceEncoder.from_pretrained(tmp_path, colour=1)
    with pytest.raises(ConfigError, match="has no such prompt"):
        SentenceEncoder.from_pretrained(tmp_path, pooler="avg", default_prompt_name="query")
    SentenceEncoder.from_pretrained(tmp_path, pooler="avg", model_kwargs={})
    with pytest.raises(AttributeError, match="truncate_dim of an encoder cannot be set"):
        encoder.truncate_dim = 4
    with pytest.raises(ConfigError, match=r"max_length=41: .* reads at most 40 tokens"):
        encoder.max_seq_length = 41
    np.testing.assert_array_equal(
        encoder.similarity(embeddings1=encoder.encode(inputs="a"), embeddings2=["a"]),
        encoder.similarity("a", ["a"]),
    )
    with pytest.raises(ConfigError, match="sentences is given twice"):
        encoder.encode(sentences="a", inputs="a")
    encoder.max_seq_length = 8
    assert (encoder.max_length, copy.copy(encoder).max_length) == (8, 8)
    with pytest.raises(ConfigError, match="are not pairs"):
        encoder.similarity_pairwise(["a", "a"], ["a"])


@pytest.mark.slow
def test_our_side_of_the_tasks_of_flax_runs_and_agrees_with_pytorch(minilm_dir):
    rows = rows_of(FLAX, "Eleven tasks")
    assert len(rows) == 11
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
    np.testing.assert_allclose(results["pooler output"], computed.pooler_output.numpy(), atol=1e-5)
    assert weights.keys() == {*reference.state_dict()} - {"embeddings.position_ids"}
    assert "blocks.0.attention.query.kernel" in results["get parameters"]
    pair = transformers.AutoTokenizer.from_pretrained(minilm_dir)("a", "b", return_tensors="np")
    with pytest.raises(ConfigError, match="Tokenise single texts, not pairs"):
        TokenRows.of(pair)
    with pytest.raises(ConfigError, match="padding stands before a text"):
        TokenRows.of({"input_ids": np.array([[0, 5]]), "attention_mask": np.array([[0, 1]])})
