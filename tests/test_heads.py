import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diffcse_jax.models import parameters
from diffcse_jax.models.heads import BatchNorm, BatchNormProjector, MaskedLMHead, MlpProjector
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.transformer import TransformerConfig

HIDDEN, ROWS = 12, 16
SIZES = TransformerConfig(
    family="bert",
    vocab_size=30,
    hidden_size=HIDDEN,
    num_blocks=1,
    num_heads=2,
    intermediate_size=24,
    max_positions=8,
    type_vocab_size=2,
    norm_epsilon=1e-12,
    activation="relu",
    pad_token_id=0,
    embedding_dropout=0.0,
    hidden_dropout=(0.0,),
    attention_dropout=(0.0,),
)


def random_rows(seed: int, count: int = ROWS, mean: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 2.0, (count, HIDDEN)).astype(np.float32)


def torch_batchnorm_projector() -> torch.nn.Sequential:
    """The head of DiffCSE's code (models.py, ProjectionMLP), in training mode, with random weights."""
    head = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False),
        torch.nn.BatchNorm1d(2 * HIDDEN),
        torch.nn.ReLU(inplace=True),
        torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        torch.nn.BatchNorm1d(HIDDEN, affine=False),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def batchnorm_arrays(head: torch.nn.Sequential, read) -> Params:
    """`read` of each parameter, under our names and in our layout."""
    return {
        "expand.kernel": read(head[0].weight).T,
        "expand_norm.scale": read(head[1].weight),
        "expand_norm.bias": read(head[1].bias),
        "contract.kernel": read(head[3].weight).T,
    }


def assert_trees_close(ours: Params, theirs: Params) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_batchnorm_projector_equals_torch():
    head = torch_batchnorm_projector()
    definition = parameters.definition(partial(BatchNormProjector, SIZES))
    params = {name: jnp.asarray(array) for name, array in batchnorm_arrays(head, lambda p: p.detach().numpy()).items()}
    weights = random_rows(9)

    @jax.jit
    def step(params: Params, rows: jax.Array):
        def loss(params: Params, rows: jax.Array):
            output = parameters.bind(definition, params)(rows)
            return (output * weights).mean(), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, rows)

    for seed in range(3):
        (gradients, row_gradients), output = step(params, jnp.asarray(random_rows(seed)))
        rows = torch.tensor(random_rows(seed), requires_grad=True)
        head.zero_grad()
        expected = head(rows)
        (expected * torch.tensor(weights)).mean().backward()
        np.testing.assert_allclose(output, expected.detach().numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(row_gradients, rows.grad.numpy(), rtol=1e-4, atol=1e-6)
        assert_trees_close(gradients, batchnorm_arrays(head, lambda p: p.grad.numpy()))


@given(scale=st.floats(0.1, 100.0), shift=st.floats(-100.0, 100.0))
def test_batchnorm_undoes_scale_and_shift(scale, shift):
    norm, rows = BatchNorm(HIDDEN, affine=False), random_rows(0)
    output = np.asarray(norm(jnp.asarray(scale * rows + shift, jnp.float32)))
    np.testing.assert_allclose(output.mean(axis=0), 0.0, atol=1e-3)
    np.testing.assert_allclose(output, (rows - rows.mean(axis=0)) / rows.std(axis=0), atol=5e-3)


def test_batchnorm_keeps_its_digits_far_from_zero():
    """Mean 100, deviation 0.01: E[x^2] - E[x]^2 in float32 would be noise."""
    rows = (100.0 + 0.01 * random_rows(0)).astype(np.float32)
    expected = (rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)) / np.sqrt(
        rows.var(axis=0, dtype=np.float64) + 1e-5
    )
    np.testing.assert_allclose(BatchNorm(HIDDEN, affine=False)(jnp.asarray(rows)), expected, atol=2e-3)


def test_batchnorm_statistics_are_those_of_the_global_batch():
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, ("data",)), PartitionSpec("data"))
    definition = parameters.definition(partial(_batchnorm, affine=True))
    params = parameters.initial(partial(_batchnorm, affine=True), jax.random.key(0))
    apply = jax.jit(lambda rows: parameters.bind(definition, params)(rows))
    rows = jnp.asarray(random_rows(0, count=2 * len(devices)))
    np.testing.assert_allclose(apply(jax.device_put(rows, sharding)), apply(rows), atol=1e-6)


def _batchnorm(*, affine: bool, rngs: object) -> BatchNorm:
    return BatchNorm(HIDDEN, affine=affine)


def test_batchnorm_computes_its_statistics_in_float32():
    norm, rows = BatchNorm(HIDDEN, affine=True), jnp.asarray(random_rows(0), jnp.bfloat16)
    output = norm(rows)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_array_equal(output, norm(rows.astype(jnp.float32)).astype(jnp.bfloat16))


def test_the_mlp_projector_equals_torch():
    head = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh())
    definition = parameters.definition(partial(MlpProjector, SIZES))

    def arrays(read) -> Params:
        return {"dense.kernel": read(head[0].weight).T, "dense.bias": read(head[0].bias)}

    params = {name: jnp.asarray(array) for name, array in arrays(lambda p: p.detach().numpy()).items()}
    rows, weights = random_rows(0), random_rows(1)

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        output = parameters.bind(definition, params)(jnp.asarray(rows))
        return (output * weights).mean(), output

    gradients, output = jax.grad(loss, has_aux=True)(params)
    expected = head(torch.tensor(rows))
    (expected * torch.tensor(weights)).mean().backward()
    np.testing.assert_allclose(output, expected.detach().numpy(), rtol=0, atol=1e-5)
    assert_trees_close(gradients, arrays(lambda p: p.grad.numpy()))


def masked_lm_head(config: TransformerConfig, params: Params, *, tied: bool = True, dtype=jnp.float32) -> MaskedLMHead:
    return parameters.bind(parameters.definition(partial(MaskedLMHead, config, tied=tied, dtype=dtype)), params)


def test_an_untied_head_has_its_own_decoder():
    params = parameters.initial(partial(MaskedLMHead, SIZES, tied=False), jax.random.key(0))
    assert params["decoder"].shape == (SIZES.vocab_size, HIDDEN)
    shared = {name: array for name, array in params.items() if name != "decoder"}
    hidden_states = jnp.asarray(random_rows(0)).reshape(4, 4, HIDDEN)
    own = masked_lm_head(SIZES, params, tied=False)(hidden_states)
    assert own.shape == (4, 4, SIZES.vocab_size)
    np.testing.assert_array_equal(own, masked_lm_head(SIZES, shared)(hidden_states, params["decoder"]))


@pytest.mark.parametrize(("mlm_activation", "follows"), [("", True), ("gelu", False)])
def test_a_head_may_have_another_activation_than_the_blocks(mlm_activation, follows):
    sizes = dataclasses.replace(SIZES, mlm_activation=mlm_activation)
    relu, gelu = (dataclasses.replace(sizes, activation=name) for name in ("relu", "gelu"))
    params = parameters.initial(partial(MaskedLMHead, relu, tied=False), jax.random.key(0))
    rows = jnp.asarray(random_rows(0))
    outputs = [np.asarray(masked_lm_head(config, params, tied=False)(rows)) for config in (relu, gelu)]
    assert np.array_equal(*outputs) != follows


def test_masked_lm_logits_are_float32():
    params = parameters.initial(partial(MaskedLMHead, SIZES, tied=False), jax.random.key(0))
    rows = jnp.asarray(random_rows(0))
    logits = masked_lm_head(SIZES, params, tied=False, dtype=jnp.bfloat16)(rows.astype(jnp.bfloat16))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, masked_lm_head(SIZES, params, tied=False)(rows), atol=0.01)
