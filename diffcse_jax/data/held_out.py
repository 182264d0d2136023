"""The documents that are held out from training, to choose among its checkpoints.

A hash of a document's words decides, so that neither order nor other documents matter, and equal ones stay together.
"""

import array
import bisect
import hashlib
from collections.abc import Iterable, Iterator

from diffcse_jax.data.documents import Document, Documents

DIGESTS = 1 << 64


def digest(text: str) -> int:
    """A 64-bit hash of a text, whatever its white space and case."""
    words = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=8).digest())


def is_held_out(document: Document, share: float) -> bool:
    """True for about this share of all documents."""
    if not share:
        return False
    text = (text for section in document for text in (section.title, *section.lines))
    return digest(" ".join(text)) < share * DIGESTS


def held_out(documents: Documents, share: float) -> Iterator[Document]:
    """The documents that are held out."""
    return (document for document in documents if is_held_out(document, share))


class Texts:
    """A set of texts, held as eight bytes each: one in 10^11 others is taken for a member where there are 10^8.

    Args:
        texts: what it holds.
    """

    def __init__(self, texts: Iterable[str]):
        self._digests = array.array("Q", sorted(set(map(digest, texts))))

    def __contains__(self, text: str) -> bool:
        wanted = digest(text)
        index = bisect.bisect_left(self._digests, wanted)
        return index < len(self._digests) and self._digests[index] == wanted
