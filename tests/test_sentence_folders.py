"""Folders of sentence-transformers, the whole way: read, trained through, exported.

There are also folders of other families than BERT.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from tiny_model import (
    HIDDEN,
    hf_config_of,
    random_torch_model,
    write_bpe_tokenizer,
    write_tiny_model,
)
from tiny_run import run_settings

from diffcse_jax import SentenceEncoder, train
from diffcse_jax.cli import main
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.export.graph import write_graph
from diffcse_jax.models.heads import TORCH_ACTIVATIONS
from diffcse_jax.training.networks import open_start
from diffcse_jax.training.sharding import make_mesh

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:truncated"
)

TEXTS = ["How do I install a package?", "Write to the LIST.", "package", "words and " * 12]


def dense(inputs, outputs, activation, **options):
    return Dense(inputs, outputs, activation_function=getattr(torch.nn, activation)(), **options)


THREE = ("cls", "max", "mean")
# Modes of the pooling, the modules after it, the similarity, and settings of the text.
LAYOUTS = {
    "cls": ("cls", lambda: [Normalize()], "dot", {}),
    "cls-tanh": ("cls", lambda: [dense(16, 16, "Tanh")], "euclidean", {}),
    "smaller": ("mean", lambda: [dense(16, 8, "Tanh")], "manhattan", {}),
    "two-dense": (
        "max",
        lambda: [Normalize(), dense(16, 24, "GELU"), dense(24, 12, "Identity", bias=False)],
        None,
        {},
    ),
    "mean-max": (("mean", "max"), lambda: [], "dot", {}),
    "three": (
        THREE,
        lambda: [LayerNorm(48), dense(48, 16, "LeakyReLU"), Dropout(0.3)],
        None,
        {"max_seq_length": 9},
    ),
    "order": (("lasttoken", "cls"), lambda: [dense(32, 8, "ELU")], None, {"do_lower_case": True}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, minilm_dir):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), minilm_dir, blocks=1)


@pytest.fixture
def folder(tmp_path, tiny):
    """Makes a folder with sentence-transformers itself."""

    def make(name):
        torch.manual_seed(0)
        modes, modules, similarity, of_text = LAYOUTS[name]
        chain = [Transformer(str(tiny), **of_text), Pooling(HIDDEN, modes), *modules()]
        for module in chain[2:]:
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
        model = SentenceTransformer(modules=chain, device="cpu", similarity_fn_name=similarity)
        model.save(str(tmp_path / "start"))
        path = tmp_path / "start/sentence_bert_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | of_text))
        return tmp_path / "start"

    return make


def compare(encoder, path, atol=1e-5):
    theirs = SentenceTransformer(str(path), device="cpu", truncate_dim=encoder.truncate_dim)
    expected = theirs.encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=atol)
    np.testing.assert_allclose(TorchEncoder(str(path)).encode(TEXTS), expected, atol=atol)
    similarities = theirs.similarity(expected, expected[0])[:, 0]
    np.testing.assert_allclose(
        encoder.similarity(TEXTS, TEXTS[0]), similarities, rtol=1e-5, atol=1e-4
    )


def modules_of(path):
    """The kinds and settings of the modules, as a version of sentence-transformers reads them."""
    model = SentenceTransformer(str(path), device="cpu")
    return [
        (type(each).__name__, each.get_config_dict()) for each in [*model][1:]
    ], model.similarity_fn_name


def weights_of(path):
    modules = [*SentenceTransformer(str(path), device="cpu")][1:]
    return [parameter.detach() for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("name", ["cls-tanh", "smaller", "two-dense", "order"])
def test_embeddings_of_a_layout_equal_those_of_sentence_transformers(name, folder):
    path = folder(name)
    compare(SentenceEncoder.from_pretrained(path), path)


@pytest.mark.filterwarnings("ignore:.*scores can be far lower", "ignore:.*made for similarity")
@pytest.mark.parametrize(
    ("name", "pooler", "applied"),
    [
        ("smaller", "avg", "avg + Dense"),
        ("cls", "cls_before_pooler", "cls_before_pooler + Normalize"),
        ("three", "cls_before_pooler+max+avg", "cls_before_pooler+max+avg + LayerNorm + Dense"),
    ],
)
def test_an_explicit_pooler_is_applied_alone(name, pooler, applied, folder, tmp_path):
    path = folder(name)
    whole, alone = (SentenceEncoder.from_pretrained(path, pooler=each) for each in (None, pooler))
    assert (whole.pooler, alone.pooler) == (applied, pooler)
    assert alone.dimension == HIDDEN * len(pooler.split("+"))
    assert whole.fingerprint() != alone.fingerprint()
    model = SentenceTransformer(
        modules=[*SentenceTransformer(str(path), device="cpu")][:2], device="cpu"
    )
    np.testing.assert_allclose(alone.encode(TEXTS), model.encode(TEXTS), atol=1e-5)
    assert TorchEncoder(str(path), pooler).pooler == pooler
    # What a record names loads the same encoder again.
    for encoder in (whole, alone):
        encoder.build_index(TEXTS)
        encoder.save_index(tmp_path / encoder.pooler)
        main(["search", "--input", str(tmp_path / encoder.pooler), "package"])
        again = SentenceEncoder.from_pretrained(path, pooler=encoder.pooler)
        assert again.fingerprint() == encoder.fingerprint()
    with pytest.raises(ConfigError, match=r"start does not apply 'avg \+ LSTM', but"):
        SentenceEncoder.from_pretrained(path, pooler="avg + LSTM")


def test_a_pooler_without_the_weights_after_it_is_warned_of(folder):
    with pytest.warns(
        UserWarning, match=r"trained with 'avg \+ Dense' and is used with 'avg' alone"
    ):
        SentenceEncoder.from_pretrained(folder("smaller"), pooler="avg")


def test_a_weight_that_is_nan_is_named(folder):
    path = folder("smaller") / "2_Dense/model.safetensors"
    weights = load_file(path)
    weights["linear.weight"][0, 0] = torch.nan
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"2_Dense: its tensor linear.weight holds values"):
        SentenceEncoder.from_pretrained(path.parents[1])


def run_of(folder, start, tmp_path, minilm_dir, **settings):
    """Train two steps from a folder, and return the encoder."""
    keys = run_settings(tmp_path, minilm_dir, train={"steps": 2}, optim={"learning_rate": 1e-2})
    keys |= {"model.name_or_path": str(start), "model.pooler": "own", "model.projector": "none"}
    keys |= {"difference.weight": 0.0, "generator.name_or_path": ""}
    encoder, *_ = train(config=keys | settings, workdir=folder)
    return encoder


@pytest.mark.slow
def test_a_layout_is_trained_through_and_exported_as_it_came(folder, tmp_path, minilm_dir):
    start, export = folder("three"), tmp_path / "run/export"
    encoder = run_of(tmp_path / "run", start, tmp_path, minilm_dir, **{"eval.keep_start": False})
    compare(encoder, export)
    assert modules_of(export) == modules_of(start)
    for before, after in zip(weights_of(start), weights_of(export), strict=True):
        assert (before != after).any()
    write_graph(export)
    graph = SentenceEncoder.from_pretrained(export, backend="onnx")
    np.testing.assert_allclose(graph.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)


@pytest.mark.slow
def test_a_start_that_is_kept_has_its_own_chain(folder, tmp_path, minilm_dir):
    """The run trains another pooler, without the chain, and learns nothing."""
    start = folder("smaller")
    settings = {"model.pooler": "max", "eval.keep_start": True, "optim.learning_rate": 0.0}
    encoder = run_of(tmp_path / "kept", start, tmp_path, minilm_dir, **settings)
    compare(encoder, tmp_path / "kept/export")
    assert modules_of(tmp_path / "kept/export") == modules_of(start)


def write_random(folder, family, head, vocabulary=30522):
    sizes = hf_config_of(family, blocks=2) | {
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }
    random_torch_model(family, head, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["modernbert", "electra"])
def test_other_families_are_trained_exported_and_read_by_other_libraries(
    family, tmp_path, minilm_dir
):
    groups = {
        "train": {"steps": 3},
        "eval": {"every": 0},
        "mesh": {"data": 1},
        "generator": {"name_or_path": "start"},
    }
    settings = run_settings(tmp_path, minilm_dir, **groups)
    start, vocabulary = Path(settings["model.name_or_path"]), 30522
    if family == "modernbert":
        shutil.rmtree(start)
        vocabulary = write_bpe_tokenizer(start, (tmp_path / "text.txt").read_text())
    else:
        settings["difference.discriminator"] = str(
            write_random(tmp_path / "electra", family, "ForPreTraining")
        )
    write_random(start, family, "ForMaskedLM", vocabulary)
    trained = train(None, "diffcse_minilm", workdir=tmp_path / "run", overrides=settings)
    assert len([row for row in trained.history if "loss" in row]) == 3
    check = json.loads((tmp_path / "run/export/export_check.json").read_text())[
        "maximal_absolute_difference"
    ]
    assert check.keys() == {"diffcse_jax", "sentence_transformers"}
    assert max(check.values()) < 1e-5


def test_activations_equal_those_of_torch():
    x = np.linspace(-8, 8, 101, dtype=np.float32)
    for name, function in TORCH_ACTIVATIONS.items():
        expected = getattr(torch.nn, name)()(torch.tensor(x)).numpy()
        np.testing.assert_allclose(function(jnp.asarray(x)), expected, atol=1e-5, err_msg=name)


def test_losses_that_need_the_hidden_size_refuse_another_one(folder):
    path = str(folder("smaller"))
    config = Config.from_dict(
        {"model.name_or_path": path, "model.pooler": "own", "model.projector": "none"}
    )
    message = "difference.weight > 0 puts embeddings among hidden states, which have 16 .* pooler avg have 8"
    with pytest.raises(ConfigError, match=message):
        open_start(config, make_mesh(config))


def test_an_index_of_a_model_for_another_similarity_warns(folder):
    with pytest.warns(UserWarning, match="is made for similarity by dot; search ranks by cosine"):
        SentenceEncoder.from_pretrained(folder("mean-max")).build_index(TEXTS)
    SentenceEncoder.from_pretrained(folder("cls")).build_index(TEXTS)  # of length 1
