"""Sentences to vectors with a trained encoder."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import tqdm
import transformers
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float32, Int32

from diffcse_jax.batch import TokenRows
from diffcse_jax.data.entries import read_entries, table_of
from diffcse_jax.data.tokenizer import load_tokenizer, tokenise, unlimited_tokenizer
from diffcse_jax.data.vector_folder import TEXT
from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.groups import POOLERS
from diffcse_jax.io import expand_path, find_run
from diffcse_jax.models import parameters, pooling_modules, pretrained
from diffcse_jax.models.heads import MlpProjector
from diffcse_jax.models.parameters import Params
from diffcse_jax.models.pooling import pool, positions_read
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.run_folder.saved_encoder import SavedEncoder, read_encoder
from diffcse_jax.search.index import ArrayStore, SentenceIndex, find_index, with_long_texts
from diffcse_jax.search.nearest import normalized
from diffcse_jax.storage.encoder_record import EncoderRecord

SHORTEST_BUCKET = 16
CPU_TOKENS_PER_BATCH = 2048  # more leave the processor's caches: a token then takes a fifth longer

Sentences = str | Iterable[str]

# Programs for several devices wait for one another on all of them: two that threads start at once may never end.
_all_devices = threading.RLock()


class SentenceEncoder:
    """A transformer (the network of blocks) with a pooler (how its hidden states become a vector) and a tokenizer.

    One sentence or many: where a method takes a string it returns one result, where it takes a list a row per entry.
    Several threads may use one encoder; on several devices they take turns.

    Args:
        config: sizes of the transformer.
        transformer: parameters of the transformer. Batches are spread over the device mesh that they live on; other
            arrays are copied to all devices of this host.
        tokenizer: a fast tokenizer; its settings for truncation and padding are neither used nor changed.
        pooler: one of `diffcse_jax.groups.POOLERS`.
        pooler_head: parameters of the dense + tanh head that the pooler `cls` needs.
        dtype: computation type of the transformer; vectors are float32 always.
        truncate_dim: cut vectors to their first so many numbers; None: whole vectors.
        name: the model's, for records and errors.

    Raises:
        CheckpointError: the pooler is unknown, or `cls` and there is no pooler head; or the tokenizer has more tokens
            than the transformer has embeddings.
        ConfigError: vectors do not have so many numbers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer: Mapping[str, Any],
        tokenizer: transformers.PreTrainedTokenizerFast,
        *,
        pooler: str,
        pooler_head: Mapping[str, Any] | None = None,
        dtype: DTypeLike = jnp.float32,
        truncate_dim: int | None = None,
        name: str = "an encoder without a name",
    ):
        if pooler not in POOLERS:
            raise CheckpointError(f"unknown pooler {pooler!r}; known: {', '.join(POOLERS)}")
        if pooler == "cls":
            _check_pooler_head(pooler_head, config.hidden_size)
        if len(tokenizer) > config.vocab_size:
            raise CheckpointError(
                f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size} embeddings"
            )
        self.config = config
        self.tokenizer = tokenizer
        self.pooler = pooler
        self.dtype = dtype
        self.truncate_dim = checked_truncation(truncate_dim, config.hidden_size)
        self.name = name
        self._backend = unlimited_tokenizer(tokenizer)
        self._tokenizing = threading.Lock()  # the backend holds the number of tokens that it cuts at
        self._index: SentenceIndex | None = None
        self._set_params(transformer, pooler_head if pooler == "cls" else None)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        pooler: str | None = None,
        dtype: DTypeLike = jnp.float32,
        truncate_dim: int | None = None,
    ) -> "SentenceEncoder":
        """Loads an encoder.

        Args:
            path_or_id: a training workdir (its best checkpoint is taken), one checkpoint of it, a Hugging Face or
                sentence-transformers folder, a hub id, or `minilm`. A Normalize module of sentence-transformers is not
                applied: ask `encode` for it.
            pooler: overrides the recorded pooler, with a warning; needed where nothing is recorded.
            dtype: computation type.
            truncate_dim: cut vectors to their first so many numbers; None: to as many as the folder records, if any.

        Raises:
            CheckpointError: the model cannot be read, or its pooler is unknown.
            ConfigError: vectors do not have so many numbers.
        """
        path = expand_path(path_or_id)
        if find_run(path):
            saved = read_encoder(path)
            return cls.from_saved(saved, pooler=pooler, dtype=dtype, truncate_dim=truncate_dim, name=str(path_or_id))
        model = pretrained.load(str(path_or_id))
        record = pooling_modules.recorded(model)
        return cls(
            model.config,
            model.transformer,
            load_tokenizer(model.folder),
            pooler=choose_pooler(pooler, record.pooler if record else None, str(path_or_id)),
            pooler_head=record.head if record and record.head else model.pooler,
            dtype=dtype,
            truncate_dim=record.truncate_dim if record and truncate_dim is None else truncate_dim,
            name=str(path_or_id),
        )

    @classmethod
    def from_saved(
        cls,
        saved: SavedEncoder,
        *,
        pooler: str | None = None,
        dtype: DTypeLike = jnp.float32,
        truncate_dim: int | None = None,
        name: str = "",
    ) -> "SentenceEncoder":
        """The encoder of a `diffcse_jax.run_folder.saved_encoder.SavedEncoder`."""
        return cls(
            saved.transformer_config,
            saved.transformer,
            load_tokenizer(saved.folder),
            pooler=choose_pooler(pooler, saved.pooler, f"the checkpoint of step {saved.step}"),
            pooler_head=saved.pooler_head,
            dtype=dtype,
            truncate_dim=truncate_dim,
            name=name or f"the checkpoint of step {saved.step}",
        )

    @property
    def dimension(self) -> int:
        """Length of a sentence vector."""
        return self.truncate_dim or self.config.hidden_size

    @property
    def params(self) -> Params:
        """Parameters of the transformer and, for the pooler `cls`, of its head, as `models.teachers` names them."""
        return self._params

    def encode(
        self,
        sentences: Sentences,
        batch_size: int = 64,
        normalize: bool = False,
        show_progress: bool = False,
        max_length: int | None = None,
        on_progress: Callable[[int], object] | None = None,
    ) -> Float32[np.ndarray, "*sentences dimension"]:
        """Vectors of one sentence, (dimension,), or of many, (sentences, dimension).

        Args:
            sentences: text. Each distinct sentence is computed once.
            batch_size: sentences per call of the compiled function; on a CPU fewer where they are long. It does not
                change results beyond rounding.
            normalize: scale vectors to length 1.
            show_progress: draw a progress bar.
            max_length: cut sentences to this many tokens, special ones included. By default nothing is cut but what
                exceeds the model's positions, and that with a warning.
            on_progress: told of the number of sentences computed since it was told last.

        Raises:
            CheckpointError: a vector is not finite.
            ConfigError: `batch_size` is below 1.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: expected at least 1")
        if isinstance(sentences, str):
            return self.encode([sentences], batch_size, normalize, show_progress, max_length, on_progress)[0]
        sentences = list(sentences)  # an iterator can be read once only
        distinct = {sentence: row for row, sentence in enumerate(dict.fromkeys(sentences))}
        turn: contextlib.AbstractContextManager[Any] = _all_devices if self._mesh.size > 1 else contextlib.nullcontext()
        with (
            turn,
            tqdm.tqdm(total=len(distinct), desc="encoding", unit=" sentences", disable=not show_progress) as progress,
        ):
            vectors = np.empty((len(distinct), self.dimension), np.float32)
            for rows, computed in self._encode_distinct([*distinct], batch_size, max_length):
                vectors[rows] = computed
                progress.update(len(rows))
                if on_progress:
                    on_progress(len(rows))
        require_finite(vectors)
        if normalize:
            vectors = normalized(vectors)
        return vectors[[distinct[sentence] for sentence in sentences]]

    def similarity(self, a: Sentences, b: Sentences) -> Float32[np.ndarray, "*rows_and_columns"]:
        """Cosine similarities of all pairs: (len(a), len(b)), without the axis of an argument that is one string."""
        return np.asarray(np.inner(self.encode(a, normalize=True), self.encode(b, normalize=True)))

    def build_index(
        self,
        sentences: Iterable[str] | str | Path,
        batch_size: int = 64,
        show_progress: bool = False,
        *,
        faiss: str = "",
    ) -> None:
        """Encodes the sentences that `search` looks through, in place of any earlier ones.

        Args:
            sentences: text; or the path of a file of sentences, as training reads it.
            batch_size: as for `encode`.
            show_progress: as for `encode`.
            faiss: faiss's description of the index that searches; `Flat` is exact, `IVF1024,Flat` and `HNSW32` are
                not. By default all vectors are compared, exactly, on the device.

        Raises:
            DataError: the file cannot be read.
            ConfigError: faiss is not installed, or cannot make such an index.
        """
        if isinstance(sentences, (str, Path)):
            texts = table_of([*read_entries(sentences, "build_index")])
        else:
            texts = pa.table({TEXT: pa.array(list(sentences), pa.large_string())})
        vectors = self.encode(texts[TEXT].to_pylist(), batch_size, normalize=True, show_progress=show_progress)
        index = SentenceIndex(ArrayStore(vectors, with_long_texts(texts)), self.record())
        self._index = index.with_faiss(faiss) if faiss else index

    def save_index(self, folder: str | Path) -> None:
        """Writes the index to a folder, in place of an earlier index there.

        Raises:
            ValueError: there is no index yet.
            CheckpointError: there is something else in the folder, or it cannot be written.
        """
        self._built().save(expand_path(folder))

    def load_index(self, folder: str | Path) -> None:
        """Takes the index of a folder that `save_index`, `diffcse search` or `diffcse embed` has written.

        Its vectors stay on disk and are mapped into memory, or read as they are needed.

        Raises:
            DataError: it holds no index that can be read.
            CheckpointError: its files are damaged.
            ConfigError: its vectors are of another encoder.
        """
        index = find_index(expand_path(folder))
        if index is None:
            raise DataError(f"{folder}: no index and no vectors there; `save_index` or `diffcse embed` writes some")
        index.encoder.require(self.record(), index.name)
        self._index = index

    def search(
        self, queries: Sentences, top_k: int = 5, threshold: float | None = None
    ) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """The most similar sentences of the index.

        Args:
            queries: one string or many.
            top_k: at most so many sentences per query.
            threshold: least cosine similarity; None: any.

        Returns:
            Pairs (sentence, cosine similarity), best first, for a string; a list of such lists for many.

        Raises:
            ValueError: there is no index yet.
        """
        index = self._built()
        vectors = self.encode([queries] if isinstance(queries, str) else queries, normalize=True)
        found = [[(hit.row[TEXT], hit.score) for hit in hits] for hits in index.search(vectors, top_k, threshold)]
        return found[0] if isinstance(queries, str) else found

    def _built(self) -> SentenceIndex:
        if self._index is None:
            raise ValueError("there is no index to search; call build_index(sentences) or load_index(folder) first")
        return self._index

    def record(self) -> EncoderRecord:
        """What tells this encoder's vectors from those of others."""
        return EncoderRecord(
            self.name, self.pooler, jnp.dtype(self.dtype).name, self.dimension, weights=self.fingerprint()
        )

    def fingerprint(self) -> str:
        """Return a hash of all that determines an embedding: sizes, weights, pooler, precision and tokenizer.

        It contains values only, no names of classes or modules, so it stays the same when code moves.
        """
        settings = {
            "transformer": _plain_values(self.config),
            "pooler": self.pooler,
            "precision": jnp.dtype(self.dtype).name,
            "dimension": self.dimension,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        with self._tokenizing:
            self._backend.no_truncation()
            digest.update(self._backend.to_str().encode())
        for name, array in sorted(self._params.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.asarray(array).tobytes())
        return digest.hexdigest()[:32]

    def _set_params(self, transformer: Mapping[str, Any], pooler_head: Mapping[str, Any] | None) -> None:
        params = parameters.prefixed(transformer, "transformer") | parameters.prefixed(pooler_head or {}, "pooler_head")
        sharding = getattr(next(iter(params.values())), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            devices = jax.local_devices()
            mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
            sharding = NamedSharding(mesh, PartitionSpec())
            params = jax.device_put(params, sharding)
        self._params, self._mesh = params, sharding.mesh

    def _encode_distinct(
        self, sentences: list[str], batch_size: int, max_length: int | None
    ) -> Iterator[tuple[list[int], Float32[np.ndarray, "rows dimension"]]]:
        """TokenRows, longest sentences first, and their vectors."""
        token_ids = self._tokenize(sentences, max_length)
        by_length = sorted(range(len(sentences)), key=lambda row: -len(token_ids[row]))
        forward = compiled_forward(self.config, self.pooler, jnp.dtype(self.dtype), self._mesh)

        def started() -> Iterator[tuple[list[int], jax.Array]]:
            start = 0
            while start < len(sentences):
                length = min(_bucket(len(token_ids[by_length[start]])), self.config.max_length)
                rows_per_batch = self._rows_per_batch(len(sentences), batch_size, length)
                rows = by_length[start : start + rows_per_batch]
                batch = self._batch([token_ids[row] for row in rows], rows_per_batch, length)
                yield rows, forward(self._params, *batch)
                start += rows_per_batch

        for rows, computed in _ahead(started()):
            yield rows, np.asarray(computed)[: len(rows), : self.dimension]

    def _tokenize(self, sentences: list[str], max_length: int | None) -> list[list[int]]:
        fewest = self._backend.num_special_tokens_to_add(is_pair=False) + 1
        if max_length is not None and max_length < fewest:
            raise ConfigError(
                f"max_length={max_length}: expected at least {fewest} tokens, or None for the model's own"
            )
        with self._tokenizing:
            self._backend.enable_truncation(min(max_length or self.config.max_length, self.config.max_length))
            found = tokenise(self._backend, sentences)
        if max_length is None or max_length > self.config.max_length:
            warn_of_cut(found.cut, self.config.max_length)
        return found.ids

    def _rows_per_batch(self, count: int, batch_size: int, length: int) -> int:
        """The rows of all batches of a length, so that few shapes are compiled; a multiple of the devices."""
        rows = min(batch_size, _power_of_two(count))
        if self._mesh.devices.flat[0].platform == "cpu":
            rows = min(rows, max(1, CPU_TOKENS_PER_BATCH // length))
        return -(-rows // self._mesh.size) * self._mesh.size

    def _batch(
        self, token_ids: list[list[int]], rows: int, length: int
    ) -> tuple[Int32[jax.Array, "rows length"], Int32[jax.Array, "rows length"]]:
        """Token ids and attention mask, padded to `rows` and to `length`."""
        input_ids = np.full((rows, length), self.config.pad_token_id, np.int32)
        attention_mask = np.zeros((rows, length), np.int32)
        for row, ids in enumerate(token_ids):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        return self._placed(input_ids), self._placed(attention_mask)

    def _placed(self, array: np.ndarray) -> jax.Array:
        """The array with its rows spread over the mesh; every host gives the same one."""
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _plain_values(config: TransformerConfig) -> dict[str, Any]:
    """Return the settings that change embeddings; a default is left out, so that new options change no fingerprint."""
    return {
        field.name: value
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), str | int | float)
        and value != field.default
        and field.repr  # otherwise it changes how embeddings are computed, not what they are
        and "dropout" not in field.name
    }


def _check_pooler_head(head: Mapping[str, Any] | None, size: int) -> None:
    if head is None:
        raise CheckpointError(
            "pooler 'cls' is dense + tanh on position 0, and this model has no such weights; "
            "use 'cls_before_pooler' for position 0 alone"
        )
    shape = head["dense.kernel"].shape
    if shape != (size, size):
        raise CheckpointError(f"pooler 'cls': its dense layer is {shape}, which does not fit a hidden size of {size}")


def choose_pooler(explicit: str | None, recorded: str | None, source: str) -> str:
    """The explicit pooler if there is one, else the recorded one.

    Raises:
        CheckpointError: there is neither.
    """
    pooler = explicit or recorded
    if pooler is None:
        raise CheckpointError(f"{source} does not record its pooler; choose one of: {', '.join(POOLERS)}")
    if explicit and recorded and explicit != recorded:
        warnings.warn(
            f"{source} was trained for the pooler {recorded!r} and is used with {explicit!r}: "
            "scores can be far lower than the model's own",
            stacklevel=3,
        )
    return pooler


def checked_truncation(truncate_dim: int | None, hidden_size: int) -> int | None:
    """The length that vectors are cut to, as it was asked for; None: they stay whole.

    Raises:
        ConfigError: vectors do not have so many numbers.
    """
    if truncate_dim is not None and not 1 <= truncate_dim <= hidden_size:
        raise ConfigError(
            f"truncate_dim={truncate_dim}: this model's vectors have {hidden_size} numbers; keep 1 to {hidden_size}"
        )
    return truncate_dim


def warn_of_cut(cut: Sequence[bool], max_length: int) -> None:
    """Warns if any of these sentences exceeds the positions of a model."""
    if any(cut):
        warnings.warn(
            f"{sum(cut)} of {len(cut)} sentences are longer than the model's {max_length} tokens and were cut",
            stacklevel=5,
        )


def require_finite(vectors: Float32[np.ndarray, "*n dimension"]) -> Float32[np.ndarray, "*n dimension"]:
    """The vectors as they are: comparisons with NaN would give them a score.

    Raises:
        CheckpointError: one is not finite.
    """
    if not np.isfinite(vectors).all():
        raise CheckpointError(
            "the encoder gives vectors that are not finite; its training diverged or its weights are damaged: "
            "take an earlier checkpoint, or train with a lower learning rate"
        )
    return vectors


@functools.lru_cache
def compiled_forward(
    config: TransformerConfig, pooler: str, dtype: np.dtype, mesh: jax.sharding.Mesh
) -> Callable[..., jax.Array]:
    """`(params, input_ids, attention_mask) -> vectors`, one for all encoders of a kind."""
    config = config.on(mesh.devices.flat[0].platform)
    transformer = parameters.definition(functools.partial(Transformer, config, dtype=dtype))
    pooler_head = parameters.definition(functools.partial(MlpProjector, config, dtype=dtype))

    def forward(params: Params, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        # The default precision of accelerators is below float32.
        with jax.default_matmul_precision("highest"):
            bound = parameters.bind(transformer, parameters.subset(params, "transformer"))
            states = bound(TokenRows(input_ids, attention_mask), last_positions=positions_read(pooler))["hidden_states"]
            pooled = pool(states, attention_mask, pooler)
            if pooler == "cls":
                pooled = parameters.bind(pooler_head, parameters.subset(params, "pooler_head"))(pooled)
        return pooled.astype(jnp.float32)

    # Replicated, every host can read the whole result.
    return jax.jit(forward, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _bucket(length: int) -> int:
    """The padded length: 16, 20, ... 32, 40, ... 64, 80, ... Few shapes are compiled, and little is padding."""
    step = max(4, _power_of_two(length) // 8)
    return max(SHORTEST_BUCKET, -(-length // step) * step)


def _ahead(batches: Iterator[tuple[list[int], jax.Array]]) -> Iterator[tuple[list[int], jax.Array]]:
    """The same, drawn two ahead: the device computes while the host prepares the next batches."""
    drawn: collections.deque[tuple[list[int], jax.Array]] = collections.deque()
    for batch in batches:
        drawn.append(batch)
        if len(drawn) > 2:
            yield drawn.popleft()
    yield from drawn


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()
