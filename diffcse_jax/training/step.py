"""The train step: one compiled function."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from diffcse_jax.config import Config
from diffcse_jax.models.parameters import Params
from diffcse_jax.training.networks import Networks, compute_dtype
from diffcse_jax.training.objective import Metrics, as_views, corrupt, objective
from diffcse_jax.training.sharding import by_rules, replicated


class TrainState(NamedTuple):
    """What training changes. Randomness is a function of (seed, step), so there is no state of it."""

    step: jax.Array
    params: Params
    batch_stats: Params
    opt_state: optax.OptState


# (state, frozen parameters, batch, real_share) -> (state, metrics)
TrainStep = Callable[[TrainState, Params, dict[str, jax.Array], float], tuple[TrainState, Metrics]]


def initial_state(
    params: Params, batch_stats: Params, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh
) -> TrainState:
    """The state before the first step, placed on the mesh by the rules of `sharding`."""

    def init(params: Params, batch_stats: Params) -> TrainState:
        return TrainState(jnp.zeros([], jnp.int32), params, batch_stats, optimizer.init(params))

    # Compiled, so that the optimizer's state is made where it will live. Not donated: networks that start alike share
    # their NumPy arrays.
    shardings = by_rules(jax.eval_shape(init, params, batch_stats), mesh, config)
    return jax.jit(init, out_shardings=shardings)(params, batch_stats)


def make_train_step(
    networks: Networks, config: Config, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainStep:
    """Compiles the step, once for each `rows.real_share` of a batch; the old state's memory is reused."""

    def train_step(
        state: TrainState, frozen: Params, batch: dict[str, jax.Array], real_share: float = 1.0
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        corruption_key, dropout_key = jax.random.split(key)

        views = as_views(batch, real_share)
        corruptions = corrupt(networks, config, frozen, views, corruption_key)
        grads, (metrics, batch_stats) = jax.grad(objective, has_aux=True)(
            state.params, state.batch_stats, networks, config, views, corruptions, dropout_key
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        metrics["grad_norm"] = optax.tree.norm(grads)
        state = TrainState(state.step + 1, params, batch_stats, opt_state)
        state = jax.lax.with_sharding_constraint(state, by_rules(state, mesh, config))
        return state, jax.lax.with_sharding_constraint(metrics, replicated(mesh))

    if compute_dtype(config.precision) == jnp.float32:
        # Accelerators multiply float32 matrices in less precision unless told otherwise.
        train_step = jax.default_matmul_precision("highest")(train_step)
    return jax.jit(train_step, donate_argnums=0, static_argnames="real_share")
