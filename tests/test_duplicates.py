import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, SIMCSE, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import prepare
from diffcse_jax.losses.contrastive import equal_texts, near_duplicates, share
from diffcse_jax.models.forward import Computation, Networks
from diffcse_jax.models.pooling import cosine_similarity
from diffcse_jax.training import networks

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
    duplicates = near_duplicates(tuple(jnp.moveaxis(jnp.array(vectors), 1, 0)), threshold=threshold)
    np.testing.assert_array_equal(duplicates, expected)
    np.testing.assert_allclose(share(duplicates), expected.sum() / (9 * 17))


def batch_with_equal_texts() -> Batch:
    batch = random_batch(columns=2)
    batch["input_ids"][3, 1] = batch["input_ids"][5, 0]
    batch["attention_mask"][3, 1] = batch["attention_mask"][5, 0]
    return jax.tree.map(jnp.asarray, views_of(batch))


@pytest.mark.parametrize("symmetric", [False, True])
def test_near_duplicates_are_found_by_the_starting_checkpoint_without_dropout(symmetric):
    config = config_of(SIMCSE, {"contrast": {"mask_duplicates": "similarity", "symmetric": symmetric}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    assert not any(name.startswith("start.") for name in built.params)
    for name, array in ENCODER.transformer.items():
        np.testing.assert_array_equal(built.frozen[f"start.transformer.{name}"], array)

    batch, frozen = batch_with_equal_texts(), Computation(built.networks, built.frozen)
    masks = prepare(config.losses, frozen, batch, jax.random.key(0), config.run_info)["contrast"]
    encoder = Computation(built.networks, built.params).network("encoder")
    z1, z2 = batch.by_view(encoder(batch.rows)["last_hidden_state"][:, 0])
    for mask, views in ((masks.of_anchors, (z1, z2)), (masks.of_positives, (z2, z1))):
        if mask is None:
            assert not symmetric
            continue
        expected = np.array(near_duplicates(views, threshold=0.0))
        expected[3, 5] = expected[5, 3] = True
        np.testing.assert_array_equal(mask, expected)


def test_the_bound_belongs_to_the_anchor_in_both_directions(monkeypatch):
    """Three examples whose masks differ from the transpose: each direction has its own anchors."""
    z1 = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    z2 = jnp.array([[0.9, 0.44], [0.2, 0.98], [0.1, 0.995]])
    similarity = np.array(cosine_similarity(z1, z2))
    config = config_of(SIMCSE, {"contrast": {"mask_duplicates": "similarity", "symmetric": True}})
    frozen = Computation(Networks(VOCABULARY, {}), {})
    monkeypatch.setattr(Computation, "network", lambda self, name: None)
    monkeypatch.setattr(Computation, "map_chunks", lambda self, *_: jnp.stack([z1, z2], axis=1).reshape(6, 2))
    batch = Batch(*jnp.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4))
    masks = config.losses["contrast"].prepare(frozen, batch, jax.random.key(0), config.run_info)
    own = np.diag(similarity)
    np.testing.assert_array_equal(masks.of_anchors, (similarity > own[:, None]) & ~np.eye(3, dtype=bool))
    np.testing.assert_array_equal(masks.of_positives, (own[:, None] < similarity.T) & ~np.eye(3, dtype=bool))
    assert (np.asarray(masks.of_positives) != np.asarray(masks.of_anchors).T).any()


def test_an_anchor_that_is_its_own_positive_needs_a_threshold():
    contrast = config_of(SIMCSE, BY_SIMILARITY).losses["contrast"]
    contrast.check_columns(2)
    with pytest.raises(ConfigError, match=r"nothing is more similar.*contrast\.duplicate_similarity, such as 0\.9"):
        contrast.check_columns(1)
    with_threshold = {"contrast": {"mask_duplicates": "similarity", "duplicate_similarity": 0.9}}
    config_of(SIMCSE, with_threshold).losses["contrast"].check_columns(1)
