"""Examples that are made of the rows of a token store and drawn again in each epoch: neighbours and crops."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Integer

from diffcse_jax.config import DataConfig
from diffcse_jax.data.token_store import Examples, TokenStore
from diffcse_jax.errors import ConfigError, DataError

CROP_SHARES = (0.1, 0.5)  # of a passage (Contriever, Izacard et al. 2022, appendix A)
FEWEST_CROPPED = 8  # the smallest number of tokens in a span
DRAWS = 1 << 24  # the number of possible choices of two spans


def examples_of(
    store: TokenStore, data: DataConfig, *, next_sentence: bool, prompt_ids: Sequence[int] = ()
) -> Examples:
    """Return the examples that `data.pairs` makes of a text.

    Args:
        store: The text.
        data: The options.
        next_sentence: Add the next sentence as a further column.
        prompt_ids: The tokens of a prompt in front of crops. In other pairs, the prompt is a part of the text.

    Raises:
        ConfigError: The text has too many columns, or lacks documents.
        DataError: No document has a next sentence, or no passage is long enough.
    """
    if data.pairs == "crops":
        return Crops(store, data.max_length, prompt_ids)
    if data.pairs == "dropout" and len(store.columns) > 1:
        raise ConfigError(
            f"data.pairs='dropout' uses each sentence twice, but the text has {len(store.columns)} columns. Set "
            "data.pairs='columns', or name one column in data.columns"
        )
    if next_sentence and store.document_starts is None:
        raise ConfigError(f"{data.train_file} has no documents, but a loss needs next sentences (data.documents)")
    pairs_neighbours = next_sentence or data.pairs in ("neighbours", "passages")
    return Neighbours(store, data.next_within) if pairs_neighbours else store


class _Drawn(Examples):
    """Examples made of some rows of a store. The row number is example + number of examples * choice."""

    def __init__(self, store: TokenStore, kept: Int[np.ndarray, " examples"]):
        self.token_ids, self.offsets, self.max_length = store.token_ids, store.offsets, store.max_length
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        return self._kept[rows % len(self)]


class Neighbours(_Drawn):
    """Pairs of a sentence (or passage) and one that follows it in its document.

    The last sentence of a document is not an example. Choice 0 is the next sentence.

    Args:
        store: Single sentences in the order of their documents.
        within: The following sentence is one of the next `within` sentences.

    Attributes:
        left_out: The number of sentences that no sentence follows.
    """

    def __init__(self, store: TokenStore, within: int = 1):
        assert store.document_starts is not None
        ends = np.append(store.document_starts[1:], len(store))
        following = ends.repeat(ends - store.document_starts) - np.arange(len(store)) - 1  # in its document
        super().__init__(store, np.flatnonzero(following))
        self._choices = np.minimum(following[self._kept], within)
        (unit,) = store.columns
        self.columns = (unit, f"next {unit}")
        self.left_out = len(ends)
        if not len(self):
            raise DataError(
                f"data.train_file: no document of {len(ends):,} has two {unit}s. Separate documents by blank "
                "lines, or write a document of several sentences on each line (data.documents)"
            )

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        examples = generator.permutation(len(self))
        choices = np.floor(generator.random(len(self)) * self._choices[examples]).astype(np.int64)
        return examples + len(self) * choices

    def sentences(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        first = self.text_rows(rows)
        return np.stack([first, first + 1 + rows // len(self)], axis=1)


class Crops(_Drawn):
    """Pairs of random spans of a passage.

    A span has a share of the passage's tokens that is drawn from `CROP_SHARES`, at least `FEWEST_CROPPED`, between
    [CLS] and [SEP], after the prompt if there is one.

    Args:
        store: Single passages.
        max_length: The largest number of tokens of a span with its prompt.
        prompt_ids: The tokens of the prompt.
    """

    def __init__(self, store: TokenStore, max_length: int, prompt_ids: Sequence[int] = ()):
        super().__init__(store, np.flatnonzero(np.diff(store.offsets) - 2 >= 2 * FEWEST_CROPPED))
        self.columns, self.max_length = ("crop", "crop"), max_length
        self._prompt = np.array(prompt_ids, store.token_ids.dtype)
        self._added = 2 + len(self._prompt)  # tokens around a span
        if not len(self):
            raise DataError(
                f"data.train_file: no document has the {2 * FEWEST_CROPPED} tokens that two crops need. Use longer "
                "documents, or another value of data.pairs"
            )

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        return generator.permutation(len(self)) + len(self) * generator.integers(DRAWS, size=len(self))

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B 2"]:
        return self._spans(rows)[1] + self._added

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B 2 T"], Int[np.ndarray, "B 2"]]:
        starts, sizes, first, last = self._spans(rows)
        column, lengths = np.arange(width), sizes + self._added
        positions = np.where(column == 0, first[..., None], starts[..., None] + column - (self._added - 1))
        positions = np.where(column == lengths[..., None] - 1, last[..., None], positions)
        real = column < lengths[..., None]
        token_ids = self.token_ids[np.where(real, positions, 0)]
        token_ids[..., 1 : self._added - 1] = self._prompt
        return np.where(real, token_ids, pad_token_id).astype(np.int32), lengths

    def _spans(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int[np.ndarray, "B 2"], ...]:
        """Return where both spans start, their sizes, and the places of the passages' [CLS] and [SEP]."""
        passages = self.text_rows(rows)[:, None].repeat(2, axis=1)
        first, last = self.offsets[passages], self.offsets[passages + 1] - 1
        tokens = last - first - 1
        low, high = CROP_SHARES
        numbers = _uniform(rows[:, None] * 4 + np.arange(4))
        sizes = np.floor((low + (high - low) * numbers[:, :2]) * tokens).astype(np.int64)
        sizes = np.clip(sizes, FEWEST_CROPPED, None).clip(None, self.max_length - self._added)
        starts = first + 1 + np.floor(numbers[:, 2:] * (tokens - sizes + 1)).astype(np.int64)
        return starts, sizes, first, last


def _uniform(numbers: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Return a pseudo-random number in [0, 1) for each number (SplitMix64, Steele et al. 2014)."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / 2.0**53
