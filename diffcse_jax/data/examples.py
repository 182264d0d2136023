"""Examples that are made of a token store's rows, a part of them drawn anew in every epoch: neighbours and crops.

They read as a store does. A row's number holds its draw, so that a batch is a function of the seed and the epoch.
"""

import numpy as np
from jaxtyping import Float, Int, Integer

from diffcse_jax.data.tokens import TokenStore
from diffcse_jax.errors import ConfigError, DataError
from diffcse_jax.groups import DataConfig

CROP_SHARES = (0.1, 0.5)  # of a passage (Contriever, Izacard et al. 2022, appendix A)
FEWEST_CROPPED = 8  # tokens
DRAWS = 1 << 24  # of a crop's two spans


class Neighbours:
    """The sentences of a store with the next ones of their documents, as the examples of a store of two columns.

    The last sentence of a document has no next one: it is no example. A row is example + number of examples * choice,
    where choice 0 is the sentence right after the example's. Passages may stand in place of sentences.

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
        (unit,) = store.columns
        self.columns = (unit, f"next {unit}")
        self.max_length = store.max_length
        self.left_out = len(ends)
        if not len(self):
            raise DataError(
                f"data.train_file: {len(ends):,} documents and none has two {unit}s, so that there is no next one; "
                "documents are separated by blank lines, or each is a line of several sentences (data.documents)"
            )

    def __len__(self) -> int:
        return len(self._sentences)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """A random order of the examples, each with one of its next sentences."""
        examples = generator.permutation(len(self))
        choices = np.floor(generator.random(len(self)) * self._choices[examples]).astype(np.int64)
        return examples + len(self) * choices

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """The numbers of the rows of the text that are the first sentences of the examples `rows`."""
        return self._sentences[rows % len(self)]

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


class Crops:
    """Pairs of random spans of a passage, as the examples of a store of two columns.

    A span has a share of the passage's tokens that is drawn from `CROP_SHARES`, at least `FEWEST_CROPPED`, between its
    first and its last token, [CLS] and [SEP]. A row is example + number of examples * draw.

    Args:
        store: passages.
        max_length: the length, in tokens, that spans are cut to.

    Attributes:
        columns: names of the columns.
        max_length: see above.

    Raises:
        DataError: no passage is long enough for two spans.
    """

    def __init__(self, store: TokenStore, max_length: int):
        if len(store.columns) != 1:
            raise ValueError("crops need a store of single passages")
        lengths = np.diff(store.offsets)
        self._store = store
        self._passages = np.flatnonzero(lengths - 2 >= 2 * FEWEST_CROPPED)
        self.columns = ("crop", "crop")
        self.max_length = max_length
        if not len(self):
            raise DataError(
                f"data.train_file: no document has the {2 * FEWEST_CROPPED} tokens that two crops need (data.pairs)"
            )

    def __len__(self) -> int:
        return len(self._passages)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """A random order of the examples, each with a draw."""
        return generator.permutation(len(self)) + len(self) * generator.integers(DRAWS, size=len(self))

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """The numbers of the rows of the text that are the passages of the examples `rows`."""
        return self._passages[rows % len(self)]

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """The number of tokens of both spans of the examples `rows`."""
        return self._spans(rows)[1] + 2

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B 2 T"], Int[np.ndarray, "B 2"]]:
        """The token ids (int32) of the examples `rows`, padded to `width`, and the spans' lengths."""
        starts, sizes, first, last = self._spans(rows)
        column = np.arange(width)
        positions = np.where(column == 0, first[..., None], starts[..., None] + column - 1)
        positions = np.where(column == sizes[..., None] + 1, last[..., None], positions)
        real = column < sizes[..., None] + 2
        token_ids = self._store.token_ids[np.where(real, positions, 0)]
        return np.where(real, token_ids, pad_token_id).astype(np.int32), sizes + 2

    def _spans(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int[np.ndarray, "B 2"], ...]:
        """Of both spans where in the store's tokens they start, their tokens, and [CLS] and [SEP] of the passage."""
        passages = self._passages[rows % len(self)][:, None].repeat(2, axis=1)
        first, last = self._store.offsets[passages], self._store.offsets[passages + 1] - 1
        tokens = last - first - 1
        low, high = CROP_SHARES
        numbers = _uniform(rows[:, None] * 4 + np.arange(4))
        sizes = np.floor((low + (high - low) * numbers[:, :2]) * tokens).astype(np.int64)
        sizes = np.clip(sizes, FEWEST_CROPPED, None).clip(None, self.max_length - 2)
        starts = first + 1 + np.floor(numbers[:, 2:] * (tokens - sizes + 1)).astype(np.int64)
        return starts, sizes, first, last


def examples_of(store: TokenStore, data: DataConfig, *, next_sentence: bool) -> TokenStore | Neighbours | Crops:
    """The examples that batches are made of.

    Args:
        store: the rows of the text.
        data: tells what is an anchor and its positive.
        next_sentence: the next sentence comes as a further column.

    Raises:
        ConfigError: single sentences of a text that has several columns, next sentences of one without documents.
        DataError: no next sentence in any document, or no passage that is long enough.
    """
    if data.pairs == "crops":
        return Crops(store, data.max_length)
    if data.pairs == "dropout" and len(store.columns) > 1:
        raise ConfigError(
            f"data.pairs='dropout' takes a single sentence twice, and the text has {len(store.columns)} columns; use "
            "data.pairs='columns', or name one of them in data.columns"
        )
    if next_sentence and store.document_starts is None:
        raise ConfigError(f"{data.train_file} has no documents, and an objective needs next sentences (data.documents)")
    pairs_neighbours = next_sentence or data.pairs in ("neighbours", "passages")
    return Neighbours(store, data.next_within) if pairs_neighbours else store


def _uniform(numbers: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """A number in [0, 1) for each number, as if drawn at random (SplitMix64, Steele et al. 2014)."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / 2.0**53
