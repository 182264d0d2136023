import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import hadamard

from diffcse_jax.losses.decorrelation import decorrelation, with_artificial_rows


def test_decorrelation_agrees_with_numpy():
    z1, z2 = np.random.default_rng(0).normal(1.0, 2.0, size=(2, 9, 4)).astype(np.float32)
    a, b = ((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5) for z in np.float64([z1, z2]))
    correlation = a.T @ b / 9
    expected = [
        (1 - correlation[c, c]) ** 2 + 0.3 * sum(correlation[c, d] ** 2 for d in range(4) if d != c) for c in range(4)
    ]
    losses = decorrelation(jnp.array(z1), jnp.array(z2), off_diagonal_weight=0.3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_equal_views_of_uncorrelated_columns_have_no_loss():
    z = jnp.array(hadamard(8)[:, 1:], jnp.float32)
    np.testing.assert_allclose(decorrelation(z, 5 * z + 2, off_diagonal_weight=1.0), 0.0, atol=1e-5)


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


def test_a_column_that_never_varies_has_a_finite_gradient():
    z = jnp.array(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32).at[:, 0].set(2.0)
    grad = jax.grad(lambda z: decorrelation(z, z, off_diagonal_weight=0.013).sum())(z)
    assert np.isfinite(grad).all()
    assert np.abs(grad[:, 1:]).max() > 0
