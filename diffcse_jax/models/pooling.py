"""From hidden states to one vector per sentence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# The poolers that are a mean over real tokens, and over which hidden states: 0 is the embedding output.
AVERAGED_LAYERS = {"avg": (-1,), "avg_top2": (-2, -1), "avg_first_last": (0, -1), "avg_first_block_last": (1, -1)}


def positions_read(pooler: str) -> int | None:
    """The number of positions of the last layer that the pooler reads, from the first one on; None: all."""
    return None if pooler in AVERAGED_LAYERS else 1


def pool(
    hidden_states: tuple[jax.Array, ...], attention_mask: Int[Array, "batch length"], pooler: str
) -> Float[Array, "batch hidden"]:
    """Pools the hidden states of an encoder, before any head.

    Args:
        hidden_states: embedding output and each block's output, (batch, length, hidden).
        attention_mask: 1 for real tokens.
        pooler: `cls` or `cls_before_pooler` (position 0 of the last layer), `avg` (mean of the last layer over real
            tokens), `avg_top2` (of the last two layers), `avg_first_last` (of the embedding output and the last layer,
            as in DiffCSE's code and SimCSE's paper) or `avg_first_block_last` (of the first block's output and the last
            layer, as in SimCSE's code since 2022).
    """
    if pooler in ("cls", "cls_before_pooler"):
        return hidden_states[-1][:, 0]
    layers = [hidden_states[layer] for layer in AVERAGED_LAYERS[pooler]]
    return _masked_mean(sum(layers[1:], start=layers[0]) / len(layers), attention_mask)


def _masked_mean(states: jax.Array, attention_mask: jax.Array) -> jax.Array:
    weights = attention_mask.astype(states.dtype)[:, :, None]
    return (states * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
