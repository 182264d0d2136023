"""ELECTRA (Clark et al. 2020): BERT whose word embeddings may be smaller than its hidden states.

Its checkpoints come in pairs. A generator is a masked LM. A discriminator tells which tokens a
generator has replaced.
"""

import dataclasses

from flax import nnx
from jax.typing import DTypeLike

from diffcse_jax.batch import RowKeys, TokenRows, Tokens
from diffcse_jax.models.families import Stated, bert
from diffcse_jax.models.layers import Dense
from diffcse_jax.models.transformer import InputEmbeddings, TransformerConfig


class ElectraEmbeddings(InputEmbeddings):
    """BERT's embeddings, projected to the hidden size if theirs differs."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        differs = config.word_size != config.hidden_size
        self.project = (
            Dense(config.word_size, config.hidden_size, dtype=dtype, rngs=rngs) if differs else None
        )

    def __call__(self, rows: TokenRows, *, keys: RowKeys) -> Tokens:
        embedded = super().__call__(rows, keys=keys)
        return embedded if self.project is None else self.project(embedded)


def sizes(config: Stated) -> TransformerConfig:
    """Read the sizes of a generator or a discriminator."""
    like_bert = bert.sizes(config)
    size = config.embedding_size
    return dataclasses.replace(
        like_bert, embedding_size=size, mlm_activation="gelu", embeddings=ElectraEmbeddings
    )


ELECTRA = dataclasses.replace(
    bert.BERT,
    sizes=sizes,
    prefix="electra.",
    modules=bert.EMBEDDINGS | bert.TOKEN_TYPES | {"embeddings_project": "embeddings.project"},
    pooler={},
    mlm_head={
        "generator_predictions.dense": "transform",
        "generator_predictions.LayerNorm": "norm",
        "generator_lm_head": "",
    },
    decoder="generator_lm_head.weight",
    discriminator_head={
        "discriminator_predictions.dense": "dense",
        "discriminator_predictions.dense_prediction": "output",
    },
    ignored=r"embeddings\.position_ids|generator_lm_head\.weight",
)
