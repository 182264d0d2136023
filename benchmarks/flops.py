"""Model FLOPs of a train step: the matrix products that its mathematics needs, counted, not measured.

A product of (m, k) with (k, n) counts 2 m k n. What is trained counts three times (forward, and the gradients of
inputs and weights), what is frozen once. Transformers count at all positions of the padded batch, also for a side that
leaves padding out; the vocabulary projection counts where its output is used: real tokens but position 0. Norms,
softmax, dropout, look-ups and the optimizer are not counted, as is the custom.
"""

from diffcse_jax.config import Config
from diffcse_jax.models.transformer import TransformerConfig

TRAINED = 3  # forward, gradient of the inputs, gradient of the weights


def transformer_flops(sizes: TransformerConfig, rows: int, length: int) -> int:
    """The forward pass over `rows` sentences of `length` positions."""
    hidden = sizes.hidden_size
    projections = 4 * 2 * hidden * hidden  # query, key, value, output
    attention = 2 * 2 * length * hidden  # logits and weighted values, over all heads
    feed_forward = 2 * 2 * hidden * sizes.intermediate_size
    return rows * length * sizes.num_blocks * (projections + attention + feed_forward)


def projector_flops(kind: str, hidden: int, rows: int) -> int:
    """The head behind the sentence vector: one square layer, or out to twice the width and back."""
    return rows * {"none": 0, "mlp": 2 * hidden**2, "batchnorm": 2 * 2 * hidden * 2 * hidden}[kind]


def vocabulary_flops(sizes: TransformerConfig, positions: float) -> int:
    """The masked-LM head: a square layer and the projection to the vocabulary."""
    return round(positions * (2 * sizes.hidden_size**2 + 2 * sizes.hidden_size * sizes.vocab_size))


def step_flops(
    config: Config,
    encoder: TransformerConfig,
    generator: TransformerConfig,
    *,
    batch_size: int,
    length: int,
    mean_tokens: float,
) -> int:
    """Model FLOPs of one train step on single sentences (two views).

    Args:
        config: the objectives. An auxiliary masked LM is not counted.
        encoder: sizes of the encoder and the discriminator.
        generator: sizes of the frozen masked LM.
        batch_size: sentences.
        length: positions per sentence, padding included.
        mean_tokens: real tokens per sentence, [CLS] and [SEP] included.
    """
    hidden, rows = encoder.hidden_size, 2 * batch_size
    off_dropout = config.contrast.negatives == "off_dropout"
    encoded = rows + batch_size if off_dropout else rows
    trained = transformer_flops(encoder, encoded, length)
    trained += projector_flops(config.model.projector, hidden, encoded)
    trained += 2 * batch_size**2 * hidden  # the similarity matrix
    if config.dcl.weight:
        trained += 2 * batch_size * hidden**2
    frozen = 0
    if config.uses_difference:
        trained += transformer_flops(encoder, rows, length) + rows * length * 2 * hidden * 2
        frozen += transformer_flops(generator, rows, length)
        frozen += vocabulary_flops(generator, rows * (mean_tokens - 1))
    return TRAINED * trained + frozen
