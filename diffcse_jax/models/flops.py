"""Model FLOPs: the matrix products that a network's mathematics needs, counted, not measured.

A product of (m, k) with (k, n) counts 2 m k n. Transformers count at all positions of the padded batch, also for a side
that leaves padding out; the vocabulary projection counts where its output is used. Norms, softmax, dropout, look-ups
and the optimizer are not counted, as is the custom; nor are similarities of prefixes of vectors, which are few.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from diffcse_jax.models.transformer import TransformerConfig


class BatchSize(NamedTuple):
    """The size of a batch, and of the networks that compute it."""

    encoder: TransformerConfig
    generator: TransformerConfig | None
    examples: int
    views: int  # per example
    length: int  # positions per sentence, padding included
    mean_tokens: float  # real tokens per sentence, [CLS] and [SEP] included
    teachers: Mapping[str, TransformerConfig] = MappingProxyType({})  # by their names in the configuration

    @property
    def rows(self) -> int:
        """Sentences of all views."""
        return self.examples * self.views


def transformer_flops(sizes: TransformerConfig, rows: int, length: int) -> int:
    """The forward pass over `rows` sentences of `length` positions."""
    hidden = sizes.hidden_size
    projections = 4 * 2 * hidden * hidden  # query, key, value, output
    attention = 2 * 2 * length * hidden  # logits and weighted values, over all heads
    feed_forward = 2 * 2 * hidden * sizes.intermediate_size
    return rows * length * sizes.num_blocks * (projections + attention + feed_forward)


def projector_flops(kind: str, hidden: int, rows: int) -> int:
    """The head on the sentence vector: one square layer, or out to twice the width and back."""
    return rows * {"none": 0, "mlp": 2 * hidden**2, "batchnorm": 2 * 2 * hidden * 2 * hidden}[kind]


def similarity_flops(batch: BatchSize, hidden: int) -> int:
    """The similarities of every anchor with all other views of a batch, of vectors of so many numbers."""
    return 2 * batch.examples**2 * hidden * (batch.views - 1)


def vocabulary_flops(sizes: TransformerConfig, positions: float) -> int:
    """The masked-LM head: a square layer and the projection to the vocabulary."""
    return round(positions * (2 * sizes.hidden_size**2 + 2 * sizes.hidden_size * sizes.vocab_size))
