"""Batches of several tasks in turn: which task a batch is of is a function of the seed and its number."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, Integer

from diffcse_jax.batch import Batch
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.data.shapes import BatchShape


class Mixture:
    """Random access to batches, each of one source.

    Args:
        sources: by the names of their tasks, with as many batches as `order` has of each.
        order: of every batch the number of its source.
        without_tokens: views have no tokens but the first ones, for networks that read stored vectors alone: so all
            batches of a task have one shape.
    """

    def __init__(
        self, sources: Mapping[str, BatchSource], order: Int[np.ndarray, " batches"], *, without_tokens: bool = False
    ):
        self._sources, self._order = dict(sources), order
        self._places = places(order)
        self._without_tokens = without_tokens

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Batch:
        source, place = self._find(index)
        views = self._sources[source][place]
        return _first_tokens(views) if self._without_tokens else views

    def text_rows(self, index: int) -> tuple[str, Integer[np.ndarray, " B"]]:
        """The task of a batch, and the numbers, from 0, of its rows in the task's text; of this process alone."""
        source, place = self._find(index)
        return source, self._sources[source].text_rows(place)

    def shapes_of(self, indices: range) -> dict[tuple[str, BatchShape | None], int]:
        """The tasks and shapes of these batches, each with the index of the first batch that has it, in this order."""
        first: dict[tuple[str, BatchShape | None], int] = {}
        for index in indices:
            source, place = self._find(index)
            of_batch = self._sources[source].shapes_of(range(place, place + 1))
            for shape in [None] if self._without_tokens else of_batch:
                first.setdefault((source, shape), index)
        return first

    def _find(self, index: int) -> tuple[str, int]:
        """The source of a batch, and the batch's number there."""
        return [*self._sources][self._order[index]], int(self._places[index])


def places(order: Int[np.ndarray, " batches"]) -> Int[np.ndarray, " batches"]:
    """Of every batch its number among those of the same source, from 0."""
    numbers = np.zeros(len(order), np.int64)
    for source in np.unique(order):
        numbers[order == source] = np.arange((order == source).sum())
    return numbers


def by_ratio(ratios: Sequence[int], steps: int, seed: int) -> Int[np.ndarray, " steps"]:
    """Sources in blocks in which each has its ratio of batches, in an order drawn for every block.

    Args:
        ratios: of the sources.
        steps: the number of batches.
        seed: of the draws.
    """
    block = np.repeat(np.arange(len(ratios)), ratios)
    rng = np.random.default_rng([seed, 0])
    blocks = [rng.permutation(block) for _ in range(-(-steps // len(block)))]
    return np.concatenate([np.zeros(0, np.int64), *blocks])[:steps]


def by_temperature(
    rows: Sequence[int], temperatures: Float[np.ndarray, " steps"], seed: int
) -> Int[np.ndarray, " steps"]:
    """Sources drawn with probabilities that go as rows^(1 / temperature).

    Args:
        rows: of the sources.
        temperatures: of every batch.
        seed: of the draws.
    """
    logits = np.log(np.array(rows, np.float64))[None] / temperatures[:, None]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    bounds = np.cumsum(shares / shares.sum(axis=1, keepdims=True), axis=1)
    draws = np.random.default_rng([seed, 1]).random(len(temperatures))
    return (draws[:, None] >= bounds[:, :-1]).sum(axis=1)


def _first_tokens(views: Batch) -> Batch:
    ids, mask = (tokens[..., :1] for tokens in (views.input_ids, views.attention_mask))
    return views._replace(input_ids=ids, attention_mask=mask, layout=None, anchor_layout=None)
