"""Model folders may bring code of their own; it is never run, and nobody is asked to allow it."""

import ast
import builtins
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from diffcse_jax.errors import CheckpointError
from diffcse_jax.evaluation import EvaluationSettings
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.models.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
CLASSES = {
    "AutoConfig": "own.Config",
    "AutoModel": "own.Model",
    "AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"],
}
CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.fixture
def folder(tmp_path, minilm_dir, monkeypatch) -> Iterator[Path]:
    """A model beside code; whoever is asked whether to run it says yes."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    folder = write_tiny_model(tmp_path / "model", minilm_dir)
    (folder / "own.py").write_text(CODE)
    (folder / "config.4.0.0.json").write_text(
        json.dumps({"model_type": "own", "auto_map": CLASSES})
    )
    edit(folder / "config.json", configuration_files=["config.4.0.0.json"], auto_map=CLASSES)
    yield folder
    assert not [*tmp_path.rglob("ran")]


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_configuration_with_code_is_passed_over(folder, backend):
    if backend == "torch":
        pytest.importorskip("torch")
    assert (
        load_encoder(str(folder), EvaluationSettings(backend=backend, pooler="avg")).pooler == "avg"
    )


def test_a_tokenizer_that_is_code_is_refused_without_advice_to_run_it(folder):
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=CLASSES)
    with pytest.raises(
        CheckpointError, match=r"needs code from the folder, which is never executed here"
    ) as raised:
        load_tokenizer(folder)
    assert "trust_remote_code" not in str(raised.value)


def test_a_pipe_in_a_model_folder_is_not_waited_for(folder):
    os.mkfifo(folder / "added_tokens.json")
    with pytest.raises(
        CheckpointError, match=r"contains added_tokens\.json, which is a pipe or a device"
    ):
        load_tokenizer(folder)


def test_every_call_that_could_load_code_forbids_it():
    """Of libraries; `SentenceTransformer(modules=...)` loads nothing."""
    allowing = []
    files = [*(ROOT / "diffcse_jax").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "transformers" in text else ():
            if isinstance(node, ast.Call) and node.args and loads_code(ast.unparse(node.func)):
                forbidden = [
                    ast.unparse(word.value)
                    for word in node.keywords
                    if word.arg == "trust_remote_code"
                ]
                allowing += [] if forbidden == ["False"] else [f"{file}, line {node.lineno}"]
    assert allowing == []
    assert any(
        loads_code(line)
        for line in ("transformers.AutoModel.from_pretrained", "SentenceTransformer")
    )


def loads_code(function: str) -> bool:
    name = function.rpartition(".")[2]
    by_auto_class = ".Auto" in f".{function}" and name in ("from_pretrained", "from_config")
    return by_auto_class or name == "SentenceTransformer"
