"""What a run starts from, and the pooler that goes with it."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from tiny_model import random_params
from tiny_networks import ENCODER, SIZES, VOCABULARY, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import write_json
from diffcse_jax.models import hf
from diffcse_jax.models.heads import MlpProjector
from diffcse_jax.models.pooling_modules import RecordedPooler
from diffcse_jax.training import networks
from diffcse_jax.training.networks import StartingCheckpoint, recorded_pooler, with_own_pooler

HEAD = random_params(MlpProjector, SIZES, seed=5)
OWN = {"model": {"pooler": "own", "projector": "none"}, "difference": {"weight": 0.0}}
RECORDED = {"avg": RecordedPooler("avg", None), "cls": RecordedPooler("cls", HEAD), None: None}


def start_of(recorded: str | None, **parts) -> StartingCheckpoint:
    tokenizer = mock.MagicMock(spec=PreTrainedTokenizerFast)
    return StartingCheckpoint("tiny", dataclasses.replace(ENCODER, **parts), tokenizer, RECORDED[recorded])


@pytest.mark.parametrize(
    ("recorded", "pooler", "kept"), [("avg", "avg", False), ("cls", "cls", True), (None, "avg", False)]
)
def test_the_own_pooler_is_the_recorded_one(recorded, pooler, kept):
    config = with_own_pooler(config_of(OWN), RECORDED[recorded])
    assert (config.model.pooler, config.encoding_pooler, config.keeps_projector) == (pooler, pooler, kept)
    assert start_of(recorded).is_trained_embedding(config)
    assert start_of(recorded).pooler(config) == pooler


def test_an_explicit_pooler_is_obeyed():
    config = config_of({"model": {"pooler": "cls", "projector": "mlp"}})
    assert with_own_pooler(config, RECORDED["avg"]) is config
    start = start_of("avg")
    assert not start.is_trained_embedding(config)
    assert start.pooler(config) == "avg"
    assert start_of(None).pooler(config) == "cls_before_pooler"
    assert start_of(None).is_trained_embedding(config)


def test_what_is_said_of_a_start():
    asked = config_of({"model": {"pooler": "cls"}})
    found = start_of("avg").describe_pooler("cls", asked)
    assert "a sentence encoder with the pooler avg, but this run trains cls_before_pooler" in found
    assert start_of(None).describe_pooler("cls", asked) == ""
    own = with_own_pooler(config_of(OWN), None)
    assert "records no pooler" in start_of(None).describe_pooler("own", own)
    assert "configs/base/masked_lm.py" in start_of(None).describe_pooler("own", own)
    assert "Starting from tiny, with its own pooler (avg)." in start_of("avg").describe_pooler("own", own)


def test_a_recorded_head_is_trained_on():
    config = with_own_pooler(config_of(OWN), RECORDED["cls"])
    params = networks.build(config, ENCODER, None, VOCABULARY, projector=HEAD).params
    for name, array in HEAD.items():
        np.testing.assert_array_equal(params[f"projector.{name}"], array)
    with pytest.raises(ConfigError, match="records a dense \\+ tanh head"):
        with_own_pooler(config_of(OWN, {"model": {"projector": "batchnorm"}}), RECORDED["cls"])


def test_a_head_that_is_not_the_starts_makes_another_vector():
    kept = config_of({"model": {"pooler": "cls", "projector": "mlp", "projector_train_only": False}})
    assert start_of("cls").is_trained_embedding(kept)
    assert not start_of(None, pooler=HEAD).is_trained_embedding(kept)
    assert start_of(None, pooler=HEAD).pooler(kept) == "cls"


def test_modules_that_cannot_be_followed_matter_where_they_are_asked_for(tmp_path, capsys):
    write_json(tmp_path / "modules.json", [{"idx": 0, "path": "", "type": "sentence_transformers.models.CNN"}])
    checkpoint = dataclasses.replace(ENCODER, folder=tmp_path)
    with pytest.raises(CheckpointError, match="the modules CNN are not supported"):
        recorded_pooler(checkpoint, "own")
    assert recorded_pooler(checkpoint, "avg") is None
    assert "the modules CNN are not supported. As the baseline" in capsys.readouterr().err


def test_minilm_is_a_sentence_encoder():
    checkpoint = dataclasses.replace(ENCODER, folder=hf.find_folder("minilm"))
    assert recorded_pooler(checkpoint, "own") == RECORDED["avg"]
