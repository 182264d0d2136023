"""Frozen sentence encoders whose vectors teach: as networks of a run, and their similarities within a batch."""

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
from diffcse_jax.models.parameters import Build, Params
from diffcse_jax.models.pooling import pool, positions_read, similarity_lists
from diffcse_jax.models.pretrained import Pretrained
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
        """Makes its network."""
        return partial(TeacherNetwork, self.config, self.pooler, self.truncate_dim)


class TeacherNetwork(nnx.Module):
    """Sentences to vectors, without dropout.

    Args:
        config: sizes.
        pooler: one of `diffcse_jax.groups.POOLERS`; `cls` brings its dense + tanh head.
        truncate_dim: the length that vectors are cut to; None: whole vectors.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pooler: str,
        truncate_dim: int | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.transformer = Transformer(config, dtype=dtype, rngs=rngs)
        self.pooler_head = MlpProjector(config, dtype=dtype, rngs=rngs) if pooler == "cls" else None
        self.pooler = pooler
        self.truncate_dim = truncate_dim

    def __call__(self, rows: TokenRows) -> Float[Array, "rows dimension"]:
        """Float32 vectors."""
        states: Any = self.transformer(rows, last_positions=positions_read(self.pooler))["hidden_states"]
        pooled = pool(states, rows.attention_mask, self.pooler)
        vectors = pooled if self.pooler_head is None else self.pooler_head(pooled)
        return vectors[:, : self.truncate_dim].astype(jnp.float32)


def start_as_teacher(encoder: Pretrained, pooler: str) -> Teacher:
    """The checkpoint that the encoder starts from, pooled as the run pools before its projector."""
    pooler = "cls_before_pooler" if pooler == "cls" else pooler
    return Teacher(encoder.config, pooler, parameters.prefixed(encoder.transformer, "transformer"))


def teacher_lists(frozen: Computation, name: str, views: Batch) -> Float[Array, "batch candidates"]:
    """The similarity lists of a batch (`vectors.similarity_lists`) as the teacher of this name sees them."""
    return similarity_lists(views.by_view(frozen.map_chunks(frozen.network(name), views.rows)))
