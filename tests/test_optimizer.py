import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffcse_jax.config import OptimConfig
from diffcse_jax.training.step import decays, learning_rate_schedule, make_optimizer

CONSTANT = OptimConfig(learning_rate=0.01, schedule="constant", clip_norm=0.0)


def random_tree(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "encoder.blocks.0.output.kernel": (3, 4),
        "encoder.blocks.0.output.bias": (4,),
        "encoder.norm.scale": (4,),
    }
    return {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def run(config: OptimConfig, params: dict, grads: list[dict], total_steps: int = 10) -> list[dict]:
    """Return the parameters after each step."""
    optimizer = make_optimizer(config, total_steps)
    state, history = optimizer.init(params), []
    for step_grads in grads:
        updates, state = optimizer.update(step_grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def former_transformers_adamw(
    params: dict, grads: list[dict], learning_rates: list[float], weight_decay: float
) -> list[dict]:
    """transformers 4.2.1, optimization.py:AdamW, in float64."""
    params = {name: np.float64(value) for name, value in params.items()}
    mean, square, history = dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0), []
    for t, (step_grads, learning_rate) in enumerate(zip(grads, learning_rates, strict=True), start=1):
        for name, grad in step_grads.items():
            grad = np.float64(grad)
            mean[name] = 0.9 * mean[name] + 0.1 * grad
            square[name] = 0.999 * square[name] + 0.001 * grad**2
            denominator = np.sqrt(square[name]) + 1e-8
            step_size = learning_rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            decay = weight_decay * learning_rate if name.endswith("kernel") else 0.0
            params[name] = (params[name] - step_size * mean[name] / denominator) - decay * params[name]
        history.append(dict(params))
    return history


@pytest.mark.parametrize(("scale", "weight_decay"), [(1.0, 0.1), (1e-7, 0.0)])  # the second is near epsilon
def test_updates_are_those_of_the_originals_adamw(scale, weight_decay):
    config = dataclasses.replace(CONSTANT, weight_decay=weight_decay)
    grads = [random_tree(seed, scale) for seed in range(1, 8)]
    ours = run(config, random_tree(0), grads)
    # Decoupled decay is taken before or after Adam's step; the difference is of second order in the learning rate.
    expected = former_transformers_adamw(random_tree(0), grads, [0.01] * 7, weight_decay)
    for step, params in enumerate(ours):
        for name, value in params.items():
            atol = 1e-6 + 2e-5 * (step + 1) * (weight_decay > 0)
            np.testing.assert_allclose(value, expected[step][name], atol=atol)


@pytest.mark.parametrize(
    ("warmup_steps", "schedule", "expected"),
    [(0, "linear", [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]), (2, "constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0])],
)
def test_learning_rates(warmup_steps, schedule, expected):
    config = OptimConfig(learning_rate=0.5, warmup_steps=warmup_steps, schedule=schedule)
    rate = learning_rate_schedule(config, total_steps=5)
    np.testing.assert_allclose([rate(jnp.int32(step)) for step in range(6)], 0.5 * np.array(expected), atol=1e-7)


def test_decay_spares_biases_and_norms():
    decayed = ["embeddings.word.embedding", "blocks.11.attention.query.kernel", "mlm_head.decoder"]
    spared = ["embeddings.norm.scale", "embeddings.norm.bias", "blocks.11.attention.query.bias", "mlm_head.bias"]
    spared += ["blocks.11.attention_norm.scale", "projector.expand_norm.scale"]
    assert decays(dict.fromkeys([*decayed, *spared])) == dict.fromkeys(decayed, True) | dict.fromkeys(spared, False)
