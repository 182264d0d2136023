"""Poolers, and how a sentence-transformers folder records them.

Writing that record is in test_export.py.
"""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_networks import REFERENCES
from safetensors.numpy import save_file

from diffcse_jax.batch import TokenRows
from diffcse_jax.errors import CheckpointError
from diffcse_jax.models import layers, sentence_folder
from diffcse_jax.models.hf import read
from diffcse_jax.models.poolers import POOLERS
from diffcse_jax.models.pooling import normalize, pool
from diffcse_jax.models.transformer import Transformer

LENGTHS = (5, 1, 3)
RANDOM = np.random.default_rng(0)
STATES = [RANDOM.normal(size=(3, 5, 4)).astype(np.float32) for _ in range(4)]
MASK = (np.arange(5) < np.array(LENGTHS)[:, None]).astype(np.int32)


def pooled(states: list[np.ndarray], mask: np.ndarray, pooler: str) -> np.ndarray:
    return np.asarray(pool(tuple(map(jnp.asarray, states)), jnp.asarray(mask), pooler))


def mean_over_tokens(*layers: np.ndarray) -> np.ndarray:
    """Compute the definition, sentence by sentence."""
    sentences = [
        np.stack([layer[row, :length] for layer in layers]) for row, length in enumerate(LENGTHS)
    ]
    return np.stack([sentence.mean(axis=(0, 1)) for sentence in sentences])


def over_tokens(function) -> np.ndarray:
    return np.stack([function(STATES[-1][row, :length]) for row, length in enumerate(LENGTHS)])


# What each pooler gives for these states, and the name of the reference's embeddings.
EXPECTED = {
    "cls": (STATES[-1][:, 0], "cls"),
    "cls_before_pooler": (STATES[-1][:, 0], "cls"),
    "avg": (mean_over_tokens(STATES[-1]), "avg.diffcse_code"),
    "avg_top2": (mean_over_tokens(STATES[-1], STATES[-2]), "avg_top2.diffcse_code"),
    "avg_first_last": (mean_over_tokens(STATES[0], STATES[-1]), "avg_first_last.diffcse_code"),
    "avg_first_block_last": (mean_over_tokens(STATES[1], STATES[-1]), "avg_first_last.simcse_code"),
    "max": (over_tokens(lambda tokens: tokens.max(axis=0)), ""),
    "mean_sqrt_len_tokens": (
        over_tokens(lambda tokens: tokens.sum(axis=0) / np.sqrt(len(tokens))),
        "",
    ),
    "weightedmean": (
        over_tokens(lambda tokens: np.average(tokens, axis=0, weights=1 + np.arange(len(tokens)))),
        "",
    ),
    "lasttoken": (over_tokens(lambda tokens: tokens[-1]), ""),
}


@pytest.mark.parametrize("pooler", POOLERS)
def test_a_pooler_follows_its_definition_without_padding(pooler):
    ours = pooled(STATES, MASK, pooler)
    np.testing.assert_allclose(ours, EXPECTED[pooler][0], rtol=1e-6, atol=1e-6)
    other = [np.where(MASK[:, :, None] == 1, layer, 1e3) for layer in STATES]
    np.testing.assert_array_equal(pooled(other, MASK, pooler), ours)
    # Rows without tokens fill up the last batch of an evaluation.
    assert np.isfinite(pooled(STATES, np.zeros_like(MASK), pooler)).all()


@pytest.mark.parametrize("pooler", ["avg", "weightedmean"])
def test_tokens_are_counted_exactly_in_bfloat16(pooler):
    states = jnp.ones((1, 301, 4), jnp.bfloat16)  # which cannot count to 301
    assert pool((states,), jnp.ones((1, 301), jnp.int32), pooler) == pytest.approx(1.0, abs=1e-6)


def test_sentence_vectors_are_those_of_the_authors_code():
    inputs, expected = (np.load(REFERENCES[-1] / f"{name}.npz") for name in ("inputs", "outputs"))
    ids, mask = (
        inputs[f"pair.{name}"].reshape(16, 32).astype(np.int32)
        for name in ("input_ids", "attention_mask")
    )
    checkpoint = read("minilm")
    assert (checkpoint.config.num_blocks, checkpoint.config.hidden_size, checkpoint.mlm_head) == (
        6,
        384,
        None,
    )
    definition = layers.definition(partial(Transformer, checkpoint.config))
    run = jax.jit(lambda params, *batch: layers.bind(definition, params)(TokenRows(*batch)))
    states = list(map(np.asarray, run(checkpoint.transformer, ids, mask)))
    for pooler in ("cls", "avg", "avg_top2", "avg_first_last", "avg_first_block_last"):
        authors = expected[f"sent_emb.{EXPECTED[pooler][1]}"]
        ours = pooled(states, mask, pooler)[:, : authors.shape[1]]
        np.testing.assert_allclose(ours, authors, rtol=1e-4, atol=1e-5, err_msg=pooler)


def test_normalize_takes_numpy_and_jax_arrays():
    rows = np.concatenate([STATES[0][0], np.zeros((1, 4), np.float32)])
    expected = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)
    for array, kind in ((rows, np.ndarray), (jnp.asarray(rows), jax.Array)):
        assert isinstance(normalize(array), kind)
        np.testing.assert_allclose(normalize(array), expected, rtol=1e-6)
    half = normalize(rows.astype(np.float16))
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, expected, atol=2e-3)


# --- the record of sentence-transformers ---


MODULES = {
    "Pooling": {"pooling_mode": "mean"},
    "Dense": {
        "in_features": 4,
        "out_features": 4,
        "activation_function": "torch.nn.modules.activation.Tanh",
    },
    "LayerNorm": {"dimension": 4},
}


def write_modules(folder, *names, **configs):
    modules = [
        {"path": f"{index}_{name}" if index else "", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(["Transformer", *names])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module, name in zip(modules[1:], names, strict=True):
        (folder / module["path"]).mkdir()
        config = configs.get(name, MODULES.get(name, {}))
        (folder / module["path"] / "config.json").write_text(json.dumps(config))
        weights = {
            "linear.weight": (4, 4),
            "linear.bias": (4,),
            "norm.weight": (4,),
            "norm.bias": (4,),
        }
        tensors = {name: np.zeros(shape, np.float32) for name, shape in weights.items()}
        save_file(tensors, folder / module["path"] / "model.safetensors")


@pytest.mark.parametrize(
    ("pooling", "pooler"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max+avg"),
        ({"embedding_dimension": 16, "pooling_mode": ["mean", "cls"]}, "avg+cls_before_pooler"),
    ],
)
def test_both_forms_of_a_pooling_mode_are_read(pooling, pooler, tmp_path):
    write_modules(tmp_path, "Pooling", Pooling=pooling)
    assert sentence_folder.read(tmp_path).pooler == pooler


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (
            ["Pooling", "LSTM"],
            {},
            "Transformer, Pooling, LSTM are not supported. Supported: Transformer, .*, Layer",
        ),
        (
            ["Pooling"],
            {"pooling_mode": ["mean", ["a"]]},
            "1_Pooling/.* expected one or more of cls, .*, got .*'a'",
        ),
        (
            ["WeightedLayerPooling", "Pooling"],
            {},
            "1_Weighted.*: these layer weights are not supported",
        ),
        (
            ["Pooling", "Dense"],
            {"in_features": "4"},
            "in_features: expected a whole number from 1, got '4'",
        ),
        (
            ["Pooling", "Dense"],
            {"out_features": 5},
            r"2_Dense: its weights have no .* linear.bias of shape \(5,\)",
        ),
        (
            ["Pooling", "Dense"],
            {"activation_function": "mine.Tanh"},
            "one of torch.nn: Identity, .*, got 'mine.Tanh'",
        ),
        (
            ["Pooling", "Dense"],
            {"module_input_name": "tokens"},
            "expected only sentence_embedding, got 'tokens'",
        ),
        (
            ["Pooling", "Dense"],
            {"use_residual": True},
            "use_residual: expected only False, got 'True'",
        ),
        (["Pooling", "LayerNorm"], {}, "a module LayerNorm reads 4 features, and gets 384"),
    ],
)
def test_unsupported_and_damaged_modules_are_named(names, config, message, tmp_path):
    write_modules(tmp_path, *names, **{names[-1]: MODULES.get(names[-1], {}) | config})
    with pytest.raises(CheckpointError, match=message):
        sentence_folder.recorded(dataclasses.replace(read("minilm"), folder=tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (5, "modules.json is not a list of modules with `type` and `path`"),
        ([{"type": ["a"], "path": ""}], "modules.json is not a list of modules"),
        ([{"type": "a.Pooling", "path": "/etc"}], "modules.json: '/etc' is not a folder inside"),
        (
            [{"type": "mine.Transformer", "path": ""}],
            "the modules mine.Transformer are not supported",
        ),
    ],
)
def test_malformed_modules_and_code_of_the_folder_are_named(content, message, tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        sentence_folder.read(tmp_path)
