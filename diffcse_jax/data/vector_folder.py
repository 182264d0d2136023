"""Parquet files of sentences and their vectors, as `diffcse embed` and `diffcse encode` write them.

A folder of vectors holds its Parquet files and nothing else, since some readers of data sets take all files of a
folder. What `embed` needs to go on after a crash is beside it, in a folder of its name with `.state`. Each file tells
in its metadata which encoder wrote it.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from diffcse_jax.data.parquet_files import UNREADABLE
from diffcse_jax.errors import DataError
from diffcse_jax.io import expand_path, read_json_object, sha256
from diffcse_jax.storage.encoder_record import EncoderRecord

TEXT, VECTOR = "sentence", "embedding"  # columns
SETTINGS_FILE = "settings.json"  # in the folder of the state
OLD_SETTINGS_FILE = "_embed.json"  # in the folder of vectors itself, as earlier versions left it
BLOCK_ROWS = 10_000

_METADATA = b"diffcse_jax"
_PART = re.compile(r"(.+)\.\d{6}\.parquet")


@dataclasses.dataclass(frozen=True)
class VectorStore:
    """Parquet files with sentences and their vectors.

    Attributes:
        folder: their folder, or the one file.
        parts: the files.
        dtype: of the numbers, float16 or float32.
        dimension: numbers of a vector.
        counts: of every file its rows.
        settings: of every file what it tells of the encoder that wrote it; empty if nothing.
    """

    folder: Path
    parts: tuple[Path, ...]
    dtype: np.dtype
    dimension: int
    counts: tuple[int, ...]
    settings: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return sum(self.counts)

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the content, as hexadecimal digits; reads all of it."""
        return sha256(self.parts)

    @property
    def unit(self) -> bool:
        """True if the vectors have length 1; halves of numbers are too coarse for that."""
        return self.dtype == np.float32 and all(settings.get("normalize") for settings in self.settings)

    def record(self) -> EncoderRecord:
        """The encoder that wrote the vectors.

        Raises:
            CheckpointError: the files do not tell it.
            DataError: they are of different encoders.
        """
        earlier: Mapping[str, Any] = {}
        for path in (state_of(self.folder) / SETTINGS_FILE, self.folder / OLD_SETTINGS_FILE):
            if path.is_file():
                earlier = read_json_object(path)
        records = [
            EncoderRecord.read(settings or earlier, part)
            for part, settings in zip(self.parts, self.settings, strict=True)
        ]
        for part, record in zip(self.parts, records, strict=True):
            if record.weights != records[0].weights:
                raise DataError(
                    f"{part} holds vectors of {record.model}, {self.parts[0].name} those of another encoder, "
                    f"{records[0].model}: embed the text again into a folder of its own"
                )
        return records[0]

    def blocks(self) -> Iterator[tuple[list[str], Float[np.ndarray, "rows dimension"]]]:
        """Sentences and their vectors, some thousand at a time.

        Raises:
            DataError: a file that cannot be read, or a row that lacks its sentence or has a vector that is not finite.
        """
        for batch, vectors in self._blocks([TEXT, VECTOR]):
            yield batch.column(TEXT).to_pylist(), vectors

    def vector_blocks(self) -> Iterator[Float[np.ndarray, "rows dimension"]]:
        """The vectors alone, some thousand at a time; raises like `blocks`."""
        return (vectors for _, vectors in self._blocks([VECTOR]))

    def texts(self) -> Iterator[pa.Table]:
        """The sentences and what else is known of them, file by file."""
        for index in range(len(self.parts)):
            yield self._texts_of(index)

    def rows(self, numbers: Int[np.ndarray, " rows"]) -> list[dict[str, Any]]:
        """The sentences of these rows, from 0 over all files, and what else is known of them.

        Raises:
            DataError: a file that cannot be read.
        """
        starts = np.cumsum((0, *self.counts))
        parts = np.searchsorted(starts, numbers, side="right") - 1
        found: dict[int, dict[str, Any]] = {}
        for part in np.unique(parts):
            mine = np.unique(numbers[parts == part])
            taken = self._texts_of(int(part)).take(pa.array(mine - starts[part]))
            found |= zip(mine.tolist(), taken.to_pylist(), strict=True)
        return [found[number] for number in numbers.tolist()]

    def _texts_of(self, index: int) -> pa.Table:
        part = self.parts[index]
        try:
            file = pq.ParquetFile(part)
            table = file.read([name for name in file.schema_arrow.names if name != VECTOR])
        except UNREADABLE as error:
            raise _unreadable(part, error) from error
        source = _PART.fullmatch(part.name)
        names = pa.array([source[1] if source else part.name]).take(pa.array(np.zeros(len(table), np.int64)))
        return table.replace_schema_metadata(None).append_column("file", names)

    def _blocks(self, columns: Sequence[str]) -> Iterator[tuple[pa.RecordBatch, Float[np.ndarray, "rows dimension"]]]:
        for part in self.parts:
            rows = 0
            for batch in _batches(part, columns):
                vectors = batch.column(VECTOR)
                numbers = vectors.values.to_numpy(zero_copy_only=False).reshape(-1, self.dimension)
                numbers = numbers[vectors.offset : vectors.offset + len(vectors)]
                usable = np.isfinite(numbers).all(axis=1)
                for column in batch.columns:
                    usable &= column.is_valid().to_numpy(zero_copy_only=False)
                if not usable.all():
                    raise DataError(
                        f"{part}, row {rows + int(usable.argmin()) + 1}: no sentence, or a vector that is not finite; "
                        "remove the file and run `diffcse embed` again"
                    )
                rows += len(batch)
                yield batch, numbers


def state_of(folder: Path) -> Path:
    """The folder of what `embed` needs to go on with a folder of vectors, on the same disk."""
    real = folder.resolve()
    return real.with_name(f"{real.name}.state")


def find_store(name: str) -> VectorStore | None:
    """The store of this name: a folder with Parquet files, or one that holds vectors; None if it is neither.

    Raises:
        DataError: files that are not as `diffcse embed` writes them, or not all of one kind; or none yet.
    """
    folder = expand_path(name)
    if folder.is_file():
        holds_vectors = folder.suffix == ".parquet" and VECTOR in _metadata(folder).schema.to_arrow_schema().names
        parts = [folder] * holds_vectors
    else:
        parts = [part for part in sorted(folder.glob("*.parquet")) if not part.name.startswith(("_", "."))]
    begun = (folder / OLD_SETTINGS_FILE).is_file() or (folder.is_dir() and (state_of(folder) / SETTINGS_FILE).is_file())
    if not parts and begun:
        raise DataError(f"{folder} holds no vectors yet; let `diffcse embed` write them first")
    if not parts:
        return None
    if missing := _missing_part(folder, parts):
        raise DataError(f"{folder / missing} is missing. Run `diffcse embed` again to restore it")
    files = [_metadata(part) for part in parts]
    kinds = [_kind_of_vectors(part, file.schema.to_arrow_schema()) for part, file in zip(parts, files, strict=True)]
    for part, kind in zip(parts, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(f"{part}: vectors of {kind}, and {kinds[0]} in {parts[0].name}: a store is of one encoder")
    return VectorStore(
        folder,
        tuple(parts),
        np.dtype(kinds[0].value_type.to_pandas_dtype()),
        kinds[0].list_size,
        tuple(file.num_rows for file in files),
        tuple(_settings_of(part, file) for part, file in zip(parts, files, strict=True)),
    )


def _missing_part(folder: Path, parts: Sequence[Path]) -> str:
    """Return the name of a file that `embed` has written and that is gone, or an empty string."""
    names = {part.name for part in parts}
    for name in names:
        if match := _PART.fullmatch(name):
            earlier = (f"{match[1]}.{index:06d}.parquet" for index in range(int(name.split(".")[-2])))
            if gone := next((each for each in earlier if each not in names), ""):
                return gone
    if folder.is_dir():
        for record in sorted((state_of(folder) / "inputs").glob("*.done")):
            with contextlib.suppress(OSError, ValueError, TypeError):  # `embed` writes a damaged record again
                if gone := next((each for each in json.loads(record.read_bytes()) if each not in names), ""):
                    return str(gone)
    return ""


def vector_table(
    texts: pa.Table, vectors: Float[np.ndarray, "rows dimension"], settings: Mapping[str, Any]
) -> pa.Table:
    """Sentences and what else is known of them with their vectors, as a Parquet file holds them.

    Args:
        texts: has the column `sentence`.
        vectors: one for every row.
        settings: what the file tells of the encoder: an `EncoderRecord` and, if vectors have length 1, `normalize`.
    """
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    table = texts.append_column(VECTOR, embedding)
    return table.replace_schema_metadata({_METADATA: json.dumps(dict(settings))})


def _kind_of_vectors(part: Path, schema: pa.Schema) -> Any:
    """The Arrow type of the column of vectors."""
    kind = schema.field(VECTOR).type if {TEXT, VECTOR} <= {*schema.names} else None
    if not (kind and pa.types.is_fixed_size_list(kind) and kind.value_type in (pa.float16(), pa.float32())):
        raise DataError(
            f"{part}: not as `diffcse embed` writes it, with columns {TEXT} (text) and {VECTOR} "
            f"(lists of one size, of float32 or float16); it has: {', '.join(schema.names)}"
        )
    return kind


def _settings_of(part: Path, file: pq.FileMetaData) -> Mapping[str, Any]:
    try:
        settings = json.loads((file.metadata or {}).get(_METADATA, b"{}"))
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise DataError(f"{part}: what it tells of its encoder is damaged; remove it and run `diffcse embed` again")
    return settings


def _metadata(part: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(part)
    except UNREADABLE as error:
        raise _unreadable(part, error) from error


def _batches(part: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    try:
        file = pq.ParquetFile(part, page_checksum_verification=True)
        yield from file.iter_batches(BLOCK_ROWS, columns=columns)
    except UNREADABLE as error:
        raise _unreadable(part, error) from error


def _unreadable(part: Path, error: Exception) -> DataError:
    return DataError(f"{part}: cannot be read ({error}); remove it and run `diffcse embed` again")
