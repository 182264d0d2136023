"""From hidden states to one vector per sentence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def pool(
    hidden_states: tuple[jax.Array, ...], attention_mask: Int[Array, "batch length"], pooler: str
) -> Float[Array, "batch hidden"]:
    """Pools the hidden states of an encoder, before any head.

    Args:
        hidden_states: embedding output and each block's output, (batch, length, hidden).
        attention_mask: 1 for real tokens.
        pooler: `cls` or `cls_before_pooler` (position 0 of the last layer), `avg` (mean of the last layer over real
            tokens), `avg_top2` (of the last two layers) or `avg_first_last` (of the embedding output and the last
            layer, the definition of DiffCSE's code).
    """
    if pooler in ("cls", "cls_before_pooler"):
        return hidden_states[-1][:, 0]
    layers = {
        "avg": hidden_states[-1:],
        "avg_top2": hidden_states[-2:],
        "avg_first_last": hidden_states[:: len(hidden_states) - 1],
    }
    return _masked_mean(sum(layers[pooler]) / len(layers[pooler]), attention_mask)


def _masked_mean(states: jax.Array, attention_mask: jax.Array) -> jax.Array:
    weights = attention_mask.astype(states.dtype)[:, :, None]
    return (states * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
