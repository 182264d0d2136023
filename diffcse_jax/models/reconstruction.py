"""The head that reconstructs masked sentences with the help of a sentence vector (InfoCSE, Wu et al. 2022)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from diffcse_jax.batch import TokenRows
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.packing import pack, unpack
from diffcse_jax.models.parameters import Params, prefixed, subset
from diffcse_jax.models.transformer import Block, TransformerConfig, mask_bias


class ReconstructionHead(nnx.Module):
    """The last blocks of a masked LM and its head, over lower states of it with a sentence vector at position 0.

    Args:
        config: sizes of the masked LM.
        count: blocks.
    """

    def __init__(self, config: TransformerConfig, count: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        indices = range(config.num_blocks - count, config.num_blocks)
        self.attention_bias = config.attention_bias(config, rngs=rngs) if config.attention_bias else None
        self.blocks = nnx.List(Block(config, index, dtype=dtype, rngs=rngs) for index in indices)
        self.vocabulary = MaskedLMHead(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        rows: TokenRows,
        states: Float[Array, "rows length hidden"],
        condition: Float[Array, "rows hidden"],
        *,
        keys: Key[Array, " rows"] | None = None,
    ) -> Float[Array, "rows length hidden"]:
        """The output of the last block.

        Args:
            rows: masked sentences.
            states: of a lower layer.
            condition: sentence vectors.
            keys: one dropout key per row; None: no dropout.
        """
        bias = mask_bias(rows.attention_mask)
        if self.attention_bias is not None:
            bias = bias + self.attention_bias(rows.attention_mask.shape[1])
        outputs = pack(states.at[:, 0].set(condition.astype(states.dtype)), rows)
        for block in self.blocks:
            of_block = None
            if keys is not None:
                keys, of_block = jax.vmap(partial(jax.random.split, num=2), out_axes=1)(keys)
            outputs = block(outputs, rows, bias, keys=of_block)
        return unpack(outputs, rows)


def start_of_head(
    transformer: Mapping[str, Any], mlm_head: Mapping[str, Any], config: TransformerConfig, count: int
) -> Params:
    """Parameters of a `ReconstructionHead` of so many blocks: those of the masked LM itself."""
    start = prefixed(mlm_head, "vocabulary") | prefixed(subset(transformer, "attention_bias"), "attention_bias")
    for block in range(count):
        start |= prefixed(subset(transformer, f"blocks.{config.num_blocks - count + block}"), f"blocks.{block}")
    return start
