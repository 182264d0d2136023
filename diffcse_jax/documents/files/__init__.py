"""Files of documents become titled sections."""

EXTRA = "documents"  # the optional dependencies that most formats need
MOST_BYTES = 256 << 20  # of a file, decompressed


class EncryptedError(Exception):
    """A document that only opens with a password."""


class TooLargeError(Exception):
    """A document that unpacks to more than `MOST_BYTES`."""


class TooRepetitiveError(Exception):
    """A document with cells that stand for far more text than its file has."""
