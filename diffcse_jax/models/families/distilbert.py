"""DistilBERT (Sanh et al. 2019): no token types, no pooler, no dropout on the output of self-attention."""

from diffcse_jax.models.families import bert
from diffcse_jax.models.families.base import MOST_BLOCKS, Family, HfConfig, SequenceClassifier
from diffcse_jax.models.transformer import TransformerConfig


def sizes(config: HfConfig) -> TransformerConfig:
    """Read the sizes of an encoder."""
    num_blocks = config.size("n_layers", most=MOST_BLOCKS)
    hidden_dropout = config.rate("dropout")
    return TransformerConfig(
        family=config.text("model_type"),
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("dim"),
        num_blocks=num_blocks,
        num_heads=config.size("n_heads"),
        intermediate_size=config.size("hidden_dim"),
        max_positions=config.size("max_position_embeddings"),
        type_vocab_size=0,
        norm_epsilon=1e-12,
        activation=config.text("activation"),
        pad_token_id=config.size("pad_token_id", least=0, default=0),
        embedding_dropout=hidden_dropout,
        hidden_dropout=(hidden_dropout,) * num_blocks,
        attention_dropout=(config.rate("attention_dropout"),) * num_blocks,
        attention_output_dropout=False,
    )


DISTILBERT = Family(
    architecture="DistilBertModel",
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
    pooler={},
    mlm_head={"vocab_transform": "transform", "vocab_layer_norm": "norm", "vocab_projector": ""},
    decoder="vocab_projector.weight",
    ignored=r"embeddings\.position_ids|vocab_projector\.weight",
    sequence_classifier=SequenceClassifier("pre_classifier", "relu", "classifier"),
)
FAMILIES = {"distilbert": DISTILBERT}
