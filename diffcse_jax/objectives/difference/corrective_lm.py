"""Conditional corrective LM (DiffCSE Table 3): the original of every token of an edited sentence, given its vector.

The task and its copy mechanism are those of COCO-LM (Meng et al. 2021, "corrective language modeling"): the generator
replaces tokens; at every position a head gives the probability p_copy that the token is the original one, and the
language model is asked only for the rest,

    p(x) = p_copy [x = input token] + (1 - p_copy) p_LM(x).

The loss is the mean of -log p(original) plus `copy_weight` times the mean of the binary cross-entropy of p_copy, whose
label is [original = input token]. As there, p_copy carries no gradient in the first term: it learns from the second
alone. Both means are over all real tokens but the one at position 0, which the sentence vector replaces (COCO-LM takes
the first one over masked tokens only; DiffCSE asks for every position).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import TokenRows
from diffcse_jax.edits import Edited, generate, mask_tokens
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import MOST, Computation, SharedForward, fold_in_name, mean_where
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.layers import Dense
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.objectives import Metrics, Network, Starts
from diffcse_jax.objectives.difference import Difference, Options


class Corrections(NamedTuple):
    """Edited sentences and what they were."""

    edited: Edited
    original: Int[Array, "rows length"]


class CorrectiveLM(Difference):
    """The discriminator recovers the original of every token, or copies it."""

    panels = {  # noqa: RUF012
        "corrective LM": ("corrective_lm_copy_accuracy", "corrective_lm_accuracy_replaced")
    }

    @property
    def papers(self) -> tuple[str, ...]:
        return (*super().papers, "coco_lm")

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The discriminator, its vocabulary head (decoder: its word embeddings) and its copy head."""
        sizes = starts.encoder.config
        return super().networks(starts) | {
            "discriminator_lm_head": Network(partial(MaskedLMHead, sizes), starts.encoder.mlm_head),
            "copy_head": Network(partial(copy_head, sizes)),
        }

    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray) -> Corrections:
        """Masks every row anew and lets the generator fill the gaps."""
        options, vocabulary = self.options, frozen.networks.vocabulary
        masked = mask_tokens(
            fold_in_name(key, "mask"), rows, vocabulary=vocabulary, ratio=options.mask_ratio, style=options.mask_style
        )
        edited = generate(frozen, rows, masked, self.config.generator, fold_in_name(key, "generator"))
        return Corrections(edited, rows.input_ids)

    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        (rows, replaced), original = edited
        computation = forward.computation
        language_model, copy = (computation.network(name) for name in ("discriminator_lm_head", "copy_head"))
        word_embeddings = computation.params["discriminator.embeddings.word.embedding"]
        where = (rows.attention_mask > 0).at[:, 0].set(False)

        def at_token(
            states: jax.Array, copy_logits: jax.Array, replaced: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = language_model(states, word_embeddings)
            right = jnp.argmax(logits, axis=-1) == targets
            return corrective_language_model(logits, copy_logits, ~replaced, targets), right

        def of_rows(states: jax.Array, where: jax.Array, *values: jax.Array) -> tuple[PyTree, jax.Array]:
            copy_logits = copy(states)[..., 0].astype(jnp.float32)
            return computation.gather_positions(at_token, where, states, copy_logits, *values, shares=MOST), copy_logits

        (losses, right), copy_logits = self.discriminate(forward, rows, key, of_rows, where, replaced, original)
        copy_loss = mean_where(copy_mechanism(copy_logits, ~replaced), where)
        return mean_where(losses, where) + self.options.copy_weight * copy_loss, {
            "corrective_lm_copy_loss": copy_loss,
            "corrective_lm_copy_accuracy": mean_where((copy_logits > 0) == ~replaced, where),
            "corrective_lm_accuracy_replaced": mean_where(right, where & replaced),
        }


def corrective_language_model(
    logits: Float[Array, "*tokens vocab"],
    copy_logits: Float[Array, "*tokens"],
    kept: Bool[Array, "*tokens"],
    targets: Int[Array, "*tokens"],
) -> Float[Array, "*tokens"]:
    """-log of p(target) = p_copy [target = input] + (1 - p_copy) p_LM(target), per token; none of it moves p_copy.

    Args:
        logits: of the language model.
        copy_logits: of p_copy.
        kept: where the input is the target.
        targets: the original tokens.
    """
    copy_logits = jax.lax.stop_gradient(copy_logits)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    generated = target_logits - jax.nn.logsumexp(logits, axis=-1) + jax.nn.log_sigmoid(-copy_logits)
    return -jnp.where(kept, jnp.logaddexp(jax.nn.log_sigmoid(copy_logits), generated), generated)


def copy_mechanism(copy_logits: Float[Array, "*tokens"], kept: Bool[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Binary cross-entropy of p_copy, per token; class 1 = the input is the original token."""
    return jax.nn.softplus(jnp.where(kept, -copy_logits, copy_logits))


def copy_head(config: TransformerConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> Dense:
    """One logit per token, that of p_copy."""
    return Dense(config.hidden_size, 1, dtype=dtype, rngs=rngs)


def objective(options: Options, config: RunConfig) -> CorrectiveLM:
    """The objective.

    Raises:
        ConfigError: an edit under which tokens have no original.
    """
    made = CorrectiveLM(options, config)
    made.only_replaces()
    return made
