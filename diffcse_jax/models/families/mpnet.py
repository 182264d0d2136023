"""MPNet (Song et al. 2020): RoBERTa with relative positions and without token types."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from diffcse_jax.models.families import Stated, bert, roberta
from diffcse_jax.models.layers import Embedding
from diffcse_jax.models.transformer import TransformerConfig

# transformers' MPNet has this value, whatever the configuration says, and the padding id 1.
BUCKETS = 32


class RelativeAttentionBias(nnx.Module):
    """A bias on attention logits for every head and bucket of relative positions.

    All blocks share it.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.bucket = Embedding(BUCKETS, config.num_heads, dtype=jnp.float32, rngs=rngs)

    def __call__(self, positions: int) -> Float[Array, "1 heads positions positions"]:
        return self.bucket(jnp.asarray(relative_buckets(positions))).transpose(2, 0, 1)[None]


def relative_buckets(positions: int) -> Int[np.ndarray, "positions positions"]:
    """Return the bucket of each key's position relative to the query's (T5, Raffel et al. 2020).

    Keys are columns, and queries are rows. Keys after the query have the upper half of the buckets.
    In each half, distances below 8 have one bucket each. Above 8, there are two buckets for every
    doubling, and the last bucket takes all larger distances.
    """
    relative = np.arange(positions) - np.arange(positions)[:, None]
    distance = np.abs(relative)
    near, half = BUCKETS // 4, BUCKETS // 2
    # floor(2 log2(distance / 8)) by the exponent of the square. A rounded logarithm may fall short
    # of a whole number.
    doublings = np.frexp((np.maximum(distance, near) / near) ** 2)[1] - 1
    bucket = np.where(distance < near, distance, np.minimum(near + doublings, half - 1))
    return (bucket + half * (relative > 0)).astype(np.int32)


def sizes(config: Stated) -> TransformerConfig:
    """Read the sizes of an encoder."""
    like_roberta = roberta.sizes(config, type_vocab_size=0)
    return dataclasses.replace(like_roberta, attention_bias=RelativeAttentionBias)


MPNET = dataclasses.replace(
    roberta.ROBERTA,
    sizes=sizes,
    supported=bert.BERT.supported | {"relative_attention_num_buckets": BUCKETS, "pad_token_id": 1},
    prefix="mpnet.",
    modules=bert.EMBEDDINGS | {"encoder.relative_attention_bias": "attention_bias.bucket"},
    block={
        "attention.attn.q": "attention.query",
        "attention.attn.k": "attention.key",
        "attention.attn.v": "attention.value",
        "attention.attn.o": "attention.output",
        "attention.LayerNorm": "attention_norm",
    }
    | bert.FEED_FORWARD,
)
