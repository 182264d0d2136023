"""AdamW as the originals' trainer runs it: its epsilon, linear decay, clipping at a global norm, no decay of norms."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from diffcse_jax.config import OptimConfig
from diffcse_jax.models.parameters import Params


def make_optimizer(
    config: OptimConfig, total_steps: int, *, rests: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Clipping, Adam moments, decoupled weight decay and the learning-rate schedule, in that order.

    Args:
        config: the options.
        total_steps: of the schedule.
        rests: there are steps that do not use all networks: those rest then, as `resting` says.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, mask=decays) if config.weight_decay else optax.identity()
    adam = [resting(optax.chain(scale_by_adam(), decay))] if rests else [scale_by_adam(), decay]
    return optax.chain(clip, *adam, optax.scale_by_learning_rate(learning_rate_schedule(config, total_steps)))


def resting(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The optimizer for each network by itself; one whose gradient is all 0 keeps its weights, moments and counts.

    So does PyTorch with a parameter that a step does not use, whose gradient is None. Left to a common state, the head
    of a rare task would move on at every step by what its moments remember, and decay.
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
            # The moments are chosen where they are computed.
            new_state[network] = jax.tree.map(
                lambda new, old, used=used: new if new.ndim else jnp.where(used, new, old), after, state[network]
            )
        return new_updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _by_network(params: Params) -> dict[str, Params]:
    """Parameters, whose names stay, by the networks that these begin with."""
    parts: dict[str, Params] = {}
    for name, value in params.items():
        parts.setdefault(name.partition(".")[0], Params())[name] = value
    return parts


def learning_rate_schedule(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up, then linear decay to 0 at `total_steps`, or a constant rate."""
    peak = config.learning_rate
    warmup = optax.linear_schedule(0.0, peak, max(config.warmup_steps, 1))
    final = 0.0 if config.schedule == "linear" else peak
    decay = optax.linear_schedule(peak, final, max(total_steps - config.warmup_steps, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps]) if config.warmup_steps else decay


def decays(params: Params) -> dict[str, bool]:
    """Which parameters weight decay acts on: kernels and embedding tables, not biases and norms."""
    return {name: not (name.endswith(("bias", "scale")) or "norm." in name) for name in params}


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, epsilon: float = 1e-8) -> optax.GradientTransformationExtraArgs:
    """Adam whose epsilon is added before the bias correction, as in transformers' former AdamW.

    m / (sqrt(v) + eps) * sqrt(1 - b2^t) / (1 - b1^t); optax and PyTorch correct v first, which makes epsilon
    1 / sqrt(1 - b2^t) times smaller in effect (32 times in the first step). Over the 20 reference steps the difference
    moves the losses by 0.3-0.8 %.

    `update` takes `good`, whether gradients are finite: where they are not, the moments stay. Decided here, and not
    for the result, so that the moments are still changed in place: what comes after needs the old ones no longer.
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
