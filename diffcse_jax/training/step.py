"""The train step: one function, compiled for each shape of batches."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.losses import Inputs, prepare, total_loss
from diffcse_jax.losses.base import Metrics
from diffcse_jax.losses.diffcse_variants import generated_second_views
from diffcse_jax.models.forward import Computation, Networks, SharedForward, fold_in_name
from diffcse_jax.models.parameters import Params
from diffcse_jax.run_folder.checkpoints import TrainState
from diffcse_jax.training.sharding import by_rules, gathered, of_gradients, replicated

# (state, frozen parameters, batch) -> (state, metrics)
TrainStep = Callable[[TrainState, Params, Batch], tuple[TrainState, Metrics]]


def abstract_state(params: Params, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh) -> TrainState:
    """The state before the first step as `jax.ShapeDtypeStruct`, with the sharding that each array will have.

    Args:
        params: initial parameters, or their shapes.
        optimizer: makes its own part of the state.
        config: says how the state is split.
        mesh: the devices, which may be those of a topology that is only compiled for.
    """
    state = jax.eval_shape(partial(_initialise, optimizer), params)
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        state,
        by_rules(state, mesh, config),
    )


def initial_state(params: Params, optimizer: optax.GradientTransformation, config: Config, mesh: Mesh) -> TrainState:
    """The state before the first step, placed on the mesh by the rules of `sharding`."""
    # Compiled, so that the optimizer's state is made where it will live. Not donated: networks that start alike share
    # their NumPy arrays.
    like = abstract_state(params, optimizer, config, mesh)
    shardings = jax.tree.map(lambda array: array.sharding, like)
    return jax.jit(partial(_initialise, optimizer), out_shardings=shardings)(params)


def _initialise(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params), jnp.zeros([], jnp.int32))


def make_train_step(
    networks: Networks, config: Config, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh
) -> TrainStep:
    """The step as a function that `jax.jit` compiles for each shape of batches; the old state's memory is reused.

    Where the loss or the gradient's norm is no finite number, nothing of it is applied: all of the state stays, but for
    the numbers of steps and of bad steps. The metrics of such a step are those numbers; `bad_gradient` counts, from 1
    and in the order of their names, up to the first parameter whose gradient is not finite (0: all are).
    """
    chunks = config.train.chunks
    devices = mesh.shape["data"]

    def train_step(state: TrainState, frozen: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        root = fold_in_name(jax.random.key(config.train.seed), "train step")
        prepare_key, dropout_key = jax.random.split(jax.random.fold_in(root, state.step))

        frozen_networks = Computation(networks, gathered(frozen, mesh), chunks, devices)
        batch = with_second_views(config, frozen_networks, batch, fold_in_name(prepare_key, "second views"))
        inputs = prepare(config.losses, frozen_networks, batch, prepare_key, config.run_info)

        def loss(params: Params) -> tuple[jax.Array, Metrics]:
            trained = Computation(networks, gathered(params, mesh), chunks, devices)
            return loss_of_batch(config, trained, batch, inputs, dropout_key)

        grads, metrics = jax.grad(loss, has_aux=True)(state.params)
        # Summed as whole arrays and then split: asked for parts of an embedding table's gradient, XLA would move the
        # tokens and the gradients at them instead.
        grads = gathered(grads, mesh)
        grads = jax.lax.with_sharding_constraint(grads, of_gradients(grads, mesh))
        metrics["grad_norm"] = optax.tree.norm(grads)
        metrics["bad_gradient"] = _first_bad(grads)
        good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, good=good)
            params = optax.apply_updates(state.params, updates)
            params = jax.tree.map(partial(jnp.where, good), params, state.params)
            # The moments are chosen where they are computed; this is about counters.
            opt_state = jax.tree.map(
                lambda new, old: new if new.ndim else jnp.where(good, new, old), opt_state, state.opt_state
            )
        params = jax.lax.with_sharding_constraint(params, of_gradients(params, mesh))

        metrics["bad_steps"] = state.bad_steps + (~good).astype(jnp.int32)
        state = TrainState(state.step + 1, params, opt_state, metrics["bad_steps"])
        state = jax.lax.with_sharding_constraint(state, by_rules(state, mesh, config))
        return state, jax.lax.with_sharding_constraint(metrics, replicated(mesh))

    if config.precision == "float32":
        # Accelerators multiply float32 matrices in less precision unless told otherwise.
        train_step = jax.default_matmul_precision("highest")(train_step)
    return jax.jit(train_step, donate_argnums=0)


def with_second_views(config: Config, frozen: Computation, batch: Batch, key: PRNGKeyArray) -> Batch:
    """Return the batch, with second views by the generator if `data.augmentation` is `mlm`."""
    if config.data.augmentation != "mlm":
        return batch
    return generated_second_views(frozen, batch, config.data.augmentation_ratio, config.generator, key)


def loss_of_batch(
    config: Config, trained: Computation, batch: Batch, inputs: Inputs, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the training loss of a batch, and its metrics.

    Args:
        config: The run.
        trained: The trained networks.
        batch: The batch.
        inputs: What the losses have prepared.
        key: A random key for dropout.
    """
    forward = SharedForward(
        trained,
        batch,
        key,
        pooler=config.model.pooler,
        dropout_masks=config.model.dropout_masks,
        keeps_projector=config.keeps_projector,
    )
    return total_loss(config.losses, config.matryoshka, forward, inputs, key)


def _first_bad(grads: Params) -> jax.Array:
    """1 + the index, in the order of names, of the first array that is not finite; 0 where all are."""
    squares = [optax.tree.norm(grads[name], squared=True) for name in sorted(grads)]  # which the whole norm adds up
    bad = ~jnp.isfinite(jnp.stack(squares))
    return jnp.where(bad.any(), 1 + jnp.argmax(bad).astype(jnp.int32), 0)
