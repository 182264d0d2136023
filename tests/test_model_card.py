import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from tiny_model import hf_config_of

from diffcse_jax.config import Config, configuration, flat, read_overrides, shipped_config
from diffcse_jax.export import card
from diffcse_jax.export.card import BIBTEX, model_card, papers_of
from diffcse_jax.losses import Loss
from diffcse_jax.models.hf import Pretrained, transformer_config
from diffcse_jax.run_folder import BaseModel, describe_base_model
from diffcse_jax.run_folder.checkpoints import SavedEncoder
from diffcse_jax.run_folder.records import Record

SIZES = transformer_config(hf_config_of("bert"), source="test")
BASE = BaseModel("bert-base-uncased", "bert-base-uncased", {"license": "apache-2.0"}, ("en",))


def config_of(name: str, **keys: object) -> Config:
    config = shipped_config(name)
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    return Config.from_dict(config.to_dict())


def saved_with(config: Config, **fields: object) -> SavedEncoder:
    dev = {"stsb_spearman": 81.25, "guard_stsb_spearman": 81.25}
    start = Record(0, "avg", {"stsb_spearman": 79.5, "guard_stsb_spearman": 79.5}, "stsb_spearman", "text")
    return SavedEncoder(
        250, "cls_before_pooler", dev, "stsb_spearman", config=config,
        checkpoint=Pretrained(Path(), {}, SIZES, {}), baseline=start, **fields,
    )  # fmt: skip


def card_of(saved: SavedEncoder, base: BaseModel = BASE, **fields: object) -> str:
    given = {"name": "ada/model", "truncate_dim": None, "hub_id": None, "license": None, "language": ()}
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
    saved = saved_with(config_of("diffcse_base"), verdict="Better than bert-base-uncased", interpolation=0.5)
    card = ModelCard(card_of(saved, results=tests, hub_id="ada/model", license="mit"))
    data = card.data
    assert (data.base_model, data.license, data.language) == ("bert-base-uncased", "mit", "en")
    facts = ("0.5 x step 250 + 0.5 x the starting checkpoint", 'SentenceTransformer("ada/model")', "not the official")
    for fact in (*facts, "The run's verdict: Better than bert-base-uncased."):
        assert fact in card.text
    assert data.datasets == ["princeton-nlp/datasets-for-simcse"]
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    rows = [line for line in card.text.splitlines() if "(avg)" in line or "this model (" in line]
    assert [re.findall(r"\d+\.\d\d", row) for row in rows] == [
        ["79.50", "79.50"], ["81.25", "81.25"], ["47.00", "80.00"], ["82.03", "80.00"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "interpolation", "language"),
    [
        ({}, 1.0, None),  # notes.txt may be German, although the starting checkpoint is English
        ({"data__language": ("de",)}, 1.0, "de"),
        ({"data__language": ("de",)}, 0.0, "en"),
    ],
)
def test_the_language_is_known_or_left_out(keys, interpolation, language):
    config = config_of("adapt", **{"data__train_file": "notes.txt"} | keys)
    saved = dataclasses.replace(saved_with(config), interpolation=interpolation)
    assert ModelCard(card_of(saved)).data.language == language


def test_cut_embeddings_have_no_dev_results():
    cut = ModelCard(card_of(saved_with(config_of("adapt", matryoshka__sizes=(4, 8))), truncate_dim=8))
    assert "which chose the checkpoint, with whole embeddings of 16 numbers:" in cut.text
    assert "| embedding size | 8, cut from 16 |\n| sizes that it was trained for | 4, 8, 16 |" in cut.text
    assert "matryoshka" in cut.data.tags


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command_repeats_the_configuration():
    changed = {
        "data.train_file": "triples of mine.csv", "model.hidden_dropout": (0.1, 0.2), "train.seed": 7,
        "contrast.temperature": 1e-5, "eval.keep_start": True, "generator.name_or_path": "", "precision": "float32",
    }  # fmt: skip
    run = Config.from_dict(flat(shipped_config("supervised_simcse_base").to_dict()) | changed)
    command = card.command_of(run)
    assert command.startswith("diffcse train --config supervised_simcse_base ")
    assert set(re.findall(r"--config\.([\w.]+)=", command)) == set(changed)
    words = shlex.split(command.replace("\\\n", " "))
    assert configuration(words[3], read_overrides(words[4:]))[1] == run


def test_a_card_has_no_local_paths(tmp_path):
    private = str(tmp_path / "private")
    names = ("data.train_file", "data.cache_dir", "eval.data_dir", "model.name_or_path", "generator.name_or_path")
    changed = dict.fromkeys(names, f"{private}/x") | {"distillation.teachers": (f"{private}/teacher",)}
    run = Config.from_dict(flat(shipped_config("diffcse_base").to_dict()) | changed)
    saved = saved_with(run, verdict=f"better than the start ({private}/x, avg): 3 against 2")
    text = card_of(saved, describe_base_model(f"{private}/x", tmp_path, {}))
    assert str(tmp_path) not in text
    assert "--config.data.train_file=x" in text
    assert "better than the start (x, avg)" in text
    kept = flat(card.portable(run))
    assert (kept["eval.data_dir"], kept["distillation.teachers"]) == ("", ("teacher",))


def test_only_results_of_this_model_are_used(tmp_path):
    run, saved = tmp_path / "run", saved_with(config_of("diffcse_base"))
    run.mkdir()

    def recorded(*rows: dict) -> tuple:
        (run / "results.json").write_text(json.dumps({"models": rows} if len(rows) > 1 else rows[0]))
        return card.recorded_results(run, saved, None)

    ours, start = results_of(str(run / "export"), 82.0), results_of("bert-base-uncased", 50.0, pooler="avg")
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
    config = config_of("adapt", matryoshka__sizes=(8,), data__pairs="crops", eval__interpolate=4)
    assert papers_of(config)[-3:] == ["matryoshka", "contriever", "wise_ft"]
    card = card_of(saved_with(config_of("simcse_base")))
    assert "@inproceedings{gao2021simcse," in card
    assert "chuang2022diffcse" not in card


def test_every_paper_has_bibtex():
    for field in dataclasses.fields(Config):
        if isinstance(loss := getattr(Config(), field.name), Loss):
            assert set(loss.papers) <= BIBTEX.keys(), field.name
    for entry in BIBTEX.values():
        assert re.match(r"@(inproceedings|article)\{\w+,\n", entry)
        assert entry.count("{") == entry.count("}")
        assert all(f"  {field} = {{" in entry for field in ("title", "author", "year"))
