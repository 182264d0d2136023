"""Tokenise a corpus once, into arrays on disk that training maps into memory.

A store is a folder: `token_ids.npy` (all sentences), `offsets.npy` (where each sentence starts), `meta.json` and, for
documents, `document_starts.npy` (the first example of each). The folder's name is a hash of everything that determines
its content. `meta.json` contains the SHA-256 of the arrays, which is checked at each opening; a damaged store is
rebuilt.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from jaxtyping import Int, Integer

from diffcse_jax.data.corpus import Corpus, Row
from diffcse_jax.data.tokenizer import tokenise, unlimited_tokenizer
from diffcse_jax.errors import CheckpointError, DataError
from diffcse_jax.hosts import Progress
from diffcse_jax.io import (
    atomic_dir,
    cache_folder,
    disk_errors,
    expand_path,
    file_digests,
    first_changed,
    lock,
    partial_dir,
    read_json_object,
    write_json,
)

FORMAT_VERSION = 3
META = "meta.json"
BLOCK_ROWS = 10_000
BLOCK_CHARACTERS = 1 << 25


class TokenStore:
    """Tokenised examples; each has one sentence per column.

    Attributes:
        folder: Where the store is.
        name: A hash of the text, the tokenizer and how both were read.
        columns: Names of the columns.
        max_length: Most tokens of a sentence.
        token_ids: All tokens, example by example and column by column.
        offsets: Where each sentence starts in `token_ids`; the last entry is its end.
        document_starts: The first example of each document; None if the corpus does not have documents.
        note: What was skipped or left out when the store was built.
    """

    def __init__(self, folder: Path):
        meta = read_json_object(folder / META)
        self.folder = folder
        self.name = folder.name
        self.columns: tuple[str, ...] = tuple(meta["columns"])
        self.max_length: int = meta["max_length"]
        self.note: str = meta["note"]
        self.token_ids: Integer[np.ndarray, " tokens"] = np.load(folder / "token_ids.npy", mmap_mode="r")
        self.offsets: Int[np.ndarray, " sentences_and_1"] = np.load(folder / "offsets.npy", mmap_mode="r")
        documents = folder / "document_starts.npy"
        self.document_starts: Int[np.ndarray, " documents"] | None = np.load(documents) if documents.exists() else None

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // len(self.columns)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """Return a random order of the examples."""
        return generator.permutation(len(self))

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """Return the row of the text, from 0, of each example."""
        return rows

    @property
    def token_count(self) -> int:
        """Return the number of tokens, including [CLS] and [SEP]."""
        return len(self.token_ids)

    def sentences(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Return the numbers of the examples' sentences, in the order of the text."""
        return rows[:, None] * len(self.columns) + np.arange(len(self.columns))

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Return the number of tokens of each sentence."""
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


def build_or_open(
    corpus: Corpus,
    tokenizer: transformers.PreTrainedTokenizerFast,
    max_length: int,
    cache_dir: str | Path = "",
    *,
    quiet: bool = False,
) -> TokenStore:
    """Open the token store of a corpus, or build it. The processes of a host build it once.

    Args:
        corpus: The text. Each column is tokenised as a sentence of its own.
        tokenizer: A fast tokenizer. Its own truncation and padding are ignored.
        max_length: Tokens per sentence, including special tokens; longer sentences are cut.
        cache_dir: The folder of all stores. Empty: `~/.cache/diffcse_jax/tokens` (or below $XDG_CACHE_HOME).
        quiet: Do not report; one of several processes reports.

    Raises:
        DataError: The corpus cannot be read, or it changed during the build.
        DiskError: The store cannot be written.
    """
    backend = unlimited_tokenizer(tokenizer)
    backend.enable_truncation(max_length)
    text = corpus.fingerprint()
    parts = [FORMAT_VERSION, text, corpus.columns, corpus.on_bad_line, backend.to_str(), corpus.reading]
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = (expand_path(cache_dir) if cache_dir else cache_folder("tokens")) / name
    with disk_errors(folder, safe="The text is unchanged.", instead="set data.cache_dir to another folder"):
        if problem := _problem(folder):
            lock_file = folder.with_name(f".{name}.lock")
            with lock(lock_file, wait=True):
                if problem := _problem(folder):  # another process may have built it
                    if folder.exists():
                        print(f"warning: rebuilding the damaged token store {folder}: {problem}", file=sys.stderr)
                    _build(corpus, text, backend, max_length, folder, quiet)
                lock_file.unlink(missing_ok=True)
        store = TokenStore(folder)
    if not quiet:
        note = f" ({store.note})" if store.note else ""
        size = f"{len(store):,} rows of {', '.join(store.columns)}, {store.token_count:,} tokens{note}"
        print(f"token store {'built' if problem else 'found'}: {corpus.name}, {size} in {folder}", file=sys.stderr)
        if problem and (advice := corpus.advice()):
            print(f"warning: text that is not UTF-8 was skipped. {advice}", file=sys.stderr)
        if problem and not corpus.reading:  # rows of documents need further passes
            print(f"first row: {corpus.first_row()}", file=sys.stderr)
    return store


def _problem(folder: Path) -> str:
    """Return why a store cannot be used, or an empty string."""
    try:
        meta = read_json_object(folder / META)
        digests = {"token_ids.npy": "", "offsets.npy": "", **meta["files"]}
        if _digest(meta) != meta["sha256"]:
            return f"{META} has changed"
        changed = first_changed(folder, digests)
    except CheckpointError:
        return f"{META} is missing or unreadable"
    except (KeyError, TypeError):
        return f"{META} is incomplete"
    return f"{changed} is missing or has changed" if changed else ""


def _digest(meta: dict[str, object]) -> str:
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _build(
    corpus: Corpus, text: str, backend: tokenizers.Tokenizer, max_length: int, folder: Path, quiet: bool
) -> None:  # fmt: skip
    with atomic_dir(folder) as new:
        _write_arrays(corpus, backend, new, quiet)
        if corpus.fingerprint() != text:
            raise DataError(f"{corpus.name} changed while it was read. Start again once the file is complete")
        meta = {"columns": corpus.columns, "max_length": max_length, "note": corpus.summary()}
        meta |= {"files": file_digests(new, new.iterdir())}
        write_json(new / META, meta | {"sha256": _digest(meta)})
        if folder.exists():
            with partial_dir(folder) as old:
                folder.rename(old / "damaged")


def _write_arrays(corpus: Corpus, backend: tokenizers.Tokenizer, folder: Path, quiet: bool) -> None:
    id_type = np.uint16 if max(backend.get_vocab().values()) < 1 << 16 else np.uint32
    document_starts, document = [np.zeros(0, np.int64)], -1
    with (
        _GrowingArray(folder / "token_ids.npy", id_type) as token_ids,
        _GrowingArray(folder / "offsets.npy", np.int64) as offsets,
        Progress(f"tokenising {corpus.name}", "rows", quiet=quiet) as progress,
    ):
        offsets.append(np.zeros(1))
        for block in _blocks(corpus):
            documents, rows = zip(*block, strict=True)
            new_documents = np.flatnonzero(np.diff([document, *documents]))
            document_starts.append((offsets.size - 1) // len(corpus.columns) + new_documents)
            document = documents[-1]
            sentences = tokenise(backend, list(itertools.chain.from_iterable(rows))).ids
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
        self.size = 0
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")

    def __enter__(self) -> "_GrowingArray":
        self._write_header()
        return self

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype).tobytes())
        self.size += len(values)

    def __exit__(self, *exception: object) -> None:
        with self._file:  # closed even if the disk is full
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        """Write the header; NumPy pads it, so that its length does not depend on the size."""
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)
