"""ModernBERT (Warner et al. 2024), and its descendants: Ettin's encoders, mmBERT, gte-modernbert, granite-embedding-r2.

Norms come before attention and the feed-forward network, whose units are gated. Positions are rotary. Every third block
sees all tokens, the others a window. Dense layers and norms have no biases.
"""

from collections.abc import Mapping
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffcse_jax.batch import RowKeys, TokenRows, Tokens, unpack
from diffcse_jax.models.families.base import MOST_BLOCKS, Family, HfConfig
from diffcse_jax.models.layers import ACTIVATIONS, Dense, LayerNorm, dropout
from diffcse_jax.models.transformer import LogitBias, SelfAttention, TransformerConfig, gated, split_keys

GLOBAL, LOCAL = "full_attention", "sliding_attention"  # types of blocks in config.json


class ModernBertBlock(nnx.Module):
    """Self-attention and a gated feed-forward network, each after a norm and followed by a residual connection.

    The first block has no norm before its attention: the embeddings have just been normalised.
    """

    def __init__(self, config: TransformerConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def norm() -> LayerNorm:
            return LayerNorm(config.hidden_size, config.norm_epsilon, bias=False, dtype=dtype)

        def dense(inputs: int, outputs: int) -> Dense:
            return Dense(inputs, outputs, bias=False, dtype=dtype, rngs=rngs)

        self.attention_norm = norm() if index else None
        self.attention = SelfAttention(config, index, bias=False, dtype=dtype, rngs=rngs)
        self.intermediate_norm = norm()
        self.intermediate = dense(config.hidden_size, config.intermediate_size)
        self.gate = dense(config.hidden_size, config.intermediate_size)
        self.output = dense(config.intermediate_size, config.hidden_size)
        self.activation = config.activation
        self.attention_rate = config.attention_dropout[index]
        self.rate = config.hidden_dropout[index]
        self.recompute = config.recompute

    def __call__(
        self, hidden_states: Tokens, rows: TokenRows, bias: LogitBias, *, keys: RowKeys, positions: int | None = None
    ) -> Float[Array, "*outputs hidden"]:
        """Return the output at all tokens, or, with `positions`, rows of the first positions, which attend to all."""
        probabilities_keys, attention_keys, output_keys = split_keys(keys, rows, positions)
        normed = hidden_states if self.attention_norm is None else self.attention_norm(hidden_states)
        attended = self.attention(normed, rows, bias, keys=probabilities_keys, positions=positions)
        if positions is not None:
            hidden_states = unpack(hidden_states, rows)[:, :positions]
        hidden_states += dropout(attended, self.attention_rate, attention_keys)
        normed = self.intermediate_norm(hidden_states)
        with jax.named_scope("activation"):
            function = partial(gated, ACTIVATIONS[self.activation])
            units = (jax.checkpoint(function) if self.recompute else function)(
                self.intermediate(normed), self.gate(normed)
            )
        return hidden_states + self.output(dropout(units, self.rate, output_keys))


def sizes(config: HfConfig) -> TransformerConfig:
    """Read the sizes of an encoder."""
    for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        config.require(key, False)
    config.require("decoder_bias", True)
    num_blocks = config.size("num_hidden_layers", most=MOST_BLOCKS)
    types = _block_types(config, num_blocks)
    bases = {GLOBAL: _rotary_base(config, GLOBAL, "global_rope_theta", 160_000.0)}
    bases[LOCAL] = _rotary_base(config, LOCAL, "local_rope_theta", 10_000.0)
    window = config.size("local_attention", least=2, default=128) // 2
    return TransformerConfig(
        family=config.text("model_type"),
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        num_blocks=num_blocks,
        num_heads=config.size("num_attention_heads"),
        intermediate_size=config.size("intermediate_size"),
        max_positions=config.size("max_position_embeddings"),
        type_vocab_size=0,
        norm_epsilon=config.rate("norm_eps"),
        activation=config.text("hidden_activation", "gelu"),
        pad_token_id=config.size("pad_token_id", least=0),
        embedding_dropout=config.rate("embedding_dropout"),
        hidden_dropout=(config.rate("mlp_dropout"),) * num_blocks,
        attention_dropout=(config.rate("attention_dropout"),) * num_blocks,
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
    """Return the base of rotary positions. Configurations of transformers 4 and 5 have it in different places."""
    if config.values.get("rope_parameters") is None:
        return config.number(old_key, default)
    rope = config.inside("rope_parameters").inside(block_type)
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
            "attn.Wqkv": ("attention.query", "attention.key", "attention.value"),
            "attn.Wo": "attention.output",
            "mlp_norm": "intermediate_norm",
            "mlp.Wi": ("intermediate", "gate"),
            "mlp.Wo": "output",
        },
        pooler={},
        mlm_head={"head.dense": "transform", "head.norm": "norm", "decoder": ""},
        decoder="decoder.weight",
        ignored=r"decoder\.weight",
    )
}
