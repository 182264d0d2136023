"""A small encoder and generator in memory, with random weights, and batches for them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_model import random_params

from diffcse_jax.batch import Batch, Vocabulary, in_blocks, lay_out
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchShape
from diffcse_jax.losses.total import prepare
from diffcse_jax.models.families.modernbert import ModernBertBlock
from diffcse_jax.models.forward import Computation, Networks, SentenceEmbeddings, SharedForward
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Network, Params
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.training import networks
from diffcse_jax.training.step import loss_of_batch

PAD, CLS, SEP, MASK = 0, 1, 2, 3
VOCABULARY = Vocabulary(size=60, mask_id=MASK, special_ids=(PAD, CLS, SEP, MASK))
SIZES = TransformerConfig(
    family="bert", vocab_size=60, hidden_size=16, num_blocks=1, num_heads=2, intermediate_size=32, max_positions=16,
    type_vocab_size=2, norm_epsilon=1e-12, activation="gelu", pad_token_id=PAD, embedding_dropout=0.1,
    hidden_dropout=(0.1,), attention_dropout=(0.1,),
)  # fmt: skip
NO_DROPOUT = {
    "model": {"hidden_dropout": (0.0,), "attention_dropout": (0.0,)},
    "generator": {"dropout": False},
}
SIMCSE = {"model": {"projector": "mlp"}, "difference": {"weight": 0.0}}
ENCODER = Pretrained(
    Path("tiny"), {}, SIZES, random_params(Transformer, SIZES), pooler=None, mlm_head=None
)
GENERATOR = dataclasses.replace(
    ENCODER,
    transformer=random_params(Transformer, SIZES, seed=1),
    mlm_head=random_params(MaskedLMHead, SIZES, seed=2),
)
# A ModernBERT: a global and a local block.
MODERN_SIZES = dataclasses.replace(
    SIZES, family="modernbert", num_blocks=2, type_vocab_size=0, hidden_dropout=(0.1,) * 2,
    attention_dropout=(0.1,) * 2, mlm_transform_bias=False, norm_bias=False, final_norm=True, block=ModernBertBlock,
    rotary_bases=(1e5, 1e4), windows=(0, 3),
)  # fmt: skip
MODERN = dataclasses.replace(
    ENCODER,
    config=MODERN_SIZES,
    transformer=random_params(Transformer, MODERN_SIZES),
    mlm_head=random_params(MaskedLMHead, MODERN_SIZES, seed=2),
)


def deeper(checkpoint: Pretrained, blocks: int = 2) -> Pretrained:
    """The same with more blocks, for what looks at several: compiling takes as long as there are blocks."""
    rates = (0.1,) * blocks
    sizes = dataclasses.replace(
        SIZES, num_blocks=blocks, hidden_dropout=rates, attention_dropout=rates
    )
    return dataclasses.replace(
        checkpoint, config=sizes, transformer=random_params(Transformer, sizes, seed=blocks)
    )


def config_of(*parts: Mapping[str, Mapping]) -> Config:
    """A configuration in float32 from nested mappings, later ones over earlier ones."""
    merged: dict[str, Any] = {"precision": "float32", "train": {"packing": "on", "recompute": "on"}}
    for part in parts:
        for group, values in part.items():
            merged[group] = (
                merged.get(group, {}) | values if isinstance(values, Mapping) else values
            )
    return Config.from_dict(merged)


def random_batch(
    size: int = 8, columns: int = 1, length: int = 12, seed: int = 0, padding: int = 0
) -> dict[str, np.ndarray]:
    """Sentences of random ordinary tokens and random lengths, between [CLS] and [SEP]; `padding` is added to all."""
    rng = np.random.default_rng(seed)
    input_ids = rng.integers(MASK + 1, VOCABULARY.size, (size, columns, length), dtype=np.int32)
    lengths = rng.integers(4, length + 1, (size, columns, 1))
    positions = np.arange(length)
    input_ids[..., 0] = CLS
    input_ids = np.where(
        positions == lengths - 1, SEP, np.where(positions < lengths, input_ids, PAD)
    ).astype(np.int32)
    input_ids = np.pad(input_ids, ((0, 0), (0, 0), (0, padding)), constant_values=PAD)
    attention_mask = (np.arange(length + padding) < lengths).astype(np.int32)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "lengths": lengths[..., 0].astype(np.int32),
    }


def views_of(
    batch: Mapping[str, np.ndarray],
    *,
    packed: bool = False,
    devices: int = 1,
    chunks: int = 1,
    following: Mapping[str, np.ndarray] | None = None,
    compares_views: bool = True,
) -> Batch:
    """The views of a batch, a single sentence twice if they are compared; `packed`: laid out as training would do it.

    With `following`, these are the next sentences.
    """
    if following is not None:
        views, after = (
            views_of(each, packed=packed, devices=devices, chunks=chunks)
            for each in (batch, following)
        )
        return views._replace(next=after)
    examples, columns, length = batch["input_ids"].shape
    shape = (examples, max(2, columns) if compares_views else columns, length)
    ids, mask = (np.broadcast_to(batch[name], shape) for name in ("input_ids", "attention_mask"))
    if not packed:
        return Batch(ids, mask)
    lengths = mask.sum(axis=-1)
    blocks = [in_blocks(part, devices, chunks) for part in (lengths.reshape(-1), lengths[:, 0])]
    shape = BatchShape.of(length, max(part.mean(axis=1).max() for part in blocks) / length)
    if not shape.packed:
        return Batch(ids, mask)
    return Batch(
        ids,
        mask,
        *(lay_out(part, length, shape.capacity(part.shape[1] * length)) for part in blocks),
    )


def evaluate(
    *parts: Mapping[str, Mapping],
    batch: Batch | None = None,
    generator: Pretrained = GENERATOR,
    teachers: Mapping[str, Network] = MappingProxyType({}),
    transform: Callable[[Callable], Callable] = lambda loss: loss,
) -> Any:
    """The loss of a configuration on a small batch and (metrics, what losses read besides it), as a step computes them.

    With `transform`, what it makes of this function of the trained arrays.
    """
    config = config_of(*parts)
    built = networks.build(config, ENCODER, generator, VOCABULARY, teachers=teachers)
    views, key = jax.tree.map(jnp.asarray, batch or views_of(random_batch())), jax.random.key(0)

    def loss(params: Params, frozen: Params) -> tuple[jax.Array, Any]:
        inputs = prepare(
            config.losses, Computation(built.networks, frozen), views, key, config.run_info
        )
        value, metrics = loss_of_batch(
            config, Computation(built.networks, params), views, inputs, key
        )
        return value, (metrics, inputs)

    return jax.jit(transform(loss), compiler_options={"xla_backend_optimization_level": 0})(
        built.params, built.frozen
    )


def shared_forward(
    config: Config, computation: Computation, batch: Batch, key: jax.Array
) -> SharedForward:
    """Return the forward pass of a batch as training makes it."""
    options = {"pooler": config.model.pooler, "dropout_masks": config.model.dropout_masks}
    return SharedForward(computation, batch, key, keeps_projector=config.keeps_projector, **options)


def forward_of(*views: np.ndarray) -> SharedForward:
    """Return a forward pass whose embeddings are these, view by view."""
    vectors = jnp.stack(views, axis=1)
    batch = Batch(*np.zeros((2, *vectors.shape[:2], 4), np.int32))
    forward = SharedForward(
        Computation(Networks(VOCABULARY, {}), {}), batch, jax.random.key(0), pooler="cls"
    )
    forward._results["embeddings"] = SentenceEmbeddings(
        *[vectors.reshape(-1, vectors.shape[-1])] * 2
    )
    return forward
