"""Auxiliary reconstruction of masked sentences from the sentence vector (InfoCSE, Wu et al. 2022)."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows
from diffcse_jax.edits import Masked, mask_tokens
from diffcse_jax.errors import ConfigError
from diffcse_jax.models.forward import FEW, Computation, SharedForward, mean_where, row_keys
from diffcse_jax.models.heads import ReconstructionHead, reconstruction_start
from diffcse_jax.objectives import Metrics, Network, Objective, Starts
from diffcse_jax.objectives.mlm import masked_language_model
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(
        0.0, "weight of the reconstruction, whose loss is a sum over all masked tokens (InfoCSE: 0.00001)", low=0.0
    )
    mask_ratio: float = option(0.40, "share of tokens masked for it", low=0.0, high=1.0)
    blocks: int = option(2, "trained blocks that reconstruct; they start as the generator's last ones", low=1)
    layer: int = option(
        0,
        "block of the frozen generator whose output they read (InfoCSE: 6 of 12); 0: the one below the last `blocks`",
        low=0,
    )
    condition: str = option(
        "pooled",
        "sentence vector that they read at position 0: before the projector (`pooled`) or after it (`projected`)",
        choices=("pooled", "projected"),
    )


class Given(NamedTuple):
    """The masked sentences and their frozen states, from which, with the sentence vectors, tokens are recovered."""

    masked: Masked
    states: Float[Array, "rows length hidden"]  # of the frozen generator
    word_embeddings: Float[Array, "vocab hidden"]  # of the same


class Reconstruction(Objective):
    """A small head recovers masked tokens from the generator's states and the sentence vector, which thereby learns."""

    options: Options

    @property
    def papers(self) -> tuple[str, ...]:
        return ("infocse",)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"vectors", "mask_token", "generator"})

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The head; it starts as the upper part of the generator.

        Raises:
            ConfigError: a generator that has too few blocks, or whose states have another size than the vectors.
        """
        generator, count = starts.generator, self.options.blocks
        assert generator is not None  # among its `needs`
        assert generator.mlm_head is not None
        sizes = generator.config
        if sizes.hidden_size != starts.encoder.config.hidden_size:
            raise ConfigError(
                f"reconstruction puts sentence vectors of size {starts.encoder.config.hidden_size} among states of the "
                f"generator of size {sizes.hidden_size}; it needs a generator of the encoder's size, such as "
                "generator.name_or_path='start'"
            )
        for key, value in (("blocks", count), ("layer", self.options.layer)):
            if value > sizes.num_blocks:
                raise ConfigError(f"reconstruction.{key}={value}, but the generator has {sizes.num_blocks} blocks")
        start = reconstruction_start(generator.transformer, generator.mlm_head, sizes, count)
        return {"reconstruction_head": Network(partial(ReconstructionHead, sizes, count), start)}

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Given:
        """Masked sentences and the generator's states of them, without dropout."""
        vocabulary, generator = frozen.networks.vocabulary, frozen.network("generator")
        masked = mask_tokens(key, views.rows, vocabulary=vocabulary, ratio=self.options.mask_ratio, style="bert")
        # The blocks above the layer that is read are not computed: XLA leaves out what has no use.
        layer = self.options.layer or len(generator.blocks) - self.options.blocks
        states = frozen.map_chunks(lambda rows: generator(rows)["hidden_states"][layer], masked.rows)
        return Given(masked, states, frozen.params["generator.embeddings.word.embedding"])

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        given: Given = corrupted
        computation, masked = forward.computation, given.masked
        head = computation.network("reconstruction_head")
        vectors = forward.embeddings.projected if self.options.condition == "projected" else forward.embeddings.pooled

        def token_losses(states: jax.Array, targets: jax.Array) -> jax.Array:
            return masked_language_model(head.vocabulary(states, given.word_embeddings), targets)

        def losses_of(
            rows: TokenRows,
            states: jax.Array,
            condition: jax.Array,
            keys: jax.Array,
            targets: jax.Array,
            selected: jax.Array,
        ) -> jax.Array:
            outputs = head(rows, states, condition, keys=keys)
            return computation.gather_positions(token_losses, selected, outputs, targets, shares=FEW)

        original = forward.batch.rows.input_ids
        keys = row_keys(key, len(original))
        losses = computation.map_chunks(losses_of, masked.rows, given.states, vectors, keys, original, masked.selected)
        return losses.sum(), {"reconstruction_per_token": mean_where(losses, masked.selected)}


objective = Reconstruction
