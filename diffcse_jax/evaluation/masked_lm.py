"""The share of masked tokens that a masked LM recovers, and that of two guesses by frequency."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import transformers
from jaxtyping import Int, Integer

from diffcse_jax.batch import Vocabulary
from diffcse_jax.data.token_store import Examples
from diffcse_jax.evaluation import CachedEncoder, Encoder
from diffcse_jax.evaluation.metrics import Metric, paired_interval
from diffcse_jax.models.tokenizer import cutting_tokenizer, tokenise
from diffcse_jax.run_folder.records import Measured, Outcomes

MASK_RATIO = 0.15
MOST_COUNTED = 20_000_000  # tokens of the training text whose frequencies make the guesses


@runtime_checkable
class MaskedLM(Protocol):
    """A model that fills masks."""

    def fill_masks(
        self, token_ids: Sequence[list[int]], batch_size: int = 64
    ) -> Sequence[Integer[np.ndarray, " tokens"]]:
        """Return the likeliest token at each [MASK] of tokenised texts."""
        ...


class TrainingTokens(NamedTuple):
    """What the metric needs of a run besides the text that it masks."""

    tokenizer: transformers.PreTrainedTokenizerFast
    vocabulary: Vocabulary
    text: Callable[[], Examples]  # returns the tokens of the training text, once they are there

    def of(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return the tokens of texts, which are cut to `max_length`."""
        backend = cutting_tokenizer(self.tokenizer, max_length)
        return tokenise(backend, texts).ids


class Blanks(NamedTuple):
    """Texts with masked tokens."""

    token_ids: list[list[int]]  # of each text, with [CLS], [SEP] and [MASK]
    text: Int[np.ndarray, " blanks"]  # the number of the text of each masked token
    position: Int[np.ndarray, " blanks"]  # its position in the text
    target: Int[np.ndarray, " blanks"]  # the token that was masked

    @property
    def previous(self) -> Int[np.ndarray, " blanks"]:
        """The token before each masked one: [MASK] if that is masked as well."""
        places = zip(self.text, self.position, strict=True)
        return np.array([self.token_ids[text][position - 1] for text, position in places])


def mask(token_ids: Sequence[Sequence[int]], vocabulary: Vocabulary) -> Blanks:
    """Replace `MASK_RATIO` of the tokens of each text, at least one, by [MASK].

    Each call chooses the same tokens.
    """
    generator = np.random.default_rng(0)
    masked = []
    blanks: list[tuple[int, int, int]] = []
    for number, text in enumerate(token_ids):
        ids = np.array(text)
        ordinary = np.flatnonzero(~np.isin(ids, vocabulary.special_ids))
        count = min(len(ordinary), max(1, round(MASK_RATIO * len(ordinary))))
        chosen = np.sort(generator.permutation(ordinary)[:count])
        blanks += [(number, int(position), int(ids[position])) for position in chosen]
        ids[chosen] = vocabulary.mask_id
        masked.append(ids.tolist())
    return Blanks(masked, *np.array(blanks, np.int64).reshape(-1, 3).T)


def guess_most_frequent(token_ids: Integer[np.ndarray, " tokens"], special: Sequence[int]) -> int:
    """Return the most frequent token of a text, special tokens apart."""
    counts = np.bincount(token_ids)
    counts[[token for token in special if token < len(counts)]] = 0
    return int(counts.argmax())


def guess_after(
    previous: Int[np.ndarray, " blanks"],
    token_ids: Integer[np.ndarray, " tokens"],
    special: Sequence[int],
) -> Int[np.ndarray, " blanks"]:
    """Return the most frequent token of a text after each `previous` one.

    If it has none, the most frequent token of the whole text is returned. A masked previous token
    is unknown: [MASK] does not occur in the text.
    """
    first = token_ids[:-1].astype(np.int64)
    second = token_ids[1:].astype(np.int64)
    used = np.isin(first, previous) & ~np.isin(second, special)
    size = int(token_ids.max()) + 1
    pairs, counts = np.unique(first[used] * size + second[used], return_counts=True)
    by_count = pairs[np.argsort(counts, kind="stable")].tolist()
    # The last pair of a token is its most frequent one.
    followers = {pair // size: pair % size for pair in by_count}
    default = guess_most_frequent(token_ids, special)
    return np.array([followers.get(token, default) for token in previous.tolist()])


@dataclasses.dataclass(frozen=True)
class MaskedAccuracy(Metric[Encoder]):
    """The share of masked tokens that a masked LM recovers.

    The masks are the same in each measurement. Two guesses are measured as well: the most frequent
    token of the training text (`unigram`), and the most frequent one after the previous token
    (`bigram`). A model below them has learnt nothing from the context.
    """

    token_ids: Sequence[Sequence[int]]  # of each text
    training: TrainingTokens

    aspect = " as a masked LM"

    @functools.cached_property
    def blanks(self) -> Blanks:
        """The texts with their masked tokens."""
        return mask(self.token_ids, self.training.vocabulary)

    @functools.cached_property
    def guesses(self) -> dict[str, float]:
        """The scores of the guesses by name."""
        counted = np.asarray(self.training.text().token_ids[:MOST_COUNTED])
        special = self.training.vocabulary.special_ids
        target = self.blanks.target
        answers = {
            "unigram": guess_most_frequent(counted, special),
            "bigram": guess_after(self.blanks.previous, counted, special),
        }
        return {
            f"{self.name}_{name}": 100 * float(np.mean(answer == target))
            for name, answer in answers.items()
        }

    def measure(self, model: Encoder | MaskedLM) -> Measured:
        if isinstance(model, CachedEncoder):
            model = model.encoder
        assert isinstance(model, MaskedLM)
        filled = model.fill_masks(self.blanks.token_ids, self.batch_size)
        places = zip(self.blanks.text, self.blanks.position, strict=True)
        answers = np.array([filled[text][position] for text, position in places])
        right = 100.0 * (answers == self.blanks.target)
        return Measured({self.name: float(right.mean()), **self.guesses}, [right.tolist()])

    def interval(self, before: Outcomes, after: Outcomes) -> tuple[float, float]:
        return paired_interval(before, after, groups=self.blanks.text)

    @property
    def remark(self) -> str:
        guesses = ", ".join(
            f"{name.rpartition('_')[2]} {score:.2f}" for name, score in self.guesses.items()
        )
        return (
            f"Guesses by frequency get {guesses}. This metric does not compare sentence embeddings."
        )

    @property
    def units(self) -> str:
        return f"{len(self.blanks.text):,} masked tokens of {len(self.token_ids):,} texts"

    @property
    def sample(self) -> tuple[int, str]:
        return len(self.token_ids), "texts"
