"""The networks of a run, where they start from, and the pooler of the starting checkpoint."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from tiny_model import random_params
from tiny_networks import ENCODER, GENERATOR, NO_DROPOUT, SIMCSE, SIZES, VOCABULARY, config_of
from transformers import PreTrainedTokenizerFast

from diffcse_jax.batch import Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models.families.electra import ElectraEmbeddings
from diffcse_jax.models.heads import MlpProjector, ReplacedTokenHead
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.training import networks
from diffcse_jax.training.networks import StartingCheckpoint, with_own_pooler
from diffcse_jax.training.sharding import make_mesh

HEAD = random_params(MlpProjector, SIZES, seed=5)
OWN = {"model": {"pooler": "own", "projector": "none"}, "difference": {"weight": 0.0}}
RECORDED = {
    "avg": RecordedPooler("avg"),
    "cls": RecordedPooler("cls", HEAD),
    None: RecordedPooler(),
}


def assert_starts_from(arrays: dict, params: dict, network: str) -> None:
    for name, array in arrays.items():
        np.testing.assert_array_equal(params[f"{network}.{name}"], array)


def start_of(recorded: str | None, **parts) -> StartingCheckpoint:
    tokenizer = mock.MagicMock(spec=PreTrainedTokenizerFast)
    return StartingCheckpoint(
        "tiny", dataclasses.replace(ENCODER, **parts), tokenizer, RECORDED[recorded]
    )


@pytest.mark.parametrize(("recorded", "pooler"), [("avg", "avg"), ("cls", "cls"), (None, "avg")])
def test_the_own_pooler_is_the_recorded_one(recorded, pooler):
    config, start = with_own_pooler(config_of(OWN), RECORDED[recorded]), start_of(recorded)
    assert (config.model.pooler, config.encoding_pooler, config.keeps_projector) == (
        pooler,
        pooler,
        pooler == "cls",
    )
    assert start.is_trained_embedding(config)
    assert start.pooler(config) == pooler
    said = (
        f"Starting from tiny, with its own pooler ({pooler})."
        if recorded
        else "tiny records no pooler."
    )
    assert start.describe_pooler("own", config).startswith(said)


def test_a_recorded_head_is_trained_on():
    config = with_own_pooler(config_of(OWN), RECORDED["cls"])
    params = networks.build(config, ENCODER, None, VOCABULARY, projector=HEAD).params
    assert_starts_from(HEAD, params, "projector")
    with pytest.raises(ConfigError, match="records a dense \\+ tanh head"):
        with_own_pooler(config_of(OWN, {"model": {"projector": "batchnorm"}}), RECORDED["cls"])
    kept = config_of(
        {"model": {"pooler": "cls", "projector": "mlp", "projector_train_only": False}}
    )
    assert start_of("cls").is_trained_embedding(kept)
    # another head than the checkpoint's
    assert not start_of(None, pooler=HEAD).is_trained_embedding(kept)
    assert start_of(None, pooler=HEAD).pooler(kept) == "cls"


def built(*parts, encoder=ENCODER):
    return networks.build(config_of(*parts), encoder, GENERATOR, VOCABULARY)


@pytest.mark.parametrize(
    ("parts", "trained", "frozen"),
    [
        ([SIMCSE], {"encoder", "projector"}, set()),
        (
            [SIMCSE, {"mlm": {"weight": 0.1}, "dcl": {"weight": 0.1}}],
            {"encoder", "projector", "mlm_head"},
            set(),
        ),
        (
            [],
            {"encoder", "projector", "discriminator", "token_classifier"},
            {"generator", "generator_head"},
        ),
    ],
)
def test_a_network_that_nothing_needs_does_not_exist(parts, trained, frozen):
    definitions, *arrays = built(*parts)
    assert [{name.partition(".")[0] for name in params} for params in arrays] == [trained, frozen]
    assert definitions.definitions.keys() == trained | frozen


def test_where_networks_start_from():
    _, params, frozen = built({"mlm": {"weight": 0.1}})
    assert_starts_from(ENCODER.transformer, params, "encoder")
    assert_starts_from(ENCODER.transformer, params, "discriminator")
    np.testing.assert_array_equal(
        params["mlm_head.decoder"], ENCODER.transformer["embeddings.word.embedding"]
    )
    assert_starts_from(GENERATOR.transformer, frozen, "generator")
    assert_starts_from(GENERATOR.mlm_head, frozen, "generator_head")
    # PyTorch's default, unlike BERT's N(0, 0.02), which stays below 0.1.
    kernel = params["token_classifier.kernel"]
    assert 0.2 < np.abs(kernel).max() <= SIZES.hidden_size**-0.5
    # which has a masked-LM head
    _, params, _ = built(SIMCSE, {"mlm": {"weight": 0.1}}, encoder=GENERATOR)
    np.testing.assert_array_equal(
        params["mlm_head.transform.kernel"], GENERATOR.mlm_head["transform.kernel"]
    )
    np.testing.assert_array_equal(
        params["mlm_head.decoder"], GENERATOR.transformer["embeddings.word.embedding"]
    )


def test_new_heads_depend_on_the_seed_and_not_on_other_heads():
    first, other, with_mlm = (
        built({"train": {"seed": seed}, "mlm": {"weight": weight}})
        for seed, weight in ((0, 0.0), (1, 0.0), (0, 0.1))
    )
    name = "token_classifier.kernel"
    np.testing.assert_array_equal(first.params[name], with_mlm.params[name])
    assert (first.params[name] != other.params[name]).any()
    # As static arguments of jax.jit, equal definitions must not cause another compilation.
    assert first.networks == other.networks != built(NO_DROPOUT).networks
    assert hash(first.networks) == hash(other.networks)


def test_an_electra_discriminator_starts_with_its_head(monkeypatch, minilm_dir, tmp_path):
    sizes = dataclasses.replace(
        SIZES, max_positions=32, embedding_size=8, embeddings=ElectraEmbeddings
    )
    electra = dataclasses.replace(
        ENCODER, folder=tmp_path, config=sizes, transformer=random_params(Transformer, sizes, seed=3),
        discriminator_head=random_params(ReplacedTokenHead, sizes),
    )  # fmt: skip
    config = config_of({"difference": {"discriminator": "electra"}})

    def load(of=config, **parts):
        monkeypatch.setattr(
            networks, "read", lambda *_, **__: dataclasses.replace(electra, **parts)
        )
        return networks.load_discriminator(of, ENCODER, load_tokenizer(minilm_dir))

    _, params, _ = networks.build(config, ENCODER, GENERATOR, VOCABULARY, discriminator=load())
    assert_starts_from(electra.discriminator_head, params, "token_classifier")
    assert_starts_from(electra.transformer, params, "discriminator")
    # nothing needs it
    assert load(config_of(SIMCSE, {"difference": {"discriminator": "electra"}})) is None
    for parts, message in (
        ({"discriminator_head": None}, "has no head for replaced tokens"),
        (
            {"config": dataclasses.replace(sizes, hidden_size=24)},
            r"hidden states of 24\. It needs .* states of 16",
        ),
        (
            {"config": dataclasses.replace(sizes, vocab_size=59)},
            r"differ in their vocabulary \(59 and 60",
        ),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            load(**parts)
    with pytest.raises(
        CheckpointError, match=r"generator\..* differ in their vocabulary \(59 and 60"
    ):
        # the same checkpoint
        networks.load_generator(config_of(), ENCODER, load_tokenizer(minilm_dir))


def test_vocabulary_of_a_tokenizer(minilm_dir):
    tokenizer = load_tokenizer(minilm_dir)
    vocabulary = networks.vocabulary_of(Config(), tokenizer)
    # [PAD] [UNK] [CLS] [SEP] [MASK]
    assert vocabulary == Vocabulary(30522, 103, (0, 100, 101, 102, 103))
    tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="no mask token"):
        networks.vocabulary_of(Config(), tokenizer)
    assert networks.vocabulary_of(config_of(SIMCSE), tokenizer).mask_id is None
    deleting = config_of({"difference": {"edit": "delete"}})
    assert networks.vocabulary_of(deleting, tokenizer).mask_id is None


@pytest.mark.parametrize(
    ("key", "settings", "advice"),
    [
        ("generator.name_or_path", {}, "Or leave this key empty, as --config diffcse_minilm does"),
        ("difference.discriminator", {"difference": {"discriminator": "google/electra"}}, ""),
        ("model.name_or_path", {"model": {"name_or_path": "organisation/model"}}, ""),
    ],
)
def test_an_error_of_a_checkpoint_begins_with_its_key(
    key, settings, advice, minilm_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = config_of(settings)
    tokenizer = load_tokenizer(minilm_dir)
    read = {
        "generator.name_or_path": lambda: networks.load_generator(config, ENCODER, tokenizer),
        "difference.discriminator": lambda: networks.load_discriminator(config, ENCODER, tokenizer),
        "model.name_or_path": lambda: networks.open_start(config, make_mesh(config)),
    }
    with pytest.raises(CheckpointError, match=rf"^{key}: '.*' is neither a local .*{advice}"):
        read[key]()
