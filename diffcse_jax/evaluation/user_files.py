"""Lines of a user's own files, and the account of them.

One odd line does not refuse a file: it is left out or read with a change, and the ledger counts it.
"""

from collections.abc import Iterator
from pathlib import Path

from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.documents.text.lines import read_lines
from diffcse_jax.errors import warn_user
from diffcse_jax.hosts import log_line

LONGEST = 1 << 24  # characters of a line: a whole book as one document


def lines_with_text(path: Path, ledger: Ledger) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank, with their numbers from 1."""
    for number, line in read_lines(path, str(path), ledger, longest=LONGEST):
        if line.strip():
            yield number, line


def report(ledger: Ledger) -> None:
    """Print what was read, and warn once of all that was left out or changed."""
    is_odd = ledger.has_losses or bool(ledger.changed)
    oddities = ledger.oddities() if is_odd else []
    for line in ledger.lines():
        if line not in oddities:
            log_line(line)
    if oddities:
        warn_user("; ".join(oddities))
