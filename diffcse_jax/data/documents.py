"""Next sentences: pairs of neighbours in the documents of a corpus."""

import numpy as np
from jaxtyping import Int, Integer

from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import DataError


class Neighbours:
    """The sentences of a store with the next ones of their documents, as the examples of a store of two columns.

    The last sentence of a document has no next one: it is no example.

    Args:
        store: single sentences in the order of their documents.

    Attributes:
        columns: names of the columns.
        max_length: the length, in tokens, that sentences were cut to.
        left_out: the number of sentences without a next one.

    Raises:
        DataError: no document has two sentences.
    """

    def __init__(self, store: TokenStore):
        if store.document_starts is None or len(store.columns) != 1:
            raise ValueError("next sentences need a store of single sentences that knows its documents")
        last = np.append(store.document_starts[1:], len(store)) - 1
        self._store = store
        self._sentences = np.delete(np.arange(len(store)), last)
        self.columns = (*store.columns, "next sentence")
        self.max_length = store.max_length
        self.left_out = len(last)
        if not len(self):
            raise DataError(
                f"data.train_file: {len(last):,} documents and none has two sentences, so that there is no next one; "
                "data.documents='blank_lines' takes sentences on consecutive lines as a document"
            )

    def __len__(self) -> int:
        return len(self._sentences)

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """The number of tokens of both sentences of the examples `rows`."""
        sentences = self._sentences[rows]
        return np.concatenate([self._store.lengths(sentences), self._store.lengths(sentences + 1)], axis=1)

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B 2 T"], Int[np.ndarray, "B 2"]]:
        """The token ids (int32) of the examples `rows`, padded to `width`, and the sentences' lengths."""
        sentences = self._sentences[rows]
        pairs = [self._store.gather(each, width, pad_token_id) for each in (sentences, sentences + 1)]
        input_ids, lengths = (np.concatenate(columns, axis=1) for columns in zip(*pairs, strict=True))
        return input_ids, lengths
