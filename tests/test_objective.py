import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import ENCODER, GENERATOR, NO_DROPOUT, SIMCSE, VOCABULARY, config_of, random_batch

from diffcse_jax.objectives import contrastive
from diffcse_jax.training import networks
from diffcse_jax.training.objective import as_views, corrupt, objective

RTD_METRICS = {"loss_difference", "rtd_accuracy", "rtd_accuracy_replaced", "rtd_accuracy_kept", "rtd_share_kept"}
ALWAYS = {"loss", "similarity_positive", "similarity_negative", "alignment", "uniformity"}


def evaluate(*parts, batch=None, seed: int = 0, precision: str = "float32"):
    """Metrics and gradients of a configuration's objective on a small batch."""
    config = dataclasses.replace(config_of(*parts), precision=precision)
    definitions, params, batch_stats, frozen = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    batch = jax.tree.map(jnp.asarray, batch or random_batch())
    grads, (metrics, _) = compiled_grad(definitions, config, params, batch_stats, frozen, batch, jax.random.key(seed))
    return metrics, grads


def grad_of_objective(definitions, config, params, batch_stats, frozen, batch, key):
    views = as_views(batch)
    corruptions = corrupt(definitions, config, frozen, views, key)
    return jax.grad(objective, has_aux=True)(params, batch_stats, definitions, config, views, corruptions, key)


# Compiling takes longer than running: optimising less halves it.
compiled_grad = jax.jit(
    grad_of_objective, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0}
)


def projected(batch) -> list[np.ndarray]:
    """The projected vectors of every column, dropout off."""
    definitions, params, _, _ = networks.build(config_of(SIMCSE, NO_DROPOUT), ENCODER, None, VOCABULARY)
    encoder, projector = definitions.bind("encoder", params), definitions.bind("projector", params)
    columns = []
    for column in range(batch["input_ids"].shape[1]):
        ids, mask = (jnp.asarray(batch[name][:, column]) for name in ("input_ids", "attention_mask"))
        columns.append(projector(encoder(ids, mask)["last_hidden_state"][:, 0]))
    return columns


def total(grads, prefix: str) -> float:
    return float(sum(np.abs(grad).sum() for name, grad in grads.items() if name.startswith(prefix + ".")))


def test_a_single_sentence_is_its_own_second_view():
    batch = random_batch(size=3, columns=1)
    views = as_views({name: jnp.asarray(rows) for name, rows in batch.items()})
    assert views.count == 2
    for rows, name in zip(views[:2], ("input_ids", "attention_mask"), strict=True):
        np.testing.assert_array_equal(rows, np.repeat(batch[name][:, 0], 2, axis=0))


@pytest.mark.parametrize("columns", [2, 3])
def test_the_views_of_an_example_are_neighbours(columns):
    batch = random_batch(size=3, columns=columns)
    views = as_views({name: jnp.asarray(rows) for name, rows in batch.items()})
    assert views.count == columns
    np.testing.assert_array_equal(views.input_ids[columns + 1], batch["input_ids"][1, 1])


def test_columns_are_anchor_positive_and_hard_negative():
    batch = random_batch(columns=3)
    weights = {"contrast": {"hard_negative_weight": 2.0, "temperature": 0.2}}
    metrics, _ = evaluate(SIMCSE, NO_DROPOUT, weights, batch=batch)
    z1, z2, z3 = projected(batch)
    expected = contrastive.info_nce(z1, z2, temperature=0.2, hard_negatives=z3, hard_negative_weight=2.0).mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["alignment"], contrastive.alignment(z1, z2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["uniformity"], contrastive.uniformity(z1), rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_off_dropout_negatives_have_no_dropout(seed):
    # With m near 0 the positive logit vanishes, and only the negatives are left.
    batch, options = random_batch(), {"negatives": "off_dropout", "negative_ratio": 1e-6, "temperature": 0.2}
    metrics, _ = evaluate(SIMCSE, {"contrast": options}, batch=batch, seed=seed)
    (z,) = projected(batch)
    similarity = np.float64(contrastive.cosine_similarity(z, z)) / 0.2
    negatives = np.where(np.eye(len(z)), 0.0, np.exp(similarity)).sum(axis=1)
    np.testing.assert_allclose(metrics["loss"], np.log(1 + negatives).mean(), rtol=1e-4)
    assert metrics["similarity_positive"] < 0.999  # the positives did have dropout


def test_negatives_from_the_mean_of_both_views():
    batch = random_batch(columns=2)
    metrics, _ = evaluate(SIMCSE, NO_DROPOUT, {"contrast": {"negatives": "mean", "temperature": 0.2}}, batch=batch)
    z1, z2 = projected(batch)
    expected = contrastive.off_dropout_info_nce(z1, z2, (z1 + z2) / 2, temperature=0.2, ratio=1.0, form="code")
    np.testing.assert_allclose(metrics["loss"], expected.mean(), rtol=1e-5)


@pytest.mark.slow
def test_all_objectives_at_once():
    weights = {"contrast": 0.5, "dcl": 0.1, "difference": 0.3, "mlm": 0.7}
    metrics, grads = evaluate({name: {"weight": weight} for name, weight in weights.items()})
    expected = sum(weight * metrics[f"loss_{name}"] for name, weight in weights.items())
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    trained = {"encoder", "projector", "discriminator", "token_classifier", "mlm_head"}
    assert {name.partition(".")[0] for name in grads} == trained
    assert all(total(grads, name) > 0 for name in trained)


@pytest.mark.parametrize(
    ("parts", "extra"),
    [
        ([SIMCSE], {"loss_contrast"}),
        ([], RTD_METRICS | {"loss_contrast"}),
        ([{"contrast": {"weight": 0.0}}], RTD_METRICS),
        ([SIMCSE, {"mlm": {"weight": 0.1}, "dcl": {"weight": 0.1}}], {"loss_contrast", "loss_mlm", "loss_dcl"}),
    ],
)
def test_what_has_weight_0_is_neither_computed_nor_reported(parts, extra):
    config = config_of(*parts)
    definitions, *arrays = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    run = functools.partial(grad_of_objective, definitions, config)
    _, (metrics, _) = jax.eval_shape(run, *arrays, random_batch(), jax.random.key(0))
    assert set(metrics) == ALWAYS | extra


def test_the_masked_lm_alone_embeds_nothing():
    config = config_of(SIMCSE, {"contrast": {"weight": 0.0}, "mlm": {"weight": 0.1}})
    definitions, params, batch_stats, frozen = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
    run = functools.partial(grad_of_objective, definitions, config)
    _, (metrics, _) = jax.eval_shape(run, params, batch_stats, frozen, random_batch(), jax.random.key(0))
    assert set(metrics) == {"loss", "loss_mlm"}


def test_simcse_costs_a_fraction_of_diffcse():
    def flops(*parts) -> float:
        config = config_of({"model": {"projector": "mlp"}}, *parts)
        definitions, *arrays = networks.build(config, ENCODER, GENERATOR, VOCABULARY)
        return compiled_grad.lower(definitions, config, *arrays, random_batch(), jax.random.key(0)).cost_analysis()[
            "flops"
        ]

    # The discriminator costs what the encoder does, the generator a third of it and its vocabulary.
    assert flops(SIMCSE) < 0.5 * flops()


@pytest.mark.slow
def test_the_difference_loss_teaches_the_encoder_through_the_condition_alone():
    contrast = {"contrast": {"weight": 1.0}}
    grads = {weight: evaluate(NO_DROPOUT, contrast, {"difference": {"weight": weight}})[1] for weight in (0.0, 0.5)}
    alone = evaluate(NO_DROPOUT, {"contrast": {"weight": 0.0}}, {"difference": {"weight": 1.0}})[1]
    assert total(alone, "encoder") > 0
    assert total(grads[0.0], "discriminator") == total(grads[0.0], "token_classifier") == 0
    for name, grad in grads[0.0].items():  # the gradient is linear in lambda
        scale = np.abs(alone[name]).max() + 1e-3
        np.testing.assert_allclose(grads[0.5][name] - grad, alone[name] / 2, atol=1e-3 * scale)
    for name, grad in alone.items():
        if name.startswith("discriminator.") and "attention.key.bias" not in name:
            np.testing.assert_allclose(grads[0.5][name], grad / 2, atol=1e-6)


@pytest.mark.parametrize(("condition", "reaches_projector"), [("projected", True), ("pooled", False)])
def test_the_condition_is_taken_behind_or_before_the_projector(condition, reaches_projector):
    parts = ({"contrast": {"weight": 0.0}}, {"difference": {"condition": condition}}, {"model": {"projector": "mlp"}})
    _, grads = evaluate(*parts)
    assert (total(grads, "projector") > 0) == reaches_projector
    assert total(grads, "encoder") > 0


def test_padding_changes_no_contrast():
    short = random_batch(length=12)
    long = random_batch(length=12, padding=4)
    losses = [evaluate(SIMCSE, NO_DROPOUT, batch=batch)[0]["loss"] for batch in (short, long)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_the_codes_difference_loss_counts_padding_up_to_the_longest_sentence():
    tight, padded = random_batch(seed=3), random_batch(seed=3, padding=4)
    assert tight["lengths"].max() == 12
    losses = {}
    for positions in ("real", "all"):
        # With a mask ratio of 0 both lengths have the same edits.
        difference = {"difference": {"loss_positions": positions, "mask_ratio": 0.0}}
        values = [evaluate(NO_DROPOUT, difference, batch=batch)[0]["loss_difference"] for batch in (tight, padded)]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
        losses[positions] = values[0]
    assert tight["attention_mask"].min() == 0
    assert not np.allclose(losses["all"], losses["real"], rtol=1e-3)


@pytest.mark.parametrize(
    "parts", [[SIMCSE], pytest.param([{"mlm": {"weight": 0.1}, "dcl": {"weight": 0.1}}], marks=pytest.mark.slow)]
)
def test_bfloat16_is_near_float32(parts):
    # Without the generator's dropout, and its arg-max used at masked positions only, few labels can flip.
    shared = [*parts, NO_DROPOUT, {"generator": {"dropout": False, "positions": "masked"}}]
    batch = random_batch(columns=2)
    exact, exact_grads = evaluate(*shared, batch=batch)
    rough, rough_grads = evaluate(*shared, batch=batch, precision="bfloat16")
    for name, value in exact.items():
        assert rough[name].dtype == jnp.float32
        np.testing.assert_allclose(rough[name], value, rtol=0.1, atol=0.1, err_msg=name)
    assert all(grad.dtype == jnp.float32 and np.isfinite(grad).all() for grad in rough_grads.values())
    flat, rough_flat = (np.concatenate([np.ravel(g[n]) for n in sorted(g)]) for g in (exact_grads, rough_grads))
    assert flat @ rough_flat / np.linalg.norm(flat) / np.linalg.norm(rough_flat) > 0.95
