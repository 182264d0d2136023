"""Read documents for a search, and account for all of them."""

import sys
from collections.abc import Iterator, Sequence

from diffcse_jax.documents.document import Document, Documents
from diffcse_jax.documents.find import STDIN
from diffcse_jax.documents.ledger import Ledger
from diffcse_jax.errors import DataError, counted
from diffcse_jax.hosts import Progress, report


def read_source(source: Documents, ledger: Ledger) -> Iterator[Document]:
    """Start a pass over a source. If texts are to be typed, say so."""
    if source.name == STDIN and sys.stdin.isatty():
        print("reading texts from the terminal, one per line; Ctrl-D ends them", file=sys.stderr)
    return source.read(ledger)


def read_documents(source: Documents, *, strict: bool = False) -> list[Document]:
    """Return the documents of a source, with progress, and say what was read and what was not.

    Raises `DataError` if there are none.
    """
    ledger = Ledger(source.name, strict=strict)
    documents = []
    with Progress(f"reading {source.name}", "documents") as progress:
        for document in read_source(source, ledger):
            documents.append(document)
            progress.update(1)
    count_documents(documents, ledger)
    require_some(documents, ledger)
    report(ledger)
    return documents


def count_documents(documents: Sequence[Document], ledger: Ledger) -> None:
    """Count documents by their ids: rows with the same id are one document."""
    number = len({document.id for document in documents})
    ledger.make("document{s}", number)
    if number < len(documents):
        rows = counted(len(documents), "row{s}")
        ledger.note(f"{ledger.name}: {rows} with {number:,} ids; rows with one id are one document")


def require_some(documents: Sequence[Document], ledger: Ledger) -> None:
    """Raise `DataError` if a source has no documents."""
    if not documents:
        details = f" ({ledger.summary()})" if ledger.lines() else ""
        raise DataError(f"{ledger.name}: it contains no text{details}")
