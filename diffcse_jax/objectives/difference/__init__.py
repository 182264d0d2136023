"""Conditional difference objectives: how a sentence differs from its edit, given a sentence's vector (DiffCSE).

What is predicted of the difference is a module of this package, found by its name in `difference.objective`.
"""

import abc
import dataclasses
import importlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch, TokenRows
from diffcse_jax.edits.options import EditOptions
from diffcse_jax.errors import ConfigError
from diffcse_jax.groups import RunConfig
from diffcse_jax.models.forward import Computation, SharedForward, fold_in_name, row_keys
from diffcse_jax.models.transformer import Transformer
from diffcse_jax.objectives import Metrics, Network, Objective, Starts, names_in
from diffcse_jax.options import option

KINDS = names_in(__path__)


@dataclasses.dataclass(frozen=True)
class Options(EditOptions):
    objective: str = option(
        "rtd",
        "prediction about an edited sentence given the sentence vector, by a module in `objectives/difference/`: "
        "`rtd`, which tokens were replaced (DiffCSE Section 3); `conditional_mlm`, the masked tokens; `corrective_lm`, "
        "the original of every token (both DiffCSE Table 3); or `none`",
        choices=(*KINDS, "none"),
    )
    weight: float = option(0.005, "lambda of DiffCSE", low=0.0)
    sentence: str = option(
        "same",
        "sentence that is edited: the `same` as the vector's, the `next` one of the document, or `both` (DiffCSE Table "
        "3); the next one needs data.documents",
        choices=("same", "next", "both"),
    )
    loss_positions: str = option(
        "all",
        "mean of the RTD loss over `all` positions, padding included (code), or `real` tokens",
        choices=("all", "real"),
    )
    condition: str = option(
        "projected",
        "sentence vector the discriminator sees: after the projector (`projected`) or before (`pooled`)",
        choices=("projected", "pooled"),
    )
    copy_weight: float = option(
        1.0, "weight of the copy loss beside the language model's (lambda_copy of COCO-LM); `corrective_lm`", low=0.0
    )


class Difference(Objective):
    """A prediction about an edited sentence by a discriminator, which reads it with a sentence vector at position 0.

    A module of this package says how sentences are edited and what is predicted of them; which sentences these are,
    and what the discriminator reads, is the same for all.
    """

    options: Options

    @property
    def papers(self) -> tuple[str, ...]:
        return ("diffcse",)

    @property
    def needs(self) -> frozenset[str]:
        next_sentence = set() if self.options.sentence == "same" else {"next_sentence"}
        return frozenset({"vectors"} | next_sentence) | self.options.edit_needs

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The discriminator, which starts as a copy of the encoder."""
        return {"discriminator": Network(partial(Transformer, starts.encoder.config), starts.encoder.transformer)}

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> PyTree:
        """The edit of the same sentences or of the next ones; of both, a dict of the two."""
        if self.options.sentence == "same":
            return self.edited(frozen, views.rows, key)
        assert views.next is not None  # among its `needs`
        if self.options.sentence == "next":
            return self.edited(frozen, views.next.rows, key)
        both = {"same": views, "next": views.next}
        return {name: self.edited(frozen, each.rows, fold_in_name(key, name)) for name, each in both.items()}

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        """The prediction's loss; of both sentences, the mean of the two."""
        if self.options.sentence != "both":
            return self.predict(forward, corrupted, key)
        results = [self.predict(forward, edited, fold_in_name(key, name)) for name, edited in corrupted.items()]
        return jax.tree.map(lambda *values: jnp.stack(values).mean(), *results)

    @abc.abstractmethod
    def edited(self, frozen: Computation, rows: TokenRows, key: PRNGKeyArray) -> PyTree:
        """The edited sentences and what `predict` reads beside them.

        Args:
            frozen: the frozen networks.
            rows: sentences, one for each sentence vector.
            key: for these rows alone.
        """

    @abc.abstractmethod
    def predict(self, forward: SharedForward, edited: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        """The loss of a prediction about edited sentences, and named metrics.

        Args:
            forward: the sentence vectors; the trained networks.
            edited: what `edited` returned.
            key: dropout key, for these rows alone.
        """

    def discriminate(
        self, forward: SharedForward, rows: TokenRows, key: PRNGKeyArray, head: Callable[..., PyTree], *values: PyTree
    ) -> PyTree:
        """`head` of the discriminator's hidden states and of `values`, arrays with rows in front, each row for itself.

        The discriminator learns about a sentence from its vector alone, and so the encoder from the discriminator.
        """
        computation, vectors = forward.computation, forward.embeddings
        discriminator = computation.network("discriminator")
        condition = vectors.projected if self.options.condition == "projected" else vectors.pooled

        def of_rows(rows: TokenRows, keys: jax.Array, condition: jax.Array, *values: PyTree) -> PyTree:
            return head(discriminator(rows, condition=condition, keys=keys)["last_hidden_state"], *values)

        return computation.map_chunks(of_rows, rows, row_keys(key, len(rows.input_ids)), condition, *values)

    def only_replaces(self) -> None:
        """Refuses the edits under which a token has no original.

        Raises:
            ConfigError: naming both keys.
        """
        if self.options.edit != "replace":
            raise ConfigError(
                f"difference.edit={self.options.edit!r} needs difference.objective='rtd': "
                f"{self.options.objective!r} recovers the original of every token, and an inserted or dropped one has "
                "none"
            )


def objective(options: Options, config: RunConfig) -> Objective | None:
    """The objective that `difference.objective` names."""
    if options.objective == "none":
        return None
    return importlib.import_module(f"{__name__}.{options.objective}").objective(options, config)
