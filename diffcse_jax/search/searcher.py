"""What an encoder does with an index: build, save, load and search it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.io import expand_path, find_run, read_json_object
from diffcse_jax.models.prompts import NO_PROMPTS, Prompts
from diffcse_jax.run_folder.records import SEARCH, read_selection
from diffcse_jax.search.index import MODES, Hit, SentenceIndex, check_mode, find_index
from diffcse_jax.search.records import (
    TEXT,
    Record,
    Sentences,
    checked_records,
    checked_sentences,
    read_records,
    searched_texts,
    table_of,
)
from diffcse_jax.search.vector_store import EncoderRecord


def recommended(model: str | None) -> tuple[str, float | None]:
    """Return the mode of search, and the weight of BM25, that a run recommends for the model that it exported.

    `model` is the run's folder or its export. For other models the mode is `dense`.
    """
    folder = expand_path(model or "")
    found: Mapping[str, Any] = {}
    if model and (workdir := find_run(folder)) == folder:
        found = selection.search if (selection := read_selection(workdir)) else {}
    elif model and (folder / SEARCH).is_file():
        found = read_json_object(folder / SEARCH)
    if not found:
        return "dense", None
    mode, weight = found.get("mode"), found.get("weight")
    if mode not in MODES or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise CheckpointError(f"{folder / SEARCH}: expected a `mode` of {', '.join(MODES)} and a `weight` from 0 to 1")
    return mode, weight if mode == "hybrid" else None


class Searcher:
    """An encoder with an index. `SentenceEncoder` has the three methods."""

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
        """Index the sentences that `search` will look through; an earlier index is replaced.

        Args:
            sentences: Any iterable of strings; the path of a file or folder, as training reads it; or a list of dicts
                with `sentence` and the same other keys, which hits repeat. A `title` is searched before each passage.
            batch_size, show_progress: As for `encode`.
            prompt_name: The prompt of the sentences. By default it is the model's prompt of documents.
            mode: `dense` compares embeddings, `lexical` compares words by BM25, and `hybrid` combines both.
            language: The language of BM25's stop words and stemmer, such as `german`; by default it is detected.
            weight: The weight of BM25 in hybrid scores, from 0 to 1; the default is measured (docs/records/search.md).
            storage: How embeddings are stored: `float32`, `float16`, `int8` (a quarter of the memory) or `bits` (a 32nd
                of it, next to int8 on disk, with which the best are scored again).
            passages: Split texts that are longer than the model reads into overlapping passages; a search finds a text
                by its best passage. If False, such texts are truncated, with a warning.
        """
        check_mode(mode)
        if isinstance(sentences, str | Path):
            records: Sequence[Record] = [*read_records(sentences, "build_index", titled=passages)]
        elif isinstance(sentences, list) and sentences and isinstance(sentences[0], Mapping):
            records = checked_records(sentences)
        else:
            records = [{TEXT: text} for text in checked_sentences(sentences)]
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
        """Write the index to a folder; an earlier index there is replaced, other content is refused."""
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
        """Find the best sentences of the index, with their places and the half of a hybrid search that found them.

        Args:
            queries: A string, or any iterable of strings.
            top_k: The largest number of sentences for a query.
            threshold: The least score; None for any. It is a cosine similarity, or a BM25 score if mode is `lexical`.
                Hybrid scores have no threshold.
            prompt_name: The prompt of the queries. By default it is the model's prompt of queries.
            mode: `dense`, `lexical` or `hybrid`. By default that of the index; a hybrid index has all three.

        Returns:
            A list of hits for each query, best first.
        """
        texts, vectors = checked_sentences(queries), None
        if self.index.checked_mode(mode) != "lexical":
            prompt = self.index.query_prompt(self.prompts, prompt_name)
            vectors = self.encode(texts, normalize=True, prompt=prompt)
        return self.index.search(vectors, top_k, threshold, texts=texts, mode=mode)
