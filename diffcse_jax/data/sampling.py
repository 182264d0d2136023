"""What each epoch draws again: pairs made of a store's rows, and augmented views.

Pairs are neighbours, crops and cloze pairs.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from jaxtyping import Bool, Float, Int, Integer

from diffcse_jax.config import DataConfig
from diffcse_jax.data.token_store import (
    ExampleNumbers,
    Examples,
    Kind,
    OfSentences,
    TokenIds,
    TokenStore,
)
from diffcse_jax.documents.ledger import Ledger, Place, usable
from diffcse_jax.documents.text.lines import read_lines
from diffcse_jax.errors import DataError
from diffcse_jax.io import expand_path
from diffcse_jax.models.tokenizer import largest_token, unlimited_tokenizer

CROP_SHARES = (0.1, 0.5)  # of a passage (Contriever, Izacard et al. 2022, appendix A)
FEWEST_CROPPED = 8  # the smallest number of tokens in a span
WINDOW = (5, 25)  # words that are taken out of a passage
DRAWS = 1 << 24  # the number of possible choices of two spans
WORD_MARKS = ("Ġ", "▁")  # byte-level BPE and SentencePiece begin words with them

Ids = Integer[np.ndarray, "B T"]
Lengths = Int[np.ndarray, " B"]
Word = tuple[int, ...]  # its tokens
Synonyms = Mapping[Word, Sequence[Word]]  # a replacement may be several words


def examples_of(
    store: TokenStore,
    data: DataConfig,
    tokenizer: transformers.PreTrainedTokenizerFast,
    *,
    next_sentence: bool,
    prompt_tokens: Sequence[int] = (0, 0),
) -> Examples:
    """Return the examples that `data.pairs` makes of a text.

    If the text cannot give them, an error is raised. `prompt_tokens` are the lengths of the prompts
    with which the sentences of each column begin. With `next_sentence`, the last column is the next
    sentence.
    """
    if data.pairs == "crops":
        return Crops(store, data.max_length, prompt_tokens[0])
    if data.pairs == "lead" and data.cloze:
        cloze = Cloze(store, data.cloze, begins_word(tokenizer.backend_tokenizer), prompt_tokens)
        return cloze if cloze.passages else store
    if not (next_sentence or data.pairs in ("neighbours", "passages")):
        return store
    if data.train_file == "wiki1m":
        raise DataError(
            "data.train_file=wiki1m has shuffled sentences, without next ones. Name a text of "
            "documents"
        )
    return Neighbours(store, data.next_within)


class _Drawn(Examples):
    """Examples drawn from rows of a store.

    Row `kept[i]` with the choice `c` is the example i + c * len(kept).
    """

    def __init__(self, store: TokenStore, kept: Int[np.ndarray, " examples"]):
        self.token_ids = store.token_ids
        self.offsets = store.offsets
        self.max_length = store.max_length
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    def text_rows(self, rows: ExampleNumbers) -> ExampleNumbers:
        """Return the row of each example in the text, counting from 0."""
        return self._kept[rows % len(self._kept)]


class Neighbours(_Drawn):
    """Pairs of a sentence (or passage) and one of the `within` that follow it in its document.

    The last sentence of a document is not an example. Choice 0 is the next sentence.
    """

    def __init__(self, store: TokenStore, within: int = 1):
        starts = np.flatnonzero(~store.follows)
        ends = np.append(starts[1:], len(store))
        following = ends.repeat(ends - starts) - np.arange(len(store)) - 1  # in its document
        super().__init__(store, np.flatnonzero(following))
        self._choices = np.minimum(following[self._kept], within)
        (unit,) = store.columns
        self.columns = (unit, f"next {unit}")
        if not len(self):
            documents = len(np.unique(store.documents))
            raise DataError(
                f"data.train_file: no document of {documents:,} has two {unit}s. Separate "
                "documents by blank lines, or write a document of several sentences on each line"
            )

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        examples = generator.permutation(len(self))
        choices = np.floor(generator.random(len(self)) * self._choices[examples]).astype(np.int64)
        return examples + len(self) * choices

    def sentences(self, rows: ExampleNumbers) -> OfSentences:
        first = self.text_rows(rows)
        return np.stack([first, first + 1 + rows // len(self)], axis=1)


class Crops(_Drawn):
    """Pairs of random spans of a passage.

    A span's share of the passage's tokens is drawn from `CROP_SHARES`; it has at least
    `FEWEST_CROPPED` tokens. It stands between [CLS], with the prompt if there is one, and [SEP],
    and has at most `max_length` tokens with these.
    """

    def __init__(self, store: TokenStore, max_length: int, prompt_tokens: int = 0):
        self._before = 1 + prompt_tokens
        super().__init__(
            store, np.flatnonzero(np.diff(store.offsets) - self._before - 1 >= 2 * FEWEST_CROPPED)
        )
        self.columns = ("crop", "crop")
        self.max_length = max_length
        if not len(self):
            raise DataError(
                f"data.train_file: no document has the {2 * FEWEST_CROPPED} tokens that two crops "
                "need. Use longer documents, or another value of data.pairs"
            )

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        rows = generator.permutation(len(self))
        return rows + len(self) * generator.integers(DRAWS, size=len(self))

    def lengths(self, rows: ExampleNumbers) -> OfSentences:
        return self.positions(rows, 0)[1]

    def positions(self, rows: ExampleNumbers, width: int) -> tuple[TokenIds, OfSentences]:
        text_rows = self.text_rows(rows)
        first = self.offsets[text_rows][:, None]
        end = self.offsets[text_rows + 1][:, None]
        tokens = end - first - self._before - 1
        low, high = CROP_SHARES
        numbers = _uniform(rows[:, None] * 4 + np.arange(4))
        sizes = np.floor((low + (high - low) * numbers[:, :2]) * tokens).astype(np.int64)
        sizes = np.clip(sizes, FEWEST_CROPPED, None).clip(None, self.max_length - self._before - 1)
        starts = (
            first + self._before + np.floor(numbers[:, 2:] * (tokens - sizes + 1)).astype(np.int64)
        )
        column = np.arange(width) - self._before  # counts from the first token of the span
        inside = np.where(column < sizes[..., None], starts[..., None] + column, end[..., None] - 1)
        positions = np.where(column < 0, first[..., None] + self._before + column, inside)
        return positions, self._before + sizes + 1


class Cloze(_Drawn):
    """Pairs of a lead and its rest, and of a window of words and its passage.

    The window is taken out of the passage. A row of the kind `PASSAGE` has the passage in both
    columns, and an epoch uses a share of the passages. `WINDOW` limits the words of a window; at
    least `WINDOW[0]` words are left. In text without spaces, where hardly a token begins a word,
    tokens count as words. `prompt_tokens` is the length of the prompt of each column.
    """

    def __init__(
        self,
        store: TokenStore,
        share: float,
        begins_word: Bool[np.ndarray, " vocab"],
        prompt_tokens: Sequence[int],
    ):
        super().__init__(store, np.arange(len(store)))
        self.columns = store.columns
        self._store = store
        self._begins_word = begins_word
        self._first = 1 + np.array(prompt_tokens)  # the first token of each text
        self._is_passage = store.kinds == Kind.PASSAGE
        self.passages = int(self._is_passage.sum())
        self._used = round(share * self.passages)

    def __len__(self) -> int:
        return len(self._kept) - self.passages + self._used

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        passages = generator.permutation(np.flatnonzero(self._is_passage))[: self._used]
        rows = generator.permutation(np.concatenate([np.flatnonzero(~self._is_passage), passages]))
        return rows + len(self._kept) * generator.integers(DRAWS, size=len(rows))

    def sentences(self, rows: ExampleNumbers) -> OfSentences:
        return super().sentences(self.text_rows(rows))

    def lengths(self, rows: ExampleNumbers) -> OfSentences:
        return self._kept_tokens(rows).sum(axis=2)

    def positions(self, rows: ExampleNumbers, width: int) -> tuple[TokenIds, OfSentences]:
        kept = self._kept_tokens(rows)
        side_by_side = np.argsort(~kept, axis=2, kind="stable")
        return self.offsets[self.sentences(rows)][..., None] + side_by_side[..., :width], kept.sum(
            axis=2
        )

    def _kept_tokens(self, rows: ExampleNumbers) -> Bool[np.ndarray, "B C T"]:
        """Return which tokens of both texts are kept: the window, and what is left."""
        token_ids, lengths = self._store.gather(self.text_rows(rows), self.max_length, 0)
        positions = np.arange(self.max_length)
        (query, passage) = self._first
        # The window is chosen in the passage, among the tokens that both texts have.
        ends = passage + (lengths - 1 - self._first).min(axis=1, keepdims=True)
        inside = (positions >= passage) & (positions < ends)
        begins = inside & (self._begins_word[token_ids[:, 1]] | (positions == passage))
        begins = np.where(begins.sum(axis=1, keepdims=True) < 2 * WINDOW[0], inside, begins)
        count = begins.sum(axis=1)
        low = np.minimum(WINDOW[0], count // 2)
        numbers = _uniform(rows[:, None] * 2 + np.arange(2))
        sizes = np.minimum(WINDOW[1], count - low) - low + 1  # how many sizes are possible
        size = low + np.floor(numbers[:, 0] * sizes).astype(np.int64)
        start = np.floor(numbers[:, 1] * (count - size + 1)).astype(np.int64)
        word = begins.cumsum(axis=1) - 1
        window = inside & (word >= start[:, None]) & (word < (start + size)[:, None])
        # [CLS], the prompt and [SEP].
        around = (positions < query) | (positions == lengths[:, :1] - 1)
        kept = np.stack([around | np.roll(window, query - passage, axis=1), ~window], axis=1)
        kept |= ~self._is_passage[self.text_rows(rows)][:, None, None]
        return kept & (positions < lengths[..., None])


def _uniform(numbers: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Return a pseudo-random number in [0, 1) for each number (SplitMix64, Steele et al. 2014)."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) / 2.0**53


# Augmented second views (SimCSE Table 1)
#
# All augmentations act on whole words. WordPiece marks tokens that continue a word (`##`), so that
# punctuation is a word. Byte-level BPE and SentencePiece mark tokens that begin a word, so that
# punctuation belongs to the word before it. With any other tokenizer, each token is a word.
# Augmentations keep [CLS] and [SEP].


@dataclasses.dataclass(frozen=True, eq=False)
class Augmentation:
    """Change sentences at random."""

    kind: str  # `crop`, `word_deletion`, `delete_one_word` or `synonyms`
    ratio: float  # share of the words that the first two kinds remove
    begins_word: Bool[np.ndarray, " vocabulary"]
    synonyms: Synonyms = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        input_ids: Ids,
        lengths: Lengths,
        generator: np.random.Generator,
        prompt_tokens: int = 0,
    ) -> tuple[Ids, Lengths]:
        """Return the changed sentences and their lengths.

        Prompts stay, and values at padding have no meaning.
        """
        positions = np.arange(input_ids.shape[1])
        first = 1 + prompt_tokens
        ordinary = (positions >= first) & (positions < lengths[:, None] - 1)
        begins = ordinary & (self.begins_word[input_ids] | (positions == first))
        if self.kind == "synonyms":
            return self._with_synonym(input_ids, lengths, begins, generator)
        number = begins.cumsum(axis=1) - 1  # the word of each token
        kept_words = self._kept_words(begins.sum(axis=1), input_ids.shape[1], generator)
        kept = (positions < lengths[:, None]) & (
            ~ordinary | np.take_along_axis(kept_words, np.maximum(number, 0), 1)
        )
        side_by_side = np.argsort(~kept, axis=1, kind="stable")
        return np.take_along_axis(input_ids, side_by_side, axis=1), kept.sum(axis=1)

    def _kept_words(
        self, counts: Lengths, most: int, generator: np.random.Generator
    ) -> Bool[np.ndarray, "B words"]:
        """Choose the words to keep, at least one."""
        numbers = np.arange(most)
        draws = generator.random((len(counts), most))
        if self.kind == "crop":
            kept = np.maximum(np.rint((1 - self.ratio) * counts), 1)
            first = np.floor(draws[:, 0] * (counts - kept + 1))
            return (numbers >= first[:, None]) & (numbers < (first + kept)[:, None])
        wanted = 1 if self.kind == "delete_one_word" else np.rint(self.ratio * counts)
        removed = np.minimum(wanted, counts - 1)
        order = np.where(numbers < counts[:, None], draws, 2.0).argsort(axis=1).argsort(axis=1)
        return order >= removed[:, None]

    def _with_synonym(
        self,
        input_ids: Ids,
        lengths: Lengths,
        begins: Bool[np.ndarray, "B T"],
        generator: np.random.Generator,
    ) -> tuple[Ids, Lengths]:
        """Replace a random word of each sentence.

        A sentence that grows beyond T is cut, but keeps its last token.
        """
        changed, new_lengths = input_ids.copy(), lengths.copy()
        for row, (ids, length) in enumerate(zip(input_ids.tolist(), lengths.tolist(), strict=True)):
            bounds = [*np.flatnonzero(begins[row]).tolist(), length - 1]
            spans = itertools.pairwise(bounds)
            words = [span for span in spans if tuple(ids[slice(*span)]) in self.synonyms]
            if words:
                start, end = words[int(generator.integers(len(words)))]
                choices = self.synonyms[tuple(ids[start:end])]
                inside = [
                    *ids[:start],
                    *choices[int(generator.integers(len(choices)))],
                    *ids[end : length - 1],
                ]
                new = [*inside[: input_ids.shape[1] - 1], ids[length - 1]]
                changed[row, : len(new)], new_lengths[row] = new, len(new)
        return changed, new_lengths


def open_augmentation(
    data: DataConfig, tokenizer: transformers.PreTrainedTokenizerFast
) -> Augmentation | None:
    """Open the augmentation that `data.augmentation` names.

    If it does not change second views here, return None.
    """
    if data.augmentation in ("none", "mlm"):
        return None
    backend = unlimited_tokenizer(tokenizer)
    synonyms: Synonyms = {}
    if data.augmentation == "synonyms":
        synonyms = _read_synonyms(expand_path(data.synonyms_file), backend, tokenizer.unk_token_id)
    return Augmentation(data.augmentation, data.augmentation_ratio, begins_word(backend), synonyms)


def begins_word(backend: tokenizers.Tokenizer) -> Bool[np.ndarray, " vocabulary"]:
    """Return whether each token begins a word."""
    vocabulary = backend.get_vocab()
    begins = np.ones(largest_token(backend)[0] + 1, bool)
    if isinstance(backend.model, tokenizers.models.WordPiece):
        prefix = backend.model.continuing_subword_prefix
        begins[[number for token, number in vocabulary.items() if token.startswith(prefix)]] = False
    elif any(token.startswith(WORD_MARKS) for token in vocabulary):
        begins[
            [number for token, number in vocabulary.items() if not token.startswith(WORD_MARKS)]
        ] = False
    return begins


def _read_synonyms(path: Path, backend: tokenizers.Tokenizer, unknown: int | None) -> Synonyms:
    """Read lines of a word and its replacements, separated by tabs.

    Words with the token `unknown` are left out.
    """
    table: dict[Word, dict[Word, None]] = collections.defaultdict(dict)
    ledger = Ledger(str(path), strict=True, refuse_empty=True)
    for number, line in read_lines(path, str(path), ledger):
        if not line.strip():
            continue
        place = Place(str(path), number)
        texts = usable(line.split("\t"), place, ledger)
        if texts is None or len(texts) < 2:
            raise DataError(f"{place}: expected a word and its synonyms, separated by tabs")
        # A vocabulary may have other tokens for a word after a space than at a sentence's start.
        for before in (" ", ""):
            word, *others = (
                tuple(backend.encode(before + text, add_special_tokens=False).ids) for text in texts
            )
            if word and unknown not in word:
                table[word] |= dict.fromkeys(
                    other for other in others if other and unknown not in other
                )
    if not any(table.values()):
        raise DataError(
            f"data.synonyms_file: {path} does not contain a word and a synonym of the vocabulary"
        )
    return {word: tuple(others) for word, others in table.items() if others}
