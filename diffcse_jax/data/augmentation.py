"""Augment sentences to second views (SimCSE Table 1): crops, deletions and synonyms, drawn again in each epoch.

All augmentations act on whole words. WordPiece marks tokens that continue a word (`##`), so that punctuation is a word.
Byte-level BPE and SentencePiece mark tokens that begin a word, so that punctuation belongs to the word before it. With
any other tokenizer each token is a word. [CLS] and [SEP] stay.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from jaxtyping import Bool, Int, Integer

from diffcse_jax.config import DataConfig
from diffcse_jax.data.readers import Fault, checked, lines
from diffcse_jax.data.tokenizer import unlimited_tokenizer
from diffcse_jax.errors import DataError
from diffcse_jax.io import expand_path

Ids = Integer[np.ndarray, "B T"]
Lengths = Int[np.ndarray, " B"]
Word = tuple[int, ...]  # its tokens
Synonyms = Mapping[Word, Sequence[Word]]  # a replacement may be several words
WORD_MARKS = ("Ġ", "▁")  # byte-level BPE and SentencePiece begin words with them


@dataclasses.dataclass(frozen=True, eq=False)
class Augmentation:
    """Change sentences at random."""

    kind: str  # `crop`, `word_deletion`, `delete_one_word` or `synonyms`
    ratio: float  # share of the words that the first two kinds remove
    begins_word: Bool[np.ndarray, " vocabulary"]
    synonyms: Synonyms = dataclasses.field(default_factory=dict)

    def __call__(
        self, input_ids: Ids, lengths: Lengths, generator: np.random.Generator, prompt_tokens: int = 0
    ) -> tuple[Ids, Lengths]:
        """Return the changed sentences and their lengths. Prompts stay, and values at padding have no meaning."""
        positions, first = np.arange(input_ids.shape[1]), 1 + prompt_tokens
        ordinary = (positions >= first) & (positions < lengths[:, None] - 1)
        begins = ordinary & (self.begins_word[input_ids] | (positions == first))
        if self.kind == "synonyms":
            return self._with_synonym(input_ids, lengths, begins, generator)
        number = begins.cumsum(axis=1) - 1  # the word of each token
        kept_words = self._kept_words(begins.sum(axis=1), input_ids.shape[1], generator)
        kept = (positions < lengths[:, None]) & (~ordinary | np.take_along_axis(kept_words, np.maximum(number, 0), 1))
        side_by_side = np.argsort(~kept, axis=1, kind="stable")
        return np.take_along_axis(input_ids, side_by_side, axis=1), kept.sum(axis=1)

    def _kept_words(self, counts: Lengths, most: int, generator: np.random.Generator) -> Bool[np.ndarray, "B words"]:
        """Choose the words to keep, at least one."""
        numbers, draws = np.arange(most), generator.random((len(counts), most))
        if self.kind == "crop":
            kept = np.maximum(np.rint((1 - self.ratio) * counts), 1)
            first = np.floor(draws[:, 0] * (counts - kept + 1))
            return (numbers >= first[:, None]) & (numbers < (first + kept)[:, None])
        wanted = 1 if self.kind == "delete_one_word" else np.rint(self.ratio * counts)
        removed = np.minimum(wanted, counts - 1)
        order = np.where(numbers < counts[:, None], draws, 2.0).argsort(axis=1).argsort(axis=1)
        return order >= removed[:, None]

    def _with_synonym(
        self, input_ids: Ids, lengths: Lengths, begins: Bool[np.ndarray, "B T"], generator: np.random.Generator
    ) -> tuple[Ids, Lengths]:
        """Replace a random word of each sentence. A sentence that grows beyond T is cut, but keeps its last token."""
        changed, new_lengths = input_ids.copy(), lengths.copy()
        for row, (ids, length) in enumerate(zip(input_ids.tolist(), lengths.tolist(), strict=True)):
            bounds = [*np.flatnonzero(begins[row]).tolist(), length - 1]
            words = [each for each in itertools.pairwise(bounds) if tuple(ids[slice(*each)]) in self.synonyms]
            if words:
                start, end = words[int(generator.integers(len(words)))]
                choices = self.synonyms[tuple(ids[start:end])]
                inside = [*ids[:start], *choices[int(generator.integers(len(choices)))], *ids[end : length - 1]]
                new = [*inside[: input_ids.shape[1] - 1], ids[length - 1]]
                changed[row, : len(new)], new_lengths[row] = new, len(new)
        return changed, new_lengths


def open_augmentation(data: DataConfig, tokenizer: transformers.PreTrainedTokenizerFast) -> Augmentation | None:
    """Open the augmentation that `data.augmentation` names; None if it does not change second views here."""
    if data.augmentation in ("none", "mlm"):
        return None
    backend = unlimited_tokenizer(tokenizer)
    synonyms: Synonyms = {}
    if data.augmentation == "synonyms":
        synonyms = read_synonyms(expand_path(data.synonyms_file), backend, tokenizer.unk_token_id)
    return Augmentation(data.augmentation, data.augmentation_ratio, begins_word(backend), synonyms)


def begins_word(backend: tokenizers.Tokenizer) -> Bool[np.ndarray, " vocabulary"]:
    """Return whether each token begins a word."""
    vocabulary = backend.get_vocab()
    model = json.loads(backend.to_str())["model"]
    begins = np.ones(max(vocabulary.values()) + 1, bool)
    ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
    if model.get("type") == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        begins[ids] = [not token.startswith(prefix) for token in vocabulary]
    elif any(token.startswith(WORD_MARKS) for token in vocabulary):
        begins[ids] = [token.startswith(WORD_MARKS) for token in vocabulary]
    return begins


def read_synonyms(path: Path, backend: tokenizers.Tokenizer, unknown: int | None) -> Synonyms:
    """Read a table of synonyms. Each line has a word and its replacements, separated by tabs.

    `backend` has no padding and truncation. `unknown` is the token of text that is not in the vocabulary. Words and
    replacements with it are left out.
    """
    table: dict[Word, dict[Word, None]] = collections.defaultdict(dict)
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        texts = checked(tuple(line.split("\t")))
        if isinstance(texts, Fault) or len(texts) < 2:
            reason = f" ({texts})" if isinstance(texts, Fault) else ""
            raise DataError(f"{path}, line {number}: expected a word and its synonyms, separated by tabs{reason}")
        # A vocabulary can have different tokens for a word after a space and at the start of a sentence.
        for before in (" ", ""):
            word, *others = (tuple(backend.encode(before + text, add_special_tokens=False).ids) for text in texts)
            if word and unknown not in word:
                table[word] |= dict.fromkeys(other for other in others if other and unknown not in other)
    if not any(table.values()):
        raise DataError(f"data.synonyms_file: {path} does not contain a word and a synonym of the vocabulary")
    return {word: tuple(others) for word, others in table.items() if others}
