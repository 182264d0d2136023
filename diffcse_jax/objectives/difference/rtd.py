"""Conditional replaced-token detection, RTD (DiffCSE Section 3): which tokens did the generator replace?

With the other edits of DiffCSE Table 4: which tokens were inserted, or follow a dropped one?
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import TokenRows
from diffcse_jax.edits import Edited, mask_tokens
from diffcse_jax.edits.lengths import change_lengths, fill
from diffcse_jax.edits.options import EditOptions
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name, mean_where
from diffcse_jax.models.heads import token_classifier
from diffcse_jax.objectives import Metrics, Network, Starts
from diffcse_jax.objectives.difference import Difference


class ReplacedTokenDetection(Difference):
    """The discriminator tells the tokens of an edited sentence that the edit changed from those that it kept."""

    panels = {"replaced-token detection": ("rtd_accuracy", "rtd_share_kept", "rtd_accuracy_replaced")}  # noqa: RUF012

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The discriminator and its head."""
        head = Network(partial(token_classifier, starts.encoder.config))
        return super().networks(starts) | {"token_classifier": head}

    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray) -> Edited:
        """Edits every row anew."""
        return edit_sentences(frozen, rows, self.options, self.config, key)

    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        only_real = self.options.loss_positions == "real"
        rows = edited.rows if only_real else edited.rows.padded()
        classifier: Any = forward.computation.network("token_classifier")
        logits = self.discriminate(forward, rows, key, classifier).astype(jnp.float32)
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


def edit_sentences(
    frozen: Computation, rows: TokenRows, options: EditOptions, config: RunConfig, key: PRNGKeyArray
) -> Edited:
    """Sentences with tokens dropped, inserted, masked and filled by the generator, as the edit says.

    Args:
        frozen: the frozen networks.
        rows: the sentences.
        options: the edit.
        config: the run, for its generator and the longest sentence.
        key: for these rows alone.
    """
    vocabulary = frozen.networks.vocabulary
    changed = change_lengths(
        fold_in_name(key, "lengths"), rows, options, vocabulary=vocabulary, max_length=config.data.max_length
    )
    masked = mask_tokens(
        fold_in_name(key, "mask"),
        changed.rows,
        vocabulary=vocabulary,
        ratio=options.masked_share,
        style=options.mask_style,
    )
    return fill(frozen, changed, masked, options, config.generator, fold_in_name(key, "generator"))


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
