"""An index: documents that are found by the embeddings of their passages, their words, or both.

`Index(encoder, texts)` builds one. It can be changed, saved, loaded and searched. What it holds at
one moment is a `Contents`, which never changes, so that searches may run beside a change.
"""

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from diffcse_jax.documents.document import Document, Documents
from diffcse_jax.documents.ids import as_id
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.memory import documents_in_memory
from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.errors import ConfigError, DataError, counted, shown, warn_user
from diffcse_jax.hosts import Progress, log_line, report
from diffcse_jax.io import expand_path
from diffcse_jax.models.foreign_text import foreign_texts
from diffcse_jax.models.sentence_folder import Prompts
from diffcse_jax.models.unread import added_up
from diffcse_jax.search.changes import Changes, How, UpdatePlan, passages_after, plan, without
from diffcse_jax.search.contents import (
    Contents,
    documents_table,
    searched_texts,
    with_sources_of,
)
from diffcse_jax.search.embeddings import Queries, StoredEmbeddings, Vectors, aligned
from diffcse_jax.search.folder import (
    Stored,
    Writer,
    is_index,
    read_index,
    require_ended,
    writing,
)
from diffcse_jax.search.hits import Hits
from diffcse_jax.search.lexical import LexicalIndex, NoWordsError
from diffcse_jax.search.modes import DEFAULT_WEIGHT
from diffcse_jax.search.passages import Passage, passages_of
from diffcse_jax.search.ranking import Request, rank
from diffcse_jax.search.reading import count_documents, read_source
from diffcse_jax.search.settings import IndexSettings, Input, check_mode, input_of, is_number
from diffcse_jax.search.texts import checked_sentences
from diffcse_jax.search.vector_store import EncoderRecord, VectorStore, find_store
from diffcse_jax.search.words import choose_language

ENCODED_AT_ONCE = 1024  # passages; then the progress is reported


class Reading(NamedTuple):
    """Documents that were read, and the ids of rows whose text is empty now."""

    documents: Sequence[Document]
    removed: frozenset[str] = frozenset()


@runtime_checkable
class Encoder(Protocol):
    """What an index needs of `SentenceEncoder`."""

    name: str
    prompts: Prompts
    languages: tuple[str, ...]  # that its card states

    @property
    def encode_document(self) -> Callable[..., Any]: ...

    @property
    def encode_query(self) -> Callable[..., Any]: ...

    def split(self, passages: Sequence[Passage], prompt: str = "") -> list[Passage]: ...

    def record(self, prompt: str = "") -> EncoderRecord: ...

    def largely_unknown(self, texts: Sequence[str]) -> list[bool]: ...


class Index:
    """Documents that can be searched.

    Texts are strings, dicts, the rows of a table (pandas, polars, pyarrow, datasets), or the path
    of a file or folder. A dict has a `text` or `sentence`, and perhaps a `title`; its other keys
    are columns, which hits repeat. Its id is the column that `id_column` names, or else `_id` or
    `id`; a text without an id gets a number. Rows with the same id are one document: a search finds
    it by its best passage.

    Several threads may search an index, also while one of them changes it.

    Args:
        encoder: Computes embeddings. With mode `lexical`, none is needed.
        texts: The documents.
        mode: `dense` compares embeddings, `lexical` compares words by BM25, and `hybrid` combines
            both.
        language: The language of BM25's stop words and stemmer, such as `german`, or `none` for
            neither; by default the language of most texts, or `none` if it is unclear.
        weight: The weight of BM25 in hybrid scores, from 0 to 1. The default is measured
            (docs/records/search.md).
        storage: How embeddings are stored: `float32`, `float16`, `int8` (a quarter of the memory)
            or `bits` (1/32 of the memory; int8 stays on disk and scores the best rows again).
        passages: Split texts that are longer than the model reads into overlapping passages. If
            False, such texts are truncated, with a warning.
        id_column: The column that identifies documents.
        prompt_name: The prompt of the texts. By default it is the model's prompt of documents.
        batch_size: As for `SentenceEncoder.encode`.
        show_progress: Report what was read and how long encoding takes.
        strict: Raise `DataError` if a file is not read or a text is left out, instead of warning.
    """

    def __init__(
        self,
        encoder: Encoder | None = None,
        texts: Any = (),
        *,
        mode: str = "dense",
        language: str = "",
        weight: float | None = None,
        storage: str = "float32",
        passages: bool = True,
        id_column: str = "",
        prompt_name: str | None = None,
        batch_size: int = 64,
        show_progress: bool = False,
        strict: bool = False,
    ):
        if encoder is not None:
            _check_encoder(encoder)
        weight = DEFAULT_WEIGHT if weight is None else weight
        # Of types that can be stored as JSON and read again.
        self.settings = IndexSettings(
            mode,
            language or "",
            float(weight) if is_number(weight) else weight,
            storage,
            bool(passages),
            id_column or "",
        )
        self.settings.check()
        self._start(_empty(self.settings, encoder, prompt_name), encoder)
        self.add(texts, batch_size=batch_size, show_progress=show_progress, strict=strict)

    @classmethod
    def of_settings(cls, settings: IndexSettings, encoder: Encoder | None) -> "Index":
        """Return an empty index."""
        return cls.of(_empty(settings, encoder), encoder)

    @classmethod
    def of(cls, stored: Stored, encoder: Encoder | None = None, name: str = "the index") -> "Index":
        """Return an index with contents that exist already. Errors call it `name`."""
        index = cls.__new__(cls)
        index._start(stored, encoder, name)
        return index

    @classmethod
    def of_store(cls, store: VectorStore, settings: IndexSettings) -> "Index":
        """Return an index of the output of `embed`, whose embeddings are copied if needed."""
        settings.check()
        documents, passages = store.tables()
        embeddings = lexical = record = None
        if settings.mode != "lexical":
            embeddings = StoredEmbeddings.of(store.mapped(), settings.storage)
            record = store.encoder
        if settings.mode != "dense" and len(passages):
            lexical = lexical_index(
                searched_texts(passages),
                settings.language,
                show_progress=True,
                needs_words=settings.mode == "lexical",
            )
        contents = Contents(documents, passages, embeddings, lexical)
        inputs = (input_of(store.folder),)
        return cls.of(Stored(settings, contents, record, inputs), name=str(store.folder))

    def _start(self, stored: Stored, encoder: Encoder | None, name: str = "the index") -> None:
        self.settings = stored.settings
        self.record = stored.encoder  # None if there are no embeddings
        self.inputs = stored.inputs
        self.name = name
        self._contents = stored.contents
        self._encoder = encoder
        self._changing = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))  # at once: see `_put`
        del state["_changing"]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _changing=threading.RLock())

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(set(self._contents.ids))

    def __repr__(self) -> str:
        made_by = f", encoder={self.record.model!r}" if self.record else ""
        return f"Index({len(self):,} documents, mode={self.settings.mode!r}{made_by})"

    @property
    def mode(self) -> str:
        return self.settings.mode

    @property
    def contents(self) -> Contents:
        """What the index holds now."""
        return self._contents

    @property
    def documents(self) -> pa.Table:
        """The documents: `id`, `file`, `row`, `columns` (as JSON) and internal columns."""
        return self._contents.documents

    @property
    def passages(self) -> pa.Table:
        """The passages: the row of their `document`, `title`, `text` and `start`."""
        return self._contents.passages

    @property
    def embeddings(self) -> StoredEmbeddings | None:
        """The embeddings of the passages, in the same order."""
        return self._contents.embeddings

    @property
    def lexical(self) -> LexicalIndex | None:
        """The words of the passages, for BM25."""
        return self._contents.lexical

    # Changes

    def add(
        self, texts: Any, *, batch_size: int = 64, show_progress: bool = False, strict: bool = False
    ) -> Changes:
        """Add documents. Raises `DataError` if the index already has one of their ids."""
        with self._changing:
            # Texts without ids are numbered on. Longer numbers are codes, and may have thousands of
            # digits, which Python refuses to read.
            numbers = [int(key) for key in self._contents.ids if key.isdecimal() and len(key) < 16]
            origin = self._origin_of(texts)
            source = self._open(texts, origin, first=max(numbers, default=-1) + 1)
            reading = _read(source, show_progress=show_progress, strict=strict)
            return self._put(origin, reading, "add", batch_size, show_progress=show_progress)

    def update(
        self, texts: Any, *, batch_size: int = 64, show_progress: bool = False, strict: bool = False
    ) -> Changes:
        """Add documents, and replace those with the same ids. Only what has changed is encoded.

        If the text of a row is now empty, its document is removed. Texts without ids are numbered
        from 0. Beside texts with ids, they are new documents.
        """
        with self._changing:
            origin = self._origin_of(texts)
            source = self._open(texts, origin, taken=self._contents.ids)
            reading = _read(source, show_progress=show_progress, strict=strict)
            return self._put(origin, reading, "update", batch_size, show_progress=show_progress)

    def remove(self, ids: Any) -> Changes:
        """Remove documents by an id or several. Raises `DataError` if one is not there.

        Ids become text as in `add` and `update`, so that 7 is the document of `{"id": 7}`.
        """
        is_one = isinstance(ids, str | bytes) or not isinstance(ids, Iterable)
        keys = [as_id(each) or shown(each) for each in ([ids] if is_one else ids)]
        with self._changing:
            documents = self._contents.documents
            gone = without(documents, keys)
            self._contents = self._after(gone, documents.slice(0, 0), [], show_progress=False)
            return gone.changes

    def put_input(
        self,
        origin: Input,
        documents: Sequence[Document],
        *,
        batch_size: int = 64,
        show_progress: bool = False,
    ) -> Changes:
        """Bring the documents of an input up to date. Those of other inputs stay."""
        reading = Reading(documents)
        with self._changing:
            return self._put(origin, reading, "replace", batch_size, show_progress=show_progress)

    def _origin_of(self, texts: Any) -> Input:
        """Return how an input was recorded when it was read before, or how it will be recorded."""
        new = input_of(texts, self.settings.id_column)
        return next((each for each in self.inputs if each.name == new.name), new)

    def _put(
        self,
        origin: Input,
        reading: Reading,
        how: How,
        batch_size: int,
        *,
        show_progress: bool,
    ) -> Changes:
        """Add, update or replace documents, and record their input once that has succeeded."""
        check_count("batch_size", batch_size)
        names = [each.name for each in self.inputs]
        number = names.index(origin.name) if origin.name in names else len(names)
        old = self._contents.documents
        table = documents_table(reading.documents, number)
        planned = plan(old, table, how, number, reading.removed)
        if how == "update":  # so that an input can still be read again
            table = with_sources_of(table, old)
        new = [reading.documents[row] for row in planned.new_rows]
        made = self._passages_of(new, batch_size, show_progress=show_progress)
        contents = self._after(planned, table, *made, show_progress=show_progress)
        # Another thread may write the index between these. An input without documents does no harm.
        if number == len(names) and number in table["source"].to_pylist():
            self.inputs = (*self.inputs, origin)
        self._contents = contents
        return planned.changes

    def _open(
        self, texts: Any, origin: Input, first: int = 0, taken: Collection[str] = ()
    ) -> Documents:
        if isinstance(texts, str | Path):
            return open_documents_to_search(
                str(texts),
                "texts (a string is a path)",
                columns=origin.columns,
                id_column=origin.id_column,
                follow_links=origin.follow_links,
            )
        return documents_in_memory(texts, id_column=origin.id_column, first=first, taken=taken)

    def _passages_of(
        self, documents: Sequence[Document], batch_size: int, *, show_progress: bool
    ) -> tuple[list[Passage], Vectors | None]:
        """Return the passages of documents, numbered from 0, and their embeddings if there are any.

        An encoder splits passages that are longer than it reads.
        """
        passages: list[Passage] = []
        for number, document in enumerate(documents):
            passages += passages_of(document, number)
        if not self.record:
            return passages, None
        if self.settings.passages:
            passages = self._require_encoder().split(passages, self.record.prompt)
        texts = [passage.searched for passage in passages]
        return passages, self._encoded(texts, batch_size, show_progress=show_progress)

    def _encoded(self, texts: Sequence[str], batch_size: int, *, show_progress: bool) -> Vectors:
        """Return the embeddings of the texts of passages."""
        assert self.record
        encoder = self._require_encoder()
        prompt = encoder.prompts.or_warned(self.record.prompt)
        vectors = aligned((len(texts), self.record.dimension), np.float32)
        if warning := foreign_texts(encoder.name, encoder.languages, texts):
            warn_user(warning)
        if texts and show_progress:
            log_line(f"encoding {counted(len(texts), 'passage{s}')} with {encoder.name}")
        progress = Progress("encoding", "passages", len(texts), quiet=not show_progress)
        with added_up(), progress:
            for start in range(0, len(texts), ENCODED_AT_ONCE):
                some = texts[start : start + ENCODED_AT_ONCE]
                vectors[start : start + len(some)] = encoder.encode_document(
                    some, batch_size=batch_size, normalize=True, prompt=prompt
                )
                progress.update(len(some))
        return vectors

    def _after(
        self,
        planned: UpdatePlan,
        new: pa.Table,
        passages: Sequence[Passage],
        vectors: Vectors | None = None,
        *,
        show_progress: bool,
    ) -> Contents:
        """Return the contents after a change; the same ones if nothing changes."""
        old = self._contents
        documents = pa.concat_tables([old.documents, new]).take(planned.order).combine_chunks()
        if documents.equals(old.documents):
            return old
        order, table = passages_after(planned, old, passages)
        embeddings = old.embeddings
        lexical = None
        if embeddings:
            none = np.zeros((0, embeddings.dimension), np.float32)
            embeddings = embeddings.updated(order, none if vectors is None else vectors)
        if self.mode != "dense" and len(table):
            texts = searched_texts(table)
            # An index of words alone would find nothing. Later, the last words may be removed.
            is_useless = self.mode == "lexical" and not len(old.documents)
            lexical = lexical_index(
                texts,
                self.settings.language,
                show_progress=show_progress,
                needs_words=is_useless,
            )
        return Contents(documents, table, embeddings, lexical)

    # Search

    def search(
        self,
        queries: str | Iterable[str],
        top_k: int = 5,
        threshold: float | None = None,
        *,
        prompt_name: str | None = None,
        mode: str = "",
    ) -> list[Hits]:
        """Find the best documents for each query, best first.

        Args:
            queries: A string, or any iterable of strings.
            top_k: The largest number of documents for a query.
            threshold: The lowest score, a cosine similarity or, if mode is `lexical`, a BM25 score.
                None: any score. A hybrid search has no threshold.
            prompt_name: The prompt of the queries. By default it is the model's prompt of queries.
            mode: `dense`, `lexical` or `hybrid`; by default the index's. A hybrid index has all
                three.

        Returns:
            The hits of each query. Documents with equal scores are in the order of the index.

        Raises:
            UserError: A query is not text or is blank, or an option cannot be used.
        """
        texts = checked_sentences(queries)
        for number, text in enumerate(texts, 1):
            if not text.strip():
                raise DataError(f"query {number} is empty. Give a text to search for")
        vectors = None
        if self.checked_mode(mode) != "lexical":
            encoder = self._require_encoder()
            prompt = self.query_prompt(encoder.prompts, prompt_name)
            vectors = encoder.encode_query(
                texts, normalize=True, prompt=encoder.prompts.or_warned(prompt)
            )
        return self.rank(texts, vectors, top_k, threshold, mode=mode)

    def rank(
        self,
        texts: Sequence[str],
        vectors: Queries | None,
        top_k: int,
        threshold: float | None = None,
        *,
        mode: str = "",
    ) -> list[Hits]:
        """Find the best documents for queries with these embeddings, of length 1; see `search`.

        `lexical` needs no embeddings.
        """
        mode = self.checked_mode(mode)
        unknown: frozenset[str] = frozenset()
        if mode == "hybrid" and self._encoder:
            unknown = frozenset(itertools.compress(texts, self._encoder.largely_unknown(texts)))
        request = Request(texts, vectors, mode, check_count("top_k", top_k), threshold, unknown)
        return rank(self._contents, request, self.settings.weight)

    def checked_mode(self, mode: str = "") -> str:
        """Return the mode of a search, by default the index's; refuse one that it lacks."""
        if check_mode(mode or self.mode) != self.mode and self.mode != "hybrid":
            raise ConfigError(
                f"{self.name} was built in mode {self.mode} and cannot be searched in mode {mode}. "
                f"Search in mode {self.mode}, or build it again (--replace) in mode hybrid, which "
                "has all modes"
            )
        return mode or self.mode

    def query_prompt(self, prompts: Prompts, prompt_name: str | None = None) -> str:
        """Return an encoder's prompt of queries; refuse it if the texts have another one."""
        prompt = prompts.choose(None, prompt_name, prompts.query)
        if self.record and self.record.prompt not in (prompt, prompts.document):
            raise ConfigError(
                f"{self.name} holds texts with the prompt {self.record.prompt!r}, but the model's "
                f"prompt of documents is {prompts.document!r}. Build the index again, or search it "
                "with the same prompt (prompt_name)"
            )
        return prompt

    def use(self, encoder: Encoder) -> None:
        """Encode with this encoder; raise `ConfigError` if the embeddings are of another one."""
        _check_encoder(encoder)
        if self.record:
            self.record.require(encoder.record(self.record.prompt), self.name)
        self._encoder = encoder

    def _require_encoder(self) -> Encoder:
        if self._encoder is None:
            raise ConfigError(
                f"{self.name} compares embeddings, and it was given no encoder. Call use(encoder), "
                "or search with mode='lexical'"
            )
        return self._encoder

    # Files

    def save(self, folder: str | Path) -> None:
        """Write the index to a folder, and replace an earlier index there at once.

        Readers find the old index or the new one. A folder with other content and without an index
        is refused; files that are not of the index stay. If another process is writing, this waits.
        """
        with writing(expand_path(folder), wait=True) as writer:
            self.write(writer)

    def write(self, writer: Writer) -> None:
        """Write the index to a folder that this process has locked."""
        writer.write(Stored(self.settings, self._contents, self.record, self.inputs))

    @classmethod
    def load(cls, folder: str | Path, encoder: Encoder | None = None) -> "Index":
        """Load an index folder after comparing its checksums. Its files are mapped into memory.

        Args:
            folder: What `save` or `diffcse search` has written.
            encoder: Encodes queries. It must be the one that the index was built with. Without one,
                only words can be searched, until `use` is called.
        """
        path = expand_path(folder)
        if not is_index(path):
            raise DataError(
                f"{path} is not an index. Write one with `save` or `diffcse search --output`"
            )
        index = cls.of(read_index(path), name=str(path))
        if encoder is not None:
            index.use(encoder)
        return index


def _check_encoder(encoder: Any) -> None:
    """Raise `ConfigError` for what cannot encode, such as the name of a model."""
    if isinstance(encoder, str | Path):
        name = str(encoder)
        raise ConfigError(
            f"encoder={name!r}: load it with SentenceEncoder.from_pretrained({name!r})"
        )
    if not isinstance(encoder, Encoder):
        raise ConfigError(f"encoder={encoder!r:.60}: expected a SentenceEncoder")


def _empty(
    settings: IndexSettings, encoder: Encoder | None, prompt_name: str | None = None
) -> Stored:
    """Return an index without documents."""
    if settings.mode == "lexical":
        return Stored(settings, Contents())
    if encoder is None:
        raise ConfigError(
            f"mode={settings.mode!r} needs an encoder. Give one, or use mode='lexical'"
        )
    record = encoder.record(encoder.prompts.choose(None, prompt_name, encoder.prompts.document))
    none = np.zeros((0, record.dimension), np.float32)
    return Stored(
        settings, Contents(embeddings=StoredEmbeddings.of(none, settings.storage)), record
    )


def find_index(path: Path, encoder: Encoder | None = None) -> Index:
    """Open an index folder or the output of `diffcse embed`; raise `DataError` if it is neither."""
    if is_index(path):
        return Index.load(path, encoder)
    require_ended(path)
    store = find_store(path)
    if store is None:
        raise DataError(
            f"{path} holds no index and no embeddings. Write some with save_index or `diffcse "
            "embed`"
        )
    index = Index.of_store(store, IndexSettings())
    if encoder:
        index.use(encoder)
    return index


def _read(source: Documents, *, show_progress: bool, strict: bool) -> Reading:
    """Return the documents of a source, and say what was read, or warn of what was not."""
    ledger = Ledger(source.name, strict=strict)
    documents = list(read_source(source, ledger))
    count_documents(documents, ledger)
    if show_progress:
        report(ledger)
    elif ledger.has_losses:
        warn_user(ledger.summary())
    return Reading(documents, frozenset(ledger.emptied))


def lexical_index(
    texts: Sequence[str], language: str, *, show_progress: bool, needs_words: bool = False
) -> LexicalIndex | None:
    """Count the words of texts, and say in which language they are read, unless it was named.

    If no text has a word, `DataError` is raised if `needs_words`, and None returned otherwise.
    """
    choice = None if language else choose_language(texts)
    try:
        lexical = LexicalIndex.build(texts, choice.language if choice else language)
    except NoWordsError:
        if needs_words:
            raise
        if show_progress:
            log_line("notice: no text has a word that BM25 could count")
        return None
    if choice and show_progress:
        log_line(f"BM25: {choice}")
    return lexical


def check_count(name: str, value: Any) -> int:
    """Return a whole number that is at least 1; raise `ConfigError` for anything else."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and operator.index(value) >= 1:
            return operator.index(value)
    raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")
