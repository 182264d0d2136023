"""What an index folder stores: how the index was built, and its contents. Reading checks it."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.io import expand_path
from diffcse_jax.search.contents import DOCUMENTS, PASSAGES, Contents, Typical
from diffcse_jax.search.embeddings import StoredEmbeddings, check_storage, expected_arrays
from diffcse_jax.search.folder import Arrays, Reader, Writer
from diffcse_jax.search.lexical import LexicalIndex
from diffcse_jax.search.modes import DEFAULT_WEIGHT, MODES, STORAGES
from diffcse_jax.search.vector_store import EncoderRecord

STDIN = "-"


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """How an index is built. This stays the same when documents change.

    Attributes:
        mode: `dense`, `lexical` or `hybrid`.
        language: Of BM25's words, as it was given; empty: detected.
        weight: The weight of BM25 in a hybrid search, from 0 to 1.
        storage: How embeddings are stored.
        passages: Whether texts that are longer than the model reads are split.
        id_column: The column of the documents' ids, as it was given.
    """

    mode: str = "dense"
    language: str = ""
    weight: float = DEFAULT_WEIGHT
    storage: str = "float32"
    passages: bool = True
    id_column: str = ""

    def check(self) -> None:
        """Raise `UserError` before texts are encoded, which may take hours."""
        check_mode(self.mode)
        if not 0 <= self.weight <= 1:
            raise ConfigError(
                f"weight={self.weight}: expected a number from 0 (embeddings only) to 1 (BM25 only)"
            )
        check_storage(self.storage)
        if self.mode != "dense":
            # This needs packages, and a language that they know.
            LexicalIndex(self.language or "english")


def check_mode(mode: str) -> str:
    """Return the mode, or raise `ConfigError` if there is no such mode."""
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r}: use one of: {', '.join(MODES)}")
    return mode


@dataclasses.dataclass(frozen=True)
class Input:
    """What documents were read from."""

    name: str  # an absolute path or pattern, `docstrings`, or `-`; empty for texts in Python
    columns: tuple[str, ...] = ()
    id_column: str = ""


def input_of(texts: Any, id_column: str = "", columns: tuple[str, ...] = ()) -> Input:
    """Return how an index records what it was given: a name, or texts."""
    if not isinstance(texts, str | Path):
        return Input("", columns, id_column)
    is_name = str(texts) in (STDIN, "docstrings")
    return Input(str(texts) if is_name else os.path.abspath(expand_path(texts)), columns, id_column)


@dataclasses.dataclass(frozen=True)
class Stored:
    """An index without its encoder."""

    settings: IndexSettings
    contents: Contents
    encoder: EncoderRecord | None = None  # None if there are no embeddings
    inputs: tuple[Input, ...] = ()


def write(writer: Writer, stored: Stored) -> None:
    """Write an index to a folder that this process has locked."""
    contents = stored.contents
    embeddings, lexical = contents.embeddings, contents.lexical
    settings = {
        "settings": dataclasses.asdict(stored.settings),
        "encoder": dataclasses.asdict(stored.encoder) if stored.encoder else None,
        "inputs": [dataclasses.asdict(each) for each in stored.inputs],
        "documents": len(contents.documents),
        "passages": len(contents.passages),
        "measured": embeddings.measured if embeddings else 0,
        "typical": list(contents.typical),
        "language": lexical.language if lexical else "",
    }
    tables = {"documents": contents.documents, "passages": contents.passages}
    arrays = embeddings.arrays() if embeddings else {}
    writer.write(settings, tables, arrays, lexical.save if lexical else None)


# Reading


def read(reader: Reader) -> Stored:
    """Read an index; see `folder.read_index`."""
    settings = _settings(reader)
    encoder = _encoder(reader) if settings.mode != "lexical" else None
    inputs = _value(reader, "inputs", list)
    try:
        found = tuple(
            Input(each["name"], tuple(each["columns"]), each["id_column"]) for each in inputs
        )
    except (TypeError, KeyError) as error:
        raise reader.damaged(f"`inputs` is invalid: {error}") from error
    return Stored(settings, _contents(reader, settings, encoder), encoder, found)


def _value(
    reader: Reader, key: str, kind: type[Any], is_valid: Callable[[Any], bool] = lambda value: True
) -> Any:
    """Return a value of the manifest; raise an error if it is missing or invalid."""
    value = reader.settings.get(key)
    if type(value) is not kind or not is_valid(value):
        raise reader.damaged(f"`{key}` is {value!r:.60}")
    return value


def _settings(reader: Reader) -> IndexSettings:
    given: Mapping[str, Any] = _value(reader, "settings", dict)
    fields = {field.name: type(field.default) for field in dataclasses.fields(IndexSettings)}
    for name, kind in fields.items():
        if type(given.get(name)) not in ((kind, int) if kind is float else (kind,)):
            raise reader.damaged(f"`settings`: {name} is {given.get(name)!r:.60}")
    settings = IndexSettings(**{name: given[name] for name in fields})
    is_usual = settings.mode in MODES and settings.storage in STORAGES and 0 <= settings.weight <= 1
    if not is_usual:
        raise reader.damaged(f"`settings` are invalid: {settings}")
    return settings


def _encoder(reader: Reader) -> EncoderRecord:
    given = _value(reader, "encoder", dict)
    try:
        encoder = EncoderRecord.read(given, reader.folder)
    except CheckpointError as error:
        raise reader.damaged(str(error)) from error
    if type(encoder.dimension) is not int or encoder.dimension < 1:
        raise reader.damaged(f"`encoder`: dimension is {encoder.dimension!r:.60}")
    return encoder


def _contents(reader: Reader, settings: IndexSettings, encoder: EncoderRecord | None) -> Contents:
    documents = reader.table("documents", DOCUMENTS)
    passages = reader.table("passages", PASSAGES)
    for name, table in (("documents", documents), ("passages", passages)):
        if len(table) != _value(reader, name, int):
            raise reader.damaged(
                f"`{name}` is {reader.settings[name]}, but the table has {len(table)} rows"
            )
    numbers = passages["document"].to_numpy()
    if len(numbers) and (
        numbers[0] < 0 or numbers[-1] >= len(documents) or (np.diff(numbers) < 0).any()
    ):
        raise reader.damaged("the passages name documents that are not there")
    embeddings = None
    if encoder:
        expected = expected_arrays(settings.storage, len(passages), encoder.dimension)
        arrays = {name: reader.array(name, *each) for name, each in expected.items()}
        embeddings = StoredEmbeddings(**arrays, measured=_value(reader, "measured", int))
    lexical = None
    if settings.mode != "dense" and len(passages):
        language = _value(reader, "language", str)
        lexical = reader.words(
            lambda folder, arrays: _words(folder, arrays, language, len(passages))
        )
    typical = _value(
        reader, "typical", list, lambda pair: len(pair) == 2 and all(map(_is_number, pair))
    )
    return Contents(documents, passages, embeddings, lexical, Typical(*typical))


def _words(folder: Path, arrays: Arrays, language: str, rows: int) -> LexicalIndex:
    """Load BM25's files, whose arrays are a sparse matrix of words and passages."""
    data, indices, indptr = (arrays[name] for name in ("data", "indices", "indptr"))
    fits = (
        len(data) == len(indices) == indptr[-1]
        and (np.diff(indptr, prepend=0) >= 0).all()
        and indices.min(initial=0) >= 0
        and indices.max(initial=0) < rows
    )
    lexical = LexicalIndex.load(folder, language)
    if not fits or len(lexical.scores("")) != rows:
        raise ValueError("the arrays do not fit together")
    return lexical


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
