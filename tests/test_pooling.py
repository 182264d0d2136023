from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffcse_jax.batch import TokenRows
from diffcse_jax.models import parameters
from diffcse_jax.models.hf import read
from diffcse_jax.models.pooling import POOLERS, normalize, pool
from diffcse_jax.models.transformer import Transformer

LENGTHS = (5, 1, 3)
RANDOM = np.random.default_rng(0)
STATES = [RANDOM.normal(size=(3, 5, 4)).astype(np.float32) for _ in range(4)]
MASK = (np.arange(5) < np.array(LENGTHS)[:, None]).astype(np.int32)


def pooled(states: list[np.ndarray], mask: np.ndarray, pooler: str) -> np.ndarray:
    return np.asarray(pool(tuple(map(jnp.asarray, states)), jnp.asarray(mask), pooler))


def mean_over_tokens(*layers: np.ndarray) -> np.ndarray:
    """Compute the definition, sentence by sentence."""
    sentences = [np.stack([layer[row, :length] for layer in layers]) for row, length in enumerate(LENGTHS)]
    return np.stack([sentence.mean(axis=(0, 1)) for sentence in sentences])


EXPECTED = {
    "cls": STATES[-1][:, 0],
    "cls_before_pooler": STATES[-1][:, 0],
    "avg": mean_over_tokens(STATES[-1]),
    "avg_top2": mean_over_tokens(STATES[-1], STATES[-2]),
    "avg_first_last": mean_over_tokens(STATES[0], STATES[-1]),
    "avg_first_block_last": mean_over_tokens(STATES[1], STATES[-1]),
}


def test_every_pooler_of_the_configuration_is_tested():
    assert set(EXPECTED) == set(POOLERS)


@pytest.mark.parametrize("pooler", POOLERS)
def test_pooler_follows_its_definition(pooler):
    np.testing.assert_allclose(pooled(STATES, MASK, pooler), EXPECTED[pooler], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooler", POOLERS)
def test_padding_does_not_count(pooler):
    other = [np.where(MASK[:, :, None] == 1, layer, 1e3) for layer in STATES]
    np.testing.assert_array_equal(pooled(other, MASK, pooler), pooled(STATES, MASK, pooler))


@pytest.mark.parametrize("pooler", POOLERS)
def test_a_row_without_tokens_stays_finite(pooler):
    """Such rows fill up the last batch of an evaluation."""
    assert np.isfinite(pooled(STATES, np.zeros_like(MASK), pooler)).all()


def test_one_block_is_both_top_and_last():
    first, last = STATES[:2]
    np.testing.assert_allclose(pooled([first, last], MASK, "avg_top2"), mean_over_tokens(first, last), atol=1e-6)
    np.testing.assert_allclose(pooled([first, last], MASK, "avg_first_last"), mean_over_tokens(first, last), atol=1e-6)


@pytest.fixture(scope="module")
def reference_states(reference_dir) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states of the real encoder on the reference sentences, and their mask."""
    inputs = np.load(reference_dir / "inputs.npz")
    ids, mask = (inputs[f"pair.{name}"].reshape(16, 32).astype(np.int32) for name in ("input_ids", "attention_mask"))
    checkpoint = read("minilm")
    definition = parameters.definition(partial(Transformer, checkpoint.config))
    run = jax.jit(lambda params, *batch: parameters.bind(definition, params)(TokenRows(*batch))["hidden_states"])
    return list(map(np.asarray, run(checkpoint.transformer, ids, mask))), mask


@pytest.mark.parametrize(
    ("pooler", "key"),
    [
        ("cls", "cls"),
        ("cls_before_pooler", "cls"),
        ("avg", "avg.diffcse_code"),
        ("avg_top2", "avg_top2.diffcse_code"),
        ("avg_first_last", "avg_first_last.diffcse_code"),
        ("avg_first_block_last", "avg_first_last.simcse_code"),
    ],
)
def test_sentence_vectors_are_those_of_the_authors_code(reference_dir, reference_states, pooler, key):
    expected = np.load(reference_dir / "outputs.npz")[f"sent_emb.{key}"]
    np.testing.assert_allclose(pooled(*reference_states, pooler), expected, rtol=1e-4, atol=1e-5)


def test_normalize_takes_numpy_and_jax_arrays():
    rows = np.concatenate([STATES[0][0], np.zeros((1, 4), np.float32)])
    expected = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)
    for array, kind in ((rows, np.ndarray), (jnp.asarray(rows), jax.Array)):
        assert isinstance(normalize(array), kind)
        np.testing.assert_allclose(normalize(array), expected, rtol=1e-6)
    half = normalize(rows.astype(np.float16))
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, expected, atol=2e-3)
