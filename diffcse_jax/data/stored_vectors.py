"""Read embeddings of the training sentences from a Parquet store that `diffcse embed` wrote.

An embedding is found by the text of its sentence, so the store may contain more text in another order. The embeddings
of a training file are copied once, next to its tokens, to arrays on disk that training maps into memory: `vectors.npy`
(one row per distinct sentence) and `rows.npy` (the row of each sentence). `meta.json` contains their SHA-256, which is
checked at each opening; a damaged copy is made again.
"""

import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int, UInt64

from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.token_store import META, TokenStore
from diffcse_jax.errors import CheckpointError, DataError
from diffcse_jax.hosts import Progress
from diffcse_jax.io import (
    atomic_dir,
    disk_errors,
    file_digests,
    first_changed,
    partial_dir,
    read_json_object,
    write_json,
)

_ARRAYS = ("vectors.npy", "rows.npy")


class SentenceVectors:
    """Embeddings of all sentences of a token store, mapped into memory.

    Args:
        folder: A folder that `make_vectors` wrote.
    """

    def __init__(self, folder: Path):
        self._vectors: Float[np.ndarray, "distinct dimension"] = np.load(folder / "vectors.npy", mmap_mode="r")
        self._rows: Int[np.ndarray, " sentences"] = np.load(folder / "rows.npy", mmap_mode="r")

    def gather(self, sentences: Int[np.ndarray, "B C"]) -> Float32[np.ndarray, "B C dimension"]:
        """Return the embeddings of sentences, given their numbers (`TokenStore.sentences`)."""
        return self._vectors[self._rows[sentences]].astype(np.float32, copy=False)


def open_vectors(store: Any, corpus: Corpus, tokens: TokenStore, *, quiet: bool = False) -> SentenceVectors:
    """Open the embeddings of a text, and copy them first if needed.

    Args:
        store: The Parquet store, a `search.vector_store.VectorStore`.
        corpus: The text.
        tokens: The text's token store.
        quiet: Do not report; one of several processes reports.

    Raises:
        DataError: The store lacks sentences of the text or cannot be read, or the text has changed.
    """
    folder = tokens.folder / f"vectors-{store.digest[:32]}"
    with disk_errors(folder, safe=f"{store.folder} is unchanged."):
        make_vectors(folder, lambda new: _copy(store, corpus, tokens, new, quiet))
    if not quiet:
        print(f"embeddings of {store.folder}, size {store.dimension}, copied to {folder}", file=sys.stderr)
    return SentenceVectors(folder)


def make_vectors(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder of embeddings unless it exists and is sound.

    Args:
        folder: The folder.
        make: Writes `vectors.npy` and `rows.npy` into a folder, which gets its name once it is complete.
    """
    if folder.exists() and (damaged := _damaged(folder)):
        print(f"warning: {folder / damaged} is damaged; copying the embeddings again", file=sys.stderr)
        with partial_dir(folder) as old:
            folder.rename(old / "damaged")
    if not folder.exists():
        with atomic_dir(folder) as new:
            make(new)
            write_json(new / META, file_digests(new, [new / name for name in _ARRAYS]))


def _damaged(folder: Path) -> str:
    """Return the first missing or damaged file, or an empty string."""
    try:
        return first_changed(folder, dict.fromkeys(_ARRAYS, "") | read_json_object(folder / META))
    except CheckpointError:
        return META


def _copy(store: Any, corpus: Corpus, tokens: TokenStore, folder: Path, quiet: bool) -> None:
    sentences = _fingerprints(itertools.chain.from_iterable(corpus))
    if len(sentences) != len(tokens) * len(tokens.columns):
        raise DataError(f"{corpus.name} has changed since this run started. Start the run again")
    distinct, first, inverse = np.unique(sentences, return_index=True, return_inverse=True)
    places = np.argsort(np.argsort(first))  # in the order of the text, which is mostly the store's
    shape = (len(distinct), store.dimension)
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", mode="w+", dtype=store.dtype, shape=shape)
    _reserve(folder / "vectors.npy")
    missing = np.ones(len(distinct), bool)
    with Progress(f"reading {store.folder}", "rows", quiet=quiet) as progress:
        for texts, block in store.blocks():
            stored = _fingerprints(texts)
            index = np.searchsorted(distinct, stored)
            known = distinct.take(index, mode="clip") == stored
            vectors[places[index[known]]] = block[known]
            missing[index[known]] = False
            progress.update(len(texts))
    if missing.any():
        raise _lacks(store, corpus, np.flatnonzero(missing[inverse]), len(sentences))
    vectors.flush()
    np.save(folder / "rows.npy", places[inverse])


def _reserve(path: Path) -> None:
    """Reserve the file's room: on a full disk, writing to mapped memory would end the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _lacks(store: Any, corpus: Corpus, missing: Int[np.ndarray, " n"], of: int) -> DataError:
    row, column = divmod(int(missing[0]), len(corpus.columns))
    line, texts = next(itertools.islice(corpus.numbered(), row, None))
    return DataError(
        f"{store.folder} lacks the embeddings of {len(missing):,} of the {of:,} sentences of {corpus.name}. The first "
        f"is on line {line}: {texts[column][:80]!r}. Run `diffcse embed` with --output {store.folder} on all of the "
        "text (with --columns, if the file has several columns)"
    )


def _fingerprints(sentences: Iterable[str]) -> UInt64[np.ndarray, " sentences"]:
    """Return a hash of each sentence; among 10^6 sentences two are equal with a chance of 10^-7."""
    numbers = (hashlib.blake2b(sentence.encode(), digest_size=8).digest() for sentence in sentences)
    return np.frombuffer(b"".join(numbers), np.uint64)
