"""The optimizer: AdamW as in the authors' trainer.

It has their epsilon, linear decay of the learning rate, clipping, and no weight decay of norms.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from diffcse_jax.config import OptimConfig
from diffcse_jax.hosts import log_line
from diffcse_jax.models.layers import Params


def make_optimizer(
    config: OptimConfig,
    total_steps: int,
    *,
    around: Callable[[Any], optax.GradientTransformationExtraArgs] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return clipping, Adam, decoupled weight decay and the learning-rate schedule, in that order.

    Args:
        config: The options.
        total_steps: The step at which a linear schedule reaches 0.
        around: Changes Adam with its weight decay, which are the parts that depend on the
            parameters.
    """
    clip = clip_by_norm(config.clip_norm) if config.clip_norm else optax.identity()
    decay = optax.identity()
    if config.weight_decay:
        decay = optax.add_decayed_weights(config.weight_decay, mask=decays)
    adam = [scale_by_adam(), decay]
    if around:
        adam = [around(optax.chain(*adam))]
    rate = optax.scale_by_learning_rate(learning_rate_schedule(config, total_steps))
    return optax.chain(clip, *adam, rate)


def learning_rate_schedule(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Return linear warm-up, then linear decay to 0 at `total_steps` or a constant rate."""
    peak = config.learning_rate
    warmup = optax.linear_schedule(0.0, peak, max(config.warmup_steps, 1))
    final = 0.0 if config.schedule == "linear" else peak
    decay = optax.linear_schedule(peak, final, max(total_steps - config.warmup_steps, 1))
    if not config.warmup_steps:
        return decay
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def warn_of_warmup(config: OptimConfig, total_steps: int) -> None:
    """Say that a run ends before its learning rate has reached its peak."""
    if config.warmup_steps > total_steps:
        log_line(
            f"notice: optim.warmup_steps={config.warmup_steps}, but the run has {total_steps:,} "
            f"steps. Its learning rate reaches {total_steps / config.warmup_steps:.0%} of "
            "optim.learning_rate. To reach all of it, lower optim.warmup_steps"
        )


def keep_counters(
    counts: Bool[Array, ""], new: optax.OptState, old: optax.OptState
) -> optax.OptState:
    """Return a new state, with the counters of the old one if the step does not count.

    Arrays in dicts belong to parameters. Of these, `scale_by_adam` itself keeps the moments.
    """

    def kept(path: tuple[Any, ...], new: jax.Array, old: jax.Array) -> jax.Array:
        is_of_parameter = isinstance(path[-1], jax.tree_util.DictKey)
        return new if is_of_parameter else jnp.where(counts, new, old)

    return jax.tree_util.tree_map_with_path(kept, new, old)


def decays(params: Params) -> dict[str, bool]:
    """Return which parameters decay: kernels and embedding tables, not biases and norms."""
    return {name: not name.endswith(("bias", "scale")) for name in params}


def alike(params: Params) -> list[list[str]]:
    """Group the names of parameters that differ in the number of their block only, in order."""
    groups = defaultdict(list)
    for name in sorted(params):
        groups[re.sub(r"\.blocks\.\d+\.", ".blocks.", name), params[name].shape].append(name)
    return list(groups.values())


def squared_norms(grads: Params) -> Float[Array, " groups"]:
    """Return the squared norm of each group of `alike`.

    Squares are added over the blocks before they are reduced, because an accelerator takes longer
    for many reductions than for a large one.
    """
    squares = [[jnp.square(grads[name]) for name in names] for names in alike(grads)]
    return jnp.stack([reduce(jnp.add, group).sum() for group in squares])


def clip_by_norm(largest: float) -> optax.GradientTransformation:
    """Scale gradients to the norm `largest` if theirs is larger, as optax does.

    The norm is that of `squared_norms`, which XLA computes once for all that ask for it.
    """

    def update(
        updates: Params, state: optax.EmptyState, params: Params | None = None
    ) -> tuple[Params, optax.EmptyState]:
        del params
        norm = jnp.sqrt(squared_norms(updates).sum())
        scaled = jax.tree.map(lambda t: jnp.where(norm < largest, t, t / norm * largest), updates)
        return scaled, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, epsilon: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Return Adam with epsilon added before the bias correction, as in transformers' former AdamW.

    The update is m / (sqrt(v) + eps) * sqrt(1 - b2^t) / (1 - b1^t). Optax and PyTorch correct v
    first, which makes epsilon effectively 1 / sqrt(1 - b2^t) times smaller (32 times in the first
    step). It shows in the first 20 losses.

    `update` takes `good`: if it is False, the moments stay as they were. The choice is made here
    and not on the result, so that the moments can be updated in place.
    """

    def init(params: Params) -> optax.ScaleByAdamState:
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update(
        updates: Params,
        state: optax.ScaleByAdamState,
        params: Params | None = None,
        *,
        good: jax.Array | bool = True,
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
