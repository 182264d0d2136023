"""Apply networks to a batch: in chunks, at a few positions, and once for all losses.

Results do not depend on chunks or devices, because random numbers of a row depend only on the key
of that row.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray, PyTree, Shaped

from diffcse_jax.batch import Batch, RowKeys, TokenRows, Vocabulary
from diffcse_jax.models.heads import (
    SENTENCE_HEAD,
    HeadLayer,
    MaskedLMHead,
    MlpProjector,
    SentenceHead,
)
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Build, Network, Params, bind, definition, prefixed, subset
from diffcse_jax.models.pooling import embed
from diffcse_jax.models.transformer import Transformer, TransformerConfig

# The capacities that `gather_positions` chooses from, as shares of all positions. All are compiled.
FEW = (1 / 8, 1 / 4, 3 / 8, 1)  # masked tokens
MOST = (3 / 4, 7 / 8, 1)  # all but padding
STARTING_CHECKPOINT = "start"  # as the name of a teacher or generator: the run's own start


@dataclasses.dataclass(frozen=True)
class Networks:
    """The graph definitions of a run's networks by name. They are static under `jax.jit`.

    Arrays live in flat dictionaries, and the name of each array begins with the name of its
    network.
    """

    vocabulary: Vocabulary
    definitions: Mapping[str, nnx.GraphDef]

    def __hash__(self) -> int:  # without the definitions, because a dictionary has no hash
        return hash((self.vocabulary, tuple(sorted(self.definitions))))

    def bind(self, name: str, params: Params) -> Any:
        """Return the network `name` with its entries of `params`."""
        return bind(self.definitions[name], subset(params, name))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Networks with their parameters, and how the rows of a batch are divided."""

    networks: Networks
    params: Params
    chunks: int = 1  # parts of the rows that are computed one after the other
    devices: int = 1  # along the data axis of the mesh, which compute their rows side by side

    def network(self, name: str) -> Any:
        """Return the network `name` with its parameters."""
        return self.networks.bind(name, self.params)

    def map_chunks(self, function: Callable[..., PyTree], *rows: PyTree) -> PyTree:
        """Compute `function(*rows)` in chunks, one after the other.

        The backward pass computes each chunk again. If `function` is an encoder, memory holds its
        output for the whole batch and the activations of one chunk, as in GradCache (Gao et al.
        2021).

        Args:
            function: Maps arrays with rows in front to such arrays. Rows must not depend on one
                another.
            rows: Arrays, or `TokenRows` with a layout of as many parts. The number of devices
                times that of chunks divides that of rows.
        """
        chunks, devices = self.chunks, self.devices
        if chunks == 1:
            return function(*rows)

        # Chunk c holds part c of the rows of each device. Views of an example are neighbours, so
        # they are in one chunk, and chunks have about as many tokens as one another.
        def split(values: jax.Array) -> jax.Array:
            parts = values.reshape(devices, chunks, -1, *values.shape[1:])
            return jnp.swapaxes(parts, 0, 1).reshape(chunks, -1, *values.shape[1:])

        def join(values: jax.Array) -> jax.Array:
            parts = values.reshape(chunks, devices, -1, *values.shape[2:])
            return jnp.swapaxes(parts, 0, 1).reshape(-1, *values.shape[2:])

        # No barrier against merging both passes is needed: XLA cannot merge those of a loop.
        part = jax.checkpoint(lambda rows: function(*rows), prevent_cse=False)
        return jax.tree.map(join, jax.lax.map(part, jax.tree.map(split, rows)))

    def gather_positions(
        self,
        function: Callable[..., PyTree],
        where: Bool[Array, "rows length"],
        *values: PyTree,
        shares: tuple[float, ...],
    ) -> PyTree:
        """Apply `function` to the values at the positions in `where`.

        Return (rows, length, ...), with zeros elsewhere. A head over the vocabulary then costs only
        what its used outputs cost. Each device gathers the positions of its own rows into the
        smallest of a few static capacities that holds them, which is chosen at run time.

        Args:
            function: Maps arrays (tokens, ...) to such arrays. Tokens must not depend on one
                another.
            where: The positions.
            values: Arrays (rows, length, ...).
            shares: The capacities as shares of all positions, rising to 1.
        """
        size = where.size // self.devices
        capacities = [math.ceil(size * share) for share in shares]

        def of_device(capacity: int, where: jax.Array, values: PyTree) -> PyTree:
            (positions,) = jnp.nonzero(where, size=capacity, fill_value=size)

            def gather(array: jax.Array) -> jax.Array:
                return array.at[positions].get(mode="clip")

            results = function(*jax.tree.map(gather, values))

            def spread(array: jax.Array) -> jax.Array:
                zeros = jnp.zeros((size, *array.shape[1:]), array.dtype)
                return zeros.at[positions].set(array, mode="drop")

            return jax.tree.map(spread, results)

        # Without checkpoints, the backward pass would keep the activations of all capacities.
        branches = [
            jax.checkpoint(jax.vmap(partial(of_device, capacity))) for capacity in capacities
        ]
        by_device = jax.tree.map(
            lambda array: array.reshape(self.devices, size, *array.shape[2:]), (where, values)
        )
        most = by_device[0].sum(axis=1).max()
        smallest = jnp.searchsorted(jnp.array(capacities), most)
        results = jax.lax.switch(smallest, branches, *by_device)
        return jax.tree.map(lambda array: array.reshape(*where.shape, *array.shape[2:]), results)


class SentenceEmbeddings(NamedTuple):
    """Sentence embeddings in float32."""

    # After the modules that the starting checkpoint has after its pooling.
    pooled: Float[Array, "rows hidden"]
    projected: Float[Array, "rows hidden"]  # after the projector, if there is one


@dataclasses.dataclass(frozen=True)
class SharedForward:
    """The forward pass of a batch, which losses share.

    Each result is computed once, when a loss first asks for it.
    """

    computation: Computation  # the trained networks
    batch: Batch
    key: PRNGKeyArray  # for dropout
    _: dataclasses.KW_ONLY
    pooler: str  # as `poolers.check_pooler` accepts
    # `independent` for each view, or `shared` by the views of an example.
    dropout_masks: str = "independent"
    keeps_projector: bool = False  # whether encoding will apply the projector as well
    size: int | None = None  # embeddings are cut to this size
    _results: dict[Any, Any] = dataclasses.field(default_factory=dict)  # of the whole pass, by name

    def prefix(self, size: int) -> "SharedForward":
        """Return the same pass with embeddings cut to their first `size` dimensions.

        Nothing is computed again.
        """
        return dataclasses.replace(self, size=size)

    @property
    def embeddings(self) -> SentenceEmbeddings:
        """The embeddings of all views, with dropout."""

        def compute(whole: SharedForward) -> SentenceEmbeddings:
            pooled = whole._pooled_views(whole._row_keys(fold_in_name(whole.key, "encoder")))
            return SentenceEmbeddings(pooled.astype(jnp.float32), whole._project(pooled))

        return self._shared("embeddings", compute)

    @property
    def projected_views(self) -> tuple[Float[Array, "batch hidden"], ...]:
        """The projected embeddings of the first views, of the second views, and so on."""
        return self._shared(
            "projected_views", lambda whole: whole.batch.by_view(whole.embeddings.projected)
        )

    @property
    def encoded_views(self) -> tuple[Float[Array, "batch hidden"], ...]:
        """The embeddings that encoding will give, view by view.

        They are projected only if the projector is kept.
        """
        if self.keeps_projector:
            return self.projected_views
        return self._shared(
            "encoded_views", lambda whole: whole.batch.by_view(whole.embeddings.pooled)
        )

    def projected_means(self, samples: int) -> tuple[Float[Array, "batch hidden"], ...]:
        """Return `projected_views` as means over `samples` passes with different dropout masks.

        The first pass is `embeddings`. Memory holds the activations of one pass, however many there
        are.
        """

        def compute(whole: SharedForward) -> tuple[jax.Array, ...]:
            total = whole.embeddings.projected
            if samples > 1:
                key = fold_in_name(whole.key, "samples")
                keys_of_sample = jax.vmap(
                    lambda sample: whole._row_keys(jax.random.fold_in(key, sample))
                )
                one_pass = jax.checkpoint(whole._pooled_views, prevent_cse=False)
                # One sample at a time, because a projector's BatchNorm has statistics of a batch.
                for pooled in jax.lax.map(one_pass, keys_of_sample(jnp.arange(1, samples))):
                    total += whole._project(pooled)
            return whole.batch.by_view(total / samples)

        return self._shared(("projected_means", samples), compute)

    def projected(
        self, rows: TokenRows, keys: RowKeys, *, name: str
    ) -> Float[Array, "rows hidden"]:
        """Return the projected embeddings of rows that need not be views of the batch.

        The projector's BatchNorm takes its statistics over these rows. Each name is computed once:
        a second call with it returns the first result, whatever its rows.
        """
        return self._shared(
            ("projected", name), lambda whole: whole._project(whole._pooled(rows, keys))
        )

    def _shared(self, name: Any, compute: Callable[["SharedForward"], Any]) -> Any:
        """Return the result of this name, computed from whole embeddings and then cut."""
        if name not in self._results:
            self._results[name] = compute(dataclasses.replace(self, size=None))
        if self.size is None:
            return self._results[name]
        return jax.tree.map(lambda array: array[..., : self.size], self._results[name])

    def _project(self, pooled: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """Return float32 embeddings after the projector, if there is one."""
        if "projector" in self.computation.networks.definitions:
            pooled = self.computation.network("projector")(pooled)
        return pooled.astype(jnp.float32)

    def _row_keys(self, key: PRNGKeyArray) -> Key[Array, " rows"]:
        """Return a dropout key for each row of all views."""
        examples = len(self.batch.input_ids)
        views = self.batch.num_views
        if self.dropout_masks == "shared":
            return row_keys(key, examples)[jnp.arange(examples * views) // views]
        return row_keys(key, examples * views)

    def _pooled_views(self, keys: Key[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """Return the pooled embeddings of all views.

        If there is a second encoder, it embeds all but the anchors.
        """
        batch = self.batch
        if "second_encoder" not in self.computation.networks.definitions:
            return self._pooled(batch.rows, keys)
        keys = keys.reshape(-1, batch.num_views)
        others = Batch(batch.input_ids[:, 1:], batch.attention_mask[:, 1:]).rows
        first = self._pooled(batch.anchors, keys[:, 0])
        second = self._pooled(others, keys[:, 1:].reshape(-1), encoder="second_encoder")
        second = second.reshape(len(first), -1, first.shape[-1])
        return jnp.concatenate([first[:, None], second], axis=1).reshape(-1, first.shape[-1])

    def _pooled(
        self, rows: TokenRows, keys: RowKeys, encoder: str = "encoder"
    ) -> Float[Array, "rows hidden"]:
        network = self.computation.network(encoder)
        pooled = self.computation.map_chunks(
            lambda rows, keys: embed(network, rows, self.pooler, keys), rows, keys
        )
        has_head = SENTENCE_HEAD in self.computation.networks.definitions
        return self.computation.network(SENTENCE_HEAD)(pooled) if has_head else pooled


def fold_in_name(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """Return the key of one purpose. It does not depend on what else the key is used for."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def row_keys(key: PRNGKeyArray, rows: int) -> Key[Array, " rows"]:
    """Return one key per row, a function of `key` and the row's number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def mean_where(values: Shaped[Array, "*shape"], where: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Return the mean over the positions in `where`, or 0 if there are none."""
    weights = where.astype(jnp.float32)
    return jnp.sum(values.astype(jnp.float32) * weights) / jnp.maximum(weights.sum(), 1.0)


class SentenceNetwork(nnx.Module):
    """The network of sentence encoders and teachers: a transformer, a pooler and its head.

    The pooler `cls` has a dense + tanh head, others the modules after the pooling. There is no
    dropout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pooler: str,
        truncate_dim: int | None = None,
        layers: tuple[HeadLayer, ...] = (),
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.transformer = Transformer(config, dtype=dtype, rngs=rngs)
        head = SentenceHead(layers, dtype=dtype, rngs=rngs) if layers else None
        self.pooler_head = MlpProjector(config, dtype=dtype, rngs=rngs) if pooler == "cls" else head
        self.pooler = pooler
        self.truncate_dim = truncate_dim

    def __call__(self, rows: TokenRows) -> Float[Array, "rows dimension"]:
        """Return float32 embeddings."""
        embeddings = embed(self.transformer, rows, self.pooler)
        if self.pooler_head is not None:
            embeddings = self.pooler_head(embeddings)
        return embeddings[:, : self.truncate_dim].astype(jnp.float32)


@lru_cache
def compiled_forward(
    config: TransformerConfig,
    pooler: str,
    dtype: np.dtype,
    mesh: jax.sharding.Mesh,
    layers: tuple[HeadLayer, ...] = (),
) -> Callable[..., jax.Array]:
    """Return `(params, input_ids, attention_mask) -> embeddings`, shared by equal sizes."""
    config = config.on(mesh.devices.flat[0])
    network = definition(partial(SentenceNetwork, config, pooler, layers=layers, dtype=dtype))

    def forward(params: Params, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        # The default of accelerators is below float32.
        with jax.default_matmul_precision("highest"):
            return bind(network, params)(TokenRows(input_ids, attention_mask))

    # Replicated, so that every host can read the whole result.
    return jax.jit(forward, out_shardings=NamedSharding(mesh, PartitionSpec()))


@lru_cache
def compiled_masked_lm(
    config: TransformerConfig, vocabulary: Vocabulary, dtype: np.dtype, mesh: jax.sharding.Mesh
) -> Callable[..., jax.Array]:
    """Return `(params, input_ids, attention_mask) -> token ids`.

    These are the likeliest tokens at each [MASK], and 0 elsewhere. The parameters are those of the
    networks `transformer` and `mlm_head`.
    """
    config = config.on(mesh.devices.flat[0])
    builds: dict[str, Build] = {
        "transformer": partial(Transformer, config),
        "mlm_head": partial(MaskedLMHead, config),
    }
    networks = Networks(
        vocabulary,
        {name: definition(partial(build, dtype=dtype)) for name, build in builds.items()},
    )

    def forward(params: Params, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            computation = Computation(networks, params, devices=mesh.size)
            head = computation.network("mlm_head")
            words = params["transformer.embeddings.word.embedding"]
            states = computation.network("transformer")(TokenRows(input_ids, attention_mask))[-1]

            def likeliest(states: jax.Array) -> jax.Array:
                return jnp.argmax(head(states, words), axis=-1)

            masked = jnp.isin(input_ids, jnp.array(vocabulary.mask_id, input_ids.dtype))
            return computation.gather_positions(likeliest, masked, states, shares=FEW)

    return jax.jit(forward, out_shardings=NamedSharding(mesh, PartitionSpec()))


def start_as_teacher(encoder: Pretrained, pooler: str) -> Network:
    """Return the starting checkpoint as a teacher, pooled as the run pools before its projector."""
    pooler = "cls_before_pooler" if pooler == "cls" else pooler
    head = encoder.sentence_head.of(pooler)
    params = prefixed(encoder.transformer, "transformer") | prefixed(head.params, "pooler_head")
    return Network(
        partial(SentenceNetwork, encoder.config, pooler, layers=head.layers), params, frozen=True
    )
