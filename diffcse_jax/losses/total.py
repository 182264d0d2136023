"""The training loss: a weighted sum of losses."""

import collections
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError
from diffcse_jax.losses.loss import Loss, Metrics, RunInfo
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name
from diffcse_jax.models.pooling import alignment, normalize, uniformity
from diffcse_jax.options import option

Inputs = dict[str, Any]  # the inputs that losses have prepared, by the name of the loss
UNIFORMITY_ANCHORS = 1024  # the metric `uniformity` compares all pairs of this many anchors
# What rows of metrics hold besides the metrics of `total_loss`.
OF_ROWS = frozenset(
    ("step", "grad_norm", "bad_gradient", "bad_steps", "learning_rate", "sentences_per_second")
)


@dataclasses.dataclass(frozen=True)
class MatryoshkaOptions:
    """Embeddings that can be shortened after training (Kusupati et al. 2022)."""

    sizes: tuple[int, ...] = option(
        (), "smaller embedding sizes, trained as well (Kusupati et al. 2022)", low=1
    )


def prepare(
    losses: Mapping[str, Loss], frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo
) -> Inputs:
    """Compute the inputs of every loss, each with a random key of its own."""
    return {
        name: loss.prepare(frozen, batch, fold_in_name(key, name), run)
        for name, loss in losses.items()
    }


def total_loss(
    losses: Mapping[str, Loss],
    matryoshka: MatryoshkaOptions,
    forward: SharedForward,
    inputs: Inputs,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the weighted sum of the losses of one batch, and metrics by name.

    A loss that compares embeddings is the sum of the losses of whole embeddings and of those cut to
    each size of `matryoshka`. `inputs` is what `prepare` returned. The key is for dropout.
    """
    total = jnp.zeros([])
    metrics = Metrics()
    of_losses: dict[str, Metrics] = {}
    for name, loss in losses.items():
        own_key = fold_in_name(key, name)
        value, of_losses[name] = checked(name, loss.loss(forward, inputs[name], own_key))
        shorter_sizes = matryoshka.sizes if loss.compares_embeddings else ()
        for size in shorter_sizes:
            value_at_size, _ = loss.loss(forward.prefix(size), inputs[name], own_key)
            value += value_at_size
            metrics[f"loss_{name}_{size}"] = value_at_size
        metrics[f"loss_{name}"] = value
        total += loss.weight * value
    needs = {need for loss in losses.values() for need in loss.needs}
    if "embeddings" in needs and "labels" not in needs:  # a labelled pair is not a positive pair
        metrics |= _pair_metrics(*jax.lax.stop_gradient(forward.projected_views[:2]))
    metrics["loss"] = total
    return total, metrics | named_apart(of_losses, taken=(*metrics, *OF_ROWS))


def _pair_metrics(z1: Float[Array, "batch dim"], z2: Float[Array, "batch dim"]) -> Metrics:
    """Return how similar the views of an example are, and those of different examples."""
    z1, z2 = normalize(z1), normalize(z2)
    positive = (z1 * z2).sum(axis=1)
    # The sum of all similarities is a product of two sums. It needs no matrix of similarities.
    negative = z1.sum(axis=0) @ z2.sum(axis=0) - positive.sum()
    return Metrics(
        similarity_positive=positive.mean(),
        # The mean over pairs of different examples.
        similarity_negative=negative / (len(z1) * (len(z1) - 1)),
        alignment=alignment(z1, z2).mean(),
        uniformity=uniformity(z1[:UNIFORMITY_ANCHORS]),
    )


def named_apart(metrics: Mapping[str, Metrics], *, taken: Collection[str]) -> Metrics:
    """Return the metrics of all losses by name.

    A name that several losses use, or that is taken, gets the name of the loss in front, as in
    `mine.accuracy`.
    """
    uses = collections.Counter([*taken, *(name for own in metrics.values() for name in own)])
    return {
        metric if uses[metric] == 1 else f"{loss}.{metric}": value
        for loss, own in metrics.items()
        for metric, value in own.items()
    }


def checked(name: str, returned: Any) -> tuple[Float[Array, ""], Metrics]:
    """Return the value and the metrics that a loss returned.

    Raises:
        ConfigError: They are something else, so that JAX would fail without the name of the loss.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise ConfigError(
            f"the loss {name} must return two things: its value and a dict of metrics"
        )
    value, metrics = returned
    numbers = {"its value": value} | {
        f"its metric {key}": number for key, number in metrics.items()
    }
    for what, number in numbers.items():
        if shape := jnp.shape(number):
            raise ConfigError(
                f"the loss {name}: {what} has the shape {shape}, but must be one number, such as "
                "the mean over the batch"
            )
    return value, metrics
