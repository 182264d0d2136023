"""BERT (Devlin et al. 2019)."""

from diffcse_jax.models.families.base import MOST_BLOCKS, Family, HfConfig, SequenceClassifier
from diffcse_jax.models.transformer import TransformerConfig

EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.word",
    "embeddings.position_embeddings": "embeddings.position",
    "embeddings.LayerNorm": "embeddings.norm",
}
TOKEN_TYPES = {"embeddings.token_type_embeddings": "embeddings.token_type"}
FEED_FORWARD = {"intermediate.dense": "intermediate", "output.dense": "output", "output.LayerNorm": "output_norm"}


def sizes(config: HfConfig) -> TransformerConfig:
    """Read the sizes of any encoder whose configuration has BERT's keys."""
    config.require("is_decoder", False)
    config.require("position_embedding_type", "absolute")
    num_blocks = config.size("num_hidden_layers", most=MOST_BLOCKS)
    hidden_dropout = config.rate("hidden_dropout_prob")
    return TransformerConfig(
        family=config.text("model_type"),
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        num_blocks=num_blocks,
        num_heads=config.size("num_attention_heads"),
        intermediate_size=config.size("intermediate_size"),
        max_positions=config.size("max_position_embeddings"),
        type_vocab_size=config.size("type_vocab_size", default=2),
        norm_epsilon=config.rate("layer_norm_eps"),
        activation=config.text("hidden_act"),
        pad_token_id=config.size("pad_token_id", least=0, default=0),
        embedding_dropout=hidden_dropout,
        hidden_dropout=(hidden_dropout,) * num_blocks,
        attention_dropout=(config.rate("attention_probs_dropout_prob"),) * num_blocks,
    )


BERT = Family(
    architecture="BertModel",
    sizes=sizes,
    prefix="bert.",
    modules=EMBEDDINGS | TOKEN_TYPES,
    block_prefix="encoder.layer.",
    block={
        "attention.self.query": "attention.query",
        "attention.self.key": "attention.key",
        "attention.self.value": "attention.value",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_norm",
    }
    | FEED_FORWARD,
    pooler={"pooler.dense": "dense"},
    mlm_head={
        "cls.predictions.transform.dense": "transform",
        "cls.predictions.transform.LayerNorm": "norm",
        "cls.predictions": "",
    },
    decoder="cls.predictions.decoder.weight",
    ignored=r"embeddings\.position_ids|cls\.seq_relationship\..*|cls\.predictions\.decoder\..*",
    sequence_classifier=SequenceClassifier("bert.pooler.dense", "tanh", "classifier"),
)
FAMILIES = {"bert": BERT}
