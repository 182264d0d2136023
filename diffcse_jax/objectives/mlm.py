"""The auxiliary masked LM of the encoder (SimCSE appendices A, D and E)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows
from diffcse_jax.edits import Masked, mask_tokens
from diffcse_jax.models import parameters
from diffcse_jax.models.forward import FEW, Computation, SharedForward, mean_where, row_keys
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.objectives import Metrics, Network, Objective, Starts
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of the encoder's auxiliary masked LM (SimCSE appendix A; 0.1 there)", low=0.0)
    mask_ratio: float = option(0.15, "share of tokens masked for it", low=0.0, high=1.0)
    tied: bool = option(
        False,
        "its decoder is the encoder's word embeddings, as in BERT's pretraining, and not a copy that goes its own way "
        "(SimCSE code)",
    )


class AuxiliaryMaskedLM(Objective):
    """The encoder recovers masked tokens of every view, by a head of its own."""

    options: Options

    @property
    def papers(self) -> tuple[str, ...]:
        return ("simcse",)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"mask_token"})

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The head, which starts as the checkpoint's own where it has one, untied with a copy of the embeddings."""
        sizes, tied = starts.encoder.config, self.options.tied
        head = starts.encoder.mlm_head
        if head is None:
            head = parameters.initial(partial(MaskedLMHead, sizes), jax.random.key(self.config.train.seed))
        decoder = {} if tied else {"decoder": starts.encoder.transformer["embeddings.word.embedding"]}
        return {"mlm_head": Network(partial(MaskedLMHead, sizes, tied=tied), head | decoder)}

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Masked:
        vocabulary = frozen.networks.vocabulary
        return mask_tokens(key, views.rows, vocabulary=vocabulary, ratio=self.options.mask_ratio, style="bert")

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        masked: Masked = corrupted
        computation = forward.computation
        encoder, head = computation.network("encoder"), computation.network("mlm_head")
        original = forward.batch.rows.input_ids
        word_embeddings = computation.params["encoder.embeddings.word.embedding"] if self.options.tied else None

        def token_losses(states: jax.Array, targets: jax.Array) -> jax.Array:
            return masked_language_model(head(states, word_embeddings), targets)

        def losses_of(rows: TokenRows, keys: jax.Array, targets: jax.Array, selected: jax.Array) -> jax.Array:
            states = encoder(rows, keys=keys)["last_hidden_state"]
            return computation.gather_positions(token_losses, selected, states, targets, shares=FEW)

        keys = row_keys(key, len(original))
        losses = computation.map_chunks(losses_of, masked.rows, keys, original, masked.selected)
        return mean_where(losses, masked.selected), {}


def masked_language_model(
    logits: Float[Array, "*tokens vocab"], input_ids: Int[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Cross-entropy of the original token, per token; the caller averages over the masked ones."""
    target_logits = jnp.take_along_axis(logits, input_ids[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target_logits


objective = AuxiliaryMaskedLM
