"""Losses that recover masked tokens: SimCSE's auxiliary masked LM, and InfoCSE's reconstruction."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.errors import ConfigError
from diffcse_jax.losses import Loss, Metrics, PretrainedCheckpoints, RunInfo
from diffcse_jax.losses.diffcse import Masked, mask_tokens
from diffcse_jax.models import layers
from diffcse_jax.models.forward import FEW, Computation, SharedForward, mean_where, row_keys
from diffcse_jax.models.heads import MaskedLMHead, ReconstructionHead, reconstruction_start
from diffcse_jax.models.layers import Network
from diffcse_jax.options import option


def score_tokens(
    head: MaskedLMHead,
    word_embeddings: Float[Array, "vocab size"] | None,
    hidden_states: Float[Array, "tokens hidden"],
    targets: Int[Array, " tokens"],
) -> tuple[Float[Array, " tokens"], Bool[Array, " tokens"]]:
    """Return the cross-entropy of each target, and whether the head finds it the likeliest token.

    This is what `Computation.gather_positions` applies to masked positions.
    """
    logits = head(hidden_states, word_embeddings)
    correct = jnp.argmax(logits, axis=-1) == targets
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets), correct


@dataclasses.dataclass(frozen=True)
class AuxiliaryMaskedLM(Loss):
    """An auxiliary masked LM on every view, with a head of its own (SimCSE appendices A, D and E).

    Alone, without a loss that compares embeddings, it pre-trains a masked LM (Devlin et al. 2019).
    """

    weight: float = option(
        0.0, "weight of the encoder's auxiliary masked LM (SimCSE appendix A: 0.1)", low=0.0
    )
    mask_ratio: float = option(
        0.15, "share of tokens masked for the auxiliary masked LM", low=0.0, high=1.0
    )
    tied: bool = option(
        False,
        "decode with the word embeddings, as BERT; False: train a copy of them (SimCSE's code)",
    )
    papers = ("simcse",)
    needs = frozenset({"mask_token"})

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> dict[str, Network]:
        """Return the head: the checkpoint's own if it has one.

        If it is not tied, its decoder starts as the word embeddings.
        """
        encoder = checkpoints.encoder
        head = encoder.mlm_head
        if head is None:
            head = layers.initial(partial(MaskedLMHead, encoder.config), jax.random.key(run.seed))
        decoder = {} if self.tied else {"decoder": encoder.transformer["embeddings.word.embedding"]}
        return {
            "mlm_head": Network(
                partial(MaskedLMHead, encoder.config, tied=self.tied), {**head, **decoder}
            )
        }

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> Masked:
        return mask_tokens(
            key,
            batch.rows,
            vocabulary=frozen.networks.vocabulary,
            ratio=self.mask_ratio,
            style="bert",
        )

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        computation = forward.computation
        original = forward.batch.rows.input_ids
        encoder, head = computation.network("encoder"), computation.network("mlm_head")
        word_embeddings = (
            computation.params["encoder.embeddings.word.embedding"] if self.tied else None
        )

        at_tokens = partial(score_tokens, head, word_embeddings)

        def at_rows(
            masked: Masked, keys: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            states = encoder(masked.rows, keys=keys)[-1]
            return computation.gather_positions(
                at_tokens, masked.selected, states, targets, shares=FEW
            )

        losses, correct = computation.map_chunks(
            at_rows, inputs, row_keys(key, len(original)), original
        )
        return mean_where(losses, inputs.selected), {
            "mlm_accuracy": mean_where(correct, inputs.selected)
        }


@dataclasses.dataclass(frozen=True)
class Reconstruction(Loss):
    """Reconstruction of masked tokens from the generator's states and the embedding (InfoCSE).

    Wu et al. 2022. A small head sees the original sentence only through its embedding, so the
    encoder learns from it. The loss is a sum over all masked tokens, hence its small weight.
    """

    weight: float = option(
        0.0, "weight of the reconstruction, a sum over masked tokens (InfoCSE: 0.00001)", low=0.0
    )
    mask_ratio: float = option(
        0.40, "share of tokens masked for the reconstruction", low=0.0, high=1.0
    )
    blocks: int = option(
        2,
        "trained blocks that reconstruct tokens; they start as the generator's last blocks",
        low=1,
    )
    layer: int = option(
        0,
        "block of the generator to read (InfoCSE: 6 of 12); 0: the one below those `blocks`",
        low=0,
    )
    condition: str = option(
        "pooled",
        "the embedding that the head reads: before or after the projector",
        choices=("pooled", "projected"),
    )

    papers = ("infocse",)
    needs = frozenset({"embeddings", "hidden_size", "mask_token", "generator"})

    def networks(self, checkpoints: PretrainedCheckpoints, run: RunInfo) -> dict[str, Network]:
        """Return the head, which starts as the upper part of the generator."""
        generator = checkpoints.generator
        assert generator is not None  # the loss needs "generator"
        assert generator.mlm_head is not None
        sizes = generator.config
        hidden_size = checkpoints.encoder.config.hidden_size
        if sizes.hidden_size != hidden_size:
            raise ConfigError(
                f"reconstruction: the encoder has embeddings of size {hidden_size}, but the "
                f"generator has hidden states of size {sizes.hidden_size}. Use a generator of that "
                "size, such as generator.name_or_path='start'."
            )
        for key, value in (("blocks", self.blocks), ("layer", self.layer)):
            if value > sizes.num_blocks:
                raise ConfigError(
                    f"reconstruction.{key}={value}, but the generator has {sizes.num_blocks} blocks"
                )
        params = reconstruction_start(generator.transformer, generator.mlm_head, sizes, self.blocks)
        return {
            "reconstruction_head": Network(partial(ReconstructionHead, sizes, self.blocks), params)
        }

    def prepare(self, frozen: Computation, batch: Batch, key: PRNGKeyArray, run: RunInfo) -> PyTree:
        """Return masked sentences, the generator's states of them, and its embeddings.

        The states are those of one of its blocks, without dropout.
        """
        generator = frozen.network("generator")
        vocabulary = frozen.networks.vocabulary
        masked = mask_tokens(
            key, batch.rows, vocabulary=vocabulary, ratio=self.mask_ratio, style="bert"
        )
        # XLA does not compute the blocks above this layer, because nothing uses them.
        layer = self.layer or len(generator.blocks) - self.blocks
        states = frozen.map_chunks(lambda rows: generator(rows)[layer], masked.rows)
        return masked, states, frozen.params["generator.embeddings.word.embedding"]

    def loss(
        self, forward: SharedForward, inputs: PyTree, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], Metrics]:
        masked, generator_states, word_embeddings = inputs
        computation = forward.computation
        original = forward.batch.rows.input_ids
        head = computation.network("reconstruction_head")
        pooled, projected = forward.embeddings
        embeddings = projected if self.condition == "projected" else pooled

        def token_losses(states: jax.Array, targets: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(
                head.vocabulary(states, word_embeddings), targets
            )

        def row_losses(
            masked: Masked, states: jax.Array, h: jax.Array, keys: jax.Array, ids: jax.Array
        ) -> jax.Array:
            outputs = head(masked.rows, states, h, keys=keys)
            return computation.gather_positions(
                token_losses, masked.selected, outputs, ids, shares=FEW
            )

        keys = row_keys(key, len(original))
        losses = computation.map_chunks(
            row_losses, masked, generator_states, embeddings, keys, original
        )
        return losses.sum(), {"reconstruction_per_token": mean_where(losses, masked.selected)}
