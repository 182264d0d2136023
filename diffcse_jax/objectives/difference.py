"""Losses of predicting what was edited, one value per token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def replaced_token_detection(
    logits: Float[Array, "batch length 2"], replaced: Bool[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Cross-entropy of telling replaced tokens (class 1) from kept ones, per token (DiffCSE Section 3).

    The authors' code takes the mean over all positions, padding included; the paper a sum over tokens.
    """
    # Two-class cross-entropy is the softplus of the margin against the right class.
    margin = logits[..., 1] - logits[..., 0]
    return jax.nn.softplus(jnp.where(replaced, -margin, margin))


def masked_language_model(
    logits: Float[Array, "*tokens vocab"], input_ids: Int[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Cross-entropy of the original token, per token; the caller averages over the masked ones."""
    target_logits = jnp.take_along_axis(logits, input_ids[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target_logits
