"""An index: texts with their embeddings, their words or both, in memory or in a folder. Encoders build and search one.

An index folder holds `sentences.arrow`, the files of `Embeddings` and of BM25 (one of the two or both), and
`index.json` with the mode, the encoder and the SHA-256 of the other files, which loading compares.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int

from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.io import disk_errors, expand_path, find_run, read_json_object, read_sealed, replace_dir, write_sealed
from diffcse_jax.models.sentence_folder import NO_PROMPTS, Prompts
from diffcse_jax.run_folder.records import SEARCH, read_selection
from diffcse_jax.search.embeddings import Embeddings, Queries, Vectors, check_storage
from diffcse_jax.search.fusion import CANDIDATES, DEFAULT_WEIGHT, combine
from diffcse_jax.search.lexical import LexicalIndex, best_rows, found_by_words
from diffcse_jax.search.records import (
    TEXT,
    Record,
    Sentences,
    checked_sentences,
    documents_of,
    records_of,
    searched_texts,
    table_of,
)
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, find_store

INDEX_FILE = "index.json"
MODES = ("dense", "lexical", "hybrid")
SAMPLE_ROWS = 1024  # at most so many, evenly spaced over the corpus, standardise the cosine similarities of a query
_TEXTS = "sentences.arrow"


class Hit(NamedTuple):
    """A text that was found."""

    score: float  # the cosine similarity, the BM25 score, or the weighted mean of their z-scores
    row: Record  # `sentence` and its other columns, for example `line`
    ranks: Mapping[str, int] = {}  # in a hybrid search: the rank by `dense` and by `lexical`, if these found the text


class Found(NamedTuple):
    """The rows that a query finds, best first."""

    scores: Float32[np.ndarray, " k"]
    rows: Int[np.ndarray, " k"]
    ranks: Mapping[int, Mapping[str, int]] = {}  # for each row, as in `Hit`


@dataclasses.dataclass(frozen=True, eq=False)
class SentenceIndex:
    """Texts that can be searched with embeddings of the same encoder, with words, or with both."""

    texts: pa.Table
    encoder: EncoderRecord | None = None  # None if there are no embeddings
    embeddings: Embeddings | None = None
    lexical: LexicalIndex | None = None
    weight: float = DEFAULT_WEIGHT  # the weight of BM25 in a hybrid search, from 0 to 1
    name: str = "the index"  # its folder; errors name it

    @classmethod
    def of(
        cls,
        texts: pa.Table,
        encoder: EncoderRecord | None = None,
        vectors: Vectors | None = None,
        mode: str = "dense",
        *,
        language: str = "",
        weight: float | None = None,
        storage: str = "",
        name: str = "the index",
    ) -> "SentenceIndex":
        """Return an index in memory of a table with `sentence` and perhaps `title` and other columns.

        `vectors` are embeddings of length 1 by `encoder`. Neither is needed if mode is `lexical`. Other arguments are
        those of `Searcher.build_index`; errors call the index `name`.
        """
        check_options(mode, language, weight, storage)
        weight = DEFAULT_WEIGHT if weight is None else weight
        embeddings = lexical = None
        if mode == "lexical":
            encoder = None
        else:
            assert vectors is not None
            embeddings = Embeddings.of(vectors, storage or "float32")
        if mode != "dense":
            lexical = LexicalIndex.build(searched_texts(texts), language)
        return cls(texts, encoder, embeddings, lexical, weight, name)

    @classmethod
    def of_store(cls, store: VectorStore, mode: str = "dense", **options: Any) -> "SentenceIndex":
        """Return an index of the output of `embed`. Its embeddings are copied, unless only words are searched."""
        check_options(mode, **options)
        vectors = None if mode == "lexical" else store.mapped()
        return cls.of(store.texts(), store.encoder, vectors, mode, name=str(store.folder), **options)

    @classmethod
    def load(cls, folder: Path) -> "SentenceIndex":
        """Load an index folder after comparing its checksums; embeddings and texts are mapped into memory."""
        settings = read_sealed(folder / INDEX_FILE, "Build the index again")
        encoder = embeddings = lexical = None
        try:
            texts = pa.ipc.open_file(pa.memory_map(str(folder / _TEXTS))).read_all()
            if settings["mode"] != "lexical":
                encoder, embeddings = EncoderRecord(**settings["encoder"]), Embeddings.load(folder)
            if settings["mode"] != "dense":
                lexical = LexicalIndex.load(folder, settings["language"])
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read ({error}). Build the index again") from error
        return cls(texts, encoder, embeddings, lexical, settings["weight"], str(folder))

    def save(self, folder: Path) -> None:
        """Write the index to a folder. An earlier index there is replaced; a folder with other content is refused."""
        if folder.exists() and not (folder / INDEX_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} is not empty and not an index. Choose another folder")
        with disk_errors(folder, safe="An earlier index there is unchanged."), replace_dir(folder) as new:
            settings: dict[str, Any] = {"mode": self.mode, "weight": self.weight}
            with pa.ipc.new_file(new / _TEXTS, self.texts.schema) as writer:
                writer.write_table(self.texts)
            if self.encoder and self.embeddings:
                self.embeddings.save(new)
                settings["encoder"] = dataclasses.asdict(self.encoder)
            if self.lexical:
                self.lexical.save(new)
                settings["language"] = self.lexical.language
            write_sealed(new / INDEX_FILE, settings, new.iterdir())

    @property
    def mode(self) -> str:
        if self.embeddings and self.lexical:
            return "hybrid"
        return "dense" if self.embeddings else "lexical"

    def checked_mode(self, mode: str = "") -> str:
        """Return the mode of a search, by default the index's. Raise `ConfigError` if the index does not have it."""
        if check_mode(mode or self.mode) != self.mode and self.mode != "hybrid":
            raise ConfigError(
                f"{self.name} was built with mode={self.mode!r}, so mode={mode!r} cannot search it. Search with "
                f"mode={self.mode!r}, or build the index again with mode='hybrid', which has all modes"
            )
        return mode or self.mode

    def query_prompt(self, prompts: Prompts, prompt_name: str | None = None) -> str:
        """Return an encoder's prompt of queries. Raise `ConfigError` if it does not fit the prompt of the texts."""
        prompt = prompts.choose(None, prompt_name, prompts.query)
        if self.encoder and self.encoder.prompt not in (prompt, prompts.document):
            raise ConfigError(
                f"{self.name} holds texts with the prompt {self.encoder.prompt!r}, but the model's prompt of documents "
                f"is {prompts.document!r}. Build the index again, or search it with the same prompt (prompt_name)"
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
        """Find the best texts for each query, best first. Texts with equal scores are in the order of the index.

        If a document has several passages, only its best passage is a hit. `queries` are embeddings of length 1, which
        `lexical` does not need; `texts` are the queries themselves, which `dense` does not need. Other arguments are
        those of `Searcher.search_hits`.
        """
        mode, top_k = self.checked_mode(mode), min(check_count("top_k", top_k), len(self.texts))
        if threshold is not None and math.isnan(threshold):
            raise ConfigError("threshold=nan: expected a number, or None for any similarity")
        if threshold is not None and mode == "hybrid":
            raise ConfigError(
                f"threshold={threshold}: the scores of a hybrid search only compare the texts that one query finds. "
                "Leave the threshold out, or search with mode='dense'"
            )
        finders = {"dense": self._by_embeddings, "lexical": self._by_words, "hybrid": self._by_both}
        count, is_short = top_k, True
        while is_short:
            found = [*finders[mode](queries, texts, count)]
            # The places of each document's best row. If passages share documents, there may be too few: find more.
            best = [np.sort(np.unique(self._documents[each.rows], return_index=True)[1])[:top_k] for each in found]
            is_short = count < len(self.texts) and any(
                len(kept) < top_k and len(each.rows) == count for kept, each in zip(best, found, strict=True)
            )
            count = min(4 * count, len(self.texts))
        hits = []
        for kept, each in zip(best, found, strict=True):
            scored = zip(each.scores[kept].tolist(), each.rows[kept].tolist(), strict=True)
            passing = [(score, row) for score, row in scored if threshold is None or score >= threshold]
            hits.append([Hit(score, self._row(row), each.ranks.get(row, {})) for score, row in passing])
        return hits

    def _row(self, number: int) -> dict[str, Any]:
        (found,) = self.texts.slice(number, 1).to_pylist()
        return {name: value for name, value in found.items() if value is not None}

    @functools.cached_property
    def _documents(self) -> Int[np.ndarray, " rows"]:
        return documents_of(self.texts)

    @functools.cached_property
    def _sample(self) -> Float32[np.ndarray, "sample dimension"]:
        assert self.embeddings
        return self.embeddings.rows(np.arange(0, len(self.texts), -(-len(self.texts) // SAMPLE_ROWS)))

    def _by_embeddings(self, queries: Queries | None, texts: Sequence[str], count: int) -> Iterator[Found]:
        assert self.embeddings
        assert queries is not None
        return map(Found, *self.embeddings.nearest(queries, count))

    def _by_words(self, queries: Queries | None, texts: Sequence[str], count: int) -> Iterator[Found]:
        assert self.lexical
        for scores in map(self.lexical.scores, texts):
            rows = found_by_words(scores, count)
            yield Found(scores[rows], rows)

    def _by_both(self, queries: Queries | None, texts: Sequence[str], count: int) -> Iterator[Found]:
        assert self.lexical
        assert self.embeddings
        assert queries is not None
        depth = min(max(CANDIDATES, count), len(self.texts))
        for query, text, near in zip(queries, texts, self.embeddings.nearest(queries, depth)[1], strict=True):
            all_lexical = self.lexical.scores(text)
            by_words = found_by_words(all_lexical, depth)
            rows = np.union1d(near, by_words)
            dense = self.embeddings.rows(rows) @ query
            sampled_dense = np.einsum("rd,d->r", self._sample, query)  # one thread: BLAS would wait for others
            scores = combine(dense, all_lexical[rows], self.weight, sampled_dense, all_lexical)
            best = best_rows(scores, count)
            ranks: dict[int, dict[str, int]] = collections.defaultdict(dict)
            for mode, order in (("dense", near), ("lexical", by_words)):
                for rank, row in enumerate(order.tolist(), 1):
                    ranks[row][mode] = rank
            yield Found(scores[best], rows[best], ranks)


def find_index(path: Path) -> SentenceIndex | VectorStore | None:
    """Open an index folder or the output of `diffcse embed`; return None if it is neither."""
    return SentenceIndex.load(path) if (path / INDEX_FILE).is_file() else find_store(path)


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


def check_options(mode: str, language: str = "", weight: float | None = None, storage: str = "") -> None:
    """Check options of `Searcher.build_index` before texts are encoded, which may take hours; raise `UserError`."""
    if check_mode(mode) != "dense":
        LexicalIndex(language or "english")  # this needs packages, and a language that they know
    if weight is not None and not 0 <= weight <= 1:
        raise ConfigError(f"weight={weight}: expected a number from 0 (embeddings only) to 1 (BM25 only)")
    if storage:
        check_storage(storage)


def recommended(model: str | None) -> tuple[str, float | None]:
    """Return the mode of search, and the weight of BM25, that a run recommends for the model that it exported.

    `model` is the run's folder or its export. For other models the mode is `dense`.
    """
    folder = expand_path(model or "")
    found: Mapping[str, Any] = {}
    if model and find_run(folder) == folder:
        selection = read_selection(folder)
        found = selection.search if selection else {}
    elif model and (folder / SEARCH).is_file():
        found = read_json_object(folder / SEARCH)
    if not found:
        return "dense", None
    mode, weight = found.get("mode"), found.get("weight")
    if mode not in MODES or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise CheckpointError(f"{folder / SEARCH}: expected a `mode` of {', '.join(MODES)} and a `weight` from 0 to 1")
    return mode, weight if mode == "hybrid" else None


class Searcher:
    """An encoder with an index. `SentenceEncoder` has the three methods `encode`, `record` and `split`."""

    prompts: Prompts = NO_PROMPTS
    encode: Callable[..., Any]
    record: Callable[..., EncoderRecord]
    split: Callable[..., list[Record]]
    _index: SentenceIndex | None = None

    def build_index(
        self,
        sentences: Iterable[str] | list[Record] | str | Path,
        batch_size: int = 64,
        show_progress: bool = False,
        *,
        prompt_name: str | None = None,
        mode: str = "dense",
        language: str = "",
        weight: float | None = None,
        storage: str = "float32",
        passages: bool = True,
    ) -> None:
        """Index the sentences that `search` looks through. An earlier index is replaced.

        Args:
            sentences: Any iterable of strings; the path of a file or folder, as training reads it; or a list of dicts
                with `sentence` and the same other keys, which hits repeat. A `title` is searched before each passage.
                Dicts with equal `file` and `line`, or with an equal `document`, count as passages of one document.
            batch_size, show_progress: As for `encode`.
            prompt_name: The prompt of the sentences. By default it is the model's prompt of documents.
            mode: `dense` compares embeddings, `lexical` compares words by BM25, and `hybrid` combines both.
            language: The language of BM25's stop words and stemmer, such as `german`. By default it is detected.
            weight: The weight of BM25 in hybrid scores, from 0 to 1. The default is measured (docs/records/search.md).
            storage: How embeddings are stored: `float32`, `float16`, `int8` (a quarter of the memory) or `bits` (1/32
                of the memory; int8 stays on disk and scores the best rows again).
            passages: Split texts that are longer than the model reads into overlapping passages. A search finds a text
                by its best passage. If False, such texts are truncated, with a warning.
        """
        check_options(mode, language, weight, storage)
        records = records_of(sentences, titled=passages)
        prompt = self.prompts.choose(None, prompt_name, self.prompts.document)
        table = table_of(self.split(records, prompt) if passages else records)
        vectors = record = None
        if mode != "lexical":
            options = {"normalize": True, "show_progress": show_progress, "prompt": prompt}
            vectors, record = self.encode(searched_texts(table), batch_size, **options), self.record(prompt)
        self._index = SentenceIndex.of(table, record, vectors, mode, language=language, weight=weight, storage=storage)

    @property
    def index(self) -> SentenceIndex:
        """The index that is searched. Raises `ConfigError` if there is none."""
        if self._index is None:
            raise ConfigError("there is no index to search. Call build_index(sentences) or load_index(folder) first")
        return self._index

    def save_index(self, folder: str | Path) -> None:
        """Write the index to a folder. An earlier index there is replaced; a folder with other content is refused."""
        self.index.save(expand_path(folder))

    def load_index(self, folder: str | Path) -> None:
        """Load what `save_index`, `diffcse search` or `diffcse embed` has written. Embeddings stay on disk."""
        found = find_index(expand_path(folder))
        if found is None:
            raise DataError(f"{folder} holds no index and no embeddings. Write some with save_index or `diffcse embed`")
        if found.encoder:
            found.encoder.require(self.record(found.encoder.prompt), folder)
        self._index = found if isinstance(found, SentenceIndex) else SentenceIndex.of_store(found)

    def search(
        self, queries: Sentences, top_k: int = 5, threshold: float | None = None, **options: Any
    ) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """Find the best sentences of the index. Arguments are those of `search_hits`.

        Returns:
            Pairs (sentence, score), best first: a list for one string, a list of such lists for many.
        """
        hits = self.search_hits(queries, top_k, threshold, **options)
        found = [[(hit.row[TEXT], hit.score) for hit in each] for each in hits]
        return found[0] if isinstance(queries, str) else found

    def search_hits(
        self,
        queries: Sentences,
        top_k: int = 5,
        threshold: float | None = None,
        *,
        prompt_name: str | None = None,
        mode: str = "",
    ) -> list[list[Hit]]:
        """Find the best sentences of the index, with their other columns and, in a hybrid search, their ranks by mode.

        Args:
            queries: A string, or any iterable of strings.
            top_k: The largest number of sentences for a query.
            threshold: The lowest score, a cosine similarity or, if mode is `lexical`, a BM25 score. None: any score.
                A hybrid search has no threshold.
            prompt_name: The prompt of the queries. By default it is the model's prompt of queries.
            mode: `dense`, `lexical` or `hybrid`; by default the index's. A hybrid index has all three.

        Returns:
            A list of hits for each query, best first.
        """
        texts, vectors = checked_sentences(queries), None
        if self.index.checked_mode(mode) != "lexical":
            prompt = self.index.query_prompt(self.prompts, prompt_name)
            vectors = self.encode(texts, normalize=True, prompt=prompt)
        return self.index.search(vectors, top_k, threshold, texts=texts, mode=mode)
