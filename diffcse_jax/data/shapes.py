"""The shapes of a run's batches: few, because the train step is compiled for each.

A batch has a length, to which its sentences are padded, and a share of positions that may hold real tokens, which is
the capacity of its layout. Lengths follow from the text alone; so no result depends on devices or on packing.
"""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)  # lengths, in tokens, up to the maximal one
MAX_LENGTHS = 2
MAX_SHAPES = 4
STEPS_OF_SHARE = 16


class BatchShape(NamedTuple):
    """A length, and the share of a batch's positions, in sixteenths, that may be real; all of them: no layout."""

    length: int
    sixteenths: int

    @property
    def packed(self) -> bool:
        """True if padding is left out."""
        return self.sixteenths < STEPS_OF_SHARE

    def capacity(self, positions: int) -> int:
        """Slots for the real tokens of so many positions."""
        return math.ceil(positions * self.sixteenths / STEPS_OF_SHARE)

    @classmethod
    def of(cls, length: int, share: float) -> "BatchShape":
        """The smallest shape of a length that holds this share."""
        return cls(length, math.ceil(STEPS_OF_SHARE * share))


def bucket_lengths(max_length: int) -> tuple[int, ...]:
    """The lengths that may be chosen from: the last of them is `max_length`."""
    return (*(length for length in BUCKETS if length < max_length), max_length)


def choose_lengths(longest: Iterable[int], max_length: int) -> tuple[int, ...]:
    """At most `MAX_LENGTHS` lengths, the last of them `max_length`, under which batches have the least padding.

    Args:
        longest: of some batches the length of the longest sentence.
        max_length: of any sentence.
    """
    counts = collections.Counter(longest)

    def padded(lengths: Sequence[int]) -> int:
        return sum(count * smallest(lengths, length) for length, count in counts.items())

    return _greedy([max_length], bucket_lengths(max_length), MAX_LENGTHS, padded)


def smallest(lengths: Sequence[int], longest: int) -> int:
    """The smallest of these lengths that holds a sentence."""
    return min(length for length in lengths if length >= longest)


def choose_shapes(needed: Iterable[BatchShape], lengths: Sequence[int]) -> tuple[BatchShape, ...]:
    """At most `MAX_SHAPES` shapes, among them one for any batch, under which the fewest positions are computed.

    Args:
        needed: of some batches the smallest shapes that hold them.
        lengths: the lengths of a run.
    """
    counts = collections.Counter(needed)

    def computed(shapes: Sequence[BatchShape]) -> int:
        return sum(count * math.prod(smallest_shape(shapes, shape)) for shape, count in counts.items())

    whole = [BatchShape(length, STEPS_OF_SHARE) for length in lengths]
    return _greedy(whole, sorted(counts), MAX_SHAPES, computed)


def smallest_shape(shapes: Sequence[BatchShape], needed: BatchShape) -> BatchShape:
    """The smallest of these shapes that holds a batch; of the batch's own length."""
    return min(shape for shape in shapes if shape.length == needed.length and shape >= needed)


def _greedy(
    start: Sequence[Any], candidates: Sequence[Any], most: int, cost: Callable[[Sequence[Any]], int]
) -> tuple[Any, ...]:
    """`start` and candidates, in order: one by one those that lower the cost the most."""
    chosen = list(start)
    while len(chosen) < most:
        best = min(candidates, key=lambda candidate: cost([*chosen, candidate]))
        if cost([*chosen, best]) >= cost(chosen):
            break
        chosen.append(best)
    return tuple(sorted(chosen))
