"""The train step: the inputs of the losses, their weighted sum, gradients and the update."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.losses import Metrics
from diffcse_jax.losses.diffcse_variants import generated_second_views
from diffcse_jax.losses.total import Inputs, prepare, total_loss
from diffcse_jax.models.forward import Computation, Networks, SharedForward, fold_in_name
from diffcse_jax.models.layers import Params
from diffcse_jax.run_folder.state import TrainState
from diffcse_jax.training.optimizer import keep_counters, squared_norms
from diffcse_jax.training.sharding import (
    by_rules,
    gathered,
    in_precision,
    padded,
    replicated,
    split_over_data,
    without_padding,
)

# (state, frozen parameters, batch, root key) -> (state, metrics)
TrainStep = Callable[[TrainState, Params, Batch, PRNGKeyArray], tuple[TrainState, Metrics]]


def initial_state(
    params: Params, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh
) -> TrainState:
    """Return the state before the first step, placed on the mesh by the rules of `sharding`."""
    # Compiled, so that the optimizer's state is created on its devices. The parameters are not
    # donated, because networks with the same initial weights share their NumPy arrays.
    shardings = jax.tree.map(
        lambda array: array.sharding, abstract_state(params, optimizer, config, mesh)
    )
    return jax.jit(partial(_initialize, optimizer, mesh), out_shardings=shardings)(params)


def abstract_state(
    params: Params, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh
) -> TrainState:
    """Return the shapes, types and shardings of the state before the first step.

    The parameters may be shapes, and the devices may belong to a topology that is only compiled
    for.
    """
    state = jax.eval_shape(partial(_initialize, optimizer, mesh), params)
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        state,
        by_rules(state, mesh, config),
    )


def _initialize(optimizer: optax.GradientTransformation, mesh: Mesh, params: Params) -> TrainState:
    opt_state = optimizer.init(padded(params, mesh))
    return TrainState(jnp.zeros([], jnp.int32), params, opt_state, jnp.zeros([], jnp.int32))


def root_key(config: Config) -> PRNGKeyArray:
    """Return the key of dropout, masks and the generator's samples, for all steps of a run.

    It is an argument of the train step, because a constant would have the step compiled again for
    each seed.
    """
    return fold_in_name(jax.random.key(config.train.seed_of("dropout")), "train step")


def make_train_step(
    networks: Networks, config: Config, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh
) -> jax.stages.Wrapped:
    """Return the train step, a `TrainStep` that `jax.jit` compiles for each shape of batches.

    It reuses the old state's memory. If the loss or the gradient's norm is NaN or infinite, the
    step is skipped: only the numbers of steps and of skipped steps change. The metric
    `bad_gradient` is then the position, counting from 1, of the first group of `optimizer.alike`
    with such a gradient. If all gradients are finite, it is 0.
    """

    def train_step(
        state: TrainState, frozen: Params, batch: Batch, root: PRNGKeyArray
    ) -> tuple[TrainState, Metrics]:
        loss = loss_of_step(networks, config, mesh, state.step, frozen, batch=batch, root=root)
        grads, metrics = jax.grad(loss, has_aux=True)(state.params)
        # Gradients are summed as whole arrays and then split. If only parts of an embedding table's
        # gradient were needed, XLA would move the tokens and their gradients instead.
        grads = split_over_data(padded(gathered(grads, mesh), mesh), mesh)
        squares = squared_norms(grads)
        metrics["grad_norm"] = jnp.sqrt(squares.sum())
        metrics["bad_gradient"] = _first_bad(squares)
        good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        with jax.named_scope("optimizer"):
            old = padded(state.params, mesh)
            updates, opt_state = optimizer.update(grads, state.opt_state, old, good=good)
            params = optax.apply_updates(old, updates)
            params = jax.tree.map(partial(jnp.where, good), params, old)
            opt_state = keep_counters(good, opt_state, state.opt_state)
        params = without_padding(split_over_data(params, mesh), state.params, mesh)

        metrics["bad_steps"] = state.bad_steps + (~good).astype(jnp.int32)
        state = TrainState(state.step + 1, params, opt_state, metrics["bad_steps"])
        state = jax.lax.with_sharding_constraint(state, by_rules(state, mesh, config))
        return state, jax.lax.with_sharding_constraint(metrics, replicated(mesh))

    return jax.jit(in_precision(config.precision, train_step), donate_argnums=0)


def loss_of_step(
    networks: Networks,
    config: Config,
    mesh: Mesh,
    step: Int[Array, ""],
    frozen: Params,
    *,
    batch: Batch,
    root: PRNGKeyArray,
) -> Callable[[Params], tuple[Float[Array, ""], Metrics]]:
    """Prepare the inputs of a step, without gradients, and return its loss as a function.

    The function takes the parameters that are trained. It returns the loss and its metrics, among
    them `loss_NAME` for each loss, without its weight.
    """
    chunks = config.train.chunks
    devices = mesh.shape["data"]
    inputs_key, dropout_key = jax.random.split(jax.random.fold_in(root, step))
    frozen_networks = Computation(networks, gathered(frozen, mesh), chunks, devices)
    if config.data.augmentation == "mlm":
        key = fold_in_name(inputs_key, "second views")
        ratio = config.data.augmentation_ratio
        batch = generated_second_views(frozen_networks, batch, ratio, key, config.run_info)
    inputs = prepare(config.losses, frozen_networks, batch, inputs_key, config.run_info)

    def loss(params: Params) -> tuple[Float[Array, ""], Metrics]:
        trained = Computation(networks, gathered(params, mesh), chunks, devices)
        return loss_of_batch(config, trained, batch, inputs, dropout_key)

    return loss


def loss_of_batch(
    config: Config, trained: Computation, batch: Batch, inputs: Inputs, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """Return the training loss of a batch, and its metrics. The key is for dropout."""
    forward = SharedForward(
        trained,
        batch,
        key,
        pooler=config.model.pooler,
        dropout_masks=config.model.dropout_masks,
        keeps_projector=config.keeps_projector,
    )
    return total_loss(config.losses, config.matryoshka, forward, inputs, key)


def _first_bad(squares: Float[Array, " groups"]) -> Int[Array, ""]:
    """Return the position, from 1, of the first that is not finite, or else 0."""
    bad = ~jnp.isfinite(squares)
    return jnp.where(bad.any(), 1 + jnp.argmax(bad).astype(jnp.int32), 0)
