"""Tokenise a corpus once, into arrays on disk that training maps into memory.

A token store is a folder: `token_ids.npy` (all sentences), `offsets.npy` (where each sentence starts), `meta.json` and,
for documents, `document_starts.npy` (the first example of each). The folder's name is a hash of everything that
determines its content. `meta.json` contains the SHA-256 of the arrays, which is checked at each opening.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from jaxtyping import Float, Float32, Int, Integer

from diffcse_jax import io
from diffcse_jax.data.readers import Corpus
from diffcse_jax.data.tokenizer import tokenise, unlimited_tokenizer
from diffcse_jax.errors import CheckpointError, DataError, counted
from diffcse_jax.hosts import Progress, log_line

FORMAT_VERSION = 3
META = "meta.json"
BLOCK_ROWS = 1000  # that are tokenised at once

Rows = Integer[np.ndarray, " B"]  # numbers of examples
OfSentences = Int[np.ndarray, "B C"]  # a number for each sentence of these examples
TokenIds = Integer[np.ndarray, "B C T"]


class Examples:
    """Examples of one or more sentences. The number of an example, its row, may include a random choice."""

    columns: tuple[str, ...]  # an example has one sentence per column
    max_length: int  # the largest number of tokens of a sentence
    token_ids: Integer[np.ndarray, " tokens"]  # of the whole text
    offsets: Int[np.ndarray, " sentences_and_1"]  # where each sentence of the text starts in `token_ids`, and the end

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // len(self.columns)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """Return the examples in random order, each with a random choice."""
        return generator.permutation(len(self))

    def text_rows(self, rows: Rows) -> Rows:
        """Return the row of each example in the text, counting from 0."""
        return rows

    def sentences(self, rows: Rows) -> OfSentences:
        """Return the numbers of the examples' sentences, in the order of the text."""
        return rows[:, None] * len(self.columns) + np.arange(len(self.columns))

    def lengths(self, rows: Rows) -> OfSentences:
        """Return the number of tokens of each sentence, including special tokens."""
        sentences = self.sentences(rows)
        return self.offsets[sentences + 1] - self.offsets[sentences]

    def positions(self, rows: Rows, width: int) -> tuple[TokenIds, OfSentences]:
        """Return where the first `width` tokens of each sentence are in `token_ids`, and the lengths.

        The places after the end of a sentence are arbitrary.
        """
        return self.offsets[self.sentences(rows)][..., None] + np.arange(width), self.lengths(rows)

    def gather(self, rows: Rows, width: int, pad_token_id: int) -> tuple[TokenIds, OfSentences]:
        """Return the token ids (int32), padded to `width`, and the lengths of the sentences."""
        positions, lengths = self.positions(rows, width)
        real = np.arange(width) < lengths[..., None]
        token_ids = self.token_ids[np.where(real, positions, 0)]
        return np.where(real, token_ids, pad_token_id).astype(np.int32), lengths


class TokenStore(Examples):
    """The rows of a text as examples, mapped into memory from a folder of `build_or_open`."""

    def __init__(self, folder: Path):
        meta = io.read_json_object(folder / META)
        self.folder, self.name = folder, folder.name  # a hash of the text, the tokenizer and how both were read
        self.columns, self.max_length = tuple(meta["columns"]), meta["max_length"]
        self.note: str = meta["note"]  # what was skipped or left out when the store was built
        self.token_ids = np.load(folder / "token_ids.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        documents = folder / "document_starts.npy"  # the first example of each document, if the corpus has documents
        self.document_starts: Int[np.ndarray, " documents"] | None = np.load(documents) if documents.exists() else None


class SentenceVectors:
    """Embeddings of all sentences of a text, mapped into memory.

    The folder contains `vectors.npy`, a row per distinct sentence, and `rows.npy`, the row of each sentence.
    """

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
) -> TokenStore:
    """Open the token store of a corpus, or build it. The processes of a host build it once.

    Args:
        corpus: The text. Each column is tokenised as a sentence of its own.
        tokenizer: A fast tokenizer. Its own truncation and padding are ignored.
        max_length: Tokens per sentence, including special tokens; longer sentences are cut.
        cache_dir: The folder of all stores. Empty: `~/.cache/diffcse_jax/tokens` (or below $XDG_CACHE_HOME).
        prompts: The text in front of each sentence, by column. Empty: none.
    """
    backend = unlimited_tokenizer(tokenizer)
    backend.enable_truncation(max_length)
    text = corpus.fingerprint()
    parts = [FORMAT_VERSION, text, corpus.columns, corpus.on_bad_line, backend.to_str(), corpus.reading]
    parts += [list(prompts)] if any(prompts) else []
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = (io.expand_path(cache_dir) if cache_dir else io.cache_folder("tokens")) / name

    def build(new: Path) -> dict[str, Any]:
        _write_arrays(corpus, backend, new, prompts or [""] * len(corpus.columns))
        if corpus.fingerprint() != text:
            raise DataError(f"{corpus.name} changed while it was read. Start again once the file is complete")
        return {"columns": corpus.columns, "max_length": max_length, "note": corpus.summary()}

    with io.disk_errors(folder, safe="The text is unchanged.", instead="set data.cache_dir to another folder"):
        built = make_arrays(folder, build)
        store = TokenStore(folder)
    size = f"{counted(len(store), 'row{s}')} ({', '.join(store.columns)}), {counted(len(store.token_ids), 'token{s}')}"
    found, note = "tokenised" if built else "found tokens of", f" ({store.note})" if store.note else ""
    log_line(f"{found} {corpus.name}: {size}{note}, in {folder}")
    if built and not corpus.reading:  # rows of documents need further passes
        texts = zip(corpus.columns, next(iter(corpus)), strict=True)
        log_line(f"first row: {', '.join(f'{column} {text[:60]!r}' for column, text in texts)}")
    return store


# Folders of arrays


def make_arrays(folder: Path, make: Callable[[Path], dict[str, Any] | None]) -> bool:
    """Make a folder of arrays unless it is intact, and return whether it was made. One process of a host makes it.

    `make` writes the arrays into a temporary folder and returns further entries of its record, `meta.json`.
    """
    if not _damaged(folder):
        return False
    lock_file = folder.with_name(f".{folder.name}.lock")
    with io.lock(lock_file, wait=True):
        if damaged := _damaged(folder):  # another process may have made it meanwhile
            if folder.exists():
                message = f"warning: {folder / damaged} is damaged or missing; making {folder} again"
                print(message, file=sys.stderr)  # not log_line: each host has its own disk
            with io.replace_dir(folder) as new:
                meta = make(new) or {}
                meta["files"] = io.file_digests(new, new.iterdir())
                io.write_json(new / META, meta | {"sha256": io.json_digest(meta)})
        lock_file.unlink(missing_ok=True)
    return bool(damaged)


def _damaged(folder: Path) -> str:
    """Return the first missing or damaged file of a folder, or an empty string."""
    try:
        meta = io.read_json_object(folder / META)
        digest = meta.pop("sha256")
        return io.first_changed(folder, meta["files"]) if io.json_digest(meta) == digest else META
    except (CheckpointError, KeyError):
        return META


def _write_arrays(corpus: Corpus, backend: Any, folder: Path, prompts: Sequence[str]) -> None:
    id_type = np.dtype(np.uint16 if max(backend.get_vocab().values()) < 1 << 16 else np.uint32)
    ends, starts, rows_before, last_document = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], 0, -1
    corpus_rows = corpus.in_documents()
    progress = Progress(f"tokenising {corpus.name}", "rows")
    with (folder / "token_ids.npy").open("wb") as file, progress:

        def write_header(size: int) -> None:  # NumPy pads it, so that its length does not depend on the size
            header = {"descr": np.lib.format.dtype_to_descr(id_type), "fortran_order": False, "shape": (size,)}
            np.lib.format.write_array_header_1_0(file, header)

        write_header(0)
        while block := list(itertools.islice(corpus_rows, BLOCK_ROWS)):
            _, documents, rows = zip(*block, strict=True)
            starts.append(rows_before + np.flatnonzero(np.diff([last_document, *documents])))
            rows_before, last_document = rows_before + len(rows), documents[-1]
            texts = [prompt + text for row in rows for prompt, text in zip(prompts, row, strict=True)]
            sentences = tokenise(backend, texts).ids
            lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
            ends.append(ends[-1][-1] + np.cumsum(lengths))
            file.write(np.fromiter(itertools.chain.from_iterable(sentences), id_type, lengths.sum()).tobytes())
            progress.update(len(rows))
        file.seek(0)
        write_header(int(ends[-1][-1]))
    np.save(folder / "offsets.npy", np.concatenate(ends))
    if corpus.reading:
        np.save(folder / "document_starts.npy", np.concatenate(starts))
