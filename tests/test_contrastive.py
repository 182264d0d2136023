"""Losses that compare embeddings: InfoNCE and its variants, duplicates, edits; DCL and Barlow Twins."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiny_networks import (
    ENCODER,
    NO_DROPOUT,
    SIMCSE,
    VOCABULARY,
    config_of,
    forward_of,
    random_batch,
    shared_forward,
    views_of,
)

from diffcse_jax.batch import TokenRows
from diffcse_jax.losses import prepare
from diffcse_jax.losses.contrastive import equal_texts, info_nce, near_duplicates, separate_info_nce
from diffcse_jax.losses.decorrelation import decorrelation, dimension_contrast
from diffcse_jax.models.forward import Computation, fold_in_name, row_keys
from diffcse_jax.training import networks

KEY = jax.random.key(0)
finite = arrays.arrays(np.float32, (5, 4), elements=st.floats(-10, 10, width=32))


def random_vectors(count: int, rows: int = 7, dim: int = 5, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(count, rows, dim)).astype(np.float32))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.float64(a), np.float64(b)
    return (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)[None]


def loss_of(name, **options):
    return config_of({"difference": {"weight": 0.0}, name: options}).losses[name]


def paper_off_dropout(z1, z2, z0):
    return separate_info_nce((z1, z2), (z0, z0), temperature=0.05, ratio=0.9, form="paper").mean()


@pytest.mark.parametrize(
    ("name", "loss", "arguments"),
    [
        ("PAPER_eq3_offinfo_m0.9", paper_off_dropout, "z1 z2 z0"),
        ("PAPER_eq5_dcl_tau5", lambda z1, z2: dimension_contrast(z1, z2, temperature=5.0, form="paper").sum(), "z1 z2"),
    ],
)
def test_the_papers_forms_have_the_values_and_gradients_of_the_reference(reference_dir, name, loss, arguments):
    """Those of the authors' code are in test_reference.py."""
    stored = dict(np.load(reference_dir / "losses.npz"))
    vectors = [stored[f"n64d128.{argument}"] for argument in arguments.split()]
    value, grads = jax.value_and_grad(loss, argnums=tuple(range(len(vectors))))(*vectors)
    expected_value = json.loads((reference_dir / "losses.json").read_text())[f"n64d128.{name}"]["loss"]
    np.testing.assert_allclose(value, expected_value, rtol=1e-4)
    for argument, grad in zip(arguments.split(), grads, strict=True):
        if (expected := stored.get(f"n64d128.{name}.grad_{argument}")) is not None:
            np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("similarity", "columns"), [("cosine", 3), ("dot", 1)])
def test_info_nce_with_hard_negatives_is_equation_8(similarity, columns):
    similarities = cosines if similarity == "cosine" else np.inner
    z1, z2, *hard = random_vectors(2 + columns)
    positives = np.exp(similarities(z1, z2) / 0.8)
    negatives = sum(np.exp(similarities(z1, z3) / 0.8) for z3 in hard)
    weights = np.where(np.eye(7), 1.7, 1.0)
    expected = -np.log(np.diag(positives) / (positives + weights * negatives).sum(axis=1))
    z1, z2, *hard = map(jnp.array, (z1, z2, *hard))
    options = {"temperature": 0.8, "similarity": similarity, "hard_negative_weight": 1.7}
    np.testing.assert_allclose(info_nce(z1, z2, hard_negatives=hard, **options), expected, rtol=1e-5)


def test_pairs_left_out_are_not_in_the_denominator_of_separate_negatives():
    z1, z2, z3, z4 = random_vectors(4)
    left_out = (np.random.default_rng(1).random((7, 7)) < 0.3) & ~np.eye(7, dtype=bool)
    others = np.where(left_out | np.eye(7, dtype=bool), 0.0, np.exp(cosines(z3, z4) / 0.2)).sum(axis=1)
    positives = np.diag(cosines(z1, z2)) / 0.2
    pairs, options = ((z1, z2), (z3, z4)), {"temperature": 0.2, "ratio": 1.0, "form": "code"}
    losses = separate_info_nce(*jax.tree.map(jnp.array, pairs), left_out=jnp.array(left_out), **options)
    np.testing.assert_allclose(losses, np.log(np.exp(positives) + others) - positives, rtol=1e-5, atol=1e-6)


def test_symmetric_contrast_is_the_mean_of_both_directions():
    columns = 3
    views = random_vectors(columns)
    logits = np.exp(cosines(views[0], views[1]) / 0.2)
    left_out = np.random.default_rng(1).random((7, 7 * (columns - 1))) < 0.3
    left_out[np.arange(7), np.arange(7)] = False
    hard = [np.exp(cosines(views[0], view) / 0.2) for view in views[2:]]
    rows = np.where(left_out, 0.0, np.concatenate([logits, *hard], axis=1)).sum(axis=1)
    of_columns = np.where(left_out[:, :7], 0.0, logits).sum(axis=0)
    expected = np.log(rows * of_columns).mean() / 2 - np.log(np.diag(logits)).mean()
    masks = jnp.array(left_out), jnp.array(left_out[:, :7].T)
    loss, _ = loss_of("contrast", temperature=0.2, symmetric=True).loss(forward_of(*views), masks, KEY)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(("positives", "negatives"), [("noise", "dropout"), ("dropout", "noise")])
def test_noise_is_added_only_where_asked(positives, negatives):
    views = random_vectors(2, rows=300, dim=20)
    contrast = loss_of("contrast", positives=positives, negatives=negatives, noise_variance=0.3)
    pairs = contrast._pairs(forward_of(*views), jax.random.key(0))
    for kind, pair in zip((positives, negatives), pairs, strict=True):
        noise = np.stack([noised - view for noised, view in zip(pair, views, strict=True)])
        np.testing.assert_allclose(noise.var(), 0.3 if kind == "noise" else 0.0, rtol=0.05)
        if kind == "noise":
            assert abs(np.corrcoef(noise.reshape(2, -1))[0, 1]) < 0.05


@given(finite, finite)
def test_info_nce_stays_finite(z1, z2):
    value, grad = jax.value_and_grad(lambda z: info_nce(z, jnp.array(z2), temperature=0.05).sum())(jnp.array(z1))
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("views", [2, 4])
def test_equal_texts(views):
    texts = np.random.default_rng(0).integers(1, 3, (9, views, 3)).astype(np.int32)  # of 8 possible ones
    expected = np.zeros((9, views - 1, 9), bool)
    for i, view, j in np.ndindex(expected.shape):  # of anchor i and example j
        candidates = texts[j, :2] if view == 0 else texts[j, view + 1 : view + 2]
        equal = any((one == other).all() for one in texts[i, :2] for other in candidates)
        expected[i, view, j] = equal and not (view == 0 and i == j)
    assert 0.1 < expected.mean() < 0.9
    np.testing.assert_array_equal(equal_texts(jnp.array(texts)), expected.reshape(9, -1))


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_near_duplicates_exceed_the_bound(threshold):
    z1, z2, z3 = random_vectors(3, rows=9, dim=4)
    z2 += z1  # so that positives are similar to their anchors
    similarities = np.concatenate([cosines(z1, z2), cosines(z1, z3)], axis=1)
    expected = similarities > (threshold or np.diagonal(similarities)[:, None])
    np.fill_diagonal(expected, False)
    assert 0.02 < expected.mean() < 0.5
    np.testing.assert_array_equal(near_duplicates([*map(jnp.array, (z1, z2, z3))], threshold=threshold), expected)


def test_the_starting_checkpoint_finds_near_duplicates():
    config = config_of(SIMCSE, {"contrast": {"mask_duplicates": "similarity", "symmetric": True}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    assert not any(name.startswith("start.") for name in built.params)
    for name, array in ENCODER.transformer.items():
        np.testing.assert_array_equal(built.frozen[f"start.transformer.{name}"], array)

    arrays = random_batch(columns=2)
    for values in (arrays["input_ids"], arrays["attention_mask"]):
        values[3, 1] = values[5, 0]
    batch, frozen = jax.tree.map(jnp.asarray, views_of(arrays)), Computation(built.networks, built.frozen)
    masks = prepare(config.losses, frozen, batch, jax.random.key(0), config.run_info)["contrast"]
    encoder = Computation(built.networks, built.params).network("encoder")
    z1, z2 = batch.by_view(encoder(batch.rows)[-1][:, 0])
    # Each direction has the bounds of its own anchors.
    for mask, views in zip(masks, ((z1, z2), (z2, z1)), strict=True):
        expected = np.array(near_duplicates(views, threshold=0.0))
        expected[3, 5] = expected[5, 3] = True
        np.testing.assert_array_equal(mask, expected)
    assert (np.asarray(masks[1]) != np.asarray(masks[0]).T).any()


def test_dropout_contrast():
    config = config_of(SIMCSE, {"dropout_contrast": {"weight": 1.0, "temperature": 0.2}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    batch = random_batch(size=6, columns=2)
    for values in batch.values():
        values[4, 0] = values[1, 0]

    @jax.jit
    def loss_and_vectors(params, views):
        forward = shared_forward(config, Computation(built.networks, params), views, KEY)
        loss, _ = config.losses["dropout_contrast"].loss(forward, None, KEY)
        again = forward.projected(views.anchors, row_keys(fold_in_name(KEY, "anchors again"), 6), name="again")
        plain = forward.projected(views.anchors, None, name="plain")
        return loss, forward.projected_views[0], again, plain

    loss, anchors, again, plain = loss_and_vectors(built.params, jax.tree.map(jnp.asarray, views_of(batch)))
    assert not np.allclose(again, anchors, atol=1e-2)
    assert not np.allclose(again, plain, atol=1e-2)
    equal = np.zeros((6, 6), bool)
    equal[[1, 4], [4, 1]] = True
    expected = info_nce(anchors, again, temperature=0.2, left_out=jnp.asarray(equal)).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_edited_contrast():
    options = {"weight": 1.0, "edit": "delete", "delete_ratio": 0.4, "temperature": 0.2}
    config = config_of(SIMCSE, NO_DROPOUT, {"edited_contrast": options, "train": {"recompute": "off"}})
    built = networks.build(config, ENCODER, None, VOCABULARY)
    by_role = [dataclasses.replace(config.losses["edited_contrast"], role=role) for role in ("positive", "negative")]

    @jax.jit
    def losses_and_vectors(params, views):
        trained = Computation(built.networks, params)
        edited = by_role[0].prepare(Computation(built.networks, {}), views, KEY, config.run_info)
        forward = shared_forward(config, trained, views, KEY)
        losses = [loss.loss(forward, edited, KEY)[0] for loss in by_role]
        encoder, projector = trained.network("encoder"), trained.network("projector")
        positives = TokenRows(views.input_ids[:, 1], views.attention_mask[:, 1])
        rows = (views.anchors, positives, edited.rows)
        return losses, edited, [projector(encoder(each)[-1][:, 0]) for each in rows]

    views = jax.tree.map(jnp.asarray, views_of(random_batch(size=4, columns=2)))
    (positive, negative), edited, (z1, z2, z3) = losses_and_vectors(built.params, views)
    assert edited.rows.attention_mask.sum() < views.anchors.attention_mask.sum()
    np.testing.assert_allclose(positive, info_nce(z1, z3, temperature=0.2).mean(), rtol=1e-5)
    expected = info_nce(z1, z2, temperature=0.2, hard_negatives=[z3])
    np.testing.assert_allclose(negative, expected.mean(), rtol=1e-5)


def test_a_constant_column_has_a_finite_gradient():
    z = jnp.array(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32).at[:, 0].set(2.0)
    dcl = jax.grad(lambda z: dimension_contrast(z, z, temperature=5.0, form="code").mean())(z)
    barlow_twins = jax.grad(lambda z: decorrelation(z, z, off_diagonal_weight=0.013).sum())(z)
    assert np.isfinite(dcl).all()
    assert np.isfinite(barlow_twins).all()
    assert np.abs(barlow_twins[:, 1:]).max() > 0


def test_decorrelation_agrees_with_numpy():
    z1, z2 = np.random.default_rng(0).normal(1.0, 2.0, size=(2, 9, 4)).astype(np.float32)
    a, b = ((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5) for z in np.float64([z1, z2]))
    correlation = a.T @ b / 9
    expected = [
        (1 - correlation[c, c]) ** 2 + 0.3 * sum(correlation[c, d] ** 2 for d in range(4) if d != c) for c in range(4)
    ]
    losses = decorrelation(jnp.array(z1), jnp.array(z2), off_diagonal_weight=0.3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_artificial_rows_let_the_loss_of_few_rows_vanish():
    forward, losses = forward_of(*random_vectors(2, rows=4, dim=16)), []
    for count in (0, 10, 20_000):
        loss = loss_of("barlow_twins", weight=1.0, off_diagonal_weight=1.0, artificial_rows=count)
        losses.append(float(loss.loss(forward, None, KEY)[0]))
    assert losses[0] > losses[1] > 0.05 > losses[2]
