"""Conditional replaced-token detection, RTD (DiffCSE Section 3): which tokens did the generator replace?"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from diffcse_jax.data.rows import Rows, Views
from diffcse_jax.edits import Edited, generate, mask_tokens
from diffcse_jax.models.computation import Computation, Forward, mean_where, named_key, row_keys
from diffcse_jax.models.flops import BatchSize, transformer_flops, vocabulary_flops
from diffcse_jax.models.heads import token_classifier
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.objectives import Metrics, Network, Objective, Starts


class ReplacedTokenDetection(Objective):
    """The discriminator reads the edited sentence with the sentence vector at position 0."""

    panels = {"replaced-token detection": ("rtd_accuracy", "rtd_share_kept", "rtd_accuracy_replaced")}  # noqa: RUF012

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"vectors", "mask_token", "generator"})

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The discriminator, which starts as a copy of the encoder, and its head."""
        sizes = starts.encoder.config
        return {
            "discriminator": Network(partial(Transformer, sizes), starts.encoder.transformer),
            "token_classifier": Network(partial(token_classifier, sizes)),
        }

    def corrupt(self, frozen: Computation, views: Views, key: PRNGKeyArray) -> Edited:
        """Masks every row anew and lets the generator fill the gaps."""
        options, vocabulary = self.options, frozen.networks.vocabulary
        masked = mask_tokens(
            named_key(key, "mask"),
            views.rows,
            vocabulary=vocabulary,
            ratio=options.mask_ratio,
            style=options.mask_style,
        )
        return generate(frozen, views.rows, masked, self.config.generator, named_key(key, "generator"))

    def loss(self, forward: Forward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        edited: Edited = corrupted
        only_real = self.options.loss_positions == "real"
        rows = edited.rows if only_real else edited.rows.padded()
        logits = self._logits(forward, rows, key).astype(jnp.float32)
        per_token = replaced_token_detection(logits, edited.replaced)
        real = rows.attention_mask > 0
        # Authors' batches end with their longest sentence; ours may be padded further, to a static length.
        counted = real if only_real else real.any(axis=0, keepdims=True)
        right = (logits[..., 1] > logits[..., 0]) == edited.replaced
        return mean_where(per_token, jnp.broadcast_to(counted, real.shape)), {
            "rtd_accuracy": mean_where(right, real),
            "rtd_accuracy_replaced": mean_where(right, edited.replaced),
            "rtd_accuracy_kept": mean_where(right, real & ~edited.replaced),
            "rtd_share_kept": mean_where(~edited.replaced, real),
        }

    def _logits(self, forward: Forward, rows: Rows, key: PRNGKeyArray) -> Float[Array, "rows length 2"]:
        computation, vectors = forward.computation, forward.vectors
        discriminator, classifier = (computation.network(name) for name in ("discriminator", "token_classifier"))
        condition = vectors.projected if self.options.condition == "projected" else vectors.pooled

        def logits_of(rows: Rows, keys: jax.Array, condition: jax.Array) -> Any:
            return classifier(discriminator(rows, condition=condition, keys=keys)["last_hidden_state"])

        return computation.in_chunks(logits_of, rows, row_keys(key, len(rows.input_ids)), condition)

    def flops(self, batch: BatchSize) -> tuple[float, float]:
        assert batch.generator is not None  # among its `needs`
        trained = transformer_flops(batch.encoder, batch.rows, batch.length)
        trained += batch.rows * batch.length * 2 * batch.encoder.hidden_size * 2
        frozen = transformer_flops(batch.generator, batch.rows, batch.length)
        return trained, frozen + vocabulary_flops(batch.generator, batch.rows * (batch.mean_tokens - 1))


def replaced_token_detection(
    logits: Float[Array, "batch length 2"], replaced: Bool[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Cross-entropy of telling replaced tokens (class 1) from kept ones, per token (DiffCSE Section 3).

    The authors' code takes the mean over all positions, padding included; the paper a sum over tokens.
    """
    # Two-class cross-entropy is the softplus of the margin against the right class.
    margin = logits[..., 1] - logits[..., 0]
    return jax.nn.softplus(jnp.where(replaced, -margin, margin))


objective = ReplacedTokenDetection
