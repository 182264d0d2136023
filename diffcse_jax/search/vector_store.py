"""Parquet files of texts and embeddings, as `diffcse embed` writes them.

A folder of embeddings holds Parquet files and nothing else, because some readers of data sets take
every file of a folder. What `embed` needs to resume is in `NAME.state` next to it. The metadata of
each file names its encoder.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Int

from diffcse_jax.documents.document import Document
from diffcse_jax.documents.ids import IdsOfFiles
from diffcse_jax.documents.text.encodings import readable
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, warn_user
from diffcse_jax.hosts import log_line
from diffcse_jax.io import disk_errors, read_json_object
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.contents import (
    DOCUMENTS,
    PASSAGES,
    whole_numbers,
)
from diffcse_jax.search.embeddings import Vectors
from diffcse_jax.search.passages import Passage

TEXT, VECTOR = "sentence", "embedding"
# The other columns of a row. A text without a file has the name of the input.
ROWS = pa.schema(
    [
        ("document", pa.int64()),  # its number in the input, from 0
        ("id", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),  # or the row of a table, from 1; null if a file is one document
        ("column", pa.string()),  # of a table, if columns were named
        ("title", pa.string()),  # of the section
        (TEXT, pa.string()),
        ("start", pa.int64()),  # the place of the text in the document's text
        ("columns", pa.string()),  # the other columns of the document's row, as JSON
    ]
)

_METADATA = b"diffcse_jax"
_PART = re.compile(r"(.+)\.(\d{6})\.parquet")
_REMEDY = "Remove the file and run `diffcse embed` again"


@dataclasses.dataclass(frozen=True)
class EncoderRecord:
    """The identity of an encoder, and how to load it again."""

    model: str  # what `SentenceEncoder.from_pretrained` was given
    pooler: str
    precision: str
    dimension: int
    weights: str  # `SentenceEncoder.fingerprint()`
    prompt: str = ""  # in front of each text
    backend: str = "jax"  # that computed the embeddings

    @classmethod
    def read(cls, settings: Mapping[str, Any], source: Path) -> "EncoderRecord":
        """Return the record in the settings of a file; refuse one that lacks a part."""
        try:
            return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls)})
        except KeyError as error:
            raise CheckpointError(
                f"{source} does not name the encoder: {error} is missing"
            ) from error

    def require(self, encoder: "EncoderRecord", folder: Path | str) -> None:
        """Raise `ConfigError` if embeddings of another encoder cannot be compared with these."""
        if (encoder.weights, encoder.prompt) != (self.weights, self.prompt):
            raise ConfigError(
                f"{folder} holds embeddings of {self}, but the encoder is {encoder}. Use the "
                "encoder of the folder, or embed the text again into another folder"
            )

    def __str__(self) -> str:
        prompt = f", prompt {self.prompt!r}" if self.prompt else ""
        kind = f"{self.pooler}, {self.precision}, {self.dimension} dimensions, {self.backend}"
        return f"{self.model} ({kind}{prompt}, weights {self.weights[:8]})"


@dataclasses.dataclass(frozen=True)
class VectorStore:
    """A folder of Parquet files with texts and embeddings."""

    folder: Path
    parts: tuple[Path, ...]
    encoder: EncoderRecord

    def mapped(self) -> Vectors:
        """Copy the embeddings, scaled to length 1, to a temporary file, and map it into memory."""
        place = Path("a temporary file in TMPDIR or /tmp")
        rows = 0
        with (
            disk_errors(place, safe="Nothing was changed.", instead="set TMPDIR"),
            tempfile.TemporaryFile() as file,
        ):
            for part in self.parts:
                vectors = _vectors(part)
                file.write(normalize(vectors).data)
                rows += len(vectors)
            shape = (rows, self.encoder.dimension)
            if not rows:
                return np.zeros(shape, np.float32)
            return np.memmap(file, np.float32, "r", shape=shape)

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Return the texts as the documents and the passages of an index; see `search.contents`."""
        tables = [ROWS.empty_table()]
        inputs = [np.zeros(0, np.int64)]
        names = [_PART.sub(r"\1", part.name) for part in self.parts]
        for part, name in zip(self.parts, names, strict=True):
            tables.append(_rows(part))
            inputs.append(np.full(len(tables[-1]), names.index(name)))
        rows = pa.concat_tables(tables)
        numbers = np.stack([np.concatenate(inputs), whole_numbers(rows["document"])])
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (np.diff(numbers) != 0).any(axis=0)
        return _documents(rows, is_first), _passages(rows, np.cumsum(is_first) - 1)


def _rows(part: Path) -> pa.Table:
    """Read the texts of a Parquet file."""
    table = _read(part, ROWS.names).replace_schema_metadata(None)
    optional = ("line", "column")
    for name in ROWS.names:
        if table[name].null_count and name not in optional:
            row = table[name].is_null().index(True).as_py() + 1
            raise DataError(f"{part}, row {row}: the {name} is missing. {_REMEDY}")
    return table


def _documents(rows: pa.Table, is_first: Bool[np.ndarray, " rows"]) -> pa.Table:
    """Return the documents of rows, of which some are the first ones of a document."""
    digests: list[Any] = []
    texts = (rows[name].to_pylist() for name in ("title", TEXT))
    for title, text, begins in zip(*texts, is_first.tolist(), strict=True):
        if begins:
            digests.append(hashlib.blake2b(digest_size=16))
        digests[-1].update(json.dumps([title, text]).encode())
    firsts = rows.filter(pa.array(is_first))
    columns = {name: firsts[name].cast(pa.large_string()) for name in ("file", "columns")}
    ids = IdsOfFiles()
    owned = map(ids.of, firsts["id"].to_pylist(), firsts["file"].to_pylist())
    columns["id"] = pa.array(owned, pa.large_string())
    if note := ids.note():
        log_line(f"notice: {note}")
    columns["row"] = firsts["line"].fill_null(0)
    columns["source"] = pa.array(np.zeros(len(firsts), np.int32))
    columns["digest"] = pa.array([each.digest() for each in digests], pa.binary(16))
    return pa.table({name: columns[name] for name in DOCUMENTS.names}, schema=DOCUMENTS)


def _passages(rows: pa.Table, documents: Int[np.ndarray, " rows"]) -> pa.Table:
    title, text = (rows[name].cast(pa.large_string()) for name in ("title", TEXT))
    return pa.table([pa.array(documents), title, text, rows["start"]], schema=PASSAGES)


def rows_table(rows: Sequence[tuple[Document, Passage]]) -> pa.Table:
    """Return passages with their documents, as a Parquet file holds them."""
    return pa.Table.from_pylist([row_of(*each) for each in rows], schema=ROWS)


def row_of(document: Document, passage: Passage) -> dict[str, Any]:
    """Return a passage with its document as a row of `ROWS`."""
    return {
        "document": passage.document,
        "id": readable(document.id),
        "file": readable(document.place.file),
        "line": document.place.row or None,
        "column": passage.column or None,
        "title": passage.title,
        TEXT: passage.text,
        "start": passage.start,
        "columns": document.columns,
    }


def vector_table(
    rows: pa.Table, vectors: Float[np.ndarray, "rows dimension"], settings: Mapping[str, Any]
) -> pa.Table:
    """Return rows and their embeddings as a Parquet file holds them.

    The metadata holds the settings: an `EncoderRecord` as a dict, and whether embeddings are
        normalised (`normalize`).
    """
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    table = rows.append_column(VECTOR, embedding)
    return table.replace_schema_metadata({_METADATA: json.dumps(dict(settings))})


def state_of(folder: Path) -> Path:
    """Return the folder with what `embed` needs to resume, on the same disk as the embeddings."""
    real = folder.resolve()
    return real.with_name(f"{real.name}.state")


def input_state(folder: Path, source: str) -> Path:
    """Return the state file of an input: its SHA-256, and the names of its Parquet files."""
    return state_of(folder) / f"{Path(source).name}.json"


def find_parts(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, without the `.` and `_` files of other programs."""
    return [
        part
        for part in sorted(folder.glob("*.parquet"))
        if part.name[0] not in "._" or input_state(folder, part.name.rsplit(".", 2)[0]).is_file()
    ]


def holds_embeddings(folder: Path) -> bool:
    """Return whether a folder has a Parquet file of ours, without those that cannot be read."""
    return any(map(_may_be_own, find_parts(folder)))


def find_store(path: Path) -> VectorStore | None:
    """Open a folder of embeddings; return None if there are none.

    Parquet files of others may have a column of the same name. They lack the metadata, and are
    text. If no file is ours, those that cannot be read are left to the reader of text, which names
    them.
    """
    if path.suffix == ".parquet" and path.is_file() and _may_be_own(path):
        raise DataError(f"{path} is a part of the embeddings in {path.parent}. Give the folder")
    is_begun = path.is_dir() and state_of(path).is_dir()
    if not (is_begun or holds_embeddings(path)):
        return None
    parts = [part for part in find_parts(path) if VECTOR in _schema(part).names]
    if not any(map(_is_own, parts)):
        raise DataError(f"{path} holds no embeddings yet. Let `diffcse embed` write some first")
    _check_complete(path, {part.name for part in parts})
    encoder = _encoder_of(parts[0])
    for part in parts[1:]:
        _encoder_of(part).require(encoder, part)
    return VectorStore(path, tuple(parts), encoder)


def _check_complete(folder: Path, names: set[str]) -> None:
    """Raise `DataError` if Parquet files are missing, and warn of inputs that are not finished."""
    numbered = filter(None, map(_PART.fullmatch, sorted(names)))
    expected = [f"{part[1]}.{int(part[2]) - 1:06d}.parquet" for part in numbered if int(part[2])]
    unfinished = []
    for state in sorted(state_of(folder).glob("*.json")):
        parts = None
        with contextlib.suppress(CheckpointError):  # `embed` says how to repair it
            parts = read_json_object(state).get("parts")
        if isinstance(parts, list):
            expected += map(str, parts)
        else:
            unfinished.append(state.stem)
    if missing := next((name for name in expected if name not in names), None):
        raise DataError(
            f"{folder / missing} is missing. Run the same `diffcse embed` command again to restore "
            "it"
        )
    if unfinished:
        warn_user(
            f"{folder} is incomplete: `diffcse embed` has not finished {len(unfinished)} of its "
            f"inputs, for example {unfinished[0]}. Run the same `diffcse embed` command again to "
            "complete it"
        )


def _encoder_of(part: Path) -> EncoderRecord:
    schema = _schema(part)
    encoder = EncoderRecord.read(read_settings(part), part)
    types = [pa.list_(number, encoder.dimension) for number in (pa.float32(), pa.float16())]
    fits = all(
        name in schema.names and schema.field(name).type == ROWS.field(name).type
        for name in ROWS.names
    )
    if not fits or schema.field(VECTOR).type not in types:
        raise DataError(
            f"{part} was not written by this version of `diffcse embed`: it needs the columns "
            f"{', '.join(ROWS.names)} and {VECTOR} (lists of {encoder.dimension} numbers, float32 "
            f"or float16), and has: {schema.to_string(show_schema_metadata=False)}"
        )
    return encoder


def read_settings(part: Path) -> Mapping[str, Any]:
    """Return what the metadata of a Parquet file says about its encoder; it may be empty."""
    with contextlib.suppress(ValueError, RecursionError):
        settings = json.loads((_schema(part).metadata or {}).get(_METADATA, b"{}"))
        if isinstance(settings, dict):
            return settings
    raise DataError(f"{part}: its metadata is damaged. {_REMEDY}")


def _is_own(part: Path) -> bool:
    """Return whether a Parquet file has the metadata of ours."""
    return _METADATA in (_schema(part).metadata or {})


def _may_be_own(part: Path) -> bool:
    """Return whether a file is ours; False if it is of another kind, or damaged."""
    with contextlib.suppress(DataError):
        return _is_own(part)
    return False


def _vectors(part: Path) -> Float[np.ndarray, "rows dimension"]:
    lists = _read(part, [VECTOR])[VECTOR].combine_chunks()
    vectors = lists.values.to_numpy(zero_copy_only=False).reshape(len(lists), lists.type.list_size)
    usable = np.isfinite(vectors).all(axis=1) & lists.is_valid().to_numpy(zero_copy_only=False)
    if not usable.all():
        row = int(usable.argmin()) + 1
        raise DataError(f"{part}, row {row}: the embedding is missing, NaN or infinite. {_REMEDY}")
    return vectors


def _schema(part: Path) -> pa.Schema:
    return _opened(part, lambda file: file.schema_arrow)


def _read(part: Path, columns: list[str]) -> pa.Table:
    return _opened(part, lambda file: file.read(columns))


def _opened(part: Path, read: Callable[[pq.ParquetFile], Any]) -> Any:
    """Read from a Parquet file whose pages are compared with their checksums."""
    try:
        return read(pq.ParquetFile(part, page_checksum_verification=True))
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{part} cannot be read ({error}). {_REMEDY}") from error
