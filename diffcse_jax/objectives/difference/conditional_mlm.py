"""Conditional masked LM (DiffCSE Table 3): which were the masked tokens, given the sentence vector?"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import TokenRows
from diffcse_jax.edits import mask_tokens
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import FEW, Computation, SharedForward, fold_in_name, mean_where
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.objectives import Metrics, Network, Starts
from diffcse_jax.objectives.difference import Difference, Options
from diffcse_jax.objectives.mlm import masked_language_model


class Gaps(NamedTuple):
    """Masked sentences and what was there."""

    rows: TokenRows
    selected: Bool[Array, "rows length"]  # which positions were masked
    original: Int[Array, "rows length"]


class ConditionalMaskedLM(Difference):
    """The discriminator recovers masked tokens: mean cross-entropy over those that were selected; no generator.

    The head is that of BERT's masked LM, the checkpoint's own where it has one; its decoder is the discriminator's
    table of word embeddings.
    """

    panels = {"conditional masked LM": ("conditional_mlm_accuracy",)}  # noqa: RUF012

    @property
    def needs(self) -> frozenset[str]:
        return super().needs - {"generator"}

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The discriminator and its vocabulary head."""
        head = Network(partial(MaskedLMHead, starts.encoder.config), starts.encoder.mlm_head)
        return super().networks(starts) | {"discriminator_lm_head": head}

    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray) -> Gaps:
        """Masks every row anew."""
        options, vocabulary = self.options, frozen.networks.vocabulary
        masked = mask_tokens(
            fold_in_name(key, "mask"), rows, vocabulary=vocabulary, ratio=options.mask_ratio, style=options.mask_style
        )
        return Gaps(masked.rows, masked.selected, rows.input_ids)

    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        gaps: Gaps = edited
        computation = forward.computation
        head = computation.network("discriminator_lm_head")
        word_embeddings = computation.params["discriminator.embeddings.word.embedding"]

        def at_token(states: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = head(states, word_embeddings)
            return masked_language_model(logits, targets), jnp.argmax(logits, axis=-1) == targets

        def at_gaps(states: jax.Array, selected: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            return computation.gather_positions(at_token, selected, states, targets, shares=FEW)

        losses, right = self.discriminate(forward, gaps.rows, key, at_gaps, gaps.selected, gaps.original)
        accuracy = mean_where(right, gaps.selected)
        return mean_where(losses, gaps.selected), {"conditional_mlm_accuracy": accuracy}


def objective(options: Options, config: RunConfig) -> ConditionalMaskedLM:
    """The objective.

    Raises:
        ConfigError: an edit under which tokens have no original.
    """
    made = ConditionalMaskedLM(options, config)
    made.only_replaces()
    return made
