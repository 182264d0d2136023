"""Sentences of files to vectors, some thousand at a time: what `encode`, `embed` and `search` have in common."""

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float32

from diffcse_jax.data.entries import STDIN, Entry, in_chunks, read_entries
from diffcse_jax.data.vector_folder import TEXT
from diffcse_jax.encoder import SentenceEncoder
from diffcse_jax.hosts import Progress

CHUNK = 4096


def entries_of(
    inputs: Sequence[str], option: str, columns: Sequence[str], id_column: str, *, every_line: bool = False
) -> Iterator[Entry]:
    """The sentences of all inputs, with the name of their `file` where there are several; tells what it skips.

    Args:
        inputs: files, or `-`.
        option: the name, in errors, of the option that they were given by.
        columns: as for `read_entries`.
        id_column: as for `read_entries`.
        every_line: a line that holds no sentence is an error.

    Raises:
        DataError: an input cannot be read; all are opened before the first is read.
    """
    if STDIN in inputs and sys.stdin.isatty():
        print("reading sentences from the terminal, one a line; Ctrl-D ends them", file=sys.stderr)
    sources = [
        read_entries(
            source,
            option,
            columns=columns,
            id_column=id_column,
            on_bad_line="error" if every_line else "skip",
            instead="write .parquet or .jsonl, which hold the numbers of lines",
        )
        for source in inputs
    ]

    def entries() -> Iterator[Entry]:
        for source, sentences in zip(inputs, sources, strict=True):
            file = {"file": source} if len(sources) > 1 else {}
            yield from (file | dict(entry) for entry in sentences)
            if skipped := sentences.corpus.skipped_summary():
                print(f"{sentences.corpus.name}: {skipped}", file=sys.stderr)

    return entries()


def encoded(
    entries: Iterable[Entry], encoder: SentenceEncoder, batch_size: int, *, normalize: bool
) -> Iterator[tuple[list[Entry], Float32[np.ndarray, "rows dimension"]]]:
    """The entries, some thousand at a time, with their vectors; tells how far it is."""
    with Progress("encoding", "sentences") as progress:
        for chunk in in_chunks(entries, CHUNK):
            yield chunk, encode_chunk(chunk, encoder, batch_size, progress, normalize=normalize)


def encode_chunk(
    chunk: Sequence[Entry], encoder: SentenceEncoder, batch_size: int, progress: Progress, *, normalize: bool
) -> Float32[np.ndarray, "rows dimension"]:
    """The vectors of entries."""
    computed = 0

    def told(count: int) -> None:
        nonlocal computed
        computed += count
        progress.update(count)

    sentences = [entry[TEXT] for entry in chunk]
    vectors = encoder.encode(sentences, batch_size=batch_size, normalize=normalize, on_progress=told)
    progress.update(len(chunk) - computed)  # of equal sentences one is computed
    return vectors
