"""Next sentences: pairs of neighbours in the documents of a corpus."""

import numpy as np
from jaxtyping import Int, Integer

from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import DataError


class Neighbours:
    """The sentences of a store with the next ones of their documents, as the examples of a store of two columns.

    The last sentence of a document has no next one: it is no example. A row is example + number of examples * choice,
    where choice 0 is the sentence right after the example's.

    Args:
        store: single sentences in the order of their documents.
        within: a next sentence is one of so many that follow.

    Attributes:
        columns: names of the columns.
        max_length: the length, in tokens, that sentences were cut to.
        left_out: the number of sentences without a next one.

    Raises:
        DataError: no document has two sentences.
    """

    def __init__(self, store: TokenStore, within: int = 1):
        if store.document_starts is None or len(store.columns) != 1:
            raise ValueError("next sentences need a store of single sentences that knows its documents")
        ends = np.append(store.document_starts[1:], len(store))
        following = ends.repeat(ends - store.document_starts) - np.arange(len(store)) - 1  # in its document
        self._store = store
        self._sentences = np.flatnonzero(following)
        self._choices = np.minimum(following[self._sentences], within)
        self.columns = (*store.columns, "next sentence")
        self.max_length = store.max_length
        self.left_out = len(ends)
        if not len(self):
            raise DataError(
                f"data.train_file: {len(ends):,} documents and none has two sentences, so that there is no next one; "
                "data.documents='blank_lines' takes sentences on consecutive lines as a document"
            )

    def __len__(self) -> int:
        return len(self._sentences)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """A random order of the examples, each with one of its next sentences."""
        examples = generator.permutation(len(self))
        choices = np.floor(generator.random(len(self)) * self._choices[examples]).astype(np.int64)
        return examples + len(self) * choices

    def sentences(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """The numbers of both sentences of the examples `rows`, in the order of the text."""
        return np.stack(self._pairs(rows), axis=1)

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """The number of tokens of both sentences of the examples `rows`."""
        return np.concatenate([self._store.lengths(sentences) for sentences in self._pairs(rows)], axis=1)

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B 2 T"], Int[np.ndarray, "B 2"]]:
        """The token ids (int32) of the examples `rows`, padded to `width`, and the sentences' lengths."""
        columns = [self._store.gather(sentences, width, pad_token_id) for sentences in self._pairs(rows)]
        input_ids, lengths = (np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True))
        return input_ids, lengths

    def _pairs(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
        choices, examples = np.divmod(rows, len(self))
        sentences = self._sentences[examples]
        return sentences, sentences + 1 + choices
