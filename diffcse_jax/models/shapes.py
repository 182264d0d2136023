"""The shapes of batches that encoding has: few, because a program is compiled for each of them."""

import dataclasses
from collections.abc import Iterator, Sequence

SHORTEST = 16  # tokens
LONGEST_QUERY = 64  # tokens
FEW_ROWS = 8
CPU_TOKENS = 2048  # of a batch. More do not fit a CPU's caches: a token then takes a fifth longer


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of an encoder's batches.

    A batch has one of at most three numbers of rows: one, a few, or `batch_size`, which is smaller
    for long texts on a CPU. Its length is one of four for each power of two, so that padding wastes
    little. For one batch size, a model that reads 128 tokens has at most 33 shapes, one that reads
    512 has 57, and one that reads 8,192 has 102.
    """

    batch_size: int
    max_length: int  # the number of tokens of the longest text
    on_cpu: bool
    devices: int = 1  # all have equally many rows

    def of(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the rows and the length of each batch of texts with these numbers of tokens.

        Args:
            lengths: The numbers of tokens, the largest first. A batch takes as many texts as it has
                rows; the last batch may have more rows than there are texts left.
        """
        start = 0
        is_whole = True
        while start < len(lengths):
            if is_whole:  # the texts after the last whole batch share a length
                length = self._length(lengths[start])
                one, few, whole = self._rows(length)
            left = len(lengths) - start
            # The time of a CPU grows with the rows. For an accelerator, one large batch takes less
            # time than several small ones.
            if left >= whole:
                rows = whole
            elif self.on_cpu:
                rows = few if 2 * left >= few else one
            else:
                rows = next(size for size in (one, few, whole) if size >= left)
            is_whole = rows == whole
            is_alone = rows == 1 and (len(lengths) == 1 or not is_whole)
            yield rows, self._length_alone(lengths[start]) if is_alone else length
            start += rows

    def _rows(self, length: int) -> tuple[int, int, int]:
        """Return the numbers of rows of batches with this length, the smallest first."""
        most = max(1, CPU_TOKENS // length) if self.on_cpu else self.batch_size
        whole = min(self.batch_size, most)
        one, few, whole = (
            -(-min(rows, whole) // self.devices) * self.devices for rows in (1, FEW_ROWS, whole)
        )
        return one, few, whole

    def _length(self, tokens: int) -> int:
        """Return the padded length: 16, 20, ... 32, 40, ... 64, 80, ..., or `max_length`."""
        step = max(4, _power_of_two(tokens) // 8)
        return min(max(SHORTEST, -(-tokens // step) * step), self.max_length)

    def _length_alone(self, tokens: int) -> int:
        """Return the padded length of a single text. For short ones, few shapes matter more."""
        return self._length(_power_of_two(tokens) if tokens <= LONGEST_QUERY else tokens)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
