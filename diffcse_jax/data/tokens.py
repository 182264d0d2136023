"""Tokenise a corpus once, into arrays on disk that training maps into memory.

A store is a folder: `token_ids.npy` (all sentences, one after the other), `offsets.npy` (where each starts),
`meta.json` and, of documents, `document_starts.npy` (their first examples). Its name is a hash
of all that its content depends on, so that a store is never stale. `meta.json` has the sizes and SHA-256 of the other
files, with which they are compared at every opening: reading a store takes less time than the hash of its text, on
which its name depends. A damaged store is built anew.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tqdm
import transformers
from jaxtyping import Int, Integer

from diffcse_jax.data.corpus import Corpus, Row
from diffcse_jax.data.tokenizer import tokenise, unlimited_tokenizer
from diffcse_jax.errors import DataError
from diffcse_jax.io import atomic_dir, cache_folder, disk_errors, expand_path, partial_dir, sha256

FORMAT_VERSION = 2
META = "meta.json"
BLOCK_ROWS = 10_000
BLOCK_CHARACTERS = 1 << 25


class TokenStore:
    """Tokenised sentences of `len(store)` examples, as many per example as there are columns.

    Attributes:
        folder: where it is.
        name: a hash of the text, its tokenizer and how both were read.
        columns: names of the columns.
        max_length: the length, in tokens, that sentences were cut to.
        token_ids: all tokens, example by example and column by column.
        offsets: where each sentence starts in `token_ids`; the last entry is its end.
        document_starts: the first example of every document; None where the corpus has no documents.
        note: what the corpus reader skipped or left out when the store was built; empty if nothing.
    """

    def __init__(self, folder: Path):
        meta = json.loads((folder / META).read_text())
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
        """A random order of the examples."""
        return generator.permutation(len(self))

    def text_rows(self, rows: Integer[np.ndarray, " B"]) -> Integer[np.ndarray, " B"]:
        """The numbers, from 0, of the rows of the text that the examples `rows` are."""
        return rows

    @property
    def token_count(self) -> int:
        """Tokens of all sentences, [CLS] and [SEP] included."""
        return len(self.token_ids)

    def sentences(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """The numbers of the sentences of the examples `rows`, in the order of the text."""
        return rows[:, None] * len(self.columns) + np.arange(len(self.columns))

    def lengths(self, rows: Integer[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """The number of tokens of every sentence of the examples `rows`."""
        starts, ends = self._bounds(rows)
        return ends - starts

    def gather(
        self, rows: Integer[np.ndarray, " B"], width: int, pad_token_id: int
    ) -> tuple[Integer[np.ndarray, "B C T"], Int[np.ndarray, "B C"]]:
        """The token ids (int32) of the examples `rows`, padded to `width`, and the sentences' lengths."""
        starts, ends = self._bounds(rows)
        positions = starts[..., None] + np.arange(width)
        real = positions < ends[..., None]
        token_ids = self.token_ids[np.where(real, positions, 0)]
        return np.where(real, token_ids, pad_token_id).astype(np.int32), ends - starts

    def _bounds(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int[np.ndarray, "B C"], Int[np.ndarray, "B C"]]:
        sentences = self.sentences(rows)
        return self.offsets[sentences], self.offsets[sentences + 1]


def build_or_open(
    corpus: Corpus,
    tokenizer: transformers.PreTrainedTokenizerFast,
    max_length: int,
    cache_dir: str | Path = "",
    *,
    quiet: bool = False,
) -> TokenStore:
    """The token store of a corpus: the one built earlier, or a new one.

    Args:
        corpus: the text; each column is tokenised as a sentence of its own, with its special tokens.
        tokenizer: a fast tokenizer; its settings for truncation and padding are neither used nor changed.
        max_length: tokens per sentence, special tokens included; the rest is cut off.
        cache_dir: the folder that holds all stores; empty: `~/.cache/diffcse_jax/tokens` ($XDG_CACHE_HOME is obeyed).
        quiet: report nothing; of several processes one speaks.

    Raises:
        DataError: the corpus cannot be read, or has changed meanwhile.
        DiskError: the store cannot be written.
    """
    backend = unlimited_tokenizer(tokenizer)
    backend.enable_truncation(max_length)
    text = corpus.fingerprint()
    folder = (expand_path(cache_dir) if cache_dir else cache_folder("tokens")) / _store_name(text, corpus, backend)
    with disk_errors(folder, safe="Nothing of the text is lost.", instead="name another folder in data.cache_dir"):
        problem = _problem(folder) if folder.exists() else "it is not there"
        if folder.exists() and problem:
            print(f"warning: the token store {folder} is damaged: {problem}; it is built anew", file=sys.stderr)
        if problem:
            _build(corpus, text, backend, max_length, folder, quiet)
        store = TokenStore(folder)
    if not quiet:
        outcome = "built" if problem else "found"
        print(f"token store {outcome}: {_describe(corpus, store)} in {folder}", file=sys.stderr)
        if problem and not corpus.reading:  # rows of documents need further passes
            print(f"first row: {corpus.first_row()}", file=sys.stderr)
    return store


def _store_name(text: str, corpus: Corpus, backend: tokenizers.Tokenizer) -> str:
    parts = [FORMAT_VERSION, text, corpus.columns, corpus.on_bad_line, backend.to_str()]
    parts += corpus.reading
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build(
    corpus: Corpus, text: str, backend: tokenizers.Tokenizer, max_length: int, folder: Path, quiet: bool
) -> None:
    """Writes a store beside `folder`, which then takes its name and the place of a damaged one."""
    with atomic_dir(folder) as new:
        _write_arrays(corpus, backend, new, quiet)
        if corpus.fingerprint() != text:
            raise DataError(
                f"{corpus.name} has changed while it was tokenised, and nothing of that is kept; start again once it "
                "is complete"
            )
        files = {file.name: _described(file) for file in sorted(new.iterdir())}
        meta = {"columns": corpus.columns, "max_length": max_length, "note": corpus.summary(), "files": files}
        (new / META).write_text(json.dumps(meta | {"sha256": _digest(meta)}))
        if folder.exists() and _problem(folder):
            with partial_dir(folder) as old:
                folder.rename(old / "damaged")


def _described(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256([file])}


def _digest(meta: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, but for the value that holds it."""
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(folder: Path) -> str:
    """The reason for which a store cannot be trusted; empty if it is as it was written."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if _digest(meta) != meta["sha256"]:
            return f"{META} has changed"
        for name, described in meta["files"].items():
            size = (folder / name).stat().st_size
            if size != described["bytes"]:
                return f"{name} has {size:,} bytes, not {described['bytes']:,}"
        files = meta["files"].items()
        return next((f"{name} has changed" for name, described in files if _described(folder / name) != described), "")
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{META} cannot be read"


def _write_arrays(corpus: Corpus, backend: tokenizers.Tokenizer, folder: Path, quiet: bool) -> None:
    id_type = np.uint16 if max(backend.get_vocab().values()) < 1 << 16 else np.uint32
    document_starts, document = [np.zeros(0, np.int64)], -1
    with (
        _GrowingArray(folder / "token_ids.npy", id_type) as token_ids,
        _GrowingArray(folder / "offsets.npy", np.int64) as offsets,
        tqdm.tqdm(
            desc=f"tokenising {corpus.name}", unit=" rows", unit_scale=True, delay=1.0, disable=quiet or None
        ) as progress,
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
    """The rows with the numbers of their documents."""
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
    """A one-dimensional .npy file written piece by piece; its header is written again once the size is known."""

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
        with self._file:  # closed even where the disk is full
            self._file.seek(0)
            self._write_header()

    def _write_header(self) -> None:
        """NumPy pads the header so that its length does not depend on the size."""
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _describe(corpus: Corpus, store: TokenStore) -> str:
    text = f"{corpus.name}, {len(store):,} rows of {', '.join(store.columns)}, {store.token_count:,} tokens"
    return f"{text} ({store.note})" if store.note else text
