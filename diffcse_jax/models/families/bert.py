"""BERT (Devlin et al. 2019)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffcse_jax.models.families import Family, Stated
from diffcse_jax.models.transformer import TransformerConfig

EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.word",
    "embeddings.position_embeddings": "embeddings.position",
    "embeddings.LayerNorm": "embeddings.norm",
}
TOKEN_TYPES = {"embeddings.token_type_embeddings": "embeddings.token_type"}
FEED_FORWARD = {
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}


def sizes(
    config: Stated, names: Mapping[str, str] = MappingProxyType({}), **fixed: Any
) -> TransformerConfig:
    """Read the sizes of an encoder whose configuration has BERT's keys.

    Some may have other names, and some may be fixed.
    """

    def value(key: str) -> Any:
        return fixed[key] if key in fixed else getattr(config, names.get(key, key))

    num_blocks = value("num_hidden_layers")
    hidden_dropout = value("hidden_dropout_prob")
    return TransformerConfig(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=value("hidden_size"),
        num_blocks=num_blocks,
        num_heads=value("num_attention_heads"),
        intermediate_size=value("intermediate_size"),
        max_positions=config.max_position_embeddings,
        type_vocab_size=value("type_vocab_size"),
        norm_epsilon=value("layer_norm_eps"),
        activation=value("hidden_act"),
        pad_token_id=config.pad_token_id,
        embedding_dropout=hidden_dropout,
        hidden_dropout=(hidden_dropout,) * num_blocks,
        attention_dropout=(value("attention_probs_dropout_prob"),) * num_blocks,
    )


BERT = Family(
    sizes=sizes,
    supported={"is_decoder": False, "position_embedding_type": "absolute"},
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
)
