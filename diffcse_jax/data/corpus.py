"""Rows of text, of which the examples of training are made.

A row has one or more columns. One column is a sentence, a second one its positive, further ones are
hard negatives. A row knows the number of the document that it was made of, and what it is.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple

from diffcse_jax.documents.ledger import NOWHERE, Ledger, Place
from diffcse_jax.errors import NoSentencesError


class Kind(enum.IntEnum):
    """What the texts of a row are. The numbers are those of the token store."""

    TEXTS = 0  # a sentence, a pair, or a pair with hard negatives
    PASSAGE = 1  # the same passage in both columns; each epoch takes a window of words out of it


class Row(NamedTuple):
    """A row of a corpus."""

    texts: tuple[str, ...]  # one for each column, without white space around it
    document: int  # the number of the document, in the order of the source
    place: Place = NOWHERE
    kind: Kind = Kind.TEXTS
    follows: bool = False  # the text continues that of the row before, in the same document


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows. Each pass reads the source again; memory holds a part of it."""

    name: str  # in messages
    columns: tuple[str, ...]
    read: Callable[[Ledger], Iterator[Row]]  # starts a pass
    fingerprint: Callable[[], str]  # returns the SHA-256 of the content in hexadecimal
    strict: bool = False  # a text that cannot be used is an error, also an empty line
    reading: tuple[str, ...] = ()  # how documents became rows; empty: a row is a line of the source

    def new_ledger(self) -> Ledger:
        """Return the ledger for a pass."""
        return Ledger(self.name, strict=self.strict, refuse_empty=not self.reading)

    def rows(self, ledger: Ledger | None = None) -> Iterator[Row]:
        """Yield the usable rows, in their order.

        Raises:
            NoSentencesError: No row is usable.
            DataError: The source cannot be read, or `strict` is set and a text cannot be used.
        """
        ledger = self.new_ledger() if ledger is None else ledger
        is_empty = True
        for row in self.read(ledger):
            is_empty = False
            yield row
        if is_empty:
            details = f" ({summary})" if (summary := ledger.summary()) else ""
            raise NoSentencesError(f"{self.name}: no usable text{details}")

    def first_texts(self) -> Iterator[str]:
        """Yield the text of the first column of each row."""
        return (row.texts[0] for row in self.rows())
