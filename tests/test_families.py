"""Encoders of other families than BERT go the whole way: training, export, and back to PyTorch."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_model import hf_config_of, random_torch_model, write_bpe_tokenizer
from tiny_run import run_settings

from diffcse_jax import train


def write_random(folder: Path, family: str, head: str, vocabulary: int = 30522) -> Path:
    sizes = hf_config_of(family, blocks=2) | {"vocab_size": vocabulary, "max_position_embeddings": 512}
    random_torch_model(family, head, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["modernbert", "electra"])
def test_a_checkpoint_is_trained_exported_and_read_by_other_libraries(family, tmp_path, minilm_dir):
    groups = {"train": {"steps": 3}, "eval": {"every": 0}, "mesh": {"data": 1}, "generator": {"name_or_path": "start"}}
    settings = run_settings(tmp_path, minilm_dir, **groups)
    folder, text = Path(settings["model.name_or_path"]), (tmp_path / "text.txt").read_text()
    if family == "modernbert":
        shutil.rmtree(folder)
        write_random(folder, family, "ForMaskedLM", write_bpe_tokenizer(folder, text))
    else:
        write_random(folder, family, "ForMaskedLM")
    if family == "electra":
        settings["difference.discriminator"] = str(write_random(tmp_path / "electra", family, "ForPreTraining"))
    trained = train(None, "diffcse_minilm", workdir=tmp_path / "run", overrides=settings)
    losses = [row["loss"] for row in trained.history if "loss" in row]
    assert len(losses) == 3
    check = json.loads((tmp_path / "run/export/export_check.json").read_text())["maximal_absolute_difference"]
    assert check.keys() == {"diffcse_jax", "sentence_transformers"}
    assert max(check.values()) < 1e-5
