"""DistilBERT (Sanh et al. 2019): no token types, no pooler, no dropout after self-attention."""

import dataclasses

from diffcse_jax.models.families import Family, Stated, bert
from diffcse_jax.models.transformer import TransformerConfig

NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def sizes(config: Stated) -> TransformerConfig:
    """Read the sizes of an encoder."""
    like_bert = bert.sizes(config, NAMES, type_vocab_size=0, layer_norm_eps=1e-12)
    return dataclasses.replace(like_bert, attention_output_dropout=False)


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
