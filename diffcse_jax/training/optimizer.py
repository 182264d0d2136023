"""AdamW as in the authors' trainer: its epsilon, linear decay, clipping at a global norm, no decay of norms."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from diffcse_jax.config import OptimConfig
from diffcse_jax.models.parameters import Params


def make_optimizer(
    config: OptimConfig, total_steps: int, *, rests: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Return clipping, Adam, decoupled weight decay and the learning-rate schedule, in that order.

    With `rests`, networks that a step does not use do not change (see `resting`).
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=decays) if config.weight_decay else optax.identity()
    adam = [resting(optax.chain(scale_by_adam(), decay))] if rests else [scale_by_adam(), decay]
    return optax.chain(clip, *adam, optax.scale_by_learning_rate(learning_rate_schedule(config, total_steps)))


def resting(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a separate state for each network. A network whose gradient is all 0 does not change.

    PyTorch does the same with parameters that a step does not use: their gradient is None. With a common state, the
    head of a rare task would drift at every step, moved by its old moments and by weight decay.
    """

    def init(params: Params) -> dict[str, optax.OptState]:
        return {network: optimizer.init(part) for network, part in _by_network(params).items()}

    def update(
        updates: Params,
        state: dict[str, optax.OptState],
        params: Params | None = None,
        *,
        good: jax.Array | bool = True,
    ) -> tuple[Params, dict[str, optax.OptState]]:
        assert params is not None
        weights, new_updates, new_state = _by_network(params), Params(), {}
        for network, part in _by_network(updates).items():
            used = jnp.stack([jnp.any(gradient != 0) for gradient in part.values()]).any()
            scaled, after = optimizer.update(part, state[network], weights[network], good=used & good)
            new_updates |= {name: jnp.where(used, value, 0.0) for name, value in scaled.items()}
            # Adam itself keeps the moments of an unused network.
            new_state[network] = jax.tree.map(
                lambda new, old, used=used: new if new.ndim else jnp.where(used, new, old), after, state[network]
            )
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _by_network(params: Params) -> dict[str, Params]:
    """Group parameters by network, the first part of their names."""
    parts: dict[str, Params] = {}
    for name, value in params.items():
        parts.setdefault(name.partition(".")[0], Params())[name] = value
    return parts


def learning_rate_schedule(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Return linear warm-up, then linear decay to 0 at `total_steps` or a constant rate."""
    peak = config.learning_rate
    warmup = optax.linear_schedule(0.0, peak, max(config.warmup_steps, 1))
    final = 0.0 if config.schedule == "linear" else peak
    decay = optax.linear_schedule(peak, final, max(total_steps - config.warmup_steps, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps]) if config.warmup_steps else decay


def decays(params: Params) -> dict[str, bool]:
    """Return which parameters weight decay applies to: kernels and embedding tables, not biases and norms."""
    return {name: not (name.endswith(("bias", "scale")) or "norm." in name) for name in params}


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, epsilon: float = 1e-8) -> optax.GradientTransformationExtraArgs:
    """Return Adam with epsilon added before the bias correction, as in transformers' former AdamW.

    The update is m / (sqrt(v) + eps) * sqrt(1 - b2^t) / (1 - b1^t). Optax and PyTorch correct v first, which makes
    epsilon effectively 1 / sqrt(1 - b2^t) times smaller (32 times in the first step). The difference is visible in the
    losses of the first 20 steps.

    `update` takes `good`: if it is False, the moments stay as they were. The choice is made here and not on the
    result, so that the moments can be updated in place.
    """

    def init(params: Params) -> optax.ScaleByAdamState:
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(
        updates: Params, state: optax.ScaleByAdamState, params: Params | None = None, *, good: jax.Array | bool = True
    ) -> tuple[Params, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        if good is not True:
            mu, nu = jax.tree.map(partial(jnp.where, good), (mu, nu), (state.mu, state.nu))
        t = count.astype(jnp.float32)
        correction = jnp.sqrt(1 - b2**t) / (1 - b1**t)
        scaled = jax.tree.map(lambda m, v: correction * m / (jnp.sqrt(v) + epsilon), mu, nu)
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)
