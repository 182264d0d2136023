"""Batches of a Parquet file whose memory is in proportion to the file.

Parquet stores a repeated value once, so that a file of 1 kB may hold gigabytes. The metadata of the
row groups says how many values there are before any is decoded.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffcse_jax.documents.tables.values import listed

BATCH_ROWS = 128  # decoded at once
MOST_DECODED = 1 << 27  # bytes of a batch
LEVELS = 4  # bytes for each value of a list, which say where lists begin and end
# What a chunk of repeated values has, unlike others: a dictionary that is larger than writers make
# it by default, or bytes that were compressed more than this.
LARGE_DICTIONARY = (1 << 20) + (1 << 17)
COMPRESSED_MORE = 30
BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
BYTE_ARRAY = "BYTE_ARRAY"


def column_names(path: Path) -> tuple[list[str], str]:
    """Return the columns that can be read, and a note about others; the note may be empty.

    One row may hold all values that a list has in a row group. Where these are too many, the
    column is not read.
    """
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        large = _too_large(file.metadata, names)
    if not large:
        return names, ""
    limit = f"{MOST_DECODED >> 20} MB in a group of rows"
    return [name for name in names if name not in large], (
        f"not read, because their values take more than {limit}: {listed(large)}. To read them, "
        "write smaller row groups"
    )


def batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file. Strings that may be repeated are dictionaries."""
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
    strings = _leaves_of_strings(metadata, columns)
    with pq.ParquetFile(path, read_dictionary=strings, metadata=metadata) as file:
        yield from file.iter_batches(BATCH_ROWS, columns=[*columns])


def _too_large(metadata: pq.FileMetaData, names: Sequence[str]) -> dict[str, None]:
    """Return the columns whose values take too much memory beside those before them."""
    owners = _owners(metadata, names)
    large: dict[str, None] = {}
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        sizes = dict.fromkeys(names, 0)
        for leaf, name in owners.items():
            sizes[name] += _decoded(metadata.schema.column(leaf), chunks.column(leaf).num_values)
        total = 0
        for name, size in sizes.items():
            if total + size > MOST_DECODED:
                large.setdefault(name)
            else:
                total += size
    return large


def _decoded(leaf: pq.ColumnSchema, values: int) -> int:
    """Return how many bytes the values of a leaf take in a batch, if one row holds those of lists.

    Strings are read as dictionaries then, so that each takes a number.
    """
    width = BYTES.get(leaf.physical_type, 4 if leaf.physical_type == BYTE_ARRAY else leaf.length)
    if leaf.max_repetition_level:
        return (width + LEVELS) * values
    return width * min(values, BATCH_ROWS)


def _leaves_of_strings(metadata: pq.FileMetaData, names: Sequence[str]) -> list[int]:
    """Return the leaves whose strings are read as dictionaries: in lists, or if all may be large.

    Without need, it would take eight times as long.
    """
    schema = metadata.schema
    strings = [
        leaf for leaf in _owners(metadata, names) if schema.column(leaf).physical_type == BYTE_ARRAY
    ]
    if any(_may_be_large(metadata.row_group(g), strings) for g in range(metadata.num_row_groups)):
        return strings
    return [leaf for leaf in strings if schema.column(leaf).max_repetition_level]


def _may_be_large(group: pq.RowGroupMetaData, leaves: Sequence[int]) -> bool:
    """Return whether a batch of strings may take far more memory than they take in the file."""
    chunks = [group.column(leaf) for leaf in leaves]
    stored = sum(chunk.total_uncompressed_size for chunk in chunks)
    if BATCH_ROWS * stored <= MOST_DECODED:
        return False
    compressed = sum(chunk.total_compressed_size for chunk in chunks)
    return stored > COMPRESSED_MORE * compressed or any(map(_is_repeated, chunks))


def _is_repeated(chunk: pq.ColumnChunkMetaData) -> bool:
    """Return whether a batch of one column may be large, because its values are repeated."""
    size = chunk.total_uncompressed_size
    if BATCH_ROWS * size <= MOST_DECODED:
        return False
    is_compressed_more = size > COMPRESSED_MORE * chunk.total_compressed_size
    return is_compressed_more or _dictionary_size(chunk) > LARGE_DICTIONARY


def _dictionary_size(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the bytes of the page with the dictionary, compressed; 0 without one."""
    if not chunk.has_dictionary_page:
        return 0
    return chunk.data_page_offset - chunk.dictionary_page_offset


def _owners(metadata: pq.FileMetaData, names: Sequence[str]) -> Mapping[int, str]:
    """Return the column of each leaf, among some columns. The names may have points."""
    wanted = {*names}
    owners = {}
    for leaf in range(metadata.num_columns):
        parts = metadata.schema.column(leaf).path.split(".")
        prefix = ""
        for part in parts:
            prefix = f"{prefix}.{part}" if prefix else part
            if prefix in wanted:
                owners[leaf] = prefix
                break
    return owners
