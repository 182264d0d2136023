"""An index: texts with their embeddings, their words or both, in memory or in a folder.

An index folder holds `sentences.arrow`, perhaps `vectors.npy` and the files of BM25, and `index.json` with the mode,
the encoder and the SHA-256 of the other files, which loading compares.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import disk_errors, file_digests, first_changed, read_json_object, replace_dir, write_json
from diffcse_jax.models.prompts import Prompts
from diffcse_jax.search.array_store import BLOCK_ROWS, ArrayStore, Queries, Vectors
from diffcse_jax.search.fusion import CANDIDATES, DEFAULT_WEIGHT, best_rows, combine, found_by_words
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.records import DOCUMENT, FILE, LINE, START, searched_texts
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, find_store

INDEX_FILE = "index.json"
MODES = ("dense", "lexical", "hybrid")
SAMPLE_ROWS = 1024  # whose mean and deviation standardise cosine similarities, evenly spaced over the corpus
_TEXTS = "sentences.arrow"

# Scores and rows of a query, best first, and the ranks of rows by half.
Found = tuple[Float32[np.ndarray, " _"], Int[np.ndarray, " _"], Mapping[int, Mapping[str, int]]]


class Hit(NamedTuple):
    """A text that was found."""

    score: float  # cosine similarity, BM25 score, or the mean of their z-scores
    row: Mapping[str, Any]  # `sentence` and its other columns, for example `line`
    ranks: Mapping[str, int] = {}  # of a hybrid search: the places of the text by each half that found it


@dataclasses.dataclass(frozen=True, eq=False)
class SentenceIndex:
    """Texts that can be searched with embeddings of the same encoder, with words, or with both."""

    store: ArrayStore
    encoder: EncoderRecord | None  # None if there are no embeddings
    name: str = ""  # the folder, for errors; empty for an index in memory
    lexical: LexicalIndex | None = None
    weight: float = DEFAULT_WEIGHT  # of BM25 in a hybrid search, from 0 to 1
    warning: str = ""  # if a part of the texts is missing
    parquet: VectorStore | None = None  # with the embeddings, which `with_embeddings` copies

    @classmethod
    def of(
        cls, texts: pa.Table, vectors: Vectors | None, encoder: EncoderRecord | None, storage: str = "float32"
    ) -> "SentenceIndex":
        """Return an index in memory of texts and, if there are any, their embeddings, of length 1."""
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
            lexical = LexicalIndex.load(folder, str(settings.get("language"))) if mode != "dense" else None
            weight = float(settings.get("weight", DEFAULT_WEIGHT))
        except (OSError, TypeError, ValueError, RuntimeError, pa.ArrowException) as error:
            raise CheckpointError(f"{folder} cannot be read ({error}). Build the index again") from error
        return cls(store, encoder, str(folder), lexical, weight)

    def __len__(self) -> int:
        return len(self.store)

    @property
    def mode(self) -> str:
        return "lexical" if self.encoder is None else "hybrid" if self.lexical else "dense"

    def extended(
        self, mode: str, *, language: str = "", weight: float | None = None, storage: str = ""
    ) -> "SentenceIndex":
        """Return the same texts with what `build_index` is asked for besides their embeddings."""
        index = dataclasses.replace(self, encoder=None) if mode == "lexical" else self
        index = index.stored_as(storage) if storage and index.encoder else index
        return index if mode == "dense" else index.with_lexical(language, weight)

    def with_embeddings(self) -> "SentenceIndex":
        """Return the same texts with their embeddings, if these are still in Parquet files."""
        if self.parquet is None:
            return self
        return dataclasses.replace(self, store=ArrayStore(self.store.table, self.parquet.mapped()), parquet=None)

    def stored_as(self, storage: str) -> "SentenceIndex":
        """Return the same texts with their embeddings in memory, stored as one of `STORAGES`."""
        store = self.store
        return dataclasses.replace(self, store=ArrayStore.of(store.unit_blocks, store.table, storage))

    def with_lexical(self, language: str = "", weight: float | None = None) -> "SentenceIndex":
        """Return the same texts, searched with words, too.

        Without a language, it is detected. `weight` is that of BM25 in a hybrid search.
        """
        weight = DEFAULT_WEIGHT if weight is None else weight
        if not 0 <= weight <= 1:
            raise ConfigError(f"weight={weight}: expected a number from 0 (embeddings only) to 1 (BM25 only)")
        lexical = LexicalIndex.build(searched_texts(self.store.table), language)
        return dataclasses.replace(self, lexical=lexical, weight=weight)

    def save(self, folder: Path) -> None:
        """Write the index to a folder; an earlier index there is replaced, other content is refused."""
        if folder.exists() and not (folder / INDEX_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} is not empty and not an index. Choose another folder")
        with disk_errors(folder, safe="An earlier index there is unchanged."), replace_dir(folder) as new:
            settings: dict[str, Any] = {"mode": self.mode}
            if self.encoder:
                self.store.save(new)
                settings |= dataclasses.asdict(self.encoder)
            if self.lexical:
                self.lexical.save(new)
                settings |= {"language": self.lexical.language, "weight": self.weight}
            with pa.ipc.new_file(new / _TEXTS, self.store.table.schema) as writer:
                writer.write_table(self.store.table)
            write_json(new / INDEX_FILE, settings | {"sha256": file_digests(new, new.iterdir())})

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
        queries: Queries | None,
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
        while True:
            found = self._find(queries, texts, mode, count)
            # The best row of each document.
            best = [np.sort(np.unique(self._documents[rows], return_index=True)[1])[:top_k] for _, rows, _ in found]
            short = any(
                len(kept) < top_k and len(rows) == count for kept, (_, rows, _) in zip(best, found, strict=True)
            )
            if not short or count == len(self):
                break
            count = min(4 * count, len(self))  # further passages of the same documents took places
        return [
            [
                Hit(score, self.store.row(row), ranks.get(row, {}))
                for score, row in zip(scores[kept].tolist(), rows[kept].tolist(), strict=True)
                if threshold is None or score >= threshold
            ]
            for kept, (scores, rows, ranks) in zip(best, found, strict=True)
        ]

    @functools.cached_property
    def _documents(self) -> Int[np.ndarray, " rows"]:
        """The document of each row."""
        table = self.store.table
        if START not in table.column_names:
            return np.arange(len(table))
        numbers: dict[Any, int] = {}
        places = (table[name].to_pylist() for name in (FILE, LINE, DOCUMENT) if name in table.column_names)
        return np.array([numbers.setdefault(place, len(numbers)) for place in zip(*places, strict=True)])

    def _find(self, queries: Queries | None, texts: Sequence[str], mode: str, count: int) -> list[Found]:
        if mode == "lexical":
            assert self.lexical
            found = ((scores, found_by_words(scores, count)) for scores in map(self.lexical.scores, texts))
            return [(scores[rows], rows, {}) for scores, rows in found]
        assert queries is not None
        if mode == "hybrid":
            return [*self._by_both(queries, texts, count)]
        return [(scores, rows, {}) for scores, rows in zip(*self.store.nearest(queries, count), strict=True)]

    @functools.cached_property
    def _sample(self) -> Float32[np.ndarray, "sample dimension"]:
        return self.store.embeddings(np.arange(0, len(self), -(-len(self) // SAMPLE_ROWS)))

    def _by_both(self, queries: Queries, texts: Sequence[str], count: int) -> Iterator[Found]:
        assert self.lexical
        depth = min(max(CANDIDATES, count), len(self))
        for query, text, near in zip(queries, texts, self.store.nearest(queries, depth)[1], strict=True):
            lexical = self.lexical.scores(text)
            by_words = found_by_words(lexical, depth)
            rows = np.union1d(near, by_words)
            dense = self.store.embeddings(rows) @ query
            all_dense = np.einsum("rd,d->r", self._sample, query)  # one thread: BLAS would wait for others
            scores = combine(dense, lexical[rows], self.weight, all_dense, lexical)
            best = best_rows(scores, count)
            ranks: dict[int, dict[str, int]] = collections.defaultdict(dict)
            for half, order in (("dense", near), ("lexical", by_words)):
                for place, row in enumerate(order.tolist(), 1):
                    ranks[row][half] = place
            yield scores[best], rows[best], ranks


def find_index(path: Path) -> SentenceIndex | None:
    """Open an index folder, or Parquet files of `diffcse embed` or `diffcse encode`; return None if it is neither.

    Of Parquet files, memory holds the texts. Check the encoder, and then call `with_embeddings`, which copies the
    embeddings to a temporary file, so that they may be larger than memory.
    """
    if (path / INDEX_FILE).is_file():
        return SentenceIndex.load(path)
    if (found := find_store(str(path))) is None:
        return None
    record, warning = found.record(), ""
    if found.unfinished:
        warning = (
            f"{path} is incomplete: `diffcse embed` has not finished {len(found.unfinished)} of its inputs, for "
            f"example {found.unfinished[0]}. Run the same `diffcse embed` command again to complete it"
        )
    return SentenceIndex(ArrayStore(found.texts()), record, str(path), warning=warning, parquet=found)


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
