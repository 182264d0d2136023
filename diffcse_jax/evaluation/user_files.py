"""Lines of a user's own files.

One odd line does not refuse a file: it is left out or read with a change, and the ledger counts it.
"""

from collections.abc import Iterator
from pathlib import Path

from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.text.lines import read_lines

LONGEST = 1 << 24  # characters of a line: a whole book as one document


def lines_with_text(path: Path, ledger: Ledger) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers from 1."""
    for number, line in read_lines(path, str(path), ledger, longest=LONGEST):
        if line.strip():
            yield number, line
