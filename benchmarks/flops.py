"""Count the matrix products of a train step: a product of (m, k) with (k, n) is 2 m k n.

Transformers count at all positions of the padded batch, even if a side leaves padding out. The
vocabulary projection counts only at positions where its output is used. Trained networks count
three times: the forward pass, and the gradients of inputs and weights. As usual, norms, softmax,
dropout, look-ups and the optimizer do not count.
"""

import math
from functools import partial
from typing import NamedTuple

from diffcse_jax.config import Config
from diffcse_jax.models import layers
from diffcse_jax.models.transformer import Transformer, TransformerConfig

TRAINED = 3  # the forward pass, the gradient of the inputs, the gradient of the weights


class BatchSize(NamedTuple):
    """The size of a batch, and the networks that compute it."""

    encoder: TransformerConfig
    generator: TransformerConfig
    examples: int
    views: int  # per example
    length: int  # positions per sentence, padding included
    mean_tokens: float  # real tokens per sentence, [CLS] and [SEP] included


def transformer_flops(sizes: TransformerConfig, rows: int, length: int) -> int:
    """Count the forward pass of `rows` sentences of `length` positions.

    Windows count as they are in the middle.
    """
    shapes = layers.shapes(partial(Transformer, sizes))
    dense = sum(
        2 * math.prod(array.shape) for name, array in shapes.items() if name.endswith(".kernel")
    )
    seen = [
        min(length, 2 * window + 1) if window else length
        for window in sizes.windows or (0,) * sizes.num_blocks
    ]
    attention = 2 * 2 * sum(seen) * sizes.hidden_size  # logits and weighted values, over all heads
    return rows * length * (dense + attention)


def step_flops(config: Config, batch: BatchSize) -> float:
    """Count one train step of SimCSE, SimCSE++ or DiffCSE (`benchmarks.train_step.OBJECTIVES`)."""
    rows, hidden = batch.examples * batch.views, batch.encoder.hidden_size
    one_pass = transformer_flops(batch.encoder, rows, batch.length)
    projector = {"none": 0, "mlp": 2 * hidden**2, "batchnorm": 2 * 2 * hidden * 2 * hidden}[
        config.model.projector
    ]
    trained = one_pass + rows * projector + 2 * batch.examples**2 * hidden * (batch.views - 1)
    frozen = 0.0
    if config.contrast.negatives == "off_dropout":  # the anchors, once more
        trained += one_pass / batch.views + batch.examples * projector
    if config.dcl.weight:
        trained += 2 * batch.examples * hidden**2
    if config.difference.weight:
        trained += one_pass + rows * batch.length * 2 * hidden * 2  # discriminator and its head
        masked = rows * (batch.mean_tokens - 1)
        vocabulary = (
            2
            * batch.generator.hidden_size
            * (batch.generator.hidden_size + batch.generator.vocab_size)
        )
        frozen = transformer_flops(batch.generator, rows, batch.length) + masked * vocabulary
    return TRAINED * trained + frozen
