"""The weighted sum of losses: what is computed, which networks learn, prefixes, padding and precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch, views_of

from diffcse_jax.batch import TokenRows
from diffcse_jax.losses import prepare
from diffcse_jax.losses.contrastive import info_nce
from diffcse_jax.losses.decorrelation import dimension_contrast
from diffcse_jax.models.forward import Computation
from diffcse_jax.models.pooling import alignment, cosine_similarity, uniformity
from diffcse_jax.training import networks
from diffcse_jax.training.step import loss_of_batch


def evaluate(*parts, batch=None, transform=lambda loss: loss):
    """The loss of a configuration on a small batch, and metrics by name; or what `transform` makes of this function."""
    config = config_of(*parts)
    built = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    views, key = jax.tree.map(jnp.asarray, views_of(batch or random_batch())), jax.random.key(0)

    def loss(params, frozen):
        inputs = prepare(config.losses, Computation(built.networks, frozen), views, key, config.run_info)
        return loss_of_batch(config, Computation(built.networks, params), views, inputs, key)

    return jax.jit(transform(loss), compiler_options={"xla_backend_optimization_level": 0})(built.params, built.frozen)


def pooled_and_projected(batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The embeddings of every column before and after the projector, dropout off."""
    built = networks.build(config_of(SIMCSE, NO_DROPOUT), ENCODER, None, VOCABULARY)
    encoder, projector = map(Computation(built.networks, built.params).network, ("encoder", "projector"))
    columns = [
        TokenRows(*(jnp.asarray(batch[name][:, column]) for name in ("input_ids", "attention_mask")))
        for column in range(batch["input_ids"].shape[1])
    ]
    pooled = [encoder(rows)[-1][:, 0] for rows in columns]
    return pooled, [projector(column) for column in pooled]


def test_columns_are_anchor_positive_and_hard_negatives():
    batch = random_batch(columns=4)
    batch["input_ids"][2, 3] = batch["input_ids"][1, 0]  # a hard negative that is another example's anchor
    batch["attention_mask"][2, 3] = batch["attention_mask"][1, 0]
    options = {"hard_negative_weight": 2.0, "temperature": 0.2, "mask_duplicates": "text"}
    _, metrics = evaluate(SIMCSE, NO_DROPOUT, {"contrast": options}, batch=batch)
    _, (z1, z2, *hard) = pooled_and_projected(batch)
    left_out = jnp.zeros((8, 24), bool).at[1, 16 + 2].set(True)
    expected = info_nce(
        z1, z2, temperature=0.2, hard_negatives=hard, hard_negative_weight=2.0, left_out=left_out
    ).mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["negatives_masked"], 1 / (8 * 23), rtol=1e-5)
    np.testing.assert_allclose(metrics["alignment"], alignment(z1, z2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["uniformity"], uniformity(z1), rtol=1e-5)


def test_off_dropout_negatives_have_no_dropout():
    # With m near 0 the positive logit vanishes, and only the negatives are left.
    batch, options = random_batch(), {"negatives": "off_dropout", "negative_ratio": 1e-6, "temperature": 0.2}
    _, metrics = evaluate(SIMCSE, {"contrast": options}, batch=batch)
    _, (z,) = pooled_and_projected(batch)
    similarity = np.float64(cosine_similarity(z, z)) / 0.2
    negatives = np.where(np.eye(len(z)), 0.0, np.exp(similarity)).sum(axis=1)
    np.testing.assert_allclose(metrics["loss"], np.log(1 + negatives).mean(), rtol=1e-4)
    assert metrics["similarity_positive"] < 0.999  # the positives did have dropout


def test_prefixes_of_vectors_add_their_losses():
    batch = random_batch(columns=2)
    parts = (SIMCSE, NO_DROPOUT, {"contrast": {"temperature": 0.2}, "dcl": {"weight": 0.5}})
    matryoshka = {"matryoshka": {"sizes": (4, 8)}, "model": {"projector": "none"}}
    _, metrics = evaluate(*parts, matryoshka, batch=batch)
    (z1, z2), _ = pooled_and_projected(batch)
    losses = {
        "contrast": lambda a, b: info_nce(a, b, temperature=0.2).mean(),
        "dcl": lambda a, b: dimension_contrast(a, b, temperature=5.0, form="code").mean(),
    }
    for name, loss in losses.items():
        whole, of_4, of_8 = (loss(z1[:, :size], z2[:, :size]) for size in (16, 4, 8))
        np.testing.assert_allclose(metrics[f"loss_{name}_4"], of_4, rtol=1e-5)
        np.testing.assert_allclose(metrics[f"loss_{name}"], whole + of_4 + of_8, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], metrics["loss_contrast"] + 0.5 * metrics["loss_dcl"], rtol=1e-6)


@pytest.mark.slow
def test_the_codes_difference_loss_counts_padding_up_to_the_longest_sentence():
    tight, padded = random_batch(seed=3), random_batch(seed=3, padding=4)
    assert tight["lengths"].max() == 12
    losses = {}
    for positions in ("real", "all"):
        # With a mask ratio of 0 both lengths have the same edits.
        difference = {"difference": {"loss_positions": positions, "mask_ratio": 0.0}}
        values = [evaluate(NO_DROPOUT, difference, batch=batch)[1]["loss_difference"] for batch in (tight, padded)]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
        losses[positions] = values[0]
    assert tight["attention_mask"].min() == 0
    assert not np.allclose(losses["all"], losses["real"], rtol=1e-3)


def test_bfloat16_is_near_float32():
    # Without the generator's dropout, and its arg-max used at masked positions only, few labels can flip.
    shared = [SIMCSE, NO_DROPOUT, {"generator": {"dropout": False, "positions": "masked"}}]
    batch = random_batch(columns=2)
    gradients = functools.partial(evaluate, *shared, batch=batch, transform=functools.partial(jax.grad, has_aux=True))
    (exact_grads, exact), (rough_grads, rough) = gradients(), gradients({"precision": "bfloat16"})
    for name, value in exact.items():
        assert rough[name].dtype == jnp.float32
        np.testing.assert_allclose(rough[name], value, rtol=0.1, atol=0.1, err_msg=name)
    assert all(grad.dtype == jnp.float32 and np.isfinite(grad).all() for grad in rough_grads.values())
    flat, rough_flat = (np.concatenate([np.ravel(g[n]) for n in sorted(g)]) for g in (exact_grads, rough_grads))
    assert flat @ rough_flat / np.linalg.norm(flat) / np.linalg.norm(rough_flat) > 0.95
