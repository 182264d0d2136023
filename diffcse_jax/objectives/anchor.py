"""An anchor to the checkpoint that training starts from: its neighbourhoods within a batch are to be kept."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from diffcse_jax.batch import Batch
from diffcse_jax.groups import START
from diffcse_jax.models.forward import Computation, SharedForward
from diffcse_jax.models.pooling import similarity_lists
from diffcse_jax.models.teachers import start_as_teacher, teacher_lists
from diffcse_jax.objectives import Metrics, Network, Objective, Starts
from diffcse_jax.options import option


@dataclasses.dataclass(frozen=True)
class Options:
    weight: float = option(0.0, "weight of the divergence from the neighbourhoods of the start", low=0.0)
    temperature: float = option(0.05, "temperature of the similarities that make a neighbourhood", low=1e-6)


class Anchor(Objective):
    """The vectors that encoding gives keep near what the frozen start, without dropout, has near."""

    options: Options
    prefixes = True

    def networks(self, starts: Starts) -> dict[str, Network]:
        """The start, frozen."""
        start = start_as_teacher(starts.encoder, self.config.model.pooler)
        return {START: Network(start.build, start.params, frozen=True)}

    def corrupt(self, frozen: Computation, views: Batch, key: PRNGKeyArray) -> Float[Array, "batch candidates"]:
        """The similarity lists of the start."""
        del key
        return teacher_lists(frozen, START, views)

    def loss(self, forward: SharedForward, corrupted: PyTree, key: PRNGKeyArray) -> tuple[Float[Array, ""], Metrics]:
        del key
        scores, temperature = similarity_lists(forward.encoded_views), self.options.temperature
        return divergence(corrupted / temperature, scores / temperature).mean(), {}


def divergence(start: Float[Array, "rows candidates"], now: Float[Array, "rows candidates"]) -> Float[Array, " rows"]:
    """KL(K | Q) of the neighbourhoods K = softmax(start) and Q = softmax(now), a distribution per row."""
    log_k, log_q = jax.nn.log_softmax(start, axis=1), jax.nn.log_softmax(now, axis=1)
    return (jnp.exp(log_k) * (log_k - log_q)).sum(axis=1)


objective = Anchor
