"""RoBERTa (Liu et al. 2019), and CamemBERT and XLM-RoBERTa, which have other tokenizers.

Tokens are numbered from the padding id + 1. The position of padding is the padding id.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from diffcse_jax.batch import TokenRows, Tokens, pack_ids
from diffcse_jax.models.families import Stated, bert
from diffcse_jax.models.layers import Embedding
from diffcse_jax.models.transformer import InputEmbeddings, TransformerConfig, trained_where


class RobertaEmbeddings(InputEmbeddings):
    """Embeddings whose positions are numbered over real tokens only."""

    def embed_positions(self, table: Embedding, rows: TokenRows) -> Tokens:
        is_token = (rows.input_ids != self.pad_token_id).astype(jnp.int32)
        numbers = jnp.cumsum(is_token, axis=1) * is_token + self.pad_token_id
        numbers = pack_ids(numbers, rows, fill=self.pad_token_id)
        # The position of padding is not trained (PyTorch's padding_idx).
        return trained_where(numbers != self.pad_token_id, table(numbers))


def sizes(config: Stated, **fixed: Any) -> TransformerConfig:
    """Read the sizes of any encoder with RoBERTa's positions and masked-LM head."""
    offset = config.pad_token_id + 1
    like_bert = bert.sizes(config, **fixed)
    return dataclasses.replace(
        like_bert, position_offset=offset, mlm_activation="gelu", embeddings=RobertaEmbeddings
    )


ROBERTA = dataclasses.replace(
    bert.BERT,
    sizes=sizes,
    prefix="roberta.",
    mlm_head={"lm_head.dense": "transform", "lm_head.layer_norm": "norm", "lm_head": ""},
    decoder="lm_head.decoder.weight",
    ignored=r"embeddings\.position_ids|lm_head\.decoder\..*",
)
