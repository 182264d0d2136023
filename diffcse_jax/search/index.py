"""An index: texts with their embeddings, searched exactly or by faiss, in memory or in a folder.

An index folder holds `vectors.npy`, `sentences.arrow`, perhaps `vectors.faiss`, and `index.json` with the encoder and
the SHA-256 of the other files, which loading compares.
"""

import contextlib
import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import disk_errors, file_digests, first_changed, read_json_object, replace_dir, write_json
from diffcse_jax.search.nearest import BLOCK_ROWS, FaissSearch, nearest
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, find_store

INDEX_FILE = "index.json"
_VECTORS, _TEXTS, _FAISS = "vectors.npy", "sentences.arrow", "vectors.faiss"
_REMEDY = "Build the index again"


class Hit(NamedTuple):
    """A text that was found."""

    score: float  # cosine similarity
    row: Mapping[str, Any]  # `sentence` and its other columns, for example `line`


@dataclasses.dataclass(frozen=True)
class ArrayStore:
    """Texts and embeddings as arrays, in memory or mapped. It offers what `VectorStore` offers for searching.

    Attributes:
        vectors: Embeddings of length 1.
        table: The texts and their other columns, one row for each embedding.
    """

    vectors: Float32[np.ndarray, "rows dimension"]
    table: pa.Table

    def __len__(self) -> int:
        return len(self.vectors)

    def unit_blocks(self) -> Iterator[Float32[np.ndarray, "rows dimension"]]:
        """Yield the embeddings block by block."""
        for start in range(0, len(self), BLOCK_ROWS):
            yield np.asarray(self.vectors[start : start + BLOCK_ROWS])

    def texts(self) -> Iterator[pa.Table]:
        """Yield the whole table."""
        yield self.table

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> list[dict[str, Any]]:
        """Return rows of the table."""
        return self.table.take(pa.array(numbers)).to_pylist()


class SentenceIndex:
    """Texts that can be searched with embeddings of the same encoder.

    Args:
        store: The texts and their embeddings.
        encoder: The encoder of the embeddings.
        name: The folder, for errors; empty for an index in memory.
        faiss: Searches instead of comparing all embeddings.
    """

    def __init__(
        self, store: ArrayStore | VectorStore, encoder: EncoderRecord, name: str = "", faiss: FaissSearch | None = None
    ):
        self.store, self.encoder, self.name = store, encoder, name
        self._faiss = faiss

    @classmethod
    def of(
        cls, texts: pa.Table, vectors: Float32[np.ndarray, "rows dimension"], encoder: EncoderRecord
    ) -> "SentenceIndex":
        """Return an index in memory of texts and their embeddings, of length 1."""
        return cls(ArrayStore(vectors, _large_texts(texts)), encoder)

    @classmethod
    def load(cls, folder: Path) -> "SentenceIndex":
        """Load an index folder after comparing its checksums; embeddings and texts are mapped into memory.

        Raises:
            CheckpointError: A file is missing, damaged or not an index.
            UserError: The index needs faiss, which is not installed.
        """
        settings = read_json_object(folder / INDEX_FILE)
        encoder = EncoderRecord.read(settings, folder / INDEX_FILE)
        digests = settings.get("sha256")
        if not isinstance(digests, dict) or not {_VECTORS, _TEXTS} <= digests.keys():
            raise CheckpointError(f"{folder / INDEX_FILE} has no checksums of the index's files. {_REMEDY}")
        try:
            if name := first_changed(folder, digests):
                raise CheckpointError(
                    f"{folder / name} is missing or damaged: it differs from the checksum in {INDEX_FILE}. {_REMEDY}"
                )
            vectors = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)
            table = pa.ipc.open_file(pa.memory_map(str(folder / _TEXTS))).read_all()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CheckpointError(f"{folder} cannot be read ({error}). {_REMEDY}") from error
        faiss = FaissSearch.load(folder / _FAISS) if _FAISS in digests else None
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
        """Return the same texts searched by faiss, which copies the embeddings; `FaissSearch.build` says more."""
        faiss = FaissSearch.build(factory, self.encoder.dimension, len(self), self.store.unit_blocks)
        return SentenceIndex(self.store, self.encoder, self.name, faiss)

    def save(self, folder: Path) -> None:
        """Write the index to a folder; an earlier index there is replaced.

        Raises:
            CheckpointError: The folder holds something else.
            DiskError: The folder cannot be written.
        """
        if folder.exists() and not (folder / INDEX_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} is not empty and not an index. Choose another folder")
        with disk_errors(folder, safe="An earlier index there stays whole."), replace_dir(folder) as new:
            with (new / _VECTORS).open("wb") as file:
                header = {"descr": "<f4", "fortran_order": False, "shape": (len(self), self.encoder.dimension)}
                np.lib.format.write_array_header_1_0(file, header)
                for block in self.store.unit_blocks():
                    file.write(np.ascontiguousarray(block).data)
            _write_texts(new / _TEXTS, map(_large_texts, self.store.texts()))
            if self._faiss:
                self._faiss.save(new / _FAISS)
            digests = file_digests(new, new.iterdir())
            write_json(new / INDEX_FILE, dataclasses.asdict(self.encoder) | {"sha256": digests})

    def search(
        self, queries: Float32[np.ndarray, "queries dimension"], top_k: int, threshold: float | None = None
    ) -> list[list[Hit]]:
        """Find the most similar texts for each query, best first; equally similar ones in the order of the index.

        Args:
            queries: Embeddings of length 1.
            top_k: The largest number of hits for a query.
            threshold: The least cosine similarity of a hit; None for any.

        Raises:
            ConfigError: `top_k` is below 1, or `threshold` is NaN.
        """
        top_k = check_count("top_k", top_k)
        if threshold is not None and math.isnan(threshold):
            raise ConfigError("threshold=nan: expected a number, or None for any similarity")
        if self._faiss:
            scores, rows = self._faiss.nearest(queries, top_k)
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
        DataError: Parquet files are damaged or missing.
        CheckpointError: An index is damaged.
        UserError: The index needs faiss, which is not installed.
    """
    if (path / INDEX_FILE).is_file():
        return SentenceIndex.load(path)
    store = find_store(str(path))
    return None if store is None else SentenceIndex(store, store.record(), str(path))


def check_count(name: str, value: Any) -> int:
    """Return a whole number that is at least 1.

    Raises:
        ConfigError: It is something else.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and operator.index(value) >= 1:
            return operator.index(value)
    raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")


def _large_texts(table: pa.Table) -> pa.Table:
    """Let the columns of text hold more than 2 GiB."""
    fields = [field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None)


def _write_texts(path: Path, tables: Iterator[pa.Table]) -> None:
    first = next(tables)
    with pa.ipc.new_file(path, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            if table.schema != first.schema:
                names = [", ".join(schema.names) for schema in (first.schema, table.schema)]
                raise CheckpointError(
                    f"some texts have the columns {names[0]}, others {names[1]}. Build one index for each kind"
                )
            writer.write_table(table)
