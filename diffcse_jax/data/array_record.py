"""Read ArrayRecord data sets that tensorflow-datasets has prepared, without TensorFlow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcse_jax.data.readers import RowFile
from diffcse_jax.errors import DataError, require_extra

SPLIT = "train"
BLOCK_RECORDS = 10_000  # single records are read a hundred times slower


def open_prepared(folder: Path) -> tuple[RowFile, list[Path]]:
    """Open the texts of the `train` split of the one data set in or below a folder; also return its shards."""
    tfds = require_extra("tensorflow_datasets", "tfds")
    found = sorted(file.parent for file in folder.rglob("dataset_info.json"))
    if len(found) != 1:
        raise DataError(f"{folder}: {len(found)} data sets (dataset_info.json). Name the folder of one data set")
    try:
        builder = tfds.builder_from_directory(found[0])
        source, features = builder.as_data_source(SPLIT), builder.info.features
        shards = [Path(file) for file in builder.info.splits[SPLIT].filepaths]
    except Exception as error:  # the library raises many types
        raise DataError(f"{found[0]}: cannot read the split {SPLIT!r} as ArrayRecord: {error}") from error
    texts = tuple(name for name, feature in features.items() if isinstance(feature, tfds.features.Text))
    if not texts:
        raise DataError(f"{found[0]}: no column of text. It has: {', '.join(sorted(features))}")

    def entries(needed: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for start in range(0, len(source), BLOCK_RECORDS):
            try:
                block = source.__getitems__(range(start, min(start + BLOCK_RECORDS, len(source))))
            except Exception as error:
                raise DataError(f"{found[0]}: a record after number {start} is damaged: {error}") from error
            for number, example in enumerate(block, start + 1):
                yield number, {name: example[name].decode(errors="surrogateescape") for name in needed}

    return RowFile(folder, texts, entries), shards
