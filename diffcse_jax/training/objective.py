"""The loss of a step: the sum of the objectives that the configuration gives a weight. It names none of them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffcse_jax.batch import Batch
from diffcse_jax.config import Config
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name, mean_where
from diffcse_jax.models.pooling import alignment, cosine_similarity, uniformity
from diffcse_jax.objectives import Metrics

Corruptions = dict[str, Any]  # by objective


def corrupt(config: Config, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Corruptions:
    """The edited inputs of every objective, without gradients."""
    return {
        name: objective.corrupt(frozen, views, fold_in_name(key, name)) for name, objective in config.objectives.items()
    }


def total_loss(
    config: Config,
    trained: Computation,
    views: Batch,
    corruptions: Corruptions,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum of losses of one batch.

    Args:
        config: the objectives.
        trained: the trained networks.
        views: the batch.
        corruptions: from `corrupt`.
        key: dropout key.

    Returns:
        The loss and named metrics, the loss among them.
    """
    forward = SharedForward(
        trained,
        views,
        key,
        pooler=config.model.pooler,
        dropout_masks=config.model.dropout_masks,
        keeps_projector=config.keeps_projector,
    )
    loss, metrics = jnp.zeros([]), Metrics()
    for name, objective in config.objectives.items():
        value, own_metrics = objective.loss(forward, corruptions[name], fold_in_name(key, name))
        for size, weight in _prefixes(config) if objective.prefixes else ():
            of_prefix, _ = objective.loss(forward.prefix(size), corruptions[name], fold_in_name(key, name))
            metrics[f"loss_{name}_{size}"] = of_prefix
            value += weight * of_prefix
        metrics |= {f"loss_{name}": value} | own_metrics
        loss += objective.weight * value
    if forward.embedded and views.labels is None:  # the sentences of labelled pairs are no positives
        metrics |= _similarity_metrics(forward)
    return loss, metrics | {"loss": loss}


def _prefixes(config: Config) -> Iterable[tuple[int, float]]:
    """The sizes of prefixes of sentence vectors, and the weights of their losses."""
    sizes, weights = config.matryoshka.sizes, config.matryoshka.weights
    return zip(sizes, weights or (1.0,) * len(sizes), strict=True)


def _similarity_metrics(forward: SharedForward) -> Metrics:
    z1, z2 = jax.lax.stop_gradient(forward.projected_views[:2])
    similarity = cosine_similarity(z1, z2)
    return {
        "similarity_positive": jnp.diagonal(similarity).mean(),
        "similarity_negative": mean_where(similarity, ~jnp.eye(len(z1), dtype=bool)),
        "alignment": alignment(z1, z2).mean(),
        "uniformity": uniformity(z1),
    }
