"""Examples made of the rows of a token store, partly drawn anew in each epoch: neighbours and crops.

They have the interface of a token store. A row's number contains its draw, so that a batch is a function of the seed
and the epoch.
"""

import numpy as np
from jaxtyping import Float, Int, Integer

from diffcse_jax.config import DataConfig
from diffcse_jax.data.token_store import TokenStore
from diffcse_jax.errors import ConfigError, DataError

CROP_SHARES = (0.1, 0.5)  # of a passage (Contriever, Izacard et al. 2022, appendix A)
FEWEST_CROPPED = 8  # tokens
DRAWS = 1 << 24  # of a crop's two spans


class Neighbours:
    """Sentences (or passages) with a following one of their document, as examples with two columns.

    The last sentence of a document is not an example. A row is example + number of examples * choice, where choice 0 is
    the next sentence.

    Args:
        store: Single sentences in the order of their documents.
        within: The following sentence is one of the next `within` sentences.

    Attributes:
        columns: Names of the columns.
        max_length: Most tokens of a sentence.
        left_out: The number of sentences without a following one.

    Raises:
        DataError: No document has two sentences.
    """

    def __init__(self, store: TokenStore, within: int = 1):
        if store.document_starts is None or len(store.columns) != 1:
            raise ValueError("neighbours need a store of single sentences with documents")
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
                f"data.train_file: none of the {len(ends):,} documents has two {unit}s. Separate documents by blank "
                "lines, or write a document of several sentences on each line (data.documents)"
            )

    def __len__(self) -> int:
        return len(self._sentences)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """Return a random order of the examples, each with a choice of the following sentence."""
        examples = generator.permutation(len(self))
        choices = np.floor(generator.random(len(self)) * self._choices[examples]).astype(np.int64)
        return examples + len(self) * choices

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """Return the rows of the text with the examples' first sentences."""
        return self._sentences[rows % len(self)]

    def sentences(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """Return the numbers of both sentences of each example."""
        choices, examples = np.divmod(rows, len(self))
        first = self._sentences[examples]
        return np.stack([first, first + 1 + choices], axis=1)

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """Return the number of tokens of both sentences."""
        return self._store.lengths(self.sentences(rows).reshape(-1)).reshape(-1, 2)

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B 2 T"], Int[np.ndarray, "B 2"]]:
        """Return the token ids (int32), padded to `width`, and the lengths of both sentences."""
        input_ids, lengths = self._store.gather(self.sentences(rows).reshape(-1), width, pad_token_id)
        return input_ids.reshape(-1, 2, width), lengths.reshape(-1, 2)


class Crops:
    """Pairs of random spans of a passage, as examples with two columns.

    A span has a share of the passage's tokens that is drawn from `CROP_SHARES`, at least `FEWEST_CROPPED`, between
    [CLS] and [SEP]. A row is example + number of examples * draw.

    Args:
        store: Passages.
        max_length: Most tokens of a span.

    Attributes:
        columns: Names of the columns.
        max_length: See above.

    Raises:
        DataError: No passage is long enough for two spans.
    """

    def __init__(self, store: TokenStore, max_length: int):
        if len(store.columns) != 1:
            raise ValueError("crops need a store of single passages")
        self._store = store
        self._passages = np.flatnonzero(np.diff(store.offsets) - 2 >= 2 * FEWEST_CROPPED)
        self.columns = ("crop", "crop")
        self.max_length = max_length
        if not len(self):
            raise DataError(
                f"data.train_file: no document has the {2 * FEWEST_CROPPED} tokens that two crops need. Use longer "
                "documents, or another value of data.pairs"
            )

    def __len__(self) -> int:
        return len(self._passages)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """Return a random order of the examples, each with a draw."""
        return generator.permutation(len(self)) + len(self) * generator.integers(DRAWS, size=len(self))

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """Return the rows of the text with the examples' passages."""
        return self._passages[rows % len(self)]

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        """Return the number of tokens of both spans."""
        return self._spans(rows)[1] + 2

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B 2 T"], Int[np.ndarray, "B 2"]]:
        """Return the token ids (int32), padded to `width`, and the lengths of both spans."""
        starts, sizes, first, last = self._spans(rows)
        column = np.arange(width)
        positions = np.where(column == 0, first[..., None], starts[..., None] + column - 1)
        positions = np.where(column == sizes[..., None] + 1, last[..., None], positions)
        real = column < sizes[..., None] + 2
        token_ids = self._store.token_ids[np.where(real, positions, 0)]
        return np.where(real, token_ids, pad_token_id).astype(np.int32), sizes + 2

    def _spans(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int[np.ndarray, "B 2"], ...]:
        """Return where both spans start, their sizes, and the places of the passages' [CLS] and [SEP]."""
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
    """Return the examples that batches are made of.

    Args:
        store: The rows of the text.
        data: Options that define an anchor and its positive.
        next_sentence: The next sentence is a further column.

    Raises:
        ConfigError: The text has too many columns, or lacks documents.
        DataError: No document has a next sentence, or no passage is long enough.
    """
    if data.pairs == "crops":
        return Crops(store, data.max_length)
    if data.pairs == "dropout" and len(store.columns) > 1:
        raise ConfigError(
            f"data.pairs='dropout' uses each sentence twice, but the text has {len(store.columns)} columns. Set "
            "data.pairs='columns', or name one column in data.columns"
        )
    if next_sentence and store.document_starts is None:
        raise ConfigError(f"{data.train_file} has no documents, but a loss needs next sentences (data.documents)")
    pairs_neighbours = next_sentence or data.pairs in ("neighbours", "passages")
    return Neighbours(store, data.next_within) if pairs_neighbours else store


def _uniform(numbers: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Return a pseudo-random number in [0, 1) for each number (SplitMix64, Steele et al. 2014)."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / 2.0**53
