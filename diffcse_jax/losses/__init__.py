"""The training loss: a weighted sum of losses. Each file holds one idea; `base.py` says what a loss is."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import Batch
from diffcse_jax.losses.base import Loss, Metrics, RunInfo
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name
from diffcse_jax.models.pooling import alignment, normalize, uniformity
from diffcse_jax.options import option

# The metric `uniformity` compares all pairs of anchors, so it takes no more anchors than this.
UNIFORMITY_ANCHORS = 1024

Inputs = dict[str, Any]  # what losses have prepared, by the name of the loss


@dataclasses.dataclass(frozen=True)
class MatryoshkaOptions:
    """Embeddings that can be shortened after training (Kusupati et al. 2022)."""

    sizes: tuple[int, ...] = option(
        (),
        "losses that compare embeddings also compare their first numbers, this many of them, so that embeddings can be "
        "shortened after training (Kusupati et al. 2022); empty: whole embeddings only",
        low=1,
    )
    weights: tuple[float, ...] = option(
        (), "weights of these losses relative to the loss of whole embeddings, one per size; empty: 1", low=0.0
    )

    def pairs(self) -> Iterator[tuple[int, float]]:
        """Yield each size with its weight."""
        yield from zip(self.sizes, self.weights or (1.0,) * len(self.sizes), strict=True)


def prepare(losses: Mapping[str, Loss], frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> Inputs:
    """Compute the inputs of every loss, without gradients.

    Args:
        losses: The losses by name.
        frozen: The frozen networks.
        batch: The batch.
        key: A random key. Each loss gets its own, which does not depend on the other losses.
        run: The settings of the run.
    """
    return {name: loss.prepare(frozen, batch, fold_in_name(key, name), run) for name, loss in losses.items()}


def total_loss(
    losses: Mapping[str, Loss], matryoshka: MatryoshkaOptions, forward: SharedForward, inputs: Inputs, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the weighted sum of the losses of one batch.

    Args:
        losses: The losses by name.
        matryoshka: The shortened embeddings that losses compare as well.
        forward: The batch and the trained networks.
        inputs: What `prepare` returned.
        key: A random key for dropout.

    Returns:
        The loss, and metrics by name.
    """
    total, metrics = jnp.zeros([]), Metrics()
    for name, loss in losses.items():
        own_key = fold_in_name(key, name)
        value, own_metrics = loss.loss(forward, inputs[name], own_key)
        for size, weight in matryoshka.pairs() if loss.compares_embeddings else ():
            shortened, _ = loss.loss(forward.prefix(size), inputs[name], own_key)
            metrics[f"loss_{name}_{size}"] = shortened
            value += weight * shortened
        metrics |= {f"loss_{name}": value} | own_metrics
        total += loss.weight * value
    # The two texts of a labelled pair are not a positive pair.
    if forward.embedded and forward.batch.labels is None:
        metrics |= _similarity_metrics(forward)
    return total, metrics | {"loss": total}


def _similarity_metrics(forward: SharedForward) -> Metrics:
    z1, z2 = (normalize(z) for z in jax.lax.stop_gradient(forward.projected_views[:2]))
    positive = (z1 * z2).sum(axis=1)
    # The mean over all pairs of different examples. The sum of all similarities is a product of two sums, so that no
    # matrix of similarities is needed.
    everything = z1.sum(axis=0) @ z2.sum(axis=0)
    negative = (everything - positive.sum()) / (len(z1) * (len(z1) - 1))
    return {
        "similarity_positive": positive.mean(),
        "similarity_negative": negative,
        "alignment": alignment(z1, z2).mean(),
        "uniformity": uniformity(z1[:UNIFORMITY_ANCHORS]),
    }
