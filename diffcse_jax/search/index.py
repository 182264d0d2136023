"""An index: texts with their embeddings, their words or both, in memory or in a folder.

An index folder holds `sentences.arrow`, perhaps `vectors.npy`, `vectors.faiss` and the files of BM25, and `index.json`
with the mode, the encoder and the SHA-256 of the other files, which loading compares.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int

from diffcse_jax.errors import CheckpointError, ConfigError, require_extra
from diffcse_jax.io import disk_errors, file_digests, first_changed, read_json_object, replace_dir, write_json
from diffcse_jax.models.prompts import Prompts
from diffcse_jax.search.array_store import VECTORS, ArrayStore
from diffcse_jax.search.fusion import CANDIDATES, DEFAULT_WEIGHT, best_rows, combine, found_by_words
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.nearest import BLOCK_ROWS, nearest
from diffcse_jax.search.passages import searched_texts
from diffcse_jax.search.records import DOCUMENT, FILE, LINE, START
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, find_store, write_npy

FAISS_TRAINING_ROWS = 1 << 17  # embeddings that faiss clusters, evenly spaced over the corpus
INDEX_FILE = "index.json"
MODES = ("dense", "lexical", "hybrid")
SAMPLE_ROWS = 1024  # whose mean and deviation standardise cosine similarities, evenly spaced over the corpus
_TEXTS, _FAISS = "sentences.arrow", "vectors.faiss"

# Scores and rows of a query, best first, and the ranks of rows by half.
Found = tuple[Float32[np.ndarray, " k"], Int[np.ndarray, " k"], Mapping[int, Mapping[str, int]]]


class Hit(NamedTuple):
    """A text that was found."""

    score: float  # cosine similarity, BM25 score, or the mean of their z-scores
    row: Mapping[str, Any]  # `sentence` and its other columns, for example `line`
    ranks: Mapping[str, int] = {}  # of a hybrid search: the places of the text by each half that found it


class SentenceIndex:
    """Texts that can be searched with embeddings of the same encoder, with words, or with both.

    Args:
        store: The texts and their embeddings.
        encoder: The encoder of the embeddings; None if there are none.
        name: The folder, for errors; empty for an index in memory.
        faiss: An index of faiss, which searches instead of comparing all embeddings.
        lexical: The words of the texts.
        weight: The weight of BM25 in a hybrid search, from 0 to 1.
    """

    def __init__(
        self,
        store: ArrayStore | VectorStore,
        encoder: EncoderRecord | None,
        name: str = "",
        faiss: Any = None,
        lexical: LexicalIndex | None = None,
        weight: float = DEFAULT_WEIGHT,
    ):
        self.store, self.encoder, self.name, self._faiss = store, encoder, name, faiss
        self.lexical, self.weight = lexical, weight
        self.mode = "lexical" if encoder is None else "hybrid" if lexical else "dense"
        # Without inverted lists, also as a part of another index, there is nothing to choose.
        if faiss and (inverted := require_extra("faiss", "search").try_extract_index_ivf(faiss)) is not None:
            inverted.nprobe = max(1, round(math.sqrt(inverted.nlist)))  # lists to look through, as in SimCSE's tool

    @classmethod
    def of(
        cls,
        texts: pa.Table,
        vectors: Float32[np.ndarray, "rows dimension"] | None,
        encoder: EncoderRecord | None,
        storage: str = "float32",
    ) -> "SentenceIndex":
        """Return an index in memory of texts and, if there are any, their embeddings, of length 1."""
        texts = _large_texts(texts)
        if vectors is None:
            return cls(ArrayStore(texts), encoder)
        blocks = np.split(vectors, range(BLOCK_ROWS, len(vectors), BLOCK_ROWS))
        return cls(ArrayStore.of(lambda: blocks, texts, storage), encoder)

    @classmethod
    def load(cls, folder: Path) -> "SentenceIndex":
        """Load an index folder after comparing its checksums; embeddings and texts are mapped into memory."""
        settings = read_json_object(folder / INDEX_FILE)
        digests, mode = settings.get("sha256"), settings.get("mode")
        if mode not in MODES or not isinstance(digests, dict) or _TEXTS not in digests:
            raise CheckpointError(f"{folder / INDEX_FILE} lacks the index's mode or checksums. Build the index again")
        encoder = None if mode == "lexical" else EncoderRecord.read(settings, folder / INDEX_FILE)
        try:
            if name := first_changed(folder, digests):
                raise CheckpointError(
                    f"{folder / name} is missing or damaged: it differs from the checksum in {INDEX_FILE}. Build the "
                    "index again"
                )
            table = pa.ipc.open_file(pa.memory_map(str(folder / _TEXTS))).read_all()
            store = ArrayStore.load(folder, table) if encoder else ArrayStore(table)
            faiss = None
            if _FAISS in digests:
                faiss = require_extra("faiss", "search").read_index(str(folder / _FAISS))
            lexical = LexicalIndex.load(folder, str(settings.get("language"))) if mode != "dense" else None
            weight = float(settings.get("weight", DEFAULT_WEIGHT))
        except (OSError, TypeError, ValueError, RuntimeError, pa.ArrowException) as error:
            raise CheckpointError(f"{folder} cannot be read ({error}). Build the index again") from error
        return cls(store, encoder, str(folder), faiss, lexical, weight)

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
        if self.encoder is None:
            raise ConfigError(f"faiss={factory!r} searches embeddings, which an index of words alone does not have")
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
        return SentenceIndex(self.store, self.encoder, self.name, index, self.lexical, self.weight)

    def in_memory(self, storage: str = "float32") -> "SentenceIndex":
        """Return the same texts with their embeddings in memory, stored as one of `STORAGES`."""
        table = pa.concat_tables(self._texts())
        store = ArrayStore.of(self.store.unit_blocks, table, storage)
        return SentenceIndex(store, self.encoder, self.name, self._faiss, self.lexical, self.weight)

    def with_lexical(self, language: str = "", weight: float | None = None) -> "SentenceIndex":
        """Return the same texts, searched with words, too. Embeddings are read into memory if they are in Parquet.

        Args:
            language: The language of the stop words and of the stemmer, such as `german`; by default it is detected.
            weight: The weight of BM25 in a hybrid search, from 0 to 1.
        """
        weight = DEFAULT_WEIGHT if weight is None else check_weight(weight)
        store = self.store if isinstance(self.store, ArrayStore) else self.in_memory().store
        assert isinstance(store, ArrayStore)
        lexical = LexicalIndex.build(searched_texts(store.table), language)
        return SentenceIndex(store, self.encoder, self.name, self._faiss, lexical, weight)

    def save(self, folder: Path) -> None:
        """Write the index to a folder; an earlier index there is replaced, other content is refused."""
        if folder.exists() and not (folder / INDEX_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} is not empty and not an index. Choose another folder")
        with disk_errors(folder, safe="An earlier index there is unchanged."), replace_dir(folder) as new:
            settings: dict[str, Any] = {"mode": self.mode}
            if self.encoder:
                if isinstance(self.store, ArrayStore):
                    self.store.save(new)
                else:
                    write_npy(new / VECTORS, self.store.unit_blocks(), self.encoder.dimension)
                settings |= dataclasses.asdict(self.encoder)
            if self.lexical:
                self.lexical.save(new)
                settings |= {"language": self.lexical.language, "weight": self.weight}
            tables = self._texts()
            first = next(tables)
            with pa.ipc.new_file(new / _TEXTS, first.schema) as writer:
                for table in itertools.chain([first], tables):
                    writer.write_table(table)
            if self._faiss:
                require_extra("faiss", "search").write_index(self._faiss, str(new / _FAISS))
            digests = file_digests(new, new.iterdir())
            write_json(new / INDEX_FILE, settings | {"sha256": digests})

    def _texts(self) -> Iterator[pa.Table]:
        """Yield the texts; raise `CheckpointError` if their columns differ."""
        schema = None
        for table in map(_large_texts, self.store.texts()):
            schema = schema or table.schema
            if table.schema != schema:
                one, other = (", ".join(each.names) for each in (schema, table.schema))
                raise CheckpointError(
                    f"some texts have the columns {one}, others {other}. Build one index for each kind"
                )
            yield table

    def checked_mode(self, mode: str = "") -> str:
        """Return the mode of a search, by default that of the index; refuse one that the index does not have."""
        if check_mode(mode or self.mode) != self.mode and self.mode != "hybrid":
            raise ConfigError(
                f"{self.name or 'the index'} was built with mode={self.mode!r}, so mode={mode!r} cannot search it. "
                f"Search with mode={self.mode!r}, or build the index again with mode='hybrid', which has all modes"
            )
        return mode or self.mode

    def query_prompt(self, prompts: Prompts, prompt_name: str | None = None) -> str:
        """Return an encoder's prompt of queries, or refuse one that does not go with the prompt of the texts."""
        prompt = prompts.query if prompt_name is None else prompts.choose(prompt_name=prompt_name)
        if self.encoder and self.encoder.prompt not in (prompt, prompts.document):
            raise ConfigError(
                f"{self.name or 'the index'} holds texts with the prompt {self.encoder.prompt!r}, but the model's "
                f"prompt of documents is {prompts.document!r}. Build the index again, or search it with the same "
                "prompt (prompt_name)"
            )
        return prompt

    def search(
        self,
        queries: Float32[np.ndarray, "queries dimension"] | None,
        top_k: int,
        threshold: float | None = None,
        *,
        texts: Sequence[str] = (),
        mode: str = "",
    ) -> list[list[Hit]]:
        """Find the best texts for each query, best first; equally good ones in the order of the index.

        Of the passages of a document, only the best is a hit.

        Args:
            queries: Embeddings of length 1; not needed if mode is `lexical`.
            top_k: The largest number of hits for a query.
            threshold: The least score of a hit; None for any.
            texts: The queries themselves; not needed if mode is `dense`.
            mode: `dense` for cosine similarities, `lexical` for BM25, or `hybrid`. By default that of the index.
        """
        mode, top_k = self.checked_mode(mode), min(check_count("top_k", top_k), len(self))
        if threshold is not None and math.isnan(threshold):
            raise ConfigError("threshold=nan: expected a number, or None for any similarity")
        if threshold is not None and mode == "hybrid":
            raise ConfigError(
                f"threshold={threshold}: the scores of a hybrid search only compare the texts that one query finds. "
                "Leave the threshold out, or search with mode='dense'"
            )
        count = top_k
        found = self._find(queries, texts, mode, count)
        while self._documents is not None:
            distinct = [_first_of_each(self._documents, *each) for each in found]
            pairs = zip(found, distinct, strict=True)
            short = (len(rows) < top_k and len(all_rows) == count for (_, all_rows, _), (_, rows, _) in pairs)
            if count == len(self) or not any(short):
                found = [(scores[:top_k], rows[:top_k], ranks) for scores, rows, ranks in distinct]
                break
            count = min(4 * count, len(self))
            found = self._find(queries, texts, mode, count)
        least = -np.inf if threshold is None else threshold
        kept = [rows[(rows >= 0) & (scores >= least)] for scores, rows, _ in found]
        wanted = np.unique(np.concatenate([*kept, np.zeros(0, np.int64)]))
        texts_of = dict(zip(wanted.tolist(), self.store.rows(wanted), strict=True))
        return [
            [
                Hit(score, texts_of[row], ranks.get(row, {}))
                for score, row in zip(scores.tolist(), rows.tolist(), strict=True)
                if row in texts_of and score >= least
            ]
            for scores, rows, ranks in found
        ]

    def _find(
        self, queries: Float32[np.ndarray, "queries dimension"] | None, texts: Sequence[str], mode: str, count: int
    ) -> list[Found]:
        if mode == "lexical":
            return [self._by_words(text, count) for text in texts]
        assert queries is not None
        if mode == "hybrid":
            return [*self._by_both(queries, texts, count)]
        return [(scores, rows, {}) for scores, rows in zip(*self._nearest(queries, count), strict=True)]

    @functools.cached_property
    def _documents(self) -> Int[np.ndarray, " rows"] | None:
        """The document of each row; None if no document has several rows."""
        first = next(self.store.texts(), None)
        if first is None or START not in first.column_names:
            return None
        names = [name for name in (FILE, LINE, DOCUMENT) if name in first.column_names]
        numbers: dict[Any, int] = {}
        documents = [
            numbers.setdefault(place, len(numbers))
            for table in self.store.texts()
            for place in zip(*(table[name].to_pylist() for name in names), strict=True)
        ]
        return np.array(documents) if len(numbers) < len(documents) else None

    def _nearest(
        self, queries: Float32[np.ndarray, "queries dimension"], top_k: int
    ) -> tuple[Float32[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        if not self._faiss and isinstance(self.store, ArrayStore):
            return self.store.nearest(queries, top_k)
        if not self._faiss:
            return nearest(queries, self.store.unit_blocks(), len(self), top_k)
        scores, rows = self._faiss.search(np.ascontiguousarray(queries), top_k)  # row -1 where fewer were found
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)

    @functools.cached_property
    def _sample(self) -> Float32[np.ndarray, "sample dimension"]:
        assert isinstance(self.store, ArrayStore)
        return self.store.embeddings(np.arange(0, len(self), -(-len(self) // SAMPLE_ROWS)))

    def _by_words(self, text: str, top_k: int) -> Found:
        assert self.lexical
        scores = self.lexical.scores(text)
        rows = found_by_words(scores, top_k)
        return scores[rows], rows, {}

    def _by_both(
        self, queries: Float32[np.ndarray, "queries dimension"], texts: Sequence[str], top_k: int
    ) -> Iterator[Found]:
        assert self.lexical
        assert isinstance(self.store, ArrayStore)
        depth = min(max(CANDIDATES, top_k), len(self))
        for query, text, near in zip(queries, texts, self._nearest(queries, depth)[1], strict=True):
            lexical, near = self.lexical.scores(text), near[near >= 0]
            by_words = found_by_words(lexical, depth)
            rows = np.union1d(near, by_words)
            dense = self.store.embeddings(rows) @ query
            all_dense = np.einsum("rd,d->r", self._sample, query)  # one thread: BLAS would wait for others
            scores = combine(dense, lexical[rows], self.weight, all_dense, lexical)
            best = best_rows(scores, top_k)
            ranks: dict[int, dict[str, int]] = collections.defaultdict(dict)
            for half, order in (("dense", near), ("lexical", by_words)):
                for place, row in enumerate(order.tolist(), 1):
                    ranks[row][half] = place
            yield scores[best], rows[best], ranks


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


def check_mode(mode: str) -> str:
    """Return the mode, or raise `ConfigError` if there is no such mode."""
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: use one of: {', '.join(MODES)}")
    return mode


def _first_of_each(
    documents: Int[np.ndarray, " all"],
    scores: Float32[np.ndarray, " found"],
    rows: Int[np.ndarray, " found"],
    ranks: Mapping[int, Mapping[str, int]],
) -> Found:
    """Keep the best row of each document."""
    scores, rows = scores[rows >= 0], rows[rows >= 0]
    kept = np.sort(np.unique(documents[rows], return_index=True)[1])
    return scores[kept], rows[kept], ranks


def check_weight(weight: float) -> float:
    """Return a weight of BM25; raise `ConfigError` if it is not from 0 to 1."""
    if not 0 <= weight <= 1:
        raise ConfigError(f"weight={weight}: expected a number from 0 (embeddings only) to 1 (BM25 only)")
    return weight


def _large_texts(table: pa.Table) -> pa.Table:
    """Let the columns of text hold more than 2 GiB."""
    fields = [field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None)
