"""The training loss: a weighted sum of losses. Each file is about one idea, and `base.py` defines what a loss is."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import Batch
from diffcse_jax.losses.base import Loss, Metrics, RunInfo, option
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name
from diffcse_jax.models.pooling import alignment, normalize, uniformity

UNIFORMITY_ANCHORS = 1024  # the metric `uniformity` compares all pairs of this many anchors

Inputs = dict[str, Any]  # the inputs that losses have prepared, by the name of the loss


@dataclasses.dataclass(frozen=True)
class MatryoshkaOptions:
    """Embeddings that can be shortened after training (Kusupati et al. 2022)."""

    sizes: tuple[int, ...] = option(
        (),
        "losses that compare embeddings also compare this many of their first dimensions (Kusupati et al. 2022)",
        low=1,
    )


def prepare(losses: Mapping[str, Loss], frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> Inputs:
    """Compute the inputs of every loss, without gradients. Each loss gets a random key of its own."""
    return {name: loss.prepare(frozen, batch, fold_in_name(key, name), run) for name, loss in losses.items()}


def total_loss(
    losses: Mapping[str, Loss], matryoshka: MatryoshkaOptions, forward: SharedForward, inputs: Inputs, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the weighted sum of the losses of one batch, and metrics by name.

    Args:
        losses: The losses by name.
        matryoshka: The sizes of shortened embeddings, which losses also compare.
        forward: The batch and the trained networks.
        inputs: What `prepare` returned.
        key: A random key for dropout.
    """
    total, metrics = jnp.zeros([]), Metrics()
    for name, loss in losses.items():
        own_key = fold_in_name(key, name)
        value, own_metrics = loss.loss(forward, inputs[name], own_key)
        for size in matryoshka.sizes if loss.compares_embeddings else ():
            metrics[f"loss_{name}_{size}"], _ = loss.loss(forward.prefix(size), inputs[name], own_key)
            value += metrics[f"loss_{name}_{size}"]
        metrics |= {f"loss_{name}": value} | own_metrics
        total += loss.weight * value
    # The two texts of a labelled pair are not a positive pair.
    if forward.embedded and forward.batch.labels is None:
        z1, z2 = (normalize(z) for z in jax.lax.stop_gradient(forward.projected_views[:2]))
        positive = (z1 * z2).sum(axis=1)
        # The sum of all similarities is a product of two sums, so that no matrix of similarities is needed.
        negative = z1.sum(axis=0) @ z2.sum(axis=0) - positive.sum()
        metrics |= {
            "similarity_positive": positive.mean(),
            "similarity_negative": negative / (len(z1) * (len(z1) - 1)),  # of pairs of different examples
            "alignment": alignment(z1, z2).mean(),
            "uniformity": uniformity(z1[:UNIFORMITY_ANCHORS]),
        }
    return total, metrics | {"loss": total}
