import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, SIMCSE, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.errors import ConfigError
from diffcse_jax.models.duplicates import equal_texts, near_duplicates, share
from diffcse_jax.models.forward import Computation
from diffcse_jax.training import networks
from diffcse_jax.training.objective import corrupt

BY_SIMILARITY = {"contrast": {"mask_duplicates": "similarity"}}


def masked_pairs(views: int, size: int, is_duplicate) -> np.ndarray:
    """The mask, pair by pair: `is_duplicate(i, j, view)` of anchor i and the text of example j in that view."""
    mask = np.zeros((size, (views - 1) * size), bool)
    for i in range(size):
        for j in range(size):
            for view in range(1, views):
                own_positive = i == j and view == 1
                mask[i, (view - 1) * size + j] = not own_positive and is_duplicate(i, j, view)
    return mask


@pytest.mark.parametrize("views", [2, 4])
def test_equal_texts_are_found_pair_by_pair(views):
    texts = np.random.default_rng(0).integers(1, 3, (9, views, 3)).astype(np.int32)  # of 8 possible ones

    def is_duplicate(i, j, view):
        same = lambda a, b: (a == b).all()  # noqa: E731
        pair, candidates = texts[i, :2], texts[j, :2] if view == 1 else texts[j, view : view + 1]
        return any(same(one, other) for one in pair for other in candidates)

    expected = masked_pairs(views, 9, is_duplicate)
    assert 0.1 < expected.mean() < 0.9
    np.testing.assert_array_equal(equal_texts(jnp.array(texts)), expected)


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_near_duplicates_exceed_the_own_positive_or_the_threshold(threshold):
    vectors = np.random.default_rng(0).normal(size=(9, 3, 4)).astype(np.float32)
    vectors[:, 1] += vectors[:, 0]  # so that positives are similar to their anchors
    normalised = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    def is_duplicate(i, j, view):
        bound = threshold or normalised[i, 0] @ normalised[i, 1]
        return normalised[i, 0] @ normalised[j, view] > bound

    expected = masked_pairs(3, 9, is_duplicate)
    assert 0.02 < expected.mean() < 0.5
    duplicates = near_duplicates(jnp.array(vectors), threshold=threshold)
    np.testing.assert_array_equal(duplicates, expected)
    np.testing.assert_allclose(share(duplicates), expected.sum() / (9 * 17))


def test_the_guide_is_the_encoder_as_it_starts_without_dropout():
    config = config_of(SIMCSE, BY_SIMILARITY)
    built = networks.build(config, ENCODER, None, VOCABULARY)
    assert not any(name.startswith("guide.") for name in built.params)
    for name, array in ENCODER.transformer.items():
        np.testing.assert_array_equal(built.frozen[f"guide.{name}"], array)

    batch = random_batch(columns=2)
    batch["input_ids"][3, 1] = batch["input_ids"][5, 0]  # equal texts of different examples
    batch["attention_mask"][3, 1] = batch["attention_mask"][5, 0]
    views, frozen = jax.tree.map(jnp.asarray, views_of(batch)), Computation(built.networks, built.frozen)
    mask = corrupt(config, frozen, views, jax.random.key(0))["contrast"]
    encoder = Computation(built.networks, built.params).network("encoder")
    vectors = encoder(views.rows)["last_hidden_state"][:, 0].reshape(8, 2, -1)
    expected = np.array(near_duplicates(vectors, threshold=0.0))
    expected[3, 5] = expected[5, 3] = True
    np.testing.assert_array_equal(mask, expected)


def test_an_anchor_that_is_its_own_positive_needs_a_threshold():
    contrast = config_of(SIMCSE, BY_SIMILARITY).objectives["contrast"]
    contrast.check_columns(2)
    with pytest.raises(ConfigError, match=r"nothing is more similar.*contrast\.duplicate_similarity, such as 0\.9"):
        contrast.check_columns(1)
    with_threshold = {"contrast": {"mask_duplicates": "similarity", "duplicate_similarity": 0.9}}
    config_of(SIMCSE, with_threshold).objectives["contrast"].check_columns(1)
