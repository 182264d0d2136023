"""Projectors and norms, against PyTorch and in float64. Other heads are in test_hf.py and test_masked_lm.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_networks import SIZES

from diffcse_jax.models import layers
from diffcse_jax.models.heads import BatchNorm, BatchNormProjector, MlpProjector
from diffcse_jax.models.layers import LayerNorm, Params

HIDDEN, ROWS = SIZES.hidden_size, 16


def random_rows(seed: int, count: int = ROWS, mean: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 2.0, (count, HIDDEN)).astype(np.float32)


def mlp_projector() -> tuple[torch.nn.Sequential, dict[str, torch.nn.Parameter]]:
    """Return the projector of SimCSE's code, and its parameters by our names."""
    head = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh())
    return head, {"dense.kernel": head[0].weight, "dense.bias": head[0].bias}


def batchnorm_projector() -> tuple[torch.nn.Sequential, dict[str, torch.nn.Parameter]]:
    """Return the projector of DiffCSE's code (models.py, ProjectionMLP), and its parameters by our names."""
    head = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False),
        torch.nn.BatchNorm1d(2 * HIDDEN),
        torch.nn.ReLU(inplace=True),
        torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        torch.nn.BatchNorm1d(HIDDEN, affine=False),
    )
    named = {"expand.kernel": head[0].weight, "expand_norm.scale": head[1].weight, "expand_norm.bias": head[1].bias}
    return head, named | {"contract.kernel": head[3].weight}


@pytest.mark.parametrize(
    ("module", "projector"), [(MlpProjector, mlp_projector), (BatchNormProjector, batchnorm_projector)]
)
def test_projectors_and_their_gradients_equal_torch(module, projector):
    torch.manual_seed(0)
    head, named = projector()
    for parameter in named.values():
        torch.nn.init.normal_(parameter)
    params = {name: jnp.asarray(parameter.detach().numpy().T) for name, parameter in named.items()}
    definition, weights = layers.definition(partial(module, SIZES)), random_rows(9)

    @jax.jit
    def step(params: Params, rows: jax.Array):
        def loss(params: Params, rows: jax.Array):
            output = layers.bind(definition, params)(rows)
            return (output * weights).mean(), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, rows)

    for seed in range(2):
        (gradients, row_gradients), output = step(params, jnp.asarray(random_rows(seed)))
        rows = torch.tensor(random_rows(seed), requires_grad=True)
        head.zero_grad()
        expected = head(rows)
        (expected * torch.tensor(weights)).mean().backward()
        np.testing.assert_allclose(output, expected.detach().numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(row_gradients, rows.grad.numpy(), rtol=1e-4, atol=1e-6)
        assert gradients.keys() == named.keys()
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, named[name].grad.numpy().T, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("norm", "axis"), [(BatchNorm(HIDDEN, affine=False), 0), (LayerNorm(HIDDEN, 1e-5, dtype=jnp.float32), 1)]
)
def test_norms_keep_their_digits_far_from_zero(norm, axis):
    """Mean 100, deviation 0.01: E[x^2] - E[x]^2 in float32 would be noise."""
    rows = (100.0 + 0.01 * random_rows(0)).astype(np.float32)
    deviation = np.float64(rows) - rows.mean(axis, dtype=np.float64, keepdims=True)
    expected = deviation / np.sqrt(rows.var(axis, dtype=np.float64, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(rows)), expected, atol=2e-3)
