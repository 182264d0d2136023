"""Train the query encoder alone, so that documents keep their embeddings.

The teacher is a hybrid search with the starting checkpoint in all passages of the text. It ranks
them for passages of the training documents, which stand for queries. A linear map of their
embeddings learns these rankings, and applies to all queries afterwards. As the embeddings are
known, steps cost next to nothing. The passages are those of an index that the text names, or of one
that the run makes and keeps (`WORKDIR/passages`).
"""

import dataclasses
import itertools
import operator
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Int

from diffcse_jax import hosts, io
from diffcse_jax.batch import Batch, Ranked
from diffcse_jax.config import Config
from diffcse_jax.data.batches import Shards
from diffcse_jax.data.queries import make_query, word_frequencies
from diffcse_jax.data.sources import open_split
from diffcse_jax.data.split import Split
from diffcse_jax.documents.document import Document, Documents, Section
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.errors import ConfigError, DataError, UserError, counted
from diffcse_jax.evaluation import Encoder
from diffcse_jax.evaluation.dev import build_dev_evaluation
from diffcse_jax.evaluation.dev_texts import STS_METRICS
from diffcse_jax.evaluation.metrics import SYMMETRIC_METRICS, Metric
from diffcse_jax.hosts import log_line, report
from diffcse_jax.io import expand_path
from diffcse_jax.models.pooling import normalize
from diffcse_jax.run_folder.records import Measured
from diffcse_jax.run_folder.start import PASSAGES, open_run
from diffcse_jax.search.contents import Contents, searched_texts, whole_numbers
from diffcse_jax.search.folder import is_index
from diffcse_jax.search.fusion import combine
from diffcse_jax.search.index import Index, find_index, lexical_index
from diffcse_jax.search.lexical import best_rows, found_by_words
from diffcse_jax.search.settings import IndexSettings, Input
from diffcse_jax.search.vector_store import holds_embeddings
from diffcse_jax.training import networks
from diffcse_jax.training.callbacks import Callback
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.run import train_and_select
from diffcse_jax.training.selection import check_interpolation
from diffcse_jax.training.sharding import make_mesh, resolved, shards_of
from diffcse_jax.training.tokens import require_same_text

MOST_RANKED = 4096  # passages in a step. Of more, the best ones and a sample are ranked
MOST_AGREEMENT = 200  # queries that measure how far the rankings agree
MOST_KEPT = 16_384  # queries whose rankings are kept for the next pass (at most 268 MB)
RANKED_AT_ONCE = 32  # queries
TOP = 10  # passages of both rankings that are compared
AGREEMENT = "teacher_agreement"  # a dev metric

Rows = Int[np.ndarray, " rows"]
Vectors = Float32[np.ndarray, "queries dimension"]
Scores = Float32[np.ndarray, "queries candidates"]


def train_queries(config: Config, workdir: Path, callbacks: Sequence[Callback] = ()) -> str:
    """Train the query encoder until the last step, and resume if stopped.

    Returns:
        How the selected model compares with the starting checkpoint, as text.

    Raises:
        UserError: As for `train.train_in_folder`.
        Interrupted: A signal or a callback asked to stop. Everything is saved.
    """
    # 1. The documents, and the starting checkpoint.
    _check(config)
    mesh = make_mesh(config)
    config = resolved(config, mesh)
    split, existing = open_text(config)
    config, base, vocabulary = networks.open_start(config, mesh)
    _check_embeddings(config, base)
    check_interpolation(config, base)
    start = base.encoder(config)
    prompts = base.recorded.prompts
    if existing:
        existing.use(start)
        existing.query_prompt(prompts)
    open_run(workdir, config, base.checkpoint, base.tokenizer, None, prompts=prompts)

    # 2. The passages with the embeddings that they keep, and which of them are queries.
    documents_held_out, documents = _divided(split)
    index = existing or _index_of(documents, split.name, workdir / PASSAGES, config, start)
    contents = _with_words(index)
    is_held_out = _of_passages(documents_held_out, contents.passages, split.name)
    texts = searched_texts(contents.passages)
    text = io.json_digest([split.fingerprint(), texts])[:32]
    require_same_text(text, split.name)
    of_training, held_out = (np.flatnonzero(is_held_out == each) for each in (False, True))
    teacher = Teacher(contents, config.query_distillation.bm25)
    queries = _passages_as_queries(config, texts, of_training, teacher)
    source = RankedQueries(config, mesh, queries, teacher)

    # 3. The dev evaluation: what a run chooses by, and how far both rankings agree.
    asked = _make_queries(texts, held_out, MOST_AGREEMENT, start, config)
    agreement = TeacherAgreement.of(asked, teacher, config.eval.batch_size)
    evaluation = build_dev_evaluation(
        config, lambda: texts, lambda: start, split, others=[agreement], keeps_documents=True
    )

    # 4. Training.
    built = networks.build(config, base.checkpoint, None, vocabulary)
    return train_and_select(
        Run(
            config=config,
            workdir=workdir,
            mesh=mesh,
            base=base,
            built=built,
            optimizer=make_optimizer(config.optim, len(source)),
            source=source,
            text=text,
            unknown=float(np.mean(start.largely_unknown(texts))),
            evaluation=evaluation,
            sentences=source.texts,
            callbacks=callbacks,
        )
    )


def _check(config: Config) -> None:
    """Refuse settings that this training does not support."""
    if others := [f"{name}.weight" for name in config.losses if name != "query_distillation"]:
        raise ConfigError(
            "query_distillation trains the query encoder, and other losses train an encoder "
            f"of all texts. Set {' and '.join(others)} to 0"
        )
    if not config.data.held_out or config.data.pairs != "dropout":
        raise ConfigError(
            "query_distillation trains on whole documents, and judges by held-out ones. Set "
            "data.pairs='dropout' and data.held_out, such as 0.1"
        )
    if config.data.augmentation != "none" or config.model.projector != "none":
        raise ConfigError(
            "query_distillation trains a map of embeddings, which a projector or an "
            "augmentation would change. Set data.augmentation='none' and model.projector='none'"
        )
    if config.data.prompts:
        raise ConfigError(
            "query_distillation: documents keep their embeddings, and with them the recorded "
            "prompts. Leave data.prompts out"
        )
    if config.train.chunk_size or config.train.chunking != "off":
        raise ConfigError(
            "query_distillation trains a map of embeddings, and no batch is too large for that. "
            "Leave train.chunk_size and train.chunking out"
        )
    options = config.eval
    blind = [*SYMMETRIC_METRICS, *STS_METRICS, "pairs_spearman"]
    for key, names in {"eval.metric": (options.metric,), "eval.hold": options.hold}.items():
        if others := [name for name in names if name in blind]:
            raise ConfigError(
                f"{key}={others[0]}: query_distillation trains the query encoder, which this "
                "metric does not use. Use mixed_retrieval or lead_retrieval"
            )
    if options.max_drop:
        raise ConfigError(
            "eval.max_drop limits how similar texts are found, which query_distillation does not "
            "change. Set it to 0"
        )
    IndexSettings("hybrid").check()


def _check_embeddings(config: Config, base: StartingCheckpoint) -> None:
    """Refuse other embeddings than those that documents keep."""
    pooler = config.encoding_pooler
    if pooler == "cls" or not base.is_trained_embedding(config):
        raise ConfigError(
            f"query_distillation: documents keep the embeddings of {base.name}, so queries need "
            f"its pooler, and not {pooler}. Set model.pooler='own', or start from an encoder with "
            "another pooler than cls"
        )
    if base.recorded.truncate_dim:
        raise ConfigError(
            f"query_distillation: {base.name} cuts its embeddings to "
            f"{base.recorded.truncate_dim} dimensions, and queries can only learn to find whole "
            "ones. Take truncate_dim out of its config_sentence_transformers.json, and build "
            "indexes again"
        )


# Passages


def open_text(config: Config) -> tuple[Split, Index | None]:
    """Open the text of such a training: documents, or what holds them with their embeddings.

    That is an index or the output of `embed`.
    """
    path = expand_path(config.data.train_file)
    if not path.is_dir() or not (is_index(path) or holds_embeddings(path)):
        return open_split(config.data), None
    if config.data.columns:
        raise ConfigError(
            f"data.columns={config.data.columns}: the passages of {path} are made already. Leave "
            "data.columns out"
        )
    index = find_index(path)
    if not index.embeddings:
        raise ConfigError(
            f"{path} holds words alone, and queries learn to find embeddings. Build it again in "
            "mode dense or hybrid"
        )
    return Split(_documents_of(index), config.data.held_out), index


def _documents_of(index: Index) -> Documents:
    """Return the documents of an index. Passages in a row with one title are a section."""
    numbers = whole_numbers(index.passages["document"])

    def read(ledger: Ledger) -> Iterator[Document]:
        titles, texts = (index.passages[name].to_pylist() for name in ("title", "text"))
        passages = [*zip(titles, texts, strict=True)]
        ids = index.documents["id"].to_pylist()
        bounds = np.searchsorted(numbers, range(len(ids) + 1))
        for name, (first, end) in zip(ids, itertools.pairwise(bounds), strict=True):
            ledger.keep()
            by_title = itertools.groupby(passages[first:end], operator.itemgetter(0))
            sections = (Section(title, [text for _, text in each]) for title, each in by_title)
            yield Document(name, tuple(sections))

    def fingerprint() -> str:
        return io.json_digest([searched_texts(index.passages), numbers.tolist()])

    return Documents(index.name, read, fingerprint)


def _divided(split: Split) -> tuple[Sequence[bool], Sequence[Document]]:
    """Return which documents are held out, and all documents. Print what was read."""
    divided = [*split.all()]
    if not divided:
        raise DataError(f"{split.name}: no usable text ({split.ledger.summary()})")
    report(split.ledger)
    is_held_out, documents = zip(*divided, strict=True)
    return is_held_out, documents


def _index_of(
    documents: Sequence[Document], name: str, folder: Path, config: Config, start: SentenceEncoder
) -> Index:
    """Return an index of documents in the run folder.

    The first process makes it or, if a run resumes, only reads it.
    """

    def make() -> None:
        index = Index.of_settings(IndexSettings("hybrid"), start)
        if is_index(folder):
            try:
                index = Index.load(folder, start)
            except UserError as error:
                log_line(f"notice: {error}. The passages are encoded again.")
        before = index.documents
        index.put_input(
            Input(name), documents, batch_size=config.eval.batch_size, show_progress=True
        )
        if index.documents is not before:
            index.save(folder)

    hosts.decided_by_first(make)
    return Index.load(folder)


def _with_words(index: Index) -> Contents:
    """Return what an index holds, with the words of its passages, which it may lack."""
    contents = index.contents
    if contents.lexical or not len(contents.passages):
        return contents
    words = lexical_index(
        searched_texts(contents.passages),
        index.settings.language,
        show_progress=True,
        needs_words=True,
    )
    return dataclasses.replace(contents, lexical=words)


def _of_passages(
    is_held_out: Sequence[bool], passages: pa.Table, name: str
) -> Bool[np.ndarray, " passages"]:
    """Return which passages are of held-out documents."""
    of_passages = np.array(is_held_out)[whole_numbers(passages["document"])]
    if of_passages.all() or not of_passages.any():
        kind = "held-out" if not of_passages.any() else "training"
        raise DataError(
            f"data.train_file={name} gives no passages of {kind} documents. Give more text"
        )
    return of_passages


@dataclasses.dataclass(frozen=True)
class Queries:
    """Passages that are queries, or queries that were made of passages."""

    texts: Sequence[str]
    rows: Rows  # the passage of each
    vectors: Vectors  # of length 1, by the starting checkpoint

    def some(self, numbers: slice | Rows) -> "Queries":
        """Return some of the queries."""
        places = np.arange(len(self.texts))[numbers]
        texts = [self.texts[place] for place in places]
        return Queries(texts, self.rows[places], self.vectors[places])


def _passages_as_queries(
    config: Config, passages: Sequence[str], asked: Rows, teacher: "Teacher"
) -> Queries:
    """Return passages as queries, at most `query_distillation.passages` of them, drawn at random.

    Their embeddings are known, so that nothing is encoded.
    """
    assert teacher.contents.embeddings
    seed = [config.train.seed_of("order"), zlib.crc32(b"queries")]
    generator = np.random.Generator(np.random.Philox(seed))
    rows = generator.permutation(asked)[: config.query_distillation.passages]
    log_line(f"{len(rows):,} of {counted(len(asked), 'passage{s}')} for training are queries")
    vectors = teacher.contents.embeddings.rows(rows)
    return Queries([passages[row] for row in rows], rows, vectors)


def _make_queries(
    passages: Sequence[str], asked: Rows, count: int, start: SentenceEncoder, config: Config
) -> Queries:
    """Make queries of some passages; each passage is asked for about as often."""
    generator = np.random.Generator(np.random.Philox([0, zlib.crc32(b"queries")]))
    passes = -(-count // len(asked))
    rows = np.concatenate([generator.permutation(asked) for _ in range(passes)])[:count]
    frequencies = word_frequencies(passages)
    texts = [make_query(passages[row], frequencies, generator) for row in rows]
    vectors = start.encode_query(texts, batch_size=config.eval.batch_size, normalize=True)
    return Queries(texts, rows, vectors)


# The teacher


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A hybrid search in the passages, with this weight of BM25."""

    contents: Contents
    weight: float

    def candidates(self, queries: Queries, *seed: int) -> Rows:
        """Return the passages to rank: all, or the best ones of each query and a random sample.

        The numbers of the seed determine the sample.
        """
        total = len(self.contents.passages)
        if total <= MOST_RANKED:
            return np.arange(total)
        assert self.contents.embeddings
        depth = max(1, MOST_RANKED // (4 * len(queries.texts)))
        near = self.contents.embeddings.nearest(queries.vectors, depth)[1]
        by_words = (
            found_by_words(self.contents.word_scores(text), depth) for text in queries.texts
        )
        best = np.unique(np.concatenate([*near, *by_words]))[:MOST_RANKED]
        generator = np.random.Generator(np.random.Philox([*seed, zlib.crc32(b"candidates")]))
        sampled = generator.permutation(total)[:MOST_RANKED]
        others = sampled[~np.isin(sampled, best)][: MOST_RANKED - len(best)]
        return np.sort(np.concatenate([best, others]))

    def spread(self, vectors: Vectors) -> Float32[np.ndarray, " queries"]:
        """Return the standard deviation of each query's cosine similarities, at least 1e-6."""
        return np.maximum((vectors @ self.contents.sample.T).std(axis=1), 1e-6)

    def scores(self, queries: Queries, candidates: Rows) -> Scores:
        """Return the scores of a hybrid search, and -inf for the query's own passage."""
        assert self.contents.embeddings
        cosines = queries.vectors @ self.contents.embeddings.rows(candidates).T
        sampled = queries.vectors @ self.contents.sample.T
        scores = np.empty(cosines.shape, np.float32)
        for number, text in enumerate(queries.texts):
            lexical = self.contents.word_scores(text)
            scores[number] = combine(
                cosines[number], lexical[candidates], self.weight, sampled[number], lexical
            )
        scores[queries.rows[:, None] == candidates] = -np.inf
        return scores


class RankedQueries:
    """Random access to batches of queries, with the passages that the teacher ranks for them.

    Queries are in groups of the size of a batch. In each pass, each group is a batch once. Rankings
    are kept for the next pass.
    """

    def __init__(self, config: Config, mesh: Mesh, queries: Queries, teacher: Teacher):
        self._queries, self._teacher = queries, teacher
        self._seed = config.train.seed_of("order")
        self._shards: Shards = shards_of(mesh)
        size = config.train.batch_size
        count = -(-len(queries.texts) // size)
        order = self._generator("groups").permutation(len(queries.texts))
        # The last group is filled with the first queries.
        self._groups = np.resize(order, (count, size))
        self._steps = config.train.steps or config.train.epochs * count
        self._ranked = lru_cache(maxsize=MOST_KEPT // size)(self._rank)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Batch:
        group = self._group(index)
        queries = self._queries.some(self._groups[group])
        candidates, scores = self._ranked(group)
        assert self._teacher.contents.embeddings
        passages = self._teacher.contents.embeddings.rows(candidates)
        # Each device holds as many passages.
        missing = -len(passages) % self._shards.total
        passages = np.pad(passages, ((0, missing), (0, 0)))
        scores = np.pad(scores, ((0, 0), (0, missing)), constant_values=-np.inf)
        own = self._shards.of(len(scores))
        spread = self._teacher.spread(queries.vectors)
        ranked = Ranked(
            queries.vectors[own],
            passages[self._shards.of(len(passages))],
            scores[own],
            spread[own],
        )
        return Batch(ranked=ranked)

    def texts(self, step: int) -> list[str]:
        """Return this process's queries of a step, counting from 1."""
        numbers = self._groups[self._group(step - 1)]
        return list(self._queries.some(numbers[self._shards.of(len(numbers))]).texts)

    def _rank(self, group: int) -> tuple[Rows, Scores]:
        """Return the passages that the teacher ranks for a group of queries, and its scores."""
        queries = self._queries.some(self._groups[group])
        candidates = self._teacher.candidates(queries, self._seed, group)
        return candidates, self._teacher.scores(queries, candidates)

    def _group(self, index: int) -> int:
        """Return the group of a step, counting from 0."""
        number, place = divmod(index, len(self._groups))
        return int(self._generator("pass", number).permutation(len(self._groups))[place])

    def _generator(self, purpose: str, *number: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox([self._seed, zlib.crc32(purpose.encode()), *number])
        )


@dataclasses.dataclass(frozen=True)
class TeacherAgreement(Metric[Encoder]):
    """The share of the teacher's ten best passages that are among the encoder's, x 100."""

    queries: Queries
    best: Int[np.ndarray, "queries best"]  # of the teacher
    contents: Contents

    @classmethod
    def of(cls, queries: Queries, teacher: Teacher, batch_size: int) -> "TeacherAgreement":
        """Return the metric for queries."""
        best = []
        for first in range(0, len(queries.texts), RANKED_AT_ONCE):
            some = queries.some(slice(first, first + RANKED_AT_ONCE))
            candidates = teacher.candidates(some, 0)
            scores = teacher.scores(some, candidates)
            count = min(TOP, len(candidates) - 1)  # without the query's own passage
            best += [candidates[best_rows(row, count)] for row in scores]
        return cls(AGREEMENT, batch_size, queries, np.stack(best), teacher.contents)

    def measure(self, model: Encoder) -> Measured:
        encoder = model.queries or model
        vectors = normalize(
            encoder.encode(
                self.queries.texts, batch_size=self.batch_size, prompt=model.prompts.query
            )
        )
        assert self.contents.embeddings
        found = self.contents.embeddings.nearest(vectors, TOP + 1)[1]
        shares = []
        for rows, own, best in zip(found, self.queries.rows, self.best, strict=True):
            others = rows[rows != own][:TOP]
            shares.append(100 * float(np.isin(best, others).mean()))
        return Measured({self.name: float(np.mean(shares))}, [shares])
