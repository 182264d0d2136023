"""An index: sentences with their vectors, searched exactly or by faiss, in memory or in a folder."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Float32, Int

from diffcse_jax.data.vector_folder import TEXT, find_store
from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import disk_errors, file_digests, first_changed, read_json_object, replace_dir, write_json
from diffcse_jax.search.approximate import FaissSearch
from diffcse_jax.search.nearest import BLOCK_ROWS, nearest, normalized
from diffcse_jax.storage.encoder_record import EncoderRecord
from diffcse_jax.storage.vector_files import NpyWriter, read_npy

INDEX_FILE = "index.json"
_VECTORS, _TEXTS, _FAISS = "vectors.npy", "sentences.arrow", "vectors.faiss"
_DIGESTS = "sha256"  # of every other file, by name
_REMEDY = "Build the index again"


class Hit(NamedTuple):
    """A sentence that was found."""

    score: float  # cosine similarity
    row: Mapping[str, Any]  # `sentence` and what else is known of it, such as its `line`


@runtime_checkable
class Store(Protocol):
    """Sentences and vectors, some of which are held in memory at a time."""

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""

    @property
    def unit(self) -> bool:
        """True if all vectors have length 1."""

    def __len__(self) -> int: ...

    def vector_blocks(self) -> Iterator[Float[np.ndarray, "rows dimension"]]:
        """Begins to read the vectors."""

    def texts(self) -> Iterator[pa.Table]:
        """Begins to read the sentences and what else is known of them."""

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> list[dict[str, Any]]:
        """The sentences of these rows and what else is known of them."""


@dataclasses.dataclass(frozen=True)
class ArrayStore:
    """A `Store` of arrays, in memory or mapped.

    Attributes:
        vectors: of length 1.
        table: the sentences and what else is known of them, a row for every vector.
    """

    vectors: Float32[np.ndarray, "rows dimension"]
    table: pa.Table
    unit = True

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self.vectors.shape[1]

    def __len__(self) -> int:
        return len(self.vectors)

    def vector_blocks(self) -> Iterator[Float32[np.ndarray, "rows dimension"]]:
        """The vectors block by block."""
        for start in range(0, len(self), BLOCK_ROWS):
            yield np.asarray(self.vectors[start : start + BLOCK_ROWS])

    def texts(self) -> Iterator[pa.Table]:
        """All of the table."""
        yield self.table

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> list[dict[str, Any]]:
        """Rows of the table."""
        return self.table.take(pa.array(numbers)).to_pylist()


class SentenceIndex:
    """Sentences to be searched by vectors of the encoder that theirs are of.

    Args:
        store: the sentences and their vectors.
        encoder: that the vectors are of.
        name: in errors: the folder that it is from, if it is from one.
        faiss: searches in place of comparing all vectors.
    """

    def __init__(self, store: Store, encoder: EncoderRecord, name: str = "", faiss: FaissSearch | None = None):
        self.store, self.encoder, self.name = store, encoder, name
        self._faiss = faiss

    @classmethod
    def load(cls, folder: Path) -> "SentenceIndex":
        """An index that `save` or `write_index` has written; vectors and sentences are mapped into memory.

        Raises:
            CheckpointError: there is none, or its files do not fit together.
            ConfigError: it is one of faiss, which is not installed.
        """
        settings = read_json_object(folder / INDEX_FILE)
        encoder = EncoderRecord.read(settings, folder / INDEX_FILE)
        digests = settings.get(_DIGESTS)
        if not isinstance(digests, dict) or not {_VECTORS, _TEXTS} <= digests.keys():
            raise CheckpointError(f"{folder / INDEX_FILE} has no checksums of the index's files. {_REMEDY}")
        if name := first_changed(folder, digests):
            raise CheckpointError(
                f"{folder / name} is missing or damaged: it differs from the checksum in {INDEX_FILE}. {_REMEDY}"
            )
        vectors = read_npy(folder / _VECTORS, CheckpointError)
        table = _read_table(folder / _TEXTS)
        faiss = FaissSearch.load(folder / _FAISS) if _FAISS in digests else None
        if vectors.shape != (len(table), encoder.dimension) or (faiss and len(faiss) != len(table)):
            raise CheckpointError(
                f"{folder}: {len(vectors):,} vectors of {vectors.shape[1]} numbers do not fit {len(table):,} sentences "
                f"and an encoder whose vectors have {encoder.dimension}; make the index again"
            )
        return cls(ArrayStore(vectors, table), encoder, str(folder), faiss)

    def __len__(self) -> int:
        return len(self.store)

    def with_faiss(self, factory: str) -> "SentenceIndex":
        """The same sentences searched by faiss, which holds a copy of the vectors in memory.

        Args:
            factory: faiss's description of its index: `Flat` is exact, `IVF1024,Flat` and `HNSW32` are not.

        Raises:
            ConfigError: faiss is not installed, or cannot make such an index of these vectors.
        """
        faiss = FaissSearch.build(factory, self.store.dimension, len(self), self.store.vector_blocks)
        return SentenceIndex(self.store, self.encoder, self.name, faiss)

    def save(self, folder: Path) -> None:
        """Writes the index to a folder, in place of an earlier index there.

        Raises:
            CheckpointError: there is something else in the folder.
            DiskError: it cannot be written.
        """
        with _replacing(folder) as new:
            with _Writer(new, self.encoder) as writer:
                for block in self.store.vector_blocks():
                    block = block.astype(np.float32, copy=False)
                    writer.add_vectors(block if self.store.unit else normalized(block))
                for texts in self.store.texts():
                    writer.add_texts(texts)
            if self._faiss:
                self._faiss.save(new / _FAISS)
            _write_settings(new, self.encoder)

    def search(
        self, queries: Float32[np.ndarray, "queries dimension"], top_k: int, threshold: float | None = None
    ) -> list[list[Hit]]:
        """The most similar sentences for every query, best first; equally similar ones in the order of the index.

        Args:
            queries: vectors of length 1.
            top_k: at most so many sentences for a query.
            threshold: least cosine similarity; None: any.
        """
        if self._faiss:
            scores, rows = self._faiss.nearest(queries, top_k)
        else:
            scores, rows = nearest(queries, self.store.vector_blocks(), len(self), top_k, unit=self.store.unit)
        wanted = (rows >= 0) & (scores >= (-np.inf if threshold is None else threshold))
        distinct, inverse = np.unique(rows[wanted], return_inverse=True)
        found = self.store.rows(distinct)
        hits = iter([Hit(score, found[place]) for score, place in zip(scores[wanted].tolist(), inverse, strict=True)])
        return [[next(hits) for _ in range(count)] for count in wanted.sum(axis=1)]


def find_index(path: Path) -> SentenceIndex | None:
    """The index of a folder, or of Parquet files that `diffcse embed` and `diffcse encode` write; None where is none.

    Raises:
        DataError: Parquet files that cannot be searched.
        CheckpointError: damaged files.
        ConfigError: an index of faiss, which is not installed.
    """
    if (path / INDEX_FILE).is_file():
        return SentenceIndex.load(path)
    store = find_store(str(path))
    return None if store is None else SentenceIndex(store, store.record(), str(path))


Chunks = Iterable[tuple[pa.Table, Float32[np.ndarray, "_ dimension"]]]  # each of its own size


def index_of(chunks: Chunks, encoder: EncoderRecord) -> SentenceIndex:
    """An index in memory; arguments as for `write_index`."""
    tables, vectors = zip(*chunks, strict=True)
    return SentenceIndex(ArrayStore(np.concatenate(vectors), with_long_texts(pa.concat_tables(tables))), encoder)


def write_index(folder: Path, chunks: Chunks, encoder: EncoderRecord) -> SentenceIndex:
    """Writes an index of which no more than a chunk is held in memory, in place of an earlier one, and opens it.

    Args:
        folder: where to.
        chunks: sentences, with what else is known of them, and their vectors, of length 1.
        encoder: that the vectors are of.

    Raises:
        CheckpointError: there is something else in the folder.
        DiskError: it cannot be written.
    """
    with _replacing(folder) as new:
        with _Writer(new, encoder) as writer:
            for texts, vectors in chunks:
                writer.add_texts(texts)
                writer.add_vectors(vectors)
        _write_settings(new, encoder)
    return SentenceIndex.load(folder)


class _Writer:
    """Writes the files of an index; a context manager."""

    def __init__(self, folder: Path, encoder: EncoderRecord):
        self._folder, self._encoder = folder, encoder
        self._vectors = NpyWriter(folder / _VECTORS, encoder.dimension)
        self._texts: pa.ipc.RecordBatchFileWriter | None = None

    def __enter__(self) -> "_Writer":
        self._vectors.__enter__()
        return self

    def add_vectors(self, vectors: Float32[np.ndarray, "rows dimension"]) -> None:
        self._vectors.append(vectors)

    def add_texts(self, texts: pa.Table) -> None:
        texts = with_long_texts(texts)
        if self._texts is None:
            self._schema = texts.schema
            self._texts = pa.ipc.new_file(self._folder / _TEXTS, texts.schema)
        if texts.schema != self._schema:
            names, before = (", ".join(schema.names) for schema in (texts.schema, self._schema))
            raise CheckpointError(f"sentences with {names} follow such with {before}: an index is of files of one kind")
        self._texts.write_table(texts)

    def __exit__(self, *exception: object) -> None:
        self._vectors.__exit__(*exception)
        if self._texts is not None:
            self._texts.close()


def _write_settings(folder: Path, encoder: EncoderRecord) -> None:
    """Write `index.json`: the encoder and the checksums of the other files."""
    digests = file_digests(folder, [path for path in folder.iterdir() if path.name != INDEX_FILE])
    write_json(folder / INDEX_FILE, dataclasses.asdict(encoder) | {_DIGESTS: digests})


def with_long_texts(table: pa.Table) -> pa.Table:
    """The table, whose columns of text may hold more than 2 GiB."""
    fields = [field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None)


def _read_table(path: Path) -> pa.Table:
    """The table of an Arrow file, mapped into memory."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); make the index again") from error
    if TEXT not in table.column_names or not pa.types.is_large_string(table.schema.field(TEXT).type):
        raise CheckpointError(f"{path} has no column {TEXT!r} of text; make the index again")
    return table


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A partial folder that takes the place of `folder` when the block ends without an exception."""
    is_index = folder.is_dir() and (not any(folder.iterdir()) or (folder / INDEX_FILE).is_file())
    if folder.exists() and not is_index:
        raise CheckpointError(f"{folder} is no index and not empty; choose another folder")
    with disk_errors(folder, safe="An earlier index there is whole."), replace_dir(folder) as new:
        yield new
