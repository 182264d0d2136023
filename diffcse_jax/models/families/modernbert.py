"""ModernBERT (Warner et al. 2024), and its descendants: Ettin's encoders, mmBERT, gte-modernbert, granite-embedding-r2.

Norms come before attention and the feed-forward network, whose units are gated. Positions are rotary. Every third block
sees all tokens, the others a window. Dense layers and norms have no biases.
"""

import dataclasses
from collections.abc import Mapping

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffcse_jax.batch import RowKeys, TokenRows, Tokens, unpack
from diffcse_jax.models.families import bert
from diffcse_jax.models.families.base import Family, HfConfig
from diffcse_jax.models.layers import dropout
from diffcse_jax.models.transformer import Block, LogitBias, TransformerConfig, split_keys

GLOBAL, LOCAL = "full_attention", "sliding_attention"  # types of blocks in config.json


class ModernBertBlock(Block):
    """Self-attention and a gated feed-forward network, each followed by a residual connection.

    A norm comes before each of them; `output_norm` before the feed-forward network. The first block has no norm before
    its attention: the embeddings have just been normalised.
    """

    def __init__(self, config: TransformerConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, index, bias=False, gated=True, attention_norm=index > 0, dtype=dtype, rngs=rngs)
        self.attention_rate = config.attention_dropout[index]

    def __call__(
        self, hidden_states: Tokens, rows: TokenRows, bias: LogitBias, *, keys: RowKeys, positions: int | None = None
    ) -> Float[Array, "*outputs hidden"]:
        probabilities_keys, attention_keys, unit_keys = split_keys(keys, rows, positions)
        normed = hidden_states if self.attention_norm is None else self.attention_norm(hidden_states)
        attended = self.attention(normed, rows, bias, keys=probabilities_keys, positions=positions)
        if positions is not None:
            hidden_states = unpack(hidden_states, rows)[:, :positions]
        hidden_states += dropout(attended, self.attention_rate, attention_keys)
        units = self.activated(self.output_norm(hidden_states))
        return hidden_states + self.output(dropout(units, self.output_dropout, unit_keys))


# BERT's keys that have other names here.
KEYS = {
    "layer_norm_eps": "norm_eps",
    "hidden_act": "hidden_activation",
    "hidden_dropout_prob": "mlp_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def sizes(config: HfConfig) -> TransformerConfig:
    """Read the sizes of an encoder."""
    for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        config.require(key, False)
    config.require("decoder_bias", True)
    values = {"hidden_activation": "gelu"} | dict(config.values)
    values |= {"position_embedding_type": "absolute", "type_vocab_size": 1}  # some have others, which nothing reads
    like_bert = bert.sizes(HfConfig(values, KEYS))
    types = _block_types(config, like_bert.num_blocks)
    bases = {GLOBAL: _rotary_base(config, GLOBAL, "global_rope_theta", 160_000.0)}
    bases[LOCAL] = _rotary_base(config, LOCAL, "local_rope_theta", 10_000.0)
    window = config.size("local_attention", least=2, default=128) // 2
    return dataclasses.replace(
        like_bert,
        type_vocab_size=0,
        embedding_dropout=config.rate("embedding_dropout"),
        mlm_activation=config.text("classifier_activation", "gelu"),
        mlm_transform_bias=False,
        norm_bias=False,
        final_norm=True,
        block=ModernBertBlock,
        rotary_bases=tuple(bases[each] for each in types),
        windows=tuple(window if each == LOCAL else 0 for each in types),
    )


def _block_types(config: HfConfig, num_blocks: int) -> list[str]:
    """Return the type of each block: listed, or by the distance of the global ones."""
    every = config.size("global_attn_every_n_layers", default=3)
    types = config.values.get("layer_types") or [LOCAL if index % every else GLOBAL for index in range(num_blocks)]
    if not isinstance(types, list) or len(types) != num_blocks or not {GLOBAL, LOCAL}.issuperset(map(str, types)):
        raise ValueError(f"layer_types must be a list of {num_blocks} times {GLOBAL!r} or {LOCAL!r}")
    return types


def _rotary_base(config: HfConfig, block_type: str, old_key: str, default: float) -> float:
    if config.rope() is config:
        return config.number(old_key, default)
    rope = config.rope().inside(block_type)
    rope.require("rope_type", "default")
    return rope.number("rope_theta", default)


FAMILIES: Mapping[str, Family] = {
    "modernbert": Family(
        architecture="ModernBertModel",
        sizes=sizes,
        prefix="model.",
        modules={
            "embeddings.tok_embeddings": "embeddings.word",
            "embeddings.norm": "embeddings.norm",
            "final_norm": "final_norm",
        },
        block_prefix="layers.",
        block={
            "attn_norm": "attention_norm",
            "attn.Wqkv": "attention.query+attention.key+attention.value",
            "attn.Wo": "attention.output",
            "mlp_norm": "output_norm",
            "mlp.Wi": "intermediate+gate",
            "mlp.Wo": "output",
        },
        pooler={},
        mlm_head={"head.dense": "transform", "head.norm": "norm", "decoder": ""},
        decoder="decoder.weight",
        ignored=r"decoder\.weight",
    )
}
