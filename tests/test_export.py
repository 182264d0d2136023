import dataclasses
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file
from tiny_model import HIDDEN, MAX_LENGTH, hf_config_of, random_params, write_tiny_model

from diffcse_jax import SentenceEncoder, export
from diffcse_jax.config import Config, configuration, flat, read_overrides, shipped_config
from diffcse_jax.errors import CheckpointError, ConfigError, UserError
from diffcse_jax.evaluation.backends import TorchEncoder
from diffcse_jax.export import card
from diffcse_jax.export.card import BIBTEX, model_card, papers_of
from diffcse_jax.losses import Loss
from diffcse_jax.models import hf
from diffcse_jax.models.heads import MlpProjector
from diffcse_jax.models.hf import Pretrained, transformer_config
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.run_folder.checkpoints import SavedEncoder
from diffcse_jax.run_folder.records import Record, Selection
from diffcse_jax.run_folder.start import BaseModel, describe_base_model

# PyTorch and sentence-transformers warn about themselves when they are first loaded.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def saved(tmp_path, minilm_dir, monkeypatch):
    """Makes a trained encoder of a family and pooler that `export` then finds in any workdir."""

    def make(family="bert", pooler="cls", with_head=True):
        base = hf.read(str(write_tiny_model(tmp_path / "base", minilm_dir, family, pooler=False)))
        base_model = describe_base_model("bert-base-uncased", tmp_path, {})
        (base.folder / "base_model.json").write_text(json.dumps(dataclasses.asdict(base_model)))
        checkpoint = dataclasses.replace(
            base,
            transformer=random_params(Transformer, base.config, seed=1),
            pooler=random_params(MlpProjector, base.config, seed=2) if with_head else None,
        )
        trained = saved_with(
            Config(), pooler=pooler, checkpoint=checkpoint, interpolation=0.5, verdict="better"
        )
        monkeypatch.setattr(export, "read_encoder", lambda path: trained)
        (tmp_path / "workdir").mkdir(exist_ok=True)
        (tmp_path / "workdir/config.json").write_text('{"model": {"name_or_path": "base"}}')
        return trained

    return make


@pytest.fixture
def unchecked(monkeypatch):
    """Exports without comparing embeddings, for what happens to files."""
    check = {"maximal_absolute_difference": {}, "tolerance": 0.0, "sentences": 0}
    monkeypatch.setattr(export, "check_folder", lambda *_: check)


def test_every_reader_gives_the_trained_embeddings(saved, tmp_path, capfd):
    pytest.importorskip("sentence_transformers")
    trained = saved()
    check = export.export(tmp_path / "workdir", tmp_path / "out")
    assert set(check["maximal_absolute_difference"]) == {"diffcse_jax", "sentence_transformers"}
    assert all(difference < 1e-5 for difference in check["maximal_absolute_difference"].values())
    assert json.loads((tmp_path / "out/export_check.json").read_text()).items() >= check.items()
    assert SentenceEncoder.from_pretrained(tmp_path / "out").pooler == "cls"
    assert "Loading weights" not in capfd.readouterr().err
    # which transformers alone reads as well
    tensors = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_array_equal(
        tensors["pooler.dense.weight"], trained.checkpoint.pooler["dense.kernel"].T
    )


def test_a_model_without_pooler_weights_is_cut_by_every_reader(saved, tmp_path, capfd):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    saved(pooler="avg", with_head=False)
    out = tmp_path / "out"
    check = export.export(tmp_path / "workdir", out, truncate_dim=6)["maximal_absolute_difference"]
    assert set(check) == {"diffcse_jax", "sentence_transformers"}
    assert max(check.values()) < 1e-5
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "MISSING" not in printed.out
    assert (
        "pooler.dense is missing. This is expected: the pooler avg does not use it" in printed.out
    )

    ours, whole = (
        SentenceEncoder.from_pretrained(out, truncate_dim=size) for size in (None, HIDDEN)
    )
    assert (ours.dimension, whole.dimension) == (6, HIDDEN)
    assert "| embedding size | 6, cut from 16 |" in (out / "README.md").read_text()
    model = SentenceTransformer(str(out), device="cpu")
    assert (model.max_seq_length, model.similarity_fn_name) == (MAX_LENGTH, "cosine")
    fits = " ".join(["dog"] * (MAX_LENGTH - 2))
    np.testing.assert_allclose(model.encode(fits + " cat"), ours.encode(fits), atol=1e-5)
    with pytest.raises(ConfigError, match=r"truncate_dim=17: the embedding size is 16"):
        export.export(tmp_path / "workdir", out, truncate_dim=17)

    for name in ("modules.json", "export_check.json"):  # so that it is not an export of ours
        (out / name).unlink()
    with pytest.raises(CheckpointError, match=r"this model has no weights for it"):
        TorchEncoder(str(out), "cls")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is None, reason="the extra `onnx` is not installed"
)
def test_the_examples_in_the_card_run_and_no_file_has_a_local_path(saved, tmp_path):
    trained, private, out = saved("mpnet", "avg_first_block_last"), str(tmp_path), tmp_path / "out"
    paths = {
        name: private for name in ("_name_or_path", "name_or_path", "tokenizer_file", "cache_dir")
    }
    trained.checkpoint.hf_config.update(paths)
    settings = trained.checkpoint.folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | paths))
    check = export.export(tmp_path / "workdir", out, truncate_dim=6, onnx="float32")[
        "maximal_absolute_difference"
    ]
    assert set(check) == {"diffcse_jax", "sentence_transformers", "onnx/model.onnx"}
    for file in out.rglob("*"):
        assert not file.is_file() or private.encode() not in file.read_bytes(), file

    encoder = SentenceEncoder.from_pretrained(out)
    ours = encoder.encode(["A man plays the guitar.", "Someone makes music."])
    blocks = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        names: dict = {}
        exec(block.replace("path/to/this/folder", str(out)), names)
        np.testing.assert_allclose(np.array(names["embeddings"]), ours, atol=1e-5)
    graph = SentenceEncoder.from_pretrained(out, backend="onnx")
    for texts in (["dog"], ["a dog and a cat", "dog", "dogs " * 20]):  # without padding and with
        np.testing.assert_allclose(graph.encode(texts), encoder.encode(texts), atol=1e-5)


def test_the_side_that_is_cut_and_the_case_are_exported(saved, tmp_path):
    """The check encodes a text that is cut, and `tokenizer.json` alone says on which side."""
    pytest.importorskip("sentence_transformers")
    start = saved(pooler="avg").checkpoint.folder
    of_tokenizer = json.loads((start / "tokenizer_config.json").read_text())
    (start / "tokenizer_config.json").write_text(
        json.dumps(of_tokenizer | {"do_lower_case": False})
    )
    (start / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    tokenizer = json.loads((start / "tokenizer.json").read_text())
    tokenizer["truncation"]["direction"] = "Left"
    (start / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = tmp_path / "out"
    check = export.export(tmp_path / "workdir", out)["maximal_absolute_difference"]
    assert set(check) == {"diffcse_jax", "sentence_transformers"}
    encoder = SentenceEncoder.from_pretrained(out)
    ends = " ".join(["dog"] * (MAX_LENGTH - 2))
    vectors = encoder.encode([f"Cat {ends}", ends.upper()], max_length=MAX_LENGTH)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


def test_a_library_that_cannot_be_imported_does_not_stop_the_export(saved, tmp_path, monkeypatch):
    """As with an old `peft`, which sentence-transformers imports and which needs old transformers."""
    pytest.importorskip("torch")
    package = tmp_path / "site/sentence_transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from transformers import gone\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in list(sys.modules):
        if name.partition(".")[0] == package.name:
            monkeypatch.delitem(sys.modules, name)
    saved()
    with pytest.warns(UserWarning, match="cannot import it: cannot import name 'gone' from"):
        check = export.export(tmp_path / "workdir", tmp_path / "out")
    assert set(check["maximal_absolute_difference"]) == {"diffcse_jax"}
    with pytest.raises(UserError, match="update or uninstall the package that this names"):
        TorchEncoder(str(tmp_path / "out"))


def test_a_wrong_export_leaves_nothing(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_installed", lambda module: False)
    saved()
    right, off = hf.to_hf, np.float32(1.001)
    monkeypatch.setattr(
        hf, "to_hf", lambda *of: {name: off * array for name, array in right(*of).items()}
    )
    with pytest.raises(CheckpointError, match="read by diffcse_jax, its embeddings differ by"):
        export.export(tmp_path / "workdir", tmp_path / "runs/out")
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_earlier_export_is_replaced_and_other_folders_are_not(saved, unchecked, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    saved(pooler="avg_top2")
    export.export(tmp_path / "workdir", out)
    saved(pooler="cls")
    export.export(tmp_path / "workdir", out)
    assert SentenceEncoder.from_pretrained(out).pooler == "cls"
    assert not (out / "1_WeightedLayerPooling").exists()
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="other is not empty and not an earlier export"):
        export.export(tmp_path / "workdir", other)
    assert (other / "thesis.tex").read_text() == "years of work"
    with pytest.raises(CheckpointError, match=r"cannot write .*/thesis.tex/out: "):
        export.export(tmp_path / "workdir", other / "thesis.tex/out")


@pytest.mark.parametrize("scale", [1e-3, 1e5])
def test_the_tolerance_is_relative(saved, tmp_path, monkeypatch, scale):
    """Whatever the scale of the embeddings, an error of 1e-5 of it passes and one of 1e-3 does not."""
    encoder = SentenceEncoder.from_saved(saved(pooler="avg"))
    rng = np.random.default_rng(0)
    vectors = (scale * rng.uniform(-1, 1, (len(export.SAMPLES), 16))).astype(np.float32)
    monkeypatch.setattr(SentenceEncoder, "encode", lambda *_, **__: vectors)

    def check(error: float) -> None:
        readers = {"reader": lambda _, prompt: vectors + np.float32(error * scale)}
        monkeypatch.setattr(export, "_readers", lambda *_: readers)
        export.check_folder(encoder, tmp_path)

    check(1e-5)
    with pytest.raises(CheckpointError, match="differ"):
        check(1e-3)
    vectors[0, 0] = np.nan
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        check(0.0)


def test_exported_files_have_checksums_and_the_permissions_that_the_umask_gives(
    saved, unchecked, tmp_path
):
    saved()
    export.export(tmp_path / "workdir", tmp_path / "out")
    (tmp_path / "plain").touch()
    expected = (tmp_path / "plain").stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "out").rglob("*") if file.is_file()} == {
        expected
    }
    # readable with another last byte
    for name in ("model.safetensors", "1_Pooling/config.json", "tokenizer.json"):
        path = tmp_path / "out" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(
            CheckpointError, match=rf"out/{name} is missing or differs from its checksum\. Export"
        ):
            SentenceEncoder.from_pretrained(tmp_path / "out")
        path.write_bytes(content)


# The model card

SIZES = transformer_config(hf_config_of("bert"), source="test")
BASE = BaseModel("bert-base-uncased", "bert-base-uncased", {"license": "apache-2.0"}, ("en",))


def config_of(name: str, keys: Mapping[str, object] = MappingProxyType({})) -> Config:
    return Config.from_dict({**flat(shipped_config(name).to_dict()), **keys})


def saved_with(
    config: Config, pooler="cls_before_pooler", interpolation=1.0, verdict="", **fields: object
) -> SavedEncoder:
    dev, before = (
        {"stsb_spearman": score, "guard_stsb_spearman": score} for score in (81.25, 79.5)
    )
    start = Record(0, "avg", before, "stsb_spearman", "text")
    given = {"checkpoint": Pretrained(Path(), {}, SIZES, {})} | fields
    record = Record(250, pooler, dev, "stsb_spearman")
    selection = Selection(record, interpolation, verdict)
    return SavedEncoder(**vars(record), config=config, baseline=start, selection=selection, **given)


def card_of(saved: SavedEncoder, base: BaseModel = BASE, **fields: object) -> str:
    given = {
        "name": "ada/model",
        "truncate_dim": None,
        "hub_id": None,
        "license": None,
        "language": (),
    }
    given |= {"results": ({}, None), "check": "They agree.", "graph": ""}
    return model_card(saved, base, **given | fields)


def results_of(model: str, spearman: float, **others: object) -> dict:
    return {
        "model": model, "pooler": "cls_before_pooler", "truncate_dim": None, "mode": "test", "aggregation": "all",
        "post": None, "averages": {"sts": None},
        "tasks": {"STSBenchmark": {"spearman": spearman, "pearson": 1.0, "n": 1379}, "MR": {"acc": 80.0}},
        "not_official": {"MR": "test 5 instead of 10,662"},
    } | others  # fmt: skip


def test_the_hub_reads_the_metadata():
    tests = (results_of("run", 82.03), results_of("bert-base-uncased", 47.0))
    saved = saved_with(
        config_of("diffcse_base"), verdict="Better than bert-base-uncased", interpolation=0.5
    )
    card = ModelCard(card_of(saved, results=tests, hub_id="ada/model", license="mit"))
    data = card.data
    assert (data.base_model, data.license, data.language) == ("bert-base-uncased", "mit", "en")
    facts = (
        "0.5 x step 250 + 0.5 x the starting checkpoint",
        'SentenceTransformer("ada/model")',
        "not the official",
    )
    for fact in (*facts, "The run's verdict: Better than bert-base-uncased."):
        assert fact in card.text
    assert data.datasets == ["princeton-nlp/datasets-for-simcse"]
    assert (data.library_name, data.pipeline_tag) == (
        "sentence-transformers",
        "sentence-similarity",
    )
    rows = [line for line in card.text.splitlines() if "(avg)" in line or "this model (" in line]
    assert [re.findall(r"\d+\.\d\d", row) for row in rows] == [
        ["79.50", "79.50"], ["81.25", "81.25"], ["47.00", "80.00"], ["82.03", "80.00"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "interpolation", "language"),
    [
        ({}, 1.0, None),  # notes.txt may be German, although the starting checkpoint is English
        ({"data.language": ("de",)}, 1.0, "de"),
        ({"data.language": ("de",)}, 0.0, "en"),
    ],
)
def test_the_language_is_known_or_left_out(keys, interpolation, language):
    config = config_of("adapt", {"data.train_file": "notes.txt"} | keys)
    assert (
        ModelCard(card_of(saved_with(config, interpolation=interpolation))).data.language
        == language
    )


def test_cut_embeddings_have_no_dev_results():
    cut = ModelCard(
        card_of(saved_with(config_of("adapt", {"matryoshka.sizes": (4, 8)})), truncate_dim=8)
    )
    assert "which chose the checkpoint, with whole embeddings of 16 numbers:" in cut.text
    assert (
        "| embedding size | 8, cut from 16 |\n| sizes that it was trained for | 4, 8, 16 |"
        in cut.text
    )
    assert "matryoshka" in cut.data.tags
    assert "| embedding size | 16 |" in card_of(saved_with(config_of("adapt")), truncate_dim=16)


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command_repeats_the_configuration():
    changed = {
        "data.train_file": "triples of mine.csv", "model.hidden_dropout": (0.1, 0.2), "train.seed": 7,
        "contrast.temperature": 1e-5, "eval.keep_start": True, "generator.name_or_path": "", "precision": "float32",
    }  # fmt: skip
    run = config_of("supervised_simcse_base", changed)
    command = card.command_of(run)
    assert command.startswith("diffcse train --config supervised_simcse_base ")
    assert set(re.findall(r"--config\.([\w.]+)=", command)) == set(changed)
    words = shlex.split(command.replace("\\\n", " "))
    assert configuration(words[3], read_overrides(words[4:]))[1] == run


def test_a_card_has_no_local_paths(tmp_path):
    private = str(tmp_path / "private")
    names = (
        "data.train_file",
        "data.cache_dir",
        "eval.data_dir",
        "model.name_or_path",
        "generator.name_or_path",
    )
    changed = dict.fromkeys(names, f"{private}/x") | {
        "distillation.teachers": (f"{private}/teacher",)
    }
    run = config_of("diffcse_base", changed | {"eval.metric": f"retrieval:{private}/x"})
    saved = saved_with(
        run, verdict=f"better than the start ({private}/x, avg): retrieval:{private}/x 3 against 2"
    )
    saved = dataclasses.replace(saved, dev_metric=run.eval.metric)
    text = card_of(saved, describe_base_model(f"{private}/x", tmp_path, {}))
    assert str(tmp_path) not in text
    assert "--config.data.train_file=x" in text
    assert "better than the start (x, avg): retrieval:x 3" in text
    assert "--config.eval.metric=retrieval:x" in text
    kept = flat(card.portable(run))
    assert (kept["eval.data_dir"], kept["distillation.teachers"]) == ("", ("teacher",))


def test_only_results_of_this_model_are_used(tmp_path):
    run, saved = tmp_path / "run", saved_with(config_of("diffcse_base"))
    run.mkdir()

    def recorded(*rows: dict) -> tuple:
        (run / "results.json").write_text(
            json.dumps({"models": rows} if len(rows) > 1 else rows[0])
        )
        return card.recorded_results(run, saved, None)

    ours, start = (
        results_of(str(run / "export"), 82.0),
        results_of("bert-base-uncased", 50.0, pooler="avg"),
    )
    assert recorded(ours, start) == (ours, start)
    assert recorded(ours, start | {"pooler": "cls"}) == (ours, None)
    others = ({"model": str(tmp_path)}, {"pooler": "avg"}, {"mode": "dev"}, {"truncate_dim": 8})
    for other in ({"asked": ["sts"], "scores": {}}, start, *(ours | each for each in others)):
        assert recorded(other) == ({}, None), other
    recorded(ours)
    (run / "selection.json").write_text("{}")
    os.utime(run / "results.json", (0, 0))
    assert card.recorded_results(run, saved, None) == ({}, None)


def test_a_card_cites_the_methods_used():
    assert papers_of(config_of("diffcse_simcsepp_base")) == ["simcse", "simcsepp", "diffcse"]
    config = config_of(
        "adapt", {"matryoshka.sizes": (8,), "data.pairs": "crops", "eval.interpolate": (0.5,)}
    )
    assert papers_of(config)[-3:] == ["matryoshka", "contriever", "wise_ft"]
    card = card_of(saved_with(config_of("simcse_base")))
    assert ("@inproceedings{gao2021simcse," in card, "chuang2022diffcse" in card) == (True, False)
    losses = [loss for loss in vars(Config()).values() if isinstance(loss, Loss)]
    assert {paper for loss in losses for paper in loss.papers} <= BIBTEX.keys()
