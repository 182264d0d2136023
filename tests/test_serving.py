"""An ONNX file in each form, and commands that compute with it."""

import importlib.util
import json
import pickle
import shutil

import numpy as np
import pytest
from sentence_transformers.backend.utils import backend_should_export
from tiny_model import HIDDEN, write_tiny_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.cli import main
from diffcse_jax.commands import EvaluateOptions
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation.backends import load_encoder
from diffcse_jax.export import export
from diffcse_jax.export import graph as forms
from diffcse_jax.models.graph import EMBEDDING, GRAPH

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("onnxruntime") is None, reason="the extra `onnx` is not installed"
    ),
]
TEXTS = ["a dog", "the quick brown fox jumps over the lazy dog", "rain"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, minilm_dir):
    """A model that no run has trained, in float32, and the folder that it is from."""
    start = write_tiny_model(tmp_path_factory.mktemp("start"), minilm_dir, blocks=1)
    (start / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    folder = tmp_path_factory.mktemp("serving") / "float32"
    check = export(start, folder, onnx="float32", pooler="avg")
    assert check["maximal_absolute_difference"].keys() == {
        "diffcse_jax",
        "sentence_transformers",
        GRAPH,
    }
    assert check["onnx"]["lowest_cosine"] > 1 - 1e-5
    return start, folder


@pytest.fixture
def converted(exported, tmp_path):
    """Make a copy of the export in another form, and return it with its closeness."""

    def make(form):
        folder = shutil.copytree(exported[1], tmp_path / form)
        (folder / "export_check.json").unlink()
        encoder = SentenceEncoder.from_pretrained(exported[1])
        return folder, forms.convert_graph(folder, form, encoder, TEXTS)

    return make


def test_any_encoder_is_exported_with_its_own_card(exported, tmp_path):
    start, folder = exported
    assert not backend_should_export(folder, True, {}, "model.onnx", "*.onnx", "ONNX")[0]
    assert (folder / "README.md").read_text() == (start / "README.md").read_text()
    ours, graph = (
        SentenceEncoder.from_pretrained(folder, backend=backend) for backend in ("jax", "onnx")
    )
    assert (graph.pooler, graph.dimension, graph.backend) == ("avg", HIDDEN, "onnx")
    again = pickle.loads(pickle.dumps(graph))
    for texts in (TEXTS, TEXTS[0], TEXTS * 9):  # with padding rows and without
        np.testing.assert_allclose(again.encode(texts), ours.encode(texts), atol=1e-5)
    assert graph.fingerprint() == again.fingerprint() != ours.fingerprint()
    cut = load_encoder(
        str(folder), EvaluateOptions(models=(), tasks="sts", backend="onnx", truncate_dim=4)
    )
    np.testing.assert_allclose(cut.encode(TEXTS), ours.encode(TEXTS)[:, :4], atol=1e-5)
    with pytest.raises(ConfigError, match="--license is for the model card of a run"):
        export(start, tmp_path / "out", license="mit", pooler="avg")


def test_files_of_other_programs_and_edited_cards_are_read(exported, tmp_path):
    _, folder = exported
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    (theirs / "README.md").write_text("# Ours\n")
    encoder = SentenceEncoder.from_pretrained(theirs, backend="onnx", pooler="mean")
    assert encoder.pooler == "avg"
    (theirs / "export_check.json").unlink()
    model = importlib.import_module("onnx").load(theirs / GRAPH)
    (output,) = (each for each in model.graph.output if each.name == EMBEDDING)
    output.type.tensor_type.shape.dim[-1].dim_param = "Divsentence_embedding_dim_1"
    (theirs / GRAPH).write_bytes(model.SerializeToString())
    cut = SentenceEncoder.from_pretrained(theirs, backend="onnx", truncate_dim=4)
    np.testing.assert_allclose(cut.encode(TEXTS), encoder.encode(TEXTS)[:, :4], atol=1e-5)


def test_texts_to_compare_on_are_read_once_each(tmp_path):
    (tmp_path / "mine.txt").write_text("a dog\nrain\na dog\n")
    assert forms.own_texts(str(tmp_path / "mine.txt")) == ["a dog", "rain"]


@pytest.mark.parametrize(("form", "least"), [("float16", 0.9999), ("int8", 0.98)])
def test_a_form_is_close_to_the_model_and_smaller(exported, converted, form, least):
    folder, closeness = converted(form)
    assert closeness.form == form
    assert closeness.texts == len(TEXTS)
    assert least < closeness.lowest_cosine <= closeness.cosine
    sizes = [(each / GRAPH).stat().st_size for each in (folder, exported[1])]
    assert sizes[0] < 0.6 * sizes[1]


def test_a_form_that_loses_more_is_warned_of(converted, monkeypatch):
    monkeypatch.setattr(forms, "LEAST_COSINE", 1.1)
    with pytest.warns(UserWarning, match=r"In int8, the embeddings have a mean cosine of"):
        converted("int8")


def test_an_index_is_opened_again_with_its_backend(exported, tmp_path, capsys):
    texts, index = tmp_path / "texts.txt", str(tmp_path / "index")
    texts.write_text("\n".join(TEXTS))
    build = ["search", "--model", str(exported[1]), "--input", str(texts), "--output", index]
    assert main([*build, "--backend", "onnx", "rain"]) == 0
    assert main(["search", "--input", index, "--json", "rain"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["hits"][0]["text"] == "rain"
    with pytest.raises(SystemExit):
        main(["search", "--input", index, "--backend", "jax", "rain"])
    assert "dimensions, onnx," in capsys.readouterr().err


def test_what_an_onnx_file_cannot_follow_is_refused(exported, tmp_path):
    start, folder = exported
    refused = {
        "pooler='cls': the ONNX file applies avg": {"pooler": "cls"},
        "dtype='bfloat16': the precision is that of": {"dtype": "bfloat16"},
        "truncate_dim=17: the embedding size is 16": {"truncate_dim": 17},
    }
    for message, options in refused.items():
        with pytest.raises(ConfigError, match=message):
            SentenceEncoder.from_pretrained(folder, backend="onnx", **options)
    with pytest.raises(ConfigError, match=r"--input text\.txt is what an ONNX file is compared on"):
        export(start, tmp_path / "none", text="text.txt")
    with pytest.raises(ConfigError, match="backend='torch': use one of jax, onnx"):
        SentenceEncoder.from_pretrained(folder, backend="torch")
    with pytest.raises(CheckpointError, match=r"has no onnx/model\.onnx\. Write a folder that has"):
        SentenceEncoder.from_pretrained(start, backend="onnx")
    copy = shutil.copytree(folder, tmp_path / "damaged")
    (copy / "export_check.json").unlink()
    (copy / GRAPH).write_bytes(b"ONNX")
    with pytest.raises(CheckpointError, match="ONNX Runtime cannot read it"):
        SentenceEncoder.from_pretrained(copy, backend="onnx")
