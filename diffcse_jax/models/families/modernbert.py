"""ModernBERT (Warner et al. 2024), and its descendants.

These are Ettin's encoders, mmBERT, gte-modernbert and granite-embedding-r2.

Norms come before attention and the feed-forward network, whose units are gated. Positions are
rotary. Every third block sees all tokens, the others a window. Dense layers and norms have no
biases.
"""

import dataclasses

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffcse_jax.batch import TokenRows, Tokens, unpack
from diffcse_jax.models.families import Family, Stated, bert, rotary_base
from diffcse_jax.models.layers import dropout
from diffcse_jax.models.transformer import Block, BlockKeys, LogitBias, TransformerConfig


class ModernBertBlock(Block):
    """Self-attention and a gated feed-forward network, each followed by a residual connection.

    A norm comes before each of them; `output_norm` before the feed-forward network. The first block
    has no norm before its attention: the embeddings have just been normalised.
    """

    def __init__(self, config: TransformerConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(
            config, index, bias=False, gated=True, attention_norm=index > 0, dtype=dtype, rngs=rngs
        )
        self.attention_rate = config.attention_dropout[index]

    def __call__(
        self,
        hidden_states: Tokens,
        rows: TokenRows,
        bias: LogitBias,
        *,
        keys: BlockKeys,
        positions: int | None = None,
    ) -> Float[Array, "*outputs hidden"]:
        attention_keys, unit_keys = keys.outputs
        normed = (
            hidden_states if self.attention_norm is None else self.attention_norm(hidden_states)
        )
        attended = self.attention(normed, rows, bias, keys=keys.attention, positions=positions)
        if positions is not None:
            hidden_states = unpack(hidden_states, rows)[:, :positions]
        hidden_states += dropout(attended, self.attention_rate, attention_keys)
        units = self.activated(self.output_norm(hidden_states))
        return hidden_states + self.output(dropout(units, self.output_dropout, unit_keys))


NAMES = {
    "layer_norm_eps": "norm_eps",
    "hidden_act": "hidden_activation",
    "hidden_dropout_prob": "mlp_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


def sizes(config: Stated) -> TransformerConfig:
    """Read the sizes of an encoder."""
    if config.local_attention < 2:
        raise ValueError(f"local_attention must be at least 2, not {config.local_attention}")
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types names {len(config.layer_types)} of {config.num_hidden_layers} blocks"
        )
    bases = {kind: rotary_base(rope) for kind, rope in config.rope_parameters.items()}
    return dataclasses.replace(
        bert.sizes(config, NAMES, type_vocab_size=0),  # some have others, which nothing reads
        embedding_dropout=config.embedding_dropout,
        mlm_activation=config.classifier_activation,
        mlm_transform_bias=False,
        norm_bias=False,
        final_norm=True,
        block=ModernBertBlock,
        rotary_bases=tuple(bases[kind] for kind in config.layer_types),
        windows=tuple(
            config.local_attention // 2 if kind != "full_attention" else 0
            for kind in config.layer_types
        ),
    )


MODERNBERT = Family(
    sizes=sizes,
    supported=dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False)
    | {"is_decoder": False, "decoder_bias": True},
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
    mlm_head={"head.dense": "transform", "head.norm": "norm", "decoder": ""},
    decoder="decoder.weight",
    ignored=r"decoder\.weight",
)
