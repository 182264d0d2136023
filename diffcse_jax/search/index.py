"""An index: texts with their embeddings, searched exactly or by faiss, in memory or in a folder.

An index folder holds `vectors.npy`, `sentences.arrow`, perhaps `vectors.faiss`, and `index.json` with the encoder and
the SHA-256 of the other files, which loading compares.
"""

import collections
import contextlib
import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from jaxtyping import Array, Float, Float32, Int, Int32

from diffcse_jax.errors import CheckpointError, ConfigError, require_extra
from diffcse_jax.io import disk_errors, file_digests, first_changed, read_json_object, replace_dir, write_json
from diffcse_jax.models.prompts import Prompts
from diffcse_jax.search.vector_store import BLOCK_ROWS, EncoderRecord, VectorStore, find_store, write_npy

BLOCK_QUERIES = 1024  # their similarities with a block of embeddings take 32 MiB
FAISS_TRAINING_ROWS = 1 << 17  # embeddings that faiss clusters, evenly spaced over the corpus
INDEX_FILE = "index.json"
_VECTORS, _TEXTS, _FAISS = "vectors.npy", "sentences.arrow", "vectors.faiss"

Best = tuple[Float32[Array, "queries k"], Int32[Array, "queries k"]]  # similarities and rows


class Hit(NamedTuple):
    """A text that was found."""

    score: float  # cosine similarity
    row: Mapping[str, Any]  # `sentence` and its other columns, for example `line`


@dataclasses.dataclass(frozen=True)
class ArrayStore:
    """Texts and embeddings of length 1 as arrays, in memory or mapped. It is searched like a `VectorStore`."""

    vectors: Float32[np.ndarray, "rows dimension"]
    table: pa.Table

    def __len__(self) -> int:
        return len(self.vectors)

    def unit_blocks(self) -> Iterator[Float32[np.ndarray, "rows dimension"]]:
        return (np.asarray(self.vectors[start : start + BLOCK_ROWS]) for start in range(0, len(self), BLOCK_ROWS))

    def texts(self) -> Iterator[pa.Table]:
        yield self.table

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> list[dict[str, Any]]:
        return self.table.take(pa.array(numbers)).to_pylist()


class SentenceIndex:
    """Texts that can be searched with embeddings of the same encoder.

    Args:
        store: The texts and their embeddings.
        encoder: The encoder of the embeddings.
        name: The folder, for errors; empty for an index in memory.
        faiss: An index of faiss, which searches instead of comparing all embeddings.
    """

    def __init__(self, store: ArrayStore | VectorStore, encoder: EncoderRecord, name: str = "", faiss: Any = None):
        self.store, self.encoder, self.name, self._faiss = store, encoder, name, faiss
        # Without inverted lists, also as a part of another index, there is nothing to choose.
        if faiss and (inverted := require_extra("faiss", "search").try_extract_index_ivf(faiss)) is not None:
            inverted.nprobe = max(1, round(math.sqrt(inverted.nlist)))  # lists to look through, as in SimCSE's tool

    @classmethod
    def of(
        cls, texts: pa.Table, vectors: Float32[np.ndarray, "rows dimension"], encoder: EncoderRecord
    ) -> "SentenceIndex":
        """Return an index in memory of texts and their embeddings, of length 1."""
        return cls(ArrayStore(vectors, _large_texts(texts)), encoder)

    @classmethod
    def load(cls, folder: Path) -> "SentenceIndex":
        """Load an index folder after comparing its checksums; embeddings and texts are mapped into memory."""
        settings = read_json_object(folder / INDEX_FILE)
        encoder = EncoderRecord.read(settings, folder / INDEX_FILE)
        digests = settings.get("sha256")
        if not isinstance(digests, dict) or not {_VECTORS, _TEXTS} <= digests.keys():
            raise CheckpointError(f"{folder / INDEX_FILE} does not hold the index's checksums. Build the index again")
        try:
            if name := first_changed(folder, digests):
                raise CheckpointError(
                    f"{folder / name} is missing or damaged: it differs from the checksum in {INDEX_FILE}. Build the "
                    "index again"
                )
            vectors = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)
            table = pa.ipc.open_file(pa.memory_map(str(folder / _TEXTS))).read_all()
            faiss = None
            if _FAISS in digests:
                faiss = require_extra("faiss", "search").read_index(str(folder / _FAISS))
        except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
            raise CheckpointError(f"{folder} cannot be read ({error}). Build the index again") from error
        return cls(ArrayStore(vectors, table), encoder, str(folder), faiss)

    def __len__(self) -> int:
        return len(self.store)

    def warning(self) -> str:
        """Return a warning if `diffcse embed` has not finished the store; otherwise an empty string."""
        unfinished = self.store.unfinished if isinstance(self.store, VectorStore) else ()
        if not unfinished:
            return ""
        return (
            f"{self.name} is incomplete: `diffcse embed` has not finished {len(unfinished)} of its inputs, for example "
            f"{unfinished[0]}. Run the same `diffcse embed` command again to complete it"
        )

    def with_faiss(self, factory: str) -> "SentenceIndex":
        """Return the same texts searched by faiss, which copies the embeddings.

        If faiss stores the embeddings themselves, scores are cosine similarities. After quantisation (`IVF1024,SQ8`)
        they are close to these. After a PCA they are not, so a threshold has another meaning; with `,RFlat` at the end
        (`PCA64,IVF1024,Flat,RFlat`) faiss also keeps the embeddings and returns the similarities.

        Args:
            factory: The index in faiss's terms. `Flat` is exact; `IVF1024,Flat` and `HNSW32` are not.

        Raises:
            UserError: faiss is not installed.
            ConfigError: faiss cannot build such an index of these embeddings.
        """
        faiss = require_extra("faiss", "search")
        try:
            index = faiss.index_factory(self.encoder.dimension, factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                step = max(1, len(self) // FAISS_TRAINING_ROWS)
                index.train(np.concatenate([block[::step] for block in self.store.unit_blocks()]))
            for block in self.store.unit_blocks():
                index.add(np.ascontiguousarray(block))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].split("Error: ")[-1][:200]
            raise ConfigError(f"faiss cannot build {factory!r} for {len(self):,} embeddings: {reason}") from error
        return SentenceIndex(self.store, self.encoder, self.name, index)

    def save(self, folder: Path) -> None:
        """Write the index to a folder; an earlier index there is replaced, other content is refused."""
        if folder.exists() and not (folder / INDEX_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} is not empty and not an index. Choose another folder")
        with disk_errors(folder, safe="An earlier index there is unchanged."), replace_dir(folder) as new:
            write_npy(new / _VECTORS, self.store.unit_blocks(), self.encoder.dimension)
            tables = map(_large_texts, self.store.texts())
            first = next(tables)
            with pa.ipc.new_file(new / _TEXTS, first.schema) as writer:
                writer.write_table(first)
                for table in tables:
                    if table.schema != first.schema:
                        one, other = (", ".join(schema.names) for schema in (first.schema, table.schema))
                        raise CheckpointError(
                            f"some texts have the columns {one}, others {other}. Build one index for each kind"
                        )
                    writer.write_table(table)
            if self._faiss:
                require_extra("faiss", "search").write_index(self._faiss, str(new / _FAISS))
            digests = file_digests(new, new.iterdir())
            write_json(new / INDEX_FILE, dataclasses.asdict(self.encoder) | {"sha256": digests})

    def query_prompt(self, prompts: Prompts, prompt_name: str | None = None) -> str:
        """Return an encoder's prompt of queries, or refuse one that does not go with the prompt of the texts."""
        prompt = prompts.query if prompt_name is None else prompts.choose(prompt_name=prompt_name)
        if self.encoder.prompt not in (prompt, prompts.document):
            raise ConfigError(
                f"{self.name or 'the index'} holds texts with the prompt {self.encoder.prompt!r}, but the model's "
                f"prompt of documents is {prompts.document!r}. Build the index again, or search it with the same "
                "prompt (prompt_name)"
            )
        return prompt

    def search(
        self, queries: Float32[np.ndarray, "queries dimension"], top_k: int, threshold: float | None = None
    ) -> list[list[Hit]]:
        """Find the most similar texts for each query, best first; equally similar ones in the order of the index.

        Args:
            queries: Embeddings of length 1.
            top_k: The largest number of hits for a query.
            threshold: The least cosine similarity of a hit; None for any.
        """
        top_k = min(check_count("top_k", top_k), len(self))
        if threshold is not None and math.isnan(threshold):
            raise ConfigError("threshold=nan: expected a number, or None for any similarity")
        if self._faiss:
            scores, rows = self._faiss.search(np.ascontiguousarray(queries), top_k)  # row -1 where fewer were found
            order = np.lexsort((rows, -scores), axis=1)
            scores, rows = (np.take_along_axis(each, order, axis=1) for each in (scores, rows))
        else:
            scores, rows = nearest(queries, self.store.unit_blocks(), len(self), top_k)
        wanted = (rows >= 0) & (scores >= (-np.inf if threshold is None else threshold))
        distinct, inverse = np.unique(rows[wanted], return_inverse=True)
        found = self.store.rows(distinct)
        hits = iter([Hit(score, found[place]) for score, place in zip(scores[wanted].tolist(), inverse, strict=True)])
        return [[next(hits) for _ in range(count)] for count in wanted.sum(axis=1)]


def find_index(path: Path) -> SentenceIndex | None:
    """Open an index folder, or Parquet files of `diffcse embed` or `diffcse encode`; return None if it is neither.

    Raises:
        UserError: Files are damaged or missing, or the index needs faiss, which is not installed.
    """
    if (path / INDEX_FILE).is_file():
        return SentenceIndex.load(path)
    store = find_store(str(path))
    return None if store is None else SentenceIndex(store, store.record(), str(path))


def check_count(name: str, value: Any) -> int:
    """Return a whole number that is at least 1; raise `ConfigError` for anything else."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and operator.index(value) >= 1:
            return operator.index(value)
    raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")


def _large_texts(table: pa.Table) -> pa.Table:
    """Let the columns of text hold more than 2 GiB."""
    fields = [field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None)


# Exact search


def nearest(
    queries: Float32[np.ndarray, "queries dimension"],
    blocks: Iterable[Float[np.ndarray, "_ dimension"]],
    rows: int,
    top_k: int,
) -> tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
    """Find the rows with the highest inner products, best first; of equal ones the earlier row first.

    Memory holds three blocks of embeddings, and the similarities of one of them with one block of queries.

    Args:
        queries: Embeddings of length 1.
        blocks: Embeddings of length 1, float32 or float16, at most `BLOCK_ROWS` at a time; fewer than 2^31 in all.
        rows: The number of embeddings.
        top_k: The number of hits for each query; all rows if there are fewer.

    Returns:
        Inner products and row numbers, from 0.
    """
    found = min(top_k, rows)
    if not found or not len(queries):
        return np.zeros((len(queries), found), np.float32), np.zeros((len(queries), found), np.int64)
    # Shapes are powers of two, so that few are compiled. All blocks have the same one, so that equal rows score alike.
    k, size, count = _power_of_two(found), _power_of_two(rows, BLOCK_ROWS), _power_of_two(len(queries), BLOCK_QUERIES)
    starts = range(0, len(queries), count)
    asked = [jnp.asarray(_padded(queries[start : start + count], count)) for start in starts]
    nothing = jnp.full((count, k), -jnp.inf, jnp.float32), jnp.full((count, k), -1, jnp.int32)
    best: list[Best] = [nothing] * len(asked)
    running: collections.deque[list[Best]] = collections.deque()
    first = 0
    for block in blocks:
        on_device, place = jnp.asarray(_padded(block, size)), (np.int32(first), np.int32(len(block)))
        best = [_better(*earlier, each, on_device, *place) for earlier, each in zip(best, asked, strict=True)]
        first += len(block)
        running.append(best)
        if len(running) > 2:  # otherwise the host would copy the whole corpus before the device has compared it
            jax.block_until_ready(running.popleft())
    scores, numbers = (np.concatenate([np.asarray(each[part]) for each in best]) for part in (0, 1))
    return scores[: len(queries), :found], numbers[: len(queries), :found].astype(np.int64)


@jax.jit
def _better(
    best: Float32[Array, "queries k"],
    best_rows: Int32[Array, "queries k"],
    queries: Float32[Array, "queries dimension"],
    block: Float32[Array, "rows dimension"],
    first: Int32[Array, ""] | np.int32,
    count: Int32[Array, ""] | np.int32,
) -> Best:
    """Merge the best hits so far with those of a block, whose first `count` embeddings are rows `first`, ..."""
    with jax.default_matmul_precision("highest"):  # the default of accelerators is below float32
        scores = queries @ block.T
    real = jnp.arange(len(block), dtype=jnp.int32) < count
    # Of equal values `top_k` takes the one at the lower place, so earlier rows come first here and below.
    scores, columns = jax.lax.top_k(jnp.where(real[None], scores, -jnp.inf), min(best.shape[1], len(block)))
    rows = jnp.concatenate([best_rows, columns + first], axis=1)
    scores, places = jax.lax.top_k(jnp.concatenate([best, scores], axis=1), best.shape[1])
    return scores, jnp.take_along_axis(rows, places, axis=1)


def _padded(vectors: Float[np.ndarray, "_ dimension"], rows: int) -> Float[np.ndarray, "rows dimension"]:
    return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))


def _power_of_two(count: int, most: int = 1 << 31) -> int:
    return min(most, max(8, 1 << (count - 1).bit_length()))
