"""GTE (Zhang et al. 2024): gte-en-v1.5, gte-multilingual, and Snowflake's arctic-embed-m-v2.0.

BERT with rotary positions and gated units, whose dense layers have no biases.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from diffcse_jax.models.families import bert
from diffcse_jax.models.families.base import Family, HfConfig
from diffcse_jax.models.transformer import Block, TransformerConfig

GTE_BLOCK = partial(Block, gated=True, unit_bias=False, unit_dropout=True)


def as_gte(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the authors' code, which has the type `new`, as transformers writes it.

    Their scaling of rotary positions (`ntk`) is a larger base and slower positions.
    """
    config, converted = HfConfig(values), {**values, "model_type": "gte"}
    scaling = {} if values.get("rope_scaling") is None else config.inside("rope_scaling").values
    if scaling.get("type") == "ntk" and scaling.get("mixed_b") is None:
        factor = config.inside("rope_scaling").number("factor")
        head_size = config.size("hidden_size") // config.size("num_attention_heads")
        base = config.number("rope_theta") * factor
        converted |= {"rope_scaling": None, "rope_theta": base}
        converted["rope_parameters"] = {"rope_type": "linear", "rope_theta": base, "factor": factor ** (2 / head_size)}
    return converted


def sizes(config: HfConfig) -> TransformerConfig:
    """Read the sizes of an encoder."""
    config.require("position_embedding_type", "rope")
    config.require("layer_norm_type", "layer_norm")
    config.require("pack_qkv", True)
    config.require("logn_attention_scale", False)
    if config.values.get("rope_scaling") is not None:
        config.require("rope_scaling", None)
    rope = config.rope()
    rope.require("rope_type", "default", "linear")
    types = config.size("type_vocab_size", least=0, default=1)
    like_bert = bert.sizes(HfConfig({**config.values, "position_embedding_type": "absolute", "type_vocab_size": 1}))
    return dataclasses.replace(
        like_bert,
        type_vocab_size=types,
        mlm_activation="gelu",
        block=GTE_BLOCK,
        rotary_bases=(rope.number("rope_theta"),) * like_bert.num_blocks,
        rotary_factor=rope.number("factor") if rope.text("rope_type", "default") == "linear" else 1.0,
    )


FAMILIES = {
    "gte": Family(
        architecture="GteModel",
        sizes=sizes,
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
        pooler={},
        mlm_head={"lm_head.dense": "transform", "lm_head.norm": "norm", "lm_head.decoder": ""},
        decoder="lm_head.decoder.weight",
        ignored=r"lm_head\.decoder\.weight|(classifier|pooler)\..*",
    )
}
