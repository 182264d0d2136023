"""What an index holds at one moment: documents, passages, embeddings and words. It never changes.

Documents and passages are tables. A passage carries the number of its document: the row in the
table of documents. Rows with the same id are one document, of which a search returns the best
passage.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int

from diffcse_jax.documents.document import Document
from diffcse_jax.documents.text.encodings import readable
from diffcse_jax.search.embeddings import StoredEmbeddings
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.passages import PASSAGE_RULES, Passage

SAMPLE_ROWS = 1024  # at most so many, evenly spaced, standardise the cosine similarities of a query
TYPICAL_ROWS = 64  # whose nearest passages show which similarity is high
NEAREST = 16  # among which one of another document is looked for
LEAST_SPREAD = 0.01  # between cosines that are usual and high, or else no passage is near or far

DOCUMENTS = pa.schema(
    [
        ("id", pa.large_string()),
        ("file", pa.large_string()),
        ("row", pa.int64()),
        ("source", pa.int32()),  # the number of the input
        ("digest", pa.binary(16)),  # of what the passages are made of
        ("columns", pa.large_string()),  # the other columns as JSON
    ]
)
PASSAGES = pa.schema(
    [
        ("document", pa.int64()),
        ("title", pa.large_string()),
        ("text", pa.large_string()),
        ("start", pa.int64()),
    ]
)


class Typical(NamedTuple):
    """Cosine similarities among the passages of an index."""

    pairs: float = 0.0  # the mean of two passages of different documents
    nearest: float = 1.0  # the median of a passage and the nearest one of another document


@dataclasses.dataclass(frozen=True, eq=False)
class Contents:
    """Documents and passages, with their embeddings, their words or both."""

    documents: pa.Table = dataclasses.field(default_factory=DOCUMENTS.empty_table)
    passages: pa.Table = dataclasses.field(default_factory=PASSAGES.empty_table)
    embeddings: StoredEmbeddings | None = None
    lexical: LexicalIndex | None = None  # also None if no passage has a word
    known_typical: Typical | None = None

    @functools.cached_property
    def ids(self) -> list[str]:
        """The ids of the documents."""
        return self.documents["id"].to_pylist()

    @functools.cached_property
    def document_of(self) -> Int[np.ndarray, " passages"]:
        """The document of each passage: the first row with the same id."""
        firsts: dict[str, int] = {}
        same = np.array([firsts.setdefault(key, row) for row, key in enumerate(self.ids)], np.int64)
        return same[whole_numbers(self.passages["document"])] if len(same) else same

    @functools.cached_property
    def sample(self) -> Float32[np.ndarray, "sample dimension"]:
        """Embeddings of passages, evenly spaced."""
        assert self.embeddings
        return self.embeddings.rows(self._spaced(SAMPLE_ROWS))

    @functools.cached_property
    def typical(self) -> Typical:
        """Which similarities are usual among the passages, and which ones are high."""
        if self.known_typical:
            return self.known_typical
        if not self.embeddings or len(self.documents) < 2:
            return Typical()
        # All pairs, without those of the same document: a long one may have most passages.
        sample = self.sample
        documents = self.document_of[self._spaced(SAMPLE_ROWS)]
        _, group, counts = np.unique(documents, return_inverse=True, return_counts=True)
        sums = np.zeros((len(counts), sample.shape[1]), np.float32)
        np.add.at(sums, group, sample)
        total = sums.sum(axis=0)
        products = float(total @ total - np.einsum("gd,gd->", sums, sums))
        pairs = products / max(1, len(sample) ** 2 - int(np.square(counts).sum()))
        rows = self._spaced(TYPICAL_ROWS)
        scores, neighbours = self.embeddings.nearest(self.embeddings.rows(rows), NEAREST)
        is_other = self.document_of[neighbours] != self.document_of[rows][:, None]
        nearest = scores[is_other.any(axis=1), is_other.argmax(axis=1)[is_other.any(axis=1)]]
        return Typical(pairs, float(np.median(nearest)) if len(nearest) else 1.0)

    def _spaced(self, count: int) -> Int[np.ndarray, " rows"]:
        return np.arange(0, len(self.passages), max(1, -(-len(self.passages) // count)))

    def closeness(self, cosine: float) -> float | None:
        """Return how close a query's best passage is: 0 is usual for two passages.

        Return None if most documents are alike, so that no passages are near or far.
        """
        pairs, nearest = self.typical
        return (cosine - pairs) / (nearest - pairs) if nearest - pairs > LEAST_SPREAD else None

    def word_scores(self, text: str) -> Float32[np.ndarray, " passages"]:
        """Return the BM25 score of each passage."""
        return (
            self.lexical.scores(text) if self.lexical else np.zeros(len(self.passages), np.float32)
        )

    def firsts(self, rows: Int[np.ndarray, " k"]) -> Int[np.ndarray, " documents"]:
        """Return the places of each document's first passage among ranked rows, in order."""
        return np.sort(np.unique(self.document_of[rows], return_index=True)[1])

    def row(self, number: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return a passage and its document."""
        (passage,) = self.passages.slice(number, 1).to_pylist()
        (document,) = self.documents.slice(passage["document"], 1).to_pylist()
        return passage, document


# Tables


def whole_numbers(column: pa.ChunkedArray) -> Int[np.ndarray, " rows"]:
    """Return a column of int64 without missing values.

    Its `to_numpy` would import pandas, which takes a second.
    """
    chunks = [np.from_dlpack(chunk) for chunk in column.chunks]
    return np.concatenate([np.zeros(0, np.int64), *chunks])


def documents_table(documents: Iterable[Document], input_number: int) -> pa.Table:
    """Return documents of an input as a table."""
    rows = [
        (
            readable(document.id),
            readable(document.place.file),
            document.place.row,
            input_number,
            digest_of(document),
            document.columns,
        )
        for document in documents
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(DOCUMENTS)
    arrays = [pa.array(values, kind) for values, kind in zip(columns, DOCUMENTS.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=DOCUMENTS)


def with_sources_of(new: pa.Table, old: pa.Table) -> pa.Table:
    """Return new documents, each with the input of the old document that has its id."""
    sources = dict(zip(old["id"].to_pylist(), old["source"].to_pylist(), strict=True))
    pairs = zip(new["id"].to_pylist(), new["source"].to_pylist(), strict=True)
    field = DOCUMENTS.field("source")
    column = pa.array([sources.get(key, source) for key, source in pairs], field.type)
    return new.set_column(DOCUMENTS.get_field_index(field.name), field, column)


def passages_table(passages: Sequence[Passage]) -> pa.Table:
    """Return passages as a table."""
    columns = {name: [getattr(each, name) for each in passages] for name in PASSAGES.names}
    return pa.table(columns, schema=PASSAGES)


def searched_texts(passages: pa.Table) -> list[str]:
    """Return what BM25 reads: passages after their titles."""
    columns = (passages[name].to_pylist() for name in ("title", "text"))
    return [Passage(0, title, text).searched for title, text in zip(*columns, strict=True)]


def digest_of(document: Document) -> bytes:
    """Return a hash of a document's titles and text, which changes if its passages may change."""
    parts = [
        [section.title, section.column, section.sentence_a_line, [*section.lines]]
        for section in document.sections
    ]
    content = json.dumps([PASSAGE_RULES, document.whole, parts])
    return hashlib.blake2b(content.encode(), digest_size=16).digest()
