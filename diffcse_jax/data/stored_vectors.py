"""Vectors of the training sentences from a Parquet store, as `diffcse embed` writes it.

A vector is found by the text of its sentence: a store may hold more text than the training file, in another order, in
any number of parts. What a training file needs is copied once, beside its tokens, to arrays on disk that training maps
into memory: `vectors.npy`, one row per distinct sentence, and `rows.npy`, the row of every sentence. `meta.json` has
their SHA-256, with which they are compared at every opening; a damaged copy is made anew.
"""

import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tqdm
from jaxtyping import Float, Float32, Int, UInt64

from diffcse_jax.data.corpus import Corpus
from diffcse_jax.data.tokens import META, TokenStore
from diffcse_jax.errors import CheckpointError, DataError
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


@runtime_checkable
class VectorStore(Protocol):
    """What is read of `diffcse_jax.search.vector_store.VectorStore`."""

    @property
    def folder(self) -> Path:
        """The folder of the store."""

    @property
    def dtype(self) -> np.dtype:
        """The type of the embeddings."""

    @property
    def dimension(self) -> int:
        """The embedding size."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the content."""

    def blocks(self) -> Iterator[tuple[list[str], Float[np.ndarray, "rows dimension"]]]:
        """Yield texts and their embeddings."""


class SentenceVectors:
    """Vectors of all sentences of a token store, mapped into memory.

    Args:
        folder: from `make_vectors`.
    """

    def __init__(self, folder: Path):
        self._vectors: Float[np.ndarray, "distinct dimension"] = np.load(folder / "vectors.npy", mmap_mode="r")
        self._rows: Int[np.ndarray, " sentences"] = np.load(folder / "rows.npy", mmap_mode="r")

    def gather(self, sentences: Int[np.ndarray, "B C"]) -> Float32[np.ndarray, "B C dimension"]:
        """The vectors of sentences by their numbers (`TokenStore.sentences`)."""
        return self._vectors[self._rows[sentences]].astype(np.float32, copy=False)


def open_vectors(store: VectorStore, corpus: Corpus, tokens: TokenStore, *, quiet: bool = False) -> SentenceVectors:
    """The vectors of a text: those copied earlier, or copied now.

    Args:
        store: where the vectors are.
        corpus: the text.
        tokens: its token store.
        quiet: report nothing; of several processes one speaks.

    Raises:
        DataError: the store lacks sentences of the text or cannot be read, or the text has changed.
    """
    folder = tokens.folder / f"vectors-{store.digest[:32]}"
    with disk_errors(folder, safe=f"{store.folder} stays as it is."):
        make_vectors(folder, lambda new: _copy(store, corpus, tokens, new, quiet))
    if not quiet:
        print(f"vectors of {store.folder}: {store.dimension} numbers each, in {folder}", file=sys.stderr)
    return SentenceVectors(folder)


def make_vectors(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes a folder of vectors unless an earlier run has; a damaged one is named, and made anew.

    Args:
        folder: where they are to be.
        make: writes `vectors.npy` and `rows.npy` into a folder that gets this name once it is whole.
    """
    if folder.exists() and (damaged := _damaged(folder)):
        print(f"warning: {folder / damaged} is damaged; the vectors are made anew", file=sys.stderr)
        with partial_dir(folder) as old:
            folder.rename(old / "damaged")
    if not folder.exists():
        with atomic_dir(folder) as new:
            make(new)
            write_json(new / META, file_digests(new, [new / name for name in _ARRAYS]))


def _damaged(folder: Path) -> str:
    """The first file of a copy that is not what was written; empty where there is none."""
    try:
        return first_changed(folder, dict.fromkeys(_ARRAYS, "") | read_json_object(folder / META))
    except CheckpointError:  # copies of earlier versions have none
        return META


def _copy(store: VectorStore, corpus: Corpus, tokens: TokenStore, folder: Path, quiet: bool) -> None:
    sentences = _fingerprints(itertools.chain.from_iterable(corpus))
    if len(sentences) != len(tokens) * len(tokens.columns):
        raise DataError(f"{corpus.name} has changed since this run began; start it again")
    distinct, first, inverse = np.unique(sentences, return_index=True, return_inverse=True)
    places = np.argsort(np.argsort(first))  # in the order of the text, which is mostly the store's
    shape = (len(distinct), store.dimension)
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", mode="w+", dtype=store.dtype, shape=shape)
    _reserve(folder / "vectors.npy")
    missing = np.ones(len(distinct), bool)
    with tqdm.tqdm(desc=f"reading {store.folder}", unit=" rows", delay=1.0, disable=quiet or None) as progress:
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
    """Takes the room that a file of holes needs: where a disk is full, writing to mapped memory ends the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _lacks(store: VectorStore, corpus: Corpus, missing: Int[np.ndarray, " n"], of: int) -> DataError:
    row, column = divmod(int(missing[0]), len(corpus.columns))
    line, texts = next(itertools.islice(corpus.numbered(), row, None))
    return DataError(
        f"{store.folder} lacks vectors of {len(missing):,} of the {of:,} sentences of {corpus.name}, first of line "
        f"{line}, {texts[column][:80]!r}: run `diffcse embed` with --output {store.folder} on all of its text "
        "(of a file with several columns give --columns)"
    )


def _fingerprints(sentences: Iterable[str]) -> UInt64[np.ndarray, " sentences"]:
    """Numbers that tell sentences apart, but for one chance in 10^7 among 10^6 of them."""
    numbers = (hashlib.blake2b(sentence.encode(), digest_size=8).digest() for sentence in sentences)
    return np.frombuffer(b"".join(numbers), np.uint64)
