"""DistilBERT (Sanh et al. 2019): no token types, no pooler, no dropout after self-attention."""

import dataclasses

from diffcse_jax.models.families import Family, PreTrainedConfig, bert
from diffcse_jax.models.transformer import TransformerConfig

NAMES = {
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def sizes(config: PreTrainedConfig) -> TransformerConfig:
    """Read the sizes of an encoder."""
    like_bert = bert.sizes(config, **NAMES)
    return dataclasses.replace(like_bert, type_vocab_size=0, attention_output_dropout=False)


DISTILBERT = Family(
    sizes=sizes,
    prefix="distilbert.",
    modules=bert.EMBEDDINGS,
    block_prefix="transformer.layer.",
    block={
        "attention.q_lin": "attention.query",
        "attention.k_lin": "attention.key",
        "attention.v_lin": "attention.value",
        "attention.out_lin": "attention.output",
        "sa_layer_norm": "attention_norm",
        "ffn.lin1": "intermediate",
        "ffn.lin2": "output",
        "output_layer_norm": "output_norm",
    },
    mlm_head={"vocab_transform": "transform", "vocab_layer_norm": "norm", "vocab_projector": ""},
    decoder="vocab_projector.weight",
    ignored=r"embeddings\.position_ids|vocab_projector\.weight",
)
