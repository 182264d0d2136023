"""Open the text that `data.train_file` names: rows to train on, or documents.

Documents are for training, or are held out.
"""

import itertools
from collections.abc import Iterator

from diffcse_jax.config import DataConfig
from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.pairs import corpus_of
from diffcse_jax.data.rows import open_rows
from diffcse_jax.data.split import Split
from diffcse_jax.documents import docstrings
from diffcse_jax.documents.document import Document, Documents, Section, id_of
from diffcse_jax.documents.find import LINES, Source, find_source, fingerprint
from diffcse_jax.documents.ledger import Ledger, Place
from diffcse_jax.documents.open import Reading, documents_of, has_blank_lines
from diffcse_jax.documents.text.lines import extension, read_lines
from diffcse_jax.errors import DataError


def open_corpus(data: DataConfig, split: Split | None = None) -> Corpus:
    """Open the rows that `data.train_file` names, or the rows made of its documents.

    Documents of a `split` that is open already are not read again.
    """
    if data.reads_documents:
        return corpus_of(split or open_split(data), data)
    return open_rows(data)


def open_split(data: DataConfig) -> Split:
    """Open the documents that `data.train_file` names, to train on and held out."""
    source = find_source(data.train_file)
    if len(data.columns) > 2:
        raise DataError(
            f"{source.name}, data.columns={data.columns}: name a title and a text, or set "
            "data.pairs='columns'"
        )
    if source.is_docstrings:
        documents = docstrings.docstring_documents()
    elif source.is_file and extension(source.files[0]) in LINES:
        documents = Documents(
            source.name, lambda ledger: _blocks(source, ledger), lambda: fingerprint(source)
        )
    else:
        documents = documents_of(source, Reading(data.columns, with_code=False))
    return Split(documents, data.held_out, strict=data.on_bad_line == "error")


def _blocks(source: Source, ledger: Ledger) -> Iterator[Document]:
    """Yield the blocks between blank lines of a file or, without blank lines, the lines."""
    (file,) = source.files
    name = str(file)
    ledger.read_file()
    numbered = read_lines(file, name, ledger)
    separated = has_blank_lines(file)

    def block(line: tuple[int, str]) -> bool | int:
        return bool(line[1].strip()) if separated else line[0]

    for _, group in itertools.groupby(numbered, block):
        numbers, lines = zip(*group, strict=True)
        place = Place(name, numbers[0])
        if lines[0].strip():
            ledger.keep()
            yield Document(id_of(place), (Section("", lines),), place)
