"""Documents: text that belongs together. A document has sections. A section has a title or none.

A document is a block between blank lines (or a line) of a txt file, a row of a table, a file of a
folder, or a docstring. It keeps its identity from the file to the hit of a search: whatever is made
of it carries its number.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from diffcse_jax.documents.ledger import NOWHERE, Ledger, Place
from diffcse_jax.documents.sentences import canonical, sentences_of


class Section(NamedTuple):
    """A part of a document."""

    title: str  # may be empty; that of a nested section is a path, `Guide: Installation`
    lines: Sequence[str]  # a line is a paragraph, or blank
    sentence_a_line: bool = False
    column: str = ""  # the column of a table that holds the text, if the user named columns

    def sentences(self) -> list[str]:
        """Return the sentences, without a title that the text repeats at its start."""
        sentences = sentences_of(self.lines)
        if self.sentence_a_line:
            sentences = [line.strip() for line in self.lines]
        return sentences[1:] if self.title and sentences[:1] == [self.title] else sentences


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with its identity.

    Attributes:
        id: Identifies the text; see `ids.py`.
        sections: The text.
        place: Where the text stands, for messages and hits.
        columns: The other columns of its row as JSON, which hits repeat; empty without any.
        whole: The text is a line, or a row with one text. Search keeps it whole unless the model
            reads less.
    """

    id: str
    sections: tuple[Section, ...]
    place: Place = NOWHERE
    columns: str = ""
    whole: bool = False

    def text(self) -> str:
        """Return the titles and lines, joined by spaces."""
        return " ".join(text for part in self.sections for text in (part.title, *part.lines))


@dataclasses.dataclass(frozen=True)
class Documents:
    """A source of documents.

    Attributes:
        name: The source, as the user named it.
        read: Starts a pass over the source. Its losses are entered in the ledger.
        fingerprint: Returns the SHA-256 of the content in hexadecimal.
    """

    name: str
    read: Callable[[Ledger], Iterator[Document]]
    fingerprint: Callable[[], str]


def digest(text: str) -> int:
    """Return a 64-bit hash of a text that ignores case, white space and how letters are encoded."""
    content = canonical(text).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def is_in_share(text_digest: int, share: float) -> bool:
    """Return whether a text belongs to this share of all texts. The hash of the text decides."""
    return text_digest < share * 2**64
