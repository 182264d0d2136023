"""Networks over the rows of a batch: in chunks where memory is short, at few positions where a head is large.

None of it changes a result. What is random for a row is a function of a key of its own, so that a row is the same
whatever it is computed together with.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray, PyTree, Shaped

from diffcse_jax.batch import Batch, TokenRows, Vocabulary
from diffcse_jax.groups import RunConfig
from diffcse_jax.models import parameters
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import pool, positions_read

# The capacities that `at_positions` chooses from, as shares of all positions; each is compiled.
FEW = (1 / 8, 1 / 4, 3 / 8, 1)  # masked tokens
MOST = (3 / 4, 7 / 8, 1)  # all but padding


@dataclasses.dataclass(frozen=True)
class Networks:
    """The graph definitions of a run's networks by name; static under `jax.jit`.

    Arrays live in flat dicts whose names begin with those of the networks: trained ones in `params`, frozen ones apart.
    """

    vocabulary: Vocabulary
    definitions: Mapping[str, nnx.GraphDef]

    def __hash__(self) -> int:
        return hash((self.vocabulary, tuple(sorted(self.definitions))))

    def bind(self, name: str, params: Params) -> Any:
        """Return the network `name` with its entries of `params`."""
        return parameters.bind(self.definitions[name], parameters.subset(params, name))


class Vectors(NamedTuple):
    """Sentence vectors, float32."""

    pooled: Float[Array, "rows hidden"]
    projected: Float[Array, "rows hidden"]  # after the projector, where there is one


@dataclasses.dataclass(frozen=True)
class Computation:
    """Networks with their parameters, and in how many parts they take the rows of a batch.

    Attributes:
        networks: their definitions.
        params: their parameters.
        chunks: parts one after the other.
        devices: parts side by side: the devices along the mesh's data axis.
    """

    networks: Networks
    params: Params
    chunks: int = 1
    devices: int = 1

    def network(self, name: str) -> Any:
        """The network `name` over its parameters."""
        return self.networks.bind(name, self.params)

    def in_chunks(self, function: Callable[..., PyTree], *rows: PyTree) -> PyTree:
        """`in_chunks` in this computation's chunks."""
        return in_chunks(function, self.chunks, *rows)

    def at_positions(
        self,
        function: Callable[..., PyTree],
        where: Bool[Array, "rows length"],
        *values: PyTree,
        shares: tuple[float, ...],
    ) -> PyTree:
        """`at_positions`, each device for its own rows."""
        return at_positions(function, where, *values, shares=shares, blocks=self.devices)


class Forward:
    """The forward pass of a batch. What several objectives share is computed once, when it is first asked for.

    Args:
        config: the run.
        computation: the trained networks.
        views: the batch.
        key: dropout key.
    """

    def __init__(self, config: RunConfig, computation: Computation, views: Batch, key: PRNGKeyArray):
        self.computation = computation
        self.views = views
        self._config = config
        self._key = key

    @cached_property
    def vectors(self) -> Vectors:
        """The vectors of all views, with dropout."""
        pooled = self._pooled_views(self._row_keys(named_key(self._key, "encoder")))
        return _float32(Vectors(pooled, self._projector(pooled)))

    @cached_property
    def projected_views(self) -> tuple[Float[Array, "batch hidden"], ...]:
        """The projected vectors of the first views, of the second ones, and so on."""
        return self.views.by_view(self.vectors.projected)

    def projected_means(self, samples: int) -> tuple[Float[Array, "batch hidden"], ...]:
        """`projected_views` as means over so many passes, each with dropout masks of its own; `vectors` are the first.

        However many there are, the activations of one are held.
        """
        total = self.vectors.projected
        if samples > 1:
            key = named_key(self._key, "samples")
            keys = jax.vmap(lambda number: self._row_keys(jax.random.fold_in(key, number)))(jnp.arange(1, samples))
            one_pass = jax.checkpoint(self._pooled_views, prevent_cse=False)
            # Sample by sample: a BatchNorm in the projector takes its statistics over a batch.
            for pooled in jax.lax.map(one_pass, keys):
                total += _float32(self._projector(pooled))
        return self.views.by_view(total / samples)

    @cached_property
    def encoded_views(self) -> tuple[Float[Array, "batch hidden"], ...]:
        """The same of the vectors that encoding gives: projected ones only where the projector is kept."""
        return self.projected_views if self._config.keeps_projector else self.views.by_view(self.vectors.pooled)

    @cached_property
    def off_dropout(self) -> Float[Array, "batch hidden"]:
        """The projected vectors of the anchors in a pass without dropout (SimCSE++ Eq. 3)."""
        return self.projected(self.views.anchors, None)

    @cached_property
    def anchors_again(self) -> Float[Array, "batch hidden"]:
        """The projected vectors of the anchors in a further pass, with dropout masks of its own."""
        keys = row_keys(named_key(self._key, "anchors again"), len(self.views.input_ids))
        return self.projected(self.views.anchors, keys)

    def projected(self, rows: TokenRows, keys: Key[Array, " rows"] | None) -> Float[Array, "rows hidden"]:
        """The projected vectors of other rows than the views: the projector takes them for a batch of their own.

        Args:
            rows: sentences.
            keys: one dropout key per row; None: no dropout.
        """
        return _float32(self._projector(self._pooled(rows, keys)))

    def prefix(self, size: int) -> "Forward":
        """The same pass, whose vectors are cut to their first `size` numbers."""
        return _Prefix(self, size)

    @property
    def embedded(self) -> bool:
        """True once an objective has asked for sentence vectors."""
        return "vectors" in self.__dict__

    @cached_property
    def _projector(self) -> Callable[[jax.Array], jax.Array]:
        computation = self.computation
        if "projector" not in computation.networks.definitions:
            return lambda pooled: pooled
        return computation.network("projector")

    def _row_keys(self, key: PRNGKeyArray) -> Key[Array, " rows"]:
        """A dropout key for each row of all views."""
        examples, views = len(self.views.input_ids), self.views.per_example
        if self._config.model.dropout_masks == "shared":
            return row_keys(key, examples)[jnp.arange(examples * views) // views]
        return row_keys(key, examples * views)

    def _pooled_views(self, keys: Key[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """The pooled vectors of all views; all but the anchors by a second encoder, where there is one."""
        views = self.views
        if "second_encoder" not in self.computation.networks.definitions:
            return self._pooled(views.rows, keys)
        keys = keys.reshape(-1, views.per_example)
        others = Batch(views.input_ids[:, 1:], views.attention_mask[:, 1:]).rows
        first = self._pooled(views.anchors, keys[:, 0])
        second = self._pooled(others, keys[:, 1:].reshape(-1), encoder="second_encoder")
        second = second.reshape(len(first), -1, first.shape[-1])
        return jnp.concatenate([first[:, None], second], axis=1).reshape(-1, first.shape[-1])

    def _pooled(
        self, rows: TokenRows, keys: Key[Array, " rows"] | None, encoder: str = "encoder"
    ) -> Float[Array, "rows hidden"]:
        network, pooler = self.computation.network(encoder), self._config.model.pooler

        def pooled(rows: TokenRows, keys: jax.Array | None) -> jax.Array:
            states = network(rows, keys=keys, last_positions=positions_read(pooler))["hidden_states"]
            return pool(states, rows.attention_mask, pooler)

        return self.computation.in_chunks(pooled, rows, keys)


class _Prefix(Forward):
    """A forward pass of whose vectors only the first numbers are seen."""

    def __init__(self, whole: Forward, size: int):
        super().__init__(whole._config, whole.computation, whole.views, whole._key)
        self._whole, self._size = whole, size

    @cached_property
    def vectors(self) -> Vectors:
        return self._cut(self._whole.vectors)

    @cached_property
    def off_dropout(self) -> Float[Array, "batch size"]:
        return self._cut(self._whole.off_dropout)

    @cached_property
    def anchors_again(self) -> Float[Array, "batch size"]:
        return self._cut(self._whole.anchors_again)

    def projected(self, rows: TokenRows, keys: Key[Array, " rows"] | None) -> Float[Array, "rows size"]:
        return self._cut(self._whole.projected(rows, keys))

    def projected_means(self, samples: int) -> tuple[Float[Array, "batch size"], ...]:
        return self._cut(self._whole.projected_means(samples))

    def _cut(self, arrays: PyTree) -> Any:
        return jax.tree.map(lambda array: array[..., : self._size], arrays)


def named_key(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """The key of one purpose, which does not depend on what else there is."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def row_keys(key: PRNGKeyArray, rows: int) -> Key[Array, " rows"]:
    """One key per row, a function of `key` and the row's number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def in_chunks(function: Callable[..., PyTree], chunks: int, *rows: PyTree) -> PyTree:
    """`function(*rows)`, computed in `chunks` parts one after the other; the backward pass computes each part again.

    With `function` an encoder, only its output is held for the whole batch, and the activations of one chunk: the
    memory of GradCache (Gao et al. 2021) by rematerialisation.

    Args:
        function: of arrays with rows in front, to such arrays, each row for itself.
        chunks: divides the number of rows.
        rows: arrays, `data.rows.TokenRows` among them, whose layout is that of `chunks` parts.
    """
    if chunks == 1:
        return function(*rows)

    # Chunk c is the rows c, c + chunks, ...: of a batch split over devices, each device has its share in every chunk.
    def split(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values.reshape(-1, chunks, *values.shape[1:]), 1, 0)

    def join(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values, 0, 1).reshape(-1, *values.shape[2:])

    # Inside a loop nothing can be merged with the forward pass, so that no barrier against it is needed.
    part = jax.checkpoint(lambda rows: function(*rows), prevent_cse=False)
    return jax.tree.map(join, jax.lax.map(part, jax.tree.map(split, rows)))


def at_positions(
    function: Callable[..., PyTree],
    where: Bool[Array, "rows length"],
    *values: PyTree,
    shares: tuple[float, ...],
    blocks: int = 1,
) -> PyTree:
    """`function` of the values at the positions in `where`, and zeros elsewhere.

    The positions are gathered into the smallest of a few static capacities that holds them, which is found at run
    time: a vocabulary-sized head costs what its output is used for, and no batch is cut.

    Args:
        function: of arrays (tokens, ...), to such arrays, each token for itself.
        where: the positions.
        values: arrays (rows, length, ...).
        shares: the capacities as shares of all positions, rising to 1.
        blocks: parts of the rows that are gathered each for itself, one per device.

    Returns:
        What `function` returns, as arrays (rows, length, ...).
    """
    size = where.size // blocks
    capacities = [math.ceil(size * share) for share in shares]

    def in_block(capacity: int, where: jax.Array, values: PyTree) -> PyTree:
        (positions,) = jnp.nonzero(where, size=capacity, fill_value=size)
        results = function(*jax.tree.map(lambda array: array.at[positions].get(mode="clip"), values))

        def spread(array: jax.Array) -> jax.Array:
            return jnp.zeros((size, *array.shape[1:]), array.dtype).at[positions].set(array, mode="drop")

        return jax.tree.map(spread, results)

    # Checkpoints: otherwise the activations of all capacities, used or not, would be kept for the backward pass.
    branches = [jax.checkpoint(jax.vmap(partial(in_block, capacity))) for capacity in capacities]
    blockwise = jax.tree.map(lambda array: array.reshape(blocks, size, *array.shape[2:]), (where, values))
    most = blockwise[0].sum(axis=1).max()
    results = jax.lax.switch(jnp.searchsorted(jnp.array(capacities), most), branches, *blockwise)
    return jax.tree.map(lambda array: array.reshape(*where.shape, *array.shape[2:]), results)


def mean_where(values: Shaped[Array, "*shape"], where: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Mean over the positions in `where`; 0 where there are none."""
    weights = where.astype(jnp.float32)
    return jnp.sum(values.astype(jnp.float32) * weights) / jnp.maximum(weights.sum(), 1.0)


def _float32(arrays: PyTree) -> PyTree:
    return jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
