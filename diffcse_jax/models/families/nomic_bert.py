"""NomicBERT (Nussbaum et al. 2024): BERT with rotary positions and gated units.

Its blocks have no biases. Its masked-LM head is read as transformers 5 writes it, with biases; the
head of the authors' own pre-training has none, and is not read.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from diffcse_jax.models.families import Family, Stated, bert, rotary_base
from diffcse_jax.models.transformer import Block, TransformerConfig

# There is only one object, so equal sizes are equal. Its norms have biases.
GATED_BLOCK = partial(Block, bias=False, gated=True)
# Keys of the authors' first configurations, and BERT's names for them.
FIRST_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}
# Activations of gates, by the authors' names.
GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


def as_nomic_bert(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the authors' code as transformers writes it."""
    renamed = {name: values[first] for first, name in FIRST_KEYS.items() if first in values}
    if renamed.get("hidden_act") in GATES:
        renamed["hidden_act"] = GATES[renamed["hidden_act"]]
    return {**renamed, **values}


def sizes(config: Stated) -> TransformerConfig:
    """Read the sizes of an encoder."""
    like_bert = bert.sizes(config)
    base = rotary_base(config.rope_parameters)
    return dataclasses.replace(
        like_bert, block=GATED_BLOCK, rotary_bases=(base,) * like_bert.num_blocks
    )


NOMIC_BERT = Family(
    sizes=sizes,
    supported={
        "is_decoder": False,
        "position_embedding_type": "absolute",
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "use_rms_norm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "num_experts": 0,
    },
    prefix="nomic_bert.",
    modules={
        "embeddings.word_embeddings": "embeddings.word",
        "embeddings.token_type_embeddings": "embeddings.token_type",
        "emb_ln": "embeddings.norm",
    },
    block_prefix="encoder.layers.",
    block={
        "attn.Wqkv": "attention.query+attention.key+attention.value",
        "attn.out_proj": "attention.output",
        "norm1": "attention_norm",
        "mlp.fc11": "gate",
        "mlp.fc12": "intermediate",
        "mlp.fc2": "output",
        "norm2": "output_norm",
    },
    mlm_head={
        "cls.predictions.transform.dense": "transform",
        "cls.predictions.transform.layer_norm": "norm",
        "cls.predictions": "",
    },
    decoder="cls.predictions.decoder.weight",
    ignored=r"cls\.predictions\.decoder\..*",
)
