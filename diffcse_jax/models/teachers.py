"""Frozen sentence encoders whose embeddings teach: as networks of a run, and their similarities within a batch."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffcse_jax.batch import Batch, TokenRows
from diffcse_jax.models import parameters
from diffcse_jax.models.forward import Computation
from diffcse_jax.models.heads import MlpProjector
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.parameters import Build, Params
from diffcse_jax.models.pooling import pool, positions_read, similarity_lists
from diffcse_jax.models.transformer import Transformer, TransformerConfig

START = "start"  # as a teacher's name: the starting checkpoint of the run's encoder


class Teacher(NamedTuple):
    """A sentence encoder in memory."""

    config: TransformerConfig
    pooler: str
    params: Params  # of `TeacherNetwork`
    truncate_dim: int | None = None

    @property
    def build(self) -> Build:
        """The function that makes the network."""
        return partial(TeacherNetwork, self.config, self.pooler, self.truncate_dim)


class TeacherNetwork(nnx.Module):
    """Sentences to embeddings, without dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        pooler: str,
        truncate_dim: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make the network.

        Args:
            config: Sizes.
            pooler: One of `pooling.POOLERS`. `cls` adds a dense + tanh head.
            truncate_dim: The dimension that embeddings are cut to. None: whole embeddings.
            dtype: Computation type.
            rngs: For the initial weights.
        """
        self.transformer = Transformer(config, dtype=dtype, rngs=rngs)
        self.pooler_head = MlpProjector(config, dtype=dtype, rngs=rngs) if pooler == "cls" else None
        self.pooler = pooler
        self.truncate_dim = truncate_dim

    def __call__(self, rows: TokenRows) -> Float[Array, "rows dimension"]:
        """Return float32 embeddings."""
        states: Any = self.transformer(rows, last_positions=positions_read(self.pooler))["hidden_states"]
        pooled = pool(states, rows.attention_mask, self.pooler)
        embeddings = pooled if self.pooler_head is None else self.pooler_head(pooled)
        return embeddings[:, : self.truncate_dim].astype(jnp.float32)


def start_as_teacher(encoder: Pretrained, pooler: str) -> Teacher:
    """Return the starting checkpoint as a teacher, pooled as the run pools before its projector."""
    pooler = "cls_before_pooler" if pooler == "cls" else pooler
    return Teacher(encoder.config, pooler, parameters.prefixed(encoder.transformer, "transformer"))


def teacher_lists(frozen: Computation, name: str, batch: Batch) -> Float[Array, "batch candidates"]:
    """Return `pooling.similarity_lists` of a batch by the embeddings of the teacher of this name."""
    return similarity_lists(batch.by_view(frozen.map_chunks(frozen.network(name), batch.rows)))
