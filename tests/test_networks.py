import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, NO_DROPOUT, SIMCSE, SIZES, VOCABULARY, config_of

from diffcse_jax.config import Config
from diffcse_jax.data.tokenizer import load_tokenizer
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models.parameters import subset
from diffcse_jax.training import networks


def built(*parts, encoder=ENCODER):
    return networks.build(config_of(*parts), encoder, GENERATOR, VOCABULARY)


def first_names(params) -> set[str]:
    return {name.partition(".")[0] for name in params}


@pytest.mark.parametrize(
    ("parts", "trained", "frozen"),
    [
        ([SIMCSE], {"encoder", "projector"}, set()),
        ([SIMCSE, {"model": {"projector": "none"}}], {"encoder"}, set()),
        ([SIMCSE, {"mlm": {"weight": 0.1}}], {"encoder", "projector", "mlm_head"}, set()),
        ([SIMCSE, {"dcl": {"weight": 0.1}}], {"encoder", "projector"}, set()),
        (
            [],
            {"encoder", "projector", "discriminator", "token_classifier"},
            {"generator", "generator_head"},
        ),
        ([{"difference": {"objective": "none"}}], {"encoder", "projector"}, set()),
    ],
)
def test_a_network_that_nothing_needs_does_not_exist(parts, trained, frozen):
    definitions, params, frozen_params = built(*parts)
    assert first_names(params) == trained
    assert first_names(frozen_params) == frozen
    assert definitions.definitions.keys() == trained | frozen


def test_where_networks_start_from():
    _, params, frozen = built({"mlm": {"weight": 0.1}})
    for name, array in ENCODER.transformer.items():
        np.testing.assert_array_equal(params[f"encoder.{name}"], array)
        np.testing.assert_array_equal(params[f"discriminator.{name}"], array)
    np.testing.assert_array_equal(params["mlm_head.decoder"], ENCODER.transformer["embeddings.word.embedding"])
    for part, name in (("transformer", "generator"), ("mlm_head", "generator_head")):
        for key, array in getattr(GENERATOR, part).items():
            np.testing.assert_array_equal(frozen[f"{name}.{key}"], array)
    # PyTorch's default, unlike BERT's N(0, 0.02), which stays below 0.1.
    kernel = params["token_classifier.kernel"]
    assert 0.2 < np.abs(kernel).max() <= SIZES.hidden_size**-0.5


def test_the_auxiliary_head_is_the_checkpoints_own_where_it_has_one():
    _, params, _ = built(SIMCSE, {"mlm": {"weight": 0.1}}, encoder=GENERATOR)
    np.testing.assert_array_equal(params["mlm_head.transform.kernel"], GENERATOR.mlm_head["transform.kernel"])
    np.testing.assert_array_equal(params["mlm_head.decoder"], GENERATOR.transformer["embeddings.word.embedding"])


def test_new_heads_are_a_function_of_the_seed():
    first, same, other = (built({"train": {"seed": seed}})[1] for seed in (0, 0, 1))
    for name in ("projector.expand.kernel", "projector.contract.kernel", "token_classifier.kernel"):
        np.testing.assert_array_equal(first[name], same[name])
        assert (first[name] != other[name]).any()


def test_a_bound_network_computes_with_the_arrays_it_is_given():
    definitions, params, _ = built(SIMCSE)
    projector = definitions.bind("projector", jax.device_put(params))
    pooled = np.random.default_rng(0).normal(size=(3, SIZES.hidden_size)).astype(np.float32)
    dense = {name: np.float64(array) for name, array in subset(params, "projector").items()}
    expected = np.tanh(pooled @ dense["dense.kernel"] + dense["dense.bias"])
    np.testing.assert_allclose(projector(jnp.array(pooled)), expected, atol=1e-6)


def test_definitions_of_one_configuration_are_equal():
    # As static arguments of jax.jit they must not cause another compilation.
    first, second = built()[0], built()[0]
    assert first == second
    assert hash(first) == hash(second)
    assert first != built(NO_DROPOUT)[0]


def test_a_new_head_does_not_depend_on_what_else_there_is():
    alone, beside = built()[1], built({"mlm": {"weight": 0.1}})[1]
    for name in ("projector.expand.kernel", "token_classifier.kernel"):
        np.testing.assert_array_equal(alone[name], beside[name])


def test_dropout_rates_must_fit_the_blocks():
    with pytest.raises(ConfigError, match=r"model\.hidden_dropout.*3 hidden dropout rates for 1 block"):
        built({"model": {"hidden_dropout": (0.1, 0.2, 0.3)}})


def test_a_generator_with_another_number_of_tokens_is_refused(monkeypatch, minilm_dir):
    small = dataclasses.replace(SIZES, vocab_size=59)
    monkeypatch.setattr(networks, "read", lambda *_, **__: dataclasses.replace(GENERATOR, config=small))
    with pytest.raises(CheckpointError, match="differ in their vocabulary \\(59 and 60 tokens\\)"):
        networks.load_generator(Config(), ENCODER, load_tokenizer(minilm_dir))


def test_a_generator_with_other_ids_for_the_same_number_of_tokens_is_refused(monkeypatch, minilm_dir, tmp_path):
    tokenizer = load_tokenizer(minilm_dir)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    vocab["dog"], vocab["cat"] = vocab["cat"], vocab["dog"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    shutil.copy(minilm_dir / "tokenizer_config.json", tmp_path)
    shutil.copy(minilm_dir / "config.json", tmp_path)
    monkeypatch.setattr(networks, "read", lambda *_, **__: dataclasses.replace(GENERATOR, folder=tmp_path))
    with pytest.raises(CheckpointError, match="2 of 30522 tokens have other ids"):
        networks.load_generator(Config(), ENCODER, tokenizer)
    shutil.copy(minilm_dir / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match=r"data\.max_length=32 is more than distilbert"):
        networks.load_generator(Config(), ENCODER, tokenizer)
    short = config_of({"data": {"max_length": 16}})
    assert networks.load_generator(short, ENCODER, tokenizer).folder == tmp_path


def test_the_start_as_its_own_generator(minilm_dir):
    config = config_of({"generator": {"name_or_path": "start"}})
    assert config.generator_is_start
    assert networks.load_generator(config, GENERATOR, load_tokenizer(minilm_dir)) is GENERATOR
    _, params, frozen = networks.build(config, GENERATOR, GENERATOR, VOCABULARY)
    name = "embeddings.word.embedding"
    np.testing.assert_array_equal(frozen[f"generator.{name}"], params[f"encoder.{name}"])
    assert not config_of(SIMCSE, {"generator": {"name_or_path": "start"}}).generator_is_start  # nothing needs it


def test_vocabulary_of_a_tokenizer(minilm_dir):
    tokenizer = load_tokenizer(minilm_dir)
    vocabulary = networks.vocabulary_of(Config(), tokenizer, 30522)
    assert (vocabulary.size, vocabulary.mask_id) == (30522, 103)
    assert vocabulary.special_ids == (0, 100, 101, 102, 103)  # [PAD] [UNK] [CLS] [SEP] [MASK]
    # Random tokens are the tokenizer's: a model may have embeddings that no token reads.
    assert networks.vocabulary_of(Config(), tokenizer, 30600).size == 30522
    with pytest.raises(ConfigError, match="30522 tokens, but the model only 30521"):
        networks.vocabulary_of(Config(), tokenizer, 30521)
    tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="no mask token"):
        networks.vocabulary_of(Config(), tokenizer, 30522)
    assert networks.vocabulary_of(config_of(SIMCSE), tokenizer, 30522).mask_id is None
