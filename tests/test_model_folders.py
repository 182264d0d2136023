"""Folders of models that users have.

Each loads as in sentence-transformers, or an error says what to do.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tiny_model import hf_config_of, random_torch_model, write_tiny_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.cli import main
from diffcse_jax.errors import CheckpointError
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.models import files, hf, sentence_folder
from diffcse_jax.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TEXTS = ["a dog runs in the park", "no"]


@pytest.fixture
def tiny(tmp_path, minilm_dir):
    """A sentence-transformers folder with mean pooling."""
    folder = write_tiny_model(tmp_path / "tiny", minilm_dir, blocks=1)
    sentence_folder.write(
        folder, sentence_folder.RecordedPooler("avg"), num_blocks=1, hidden_size=16
    )
    return folder


def rewrite(folder, change):
    path = folder / "model.safetensors"
    save_file({name: each.contiguous() for name, each in change(load_file(path)).items()}, path)


def vectors_of(folder, **options):
    return SentenceEncoder.from_pretrained(folder, **options).encode(TEXTS)


def refused(folder):
    with pytest.raises(CheckpointError) as raised:
        SentenceEncoder.from_pretrained(folder, pooler="avg")
    return str(raised.value)


# --- heads of other tasks ---


@pytest.mark.parametrize(
    ("family", "head", "left_out"),
    [
        ("bert", "ForSequenceClassification", "classifier"),
        ("roberta", "ForTokenClassification", "classifier"),
        ("distilbert", "ForSequenceClassification", "classifier, pre_classifier"),
        ("electra", "ForMultipleChoice", "classifier, sequence_summary"),
        # the latter also of its masked LM
        ("modernbert", "ForSequenceClassification", "classifier, head"),
        ("nomic_bert", "ForSequenceClassification", "classifier, pooler"),
        ("mpnet", "ForQuestionAnswering", "qa_outputs"),
    ],
)
def test_a_classifier_loads_with_a_note(family, head, left_out, tmp_path, minilm_dir, capsys):
    model = random_torch_model(family, head, **hf_config_of(family, blocks=1))
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm_dir / name, tmp_path / name)
    ours = vectors_of(tmp_path, pooler="avg")
    note = f"was saved as {type(model).__name__}. Reading its encoder; its head is not used: {left_out}\n"
    assert note in capsys.readouterr().err
    np.testing.assert_allclose(
        ours, SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), atol=1e-5
    )


def test_a_cross_encoder_records_no_pooler(tiny, capsys):
    """Since release 6, sentence-transformers lists its only module."""
    expected = vectors_of(tiny)
    path = tiny / "modules.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:1]))
    rewrite(tiny, lambda tensors: tensors | {"classifier.weight": torch.zeros(1, 16)})
    np.testing.assert_array_equal(vectors_of(tiny, pooler="avg"), expected)
    assert "its head is not used: classifier" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="does not record its pooler"):
        SentenceEncoder.from_pretrained(tiny)


def test_tensors_inside_the_encoder_are_never_left_out(tiny):
    name = "encoder.layer.0.attention.self.distance_embedding.weight"
    rewrite(tiny, lambda tensors: tensors | {name: torch.zeros(3, 8)})
    assert f"unknown: {name}" in refused(tiny)


# --- where the files are ---


@pytest.mark.parametrize("place", ["0_Transformer", "encoder/bert"])
def test_the_first_module_has_a_folder_of_its_own(place, tiny, capsys):
    expected = vectors_of(tiny)
    (tiny / place).mkdir(parents=True)
    shared = ("modules.json", "config_sentence_transformers.json")
    for path in tiny.iterdir():
        if path.is_file() and path.name not in shared:
            path.rename(tiny / place / path.name)
    (tiny / place / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    path = tiny / "modules.json"
    modules = json.loads(path.read_text())
    modules[0]["path"] = place
    path.write_text(json.dumps(modules))
    encoder = SentenceEncoder.from_pretrained(tiny)
    assert encoder.max_length == 9
    for other in (encoder, SentenceTransformer(str(tiny), device="cpu"), TorchEncoder(str(tiny))):
        np.testing.assert_allclose(other.encode(TEXTS), expected, atol=1e-5)


def test_a_folder_of_models_names_them(tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    shutil.copytree(tiny, tmp_path / "checkpoint-500")
    assert "has no config.json" in (said := refused(tmp_path))
    assert "It contains folders of models: checkpoint-500, tiny. Name one." in said


@pytest.mark.parametrize(
    ("content", "base"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "org/base"}, "of 'org/base'"),
        ({}, "of a "),
    ],
)
def test_adapters_are_to_be_merged_first(content, base, tiny, tmp_path, capsys):
    (tiny / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as raised:
        main(["encode", "--model", str(tiny), "--input", str(tiny / "vocab.txt")])
    said = capsys.readouterr().err
    assert raised.value.code == 2
    assert f"error: {tiny} holds adapters {base}" in said
    assert "merge_and_unload()" in said


def test_weights_with_adapters_are_to_be_merged_first(tiny):
    name = "encoder.layer.0.attention.self.query.lora_A.default.weight"
    rewrite(tiny, lambda tensors: tensors | {name: torch.zeros(2, 16)})
    assert "of its adapters, which are not merged" in refused(tiny)


# --- how weights are stored ---


@pytest.mark.parametrize(
    "outer", ["module.", "model.", "_orig_mod.", "0.auto_model.", "module.bert."]
)
def test_a_wrapper_of_training_code_is_left_out(outer, tiny):
    expected = vectors_of(tiny)
    rewrite(tiny, lambda tensors: {outer + name: tensor for name, tensor in tensors.items()})
    np.testing.assert_array_equal(vectors_of(tiny), expected)


def test_several_encoders_are_refused(tiny):
    def two(tensors):
        return {
            f"{outer}.{name}": each.clone()
            for outer in ("query", "text")
            for name, each in tensors.items()
        }

    rewrite(tiny, two)
    assert "holds several encoders: query., text.. Save the one to use" in refused(tiny)


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def pickled_parts(folder):
    parts = {}
    for number, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        parts[name] = f"pytorch_model-{number % 2}.bin"
        path = folder / parts[name]
        torch.save((torch.load(path) if path.exists() else {}) | {name: tensor}, path)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": parts}))


@pytest.mark.parametrize("store", [pickled, pickled_parts])
def test_pickled_weights_are_read(store, tiny):
    expected = vectors_of(tiny)
    store(tiny)
    (tiny / "model.safetensors").unlink()
    np.testing.assert_array_equal(vectors_of(tiny), expected)


def test_half_precision_is_read_as_float32(tiny):
    rewrite(tiny, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})
    theirs = SentenceTransformer(str(tiny), device="cpu", model_kwargs={"dtype": "float32"})
    np.testing.assert_allclose(vectors_of(tiny), theirs.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, tiny):
    (tiny / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n"
    )
    assert f"{tiny / name} is a pointer of Git LFS" in refused(tiny)


def test_weights_that_are_not_read_are_named(tiny):
    (tiny / "model.safetensors").rename(tiny / "model.fp16.safetensors")
    (tiny / "tf_model.h5").touch()
    assert (
        "nor pytorch_model.bin, only model.fp16.safetensors, tf_model.h5. Save the model again"
        in refused(tiny)
    )


def test_a_configuration_without_a_type_is_named(tiny):
    path = tiny / "config.json"
    content = json.loads(path.read_text())
    del content["model_type"]
    path.write_text(json.dumps(content))
    assert "config.json has no `model_type`" in refused(tiny)


def test_other_first_modules_are_named(tiny):
    path = tiny / "modules.json"
    kinds = [{"path": "0_Static", "type": "sentence_transformers.models.StaticEmbedding"}]
    path.write_text(json.dumps(kinds))
    assert "the modules StaticEmbedding are not supported" in refused(tiny)


def test_a_hub_model_whose_transformer_has_a_folder_is_fetched_there(tiny, monkeypatch):
    """The list of modules is read before the weights are fetched."""
    (tiny / "0_BERT").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tiny / name).rename(tiny / "0_BERT" / name)
    modules = json.loads((tiny / "modules.json").read_text())
    modules[0]["path"] = "0_BERT"
    (tiny / "modules.json").write_text(json.dumps(modules))
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append(allow_patterns[-1])
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    checkpoint = hf.read("organisation/model")
    assert asked[-1] == "0_BERT/model*.safetensors"
    assert (checkpoint.folder, checkpoint.root) == (tiny / "0_BERT", tiny)
    assert files.transformer_folder(Path(tiny)) == checkpoint.folder
    load_tokenizer(checkpoint.folder)
