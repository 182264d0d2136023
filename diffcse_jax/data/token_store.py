"""Tokenise a corpus once, into arrays on disk that training maps into memory. Embeddings are stored in the same way.

A token store is a folder: `token_ids.npy` (all sentences), `offsets.npy` (where each sentence starts), `meta.json` and,
for documents, `document_starts.npy` (the first example of each). The folder's name is a hash of everything that
determines its content. Embeddings that `diffcse embed` stored are copied next to it: `vectors.npy` (one row per
distinct sentence) and `rows.npy` (the row of each sentence). `meta.json` contains the SHA-256 of the arrays, which is
checked at each opening; a damaged folder is made again.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from jaxtyping import Float, Float32, Int, Integer, UInt64

from diffcse_jax import io
from diffcse_jax.data.readers import Corpus, Row
from diffcse_jax.data.tokenizer import tokenise, unlimited_tokenizer
from diffcse_jax.errors import CheckpointError, DataError, counted
from diffcse_jax.hosts import Progress

FORMAT_VERSION = 3
META = "meta.json"
BLOCK_ROWS = 10_000
BLOCK_CHARACTERS = 1 << 25


class Examples:
    """Examples of one or more sentences. The number of an example, its row, may include a random choice.

    Attributes:
        columns: Names of the columns. An example has one sentence per column.
        max_length: The largest number of tokens of a sentence.
        token_ids: All tokens of the text.
        offsets: Where each sentence of the text starts in `token_ids`; the last entry is its end.
    """

    columns: tuple[str, ...]
    max_length: int
    token_ids: Integer[np.ndarray, " tokens"]
    offsets: Int[np.ndarray, " sentences_and_1"]

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // len(self.columns)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """Return the examples in random order, each with a random choice."""
        return generator.permutation(len(self))

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """Return the row of each example in the text, counting from 0."""
        return rows

    def sentences(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Return the numbers of the examples' sentences, in the order of the text."""
        return rows[:, None] * len(self.columns) + np.arange(len(self.columns))

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Return the number of tokens of each sentence, including special tokens."""
        sentences = self.sentences(rows)
        return self.offsets[sentences + 1] - self.offsets[sentences]

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B C T"], Int[np.ndarray, "B C"]]:
        """Return the token ids (int32), padded to `width`, and the lengths of the sentences."""
        starts, lengths = self.offsets[self.sentences(rows)], self.lengths(rows)
        column = np.arange(width)
        real = column < lengths[..., None]
        token_ids = self.token_ids[np.where(real, starts[..., None] + column, 0)]
        return np.where(real, token_ids, pad_token_id).astype(np.int32), lengths


class TokenStore(Examples):
    """The rows of a text as examples, mapped into memory from a folder of `build_or_open`.

    Attributes:
        folder: Where the store is. Its name is a hash of the text, the tokenizer and how both were read.
        document_starts: The first example of each document; None if the corpus does not have documents.
        note: What was skipped or left out when the store was built.
    """

    def __init__(self, folder: Path):
        meta = io.read_json_object(folder / META)
        self.folder = folder
        self.columns = tuple(meta["columns"])
        self.max_length = meta["max_length"]
        self.note: str = meta["note"]
        self.token_ids = np.load(folder / "token_ids.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        documents = folder / "document_starts.npy"
        self.document_starts: Int[np.ndarray, " documents"] | None = np.load(documents) if documents.exists() else None

    @property
    def name(self) -> str:
        """The hash that is the folder's name."""
        return self.folder.name


class SentenceVectors:
    """Embeddings of all sentences of a text, mapped into memory from a folder of `vectors.npy` and `rows.npy`."""

    def __init__(self, folder: Path):
        self._vectors: Float[np.ndarray, "distinct dimension"] = np.load(folder / "vectors.npy", mmap_mode="r")
        self._rows: Int[np.ndarray, " sentences"] = np.load(folder / "rows.npy", mmap_mode="r")

    def gather(self, sentences: Int[np.ndarray, "B C"]) -> Float32[np.ndarray, "B C dimension"]:
        """Return the embeddings of sentences, given their numbers (`TokenStore.sentences`)."""
        return self._vectors[self._rows[sentences]].astype(np.float32, copy=False)


def build_or_open(
    corpus: Corpus,
    tokenizer: transformers.PreTrainedTokenizerFast,
    max_length: int,
    cache_dir: str | Path = "",
    *,
    prompts: Sequence[str] = (),
    quiet: bool = False,
) -> TokenStore:
    """Open the token store of a corpus, or build it. The processes of a host build it once.

    Args:
        corpus: The text. Each column is tokenised as a sentence of its own.
        tokenizer: A fast tokenizer. Its own truncation and padding are ignored.
        max_length: Tokens per sentence, including special tokens; longer sentences are cut.
        cache_dir: The folder of all stores. Empty: `~/.cache/diffcse_jax/tokens` (or below $XDG_CACHE_HOME).
        prompts: The text in front of each sentence, by column. Empty: none.
        quiet: Do not report, because another process does.
    """
    backend = unlimited_tokenizer(tokenizer)
    backend.enable_truncation(max_length)
    text = corpus.fingerprint()
    parts = [FORMAT_VERSION, text, corpus.columns, corpus.on_bad_line, backend.to_str(), corpus.reading]
    parts += [list(prompts)] if any(prompts) else []
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = (io.expand_path(cache_dir) if cache_dir else io.cache_folder("tokens")) / name

    def build(new: Path) -> dict[str, Any]:
        _write_arrays(corpus, backend, new, prompts, quiet)
        if corpus.fingerprint() != text:
            raise DataError(f"{corpus.name} changed while it was read. Start again once the file is complete")
        return {"columns": corpus.columns, "max_length": max_length, "note": corpus.summary()}

    built = False
    with io.disk_errors(folder, safe="The text is unchanged.", instead="set data.cache_dir to another folder"):
        if _damaged(folder):
            lock_file = folder.with_name(f".{name}.lock")
            with io.lock(lock_file, wait=True):
                built = make_arrays(folder, build)  # unless another process has built it meanwhile
                lock_file.unlink(missing_ok=True)
        store = TokenStore(folder)
    if not quiet:
        note = f" ({store.note})" if store.note else ""
        rows, tokens = counted(len(store), "row{s}"), counted(len(store.token_ids), "token{s}")
        size = f"{rows} ({', '.join(store.columns)}), {tokens}{note}"
        print(f"{'tokenised' if built else 'found tokens of'} {corpus.name}: {size}, in {folder}", file=sys.stderr)
        if built and (advice := corpus.advice()):
            print(f"warning: text that is not UTF-8 was skipped. {advice}", file=sys.stderr)
        if built and not corpus.reading:  # rows of documents need further passes
            texts = (text if len(text) <= 60 else f"{text[:57]}..." for text in next(iter(corpus)))
            row = ", ".join(f"{column} {text!r}" for column, text in zip(corpus.columns, texts, strict=True))
            print(f"first row: {row}", file=sys.stderr)
    return store


def open_vectors(store: Any, corpus: Corpus, tokens: TokenStore, *, quiet: bool = False) -> SentenceVectors:
    """Open the embeddings of a text, and copy them first if needed.

    An embedding is found by the text of its sentence, so the store (a `search.vector_store.VectorStore`) may contain
    more text, in another order. It must contain all sentences of the text.
    """
    folder = tokens.folder / f"vectors-{store.digest[:32]}"
    with io.disk_errors(folder, safe=f"{store.folder} is unchanged."):
        make_arrays(folder, lambda new: _copy(store, corpus, tokens, new, quiet))
    if not quiet:
        print(f"embeddings of {store.folder}, size {store.dimension}, copied to {folder}", file=sys.stderr)
    return SentenceVectors(folder)


# Folders of arrays


def make_arrays(folder: Path, make: Callable[[Path], dict[str, Any] | None]) -> bool:
    """Make a folder of arrays unless it is intact, and return whether it was made.

    `make` writes the arrays into a temporary folder and returns further entries of its record, `meta.json`.
    """
    damaged = _damaged(folder)
    if damaged and folder.exists():
        print(f"warning: {folder / damaged} is damaged or missing; making {folder} again", file=sys.stderr)
    if damaged:
        with io.atomic_dir(folder) as new:
            meta = make(new) or {}
            meta["files"] = io.file_digests(new, new.iterdir())
            io.write_json(new / META, meta | {"sha256": io.json_digest(meta)})
            if folder.exists():
                with io.partial_dir(folder) as old:
                    folder.rename(old / "damaged")
    return bool(damaged)


def _damaged(folder: Path) -> str:
    """Return the first missing or damaged file of a folder, or an empty string."""
    try:
        meta = io.read_json_object(folder / META)
        if io.json_digest({key: value for key, value in meta.items() if key != "sha256"}) != meta["sha256"]:
            return META
        return io.first_changed(folder, meta["files"])
    except (CheckpointError, KeyError):
        return META


def _write_arrays(corpus: Corpus, backend: Any, folder: Path, prompts: Sequence[str], quiet: bool) -> None:
    prompts = prompts or [""] * len(corpus.columns)
    id_type = np.uint16 if max(backend.get_vocab().values()) < 1 << 16 else np.uint32
    document_starts, document = [np.zeros(0, np.int64)], -1
    with (
        contextlib.closing(_GrowingArray(folder / "token_ids.npy", id_type)) as token_ids,
        contextlib.closing(_GrowingArray(folder / "offsets.npy", np.int64)) as offsets,
        Progress(f"tokenising {corpus.name}", "rows", quiet=quiet) as progress,
    ):
        offsets.append(np.zeros(1))
        for block in _blocks(corpus):
            documents, rows = zip(*block, strict=True)
            new_documents = np.flatnonzero(np.diff([document, *documents]))
            document_starts.append((offsets.size - 1) // len(corpus.columns) + new_documents)
            document = documents[-1]
            texts = [prompt + text for row in rows for prompt, text in zip(prompts, row, strict=True)]
            sentences = tokenise(backend, texts).ids
            lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
            offsets.append(token_ids.size + np.cumsum(lengths))
            token_ids.append(np.fromiter(itertools.chain.from_iterable(sentences), id_type, lengths.sum()))
            progress.update(len(rows))
    if corpus.reading:
        np.save(folder / "document_starts.npy", np.concatenate(document_starts))


def _blocks(corpus: Corpus) -> Iterator[list[tuple[int, Row]]]:
    """Yield the rows with the numbers of their documents, in blocks of bounded size."""
    block: list[tuple[int, Row]] = []
    characters = 0
    for document, row in corpus.in_documents():
        block.append((document, row))
        characters += sum(map(len, row))
        if len(block) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


class _GrowingArray:
    """A one-dimensional .npy file that is written in pieces. The header is written again once the size is known."""

    def __init__(self, path: Path, dtype: np.typing.DTypeLike):
        self.size, self._dtype, self._file = 0, np.dtype(dtype), path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype).tobytes())
        self.size += len(values)

    def close(self) -> None:
        with self._file:  # closed even if the disk is full
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        """Write the header; NumPy pads it, so that its length does not depend on the size."""
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _copy(store: Any, corpus: Corpus, tokens: TokenStore, folder: Path, quiet: bool) -> None:
    sentences = _hashes(itertools.chain.from_iterable(corpus))
    if len(sentences) != len(tokens) * len(tokens.columns):
        raise DataError(f"{corpus.name} has changed since this run started. Start the run again")
    distinct, first, inverse = np.unique(sentences, return_index=True, return_inverse=True)
    places = np.argsort(np.argsort(first))  # in the order of the text, which is mostly the store's
    path, shape = folder / "vectors.npy", (len(distinct), store.dimension)
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=store.dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # on a full disk, writing to mapped memory would end the process
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    missing = np.ones(len(distinct), bool)
    with Progress(f"reading {store.folder}", "rows", quiet=quiet) as progress:
        for texts, block in store.blocks():
            stored = _hashes(texts)
            index = np.searchsorted(distinct, stored)
            known = distinct.take(index, mode="clip") == stored
            vectors[places[index[known]]] = block[known]
            missing[index[known]] = False
            progress.update(len(texts))
    if (lacking := np.flatnonzero(missing[inverse])).size:
        row, column = divmod(int(lacking[0]), len(corpus.columns))
        line, texts = next(itertools.islice(corpus.numbered(), row, None))
        raise DataError(
            f"{store.folder} lacks the embeddings of {len(lacking):,} of {counted(len(sentences), 'sentence{s}')} of "
            f"{corpus.name}. The first is on line {line}: {texts[column][:80]!r}. Run `diffcse embed` with --output "
            f"{store.folder} on all of the text (with --columns, if the file has several columns)"
        )
    vectors.flush()
    np.save(folder / "rows.npy", places[inverse])


def _hashes(sentences: Iterable[str]) -> UInt64[np.ndarray, " sentences"]:
    """Return a hash of each sentence; among 10^6 sentences two are equal with a chance of 10^-7."""
    numbers = (hashlib.blake2b(sentence.encode(), digest_size=8).digest() for sentence in sentences)
    return np.frombuffer(b"".join(numbers), np.uint64)
