"""Rows of text, and token stores: rows tokenised once, which training maps into memory.

A row has one or more columns. One column is a sentence, a second one its positive, further ones are
hard negatives. A row knows the number of the document that it was made of, and what it is.

A token store is a folder: `token_ids` (of all sentences, without a header), `offsets.npy` (where
each sentence starts), `rows.npy` (what each row is, see `ROW`) and `meta.json`. The folder's name
is a hash of all that determines its content. `meta.json` contains the SHA-256 of the arrays, which
is checked at each opening. If a limit of time or memory left out files, each later run tries them
again, and the name of what it trains on says which are missing.
"""

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import transformers
from jaxtyping import Bool, Int, Integer, UInt8

from diffcse_jax import io
from diffcse_jax.documents.ledger import NOWHERE, Ledger, Place
from diffcse_jax.errors import (
    CheckpointError,
    DataError,
    printable_message,
)
from diffcse_jax.models.tokenizer import cutting_tokenizer, largest_token, tokenise

FORMAT_VERSION = 9
META = "meta.json"
BLOCK_ROWS = 1000  # rows that are tokenised and written at once
# The number of a row's document, whether it continues the row before, and its `Kind`.
ROW = np.dtype([("document", np.int64), ("follows", np.bool_), ("kind", np.uint8)])

ExampleNumbers = Integer[np.ndarray, " B"]  # numbers of examples
OfSentences = Int[np.ndarray, "B C"]  # a number for each sentence of these examples
TokenIds = Integer[np.ndarray, "B C T"]


# Rows


class Kind(enum.IntEnum):
    """What the texts of a row are. The numbers are those of the token store."""

    TEXTS = 0  # a sentence, a pair, or a pair with hard negatives
    PASSAGE = 1  # the same passage in both columns; each epoch takes a window of words out of it


class Row(NamedTuple):
    """A row of a corpus."""

    texts: tuple[str, ...]  # one for each column, without white space around it
    document: int  # the number of the document, in the order of the source
    place: Place = NOWHERE
    kind: Kind = Kind.TEXTS
    follows: bool = False  # the text continues that of the row before, in the same document


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of rows. Each pass reads the source again; memory holds a part of it."""

    name: str  # in messages
    columns: tuple[str, ...]
    read: Callable[[Ledger], Iterator[Iterable[Row]]]  # starts a pass, which gives rows in blocks
    fingerprint: Callable[[], str]  # returns the SHA-256 of the content in hexadecimal
    strict: bool = False  # a text that cannot be used is an error, also an empty line
    reading: tuple[str, ...] = ()  # how documents became rows; empty: a row is a line of the source

    def new_ledger(self) -> Ledger:
        """Return the ledger for a pass."""
        return Ledger(self.name, strict=self.strict, refuse_empty=not self.reading)

    def rows(self, ledger: Ledger | None = None) -> Iterator[Row]:
        """Return the usable rows, in their order. The first ones are read at once.

        Raises:
            DataError: No row is usable, the source cannot be read, or `strict` is set and a text
                cannot be used.
        """
        ledger = self.new_ledger() if ledger is None else ledger
        rows = itertools.chain.from_iterable(self.read(ledger))
        for first in rows:
            return itertools.chain([first], rows)
        details = f" ({summary})" if (summary := ledger.summary()) else ""
        raise DataError(f"{self.name}: no usable text{details}")

    def first_texts(self) -> Iterator[str]:
        """Yield the text of the first column of each row."""
        return (row.texts[0] for row in self.rows())


# Tokens


class Examples:
    """Examples of one or more sentences each.

    An example has a number, its row, which may include a random choice.
    """

    columns: tuple[str, ...]  # an example has one sentence per column
    max_length: int  # the largest number of tokens of a sentence
    token_ids: Integer[np.ndarray, " tokens"]  # of the whole text
    # Where each sentence of the text starts in `token_ids`, and the end of the last one.
    offsets: Int[np.ndarray, " sentences_and_1"]

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // len(self.columns)

    def order(self, generator: np.random.Generator) -> Int[np.ndarray, " examples"]:
        """Return the examples in random order, each with a random choice."""
        return generator.permutation(len(self))

    def sentences(self, rows: ExampleNumbers) -> OfSentences:
        """Return the numbers of the examples' sentences, in the order of the text."""
        return rows[:, None] * len(self.columns) + np.arange(len(self.columns))

    def lengths(self, rows: ExampleNumbers) -> OfSentences:
        """Return the number of tokens of each sentence, including special tokens."""
        sentences = self.sentences(rows)
        return self.offsets[sentences + 1] - self.offsets[sentences]

    def positions(self, rows: ExampleNumbers, width: int) -> tuple[TokenIds, OfSentences]:
        """Return where each sentence's first `width` tokens are in `token_ids`, and the lengths.

        The places after the end of a sentence are arbitrary.
        """
        return self.offsets[self.sentences(rows)][..., None] + np.arange(width), self.lengths(rows)

    def gather(
        self, rows: ExampleNumbers, width: int, pad_token_id: int
    ) -> tuple[TokenIds, OfSentences]:
        """Return the token ids (int32), padded to `width`, and the lengths of the sentences."""
        positions, lengths = self.positions(rows, width)
        real = np.arange(width) < lengths[..., None]
        token_ids = self.token_ids[np.where(real, positions, 0)]
        return np.where(real, token_ids, pad_token_id).astype(np.int32), lengths


class TokenStore(Examples):
    """The rows of a text as examples, mapped into memory from a folder of `build_or_open`."""

    def __init__(self, folder: Path):
        meta = io.read_json_object(folder / META)
        self.folder = folder
        # A hash of the text, the tokenizer and how both were read, also of what was not read.
        self.name = folder.name
        if meta["beyond_limits"]:
            self.name = io.json_digest([folder.name, *meta["beyond_limits"]])[:32]
        self.columns = tuple(meta["columns"])
        self.max_length = meta["max_length"]
        # What was read and what was left out when the store was built, one sentence a line.
        self.account = tuple(meta["account"])
        self.is_new = False  # this process has just built it
        self.unknown_count = meta["unknown"]  # sentences that consist largely of unknown words
        self.token_ids = np.memmap(folder / "token_ids", meta["dtype"], mode="r")
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self._rows = np.load(folder / "rows.npy", mmap_mode="r")

    @property
    def unknown(self) -> float:
        """The share of sentences that consist largely of words that the tokenizer lacks."""
        return self.unknown_count / max(len(self.offsets) - 1, 1)

    @property
    def documents(self) -> Int[np.ndarray, " rows"]:
        """The number of each row's document, in the order of the source."""
        return self._rows["document"]

    @property
    def follows(self) -> Bool[np.ndarray, " rows"]:
        """Whether each row continues the text of the row before it."""
        return self._rows["follows"]

    @property
    def kinds(self) -> UInt8[np.ndarray, " rows"]:
        """What each row is: numbers of `Kind`."""
        return self._rows["kind"]


def build_or_open(
    corpus: Corpus,
    tokenizer: transformers.PreTrainedTokenizerFast,
    max_length: int,
    cache_dir: str | Path = "",
    *,
    prompts: Sequence[str] = (),
    on_rows: Callable[[int], None] = lambda _: None,
) -> TokenStore:
    """Open the token store of a corpus, or build it. The processes of a host build it once.

    Args:
        corpus: The text. Each column is tokenised as a sentence of its own.
        tokenizer: A fast tokenizer. Its own truncation and padding are ignored.
        max_length: Tokens per sentence, including special tokens; longer sentences are cut.
        cache_dir: The folder of all stores. Empty: `~/.cache/diffcse_jax/tokens` (or below
            $XDG_CACHE_HOME).
        prompts: The text in front of each sentence, by column. Empty: none.
        on_rows: Called with the number of rows of each block that is written.
    """
    backend = cutting_tokenizer(tokenizer, max_length)
    text = corpus.fingerprint()
    parts = [
        FORMAT_VERSION,
        text,
        corpus.columns,
        corpus.strict,
        backend.to_str(),
        corpus.reading,
        list(prompts),
    ]
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = (io.expand_path(cache_dir) if cache_dir else io.cache_folder("tokens")) / name
    is_new = False
    lock_file = folder.with_name(f".{name}.lock")
    with io.disk_errors(
        folder, safe="The text is unchanged.", instead="set data.cache_dir to another folder"
    ):
        before = _state(folder)
        if not before.is_complete:
            with io.lock(lock_file, wait=True):
                now = _state(folder)
                is_built = now.is_complete or (not now.damage and now != before)
                if not is_built:  # by another process meanwhile
                    if folder.exists() and now.damage:
                        # Not by `log_line`, because each host has a disk of its own.
                        print(f"warning: {printable_message(now.damage)}", file=sys.stderr)
                    with io.replace_dir(folder) as new:
                        write = functools.partial(
                            _write_arrays,
                            backend=backend,
                            unknown_id=tokenizer.unk_token_id,
                            prompts=prompts or [""] * len(corpus.columns),
                            on_rows=on_rows,
                        )
                        _build(corpus, new, write, text=text, max_length=max_length)
                    is_new = True
                lock_file.unlink(missing_ok=True)
        store = TokenStore(folder)
    store.is_new = is_new
    return store


class _State(NamedTuple):
    """What stands in the folder of a store."""

    damage: str  # which file is missing or damaged; empty: none
    meta: Mapping[str, Any]

    @property
    def is_complete(self) -> bool:
        """Return whether the store can be used, and another try would read no more."""
        return not self.damage and not self.meta["beyond_limits"]


def _state(folder: Path) -> _State:
    try:
        return _State("", io.read_sealed(folder / META, f"Building {folder} again"))
    except CheckpointError as error:
        return _State(str(error), {})


def _build(
    corpus: Corpus,
    folder: Path,
    write_arrays: Callable[[Corpus, Ledger, Path], Mapping[str, Any]],
    *,
    text: str,
    max_length: int,
) -> None:
    """Write a store of a corpus whose fingerprint is `text`."""
    ledger = corpus.new_ledger()
    of_arrays = write_arrays(corpus, ledger, folder)
    if corpus.fingerprint() != text:
        raise DataError(f"{corpus.name} changed while it was read. Start again once it is complete")
    meta = {
        "columns": corpus.columns,
        "max_length": max_length,
        "account": ledger.account() if ledger.has_remarks else [],
        "beyond_limits": sorted(ledger.beyond_limits),
        **of_arrays,
    }
    io.write_sealed(folder / META, meta, [*folder.iterdir()])


def _write_arrays(
    corpus: Corpus,
    ledger: Ledger,
    folder: Path,
    *,
    backend: tokenizers.Tokenizer,
    unknown_id: int | None,
    prompts: Sequence[str],
    on_rows: Callable[[int], None],
) -> Mapping[str, Any]:
    """Write the arrays of a store, block by block, and return what `meta.json` says of them."""
    assert backend.truncation is not None
    longest = backend.truncation["max_length"]
    dtype = np.dtype(np.uint16 if largest_token(backend)[0] < 1 << 16 else np.uint32)
    ends = [np.zeros(1, np.int64)]  # one array per block
    kinds = [np.zeros(0, ROW)]
    unknown = 0
    rows = corpus.rows(ledger)
    with (folder / "token_ids").open("wb") as file:
        while block := list(itertools.islice(rows, BLOCK_ROWS)):
            kinds.append(np.array([(row.document, row.follows, row.kind) for row in block], ROW))
            texts = [text for row in block for text in row.texts]
            tokens = tokenise(backend, texts, unknown_id, prompts)
            lengths = np.fromiter(map(len, tokens.ids), np.int64, len(texts))
            ends.append(ends[-1][-1] + np.cumsum(lengths))
            flat = itertools.chain.from_iterable(tokens.ids)
            file.write(np.fromiter(flat, dtype, lengths.sum()).tobytes())
            unknown += sum(tokens.unknown)
            ledger.make(f"text{{s}} cut to {longest} tokens", sum(tokens.cut))
            on_rows(len(block))
    np.save(folder / "offsets.npy", np.concatenate(ends))
    np.save(folder / "rows.npy", np.concatenate(kinds))
    return {"dtype": dtype.name, "unknown": unknown}
