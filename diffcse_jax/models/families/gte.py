"""GTE (Zhang et al. 2024): gte-en-v1.5, gte-multilingual, and Snowflake's arctic-embed-m-v2.0.

BERT with rotary positions and gated units, whose dense layers have no biases.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from diffcse_jax.models.families import Family, Stated, bert, rotary_base
from diffcse_jax.models.transformer import Block, TransformerConfig

# There is only one object, so equal sizes are equal.
GTE_BLOCK = partial(Block, gated=True, unit_bias=False, unit_dropout=True)


def as_gte(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the authors' code as transformers writes it.

    Theirs has the type `new`. Their scaling of rotary positions (`ntk`) is a larger base and slower
    positions.
    """
    converted = {**values, "model_type": "gte"}
    scaling = values.get("rope_scaling") or {}
    if scaling.get("type") == "ntk" and scaling.get("mixed_b") is None:
        factor = scaling["factor"]
        head_size = values["hidden_size"] // values["num_attention_heads"]
        base = values["rope_theta"] * factor
        converted |= {"rope_scaling": None, "rope_theta": base}
        converted["rope_parameters"] = {
            "rope_type": "linear",
            "rope_theta": base,
            "factor": factor ** (2 / head_size),
        }
    return converted


def sizes(config: Stated) -> TransformerConfig:
    """Read the sizes of an encoder."""
    like_bert = bert.sizes(config)
    rope = config.rope_parameters
    return dataclasses.replace(
        like_bert,
        mlm_activation="gelu",
        block=GTE_BLOCK,
        rotary_bases=(rotary_base(rope, "linear"),) * like_bert.num_blocks,
        rotary_factor=float(rope["factor"]) if rope["rope_type"] == "linear" else 1.0,
    )


GTE = Family(
    sizes=sizes,
    supported={
        "is_decoder": False,
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "pack_qkv": True,
        "logn_attention_scale": False,
        "rope_scaling": None,
    },
    prefix="gte.",
    other_prefix="new.",
    modules={
        "embeddings.word_embeddings": "embeddings.word",
        "embeddings.LayerNorm": "embeddings.norm",
    }
    | bert.TOKEN_TYPES,
    block_prefix="encoder.layer.",
    block={
        "attention.qkv_proj": "attention.query+attention.key+attention.value",
        "attention.o_proj": "attention.output",
        "attn_ln": "attention_norm",
        "mlp.up_gate_proj": "gate+intermediate",
        "mlp.down_proj": "output",
        "mlp_ln": "output_norm",
    },
    mlm_head={"lm_head.dense": "transform", "lm_head.norm": "norm", "lm_head.decoder": ""},
    decoder="lm_head.decoder.weight",
    ignored=r"lm_head\.decoder\.weight",
)
