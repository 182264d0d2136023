"""Parquet files of texts and embeddings, as `diffcse embed` and `diffcse encode` write them.

A folder of embeddings holds Parquet files and nothing else, because some readers of data sets take every file of a
folder. What `embed` needs to resume is in the folder `NAME.state` next to it. The metadata of each file names its
encoder.
"""

import contextlib
import dataclasses
import json
import re
import tempfile
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float

from diffcse_jax.errors import CheckpointError, ConfigError, DataError
from diffcse_jax.io import disk_errors, expand_path, read_json_object
from diffcse_jax.models.pooling import normalize
from diffcse_jax.search.array_store import BLOCK_ROWS, Vectors
from diffcse_jax.search.records import FILE, TEXT

VECTOR = "embedding"
SETTINGS_FILE = "settings.json"  # in the state folder

_METADATA = b"diffcse_jax"
_PART = re.compile(r"(.+)\.(\d{6})\.parquet")


@dataclasses.dataclass(frozen=True)
class EncoderRecord:
    """The identity of an encoder, and how to load it again."""

    model: str  # what `SentenceEncoder.from_pretrained` was given
    pooler: str
    precision: str
    dimension: int
    weights: str  # `SentenceEncoder.fingerprint()`
    prompt: str = ""  # in front of each text

    @classmethod
    def read(cls, settings: Mapping[str, Any], source: Path) -> "EncoderRecord":
        """Return the record in the settings of a file; raise `CheckpointError` if a part of it is missing."""
        for name, kind in typing.get_type_hints(cls).items():
            if type(settings.get(name, getattr(cls, name, None))) is not kind:
                raise CheckpointError(f"{source} does not name the encoder of its embeddings: {name!r} is missing")
        return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls) if field.name in settings})

    def require(self, encoder: "EncoderRecord", folder: Path | str) -> None:
        """Raise `ConfigError` if embeddings of another encoder cannot be compared with the stored ones."""
        if (encoder.weights, encoder.prompt) == (self.weights, self.prompt):
            return
        differences = [
            f"{name} {getattr(self, name)} there, {getattr(encoder, name)} here"
            for name in ("pooler", "precision", "dimension", "prompt")
            if getattr(self, name) != getattr(encoder, name)
        ]
        raise ConfigError(
            f"{folder} holds embeddings of {self.model}, but the encoder is {encoder.model}: "
            f"{', '.join(differences) or 'their weights differ'}. Use the encoder of the folder, or embed the text "
            "again into another folder"
        )


@dataclasses.dataclass(frozen=True)
class VectorStore:
    """Parquet files with texts and embeddings."""

    folder: Path  # or the only file
    parts: tuple[Path, ...]
    dtype: np.dtype  # float16 or float32
    dimension: int
    counts: tuple[int, ...]  # rows of each file
    settings: tuple[Mapping[str, Any], ...]  # what the metadata of each file says about its encoder
    unfinished: tuple[str, ...] = ()  # inputs that `embed` has begun but not finished

    def __len__(self) -> int:
        return sum(self.counts)

    def record(self) -> EncoderRecord:
        """Return the encoder of the embeddings; raise a `UserError` if a file does not name it or names another."""
        records = [EncoderRecord.read(*each) for each in zip(self.settings, self.parts, strict=True)]
        for part, record in zip(self.parts, records, strict=True):
            if (record.weights, record.prompt) != (records[0].weights, records[0].prompt):
                raise DataError(
                    f"{part} holds embeddings of {record.model}, but {self.parts[0].name} has another encoder, "
                    f"{records[0].model}, or another prompt. Embed the text again into a folder of its own"
                )
        return records[0]

    def blocks(self) -> Iterator[Float[np.ndarray, "rows dimension"]]:
        """Yield the embeddings, some thousand at a time."""
        for part in self.parts:
            rows = 0
            with _reading(part):
                file = pq.ParquetFile(part, page_checksum_verification=True)
                for batch in file.iter_batches(BLOCK_ROWS, columns=[VECTOR]):
                    vectors = batch.column(VECTOR)
                    numbers = vectors.values.to_numpy(zero_copy_only=False).reshape(-1, self.dimension)
                    numbers = numbers[vectors.offset : vectors.offset + len(vectors)]
                    usable = np.isfinite(numbers).all(axis=1) & vectors.is_valid().to_numpy(zero_copy_only=False)
                    if not usable.all():
                        raise DataError(
                            f"{part}, row {rows + int(usable.argmin()) + 1}: the embedding is missing, NaN or "
                            "infinite. Remove the file and run `diffcse embed` again"
                        )
                    rows += len(batch)
                    yield numbers

    def unit_blocks(self) -> Iterator[Vectors]:
        """Yield the embeddings, some thousand at a time, scaled to length 1."""
        is_unit = self.dtype == np.float32 and all(settings.get("normalize") for settings in self.settings)
        return (vectors if is_unit else normalize(vectors) for vectors in self.blocks())

    def mapped(self) -> Vectors:
        """Copy the embeddings, scaled to length 1, to a temporary file, and map it into memory."""
        shape, place = (len(self), self.dimension), Path("a temporary file in TMPDIR or /tmp")
        with disk_errors(place, safe="Nothing was changed.", instead="set TMPDIR"), tempfile.TemporaryFile() as file:
            for block in self.unit_blocks():
                file.write(np.ascontiguousarray(block).data)
            return np.memmap(file, np.float32, "r", shape=shape) if len(self) else np.zeros(shape, np.float32)

    def texts(self) -> pa.Table:
        """Return the texts and their other columns; those that a file does not have are null in its rows."""
        with _reading(self.folder):
            return pa.concat_tables([self._texts_of(part) for part in self.parts], promote_options="permissive")

    def _texts_of(self, part: Path) -> pa.Table:
        with _reading(part):
            file = pq.ParquetFile(part, page_checksum_verification=True)
            table = file.read([name for name in file.schema_arrow.names if name != VECTOR])
        table = table.replace_schema_metadata(None)
        if FILE in table.column_names:  # of documents in a folder
            return table
        source = _PART.fullmatch(part.name)
        return table.append_column(FILE, pa.repeat(source[1] if source else part.name, len(table)))


def state_of(folder: Path) -> Path:
    """Return the folder with what `embed` needs to resume, on the same disk as the folder of embeddings."""
    real = folder.resolve()
    return real.with_name(f"{real.name}.state")


def input_record(folder: Path, name: str) -> Path:
    """Return the state file of one input: its size and SHA-256, and its Parquet files once all are written."""
    return state_of(folder) / "inputs" / f"{name}.json"


def find_store(name: str) -> VectorStore | None:
    """Open a folder of embeddings or one Parquet file of them; return None if it is neither."""
    folder = expand_path(name)
    if folder.is_file():
        holds_vectors = folder.suffix == ".parquet" and VECTOR in _metadata(folder).schema.to_arrow_schema().names
        parts = [folder] * holds_vectors
    else:
        parts = [part for part in sorted(folder.glob("*.parquet")) if not part.name.startswith(("_", "."))]
        if not parts and folder.is_dir() and (state_of(folder) / SETTINGS_FILE).is_file():
            raise DataError(f"{folder} holds no embeddings yet. Let `diffcse embed` write some first")
    if not parts:
        return None
    unfinished = _check_parts(folder, {part.name for part in parts})
    files, kinds = [_metadata(part) for part in parts], []
    for part, file in zip(parts, files, strict=True):
        schema = file.schema.to_arrow_schema()
        kind = schema.field(VECTOR).type if {TEXT, VECTOR} <= {*schema.names} else None
        if not (kind and pa.types.is_fixed_size_list(kind) and kind.value_type in (pa.float16(), pa.float32())):
            raise DataError(
                f"{part} was not written by `diffcse embed`: it needs the columns {TEXT} (text) and {VECTOR} (lists of "
                f"one size, float32 or float16), and has: {', '.join(schema.names)}"
            )
        kinds.append(kind)
        if kind != kinds[0]:
            raise DataError(
                f"{part} holds embeddings of type {kind}, but {parts[0].name} has {kinds[0]}. Keep the embeddings of "
                "each encoder in a folder of their own"
            )
    counts, settings = tuple(file.num_rows for file in files), tuple(map(read_settings, parts, files))
    dtype = np.dtype(kinds[0].value_type.to_pandas_dtype())
    return VectorStore(folder, tuple(parts), dtype, kinds[0].list_size, counts, settings, unfinished)


def _check_parts(folder: Path, names: set[str]) -> tuple[str, ...]:
    """Compare the files with `embed`'s records, and return the inputs that are not finished."""
    numbered = filter(None, map(_PART.fullmatch, sorted(names)))
    expected = [f"{part[1]}.{int(part[2]) - 1:06d}.parquet" for part in numbered if int(part[2])]
    settings, unfinished = state_of(folder) / SETTINGS_FILE, []
    for source in read_json_object(settings).get("inputs", []) if settings.is_file() else []:
        written = None
        with contextlib.suppress(CheckpointError):  # it does not exist yet
            written = read_json_object(input_record(folder, source)).get("parts")
        expected += written or []
        unfinished += [source] * (written is None)
    if missing := next((name for name in expected if name not in names), None):
        raise DataError(f"{folder / missing} is missing. Run the same `diffcse embed` command again to restore it")
    return tuple(unfinished)


def vector_table(
    texts: pa.Table, vectors: Float[np.ndarray, "rows dimension"], settings: Mapping[str, Any]
) -> pa.Table:
    """Return texts and embeddings as a Parquet file holds them.

    The metadata holds the settings: an `EncoderRecord` as a dict, and whether embeddings are normalised (`normalize`).
    """
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    table = texts.append_column(VECTOR, embedding)
    return table.replace_schema_metadata({_METADATA: json.dumps(dict(settings))})


def read_settings(part: Path, file: pq.FileMetaData | None = None) -> Mapping[str, Any]:
    """Return what the metadata of a Parquet file says about its encoder; empty if it says nothing."""
    with contextlib.suppress(ValueError, RecursionError):
        settings = json.loads(((file or _metadata(part)).metadata or {}).get(_METADATA, b"{}"))
        if isinstance(settings, dict):
            return settings
    raise DataError(f"{part}: its metadata is damaged. Remove the file and run `diffcse embed` again")


def _metadata(part: Path) -> pq.FileMetaData:
    with _reading(part):
        return pq.read_metadata(part)


@contextlib.contextmanager
def _reading(part: Path) -> Iterator[None]:
    """Raise an error that names the file if Arrow cannot read it."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{part} cannot be read ({error}). Remove it and run `diffcse embed` again") from error
