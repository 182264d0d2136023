"""Losses between dimensions: formulas, and the authors' values."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffcse_jax.losses.contrastive import info_nce, separate_info_nce
from diffcse_jax.losses.decorrelation import decorrelation, dimension_contrast, with_artificial_rows


@pytest.fixture(scope="module")
def reference(reference_dir):
    losses = json.loads((reference_dir / "losses.json").read_text())
    return losses, dict(np.load(reference_dir / "losses.npz"))


@pytest.mark.parametrize(
    ("name", "temperature", "form"),
    [
        *((f"dcl_alone_tau{temperature}", float(temperature), "code") for temperature in ("5", "10", "1", "0.05")),
        ("PAPER_eq5_dcl_tau5", 5.0, "paper"),
    ],
)
def test_dcl_is_the_authors_code_and_equation_5(reference, name, temperature, form):
    losses, vectors = reference
    loss = jax.jit(lambda z1, z2: dimension_contrast(z1, z2, temperature=temperature, form=form))
    value = loss(vectors["n64d128.z1"], vectors["n64d128.z2"])
    total, rtol = (value.mean(), 1e-5) if form == "code" else (value.sum(), 1e-4)
    np.testing.assert_allclose(total, losses[f"n64d128.{name}"]["loss"], rtol=rtol)


@pytest.mark.parametrize(
    ("name", "temperature", "off_dropout"),
    [
        ("simcse_dcl_tau10_w0.1", 10.0, False),
        ("simcsepp_m0.9_tau5_w0.1", 5.0, True),
        ("simcsepp_m0.9_tau0.05_w0.1", 0.05, True),
    ],
)
def test_dcl_beside_a_contrast_has_the_authors_gradients(reference, name, temperature, off_dropout):
    losses, stored = reference

    def loss(z1, z2, z0):
        if off_dropout:
            contrast = separate_info_nce((z1, z2), (z0, z0), temperature=0.05, ratio=0.9, form="code")
        else:
            contrast = info_nce(z1, z2, temperature=0.05)
        return contrast.mean() + 0.1 * dimension_contrast(z1, z2, temperature=temperature, form="code").mean()

    vectors = {name: stored[f"n64d128.{name}"] for name in ("z1", "z2", "z0")}
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*vectors.values())
    np.testing.assert_allclose(value, losses[f"n64d128.{name}"]["loss"], rtol=1e-5)
    for vector, grad in zip(vectors, grads, strict=True):
        expected = stored.get(f"n64d128.{name}.grad_{vector}", np.zeros((64, 128)))
        np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["code", "paper"])
def test_dimension_contrast_agrees_with_numpy(form):
    z1, z2 = np.random.default_rng(0).normal(1.0, 2.0, size=(2, 9, 4)).astype(np.float32)
    if form == "code":
        (a, b), scale = ((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5) for z in np.float64([z1, z2])), 1 / 9
    else:
        (a, b), scale = ((z - z.mean(0)) / z.std(0, ddof=1) for z in np.float64([z1, z2])), 1.0
    weights = np.exp(scale * a.T @ b / 0.7)
    losses = dimension_contrast(jnp.array(z1), jnp.array(z2), temperature=0.7, form=form)
    np.testing.assert_allclose(losses, -np.log(np.diag(weights) / weights.sum(axis=1)), rtol=1e-4)


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


def test_artificial_rows_lift_the_rank_and_let_the_loss_vanish():
    z1, z2 = jax.random.normal(jax.random.key(0), (2, 4, 16))

    def correlation_and_loss(z1, z2):
        columns = jnp.corrcoef(z1, z2, rowvar=False)[:16, 16:]
        return columns, float(decorrelation(z1, z2, off_diagonal_weight=1.0).sum())

    columns, loss = correlation_and_loss(z1, z2)
    assert np.linalg.matrix_rank(columns, tol=1e-4) == 4 - 1  # one is lost to the mean
    columns, lifted = correlation_and_loss(*with_artificial_rows(z1, z2, 10, jax.random.key(1)))
    assert np.linalg.matrix_rank(columns, tol=1e-4) == 4 + 10 - 1
    assert lifted < loss
    _, vanishing = correlation_and_loss(*with_artificial_rows(z1, z2, 20_000, jax.random.key(1)))
    assert vanishing < 0.05
